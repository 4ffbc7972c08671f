"""One rank's training steps on tensors without data: its chunks, its engine and its executor, as a run has them."""
from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.checkpoint.snapshot import snapshot_bytes
from megatron.checkpoint.tensors import tensors_to_save
from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.assemble import build_executor
from megatron.engine.deepspeed_setup import import_deepspeed
from megatron.engine.engine import Engine
from megatron.engine.optimizer_state import optimizer_state
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Topology
from megatron.pipeline.instructions import COMPUTE, Instruction, Op
from megatron.planner.dryrun.job import member
from megatron.planner.dryrun.memory import Memory
from megatron.planner.dryrun.memory_kinds import Held
from megatron.planner.dryrun.messages import Log
from megatron.planner.dryrun.tensors import Operators, without_data
from megatron.planner.memory import CPU_BLOCK, GPU_BLOCK
from megatron.training.streams import reads_data


@dataclass
class RankRun:
    """What came of one rank's steps.

    parameters  by Sharding: elements held here
    setup_peak  bytes at most before the first step
    host_bytes  kept in host memory at most, where the device is not the host
    copy_bytes  that --async-save keeps in host memory beside; 0 without it
    log         what the last step posted
    """

    rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    parameters: list[tuple[Sharding, tuple[int, ...]]]
    total_peak: int
    peak: Mapping[str, int]
    peak_of: Mapping[str, int]
    setup_peak: int
    host_bytes: int
    copy_bytes: int
    largest: tuple[Held, ...]
    broken_by: Held | None
    log: Log = field(repr=False)
    setup_log: Log = field(repr=False)


