"""Dry run of one rank: the stages, engine and executor of a run, without data.

The rank's allocations, messages and collectives are recorded. Messages between pipeline ranks are
checked against its schedule, and collectives against those of other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import unittest.mock
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpoint.tensors import snapshot_bytes, tensors_to_save
from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.engine.deepspeed_engine import import_deepspeed
from megatron.engine.engine import Engine, build_executor
from megatron.engine.optimizer_state import MASTER, optimizer_state
from megatron.errors import ConfigError
from megatron.model.gpt import build_chunks, check_patterns, layer_context
from megatron.model.stages import assign_layers, stage_owners
from megatron.parallel.environment import changed
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.layout import LayoutSizes
from megatron.parallel.topology import Topology
from megatron.pipeline.orders import COMPUTE, RECEIVES, SENDS, Instruction, Op
from megatron.planner import tensors
from megatron.planner.events import Alloc, Free
from megatron.planner.memory import CPU_BLOCK, GPU_BLOCK, RankMemory, changes, find_peak
from megatron.planner.subprocesses import LAUNCHED
from megatron.planner.tensors import Arguments, Keywords, Operator, Work
from megatron.training.run.data import reads_data

_LARGEST = 3


# -- what a rank does ------------------------------------------------------------------------------


class RankProblem(NamedTuple):
    """Problem found on a rank.

    kind  "memory", "messages" or "error" (the code raised an exception)
    """

    kind: str
    rank: int
    text: str


class RankMessage(NamedTuple):
    """Message between two pipeline ranks, as posted by one of them."""

    instruction: Instruction
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} ({self.instruction})"


class Collective(NamedTuple):
    """Collective in a group, as posted by one member.

    call     torch's name of the collective
    shapes   shapes of the first two tensors in the call; () for an all-to-all, where they differ
             between ranks, and for objects
    content  dtype of the first tensor, or the text of an object
    """

    call: str
    shapes: tuple[tuple[int, ...], ...]
    content: str

    def __str__(self) -> str:
        return (
            f"{self.call} {' -> '.join(str(list(shape)) for shape in self.shapes)} of "
            f"{self.content}"
        )


Collectives = Mapping[tuple[int, ...], Sequence[Collective]]
"""Collectives of one rank in order, by the ranks of their group."""


def check_messages(
    rank: int,
    posted: Sequence[RankMessage],
    plan: Sequence[Instruction],
    shape: tuple[int, ...],
    dtype: str,
) -> list[RankProblem]:
    """Find a rank's first message that differs from its schedule, or from this shape and dtype.

    Messages have no tags: the n-th message that one rank sends to another is the n-th that the
    other receives from it. The ranks' lists in a schedule match each other (pipeline/schedule.py),
    so it is enough to compare each rank with its own list.
    """
    expected = [RankMessage(i, shape, dtype) for i in plan if i.op in SENDS | RECEIVES]
    for n, (actual, planned) in enumerate(itertools.zip_longest(posted, expected), 1):
        if actual != planned:
            text = (
                f"its message {n} is {actual or 'missing'}, but in the schedule it is "
                f"{planned or 'missing'}"
            )
            return [RankProblem("messages", rank, text)]
    return []


def check_collectives(posted: Mapping[int, Collectives]) -> list[RankProblem]:
    """Find the first collective that differs, for each group and each pair of ranks in it."""
    findings = []
    for (a, of_a), (b, of_b) in itertools.combinations(sorted(posted.items()), 2):
        for group in dict.fromkeys((*of_a, *of_b)):
            if a not in group or b not in group:
                continue
            for n, (x, y) in enumerate(
                itertools.zip_longest(of_a.get(group, ()), of_b.get(group, ())), 1
            ):
                if x != y:
                    more = f", ... {group[-1]}" if len(group) > 4 else ""
                    text = (
                        f"collective {n} in the group of ranks {', '.join(map(str, group[:4]))}"
                        f"{more} is {x or 'missing'}, but on rank {b} it is {y or 'missing'}"
                    )
                    findings.append(RankProblem("messages", a, text))
                    break
    return findings


_aten = torch.ops.aten


class RankRecorder(tensors.OperatorRecorder):
    """Recorder of allocations, releases and messages.

    device       "cpu", or "meta" for a GPU
    steps        allocations and releases, in order; a change of a storage's category is recorded as
                 a release and an allocation
    shapes       shape and dtype of each storage's first tensor, by the storage's number
    alive        allocations of live storages, by number
    messages, collectives   posted, in order; collectives by group
    flight       flight recorder for the executor, which passes its instructions on to this recorder
    last_stage   global number of the last stage, in whose backward passes there are logits
    vocabulary_rows         rows of the output layer on this rank
    context      name of the context-parallel group
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.steps: list[Alloc | Free] = []
        self.shapes: dict[int, str] = {}
        self.alive: dict[int, Alloc] = {}
        self._without_memory: dict[int, Alloc] = {}
        self.messages: list[RankMessage] = []
        self.collectives: dict[tuple[int, ...], list[Collective]] = {}
        self.flight = _Flight(self)
        self.last_stage = -1
        self.vocabulary_rows = -1
        self.context = ""
        self._now = Instruction(Op.FORWARD, 0, 0)
        self._received: dict[Instruction, weakref.ref[Tensor]] = {}
        self._calls: dict[str, list[Collective]] = {}

    def run(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        out = func(*args, **kwargs)
        # zeros_like of a tensor in host memory is in host memory too, which does not count
        like_there = func is _aten.zeros_like.default and self.number_of(args[0]) not in self.alive
        self.see(out, counts=not like_there)
        return out

    def allocated(self, step: Alloc, tensor: Tensor, /) -> None:
        self.steps.append(step)
        self.alive[step.id] = step
        self.shapes[step.id] = f"{list(tensor.shape)} {_word(tensor.dtype)}"

    def freed(self, step: Free) -> None:
        if self.alive.pop(step.id, None) is not None:
            self.steps.append(step)

    def resized(self, number: int, has_memory: bool) -> None:
        step = (self._without_memory if has_memory else self.alive).pop(number, None)
        if step is not None:
            (self.alive if has_memory else self._without_memory)[number] = step
            self.steps.append(step if has_memory else Free(number))

    def move(self, moved: Iterable[Tensor], category: str) -> None:
        """Move the storages of these tensors to another category."""
        for tensor in moved:
            number = self.number_of(tensor) or 0
            if (freed := self._without_memory.get(number)) is not None:
                self._without_memory[number] = freed._replace(category=category)
            step = self.alive.get(number)
            if step is not None and step.category != category:
                self.alive[step.id] = step._replace(category=category)
                self.steps += [Free(step.id), self.alive[step.id]]

    def begin(self, this: Instruction) -> None:
        """Count subsequent allocations under this instruction's category."""
        self._now = this
        self.vocabulary = -1
        if this.op is Op.FORWARD:
            self.category = "activations"
            self._use(Instruction(Op.RECV_FORWARD, this.stage, this.micro_batch))
        elif this.op in COMPUTE:
            self.category = "temporary"
            self._use(Instruction(Op.RECV_BACKWARD, this.stage, this.micro_batch))
            self.vocabulary = self.vocabulary_rows if this.stage == self.last_stage else -1
        else:
            self.category = "buffers"

    def _use(self, receive: Instruction) -> None:
        tensor = self._received.pop(receive, lambda: None)()
        if tensor is not None:
            self.move([tensor], self.category)

    # -- messages ----------------------------------------------------------------------------------

    def sent(self, name: str, args: Arguments, posted: list[Tensor], work: Work) -> None:
        group = tensors.group_of(args)
        if name in ("send", "recv") and group.group_name != self.context:
            self.messages.append(
                RankMessage(self._now, tuple(posted[0].shape), _word(posted[0].dtype))
            )
            self.move(posted, "buffers")
            if name == "recv":
                self._received[self._now] = weakref.ref(posted[0])
        else:
            # Shapes differ between ranks only in an all-to-all.
            shapes = tuple(tuple(t.shape) for t in posted[:2] if not name.startswith("alltoall"))
            self._of(group).append(
                Collective(name, shapes, _word(posted[0].dtype) if posted else "")
            )

    def gather_objects(
        self, results: list[object], value: object, group: dist.ProcessGroup | None = None
    ) -> None:
        """Replace dist.all_gather_object: record this rank's value, and return it for all ranks."""
        self._of(group or dist.group.WORLD).append(Collective("all_gather_object", (), repr(value)))
        results[:] = [value] * len(results)

    def _of(self, group: dist.ProcessGroup | None) -> list[Collective]:
        assert group is not None, "the world has a group"
        name = group.group_name  # query the group's ranks only once: there may be 75,000
        if name not in self._calls:
            self._calls[name] = self.collectives.setdefault(
                tuple(dist.get_process_group_ranks(group)), []
            )
        return self._calls[name]


class _Flight(FlightRecorder):
    """Flight recorder that forwards the executor's instructions to a RankRecorder."""

    def __init__(self, follower: RankRecorder) -> None:
        super().__init__()
        self._follower = follower

    def instruction(self, name: bytes, stage: int, micro_batch: int) -> None:
        super().instruction(name, stage, micro_batch)
        self._follower.begin(Instruction(Op[name.decode()], stage, micro_batch))

    def computed(self) -> None:
        super().computed()
        self._follower.category = "temporary"
        self._follower.vocabulary = -1


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def followed(follower: RankRecorder) -> Iterator[None]:
    """Record all operations; in this context, tensors on the follower's device have no data."""
    gather = unittest.mock.patch.object(dist, "all_gather_object", follower.gather_objects)
    with gather, tensors.without_data(follower.device, follower):
        yield


# -- a rank's steps --------------------------------------------------------------------------------


def _first_trained(config: Config) -> int:
    """Return the first pipeline stage with parameters that train (Engine.first_trained)."""
    trained = [name.split(".") for name in check_patterns(config) if config.model.trains(name)]
    if any(part.startswith("embedding") for part, *_ in trained):
        return 0
    parallel = config.parallel
    layers = config.model.num_layers
    first = min((int(words[1]) for words in trained if words[0] == "layers"), default=layers)
    ranges = assign_layers(layers, parallel.num_stages, parallel.pipeline_layout)
    return sum(first >= stage.stop for stage in ranges[:-1])


@dataclass(frozen=True)
class RankRun:
    """Result of one rank's steps.

    parameters   elements on the device, including padding
    peak         peak memory of a training step
    setup_bytes  peak before the first step
    copy_bytes   host memory for the copy that --async-save writes; 0 without that flag
    largest      largest tensors at the peak: bytes, category and description
    messages     messages of the last step
    collectives  collectives of set-up and steps
    stands_for   number of ranks of this kind, none of which needs more memory
    """

    rank: int
    pipeline_rank: int
    parameters: int
    peak: RankMemory
    setup_bytes: float
    copy_bytes: int
    largest: tuple[tuple[int, str, str], ...]
    messages: Sequence[RankMessage] = field(repr=False)
    collectives: Collectives = field(repr=False)
    stands_for: int = 0

    @property
    def needed_bytes(self) -> float:
        """Peak memory of set-up and steps."""
        return max(self.peak.total, self.setup_bytes)


@contextlib.contextmanager
def member(
    config: Config, rank: int, device: str, flight: FlightRecorder | None = None
) -> Iterator[Topology]:
    """Yield the topology of `rank` over a temporary process group whose messages are dropped.

    Raises ConfigError if this process already has a process group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            "a dry run creates its own process group, but this process already has one: use "
            "another process"
        )
    parallel = config.parallel
    deepspeed = import_deepspeed(device)
    accelerator = deepspeed.accelerator.get_accelerator()
    # Set-up must not depend on this machine's free memory.
    replaced: dict[str, Callable[..., object]] = {"available_memory": lambda *_: 1 << 62}
    if device == "meta":
        replaced |= dict.fromkeys(("device_name", "current_device_name"), lambda *_: "meta")
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            changed(os.environ, dict.fromkeys((*LAUNCHED, "OMPI_COMM_WORLD_LOCAL_RANK")))
        )
        for name, value in replaced.items():
            setattr(accelerator, name, value)  # on the instance, hiding the methods of its class
            stack.callback(delattr, accelerator, name)
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=parallel.world_size
        )
        stack.callback(dist.destroy_process_group)
        # otherwise DeepSpeed would reuse its communication backend for the next rank
        stack.callback(setattr, deepspeed.comm.comm, "cdb", None)
        yield Topology.create(
            sizes=LayoutSizes.of(config),
            device=torch.device(device),
            tied_embeddings=config.model.embeds_on_last_stage,
            flight=flight,
            owners=stage_owners(config),
        )


@contextlib.contextmanager
def _earlier_objects_passed_over() -> Iterator[None]:
    """Let garbage collections skip all existing objects: torch alone has a million of them."""
    if gc.get_freeze_count():  # already frozen by a caller, who will unfreeze
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_earlier_objects_passed_over()
def run_rank(
    config: Config,
    rank: int,
    device: str,
    micro_batches: int,
) -> RankRun:
    """Set up `rank` of the job that `config` describes, and run two steps.

    The first step is short: in it the engine counts the additions to each gradient. The second step
    has `micro_batches` micro-batches and sends buckets early, like all later steps.

    device  "cpu", or "meta" for a GPU

    Exceptions raised by the run's code propagate.
    """
    import_deepspeed(device)
    config = config.with_pieces(loss=None)  # it may load a teacher, and reads labels
    optimizer_state(config)  # measures a user's optimizer in a step with data
    if config.model.trains_in_part:
        check_patterns(config)
    follower = RankRecorder(device)
    with member(config, rank, device, follower.flight) as topology, followed(follower):
        if topology.context.handle is not None:
            follower.context = topology.context.handle.group_name
        follower.category = "weights"
        late = config.engine.zero_stage == 3
        context = layer_context(config, topology, perform_initialization=False, late=late)
        chunks = build_chunks(config, topology, context)
        follower.category = "temporary"
        engine = Engine(config, topology, chunks)
        chunks.train()
        if config.model.trains_in_part:
            engine.first_trained = _first_trained(config)  # other ranks did not say
        executor = build_executor(config, topology, chunks, engine)
        _sort(follower, engine, chunks)
        gc.collect()
        setup = len(follower.steps)
        follower.category = "buffers"
        batches = _micro_batches(config, topology)
        tensor_size = config.parallel.tensor_model_parallel_size
        follower.last_stage = executor.last_stage
        follower.vocabulary_rows = config.model.padded_vocab_size(tensor_size) // tensor_size
        for count in (min(micro_batches, topology.pipeline.size), micro_batches):
            follower.messages.clear()
            last = len(follower.steps)
            losses = executor.train(batches[:count], loss_scale=engine.loss_scale)
            follower.category = "temporary"
            engine.step(config.optimizer.lr)
            del losses
        block = CPU_BLOCK if device == "cpu" else GPU_BLOCK
        made: dict[int, Alloc] = {}
        at_setup = changes(follower.steps[:setup], block, made)
        at_start = at_setup.sum(axis=0) + changes(follower.steps[setup:last], block, made).sum(
            axis=0
        )
        most, until = find_peak(changes(follower.steps[last:], block, dict(made)))
        changes(follower.steps[last : last + until], block, made)
        largest = sorted(made.values(), key=lambda step: -step.bytes)[:_LARGEST]
        # The collectives of this call are compared, but its memory does not count: with ZeRO stage
        # 3 the call gathers all weights.
        engine.wait_for_weights()
        copy_bytes = 0
        if config.checkpoint.async_save:
            copy_bytes = snapshot_bytes(
                tensors_to_save(engine, topology, not config.checkpoint.no_save_optim)
            )
        result = RankRun(
            rank,
            topology.pipeline.rank,
            sum(p.numel() for p in chunks.parameters()),
            RankMemory(topology.pipeline.rank, *map(float, at_start + most)),
            float(find_peak(at_setup)[0].sum()),
            copy_bytes,
            tuple((step.bytes, step.category, follower.shapes[step.id]) for step in largest),
            follower.messages,
            follower.collectives,
        )
    del chunks, engine, executor, batches
    gc.collect()
    return result


def _sort(follower: RankRecorder, engine: Engine, chunks: torch.nn.ModuleDict) -> None:
    """Assign categories to the tensors created during set-up."""
    for fragment in engine.fragments():
        follower.move(fragment.moments.values(), "moments")
        follower.move([fragment.master], "master")
    for working in () if engine.host_state is None else engine.host_state.working:
        for (name, _), x in working.items():
            follower.move([x], "master" if name == MASTER else "moments")
    buckets = engine.buckets
    follower.move((t for b in buckets for t in (b.gradients, b.sums) if t is not None), "gradients")
    follower.move(
        (t for b in buckets for t in (b.weights, b.weight_shard) if t is not None), "weights"
    )
    follower.move(chunks.parameters(), "weights")


def _micro_batches(config: Config, topology: Topology) -> list[MicroBatch]:
    """Create a step's micro-batches; as in a run, they are empty on a stage that reads no data."""
    count = config.num_micro_batches()
    b = config.batch.micro_batch_size
    s = config.model.seq_length
    if not reads_data(config, topology):
        empty = torch.empty(0)
        return [MicroBatch(empty, empty, empty, empty, None, i * b) for i in range(count)]
    device = topology.device
    tokens, labels, positions = (
        torch.empty(count, b, s, dtype=torch.int64, device=device) for _ in range(3)
    )
    mask = torch.empty(count, b, s, device=device)
    return [
        MicroBatch(tokens[i], labels[i], mask[i], positions[i], None, i * b) for i in range(count)
    ]
