"""links.replay for ranks that share a machine's cores: while more are wanted than there are, all compute more slowly.

Processor sharing: with n ranks computing at a time, of which each keeps `demand` cores busy, every one of them goes on
at min(1, cores / (n demand)) of its speed. Messages take no cores. Times are floating point.
"""
from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from megatron.pipeline.links import Action, Compute, Crossing, Lane, Post, Replay, Wait, links_of


def replay(ranks: Sequence[Sequence[Action]], cores: float, demand: float = 1.0) -> Replay:
    """Run each rank's actions in order, as links.replay does. A deadlock fails an assertion."""
    assert cores > 0 and demand > 0, f"{cores} cores, {demand} wanted by a rank"
    return _Machine(ranks, cores, demand).run()


class _Machine:
    def __init__(self, ranks: Sequence[Sequence[Action]], cores: float, demand: float) -> None:
        self._todo = [deque(actions) for actions in ranks]
        self._links = links_of(ranks)
        self._cores, self._demand = cores, demand
        self._now = 0.0
        self._crossings: dict[Hashable, Crossing] = {}
        self._left: dict[int, float] = {}  # ranks that compute, and how long they would have to on free cores
        self._computes_since = [0.0] * len(ranks)
        self._waits_since: dict[int, float] = {}
        self._waiting: dict[Hashable, list[int]] = defaultdict(list)  # for messages that are not on their way
        self._arrivals: list[tuple[float, int]] = []  # and for those that are: (when, rank)
        self._computed: list[list[Lane]] = [[] for _ in ranks]
        self._waited: list[list[Lane]] = [[] for _ in ranks]
        self._ends = [0.0] * len(ranks)

    def run(self) -> Replay:
        for rank in range(len(self._todo)):
            self._go_on(rank)
        while self._left or self._arrivals:
            self._advance()
        stuck = [f"rank {rank} waits for {todo[0][0]}" for rank, todo in enumerate(self._todo) if todo]
        assert not stuck, "the ranks deadlock: " + "; ".join(stuck)
        return Replay(
            tuple(map(tuple, self._computed)), tuple(map(tuple, self._waited)), tuple(self._ends), self._crossings
        )

    def _advance(self) -> None:
        """To the next time at which a computation ends or a message arrives."""
        speed = min(1.0, self._cores / (self._demand * len(self._left))) if self._left else 1.0
        first = min(self._left, key=self._left.__getitem__, default=None)
        ends = self._now + self._left[first] / speed if first is not None else float("inf")
        if self._arrivals and self._arrivals[0][0] <= ends:
            first, ends = None, self._arrivals[0][0]
        done = (ends - self._now) * speed
        for rank in self._left:
            self._left[rank] -= done
        self._now = ends
        if first is not None:
            del self._left[first]
            computed = self._todo[first].popleft()
            assert isinstance(computed, Compute)
            self._computed[first].append(Lane(computed.label, self._computes_since[first], self._now))
            self._go_on(first)
        while self._arrivals and self._arrivals[0][0] <= self._now:
            self._go_on(heapq.heappop(self._arrivals)[1])

    def _go_on(self, rank: int) -> None:
        """Do what takes no time, until the rank computes, waits or is done."""
        todo = self._todo[rank]
        while todo:
            action = todo[0]
            if isinstance(action, Compute):
                self._left[rank], self._computes_since[rank] = action.duration, self._now
                return
            if isinstance(action, Wait):
                if not self._arrived(rank, action.message):
                    return
            else:
                self._post(action)
            todo.popleft()
        self._ends[rank] = self._now

    def _arrived(self, rank: int, message: Hashable) -> bool:
        """Whether the message is there; if not, the rank goes on when it is."""
        crossing = self._crossings.get(message)
        if crossing is None or crossing.arrives > self._now:
            self._waits_since.setdefault(rank, self._now)
            if crossing is None:
                self._waiting[message].append(rank)
            else:
                heapq.heappush(self._arrivals, (crossing.arrives, rank))
            return False
        since = self._waits_since.pop(rank, self._now)
        if since < self._now:
            self._waited[rank].append(Lane(str(message), since, self._now))
        return True

    def _post(self, action: Post) -> None:
        for message, crossing in self._links[action.link].post(action, self._now):
            self._crossings[message] = crossing
            for rank in self._waiting.pop(message, ()):
                heapq.heappush(self._arrivals, (crossing.arrives, rank))
