"""When each instruction of a schedule runs, given how long instructions take. Pure arithmetic on lists.

Units are the caller's: seconds, or multiples of a forward pass.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.pipeline.instructions import COMPUTE, Instruction, Op, Schedule

Durations = Mapping[Op, float] | Callable[[Instruction], float]
Latency = float | Callable[[Instruction], float]

# A backward pass multiplies twice as many matrices as a forward pass: half for its input, half for its weights.
NOMINAL_DURATIONS: Mapping[Op, float] = {
    Op.FORWARD: 1.0,
    Op.BACKWARD: 2.0,
    Op.BACKWARD_INPUT: 1.0,
    Op.BACKWARD_WEIGHT: 1.0,
}


class Span(NamedTuple):
    """A computation and the time it takes."""

    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The simulated step: for each rank its computations in order."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first computation's start to the last one's end, over all ranks."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.ranks)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they wait, between 0 and 1."""
        total = self.makespan * len(self.ranks)
        return 1 - sum(self.busy) / total if total else 0.0


def simulate(schedule: Schedule, durations: Durations = NOMINAL_DURATIONS, latency: Latency = 0.0) -> Timeline:
    """Run `schedule` on a clock.

    durations  time of a computation: by its Op, or a function of the instruction
    latency    time from the end of a computation until its result can be used on another rank: a number, or a function
               of the computation that produces it. Messages of different sizes or links are told apart there.

    A rank computes in its own order and waits for what an instruction needs; messages travel while it computes.
    """
    orders = [[i for i in rank if i.op in COMPUTE] for rank in schedule]
    return Timeline(run_orders(orders, durations, latency))


def run_orders(
    orders: Sequence[Sequence[Instruction]], durations: Durations = NOMINAL_DURATIONS, latency: Latency = 0.0
) -> tuple[tuple[Span, ...], ...]:
    """The spans of each rank's computations; stage g is on rank g % len(orders)."""
    size = len(orders)
    last = max((i.stage for order in orders for i in order), default=0)
    duration = durations if callable(durations) else _by_op(durations)
    delay = latency if callable(latency) else lambda _: latency
    spans: list[list[Span]] = [[] for _ in range(size)]
    finished: dict[tuple[str, int, int], Span] = {}
    waiting: dict[tuple[str, int, int], int] = {}
    runnable = deque(range(size))
    while runnable:
        rank = runnable.popleft()
        clock = spans[rank][-1].end if spans[rank] else 0.0
        while len(spans[rank]) < len(orders[rank]):
            instruction = orders[rank][len(spans[rank])]
            start = clock
            missing = None
            for need in _needs(instruction, last):
                done = finished.get(need)
                if done is None:
                    missing = need
                    break
                remote = done.instruction.stage % size != rank
                start = max(start, done.end + (delay(done.instruction) if remote else 0.0))
            if missing is not None:
                waiting[missing] = rank
                break
            clock = start + duration(instruction)
            span = Span(instruction, start, clock)
            spans[rank].append(span)
            result = _result(instruction)
            finished[result] = span
            if result in waiting:
                runnable.append(waiting.pop(result))
    stuck = [str(orders[r][len(spans[r])]) for r in range(size) if len(spans[r]) < len(orders[r])]
    if stuck:
        raise ConfigError(f"the schedule deadlocks before {'; '.join(stuck)}")
    return tuple(tuple(of_rank) for of_rank in spans)


def _by_op(durations: Mapping[Op, float]) -> Callable[[Instruction], float]:
    return lambda instruction: durations[instruction.op]


def _result(instruction: Instruction) -> tuple[str, int, int]:
    """What a computation makes: an activation, the gradient of its input, or the gradient of weights."""
    kind = {Op.FORWARD: "activation", Op.BACKWARD_WEIGHT: "weights"}.get(instruction.op, "gradient")
    return kind, instruction.stage, instruction.micro_batch


def _needs(instruction: Instruction, last_stage: int) -> list[tuple[str, int, int]]:
    op, stage, micro_batch = instruction
    if op is Op.FORWARD:
        return [("activation", stage - 1, micro_batch)] if stage else []
    if op is Op.BACKWARD_WEIGHT:
        return [("gradient", stage, micro_batch)]
    own = ("activation", stage, micro_batch)
    return [own] if stage == last_stage else [own, ("gradient", stage + 1, micro_batch)]
