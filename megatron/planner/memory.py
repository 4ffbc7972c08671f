"""Device memory of a training step: the sum of the live tensors in a trace, at the step's peak.

Weights, gradients and optimizer state follow from the parameters of each pipeline rank. With
--cpu-offload a GPU holds two sets of working tensors in place of the optimizer's state; a CPU holds
both. The runtime and the communication library, which take a gigabyte or more on a GPU before
training begins, are not counted, nor are workspaces inside kernels or fragmentation. Tracing
may need torch (trace.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config import Config
from megatron.engine.buckets import BucketPlan, BucketRule, bucket_rule
from megatron.engine.optimizer_state import optimizer_state
from megatron.engine.zero_plan import BACKWARD, BucketOp, ModulePass, Zero, ZeroPlan, zero_of
from megatron.model.stages import end_ranks
from megatron.pipeline.orders import Op as PipelineOp
from megatron.pipeline.schedule import moments_of_rank
from megatron.planner.events import Alloc, Free, Pass, PassEvent, Sum, Trace, TracedModule
from megatron.planner.gradients import Chunk, Gradients, Sums, Traffic
from megatron.planner.stage import (
    ALONE,
    StageWork,
    computed,
    elements_of_rank,
    first_layer,
    halves_of,
    modules_of,
    plan_of_rank,
    planned,
    stages_on,
)
from megatron.planner.trace import trace

GPU_BLOCK = 512
CPU_BLOCK = 64
"""Allocation granularity in bytes of the caching allocator for CUDA and ROCm (kMinBlockSize in
CUDACachingAllocator), and of torch's allocator for host memory."""

HEADROOM = 0.1
"""Share of a device's memory that a job leaves free for uncounted memory: an assumption."""

PROCESS_BYTES = 0.29 * 2**30
"""Bytes of the interpreter, libraries and connections of a process on a CPU."""

PROCESS_SHARES = (1.1, 1.3, 2.8)
"""Memory that a process on a CPU holds for its tensors, including the gaps that malloc keeps
between blocks, as a multiple of their peak: minimum, median and maximum over the runs in
docs/measured/predictions.md."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each device of one pipeline rank, at the peak of a step.

    weights      as passes use them, in the compute dtype or in fp32, including embedding and output
                 layer; under ZeRO-3 this rank's shard, and the full weights of gathered layers
    master       fp32 master weights of the optimizer, under ZeRO this rank's shard; 0 in fp32
    moments      optimizer moments, sharded likewise; with --cpu-offload, master and moments count
                 only the part on the device
    gradients    sums in fp32 or bf16; under ZeRO-2 and 3 this rank's shard, and the buckets that
                 are being filled or reduced
    activations  made by forward passes, most of them kept for backward passes
    logits       logits of a chunk of tokens, and their gradient
    buffers      messages to and from neighbouring stages, and the micro-batches
    temporary    tensors within a backward pass, including recomputed activations
    """

    rank: int
    weights: float
    master: float
    moments: float
    gradients: float
    activations: float
    logits: float
    buffers: float
    temporary: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in CATEGORIES))


CATEGORIES = tuple(field.name for field in dataclasses.fields(RankMemory))[1:]
Bytes = npt.NDArray[np.float64]
"""Bytes by category, or one such row for each allocation and release."""
NOTHING = np.zeros((1, len(CATEGORIES)))
_ACTIVATIONS, _BUFFERS, _TEMPORARY = map(CATEGORIES.index, ("activations", "buffers", "temporary"))
_WEIGHTS, _GRADIENTS = map(CATEGORIES.index, ("weights", "gradients"))


def process_bytes(tensors: float, device: str, share: float = PROCESS_SHARES[0]) -> float:
    """Return the bytes that a limit counts for `tensors` bytes: on a CPU, all of the process.

    share  one of PROCESS_SHARES; by default the minimum, which every measured run needed
    """
    return PROCESS_BYTES + share * tensors if device == "cpu" else tensors


def room_bytes(memory: float, device: str) -> float:
    """Return how many bytes of tensors fit into `memory`, the inverse of process_bytes."""
    return max(0.0, memory - PROCESS_BYTES) / PROCESS_SHARES[0] if device == "cpu" else memory


