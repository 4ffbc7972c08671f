"""Time of a training step, and of its parts, for any configuration on any described machine.

The passes of the stages (planner/stage.py) run on the clock of the schedule (pipeline/clock.py),
with the messages between stages. The last pass is followed by the reduction of the remaining
gradients, the optimizer, and the wait for new weights at the beginning of the next step. Messages
of different kinds are assumed to slow down neither each other nor computations. Recording a trace
that is not cached needs torch, but no device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.engine.buckets import BucketPlan
from megatron.engine.optimizer_state import (
    ROUND,
    has_kernel,
    optimizer_state,
    wants_full_parameters,
)
from megatron.engine.zero_plan import BucketInstruction, BucketOp, Reductions, ZeroPlan, zero_of
from megatron.errors import ConfigError
from megatron.kernels.choose import assumed_fusions, choose_fusions
from megatron.model import formulas
from megatron.model.stages import stage_owners, stages_of_rank
from megatron.parallel.sharding import Sharding
from megatron.pipeline.clock import Boundaries, Pipeline, PipelineRun, StageTimes, run_pipeline
from megatron.pipeline.schedule import check_clock
from megatron.planner.channels import OF_PASSES, Channels
from megatron.planner.cluster import Cluster
from megatron.planner.compute import BASES, PUBLISHED, Confidence, Used
from megatron.planner.events import GroupMessage, Pass, Trace
from megatron.planner.memory import RankMemory, memory_of_ranks
from megatron.planner.placement import (
    Placement,
    choose_placement,
    other_dispatch,
    over_nodes,
    with_dispatch,
)
from megatron.planner.rates import DeviceRates, rates_of, seconds_of
from megatron.planner.stage import (
    StageWork,
    elements_of_rank,
    messages_in_passes,
    plan_in_passes,
    plan_of_rank,
    stage_flops,
    stages_of,
    stages_on,
    tied_elements,
)
from megatron.planner.timing.passes import (
    StageSeconds,
    crowding,
    stage_seconds,
)
from megatron.planner.trace import trace
from megatron.planner.zero import messages_at_end, messages_of

COMPONENTS = (
    "forward",
    "backward",
    "recompute",
    "layer messages",
    "bubble",
    "pipeline messages",
    "data-parallel",
    "optimizer",
    "host",
    "stragglers",
)
"""forward, backward    computations of the passes
recompute            recomputation within backward passes
layer messages       waiting for messages in tensor, context and expert groups in all passes
bubble               neither computing nor waiting for a message in flight
pipeline messages    waiting for messages between stages whose content has been computed
data-parallel        messages of gradients and weights that no pass hides, and the tied embedding
optimizer            the update
host                 host overhead of layers' passes, of instructions and of the step
stragglers           waiting for the device that is expected to be the slowest"""


_OF_DEVICES = "forward", "backward", "recompute", "bubble", "optimizer"
"""Components that grow with the time that the slowest device takes for its computations."""


@dataclass(frozen=True, repr=False)
class Estimate:
    """Estimate for one step with the full global batch, in the steady state of a run.

    breakdown      seconds of each of COMPONENTS, on the busiest pipeline rank
    channels       the links, which record the figures used
    run            the schedule on its clock
    stage_seconds  by global stage
    """

    config: Config
    cluster: Cluster
    placement: Placement
    breakdown: Mapping[str, float]
    channels: Channels
    run: PipelineRun
    stage_seconds: tuple[StageSeconds, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step, the sum of the parts."""
        return sum(self.breakdown.values())

    @property
    def words(self) -> str:
        """Return the step's seconds, its MFU if there is a peak, and the share of each part."""
        mfu = "" if self.mfu is None else f", MFU {100 * self.mfu:.1f} %"
        shares = (
            f"{name} {100 * s / self.seconds:.1f} %" for name, s in self.breakdown.items() if s
        )
        noise = f"+- {100 * self.run_variation:.1f} % between runs"
        return f"{self.seconds:.4g} s (predicted; {noise}){mfu}: {', '.join(shares)}"

    @property
    def run_variation(self) -> float:
        """Standard deviation of the step's seconds in identical runs, as a share."""
        return self.cluster.figures["run_variation"].value

    @property
    def devices(self) -> int:
        return self.config.parallel.world_size

    @property
    def tokens_per_s(self) -> float:
        return self.config.batch.global_batch_size * self.config.model.seq_length / self.seconds

    @functools.cached_property
    def model_flops(self) -> float:
        """FLOPs of a step's matrix products and attention on all devices, without recomputation."""
        return self._flops(recompute=False)

    @functools.cached_property
    def hardware_flops(self) -> float:
        """FLOPs of a step's matrix products and attention on all devices, with recomputation."""
        return self._flops(recompute=None)

    def _flops(self, *, recompute: bool | None) -> float:
        """Count the FLOPs of a step, excluding the vocabulary's padding."""
        config = self.config
        parallel = self.config.parallel
        traced = trace(self.config, self.cluster.device_type)
        of_pipeline = sum(
            n * sum(stage_flops(traced, stage, recompute=recompute).values())
            for stage, n in Counter(stages_of(config)).items()
        )
        tensor = parallel.tensor_model_parallel_size
        head = traced.head
        of_pipeline -= head.padding(tensor) * (head.forward.flops() + head.backward.flops())
        return of_pipeline * tensor * parallel.gradient_ranks * config.num_micro_batches()

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s utilization; None if the machine's file has no peak for this dtype."""
        return self._utilization(self.model_flops)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP/s utilization, with recomputation; None without a peak."""
        return self._utilization(self.hardware_flops)

    def _utilization(self, flops: float) -> float | None:
        peak = self.cluster.peak_tflops.get(self.config.precision.dtype_name)
        return formulas.utilization(flops, self.seconds, self.devices, peak)

    @functools.cached_property
    def confidence(self) -> Confidence:
        """Figures that this estimate uses."""
        # not the shared rates, which record what other estimates use
        rates = DeviceRates(self.cluster, *_rate_options(self.config))
        slowest_share(self.config, rates)
        device = self.cluster.device_type
        traced = trace(self.config, device)
        for stage in set(stages_of(self.config)):
            stage_seconds(
                traced,
                stage,
                rates,
                self.channels.seconds,
                hides=device != "cpu",
                plan=plan_in_passes(self.config, traced, stage),
            )
        update_seconds(self.config, device, rates)
        used = rates.used | self.channels.used
        if self.config.engine.cpu_offload and device != "cpu":
            source = self.cluster.sources.get("host", "not named")
            for name, gb_per_s in self.cluster.host._asdict().items():
                if name.endswith("gb_per_s"):
                    used |= {Used(f"host.{name}", f"{gb_per_s:g}", PUBLISHED, source)}
        return Confidence(tuple(sorted(used, key=lambda one: (BASES.index(one.basis), one))))

    @functools.cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """Memory per device for each pipeline rank."""
        return memory_of_ranks(self.config, self.cluster.device_type)


def estimate(config: Config, cluster: Cluster, placement: Placement | None = None) -> Estimate:
    """Estimate the time of a step on a placement, by default the cheapest one.

    Raises ConfigError for a world size that does not fit on the machine, for a dtype for which its
    file has no rates, and for --cpu-offload if the file does not describe the host. Raises
    MegatronError if the extension that simulates schedules is missing.
    """
    check_clock()
    placement = placement or choose_placement(config, cluster)
    config = over_nodes(config, placement.layout)
    rates = _rates(config, cluster)
    channels = Channels(config, cluster, placement)
    traced = trace(config, cluster.device_type)
    stages = stages_of(config)
    crowd = crowding(config, cluster)
    hides = cluster.device_type != "cpu"  # gloo's messages need the cores
    each = {
        stage: stage_seconds(
            traced,
            stage,
            rates,
            channels.seconds,
            hides=hides,
            plan=plan_in_passes(config, traced, stage),
        )
        for stage in set(stages)
    }
    seconds = tuple(each[stage] for stage in stages)
    run = _run(config, cluster, channels, seconds, traced)
    reduced, gathered = exchange(config, traced, channels, run, seconds, hides=hides)
    breakdown = _components_of_passes(config, seconds, run)
    breakdown["data-parallel"] += crowd * (reduced + gathered)
    if tied := tied_elements(config, traced):
        breakdown["data-parallel"] += channels.seconds("all_reduce", 4 * tied, "ends")
    update = optimizer_seconds(config, cluster, rates)
    breakdown["optimizer"] = crowd * (update + full_matrix_seconds(config, cluster, channels))
    breakdown["host"] += rates.step_overhead_s
    of_devices = sum(breakdown[name] for name in _OF_DEVICES)
    breakdown["stragglers"] = slowest_share(config, rates) * of_devices
    return Estimate(
        config,
        cluster,
        placement,
        {name: breakdown[name] for name in COMPONENTS},
        channels,
        run,
        seconds,
    )


def _rates(config: Config, cluster: Cluster) -> DeviceRates:
    return rates_of(cluster, *_rate_options(config))


def _rate_options(config: Config) -> tuple[str, bool]:
    """Return the dtype of the products, and whether passes are recorded as graphs."""
    return config.precision.dtype_name, config.kernels.cuda_graph_impl is not None


def slowest_share(config: Config, rates: DeviceRates) -> float:
    """Return the share by which the slowest device is expected to lengthen computations."""
    return rates.slowdown_of_slowest(config.parallel.world_size, config.num_micro_batches())


class DispatchChoice(NamedTuple):
    """Seconds of a step with tokens sent to experts as in an estimate, and the other way.

    directly  whether the estimate sends them directly to ranks, not over nodes
    """

    directly: bool
    seconds: float
    other_s: float

    @property
    def words(self) -> str:
        """Return the comparison, and the flag for the other way if that is faster."""
        ways = "directly", "over nodes"
        here, other = ways if self.directly else ways[::-1]
        text = (
            f"tokens go to their experts' ranks {here}: {self.seconds:.4g} s a step (predicted); {other} "
            f"{self.other_s:.4g} s"
        )
        if self.other_s >= self.seconds:
            return text
        flag = f"--expert-ranks-per-node {'auto' if self.directly else 1}"
        return f"{text}, {1 - self.other_s / self.seconds:.1%} less: give {flag}"


def dispatch_choice(predicted: Estimate) -> DispatchChoice | None:
    """Compare both ways in which tokens may go to experts on other nodes; None: there is one."""
    placement = predicted.placement
    other = other_dispatch(predicted.config, placement)
    if other is None:
        return None
    config = with_dispatch(predicted.config, 0)
    seconds = estimate(config, predicted.cluster, other).seconds
    return DispatchChoice(placement.layout.expert_node == 1, predicted.seconds, seconds)


# -- passes ----------------------------------------------------------------------------------------


def busiest_rank(run: PipelineRun) -> int:
    """Find the pipeline rank that computes longest; in a tie, the first one."""
    return max(range(len(run.busy)), key=run.busy.__getitem__)


def _run(
    config: Config,
    cluster: Cluster,
    channels: Channels,
    seconds: tuple[StageSeconds, ...],
    traced: Trace,
) -> PipelineRun:
    parallel = config.parallel
    boundaries = None
    crowd = crowding(config, cluster)
    size = parallel.pipeline_model_parallel_size
    chunks = parallel.num_chunks
    if size > 1:
        times_between = [
            channels.boundary(*ranks, traced.layer.hands_on)
            for ranks in itertools.pairwise(stage_owners(config))
        ]
        forward_times = (*times_between, (0.0, 0.0))
        backward_times = ((0.0, 0.0), *times_between)
        # On a GPU a pair of ranks has one communicator, which serializes messages in both
        # directions.
        boundaries = Boundaries(forward_times, backward_times, duplex=cluster.device_type == "cpu")
    times = StageTimes(
        tuple(s.forward_s for s in seconds),
        tuple(s.backward_s for s in seconds),
        tuple(s.weight_s for s in seconds) if stages_of(config)[0].split else (),
    )
    on_node = min(parallel.world_size, cluster.devices_per_node)
    return run_pipeline(
        Pipeline(
            config.schedule,
            size,
            chunks,
            config.num_micro_batches(),
            times,
            boundaries,
            cores=cluster.shared_cores if crowd > 1.0 else None,
            demand=on_node / size if crowd > 1.0 else 1.0,
        )
    )


def _components_of_passes(
    config: Config, stages: tuple[StageSeconds, ...], run: PipelineRun
) -> dict[str, float]:
    rank = busiest_rank(run)
    mine = [stages[stage] for stage in stages_of_rank(config, rank)]
    passes = {
        "forward": sum(s.forward.compute for s in mine),
        "backward": sum(s.backward.compute + s.weight.compute for s in mine),
        "recompute": sum(s.backward.recompute for s in mine),
        "layer messages": sum(s.forward.waited + s.backward.waited + s.weight.waited for s in mine),
        "data-parallel": sum(s.forward.shared + s.backward.shared + s.weight.shared for s in mine),
        "host": sum(sum(s.overhead) for s in mine),
    }
    # If ranks share cores, passes take longer on the clock than by themselves.
    stretched = run.busy[rank] / sum(passes.values())
    waits = run.message_wait[rank]
    return {
        **{name: stretched * seconds for name, seconds in passes.items()},
        "pipeline messages": waits,
        "bubble": max(0.0, run.makespan - run.busy[rank] - waits),
    }


# -- gradients and new weights ---------------------------------------------------------------------


class DataParallelSeconds(NamedTuple):
    """Seconds that data parallelism adds to a step.

    reduced   from the end of the last pass until all gradients are reduced
    gathered  delay of the next step, which waits for new weights
    """

    reduced: float
    gathered: float


def exchange(
    config: Config,
    traced: Trace,
    channels: Channels,
    run: PipelineRun,
    stages: Sequence[StageSeconds],
    *,
    hides: bool,
) -> DataParallelSeconds:
    """Time the messages of the engine's buckets around the last backward and first forward passes.

    stages  seconds of all stages, including messages of ZeRO stages 2 and 3 within the passes
    hides   whether messages overlap with computation
    """
    if zero_of(config).gradient_ranks == 1:
        return DataParallelSeconds(0.0, 0.0)
    reduced = run.makespan
    gathered = 0.0
    for rank in range(config.parallel.pipeline_model_parallel_size):
        plan = plan_of_rank(config, traced, rank).plan
        moments = _moments(plan, stages_of(config), run)
        needed, ready = (
            [pick(moments[member][i] for member in bucket.members) for bucket in plan.buckets]
            for i, pick in ((0, min), (1, max))
        )
        # this rank begins and ends a step with the stage of its first chunk
        outer = stages[stages_of_rank(config, rank)[0]]
        first = outer.first
        last = outer.last
        end = max(ready) + last
        sums = Reductions(plan)
        sent = [(ready[n], one) for n in plan.order for one in sums.complete(n, final=True)]
        after = list(plan.end(sums))
        free = 0.0
        for begin, instruction in (*sent, *((end, one) for one in after)):
            in_passes = instruction.op is BucketOp.REDUCE and plan.zero.divides_gradients
            if instruction.op in (BucketOp.REDUCE, BucketOp.REDUCE_BEYOND) and not in_passes:
                free = max(free, begin if hides else end)
                free += seconds_of_all(channels, messages_of(plan, [instruction]))
        reduced = max(reduced, free, end)
        returns = [one for one in after if one.op is BucketOp.RETURN]
        due = needed if plan.zero.ahead and hides else [min(needed)] * len(needed)
        gathered = max(gathered, first + _late(plan, returns, channels, due, hides))
    return DataParallelSeconds(reduced - run.makespan, gathered)


def _late(
    plan: ZeroPlan,
    returns: Iterable[BucketInstruction],
    channels: Channels,
    due: Sequence[float],
    hides: bool,
) -> float:
    """Return the largest delay in seconds of a bucket's new weights after they are due.

    Messages in a group follow one another; without overlap all messages do. The second hop of a
    bucket begins once the first has arrived; the engine waits for this arrival before the first
    pass (engine.gradients.WeightGather.start).

    due  by bucket: when a pass first needs its weights
    """
    late = 0.0
    free = dict[str, float]()
    for instruction in returns:
        arrives = 0.0
        messages = messages_of(plan, [instruction])
        for number, message in enumerate(messages, start=1):
            link = message.group if hides else ""
            begins = max(arrives, free.get(link, 0.0))
            arrives = free[link] = begins + channels.seconds(*message)
            at = due[instruction.bucket] if number == len(messages) else min(due)
            late = max(late, arrives - at)
    return late


def _moments(
    plan: ZeroPlan, stages: Sequence[StageWork], run: PipelineRun
) -> list[tuple[float, float]]:
    """Return when a rank first needs each parameter, and when its gradient is complete in a step.

    Layers are assumed to be spread evenly over a pass, with embedding and head at its ends.
    """
    moments = []
    for number, call in plan.first_uses:
        before = sum(one.layer for one in plan.calls[number][:call])
        share = before / max(1, stages[number].layers)
        begin = run.last_backward_start[number]
        end = run.last_backward_end[number]
        needed = run.first_forward_start[number] + share * run.pipeline.times.forward[number]
        moments.append((needed, end - share * (end - begin)))
    return moments


def seconds_of_all(channels: Channels, messages: Iterable[GroupMessage]) -> float:
    """Return the seconds of messages that follow one another."""
    return sum(channels.seconds(*message) for message in messages)


# -- the optimizer ---------------------------------------------------------------------------------

_FULL_BYTES = 40.0
"""Additional traffic in bytes per element of a full parameter: 8 to write and read its fp32 update,
and 8 for each of four messages in bf16, for a copy into the message and another one out of it."""


def bytes_per_element(config: Config, device: str, full: bool = False) -> float:
    """Count the bytes that the update (engine/update.py) reads and writes per master weight.

    full  whether to count them for full parameters
    """
    norm = gradient = float(config.precision.gradient_bytes)
    kernels = config.kernels
    dtype_name = config.precision.dtype_name
    on_cpu = device == "cpu"
    fusions = (
        choose_fusions(kernels, None, dtype_name)
        if on_cpu
        else assumed_fusions(kernels, device, dtype_name)
    )
    kernel = fusions.optimizer and has_kernel(config)
    state = optimizer_state(config).of(full)
    settings = config.optimizer
    update = state.traffic_bytes(gradient, kernel, 1.0 / settings.ema_interval)
    if kernel and settings.qk_clip and settings.ema_decay is not None:
        update += 4.0 / settings.ema_interval  # the average reads the clipped weights again
    update += _FULL_BYTES * full
    if on_cpu and config.engine.cpu_offload:  # each copy in or out reads and writes
        update += 4.0 * streamed_bytes(config, full)
    if dtype_name == "float32":
        return norm + update
    return norm + update + (2.0 if kernel and config.precision.bf16 else 6.0)


def streamed_bytes(config: Config, full: bool = False) -> float:
    """Count the bytes of state per owned element that --cpu-offload keeps on the host."""
    master = 0.0 if config.precision.dtype_name == "float32" else 4.0
    return master + optimizer_state(config).of(full).bytes


def optimizer_seconds(config: Config, cluster: Cluster, rates: DeviceRates) -> float:
    """Time the update or, with --cpu-offload, the concurrent streaming of state if this is longer.

    The stream is limited by a device's link, which carries as much in each direction, and by the
    device's share of host memory bandwidth for both directions together. This assumes published
    peaks, all devices of a node streaming at once, and many buckets: the first, which arrives
    before the step, and the last, which leaves after its update, count like all others.
    """
    update = update_seconds(config, cluster.device_type, rates)
    if not config.engine.cpu_offload or cluster.device_type == "cpu":
        return update
    regular, full = updated_elements(config, cluster.device_type)
    n_bytes = streamed_bytes(config) * regular + streamed_bytes(config, full=True) * full
    devices = min(config.parallel.world_size, cluster.devices_per_node)
    _, memory, link = cluster.host
    return max(update, n_bytes / (1e9 * link), 2 * n_bytes * devices / (1e9 * memory))


def update_seconds(config: Config, device: str, rates: DeviceRates) -> float:
    """Return the update's seconds on the device with the most elements, which is the slowest."""
    elements, full = updated_elements(config, device)
    regular = rates.update_s(elements, bytes_per_element(config, device))
    if not full:
        return regular
    return regular + rates.update_s(full, bytes_per_element(config, device, full=True))


