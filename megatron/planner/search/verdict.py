"""What became of a layout that was asked for: the fastest of its form, or why there is none."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.config.layout import DIMENSIONS, Layout, Wanted, narrowed, parse_layout, write_value
from megatron.errors import ConfigError
from megatron.planner.search.find import GIB, Found, Judged, Search, search
from megatron.planner.search.tables import first_problem


@dataclass(frozen=True)
class Asked:
    """A form of layouts, such as tp=4,pp=16: as it was written, what it names, and the search of its layouts alone."""

    text: str
    wanted: Wanted
    search: Search


@dataclass(frozen=True)
class Verdict:
    """On one form: what was found among its layouts, and the fastest; None where there is none, or none that fits."""

    asked: Asked
    found: Found
    judged: Judged | None

    def lines(self) -> list[str]:
        """In words: what was left open, or why it is rejected."""
        space, text = self.asked.search.space, self.asked.text
        if self.judged is None:
            rejected = self.found.rejections
            told = [
                f"{count:,} {unit}: {reason}" + (f" ({first_problem(example)})" if example else "")
                for (unit, reason), count in rejected.counts.most_common()
                for example in [rejected.examples[unit, reason]]
            ]
            return [f"{text}: rejected", *told]
        single = {"nodes": len(space.worlds), "gbs": len(space.batches)}
        values = {d.names[0]: d.value(self.judged.layout, space.cluster.devices_per_node) for d in DIMENSIONS}
        words = ", ".join(
            f"{name}={write_value(value)}" for name, value in values.items()
            if value not in (*self.asked.wanted.get(name, ()), "", ()) and single.get(name) != 1
        )  # fmt: skip
        return [f"{text}: left open, and chosen here as fastest: {words}"] if words else []


def asked(given: Search, text: str) -> Asked:
    """A form of layouts within what --fix and flags allow. Raises ConfigError for one that cannot be read, and where
    they leave nothing of it."""
    wanted, space = parse_layout(text, "--layout"), given.space
    if "recompute" in wanted:  # full means here what --recompute-granularity full means in a run
        wanted["recompute"] = tuple("full:uniform:1" if v == "full" else v for v in wanted["recompute"])
    both = narrowed(space.wanted, wanted)
    for name in (name for name, values in both.items() if not values):
        allowed, own = (", ".join(map(write_value, values[name])) for values in (space.wanted, wanted))
        raise ConfigError(f"--layout {text}: {name}={own} is not among the allowed: {name}={allowed}")
    each = space.cluster.devices_per_node
    worlds = tuple(each * n for n in wanted["nodes"]) if "nodes" in wanted else space.worlds
    own_space = dataclasses.replace(space, wanted=both, worlds=worlds, batches=tuple(both.get("gbs", space.batches)))
    return Asked(text, wanted, dataclasses.replace(given, space=own_space, _known={}))


def verdict(form: Asked, processes: int = 1) -> Verdict:
    """Estimate the layouts of a form and nothing else."""
    found = search(form.search, 1, processes)
    return Verdict(form, found, found.estimated[0] if found.estimated else None)


def explained(given: Verdict) -> tuple[Layout, str] | None:
    """(the layout whose arithmetic is shown, a line that says what it is), also of one that does not fit; None where
    there is no such layout."""
    own, note, best = given.asked.search, "", given.judged
    if best is None:
        any_size = search(dataclasses.replace(own, capacity=float("inf")), top=1).estimated
        if not any_size:
            return None
        best, note = any_size[0], f", which needs more than the {own.capacity / GIB:.1f} GiB that a layout may use"
    return best.layout, f"{best.layout.write(own.space.cluster.devices_per_node)}{note}"
