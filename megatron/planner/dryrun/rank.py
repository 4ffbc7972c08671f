"""Dry run of one rank: the stages, engine and executor of a run, without data."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.checkpoint.tensors import snapshot_bytes, tensors_to_save
from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.engine.deepspeed_internals import import_deepspeed
from megatron.engine.engine import Engine, build_executor
from megatron.engine.optimizer_state import optimizer_state
from megatron.errors import ConfigError
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.environment import changed
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.topology import DEFAULT_ORDER, Topology
from megatron.planner.dryrun.follower import Collectives, Follower, Message, followed
from megatron.planner.events import Take
from megatron.planner.memory import CPU_BLOCK, GPU_BLOCK, RankMemory, changes, find_peak
from megatron.planner.processes import LAUNCHED
from megatron.training.run.data import reads_data

_LARGEST = 3


@dataclass(frozen=True)
class RankRun:
    """Result of one rank's steps.

    parameters   elements on the device, padding included
    peak         peak memory of a training step
    setup_bytes  peak before the first step
    copy_bytes   host memory for the copy that --async-save writes; 0 without that flag
    largest      tensors at the peak: bytes, category and description
    messages     of the last step
    collectives  of set-up and steps
    stands_for   number of ranks of this kind, which need as much memory or less
    """

    rank: int
    pipeline_rank: int
    parameters: int
    peak: RankMemory
    setup_bytes: float
    copy_bytes: int
    largest: tuple[tuple[int, str, str], ...]
    messages: Sequence[Message] = field(repr=False)
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
    replaced: dict[str, Any] = {"available_memory": lambda *_: 1 << 62}
    if device == "meta":
        replaced.update(device_name=lambda *_: "meta", current_device_name=lambda *_: "meta")
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            changed(os.environ, dict.fromkeys((*LAUNCHED, "OMPI_COMM_WORLD_LOCAL_RANK")))
        )
        for name, value in replaced.items():
            setattr(accelerator, name, value)  # on the instance, over the methods of its class
            stack.callback(delattr, accelerator, name)
        dist.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=parallel.world_size
        )
        stack.callback(dist.destroy_process_group)
        # otherwise it would be used for the next rank
        stack.callback(setattr, deepspeed.comm.comm, "cdb", None)
        yield Topology.create(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            device=torch.device(device),
            tied_embeddings=not config.model.untie_embeddings_and_output_weights,
            flight=flight,
            order=parallel.rank_order or DEFAULT_ORDER,
        )


def run_rank(
    config: Config,
    rank: int,
    device: str,
    micro_batches: int,
) -> RankRun:
    """Set up `rank` of the job that `config` describes, and run two steps.

    The first step is short: the engine counts in it how often each gradient is added to. The second
    one has `micro_batches` micro-batches and sends buckets early, as all later steps do.

    device  "cpu", or "meta" for a GPU

    Exceptions of the run's code are passed on.
    """
    import_deepspeed(device)
    optimizer_state(config)  # a user's optimizer is measured by a step with data
    follower = Follower(device)
    with member(config, rank, device, follower.flight) as topology, followed(follower):
        follower.category = "weights"
        chunks = build_chunks(
            config, topology, layer_context(config, topology, perform_initialization=False)
        )
        follower.category = "temporary"
        engine = Engine(config, topology, chunks)
        chunks.train()
        executor = build_executor(config, topology, chunks, engine)
        _sort(follower, engine, chunks)
        gc.collect()
        setup = len(follower.steps)
        follower.category = "buffers"
        batches = _micro_batches(config, topology)
        tensor_size = config.parallel.tensor_model_parallel_size
        follower.last_stage = executor.last_stage
        follower.rows = config.model.padded_vocab_size(tensor_size) // tensor_size
        for count in (min(micro_batches, topology.pipeline.size), micro_batches):
            follower.messages.clear()
            before = len(follower.steps)
            losses = executor.train(batches[:count], loss_scale=engine.loss_scale)
            follower.category = "temporary"
            engine.step(config.optimizer.lr)
            del losses
        engine.wait_for_weights()
        peak, setup_bytes, largest = _peak_of_steps(
            follower, setup, before, CPU_BLOCK if device == "cpu" else GPU_BLOCK
        )
        copy_bytes = 0
        if config.checkpoint.async_save:
            copy_bytes = snapshot_bytes(
                tensors_to_save(engine, topology, not config.checkpoint.no_save_optim)
            )
        found = RankRun(
            rank,
            topology.pipeline.rank,
            sum(p.numel() for p in chunks.parameters()),
            RankMemory(topology.pipeline.rank, *peak),
            setup_bytes,
            copy_bytes,
            largest,
            follower.messages,
            follower.collectives,
        )
    del chunks, engine, executor, batches
    gc.collect()
    return found


def _sort(follower: Follower, engine: Engine, chunks: torch.nn.ModuleDict) -> None:
    """Assign categories to the tensors of set-up."""
    for fragment in engine.fragments():
        follower.move((fragment.moments[name] for name in engine.moment_names), "moments")
        follower.move([fragment.master], "master")
    parameters: list[Any] = [*chunks.parameters()]
    follower.move((p.gradient_sink.total for p in parameters), "gradients")
    follower.move(parameters, "weights")


def _peak_of_steps(
    follower: Follower, setup: int, last: int, block: int
) -> tuple[list[float], float, tuple[tuple[int, str, str], ...]]:
    """Return the peak from step `last` on by category, that of set-up, and the largest tensors.

    Steps are allocations and releases; the first `setup` ones are those of set-up.
    """
    made: dict[int, Take] = {}
    at_setup = changes(follower.steps[:setup], block, made)
    before = at_setup.sum(axis=0) + changes(follower.steps[setup:last], block, made).sum(axis=0)
    most, until = find_peak(changes(follower.steps[last:], block, dict(made)))
    changes(follower.steps[last : last + until], block, made)
    largest = sorted(made.values(), key=lambda step: -step.bytes)[:_LARGEST]
    shown = tuple((step.bytes, step.category, follower.shapes[step.id]) for step in largest)
    return [*map(float, before + most)], float(find_peak(at_setup)[0].sum()), shown


def _micro_batches(config: Config, topology: Topology) -> list[MicroBatch]:
    """Create a step's micro-batches; empty ones on a stage that reads no data, as in a run."""
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
