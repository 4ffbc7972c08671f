"""Who waits in what for whom: from what all ranks were seen to do to a conclusion and a report. Pure functions.

A rank that waits in a collective waits for the members of its group that have not posted as many collectives of that
kind as the one it is in; one that waits for a message, for its neighbour. Whoever is waited for and waits for nobody
holds up the rest: it is stopped, dead, stuck, or still at work. Where there is no such rank, ranks wait for each other
in a circle, or are in different calls under one number: one of them has left out a collective.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.parallel.flight import Call, FlightState
from megatron.parallel.nodelist import compress_ranks
from megatron.parallel.processes import DEAD, GONE, STOPPED
from megatron.parallel.topology import Layout

_SHOWN = 64  # lines of ranks, and half as many stacks
_NAMED = 8  # places, or calls, in a conclusion


@dataclass(frozen=True)
class Verdict:
    """The job hangs: the `conclusion`, one line, names those who hold up the rest, `culprits` are their ranks."""

    conclusion: str
    culprits: Sequence[int]


def group_members(kind: str, rank: int, layout: Layout) -> Sequence[int]:
    """The ranks of the group of this kind that `rank` is in; empty where the kind is not known."""
    t, d, p = layout.coordinates(rank)
    line = layout.pipeline_ranks(tensor=t, data=d)
    members: dict[str, Sequence[int]] = {
        "world": range(layout.world_size),
        "tensor": layout.tensor_ranks(data=d, pipeline=p),
        "data": layout.data_ranks(tensor=t, pipeline=p),
        "pipeline": line,
        "embedding": (line[0], line[-1]),
    }
    return layout.model_ranks(data=d) if kind == "model" else members.get(kind, ())


class Waits:
    """The graph of who waits for whom, over `seen` by rank; ranks of whom nobody has heard are missing there.

    awaited  the ranks that a rank waits for, of those that are in a call
    """

    def __init__(self, seen: Mapping[int, FlightState], layout: Layout) -> None:
        self.seen, self._layout = seen, layout
        self._late: dict[tuple[str, int, int], list[int]] = {}  # by kind, number and first member
        self.awaited = {rank: self._awaited(rank, of.call) for rank, of in seen.items() if of.call and not of.lost}

    def _awaited(self, rank: int, call: Call) -> list[int]:
        if call.peer >= 0:
            return [call.peer]
        members = group_members(call.kind, rank, self._layout)
        if not members:
            return []
        key = (call.kind, call.sequence, members[0])
        if key not in self._late:
            self._late[key] = [r for r in members if self._is_late(r, call)]
        return [r for r in self._late[key] if r != rank]

    def _is_late(self, rank: int, call: Call) -> bool:
        of = self.seen.get(rank)
        return of is None or of.lost or of.posted_in(call.kind) < call.sequence

    def roots(self) -> set[int]:
        """Ranks that are waited for and are in no call themselves."""
        return {rank for ranks in self.awaited.values() for rank in ranks} - set(self.awaited)

    def behind(self, roots: Iterable[int]) -> list[int]:
        """Ranks that wait for one of `roots`, directly or through others."""
        held, found = set(roots), list[int]()
        while more := [r for r, of in self.awaited.items() if r not in held and not held.isdisjoint(of)]:
            held.update(more)
            found += more
        return sorted(found)

    def circle(self) -> list[int]:
        """Ranks of which each waits for the next and the last for the first; empty where there are none."""
        for start in sorted(self.awaited):
            path: list[int] = []
            rank: int | None = start
            while rank is not None and rank not in path:
                path.append(rank)
                rank = next(iter(self.awaited.get(rank, ())), None)
            if rank is not None:
                return path[path.index(rank) :]
        return []


def judge(
    seen: Mapping[int, FlightState], layout: Layout, timeout_s: float, places: Sequence[str] = ()
) -> Verdict | None:
    """Whether the job hangs, and who holds it up; None: somebody was at work within the time limit. `places` names node
    and device of every rank, for those that are not in `seen`."""
    waits = Waits(seen, layout)
    dead = {r for r, of in seen.items() if of.process in (DEAD, GONE)}
    # A rank that computes without end holds up others only when they come to a collective.
    idle = {r for r, of in seen.items() if r not in waits.awaited and of.quiet_s >= timeout_s}
    candidates = sorted(waits.roots() | dead | idle)
    stuck = [r for r in candidates if r not in seen or r in dead or seen[r].quiet_s >= timeout_s]
    if stuck:
        # A lost process explains why others are stuck.
        culprits = [r for r in stuck if r not in seen or seen[r].lost] or stuck
        return Verdict(_blame(culprits, waits, places), culprits)
    if candidates or any(of.quiet_s < timeout_s for of in seen.values()):
        return None
    return _without_root(waits)


def _blame(ranks: Sequence[int], waits: Waits, places: Sequence[str]) -> str:
    what: dict[str, list[int]] = {}
    for rank in ranks[:_SHOWN]:
        what.setdefault(_trouble(waits.seen.get(rank)), []).append(rank)
    said = "; ".join(f"{_name(of, waits.seen, places)} {trouble}" for trouble, of in what.items())
    behind = waits.behind(ranks)
    held = f"; {_ranks(behind)} wait{'s' if len(behind) == 1 else ''} for {'it' if len(ranks) == 1 else 'them'}"
    return said + (held if behind else "")


def _trouble(of: FlightState | None) -> str:
    if of is None:
        return "gave no sign of life, and no rank of its node did: the node is lost or cut off"
    what, place = "is in no collective and makes no progress", ""
    if of.process == STOPPED:
        what = "is stopped (SIGSTOP)"
    elif of.lost:
        what = "has died"
    elif not of.stack:
        what = f"does not answer (its process is {of.process}, its Python interpreter is held up)"
    else:
        main, _, _ = of.stack.partition("\n\n")
        place = f" at {main.splitlines()[-1]}"
    return f"{what} since {of.where}, {of.quiet_s:.0f} s ago{place}"


def _without_root(waits: Waits) -> Verdict:
    """Everybody waits, and all for each other."""
    circle = waits.circle()
    if circle:
        said = "; ".join(
            f"rank {rank} waits in {waits.seen[rank].call} for rank {other}"
            for rank, other in zip(circle, circle[1:] + circle[:1], strict=True)
        )
        return Verdict(
            f"ranks wait for each other: {said}: one of them has left out a collective or a message", circle
        )
    calls: dict[str, list[int]] = {}
    for rank, awaited in waits.awaited.items():
        if not awaited:
            calls.setdefault(str(waits.seen[rank].call), []).append(rank)
    said = "; ".join(f"{_ranks(ranks)} in {call}" for call, ranks in list(calls.items())[:_NAMED])
    return Verdict(
        f"no rank is late, and no call ends: {said}: where calls of one group have one number and differ, a rank has "
        f"left out a collective or made one more; otherwise look at network and devices",
        sorted(rank for ranks in calls.values() for rank in ranks),
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compress_ranks(ranks)}"


def _name(ranks: Sequence[int], seen: Mapping[int, FlightState], places: Sequence[str]) -> str:
    where = (seen[r].place if r in seen else places[r] if r < len(places) else "an unknown node" for r in ranks)
    named = list(dict.fromkeys(where))
    return f"{_ranks(ranks)} ({', '.join(named[:_NAMED])}{', ...' if len(named) > _NAMED else ''})"


def describe_rank(rank: int, waits: Waits) -> str:
    """What a rank does, in one line."""
    of = waits.seen[rank]
    late = waits.awaited.get(rank)
    waited = f"; waits for {_ranks(late)}" if late else ""
    silent = "" if of.stack else f"; no answer, its process is {of.process}"
    return f"{of.where}{waited}; no progress for {of.quiet_s:.0f} s{silent}"


def report(verdict: Verdict, seen: Mapping[int, FlightState], layout: Layout) -> str:
    """The hang in full: the conclusion, a line for each rank, and the stacks; ranks that do the same stand together."""
    waits, lines = Waits(seen, layout), [f"the job hangs: {verdict.conclusion}"]
    first = [rank for rank in verdict.culprits if rank in seen][:_SHOWN]
    rest = [rank for rank in sorted(seen) if rank not in set(first)]
    shown = sorted(first + rest[: _SHOWN - len(first)])
    lines += [f"  rank {rank}: {describe_rank(rank, waits)}" for rank in shown]
    if len(seen) > _SHOWN:
        lines.append(f"  and {len(seen) - _SHOWN} ranks more")
    if unheard := [rank for rank in range(layout.world_size) if rank not in seen]:
        lines.append(f"  nothing was heard of {_ranks(unheard)}")
    stacks: dict[str, list[int]] = {}
    for rank in shown:
        stacks.setdefault(seen[rank].stack, []).append(rank)
    for stack, ranks in list(stacks.items())[: _SHOWN // 2]:
        if stack:
            lines.append(f"Python stacks of {_ranks(ranks)}, innermost call last:")
            lines += [f"    {line}" for line in stack.splitlines()]
    return "\n".join(lines)