Shared = tuple[Zero, BucketRule]
"""Sizes of ZeRO stage 2 or 3, and the rule for its buckets."""


# -- passes ----------------------------------------------------------------------------------------


def changes(steps: Iterable[PassEvent], block: int, made: dict[int, Alloc]) -> Bytes:
    """Return a row of bytes for each allocation and release, with sizes rounded up to `block`.

    made  live tensors, updated in place; freeing any other tensor does not count
    """
    rows = []
    for step in steps:
        if isinstance(step, Alloc):
            made[step.id] = tensor = step
        elif isinstance(step, Free) and step.id in made:
            tensor = made.pop(step.id)
        else:
            continue
        row = [0.0] * len(CATEGORIES)
        size = -(-tensor.bytes // block) * block
        row[CATEGORIES.index(tensor.category)] = size if tensor is step else -size
        rows.append(row)
    return np.array(rows).reshape(len(rows), len(CATEGORIES))


def find_peak(rows: Bytes) -> tuple[Bytes, int]:
    """Return the largest running sum of the rows, and the number of rows that it includes."""
    now = np.concatenate([NOTHING, rows]).cumsum(axis=0)
    at = int(now.sum(axis=1).argmax())
    return now[at], at


class _PassRows(NamedTuple):
    """Rows of a pass, and its uses of gradient sums, each with the index of the row it precedes."""

    rows: Bytes
    sums: Sums


@lru_cache(maxsize=1 << 12)
def _passes(module: TracedModule, block: int) -> dict[str, _PassRows]:
    """Return the rows of a module's passes, by name."""
    live: dict[int, Alloc] = {}

    def rows_of(of: Pass, made: dict[int, Alloc]) -> _PassRows:
        rows = [NOTHING]
        sums = list[tuple[int, Sum]]()
        at = 0
        for here, step in enumerate(of.steps):
            if isinstance(step, Sum):
                rows.append(changes(of.steps[at:here], block, made))
                at = here
                sums.append((sum(map(len, rows)), step))
        rows.append(changes(of.steps[at:], block, made))
        return _PassRows(np.concatenate(rows), tuple(sums))

    forward = rows_of(module.forward, live)
    backward = rows_of(module.backward, dict(live))
    inputs, weights = (rows_of(half, live) for half in (module.inputs, module.weights))
    return {"forward": forward, "backward": backward, "inputs": inputs, "weights": weights}


# -- chunks ----------------------------------------------------------------------------------------


class ChunkMemory(NamedTuple):
    """Bytes that one micro-batch adds in one chunk, excluding gradient sums.

    retained  after the forward pass
    forward   at the peak of the forward pass
    backward  at the peak of a full backward pass, including `retained`
    inputs    at the peak of the first half of a split one, including `retained`
    waiting   after the first half, when weight gradients are deferred
    weights   at the peak of the second half, including `waiting`

    The last three are 0 if no backward pass is split.
    """

    retained: Bytes
    forward: Bytes
    backward: Bytes
    inputs: Bytes
    waiting: Bytes
    weights: Bytes


@lru_cache(maxsize=1 << 14)
def chunk_memory(
    traced: Trace, stage: StageWork, block: int, shared: Shared | None = None
) -> ChunkMemory:
    """Simulate the memory of a stage.

    block   granularity to which a tensor's size is rounded up
    shared  sizes and buckets of ZeRO stages 2 and 3; None below ZeRO stage 2
    """
    chunk = _chunk(traced, stage, block, shared)
    forward = chunk.forward()
    retained = forward.sum(axis=0)
    backward = retained + find_peak(chunk.backward("backward"))[0]
    of_halves = (NOTHING[0],) * 3
    if stage.split:
        first, second = map(chunk.backward, halves_of(stage))
        waiting = retained + first.sum(axis=0)
        of_halves = retained + find_peak(first)[0], waiting, waiting + find_peak(second)[0]
    return ChunkMemory(retained, find_peak(forward)[0], backward, *of_halves)


class _Chunk:
    """Rows of a stage's passes, with the weights that ZeRO gathers and frees between its modules.

    A module's output is freed at the end of its forward pass, and counts as the input of the next
    module. A module on another stage receives it as a message.
    """

    def __init__(self, traced: Trace, stage: StageWork, block: int, shared: Shared | None) -> None:
        self._traced = traced
        self._stage = stage
        self._block = block
        zero, rule = shared or (ALONE, BucketRule())
        self._plan = planned(traced, ((0, stage),), zero, rule).plan
        self._groups = self._plan.groups[0]
        # recomputed layers that are not the first of their group; their inputs are not kept
        self._inside = {call for group in self._groups.values() for call in group[1:]}
        self._recomputed = {call for group in self._groups.values() for call in group[:-1]}

    def forward(self) -> Bytes:
        """Return the rows of a forward pass."""
        rows = [NOTHING]
        here = set[int]()
        recomputed = {call for group in self._groups.values() for call in group}
        for step in self._plan.forward(0):
            module, _ = computed(self._traced, self._stage, self._plan, step, "")
            of_step = NOTHING
            if step.call in recomputed:
                kind = self._stage.layer_kinds[step.call - first_layer(self._stage, self._plan)]
                of_step = _passes(self._traced.layer_of(kind)[1], self._block)["forward"].rows
                if step.call in self._inside:  # none of its tensors are kept
                    of_step = np.concatenate([of_step, -of_step.sum(axis=0, keepdims=True)])
            elif module is not None:
                of_step = _passes(module, self._block)["forward"].rows
            rows += self._around(step, of_step, here)
        return np.concatenate(rows)

    def backward(self, half: str, gradients: Gradients | None = None) -> Bytes:
        """Return the rows of a backward pass, or of one half of it."""
        rows = [NOTHING]
        changes = iter(gradients or ())
        here = set[int]()
        for step in self._plan.forward(0):
            here = (here | _gathered(step)) - _freed(step)
        for step in self._plan.backward(0):
            module, name = computed(self._traced, self._stage, self._plan, step, half)
            of_step = NOTHING
            if module is not None:
                of_step = _passes(module, self._block)[name].rows
                if step.call in self._recomputed:
                    of_step = of_step.copy()
                    of_step[:, _TEMPORARY] += of_step[:, _ACTIVATIONS]
                    of_step[:, _ACTIVATIONS] = 0.0
            if step.kind == BACKWARD and module is not None and (of_module := next(changes, ())):
                bytes_of = [_row(gradients=change)[0] for _, change in of_module]
                of_step = np.insert(of_step, [row for row, _ in of_module], bytes_of, axis=0)
            rows += self._around(step, of_step, here)
        return np.concatenate(rows)

    def _around(self, step: ModulePass, rows: Bytes, here: set[int]) -> list[Bytes]:
        """Return a step's rows, with rows for the weights gathered before and freed after it.

        here  buckets whose weights have memory, updated in place
        """
        new = _gathered(step) - here
        freed = _freed(step) & (here | new)
        here |= new
        here -= freed
        before, after = (
            [_row(weights=sign * sum(map(self._weight_bytes, some)))] * bool(some)
            for some, sign in ((new, 1.0), (freed, -1.0))
        )
        return [*before, rows, *after]

    def _weight_bytes(self, bucket: int) -> int:
        of = self._plan.buckets[bucket]
        return self._plan.zero.bytes_of_weight(of) * of.elements

    def sums(self, plan: ZeroPlan, number: int, ahead: int) -> Chunk:
        """Return the uses of gradient sums in stage `number` of its rank's plan.

        ahead  number of input halves of backward passes that run before the first weight half
        """
        chunk = Chunk(number, {}, {}, Counter())
        parameters = (n for call in plan.calls[number] for n in call.parameters)
        modules = modules_of(self._traced, self._stage)
        buckets = [
            [plan.bucket_of[n] for n in itertools.islice(parameters, len(module.parameters))]
            for module in modules
        ]
        halves = halves_of(self._stage)
        for half in {*halves, "backward"}:  # an order may split only some backward passes
            steps = (step for step in self._plan.backward(0) if step.kind == BACKWARD)
            passes = (computed(self._traced, self._stage, self._plan, step, half) for step in steps)
            each = [
                _passes(module, self._block)[name] for module, name in passes if module is not None
            ]
            chunk.rows[half] = len(each[-1].rows)
            chunk.uses[half] = [
                [(row, of_module[step.parameter], step.complete) for row, step in of_pass.sums]
                # ZeRO-3's passes end before modules with nothing that trains
                for of_pass, of_module in zip(each, reversed(buckets), strict=False)
            ]
            for _, bucket, complete in itertools.chain(*chunk.uses[half] if half in halves else ()):
                chunk.due[bucket] += complete * (ahead if half == "inputs" else 1)
        return chunk


def _gathered(step: ModulePass) -> set[int]:
    """Return the buckets whose weights are gathered before a step or beside it."""
    return {one.bucket for one in (*step.before, *step.beside)}


def _freed(step: ModulePass) -> set[int]:
    return {one.bucket for one in step.after if one.op is BucketOp.FREE}


_chunk = lru_cache(maxsize=1 << 12)(_Chunk)


@lru_cache(maxsize=1 << 12)
def _rise(chunk: _Chunk, half: str, gradients: Gradients) -> Bytes:
    """Return the bytes that a backward pass adds at its peak."""
    return find_peak(chunk.backward(half, gradients))[0]


def _row(weights: float = 0.0, gradients: float = 0.0) -> Bytes:
    row = np.zeros_like(NOTHING)
    row[0, _WEIGHTS] = weights
    row[0, _GRADIENTS] = gradients
    return row


# -- ranks -----------------------------------------------------------------------------------------


def memory_of_ranks(config: Config, device: str = "cuda") -> tuple[RankMemory, ...]:
    """Return the memory of all pipeline ranks in a step of the full global batch.

    device   "cpu", or anything else for a GPU: operators and allocation granularity differ
    """
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return tuple(_memory(config, rank, device) for rank in ranks)


def peak_rank(config: Config, device: str, capacity: float) -> RankMemory:
    """Find the pipeline rank with the highest peak; if rank 0 exceeds `capacity`, return rank 0."""
    first = _memory(config, 0, device)  # holds the most micro-batches
    if first.total > capacity:
        return first
    later_ranks = range(1, config.parallel.pipeline_model_parallel_size)
    ranks = (first, *(_memory(config, rank, device) for rank in later_ranks))
    return max(ranks, key=lambda rank: rank.total)


def state_bytes(config: Config, buckets: Iterable[BucketPlan]) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state for a rank's parameters.

    buckets  the rank's parameters, in buckets of any size (stage.elements_of_rank)
    """
    precision = config.precision
    state = optimizer_state(config)
    zero = zero_of(config)
    states = dict.fromkeys(("weights", "master", "moments", "gradients"), 0.0)
    for bucket in buckets:
        owned = zero.owned(bucket)
        states["weights"] += zero.resident_weights(bucket)
        states["master"] += 0.0 if precision.dtype_name == "float32" else 4.0 * owned
        if not bucket.kind.frozen:
            states["moments"] += state.of(bucket.kind.full_parameters).bytes * owned
            states["gradients"] += zero.resident_gradients(bucket)
    return states


def offloaded_bytes(config: Config, buckets: Iterable[BucketPlan]) -> tuple[float, float]:
    """Return the bytes of master weights and moments that --cpu-offload keeps on the host."""
    states = state_bytes(config, [bucket for bucket in buckets if not bucket.kind.frozen])
    return states["master"], states["moments"]


def parameters_of_rank(config: Config, rank: int, device: str = "cuda") -> int:
    """Count the parameters on each device of a pipeline rank, including a tied embedding's copy."""
    return sum(b.elements for b in elements_of_rank(config, trace(config, device), rank))


def host_bytes(config: Config, rank: int, device: str) -> float:
    """Return the bytes that --cpu-offload keeps on the host for a device of a pipeline rank.

    Return 0 without this flag and for a CPU, whose memory includes them.
    """
    if not config.engine.cpu_offload or device == "cpu":
        return 0.0
    return sum(offloaded_bytes(config, elements_of_rank(config, trace(config, device), rank)))


def _states(config: Config, rank: int, device: str) -> dict[str, float]:
    return state_bytes(config, elements_of_rank(config, trace(config, device), rank))


def _memory(config: Config, rank: int, device: str) -> RankMemory:
    states = _states(config, rank, device)
    if config.engine.cpu_offload:
        # The state streams through two sets of tensors, each tensor as large as this rank's largest
        # shard of such state in any bucket.
        state = optimizer_state(config)
        master = {} if config.precision.dtype_name == "float32" else {"master": 4}
        plan = plan_of_rank(config, trace(config, device), rank).plan
        most: dict[str, float] = {}
        for bucket in (bucket for bucket in plan.buckets if not bucket.kind.frozen):
            for name, n_bytes in {
                **state.of(bucket.kind.full_parameters).tensors,
                **master,
            }.items():
                most[name] = max(most.get(name, 0.0), n_bytes * plan.zero.owned(bucket))
        if device != "cpu":  # a CPU's memory is host memory
            elements = elements_of_rank(config, trace(config, device), rank)
            master_bytes, moment_bytes = offloaded_bytes(config, elements)
            states["master"] -= master_bytes
            states["moments"] -= moment_bytes
        states["master"] += 2 * most.pop("master", 0.0)
        states["moments"] += 2 * sum(most.values())
    peak = _peak_bytes(config, rank, device) + [states.get(name, 0.0) for name in CATEGORIES]
    return RankMemory(rank, *map(float, peak))


def _peak_bytes(config: Config, rank: int, device: str) -> Bytes:
    """Return the bytes, by category, that passes and messages need at their joint peak."""
    parallel = config.parallel
    traced = trace(config, device)
    m = config.num_micro_batches()
    p = parallel.pipeline_model_parallel_size
    block = CPU_BLOCK if device == "cpu" else GPU_BLOCK
    zero = zero_of(config)
    shared = (zero, bucket_rule(config, zero.gradient_ranks)) if zero.divides_gradients else None
    stages = stages_on(config, rank)
    of_stages = [chunk_memory(traced, stage, block, shared) for stage in stages]
    op, chunk, in_flight, waiting, messages = moments_of_rank(
        config.schedule, p, parallel.num_chunks, m, rank
    )
    by_op = np.array([[c.forward, c.backward, c.inputs, c.weights] for c in of_stages])  # as in Op
    now = by_op[chunk, op]
    if shared is not None:
        chunks = [_chunk(traced, stage, block, shared) for stage in stages]
        plan = plan_of_rank(config, traced, rank).plan
        uses = []
        for number, (of, stage) in enumerate(zip(chunks, plan.calls, strict=True)):
            mine = op[chunk == number]
            ends = (mine == PipelineOp.BACKWARD_WEIGHT) | (mine == PipelineOp.BACKWARD)
            ahead = int((mine[: np.argmax(ends)] == PipelineOp.BACKWARD_INPUT).sum())
            uses.append(of.sums(plan, stage, max(1, ahead)))
        traffic = Traffic(plan, uses)
        after: dict[object, tuple[Bytes, Traffic]] = {}  # by state and pass
        gradients = []  # bytes that gradients add to each pass
        for what, number in zip(op.tolist(), chunk.tolist(), strict=True):
            live = _row(gradients=traffic.bytes)[0]
            if what == PipelineOp.FORWARD:
                gradients.append(live)
                continue
            key = traffic.state, what, number
            if key not in after:
                half = _HALVES[what]
                following = traffic.copy()
                changes = following.run(number, half)
                more = _rise(chunks[number], half, changes) - _rise(chunks[number], half, ())
                after[key] = live + more, following
            row, traffic = after[key]
            gradients.append(row)
        now = now + np.array(gradients)
    now = (
        now
        + in_flight @ np.array([c.retained for c in of_stages])
        + waiting @ np.array([c.waiting for c in of_stages])
    )
    now[:, _BUFFERS] += messages * traced.layer.hands_on
    most: Bytes = now[np.argmax(now.sum(axis=1))]
    most[_ACTIVATIONS] += max(layer.tables for layer, _ in traced.kinds)
    # tokens, labels and positions, int64, and fp32 masks of all micro-batches of the step
    if rank in end_ranks(config):
        most[_BUFFERS] += 28.0 * config.model.seq_length * config.batch.micro_batch_size * m
    return most


_HALVES = {
    PipelineOp.BACKWARD: "backward",
    PipelineOp.BACKWARD_INPUT: "inputs",
    PipelineOp.BACKWARD_WEIGHT: "weights",
}
"""Names of backward passes and their halves in events.TracedModule, by instruction."""