class _Follower(FlightRecorder):
    """Learns from what the executor says it does under which category memory is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Operators | None = None
        self.last_stage, self.vocabulary = -1, 0

    def instruction(self, name: bytes, stage: int, micro_batch: int) -> None:
        super().instruction(name, stage, micro_batch)
        operators = self.operators
        if operators is None:
            return
        memory, this = operators.memory, Instruction(Op[name.decode()], stage, micro_batch)
        memory.when, operators.instruction, operators.vocabulary = str(this), this, -1
        if this.op is Op.FORWARD:
            memory.category = "activations"
            operators.take(Instruction(Op.RECV_FORWARD, stage, micro_batch), "activations")
        elif this.op in COMPUTE:
            memory.category = "temporary"
            operators.take(Instruction(Op.RECV_BACKWARD, stage, micro_batch), "temporary")
            operators.vocabulary = self.vocabulary if stage == self.last_stage else -1
        else:
            memory.category = "buffers"

    def computed(self) -> None:
        super().computed()
        if self.operators is not None:
            self.operators.memory.category, self.operators.vocabulary = "temporary", -1


def run_rank(
    config: Config, rank: int, device: str, micro_batches: int, limit_bytes: float = float("inf"),
    alter: Callable[[Any], object] | None = None,
) -> RankRun:
    """Set up `rank` of the job that `config` describes and take two steps: a short one, from which the engine learns
    how often each gradient is added to, and one of so many micro-batches, which sends buckets early as all later ones.

    device       "cpu", or "meta" for a GPU
    limit_bytes  of the device: the tensor that does not fit any more is named
    alter        called with the executor before the first step, for tests

    Raises what the code raises.
    """
    import_deepspeed(device)
    optimizer_state(config)  # of one's own is found by a step, with data
    gc.freeze()  # what was there before need not be looked through when garbage is collected
    try:
        return _run(config, rank, device, micro_batches, limit_bytes, alter)
    finally:
        gc.unfreeze()


def _run(
    config: Config, rank: int, device: str, micro_batches: int, limit_bytes: float,
    alter: Callable[[Any], object] | None,
) -> RankRun:
    on_cpu = device == "cpu"
    memory = Memory(CPU_BLOCK if on_cpu else GPU_BLOCK, limit_bytes)
    host, log, flight = Memory(CPU_BLOCK), Log(), _Follower()
    with member(config, rank, device, flight) as topology, without_data(device, memory, host, log) as operators:
        memory.category, memory.when = "weights", "set-up"
        chunks = build_chunks(config, topology, layer_context(config, topology, perform_initialization=False))
        memory.category = "temporary"
        engine = Engine(config, topology, chunks)
        chunks.train()
        executor = build_executor(config, topology, chunks, engine)
        if alter is not None:
            alter(executor)
        _sort(memory, engine, chunks)
        gc.collect()
        memory.settle()
        setup_peak, setup_log = memory.peak_total, log.copy()
        memory.category, memory.when = "buffers", "reading data"
        batches = _micro_batches(config, topology)
        flight.operators = operators
        flight.last_stage = executor.last_stage
        flight.vocabulary = _vocabulary(config)
        for count in (min(micro_batches, topology.pipeline.size), micro_batches):
            log.clear()
            memory.begin_peak()
            losses = executor.train(batches[:count], loss_scale=engine.loss_scale)
            memory.category = "temporary"
            memory.when = "the optimizer's step"
            engine.step(config.optimizer.lr)
            del losses
        engine.wait_for_weights()
        memory.settle()
        parameters = [(sharding_of(p), tuple(p.shape)) for p in chunks.parameters()]
        stages = tuple(sorted(int(stage) for stage in chunks))
        pipeline_rank = topology.pipeline.rank
        copy_bytes = _copy_bytes(config, engine, topology)
    del chunks, engine, executor, batches
    gc.collect()
    return RankRun(
        rank=rank, pipeline_rank=pipeline_rank, stages=stages, parameters=parameters, total_peak=memory.peak_total,
        peak=memory.peak, peak_of=memory.peak_of, setup_peak=setup_peak, host_bytes=host.peak_total,
        copy_bytes=copy_bytes, largest=memory.largest, broken_by=memory.broken_by, log=log, setup_log=setup_log,
    )


def _sort(memory: Memory, engine: Engine, chunks: torch.nn.ModuleDict) -> None:
    """What set-up has made: its categories, and names for what they hold."""
    for f in engine.fragments():
        whose = f"of {f.sharding.name} and others"
        for name in engine.moment_names:
            memory.move([f.moments[name]], "moments", f"{name} {whose}")
        memory.move([f.master], "master", f"fp32 master weights {whose}")
    for p in chunks.parameters():
        whose = f"of {sharding_of(p).name} and others"
        total: torch.Tensor = p.gradient_sink.total  # type: ignore[attr-defined]
        memory.move([total], "gradients", f"gradient sums {whose}")
        memory.move([p], "weights", f"weights {whose}")


def _copy_bytes(config: Config, engine: Engine, topology: Topology) -> int:
    if not config.checkpoint.async_save:
        return 0
    return snapshot_bytes(tensors_to_save(engine, topology, not config.checkpoint.no_save_optim))


def _vocabulary(config: Config) -> int:
    return config.model.padded_vocab_size(config.parallel.tensor_model_parallel_size) // (
        config.parallel.tensor_model_parallel_size
    )


def _micro_batches(config: Config, topology: Topology) -> list[MicroBatch]:
    """All micro-batches of a step; empty ones on a stage that reads no data, as in a run."""
    count, b, s = config.num_micro_batches(), config.batch.micro_batch_size, config.model.seq_length
    if not reads_data(config, topology):
        empty = torch.empty(0)
        return [MicroBatch(empty, empty, empty, empty, None, i * b) for i in range(count)]
    device = topology.device
    tokens, labels, positions = (torch.empty(count, b, s, dtype=torch.int64, device=device) for _ in range(3))
    mask = torch.empty(count, b, s, device=device)
    return [MicroBatch(tokens[i], labels[i], mask[i], positions[i], None, i * b) for i in range(count)]
