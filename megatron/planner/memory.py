"""Device memory of a training step: the tensors of a trace, summed over those that are alive.

States follow from the parameters of each pipeline rank. With --cpu-offload a GPU has two sets of
working tensors in place of the optimizer's state, and a CPU both. Not counted: the runtime and the
communication library, which take a gigabyte or more on a GPU before training begins, workspaces
inside kernels, and fragmentation. Needs torch if a trace is not cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config, ModelConfig
from megatron.engine.optimizer_state import optimizer_state
from megatron.parallel.sharding import Sharding
from megatron.pipeline.orders import Op
from megatron.pipeline.schedule import moments_of_rank
from megatron.planner.events import Give, Part, Pass, Step, Sum, Take, Trace
from megatron.planner.gradients import (
    Gradients,
    Plan,
    Shared,
    Sums,
    Traffic,
    halves_of,
    plan_of,
    shared_of,
)
from megatron.planner.stage import (
    Stage,
    buckets_of_rank,
    experts_of,
    owned_elements,
    parameters_of,
    parts_of,
    stages_of,
    vectors_of,
    whole_parameters,
)
from megatron.planner.trace import GPT2_VOCABULARY, trace
from megatron.planner.zero import zero_of

GPU_BLOCK, CPU_BLOCK = 512, 64
"""Allocation granularity in bytes: of the caching allocator of CUDA and ROCm (kMinBlockSize in
CUDACachingAllocator), and of torch's allocator of host memory."""

HEADROOM = 0.1
"""Share of a device's memory that a job leaves free, for what is not counted: an assumption."""

PROCESS_BYTES = 0.29 * 2**30
"""Interpreter, libraries and connections of a process on a CPU."""

PROCESS_SHARES = (1.1, 1.3, 2.8)
"""Memory that a process on a CPU holds for its tensors, as a multiple of their peak, with gaps
between blocks that malloc keeps: the least, the median and the most of the runs in
docs/measured/predictions.md."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each device of one pipeline rank, at the peak of a step.

    weights      in the training dtype, including embedding and output layer; under ZeRO-3 this
                 rank's part, and those of the layers that are gathered
    master       fp32 weights of the optimizer, under ZeRO this rank's part; none in fp32
    moments      of the optimizer, partitioned likewise; with --cpu-offload, both are what the device
                 has of them
    gradients    sums in fp32 or bf16; under ZeRO-2 and 3 this rank's part, and those of the buckets
                 that are filled or under way
    activations  made by forward passes and kept for backward passes
    logits       of a chunk of tokens, and their gradient
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
    def optimizer(self) -> float:
        """Master weights and moments."""
        return self.master + self.moments

    @property
    def states(self) -> float:
        """Memory held for the whole run: weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.buffers + self.temporary


CATEGORIES = tuple(field.name for field in dataclasses.fields(RankMemory))[1:]
Bytes = np.ndarray[Any, np.dtype[np.float64]]
"""Bytes by category, or one such row for each step."""
NOTHING = np.zeros((1, len(CATEGORIES)))
_ACTIVATIONS, _BUFFERS, _TEMPORARY = map(CATEGORIES.index, ("activations", "buffers", "temporary"))
_WEIGHTS, _GRADIENTS = map(CATEGORIES.index, ("weights", "gradients"))


def process_bytes(tensors: float, device: str, share: float = PROCESS_SHARES[0]) -> float:
    """Return what a limit of memory counts for `tensors` bytes: on a CPU, that of the process.

    share  of PROCESS_SHARES; by default that without which no run got by
    """
    return PROCESS_BYTES + share * tensors if device == "cpu" else tensors


def room_bytes(memory: float, device: str) -> float:
    """Return how many bytes of tensors fit into `memory`, the inverse of process_bytes."""
    return max(0.0, memory - PROCESS_BYTES) / PROCESS_SHARES[0] if device == "cpu" else memory


# -- passes ----------------------------------------------------------------------------------------