def updated_elements(config: Config, device: str) -> tuple[float, float]:
    """Return the elements of regular and of full parameters that one device owns.

    The device is on the pipeline rank with the most parameters.
    """
    traced = trace(config, device)
    zero = zero_of(config)
    ranks = range(config.parallel.pipeline_model_parallel_size)
    most = max(
        (elements_of_rank(config, traced, rank) for rank in ranks),
        key=lambda buckets: sum(bucket.elements for bucket in buckets),
    )
    owned = {False: 0.0, True: 0.0}
    for bucket in (bucket for bucket in most if not bucket.kind.frozen):
        owned[bucket.kind.full_parameters] += zero.owned(bucket)
    return owned[False], owned[True]


def full_matrix_seconds(config: Config, cluster: Cluster, channels: Channels) -> float:
    """Return the seconds of the optimizer's work on full parameters, including its messages.

    The ranks of a stage divide the parameters among themselves (engine/full_matrices.py). On a GPU
    messages overlap with the work of other rounds, except for the messages of one round. An
    all-to-all is assumed to take as long as an all-gather in which a rank sends the same amount.
    """
    if wants_full_parameters(config) is None:
        return 0.0
    device = cluster.device_type
    zero = zero_of(config)
    traced = trace(config, device)
    parameters = list[Sharding]()
    buckets = list[BucketPlan]()
    for rank in range(config.parallel.pipeline_model_parallel_size):
        plan, records = plan_of_rank(config, traced, rank)
        full = [bucket for bucket in plan.buckets if bucket.kind.full_parameters]
        if sum(map(zero.owned, full)) > sum(map(zero.owned, buckets)):
            buckets = full
            parameters = [records[number] for bucket in full for number in bucket.members]
    if not parameters:
        return 0.0
    shapes = {p.name: p.global_shape[p.experts :] for p in parameters}  # of one expert
    key = config.optimizer, config.pieces.optimizer, config.model, device, *shapes.items()
    if key not in _updates:
        from megatron.planner.recorder import record_update

        _updates[key] = record_update(config, shapes)
    update, value_bytes = _updates[key]
    rates = rates_of(cluster, config.precision.dtype_name)
    with contextlib.suppress(ConfigError):  # no rates for the dtype of the products
        rates = rates_of(cluster, "bfloat16" if value_bytes == 2 else "float32")
    seconds = [
        sum(seconds_of(each, rates) for each in update[p.name].computations()) for p in parameters
    ]
    # even without ZeRO the ranks of an expert group have different experts
    parallel = config.parallel
    of_dense = zero.sizes.states * parallel.tensor_model_parallel_size
    of_experts = zero.of_experts.states * parallel.expert_ranks
    shares = (
        s * (p.global_shape[0] / of_experts if p.experts else 1 / of_dense)
        for s, p in zip(seconds, parameters, strict=True)
    )
    work = max(sum(shares), *seconds)
    every = longest = 0.0
    for of in ("", "expert_"):
        sent = sum(zero.owned(bucket) for bucket in buckets if bucket.kind.experts == bool(of))
        if not sent:
            continue
        rounds = max(1, round(sent / ROUND))
        message = value_bytes * sent / rounds
        messages = 2 * channels.seconds("all_gather", message, f"{of}tensor")
        if zero.sizes_of(bool(of)).states > 1:
            messages += 2 * channels.seconds("all_gather", message, f"{of}data")
        every += rounds * messages
        longest = max(longest, messages)
    if device == "cpu":
        return work + every
    return max(work, every - longest) + longest


