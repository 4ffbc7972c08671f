"""Who waits in what for whom: from what all ranks were seen to do to a conclusion and a report. Pure functions.

A rank that waits in a collective waits for the members of its group that have not posted as many collectives of that
kind as the one it is in; one that waits for a message, for its neighbour. Whoever is waited for and waits for nobody
holds up the rest: it is stopped, dead, stuck, or still at work. Where there is no such rank, ranks wait for each other
in a circle, or are in different calls under one number: one of them has left out a collective.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.parallel.flight import Call, FlightState
from megatron.parallel.nodelist import compress_ranks
from megatron.parallel.processes import DEAD, GONE, STOPPED
from megatron.parallel.topology import Layout

_SHOWN = 64  # lines of ranks, and half as many stacks
_TRANSPORT = "torch/distributed/"


@dataclass(frozen=True)
class Seen:
    """What is known of a rank: its record, the state of its process, and whether it answered itself; `stack` are the
    lines of its Python stacks, those of the main thread first and the innermost frame last."""

    state: FlightState
    process: str
    answered: bool
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Seen:
        fields = json.loads(text)
        state = fields["state"]
        call = None if state["call"] is None else Call(**state["call"])
        lists = {name: tuple(state[name]) for name in ("sizes", "posted")}
        read = FlightState(**{**state, **lists, "call": call})
        return cls(read, fields["process"], fields["answered"], fields["stack"])

    @property
    def lost(self) -> bool:
        return self.process in (STOPPED, DEAD, GONE)


@dataclass(frozen=True)
class Verdict:
    """hang        whether the job hangs; otherwise somebody was at work within the time limit
    conclusion  one line that names those who hold up the rest
    culprits    their ranks
    retry_s     where there is no hang: the earliest that it makes sense to ask again
    """

    hang: bool
    conclusion: str
    culprits: tuple[int, ...] = ()
    retry_s: float = 0.0


def group_members(kind: str, rank: int, layout: Layout) -> tuple[int, ...]:
    """The ranks of the group of this kind that `rank` is in; empty where the kind is not known."""
    if kind == "other":
        return ()
    t, d, p = layout.coordinates(rank)
    line = layout.pipeline_ranks(tensor=t, data=d)
    if kind == "world":
        return tuple(range(layout.world_size))
    if kind == "model":
        return layout.model_ranks(data=d)
    if kind == "tensor":
        return tuple(layout.tensor_ranks(data=d, pipeline=p))
    if kind == "data":
        return tuple(layout.data_ranks(tensor=t, pipeline=p))
    return (line[0], line[-1]) if kind == "embedding" else tuple(line)


class Waits:
    """The graph of who waits for whom, over `seen` by rank; ranks of whom nobody has heard are missing there."""

    def __init__(self, seen: Mapping[int, Seen], layout: Layout) -> None:
        self.seen, self.layout = seen, layout
        self._late: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.awaited = {rank: self._awaited(rank, of) for rank, of in seen.items() if of.state.call and not of.lost}

    def _awaited(self, rank: int, of: Seen) -> tuple[int, ...]:
        call = of.state.call
        assert call is not None, "only ranks in a call wait"
        if call.peer >= 0:
            return (call.peer,)
        members = group_members(call.kind, rank, self.layout)
        if not members:
            return ()
        key = (call.kind, call.sequence, hash(members))
        if key not in self._late:
            self._late[key] = tuple(r for r in members if self._is_late(r, call))
        return tuple(r for r in self._late[key] if r != rank)

    def _is_late(self, rank: int, call: Call) -> bool:
        of = self.seen.get(rank)
        return of is None or of.lost or of.state.posted_in(call.kind) < call.sequence

    def roots(self) -> list[int]:
        """Ranks that are waited for and are in no call themselves."""
        found = {rank for ranks in self.awaited.values() for rank in ranks}
        return sorted(rank for rank in found if rank not in self.awaited)

    def behind(self, roots: Iterable[int]) -> list[int]:
        """Ranks that wait for one of `roots`, directly or through others."""
        held, waiting = set(roots), dict(self.awaited)
        first = set(held)
        while True:
            more = [rank for rank, of in waiting.items() if not held.isdisjoint(of)]
            if not more:
                return sorted(held - first)
            held.update(more)
            for rank in more:
                del waiting[rank]

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

    def mismatch(self) -> list[tuple[int, Call]]:
        """Ranks of one group that are in different calls under the same number, one rank for each call."""
        groups: dict[tuple[str, int, tuple[int, ...]], dict[tuple[str, int], int]] = {}
        for rank, of in self.seen.items():
            call = of.state.call
            if call is not None and call.sequence and not of.lost:
                members = group_members(call.kind, rank, self.layout)
                key = (call.kind, call.sequence, members)
                groups.setdefault(key, {}).setdefault((call.name, call.size_bytes), rank)
        for different in groups.values():
            if len(different) > 1:
                ranks = sorted(different.values())
                return [(rank, call) for rank in ranks if (call := self.seen[rank].state.call) is not None]
        return []


def judge(seen: Mapping[int, Seen], layout: Layout, timeout_s: float, places: Mapping[int, str]) -> Verdict:
    """Whether the job hangs, and who holds it up. `places` names node and device of ranks that are not in `seen`."""
    waits = Waits(seen, layout)
    roots = waits.roots()
    # A rank that computes without end holds up others only when they come to a collective.
    idle = [r for r, of in seen.items() if r not in waits.awaited and of.state.quiet_s >= timeout_s]
    candidates = sorted({*roots, *idle, *(r for r, of in seen.items() if of.process in (DEAD, GONE))})
    stuck = [r for r in candidates if _is_stuck(seen.get(r), timeout_s)]
    if stuck:
        named = _without_bystanders(stuck, seen)
        return Verdict(True, _blame(named, waits, places), tuple(named))
    at_work = [seen[r].state.quiet_s for r in candidates]
    if at_work:
        return Verdict(False, "", retry_s=max(0.0, timeout_s - max(at_work)))
    waiting = [of.state.quiet_s for of in seen.values()]
    if min(waiting, default=timeout_s) < timeout_s:
        return Verdict(False, "", retry_s=timeout_s - min(waiting))
    return _without_root(waits)


def _is_stuck(of: Seen | None, timeout_s: float) -> bool:
    return of is None or of.process in (DEAD, GONE) or of.state.quiet_s >= timeout_s


def _without_bystanders(stuck: list[int], seen: Mapping[int, Seen]) -> list[int]:
    """Those of `stuck` that are to blame: a process that is lost rather than one that is in a call of torch's that was
    not recorded, for which it is not known whom it waits for."""
    clear = [r for r in stuck if r not in seen or seen[r].lost or not _in_transport(seen[r])]
    lost = [r for r in clear if r not in seen or seen[r].lost]
    return lost or clear or stuck


def _in_transport(of: Seen) -> bool:
    main = of.stack.split("\n\n")[0].rstrip().splitlines()
    return bool(main) and _TRANSPORT in main[-1]


def _blame(ranks: list[int], waits: Waits, places: Mapping[int, str]) -> str:
    what: dict[str, list[int]] = {}
    for rank in ranks[:_SHOWN]:
        what.setdefault(_trouble(waits.seen.get(rank)), []).append(rank)
    said = "; ".join(f"{_name(of, waits.seen, places)} {trouble}" for trouble, of in what.items())
    behind = waits.behind(ranks)
    held = f"; {_ranks(behind)} wait{'s' if len(behind) == 1 else ''} for {'it' if len(ranks) == 1 else 'them'}"
    return said + (held if behind else "")


def _trouble(of: Seen | None) -> str:
    if of is None:
        return "gave no sign of life, and no rank of its node did: the node is lost or cut off"
    state = of.state
    inside = state.instruction or (_show_call(state.call) if state.call else "")
    where = f"step {state.step + 1}{f', in {inside}' if inside else ''} ({state.phase})"
    if of.process == STOPPED:
        return f"is stopped (SIGSTOP) since {where}, {state.quiet_s:.0f} s ago"
    if of.process in (GONE, DEAD):
        return f"has died in {where}, {state.quiet_s:.0f} s ago"
    if not of.answered:
        return (
            f"does not answer since {where}, {state.quiet_s:.0f} s ago: its process is {of.process}, its Python "
            f"interpreter is held up"
        )
    inner = of.stack.split("\n\n")[0].rstrip().splitlines()
    place = f" at {inner[-1].strip()}" if inner else ""
    return f"is in no collective and makes no progress since {where}, {state.quiet_s:.0f} s ago{place}"


def _without_root(waits: Waits) -> Verdict:
    """Everybody waits, and all for each other."""
    different = waits.mismatch()
    if different:
        kind, number = different[0][1].kind, different[0][1].sequence
        calls = "; ".join(f"rank {rank} in {_show_call(call)}" for rank, call in different)
        text = f"ranks of one {kind} group are in different calls as number {number}: {calls}: one of them has left out"
        return Verdict(True, f"{text} a collective, or made one more", tuple(rank for rank, _ in different))
    circle = waits.circle()
    if circle:
        parts = []
        for rank, other in zip(circle, circle[1:] + circle[:1], strict=True):
            call = waits.seen[rank].state.call
            parts.append(f"rank {rank} waits in {_show_call(call)} for rank {other}" if call else f"rank {rank}")
        text = f"ranks wait for each other: {'; '.join(parts)}: one of them has left out a collective or a message"
        return Verdict(True, text, tuple(circle))
    ranks = sorted(waits.awaited)
    text = f"all members have entered what {_ranks(ranks)} wait in, and it does not end: look at network and devices"
    return Verdict(True, text, tuple(ranks))


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compress_ranks(ranks)}"


def _name(ranks: list[int], seen: Mapping[int, Seen], places: Mapping[int, str]) -> str:
    if len(ranks) > 1:
        nodes = sorted({_place(rank, seen, places).partition(":")[0] for rank in ranks})
        return f"ranks {compress_ranks(ranks)} (on {', '.join(nodes[:8])}{', ...' if len(nodes) > 8 else ''})"
    rank = ranks[0]
    process = f", process {seen[rank].state.pid}" if rank in seen else ""
    return f"rank {rank} ({_place(rank, seen, places)}{process})"


def _place(rank: int, seen: Mapping[int, Seen], places: Mapping[int, str]) -> str:
    return seen[rank].state.place if rank in seen else places.get(rank, "an unknown node")


def _show_call(call: Call) -> str:
    if call.peer >= 0:
        return f"{call.name} of {call.size_bytes} bytes {'to' if call.name == 'send' else 'from'} rank {call.peer}"
    size = f" of {call.size_bytes} bytes" if call.size_bytes else ""
    return f"{call.name}{size} over its {call.kind} group (number {call.sequence})"


def describe_rank(rank: int, waits: Waits) -> str:
    """What a rank does, in one line."""
    of = waits.seen[rank]
    state, parts = of.state, [f"step {of.state.step + 1}, {of.state.phase}"]
    if state.instruction:
        parts.append(f"{state.instruction}, begun {state.instruction_age_s:.0f} s ago")
    if state.call is None:
        parts.append(f"in no collective, last seen to move {state.quiet_s:.0f} s ago")
    else:
        awaited = list(waits.awaited.get(rank, ()))
        late = f", waits for {_ranks(awaited)}" if awaited and state.call.peer < 0 else ""
        parts.append(f"in {_show_call(state.call)} for {state.call_age_s:.0f} s{late}")
    if not of.answered or of.lost:
        parts.append(f"no answer, its process is {of.process}")
    return "; ".join(parts)


def report(verdict: Verdict, seen: Mapping[int, Seen], layout: Layout, missing: Iterable[int] = ()) -> str:
    """The hang in full: the conclusion, a line for each rank, and the stacks; ranks that do the same stand together."""
    waits, lines = Waits(seen, layout), [f"the job hangs: {verdict.conclusion}"]
    lines += [f"  rank {rank}: {describe_rank(rank, waits)}" for rank in _worth_showing(verdict, seen)]
    if len(seen) > _SHOWN:
        lines.append(f"  and {len(seen) - _SHOWN} ranks more")
    unheard = sorted(missing)
    if unheard:
        lines.append(f"  nothing was heard of {_ranks(unheard)}")
    for stack, ranks in _grouped((rank, seen[rank].stack) for rank in _worth_showing(verdict, seen))[: _SHOWN // 2]:
        lines.append(f"Python stacks of {_ranks(ranks)}, innermost call last:")
        lines += [f"    {line}" for line in stack.splitlines()]
    return "\n".join(lines)


def _worth_showing(verdict: Verdict, seen: Mapping[int, Seen]) -> list[int]:
    """The culprits, and as many others as there is room for."""
    first = [rank for rank in verdict.culprits if rank in seen][:_SHOWN]
    rest = [rank for rank in sorted(seen) if rank not in set(first)]
    return sorted(first + rest[: _SHOWN - len(first)])


def _grouped(stacks: Iterable[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    of: dict[str, list[int]] = {}
    for rank, stack in stacks:
        if stack:
            of.setdefault(stack, []).append(rank)
    return list(of.items())

