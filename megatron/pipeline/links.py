"""When ranks that compute, post messages and wait for them are done, over links that are slow. Pure arithmetic.

simulate.py knows a schedule's computations and lets results travel by themselves. Here messages are what a network
sees: both sides have to post them, those of one link follow each other, and a rank can be held up by what it has sent.
Any program can be written in these words; `actions_of` writes a pipeline schedule in them as the executor runs it.

Units are the caller's, seconds as a rule.
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.pipeline.instructions import COMPUTE, SENDS, SENDS_IN_FLIGHT, Instruction, Op, Schedule
from megatron.pipeline.simulate import NOMINAL_DURATIONS, Durations, Latency


class Compute(NamedTuple):
    label: str
    duration: float


class Post(NamedTuple):
    """Start to send, to receive, or to take part in `message`, which goes over `link`, and go on.

    The message begins when all ranks that post it have done so. It departs when the older messages of its link, in the
    order of posting, have left the link; `occupies` it; and arrives `latency` later.
    """

    message: Hashable
    link: Hashable
    occupies: float
    latency: float


class Wait(NamedTuple):
    """Go on when `message`, posted before, has arrived."""

    message: Hashable


Action = Compute | Post | Wait


class Lane(NamedTuple):
    """Something that takes time: a computation, or a rank's waiting for a message."""

    label: str
    start: float
    end: float


class Crossing(NamedTuple):
    """A message's way."""

    link: Hashable
    begun: float
    departs: float
    arrives: float


@dataclass(frozen=True)
class Replay:
    """computed, waited: for each rank in order of time; waiting for nothing is left out."""

    computed: tuple[tuple[Lane, ...], ...]
    waited: tuple[tuple[Lane, ...], ...]
    ends: tuple[float, ...]
    crossings: Mapping[Hashable, Crossing]

    @property
    def makespan(self) -> float:
        """Time at which the last rank is done."""
        return max(self.ends, default=0.0)


def replay(ranks: Sequence[Sequence[Action]]) -> Replay:
    """Run each rank's actions in order.

    The ranks of a link must post its messages in the same order. A program that deadlocks fails an assertion, which
    names the messages waited for.
    """
    links = links_of(ranks)
    crossings: dict[Hashable, Crossing] = {}
    state = [_Rank(actions) for actions in ranks]
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    runnable = deque(range(len(ranks)))
    while runnable:
        number = runnable.popleft()
        rank = state[number]
        while rank.todo:
            action = rank.todo[0]
            if isinstance(action, Wait):
                if action.message not in crossings:
                    waiting[action.message].append(number)
                    break
                rank.wait(str(action.message), crossings[action.message].arrives)
            elif isinstance(action, Post):
                for message, crossing in links[action.link].post(action, rank.clock):
                    crossings[message] = crossing
                    runnable.extend(waiting.pop(message, ()))
            else:
                rank.compute(action)
            rank.todo.popleft()
    stuck = [f"rank {i} waits for {rank.todo[0][0]}" for i, rank in enumerate(state) if rank.todo]
    assert not stuck, "the ranks deadlock: " + "; ".join(stuck)
    return Replay(
        tuple(tuple(rank.computed) for rank in state), tuple(tuple(rank.waited) for rank in state),
        tuple(rank.clock for rank in state), crossings,
    )  # fmt: skip


def links_of(ranks: Sequence[Sequence[Action]]) -> dict[Hashable, Link]:
    """The links over which the ranks post messages, before anything is posted."""
    posters: dict[Hashable, int] = defaultdict(int)
    order: dict[Hashable, dict[Hashable, None]] = defaultdict(dict)  # of each link, as its first rank posts
    for actions in ranks:
        for action in actions:
            if isinstance(action, Post):
                posters[action.message] += 1
                order[action.link][action.message] = None
    return {link: Link(link, deque(messages), posters) for link, messages in order.items()}


class _Rank:
    def __init__(self, actions: Sequence[Action]) -> None:
        self.todo = deque(actions)
        self.clock: float = 0  # whole numbers stay whole
        self.computed: list[Lane] = []
        self.waited: list[Lane] = []

    def compute(self, action: Compute) -> None:
        end = self.clock + action.duration
        self.computed.append(Lane(action.label, self.clock, end))
        self.clock = end

    def wait(self, label: str, until: float) -> None:
        if until > self.clock:
            self.waited.append(Lane(label, self.clock, until))
            self.clock = until