_updates: dict[tuple[object, ...], tuple[dict[str, Pass], int]] = {}


# -- by a formula, without a clock: the score that ranks layouts -----------------------------------


def folded_seconds(config: Config, cluster: Cluster, channels: Channels) -> float:
    """Approximate estimate().seconds for this configuration in a hundredth of the time.

    The score counts the work of the slowest rank, with the passes of other ranks that its first and
    last passes wait for; the messages between stages on the way through all of them; the gradients
    and weights that the last and the first micro-batch of the first rank do not hide; the
    optimizer; and the host overhead of a step. Raises ConfigError, like estimate, for a dtype
    without rates.
    """
    config = over_nodes(config, channels.placement.layout)
    rates = _rates(config, cluster)
    traced = trace(config, cluster.device_type)
    hides = cluster.device_type != "cpu"
    stages = stages_of(config)
    each = {
        stage: _seconds(
            traced, stage, rates, channels, hides, plan_in_passes(config, traced, stage)
        )
        for stage in set(stages)
    }
    seconds = [each[stage][0] for stage in stages]
    size = config.parallel.pipeline_model_parallel_size
    m = config.num_micro_batches()
    passes = _passes(config, seconds)
    crowd = crowding(config, cluster)
    if crowd > 1.0:  # the shared cores do all the work
        passes = max(passes, m * sum(map(sum, seconds)) / size * crowd)
    if size > 1:
        occupies, latency = _boundary(channels, size, traced.layer.hands_on)
        on_link = (2 if hides else 1) * m * config.parallel.num_chunks * occupies
        passes = max(passes + 2 * (size - 1) * (occupies + latency), on_link)
    after = _exchanged(config, traced, channels, seconds, hides)
    after += max(each[stage][1] for stage in stages[:size])
    update = optimizer_seconds(config, cluster, rates)
    after += update + full_matrix_seconds(config, cluster, channels)
    slowest = slowest_share(config, rates)
    return passes + crowd * after + rates.step_overhead_s + slowest * (passes + crowd * update)


