"""What a pipeline's step is made of and what became of it on a clock: the words of clock.py."""
from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.orders import AnyOrder, name_of

# (time that a message keeps its link, time from leaving the link to arriving)
Boundary = tuple[float, float]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in each global stage (chunk * pipeline size + pipeline rank).

    forward   a forward pass
    backward  a whole backward pass; for 'zb-h1' its first half, the gradient of the input (and recomputation)
    weight    for 'zb-h1' the second half, the gradients of the weights; for other schedules not looked at
    first     what the stage's first forward pass takes longer, for instance waiting for gathered weights
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] = ()
    first: tuple[float, ...] = ()


@dataclass(frozen=True)
class Boundaries:
    """What messages cost, by the pipeline rank that sends: (seconds on the link, seconds of latency behind it).

    forward   to the next rank, from the last one to the first (only where there are several chunks)
    backward  to the previous rank, from the first one to the last
    duplex    the two directions of a pair of ranks do not hold each other up. Without, a pair's messages follow each
              other in the order of being posted, as in the one communicator that NCCL and RCCL have for a pair.
    """

    forward: tuple[Boundary, ...]
    backward: tuple[Boundary, ...]
    duplex: bool = True


@dataclass(frozen=True)
class Pipeline:
    """What is run: the arguments of `run_pipeline`."""

    schedule: AnyOrder
    size: int
    chunks: int
    micro_batches: int
    times: StageTimes
    boundaries: Boundaries | None = None
    cores: float | None = None
    demand: float = 1.0

    @property
    def name(self) -> str:
        return name_of(self.schedule)


@dataclass(frozen=True)
class PipelineRun:
    """A step on the clock; seconds, from the start of the step. By pipeline rank:

    busy           time spent computing
    waited         time spent waiting until the rank is done
    message_wait   the part of `waited` after the result waited for had been computed: what messages cost, and what is
                   lost where stages differ so that a receive is posted late
    ends           when the rank is done: its last pass, and what it has sent

    By global stage, for what is done behind passes (gathering weights, reducing gradients):

    first_forward_start   start of its first forward pass
    last_backward_start   start of the last pass that makes gradients of weights (under 'zb-h1' a second half)
    last_backward_end     end of it
    """

    pipeline: Pipeline
    makespan: float
    busy: tuple[float, ...]
    waited: tuple[float, ...]
    message_wait: tuple[float, ...]
    ends: tuple[float, ...]
    first_forward_start: tuple[float, ...]
    last_backward_start: tuple[float, ...]
    last_backward_end: tuple[float, ...]

    @property
    def bubble(self) -> tuple[float, ...]:
        """Of each rank the time in which it neither computes nor waits for a message under way."""
        return tuple(self.makespan - b - w for b, w in zip(self.busy, self.message_wait, strict=True))

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time in which they do not compute, between 0 and 1."""
        total = self.makespan * len(self.busy)
        return 1 - sum(self.busy) / total if total else 0.0
