"""Simulation of ranks that compute, post messages over slow links and wait for them.

Messages behave as in a network: both sides have to post them, those of one link follow each other,
and a rank can be blocked by its own sends. Any program can be expressed this way; `actions_of`
expresses a pipeline schedule as the executor runs it. This module and csrc/schedule_clock.cpp are
independent implementations, so that each checks the other.

Ranks may share a machine's cores (processor sharing): with n ranks computing at a time, every one of
them runs at min(1, at_once / n) of its speed. Messages take no cores.

Units are the caller's, usually seconds; whole numbers stay whole if no cores are shared.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megatron.pipeline.clock import ScheduleTimeline, Span
from megatron.pipeline.orders import COMPUTE, SENDS, SENDS_IN_FLIGHT, Instruction, Op
from megatron.pipeline.schedule import NOMINAL_DURATIONS, Lists, ScheduleCosts, Times

TimeOf = Callable[[Instruction], float]


class ReplayCompute(NamedTuple):
    label: Hashable
    duration: float


class ReplayPost(NamedTuple):
    """Start to send, receive or take part in `message`, which goes over `link`, and continue.

    The message begins when all its ranks have posted it. It departs when the older messages of its
    link, in the order of posting, have left the link; `occupies` it; and arrives `latency` later.
    """

    message: Hashable
    link: Hashable
    occupies: float
    latency: float


class ReplayWait(NamedTuple):
    """Continue when `message`, posted before, has arrived."""

    message: Hashable


Action = ReplayCompute | ReplayPost | ReplayWait


class Lane(NamedTuple):
    """Interval in which a rank computes or waits for a message."""

    label: Hashable
    start: float
    end: float


class _Link:
    """Messages of one link that are not yet in flight, in the order in which a rank posts them."""

    def __init__(self) -> None:
        self.order: dict[Hashable, int] = {}  # {message: number of missing posts}
        self._begun: dict[Hashable, tuple[float, ReplayPost]] = {}
        self._free: float = 0

    def post(self, post: ReplayPost, time: float) -> list[tuple[Hashable, float]]:
        """Post a message; return the messages whose arrival this determines, with their times."""
        self.order[post.message] -= 1
        self._begun[post.message] = time, post
        known = []
        while self.order and not self.order[oldest := next(iter(self.order))]:
            del self.order[oldest]
            started, of = self._begun.pop(oldest)
            self._free = max(started, self._free) + of.occupies
            known.append((oldest, self._free + of.latency))
        return known


class Replay:
    """Run of all ranks' actions, those of each rank in their order.

    computed  intervals in which each rank computes, in order of time
    waited    intervals longer than zero in which it waits for messages, in order of time
    ends      time at which it is done

    `at_once` ranks compute at full speed; more share the cores. Raises ValueError for a deadlock.
    """

    def __init__(self, ranks: Sequence[Sequence[Action]], at_once: float = math.inf) -> None:
        self._todo = [deque(actions) for actions in ranks]
        self._links: dict[Hashable, _Link] = defaultdict(_Link)
        for post in (
            action for actions in ranks for action in actions if isinstance(action, ReplayPost)
        ):
            order = self._links[post.link].order
            order[post.message] = order.get(post.message, 0) + 1
        self._at_once = at_once
        self._now: float = 0
        self._work: float = 0  # work that a rank computing all the time would have done
        # heap of (that work when a rank is done, rank)
        self._computing: list[tuple[float, int]] = []
        self._since: dict[int, float] = {}  # when ranks began to compute or to wait
        self._arriving: dict[Hashable, float] = {}
        # ranks that wait for messages not yet in flight
        self._waiting: dict[Hashable, list[int]] = defaultdict(list)
        self._arrivals: list[tuple[float, int]] = []  # heap of (time, waiting rank)
        self.computed: list[list[Lane]] = [[] for _ in ranks]
        self.waited: list[list[Lane]] = [[] for _ in ranks]
        self.ends: list[float] = [0] * len(ranks)
        for rank in range(len(ranks)):
            self._go_on(rank)
        while self._computing or self._arrivals:
            self._advance()
        if any(self._todo):
            raise ValueError(f"the ranks deadlock: {self._todo}")

    def _advance(self) -> None:
        """Advance to the next time at which a computation ends or a message arrives."""
        slower = max(1, len(self._computing) / self._at_once)
        ends = (
            self._now + (self._computing[0][0] - self._work) * slower
            if self._computing
            else float("inf")
        )
        if self._arrivals and self._arrivals[0][0] <= ends:
            time, rank = heapq.heappop(self._arrivals)
            self._work += time - self._now if slower == 1 else (time - self._now) / slower
            self._now = time
        else:
            self._work, rank = heapq.heappop(self._computing)
            self._now = ends
            self.computed[rank].append(
                Lane(self._todo[rank].popleft()[0], self._since.pop(rank), ends)
            )
        self._go_on(rank)

    def _go_on(self, rank: int) -> None:
        """Run actions that take no time, until the rank computes, waits or is done."""
        todo = self._todo[rank]
        while todo:
            action = todo[0]
            if isinstance(action, ReplayCompute):
                heapq.heappush(self._computing, (self._work + action.duration, rank))
                self._since[rank] = self._now
                return
            if isinstance(action, ReplayPost):
                self._post(action)
            elif not self._arrived(rank, action.message):
                return
            todo.popleft()
        self.ends[rank] = self._now

    def _arrived(self, rank: int, message: Hashable) -> bool:
        """Return whether a message has arrived; if not, let the rank continue once it has."""
        arrives = self._arriving.get(message)
        if arrives is None or arrives > self._now:
            self._since.setdefault(rank, self._now)
            if arrives is None:
                self._waiting[message].append(rank)
            else:
                heapq.heappush(self._arrivals, (arrives, rank))
            return False
        since = self._since.pop(rank, self._now)
        if since < self._now:
            self.waited[rank].append(Lane(message, since, self._now))
        return True

    def _post(self, action: ReplayPost) -> None:
        for message, arrives in self._links[action.link].post(action, self._now):
            self._arriving[message] = arrives
            for rank in self._waiting.pop(message, ()):
                heapq.heappush(self._arrivals, (arrives, rank))


def actions_of(
    ranks: Sequence[Sequence[Instruction]],
    duration: TimeOf,
    occupies: TimeOf,
    latency: TimeOf,
    *,
    posted: bool = True,
    duplex: bool = True,
) -> list[list[Action]]:
    """Return the actions of each rank of a pipeline in one step.

    ranks            instructions of each
    duration         time of a computation
    occupies         time for which the message of a send keeps its link busy: bytes / bandwidth
    latency          time of the message of a send from leaving the link to arriving
    posted           whether the lists post the messages; if not, results are sent as soon as they
                     are computed
    duplex           whether the two directions of a pair of ranks are separate links; if not, a
                     pair's messages follow each other in both directions, as on one NCCL
                     communicator
    """
    owners = {i.stage: n for n, each in enumerate(ranks) for i in each if i.op in COMPUTE}

    def post(send: Instruction, to: int) -> ReplayPost:
        link = owners[send.stage], owners[to]
        link = link if duplex else (min(link), max(link))
        return ReplayPost(send, link, occupies(send), latency(send))

    actions_of_ranks: list[list[Action]] = []
    for instructions in ranks:
        actions: list[Action] = []
        sent: deque[Instruction] = deque()
        for instruction in instructions:
            op, stage, micro_batch = instruction
            before, to = (stage - 1, stage + 1) if op in _FORWARDS else (stage + 1, stage - 1)
            kind = Op.SEND_FORWARD if op in _FORWARDS else Op.SEND_BACKWARD
            needed = Instruction(kind, before, micro_batch)
            if op in COMPUTE:
                here = owners[stage]
                if op is not Op.BACKWARD_WEIGHT and owners.get(before, here) != here:
                    actions.append(ReplayWait(needed))
                actions.append(ReplayCompute(instruction, duration(instruction)))
                if not posted and op is not Op.BACKWARD_WEIGHT and owners.get(to, here) != here:
                    actions.append(post(Instruction(kind, stage, micro_batch), to))
            elif not posted:
                continue
            elif op in SENDS:
                if len(sent) >= SENDS_IN_FLIGHT:  # as in executor.py
                    actions.append(ReplayWait(sent.popleft()))
                actions.append(post(instruction, to))
                sent.append(instruction)
            else:
                actions.append(post(needed, stage))
        actions_of_ranks.append(actions + [ReplayWait(message) for message in sent])
    return actions_of_ranks


_FORWARDS = (Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD)


def simulate(
    ranks: Sequence[Sequence[Instruction]],
    durations: Mapping[Op, float] = NOMINAL_DURATIONS,
    latency: float = 0.0,
) -> ScheduleTimeline:
    """Return the timeline of all computations; results arrive after `latency`, without posts."""
    done = Replay(
        actions_of(ranks, lambda i: durations[i.op], lambda _: 0.0, lambda _: latency, posted=False)
    )
    return ScheduleTimeline(tuple(tuple(Span(*lane) for lane in lanes) for lanes in done.computed))  # type: ignore[arg-type]


def run_lists(
    lists: Lists,
    costs: ScheduleCosts,
    *,
    posted: bool = True,
    duplex: bool = True,
    at_once: float = math.inf,
) -> Times:
    """Run the lists as megatron.pipeline.schedule.run does in C++."""
    passes, messages = costs.passes.tolist(), costs.messages.tolist()
    ranks = [lists.instructions(rank) for rank in range(len(lists))]

    def duration(i: Instruction) -> float:
        first: float = passes[4][i.stage] if i.op is Op.FORWARD and i.micro_batch == 0 else 0
        return first + passes[i.op][i.stage]

    def message(column: int) -> TimeOf:
        return lambda send: messages[column + (0 if send.op is Op.SEND_FORWARD else 2)][send.stage]

    actions = actions_of(ranks, duration, message(0), message(1), posted=posted, duplex=duplex)
    done = Replay(actions, at_once)
    dtype = costs.passes.dtype
    starts, ends = np.zeros((2, len(lists.rows)), dtype)
    computes = lists.rows[:, 0] <= Op.BACKWARD_WEIGHT
    starts[computes], ends[computes] = np.array(
        [lane[1:] for of in done.computed for lane in of], dtype
    ).T
    made: dict[Hashable, float] = {
        Instruction(
            Op.SEND_FORWARD if op == Op.FORWARD else Op.SEND_BACKWARD, stage, micro_batch
        ): end
        for (op, stage, micro_batch), end in zip(
            lists.rows[computes].tolist(), ends[computes].tolist(), strict=True
        )
        if op != Op.BACKWARD_WEIGHT
    }
    waits = [
        sum(lane.end - max(lane.start, made[lane.label]) for lane in lanes) for lanes in done.waited
    ]
    return Times(starts, ends, np.array(done.ends, dtype), np.array(waits, dtype))