_Seconds = tuple[float, float, float]
_known: dict[tuple[object, ...], tuple[_Seconds, float]] = {}


def _seconds(
    traced: Trace,
    stage: StageWork,
    rates: DeviceRates,
    channels: Channels,
    hides: bool,
    plan: ZeroPlan | None,
) -> tuple[_Seconds, float]:
    """Return the seconds of a stage's passes, and the seconds that ZeRO adds around them in a step.

    Results are cached for placements with the same kinds of groups.
    """
    groups = set[str]()
    if plan is not None:
        groups = {message.group for message in messages_in_passes(traced, stage, plan)}
    lanes = tuple(channels.lanes[name] for name in (*OF_PASSES, *sorted(groups)))
    key = traced, stage, rates, lanes, hides, plan
    if key not in _known:
        timed = stage_seconds(traced, stage, rates, channels.seconds, hides=hides, plan=plan)
        seconds = timed.forward_s, timed.backward_s, timed.weight_s
        _known[key] = seconds, timed.first + timed.last
    return _known[key]


@functools.lru_cache(maxsize=1 << 14)
def _boundary(channels: Channels, size: int, n_bytes: float) -> tuple[float, float]:
    """Return the seconds on the link and the latency for the slowest boundary."""
    return max(channels.boundary(rank, rank + 1, n_bytes) for rank in range(size - 1))