class Link:
    """The messages of one link, those that are not yet on their way, in order."""

    def __init__(self, name: Hashable, order: deque[Hashable], posters: Mapping[Hashable, int]) -> None:
        self._name = name
        self._order = order
        self._missing = {message: posters[message] for message in order}
        self._begun: dict[Hashable, tuple[float, Post]] = {}
        self._free: float = 0

    def post(self, post: Post, time: float) -> list[tuple[Hashable, Crossing]]:
        """The messages whose arrival is known by this, with it."""
        message = post.message
        self._missing[message] -= 1
        self._begun[message] = (max(time, self._begun[message][0] if message in self._begun else time), post)
        known = []
        while self._order and not self._missing[self._order[0]]:
            begun, of = self._begun.pop(self._order[0])
            departs = max(begun, self._free)
            self._free = departs + of.occupies
            known.append((self._order.popleft(), Crossing(self._name, begun, departs, self._free + of.latency)))
        return known


def actions_of(
    schedule: Schedule,
    durations: Durations = NOMINAL_DURATIONS,
    occupies: Latency = 0.0,
    latency: Latency = 0.0,
    *,
    sends_in_flight: int = SENDS_IN_FLIGHT,
    posted_ahead: bool = True,
    duplex: bool = True,
) -> list[list[Action]]:
    """What each rank of a pipeline does in one step.

    durations        as simulate() takes them
    occupies         time that a message keeps its link busy, bytes / bandwidth: a number, or a function of the send
    latency          time from leaving the link to arriving, likewise
    sends_in_flight  a rank waits for the oldest of so many before it sends another (exchange.py)
    posted_ahead     as the schedule has it; without, receives are posted where their message is needed
    duplex           the two directions of a pair of ranks are links of their own; without, a pair's messages follow
                     each other in both directions, as on one NCCL communicator
    """
    return [
        _RankActions(schedule, rank, durations, occupies, latency, sends_in_flight, posted_ahead, duplex).build()
        for rank in range(len(schedule))
    ]


class _RankActions:
    def __init__(
        self, schedule: Schedule, rank: int, durations: Durations, occupies: Latency, latency: Latency,
        sends_in_flight: int, posted_ahead: bool, duplex: bool,
    ) -> None:  # fmt: skip
        self._schedule, self._rank = schedule, rank
        self._duration: Callable[[Instruction], float] = (
            durations if callable(durations) else lambda instruction: durations[instruction.op]
        )
        self._occupies = occupies if callable(occupies) else lambda _: occupies
        self._latency = latency if callable(latency) else lambda _: latency
        self._in_flight, self._posted_ahead, self._duplex = sends_in_flight, posted_ahead, duplex

    def build(self) -> list[Action]:
        actions: list[Action] = []
        sent: deque[Instruction] = deque()
        posted: set[Instruction] = set()
        for instruction in self._schedule[self._rank]:
            if instruction.op in COMPUTE:
                need = _received_for(instruction)
                if need in posted:
                    posted.remove(need)
                    if not self._posted_ahead:
                        actions.append(self._post(need))
                    actions.append(Wait(_sending(need)))
                actions.append(Compute(str(instruction), self._duration(instruction)))
            elif instruction.op in SENDS:
                if len(sent) >= self._in_flight:
                    actions.append(Wait(sent.popleft()))
                actions.append(self._post(instruction))
                sent.append(instruction)
            else:
                posted.add(instruction)
                if self._posted_ahead:
                    actions.append(self._post(instruction))
        return actions + [Wait(message) for message in sent]

    def _post(self, instruction: Instruction) -> Post:
        size = self._schedule.pipeline_size
        own, peer = self._rank, instruction.peer_stage % size
        link = (own, peer) if instruction.op in SENDS else (peer, own)
        send = _sending(instruction)
        link = link if self._duplex else (min(link), max(link))
        return Post(send, link, self._occupies(send), self._latency(send))


def _received_for(computation: Instruction) -> Instruction:
    """The receive that brings what a computation needs, where another rank makes it."""
    op = Op.RECV_FORWARD if computation.op is Op.FORWARD else Op.RECV_BACKWARD
    return Instruction(op, computation.stage, computation.micro_batch)


_SENT_AS = {Op.RECV_FORWARD: Op.SEND_FORWARD, Op.RECV_BACKWARD: Op.SEND_BACKWARD}


def _sending(message: Instruction) -> Instruction:
    """The one name of a message at both of its ends: the send."""
    if message.op in SENDS:
        return message
    return Instruction(_SENT_AS[message.op], message.peer_stage, message.micro_batch)
