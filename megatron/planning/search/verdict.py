"""What became of a layout that was asked for: the fastest of its form, or why there is none."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.planning.search.choices import (
    DIMENSIONS,
    Choices,
    Wanted,
    narrowed,
    parse_choices,
    write_choices,
    write_value,
)
from megatron.planning.search.judging import GIB, Judge, Judged
from megatron.planning.search.space import Rejections
from megatron.planning.search.tables import first_problem
from megatron.planning.search.tree import Found, search

_SIZES = ("tp", "pp", "chunks", "schedule", "mbs")


@dataclass(frozen=True)
class Asked:
    """A form of layouts, such as tp=4,pp=16.

    text    as it was written; wanted: what it names
    judge   of its layouts alone; everything: of all that are allowed
    """

    text: str
    wanted: Wanted
    judge: Judge
    everything: Judge


@dataclass(frozen=True)
class Verdict:
    """On one form.

    found   of the search among its layouts alone
    judged  the fastest of them; None where there is none, or none that fits
    left    (dimension, value) that the form left open, as the search filled it in
    reasons why it is rejected: (how many of what, reason, example)
    """

    asked: Asked
    found: Found
    judged: Judged | None
    left: tuple[tuple[str, str], ...] = ()
    reasons: tuple[tuple[str, str, str], ...] = ()

    def lines(self) -> list[str]:
        """In words: what was left open, or why it is rejected."""
        if self.judged is not None:
            words = ", ".join(f"{name}={value}" for name, value in self.left)
            return [f"{self.asked.text}: left open, and chosen here as fastest: {words}"] if words else []
        told = (f"{many}: {why}" + (f" ({first_problem(example)})" if example else "")
                for many, why, example in self.reasons)  # fmt: skip
        return [f"{self.asked.text}: rejected", *told]


def asked(judge: Judge, text: str) -> Asked:
    """A form of layouts within what --fix and flags allow. Raises ConfigError for one that cannot be read, and where
    they leave nothing of it."""
    wanted = parse_choices(text, "--layout")
    if "recompute" in wanted:  # full means here what --recompute-granularity full means in a run
        wanted["recompute"] = tuple("full:uniform:1" if v == "full" else v for v in wanted["recompute"])
    return Asked(text, wanted, _within(judge, wanted, text), judge)


def _within(judge: Judge, wanted: Wanted, text: str) -> Judge:
    both = narrowed(judge.space.wanted, wanted)
    for name, values in both.items():
        if not values:
            allowed = ", ".join(map(write_value, judge.space.wanted[name]))
            given = ", ".join(map(write_value, wanted[name]))
            raise ConfigError(f"--layout {text}: {name}={given} is not among the allowed: {name}={allowed}")
    each = judge.space.cluster.devices_per_node
    worlds = tuple(each * n for n in wanted["nodes"]) if "nodes" in wanted else judge.space.worlds
    batches = tuple(both.get("gbs", judge.space.batches))
    return dataclasses.replace(judge, space=dataclasses.replace(
        judge.space, wanted=both, worlds=worlds, batches=batches
    ))  # fmt: skip


def verdict(form: Asked, processes: int = 1) -> Verdict:
    """Estimate the layouts of a form and nothing else."""
    found = search(form.judge, 1, processes)
    if found.best:
        space, judged = form.judge.space, found.best[0]
        single = {"nodes": len(space.worlds), "gbs": len(space.batches)}
        values = ((d.names[0], d.value(judged.choices, space.cluster)) for d in DIMENSIONS)
        left = tuple(
            (name, write_value(value)) for name, value in values
            if value not in form.wanted.get(name, ()) and value not in ("", ()) and single.get(name) != 1
        )
        return Verdict(form, found, judged, left)
    examples = found.rejections.examples
    reasons = tuple(
        (f"{count:,} {unit}", reason, examples[unit, reason])
        for (unit, reason), count in found.rejections.counts.most_common()
    )
    if not found.counts["shapes"]:
        reasons += tuple(_alone(form, {reason for _, reason, _ in reasons}))
    return Verdict(form, found, None, reasons=reasons)


def _alone(form: Asked, known: set[str]) -> Iterator[tuple[str, str, str]]:
    """Why a size cannot be with anything else: the first size that cannot be hides those behind it."""
    for name in [name for name in _SIZES if name in form.wanted]:
        rejections = Rejections()
        space = _within(form.everything, {name: form.wanted[name]}, form.text).space
        if next(space.shapes(rejections), None) is None:
            values = ",".join(map(write_value, form.wanted[name]))
            (unit, reason), _ = rejections.counts.most_common(1)[0]  # others may be of other sizes
            if reason not in known:
                known.add(reason)
                yield f"{name}={values} with anything else", reason, rejections.examples[unit, reason]


def explained(given: Verdict) -> tuple[Choices, str] | None:
    """(the layout whose arithmetic is shown, a line that says what it is), also of one that does not fit; None where
    there is no such layout."""
    judge, note = given.asked.judge, ""
    best = given.judged
    if best is None:
        any_size = search(dataclasses.replace(judge, capacity=float("inf")), top=1).best
        if not any_size:
            return None
        best, note = any_size[0], f", which needs more than the {judge.capacity / GIB:.1f} GiB that a layout may use"
    return best.choices, f"{write_choices(best.choices, judge.space.cluster)}{note}"