_BUBBLES = {"v-half": 1 / 2, "v-min": 2 / 3}
"""Bubble as a fraction of that of 1F1B, of orders with one in spite of split backward passes."""


def _passes(config: Config, stages: Sequence[_Seconds]) -> float:
    """Return the seconds of a step's passes, from their start to their end on all ranks.

    A rank's first pass waits for the forward passes of the earlier stages; their backward passes
    follow its last pass. In between it does all its work, except for the weight gradients of a
    split backward pass that follow its last backward pass: those for one micro-batch on the first
    rank, and for one more on each later rank. A micro-batch leaves a rank with several stages for
    the stages between them; meanwhile the rank can only compute other micro-batches, if there are
    enough.
    """
    most = 0.0
    busy = [sum(stage) for stage in stages]
    forward, backward, weight = zip(*stages, strict=True)
    ahead, behind = ([0.0, *itertools.accumulate(each)] for each in (forward, backward))
    size = config.parallel.pipeline_model_parallel_size
    micro_batches = config.num_micro_batches()
    bubble = _BUBBLES.get(config.schedule_name, 0.0) * (size - 1) * sum(busy) / size
    remaining = micro_batches - 1
    for rank in range(size):
        mine = stages_of_rank(config, rank)
        deferred = min(rank + 1, micro_batches) * weight[rank]  # including its last micro-batch
        idle = ahead[rank] + max(0.0, behind[rank] - deferred)
        for a, b in itertools.pairwise(mine):
            idle += max(0.0, ahead[b] - ahead[a + 1] - remaining * forward[a])
            computed = remaining * backward[b] + micro_batches * weight[b]
            idle += max(0.0, behind[b] - behind[a + 1] - computed)
        work = micro_batches * sum(busy[stage] for stage in mine)
        most = max(most, work + max(bubble, idle))
    return most


def _exchanged(
    config: Config, traced: Trace, channels: Channels, seconds: Sequence[_Seconds], hides: bool
) -> float:
    """Return the seconds of gradient and weight messages that the first rank's passes do not hide.

    Gradients overlap with its last backward passes, weights with its first forward passes. A
    chunk's gradients are sent while each earlier chunk runs as many micro-batches as there are
    pipeline ranks; weights overlap likewise.
    """
    engine = config.engine
    zero = zero_of(config)
    size = config.parallel.pipeline_model_parallel_size
    chunks = config.parallel.num_chunks
    if zero.gradient_ranks == 1:
        return 0.0
    layers = max(1, sum(stage.layers for stage in stages_on(config, 0)))

    def left(total: float, beside: float, overlaps: bool) -> float:
        if not (overlaps and hides):
            return total
        return max(
            total / chunks - beside, total - (1 + (chunks - 1) * size) * beside, total / layers
        )

    sums, returns = messages_at_end(plan_of_rank(config, traced, 0).plan)
    up = seconds_of_all(channels, sums)
    down = seconds_of_all(channels, returns)
    forward, backward, weight = seconds[0]
    return left(up, backward + weight, engine.overlap_grad_reduce) + left(
        down, forward, engine.overlap_param_gather
    )
