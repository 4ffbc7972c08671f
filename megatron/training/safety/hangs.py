"""Analysis of a hang: which rank waits in which call for which ranks, from the states of all ranks.
Pure functions.

A rank in a collective waits for the members of its group that have not posted as many collectives
of that kind as the one it is in; a rank that waits for a message, for its neighbour. A rank that
others wait for and that waits for none holds up the rest: it is stopped, dead, stuck, or still at
work. Without such a rank, ranks wait for each other in a circle, or are in different calls under
one number: one of them has left out a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron.parallel.flight import Call, FlightState
from megatron.parallel.processes import DEAD, GONE, STOPPED
from megatron.parallel.topology import Layout, compress_ranks

_SHOWN = 64  # lines of ranks, and half as many stacks
_NAMED = 8  # places, or calls, in a conclusion


@dataclass(frozen=True)
class Verdict:
    """The job hangs: the `conclusion`, one line, names the ranks that hold up the rest, the
    `culprits`.
    """

    conclusion: str
    culprits: Sequence[int]


def group_members(kind: str, rank: int, layout: Layout) -> Sequence[int]:
    """Return the ranks of the group of this kind that contains `rank`; empty for an unknown
    kind.
    """
    t, d, p = layout.coordinates(rank)
    line = layout.pipeline_ranks(tensor=t, data=d)
    members: dict[str, Sequence[int]] = {
        "world": range(layout.world_size),
        "tensor": layout.tensor_ranks(data=d, pipeline=p),
        "data": layout.data_ranks(tensor=t, pipeline=p),
        "pipeline": line,
        "embedding": (line[0], line[-1]),
        "model": layout.model_ranks(data=d) if kind == "model" else (),
    }
    return members.get(kind, ())


class Waits:
    """The graph of which rank waits for which, from the states `seen` by rank; silent ranks are
    missing there.

    awaited  for each rank in a call, the ranks that it waits for
    """

    def __init__(self, seen: Mapping[int, FlightState], layout: Layout) -> None:
        self.seen, self._layout = seen, layout
        self._late: dict[tuple[str, int, int], list[int]] = {}  # by kind, number and first member
        self.awaited = {
            rank: self._awaited(rank, of.call)
            for rank, of in seen.items()
            if of.call and not of.lost
        }

    def _awaited(self, rank: int, call: Call) -> list[int]:
        if call.peer >= 0:
            return [call.peer]
        members = group_members(call.kind, rank, self._layout)
        if not members:
            return []
        key = (call.kind, call.sequence, members[0])
        if key not in self._late:
            states = ((r, self.seen.get(r)) for r in members)
            self._late[key] = [
                r
                for r, of in states
                if of is None or of.lost or of.posted_in(call.kind) < call.sequence
            ]
        return [r for r in self._late[key] if r != rank]

    def roots(self) -> set[int]:
        """Return the ranks that others wait for and that are in no call themselves."""
        return {rank for ranks in self.awaited.values() for rank in ranks} - set(self.awaited)

    def behind(self, roots: Iterable[int]) -> list[int]:
        """Return the ranks that wait for one of `roots`, directly or through others."""
        held, found = set(roots), list[int]()
        while more := [
            r for r, of in self.awaited.items() if r not in held and not held.isdisjoint(of)
        ]:
            held.update(more)
            found += more
        return sorted(found)

    def circle(self) -> list[int]:
        """Return ranks of which each waits for the next and the last for the first; empty where
        there are none.
        """
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
    """Return who holds up the job; None if some rank made progress within the time limit. `places`
    are node and device of every rank, for those that are not in `seen`."""
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
    seen, of_trouble = waits.seen, dict[str, list[int]]()
    for rank in ranks[:_SHOWN]:
        of_trouble.setdefault(_trouble(seen.get(rank)), []).append(rank)
    parts = []
    for trouble, those in of_trouble.items():
        where = (
            seen[r].place if r in seen else places[r] if r < len(places) else "an unknown node"
            for r in those
        )
        named = list(dict.fromkeys(where))
        more = ", ..." if len(named) > _NAMED else ""
        parts.append(f"{_ranks(those)} ({', '.join(named[:_NAMED])}{more}) {trouble}")
    if behind := waits.behind(ranks):
        verb = "waits" if len(behind) == 1 else "wait"
        parts.append(f"{_ranks(behind)} {verb} for {'it' if len(ranks) == 1 else 'them'}")
    return "; ".join(parts)


def _trouble(of: FlightState | None) -> str:
    if of is None:
        return "gave no sign of life, and no rank of its node did: the node is lost or cut off"
    what, place = "is in no collective and makes no progress", ""
    if of.process == STOPPED:
        what = "is stopped (SIGSTOP)"
    elif of.lost:
        what = "has died"
    elif not of.stack:
        what = f"does not answer (its process is {of.process}, its Python interpreter is blocked)"
    else:
        main, _, _ = of.stack.partition("\n\n")
        place = f" at {main.splitlines()[-1]}"
    return f"{what} since {of.where}, {of.quiet_s:.0f} s ago{place}"


def _without_root(waits: Waits) -> Verdict:
    """Return the verdict where all ranks wait, and for each other."""
    if circle := waits.circle():
        said = "; ".join(
            f"rank {rank} waits in {waits.seen[rank].call} for rank {other}"
            for rank, other in zip(circle, circle[1:] + circle[:1], strict=True)
        )
        return Verdict(
            f"ranks wait for each other: {said}: one of them has left out a collective "
            "or a message",
            circle,
        )
    calls: dict[str, list[int]] = {}
    for rank, awaited in waits.awaited.items():
        if not awaited:
            calls.setdefault(str(waits.seen[rank].call), []).append(rank)
    said = "; ".join(f"{_ranks(ranks)} in {call}" for call, ranks in list(calls.items())[:_NAMED])
    return Verdict(
        f"no rank is late, and no call ends: {said}: where calls of one group have one number and "
        "differ, a rank has left out a collective or made one more; otherwise look at network and "
        "devices",
        sorted(rank for ranks in calls.values() for rank in ranks),
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compress_ranks(ranks)}"


def report(verdict: Verdict, seen: Mapping[int, FlightState], layout: Layout) -> str:
    """Return the report: the conclusion, a line for each rank, and the stacks, each once with its
    ranks.
    """
    waits, lines = Waits(seen, layout), [f"the job hangs: {verdict.conclusion}"]
    first = [rank for rank in verdict.culprits if rank in seen][:_SHOWN]
    rest = [rank for rank in sorted(seen) if rank not in set(first)]
    shown = sorted(first + rest[: _SHOWN - len(first)])
    for rank in shown:
        of, late = seen[rank], waits.awaited.get(rank)
        waited = f"; waits for {_ranks(late)}" if late else ""
        silent = "" if of.stack else f"; no answer, its process is {of.process}"
        lines.append(
            f"  rank {rank}: {of.where}{waited}; no progress for {of.quiet_s:.0f} s{silent}"
        )
    if len(seen) > _SHOWN:
        lines.append(f"  and {len(seen) - _SHOWN} ranks more")
    if unheard := [rank for rank in range(layout.world_size) if rank not in seen]:
        lines.append(f"  no answer from {_ranks(unheard)}")
    stacks: dict[str, list[int]] = {}
    for rank in shown:
        stacks.setdefault(seen[rank].stack, []).append(rank)
    for stack, ranks in list(stacks.items())[: _SHOWN // 2]:
        if stack:
            lines.append(f"Python stacks of {_ranks(ranks)}, innermost call last:")
            lines += [f"    {line}" for line in stack.splitlines()]
    return "\n".join(lines)
