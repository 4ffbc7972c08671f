"""Time of a stage's passes for one micro-batch.

Each pass is simulated with one clock for the device's computations and one for each group's
messages. While messages are in flight, computations are slower (speed_beside_messages): both use
the device's memory, and the kernels of messages occupy some of its compute units. The host starts
the kernels of a pass one after another: if this takes longer than the kernels, the device waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.engine.zero_plan import BucketInstruction, BucketOp, ZeroPlan
from megatron.kernels.cost import Memory
from megatron.planner.cluster import Cluster
from megatron.planner.events import (
    Alloc,
    Free,
    GroupMessage,
    Pass,
    Post,
    Recomputed,
    Sum,
    Trace,
    Wait,
)
from megatron.planner.rates import DeviceRates, seconds_of
from megatron.planner.stage import Sends, StageWork, ZeroStep, stage_passes, zero_steps

MessageSeconds = Callable[[str, float, str], float]
"""Function from a message's kind, bytes and group to its seconds."""


def crowding(config: Config, cluster: Cluster) -> float:
    """Return the ranks per core while a whole node computes, at least 1; 1 without shared cores."""
    if cluster.shared_cores is None:
        return 1.0
    return max(
        1.0, min(config.parallel.world_size, cluster.devices_per_node) / cluster.shared_cores
    )


class PassSeconds(NamedTuple):
    """Seconds of one pass.

    compute    computation, without recomputation
    recompute  recomputation
    waited     waits for messages of the layers, and the time by which these slow computations down
    shared     the same for ZeRO's messages
    """

    compute: float
    recompute: float
    waited: float
    shared: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.waited + self.shared


class _Timed(NamedTuple):
    """Pass with the seconds of its computations on a device.

    steps     posts and waits of messages, and the seconds between them
    compute   seconds of computations, without recomputation
    recompute seconds of recomputation
    complete  (index of a parameter, share of the pass after which its gradient is complete)
    kernels   number of kernels
    """

    steps: tuple[float | Post | Wait, ...]
    compute: float
    recompute: float
    complete: tuple[tuple[int, float], ...]
    kernels: int


@functools.lru_cache(maxsize=1 << 14)
def _timed(of: Pass, rates: DeviceRates) -> _Timed:
    steps: list[float | Post | Wait] = []
    sums = {False: 0.0, True: 0.0}
    complete = list[tuple[int, float]]()
    since = 0.0
    kernels = 0
    for step in of.steps:
        if isinstance(step, Post | Wait):
            steps += [since, step]
            since = 0.0
        elif isinstance(step, Sum):
            complete += [(step.parameter, sum(sums.values()))] * step.complete
        elif not isinstance(step, Alloc | Free):
            operation = step.operation if isinstance(step, Recomputed) else step
            seconds = seconds_of(operation, rates)
            kernels += operation.kernels if isinstance(operation, Memory) else 1
            sums[isinstance(step, Recomputed)] += seconds
            since += seconds
    total = sum(sums.values())
    shares = ((parameter, at / total if total else 1.0) for parameter, at in complete)
    return _Timed((*steps, since), sums[False], sums[True], tuple(shares), kernels)


def _slowed_by(seconds: float, messages_s: float, speed: float) -> float:
    """Return the seconds by which messages slow down computations of `seconds`.

    messages_s  seconds for which messages are in flight, from the start of the computations
    speed       share of their speed that computations keep beside messages
    """
    return (1.0 - speed) * min(seconds / speed, max(0.0, messages_s))