def changes(steps: Iterable[Step], block: int, made: dict[int, Take]) -> Bytes:
    """Write a row for each tensor that is allocated or freed, its size rounded up to `block`.

    made  live tensors, updated in place; freeing any other tensor does not count
    """
    rows = []
    for step in steps:
        if isinstance(step, Take):
            made[step.id] = taken = step
        elif isinstance(step, Give) and step.id in made:
            taken = made.pop(step.id)
        else:
            continue
        row = [0.0] * len(CATEGORIES)
        size = -(-taken.bytes // block) * block
        row[CATEGORIES.index(taken.category)] = size if taken is step else -size
        rows.append(row)
    return np.array(rows).reshape(len(rows), len(CATEGORIES))


def find_peak(rows: Bytes) -> tuple[Bytes, int]:
    """Return the largest running sum of the rows, and the number of rows it adds up."""
    now = np.concatenate([NOTHING, rows]).cumsum(axis=0)
    at = int(now.sum(axis=1).argmax())
    return now[at], at


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a pass, and before which of them it uses which gradient sums."""

    rows: Bytes
    sums: Sums


@lru_cache(maxsize=1 << 12)
def _passes(part: Part, block: int) -> dict[str, _Rows]:
    """Return the rows of a part's passes, by name."""
    kept: dict[int, Take] = {}

    def rows_of(of: Pass, made: dict[int, Take]) -> _Rows:
        rows, sums, at = [NOTHING], list[tuple[int, Sum]](), 0
        for here, step in enumerate(of.steps):
            if isinstance(step, Sum):
                rows.append(changes(of.steps[at:here], block, made))
                at = here
                sums.append((sum(map(len, rows)), step))
        rows.append(changes(of.steps[at:], block, made))
        return _Rows(np.concatenate(rows), tuple(sums))

    forward = rows_of(part.forward, kept)
    backward = rows_of(part.backward, dict(kept))
    inputs, weights = (rows_of(half, kept) for half in (part.inputs, part.weights))
    return {"forward": forward, "backward": backward, "inputs": inputs, "weights": weights}


def _as_temporary(rows: Bytes) -> Bytes:
    """Return the rows with activations counted as temporary, as for recomputed ones."""
    found = rows.copy()
    found[:, _TEMPORARY] += found[:, _ACTIVATIONS]
    found[:, _ACTIVATIONS] = 0.0
    return found


# -- chunks ----------------------------------------------------------------------------------------


class ChunkMemory(NamedTuple):
    """Bytes that one micro-batch adds in one chunk, without gradients.

    kept      after the forward pass
    forward   at the peak of the forward pass
    backward  at the peak of the backward pass, or of its first half, including what was kept
    waiting   after that half, if weight gradients are deferred
    weights   at the peak of the second half
    """

    kept: Bytes
    forward: Bytes
    backward: Bytes
    waiting: Bytes
    weights: Bytes


@lru_cache(maxsize=1 << 14)
def chunk_memory(
    traced: Trace, stage: Stage, group: int, block: int, shared: Shared | None = None
) -> ChunkMemory:
    """Simulate the memory of a stage.

    group   most layers that are recomputed together
    block   granularity to which a tensor's size is rounded up
    shared  what ZeRO stages 2 and 3 divide
    """
    chunk = _chunk(traced, stage, group, block, shared)
    forward = chunk.forward()
    kept = forward.sum(axis=0)
    first, *second = map(chunk.backward, halves_of(stage))
    waiting = kept + first.sum(axis=0)
    return ChunkMemory(
        kept,
        find_peak(forward)[0],
        kept + find_peak(first)[0],
        waiting,
        waiting + find_peak(second[0])[0] if second else NOTHING[0],
    )


class _Chunk:
    """Rows of a stage's passes.

    A part's output is freed at the end of its forward pass, and counts as the input of the next
    part; on another stage it arrives as a message.
    """

    def __init__(
        self, traced: Trace, stage: Stage, group: int, block: int, shared: Shared | None
    ) -> None:
        self._traced, self._stage = traced, stage
        self._embedding, self._head = (
            _passes(part, block) for part in (traced.embedding, traced.head)
        )
        kinds = [traced.layer_of(kind) for kind in stage.layer_kinds]
        self._layers = [_passes(layer, block) for layer, _ in kinds]
        self._agains = [_passes(again, block) for _, again in kinds]
        self._groups, at = list[slice](), 0
        for count, times in _groups(stage, group):
            self._groups += [slice(i, i + count) for i in range(at, at + count * times, count)]
            at += count * times
        self._recomputed, self._first, self._last = at, int(stage.first), int(stage.last)
        self._around = _Around(traced, stage, shared)

    def forward(self) -> Bytes:
        """Return the rows of a forward pass."""
        return self._around.forward(
            [
                *[self._embedding["forward"].rows] * self._first,
                *(rows for some in self._groups for rows in _forward_again(self._agains[some])),
                *(layer["forward"].rows for layer in self._layers[self._recomputed :]),
                *[self._head["forward"].rows] * self._last,
            ]
        )

    def backward(self, half: str, gradients: Gradients | None = None) -> Bytes:
        """Return the rows of a backward pass, or of a half of it."""
        return self._around.backward(
            [
                (
                    [_as_temporary(layer["forward"].rows) for layer in again],
                    [_as_temporary(one.rows) if i else one.rows for i, one in enumerate(undone)],
                )
                for again, undone in self._undone(half)
            ],
            gradients,
        )

    def plan(self, shared: Shared, ahead: int, begin: int) -> Plan:
        """Return the buckets of the stage (gradients.py)."""
        passes = {
            half: [one for _, undone in self._undone(half) for one in undone]
            for half in halves_of(self._stage)
        }
        sums = {half: [one.sums for one in ones] for half, ones in passes.items()}
        rows = {half: len(ones[-1].rows) for half, ones in passes.items()}
        return plan_of(self._traced, self._stage, sums, rows, shared, ahead, begin)

    def _undone(self, half: str) -> list[tuple[list[dict[str, _Rows]], list[_Rows]]]:
        """List groups of parts from the last on: layers that are recomputed first, and passes."""

        def again(some: slice) -> tuple[list[dict[str, _Rows]], list[_Rows]]:
            inside = self._layers[some][:-1]
            undone = [layer[half] for layer in reversed(inside)]
            return inside * (half != "weights"), [self._agains[some][-1][half], *undone]

        return [
            *[([], [self._head[half]])] * self._last,
            *(([], [layer[half]]) for layer in reversed(self._layers[self._recomputed :])),
            *map(again, reversed(self._groups)),
            *[([], [self._embedding[half]])] * self._first,
        ]


_chunk = lru_cache(maxsize=1 << 12)(_Chunk)


@lru_cache(maxsize=1 << 12)
def _rise(chunk: _Chunk, half: str, gradients: Gradients) -> Bytes:
    """Return the bytes at the peak of a backward pass, beyond those before it."""
    return find_peak(chunk.backward(half, gradients))[0]


def _forward_again(agains: Sequence[dict[str, _Rows]]) -> Iterator[Bytes]:
    """Yield the rows of a recomputed group: the layers after the first keep nothing of their own."""
    for i, again in enumerate(agains):
        rows = again["forward"].rows
        yield np.concatenate([rows, -rows.sum(axis=0, keepdims=True)]) if i else rows


def _groups(stage: Stage, group: int) -> list[tuple[int, int]]:
    """List (layers, number of groups) of the recomputed groups, in order."""
    if stage.groups_again == stage.layers_again:
        return [(1, stage.groups_again)]
    whole, rest = divmod(stage.layers_again, group)
    return [(group, whole), (rest, 1)] if rest else [(group, whole)]


# -- weights that are not there all the time -------------------------------------------------------


class _Around:
    """Rows of weights and gradients between the passes of a stage's parts."""

    def __init__(self, traced: Trace, stage: Stage, shared: Shared | None) -> None:
        self._shared = shared
        parts = parts_of(traced, stage)
        self._head = stage.last
        # of each use in a forward pass; first come tables, which no backward pass needs
        self._weights, self._tables = [0.0] * len(parts), int(stage.first)
        if shared is None:
            return
        zero = shared.zero

        def gathered(parameters: Iterable[Sharding]) -> list[float]:
            return [
                float(zero.weight_bytes * p.elements)
                for p in parameters
                if p.kind != "vector" and zero.weight_ranks(p.experts) > 1
            ]

        tables = (gathered(traced.embedding.parameters) or [0.0]) * stage.first
        others = (sum(gathered(part.parameters)) for part in parts[stage.first :])
        self._weights, self._tables = [*tables, *others], len(tables)

    def forward(self, passes: Sequence[Bytes]) -> Bytes:
        """Return the rows of a forward pass with those around them."""
        if self._shared is None:
            return np.concatenate([NOTHING, *passes])
        w, ahead, rows = self._weights, self._shared.ahead, list[Bytes]()
        # the rows of the embedding are those around its last table
        for i, of_part in enumerate([*[NOTHING] * (len(w) - len(passes)), *passes]):
            # after the last one, a backward pass begins with the layer before it
            following = i + 1 if i + 1 < len(w) else max(0, i - 1)
            now = w[following] + (w[0] if i == 0 else 0.0) if ahead else w[i]
            stays = self._head and i == len(w) - 1
            rows += [_row(now), of_part, _row(0.0 if stays else -w[i])]
        return np.concatenate([NOTHING, *rows])

    def backward(
        self,
        passes: Sequence[tuple[list[Bytes], list[Bytes]]],
        gradients: Gradients | None = None,
    ) -> Bytes:
        """Return the rows of a backward pass, or of a half of it, with those around them.

        passes  for each group of parts: what is recomputed first, and each part's backward pass
        """
        if self._shared is None:
            return np.concatenate(
                [NOTHING, *(rows for pair in passes for rows in (*pair[0], *pair[1]))]
            )
        w, ahead, rows = self._weights, self._shared.ahead, list[Bytes]()
        changes = iter(gradients or [()] * len(w))
        at = len(w)  # uses before are left
        for number, (made, undone) in enumerate(passes):
            embedding = at <= self._tables
            if not (embedding or (self._head and number == 0)):
                first = at - len(undone)
                # after the first layer, a forward pass begins with the first table
                following = first - 1 if first > self._tables else 0
                rows.append(_row(sum(w[first : at - ahead]) + ahead * w[following]))
            rows += made
            for one in undone:
                of_part = next(changes)
                at -= 1
                if of_part:
                    bytes_of = [_row(gradients=change)[0] for _, change in of_part]
                    one = np.insert(one, [row for row, _ in of_part], bytes_of, axis=0)
                rows += [one, _row(0.0 if embedding else -w[at])]
        return np.concatenate([NOTHING, *rows])


def _row(weights: float = 0.0, gradients: float = 0.0) -> Bytes:
    row = np.zeros_like(NOTHING)
    row[0, _WEIGHTS], row[0, _GRADIENTS] = weights, gradients
    return row


# -- ranks -----------------------------------------------------------------------------------------


def memory_of_ranks(config: Config, device: str = "cuda") -> tuple[RankMemory, ...]:
    """Return the memory of all pipeline ranks in a step of the full global batch.

    device   "cpu" or a GPU's: they differ in operators and in the rounding of memory
    """
    ranks = range(config.parallel.pipeline_model_parallel_size)
    return tuple(_memory(config, rank, device) for rank in ranks)


def peak_rank(config: Config, device: str, capacity: float) -> RankMemory:
    """Find the pipeline rank with the highest peak, or any rank that needs more than `capacity`."""
    first = _memory(config, 0, device)  # holds the most micro-batches
    if first.total > capacity:
        return first
    others = range(1, config.parallel.pipeline_model_parallel_size)
    ranks = (first, *(_memory(config, rank, device) for rank in others))
    return max(ranks, key=lambda rank: rank.total)


def state_bytes(
    config: Config,
    parameters: int,
    experts: int,
    whole: int,
    whole_experts: int,
    vectors: int,
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer for a rank's parameters.

    experts, whole  how many of them are of experts, and how many the optimizer takes whole;
                    whole_experts: how many are both
    vectors         how many others than those of experts are of norms and biases
    """
    precision, state, zero = config.precision, optimizer_state(config), zero_of(config)
    others = parameters - experts - vectors
    weights = vectors + others / zero.weight_ranks() + experts / zero.weight_ranks(experts=True)
    gradients = (others + vectors) / zero.gradient_ranks()
    gradients += experts / zero.gradient_ranks(experts=True)
    owned = owned_elements(config, parameters, experts)
    of_whole = owned_elements(config, whole, whole_experts)
    return {
        "weights": precision.weight_bytes * weights,
        "master": 0.0 if precision.dtype_name == "float32" else 4.0 * owned,
        "moments": state.bytes * (owned - of_whole) + state.of(True).bytes * of_whole,
        "gradients": precision.gradient_bytes * gradients,
    }


def working_bytes(config: Config, rank: int, device: str) -> dict[str, float]:
    """Return the bytes of the two sets of tensors through which --cpu-offload streams the state.

    A tensor of a set is as large as the largest of this rank's parts of the buckets that have it.
    """
    state, in_fp32 = optimizer_state(config), config.precision.dtype_name == "float32"
    most: dict[str, float] = {}
    for plan, _ in buckets_of_rank(config, trace(config, device), rank):
        elements = plan.elements / zero_of(config).sizes(plan.kind.experts)[1]
        tensors = {**state.of(plan.kind.whole).tensors, **({} if in_fp32 else {"master": 4})}
        for name, n_bytes in tensors.items():
            most[name] = max(most.get(name, 0.0), n_bytes * elements)
    master = most.pop("master", 0.0)
    return {"master": 2 * master, "moments": 2 * sum(most.values())}


def sized_model(config: Config) -> ModelConfig:
    """Return the model with a vocabulary: GPT-2's if the size depends on tokenizer files."""
    model = config.model
    return (
        model
        if model.vocab_size is not None
        else dataclasses.replace(model, vocab_size=GPT2_VOCABULARY)
    )


def parameters_of_rank(config: Config, rank: int, device: str = "cuda") -> int:
    """Count parameters on each device of a pipeline rank, including a tied embedding's copy."""
    traced = trace(config, device)
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    count = sum(parameters_of(traced, stage) for stage in own)
    # one rank with several chunks has one tied embedding
    if len(own) > 1 and own[0].first and own[-1].last:
        count -= sum(p.elements for p in traced.head.parameters if p.tied)
    return count


def experts_of_rank(config: Config, rank: int, device: str) -> int:
    """Count the parameters of experts on each device of a pipeline rank."""
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    return sum(experts_of(trace(config, device), stage) for stage in own)


def whole_of_rank(config: Config, rank: int, device: str, only_experts: bool = False) -> int:
    """Count the parameters on each device of a rank that the optimizer takes whole."""
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    traced = trace(config, device)
    found = (p for stage in own for p in whole_parameters(config, traced, stage))
    return sum(p.elements for p in found if p.experts or not only_experts)


def vectors_of_rank(config: Config, rank: int, device: str) -> int:
    """Count the parameters of norms and biases on each device of a rank, without experts'."""
    own = stages_of(config)[rank :: config.parallel.pipeline_model_parallel_size]
    return sum(vectors_of(trace(config, device), stage) for stage in own)


PARTS_OF_RANK = (
    experts_of_rank,
    whole_of_rank,
    partial(whole_of_rank, only_experts=True),
    vectors_of_rank,
)
"""Functions that count the parameters of a rank as state_bytes wants them, after all of them."""


def host_bytes(config: Config, rank: int, device: str) -> float:
    """Return the bytes that --cpu-offload keeps in host memory for a device of a rank."""
    if not config.engine.cpu_offload or device == "cpu":
        return 0.0
    states = _states(config, rank, device)
    return states["master"] + states["moments"]


def _states(config: Config, rank: int, device: str) -> dict[str, float]:
    counts = (count(config, rank, device) for count in (parameters_of_rank, *PARTS_OF_RANK))
    return state_bytes(config, *counts)


def _memory(config: Config, rank: int, device: str) -> RankMemory:
    states = _states(config, rank, device)
    if config.engine.cpu_offload:
        kept = float(device == "cpu")  # whose memory is the host's
        working = working_bytes(config, rank, device)
        states |= {name: kept * states[name] + more for name, more in working.items()}
    held = _peak_bytes(config, rank, device) + [states.get(name, 0.0) for name in CATEGORIES]
    return RankMemory(rank, *map(float, held))


def _peak_bytes(config: Config, rank: int, device: str) -> Bytes:
    """Return the bytes of passes and messages at their peak."""
    parallel = config.parallel
    traced = trace(config, device)
    m = config.num_micro_batches()
    p = parallel.pipeline_model_parallel_size
    group = config.recompute.recompute_num_layers
    block = CPU_BLOCK if device == "cpu" else GPU_BLOCK
    shared = shared_of(config)
    stages = stages_of(config)[rank::p]
    mine = [chunk_memory(traced, stage, group, block, shared) for stage in stages]
    op, chunk, held, waiting, messages = moments_of_rank(
        config.schedule, p, parallel.num_chunks, m, rank
    )
    by_op = np.array([[c.forward, c.backward, c.backward, c.weights] for c in mine])  # as in Op
    now = by_op[chunk, op]
    if shared is not None:
        chunks = [_chunk(traced, stage, group, block, shared) for stage in stages]
        now = now + _gradients_of_passes(stages, chunks, shared, op, chunk)
    now = now + held @ np.array([c.kept for c in mine]) + waiting[:, None] * mine[0].waiting
    now[:, _BUFFERS] += messages * traced.layer.hands_on
    most: np.ndarray[Any, np.dtype[np.float64]] = now[np.argmax(now.sum(axis=1))]
    most[_ACTIVATIONS] += max(layer.tables for layer, _ in traced.kinds)
    # tokens, labels and positions, int64, and fp32 masks of all micro-batches of the step
    if rank in (0, p - 1):
        most[_BUFFERS] += 28.0 * config.model.seq_length * config.batch.micro_batch_size * m
    return most


_HALVES = {
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "inputs",
    Op.BACKWARD_WEIGHT: "weights",
}
"""Names of backward passes and their halves in events.Part, by instruction."""


def _gradients_of_passes(
    stages: Sequence[Stage],
    chunks: Sequence[_Chunk],
    shared: Shared,
    op: Any,
    chunk: Any,
) -> Bytes:
    """Return what the gradients of ZeRO stages 2 and 3 add to each pass of a rank."""
    first_end = np.argmax((op == Op.BACKWARD_WEIGHT) | (op == Op.BACKWARD))
    ahead = max(1, int((op[:first_end] == Op.BACKWARD_INPUT).sum()))
    plans = list[Plan]()
    for each in chunks:
        begin = sum(len(plan.order) for plan in plans)
        plans.append(each.plan(shared, ahead, begin))
    traffic = Traffic(plans, shared.early, shared.zero.gradient_bytes)
    without = {
        (number, half): _rise(chunks[number], half, ())
        for number, stage in enumerate(stages)
        for half in halves_of(stage)
    }
    after: dict[object, tuple[Bytes, Traffic]] = {}  # of a state and a pass
    rows = []
    for what, number in zip(op.tolist(), chunk.tolist(), strict=True):
        live = _row(gradients=traffic.bytes)[0]
        if what == Op.FORWARD:
            rows.append(live)
            continue
        key = traffic.state, what, number
        if key not in after:
            half = _HALVES[what]
            following = traffic.copy()
            changes = following.run(number, half)
            more = _rise(chunks[number], half, changes) - without[number, half]
            after[key] = live + more, following
        row, traffic = after[key]
        rows.append(row)
    return np.array(rows)
