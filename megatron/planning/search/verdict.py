"""What became of a layout that was asked for: its place among the best, and what makes it slower, or why it is not."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
from megatron.planning.search.outcome import estimates_of
from megatron.planning.search.space import Rejections
from megatron.planning.search.tables import first_problem
from megatron.planning.search.tree import Found, search
from megatron.planning.table import Table
from megatron.planning.timing import PARTS

_SIZES = ("tp", "pp", "chunks", "schedule", "mbs")


@dataclass(frozen=True)
class Verdict:
    """On one layout of the form tp=4,pp=16.

    text    what was asked for; left: (dimension, value) that it left open, as the search filled it in
    judged  the best layout of that form; None where there is none, or none that fits
    place   among the best layouts, from 1; None behind them
    reasons why other layouts of that form, or all, cannot be: (how many of what, reason, example)
    """

    text: str
    judged: Judged | None
    left: tuple[tuple[str, str], ...]
    place: int | None
    reasons: tuple[tuple[str, str, str], ...]


def asked_space(judge: Judge, wanted: Mapping[str, tuple[Any, ...]], flag: str, text: str) -> Judge:
    """The judge of the layouts of the form `wanted` within what --fix and flags allow. Raises ConfigError where that is
    nothing."""
    both = narrowed(judge.space.wanted, wanted)
    for name, values in both.items():
        if not values:
            allowed = ", ".join(map(write_value, judge.space.wanted[name]))
            asked = ", ".join(map(write_value, wanted[name]))
            raise ConfigError(f"{flag} {text}: {name}={asked} is not among what the search was given: {name}={allowed}")
    nodes = wanted.get("nodes")
    each = judge.space.cluster.devices_per_node
    worlds = judge.space.worlds if nodes is None else tuple(each * n for n in nodes)
    batches = tuple(both.get("gbs", judge.space.batches))
    return dataclasses.replace(judge, space=dataclasses.replace(
        judge.space, wanted=both, worlds=worlds, batches=batches
    ))  # fmt: skip


def verdict(judge: Judge, found: Found, text: str, flag: str = "--layout") -> Verdict:
    """Raises ConfigError for a form that cannot be read."""
    wanted = parse_choices(text, flag)
    own = search(asked_space(judge, wanted, flag, text), top=1)
    judged = own.best[0] if own.best else None
    reasons = tuple(
        (f"{count:,} {unit}", reason, own.rejections.examples[unit, reason])
        for (unit, reason), count in own.rejections.counts.most_common()
    )
    if not own.counts["shapes"]:
        reasons += tuple(_alone(judge, wanted, flag, text, {reason for _, reason, _ in reasons}))
    left: tuple[tuple[str, str], ...] = ()
    place = None
    if judged is not None:
        values = ((d.names[0], d.value(judged.choices, judge.space.cluster)) for d in DIMENSIONS)
        left = tuple((n, write_value(v)) for n, v in values if v not in wanted.get(n, ()) and v not in ("", ()))
        keys = [other.key for other in found.best[: found.top]]
        if judged.choices.shape in [other.choices.shape for other in found.best[: found.top]]:
            place = 1 + sum(key < judged.key for key in keys)
    return Verdict(text, judged, left, place, reasons)


def _alone(
    judge: Judge, wanted: Wanted, flag: str, text: str, known: set[str]
) -> Iterator[tuple[str, str, str]]:
    """Why a size cannot be with anything else: the first size that cannot be hides those behind it."""
    for name in [name for name in _SIZES if name in wanted]:
        rejections = Rejections()
        space = asked_space(judge, {name: wanted[name]}, flag, text).space
        if next(space.shapes(rejections), None) is None:
            values = ",".join(map(write_value, wanted[name]))
            for unit, reason in rejections.counts:
                if reason not in known:
                    known.add(reason)
                    yield f"{name}={values} with anything else", reason, rejections.examples[unit, reason]


def verdict_lines(judge: Judge, found: Found, given: Verdict) -> list[str]:
    """In words, first the answer."""
    lines: list[str] = []
    if given.judged is None:
        lines.append(f"{given.text}: rejected")
    else:
        best, own = found.best[0] if found.best else given.judged, given.judged
        loss = own.score / best.score - 1
        if own.choices == best.choices:
            lines.append(f"{given.text}: the best there is, {own.seconds:.2f} s a step")
        else:
            where = f"place {given.place}" if given.place else f"behind the best {min(found.top, len(found.best))}"
            lines.append(
                f"{given.text}: {where}, {own.seconds:.2f} s a step, {100 * loss:.1f} % more for each sample than the "
                f"best; {own.memory / GIB:.1f} of {judge.capacity / GIB:.1f} GiB on pipeline rank {own.rank}"
            )
        open_words = ", ".join(f"{name}={value}" for name, value in given.left if not _single(judge, name))
        if open_words:
            lines.append(f"left open, and chosen here as fastest: {open_words}")
    for many, reason, example in given.reasons:
        lines.append(f"{many}: {reason}" + (f" ({first_problem(example)})" if example else ""))
    return lines


def _single(judge: Judge, name: str) -> bool:
    sizes = {"nodes": len(judge.space.worlds), "gbs": len(judge.space.batches)}
    return sizes.get(name, 2) == 1


def comparison_table(judge: Judge, best: Judged, other: Judged) -> Table:
    """The parts of both steps, for one sample of the batch."""
    first, second = estimates_of(judge, [best, other])
    a, b = 1e3 / best.choices.shape.batch, 1e3 / other.choices.shape.batch
    rows = []
    for part in PARTS:
        x, y = a * first.parts.get(part, 0.0), b * second.parts.get(part, 0.0)
        if x or y:
            rows.append((part, f"{x:.2f}", f"{y:.2f}", f"{y - x:+.2f}"))
    x, y = a * first.seconds, b * second.seconds
    rows.append(("all", f"{x:.2f}", f"{y:.2f}", f"{y - x:+.2f}"))
    return Table("milliseconds for each sample, by part", ("part", "best", "asked for", "difference"), rows)


def to_explain(judge: Judge, found: Found, text: str) -> tuple[Choices, str]:
    """(the layout that --explain names, a line that says what it is): a place in the table of the best, or its form.

    One that does not fit is explained, too. Raises ConfigError for one that cannot be.
    """
    if text.isdecimal() and len(text) < 10:
        number = int(text)
        if not 1 <= number <= min(found.top, len(found.best)):
            most = min(found.top, len(found.best))
            raise ConfigError(f"--explain {text}: the table of the best has {most} layouts; or give tp=4,pp=16,...")
        choices = found.best[number - 1].choices
        return choices, f"layout {number} of the best: {write_choices(choices, judge.space.cluster)}"
    wanted = parse_choices(text, "--explain")
    own = asked_space(judge, wanted, "--explain", text)
    result = search(own, top=1)
    note = ""
    if not result.best:
        result = search(dataclasses.replace(own, capacity=float("inf")), top=1)
        note = f", which needs more than the {judge.capacity / GIB:.1f} GiB that a layout may use"
    if not result.best:
        reasons = "; ".join(
            f"{reason} ({first_problem(result.rejections.examples[unit, reason])})"
            for unit, reason in result.rejections.counts
        )
        raise ConfigError(f"--explain {text}: there is no such layout: {reasons}")
    choices = result.best[0].choices
    return choices, f"{write_choices(choices, judge.space.cluster)}{note}"