def pass_seconds(
    of: Pass, rates: DeviceRates, message_s: MessageSeconds | None, *, hides: bool = True
) -> PassSeconds:
    """Simulate a pass. A message that is not waited for in it overlaps with the next pass.

    message_s  seconds of a message; None: messages take no time
    hides      whether messages overlap with computation; otherwise each blocks until it arrives
    """
    timed, compute, recompute, _, _ = _timed(of, rates)
    if message_s is None:
        return PassSeconds(compute, recompute, 0.0)
    clock = waited = latest = 0.0
    arrives: dict[int, float] = {}
    free: dict[str, float] = {}  # the links of each group
    for step in timed:
        if isinstance(step, float):
            in_flight = latest - clock
            if in_flight > 0:
                slowed = _slowed_by(step, in_flight, rates.speed_beside_messages)
                waited += slowed
                clock += slowed
            clock += step
            continue
        if isinstance(step, Post):
            group = step.message.group
            arrival = max(clock, free.get(group, 0.0)) + message_s(*step.message)
            free[group] = arrives[step.number] = arrival
            latest = max(latest, arrival)
            if hides:
                continue
        arrival = max(clock, arrives.get(step.number, 0.0))
        waited = waited + arrival - clock
        clock = arrival
    return PassSeconds(compute, recompute, waited)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a stage's passes for one micro-batch.

    backward, weight  halves of a split backward pass; otherwise `weight` takes no time
    overhead          host overhead for each of the three passes
    first, last       see ZeroWaits
    """

    forward: PassSeconds
    backward: PassSeconds
    weight: PassSeconds
    overhead: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0

    @property
    def forward_s(self) -> float:
        return self.forward.total + self.overhead[0]

    @property
    def backward_s(self) -> float:
        return self.backward.total + self.overhead[1]

    @property
    def weight_s(self) -> float:
        return self.weight.total + self.overhead[2]


def stage_seconds(
    trace: Trace,
    stage: StageWork,
    rates: DeviceRates,
    message_s: MessageSeconds | None,
    *,
    hides: bool = True,
    plan: ZeroPlan | None = None,
) -> StageSeconds:
    """Return the seconds of a stage's passes; message_s None: messages take no time.

    plan  ZeRO's plan, with this stage as number 0, if passes send its messages
    """
    passes = {}
    launches = dict[str, float]()
    of_pass = dict[Pass, TimedPass]()
    for name, runs in stage_passes(trace, stage).items():
        kernels = sum(run.times * _timed(run.of, rates).kernels for run in runs)
        launches[name] = rates.launch_s * kernels
        timed_runs = [(run, pass_seconds(run.of, rates, message_s, hides=hides)) for run in runs]
        of_pass |= {
            run.of: TimedPass(one.total, _timed(run.of, rates).complete) for run, one in timed_runs
        }
        compute = sum(run.times * one.compute for run, one in timed_runs if not run.recompute)
        recompute = sum(
            run.times * (one.recompute + one.compute * run.recompute) for run, one in timed_runs
        )
        waited = sum(run.times * one.waited for run, one in timed_runs)
        passes[name] = PassSeconds(compute, recompute, waited)
    first = last = 0.0
    if plan is not None and message_s is not None:
        steps = zero_steps(trace, stage, plan)
        by_pass, first, last = zero_waits(
            steps, of_pass, message_s, hides, rates.speed_beside_messages
        )
        for name, shared in by_pass.items():
            passes[name] = passes[name]._replace(shared=shared)
    recomputed = sum(stage.recomputed)
    each = rates.instruction_overhead_s
    ahead = rates.layer_forward_overhead_s
    back = rates.layer_backward_overhead_s
    backward = each + back * stage.layers + ahead * recomputed
    overheads = each + ahead * stage.layers, backward, each if stage.split else 0.0
    # the host starts kernels while the device computes
    overhead = tuple(
        max(seconds, launches[name] - timed.total)
        for seconds, (name, timed) in zip(overheads, passes.items(), strict=True)
    )
    return StageSeconds(
        passes["forward"], passes["backward"], passes["weight"], overhead, first, last
    )


class ZeroWaits(NamedTuple):
    """Seconds for which the passes of a micro-batch wait for ZeRO's messages.

    by_pass  in the middle of a step, by the name of the pass
    first    additional seconds in the first forward pass of a step, whose weights were not gathered
             during the previous backward pass
    last     from the end of the last backward pass of a step until its sums have arrived
    """

    by_pass: Mapping[str, float]
    first: float
    last: float


class TimedPass(NamedTuple):
    """Duration of a pass without ZeRO's messages.

    complete  (index of a parameter, share of the pass after which its gradient is complete)
    """

    seconds: float
    complete: tuple[tuple[int, float], ...]


_NOTHING = TimedPass(0.0, ())


def zero_waits(
    steps: Sequence[ZeroStep],
    passes: Mapping[Pass, TimedPass],
    message_s: MessageSeconds,
    hides: bool,
    speed: float = 1.0,
) -> ZeroWaits:
    """Simulate ZeRO's messages in two micro-batches; the second represents most others.

    hides  whether messages overlap with computation; otherwise each blocks until it arrives
    speed  share of its speed that a computation keeps beside messages

    Messages in the same group follow one another.
    """
    clock = waited = latest = 0.0
    free = dict[str, float]()
    arrives: dict[tuple[BucketOp, int], float] = {}

    def wait_until(moment: float) -> None:
        nonlocal clock, waited
        waited += max(0.0, moment - clock)
        clock = max(clock, moment)

    def send(instruction: BucketInstruction, messages: Iterable[GroupMessage]) -> None:
        nonlocal latest
        at = clock
        for message in messages:
            at = max(at, free.get(message.group, 0.0)) + message_s(*message)
            free[message.group] = at
        arrives[instruction[:2]] = at
        latest = max(latest, at)
        if not hides:
            wait_until(at)

    rounds = list[dict[str, float]]()
    for _ in range(2):
        waits = dict.fromkeys((step.name for step in steps), 0.0)
        for step in steps:
            timed = _NOTHING if step.of is None else passes.get(step.of, _NOTHING)
            waited = 0.0
            for instruction, messages in step.before:
                if instruction[:2] not in arrives:
                    send(instruction, messages)
                wait_until(arrives.pop(instruction[:2]))
            for instruction, messages in step.beside:
                send(instruction, messages)
            computed = 0.0
            for share, sends in _sums(step, timed):
                seconds = timed.seconds * (share - computed)
                slowed = _slowed_by(seconds, latest - clock, speed)
                waited += slowed
                clock += seconds + slowed
                computed = share
                for instruction, messages in sends:
                    if instruction.op is BucketOp.REDUCE:
                        send(instruction, messages)
                    elif instruction.op is BucketOp.ACCUMULATE:
                        wait_until(arrives.pop((BucketOp.REDUCE, instruction.bucket), 0.0))
            waits[step.name] += waited
        rounds.append(waits)
    opening, steady = rounds
    first = max(0.0, opening["forward"] - steady["forward"]) if hides else 0.0
    last = max([clock, *(at for (op, _), at in arrives.items() if op is BucketOp.REDUCE)]) - clock
    return ZeroWaits(steady, first, last)


def _sums(step: ZeroStep, timed: TimedPass) -> Iterator[tuple[float, Sends]]:
    """Yield (share of the step's seconds, instructions of `step.after` that begin then)."""
    complete = {
        step.buckets[parameter]: share for parameter, share in timed.complete if step.buckets
    }
    sends = list[tuple[BucketInstruction, tuple[GroupMessage, ...]]]()
    share = 0.0
    for instruction, messages in step.after:
        sends.append((instruction, messages))
        if instruction.op is BucketOp.REDUCE:
            share = max(share, complete.get(instruction.bucket, 1.0))
            yield share, tuple(sends)
            sends = []
    yield 1.0, tuple(sends)
