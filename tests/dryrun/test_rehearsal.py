"""Rehearsals of small jobs: against real steps, against each other, and with mistakes put into the code."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.dryrun import rehearsal
from megatron.dryrun.kinds import enough_micro_batches, kinds_of
from megatron.dryrun.memory import CPU_BLOCK, GPU_BLOCK, Memory
from megatron.dryrun.rank import run_rank
from megatron.dryrun.rehearsal import Rehearsal, rehearse
from megatron.dryrun.render import render
from megatron.engine.assemble import build_executor
from megatron.engine.engine import Engine
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.topology import DEFAULT_ORDER
from megatron.pipeline.exchange import SENDS_IN_FLIGHT, Exchange
from megatron.planning.cluster import load_cluster
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

BASE: dict[str, Any] = dict(
    num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=64, vocab_size=250, micro_batch_size=2,
    hidden_dropout=0.0, attention_dropout=0.0,
)
PP4: dict[str, Any] = dict(pipeline_model_parallel_size=4, world_size=4, global_batch_size=48)


def make(**fields: Any) -> Config:
    return Config.create(**{**BASE, **fields})


# -- against real steps ------------------------------------------------------------------------------------------------


class _Follow(TorchDispatchMode):
    """The same count of memory, on tensors with data."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor) and each.is_cpu:
                self.memory.see(each)
        return out


def real_peak(rank: int, fields: dict[str, Any]) -> int:
    """Bytes at most in two real steps of a rank."""
    config = make(**fields)
    parallel, memory = config.parallel, Memory(CPU_BLOCK)
    topology = join(parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, order=DEFAULT_ORDER)
    with _Follow(memory):
        chunks = build_chunks(config, topology, layer_context(config, topology, perform_initialization=False))
        engine = Engine(config, topology, chunks)
        chunks.train()
        executor = build_executor(config, topology, chunks, engine)
        b, s, count = config.batch.micro_batch_size, config.model.seq_length, config.num_micro_batches()
        tokens, labels, positions = (torch.zeros(count, b, s, dtype=torch.int64) for _ in range(3))
        mask = torch.ones(count, b, s)
        batches = [MicroBatch(tokens[i], labels[i], mask[i], positions[i], None, i) for i in range(count)]
        memory.begin_peak()
        for _ in range(2):
            executor.train(batches, loss_scale=engine.loss_scale)
            engine.step(1e-3)
        engine.wait_for_weights()
    return memory.peak_total


REAL: dict[str, dict[str, Any]] = {
    "one": dict(world_size=1, global_batch_size=6),
    "full": dict(world_size=1, global_batch_size=6, bf16=True, recompute_granularity="full", recompute_method="block"),
    "tp2": dict(world_size=2, global_batch_size=6, tensor_model_parallel_size=2, sequence_parallel=True, bf16=True),
    "pp2": dict(world_size=2, global_batch_size=12, pipeline_model_parallel_size=2, bf16=True),
    "dp2": dict(world_size=2, global_batch_size=12, bf16=True),
}


@pytest.mark.parametrize("name", REAL)
def test_a_rank_allocates_what_a_real_one_does(name: str) -> None:
    """But for a number or two on one process. Between several, a message may copy what it is given, unseen, and let go
    of it: a rehearsed one holds it until it is waited for."""
    fields = REAL[name]
    real = run_processes(fields["world_size"], real_peak, fields)
    config = make(**fields)
    for rank, peak in enumerate(real):
        found = run_rank(config, rank, "cpu", config.num_micro_batches()).total_peak
        allowed = 2 * CPU_BLOCK if len(real) == 1 else 0.01 * peak
        assert abs(found - peak) <= allowed, f"rank {rank}: {found} instead of {peak}"


# -- kinds of ranks and micro-batches ----------------------------------------------------------------------------------

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-h1": dict(enable_zbh1_pipeline=True),
    "interleaved": dict(num_layers=8, num_layers_per_virtual_pipeline_stage=1),
    "uneven": dict(num_layers=7, pipeline_layout="1,2,2,2"),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_ranks_that_are_looked_at_stand_for_all(name: str) -> None:
    """A rank needs no more than the one that stands for it. With all micro-batches nothing is added but, on the last
    stage, their losses: a number each, for which the allocator gives a block."""
    config = make(**PP4, **SCHEDULES[name], bf16=True)
    enough, count = enough_micro_batches(config), config.num_micro_batches()
    assert count > enough, "else the test shows nothing"
    assert sorted(p for kind in kinds_of(config) for p in kind.pipeline_ranks) == [0, 1, 2, 3]
    for kind in kinds_of(config):
        first, *others = (run_rank(config, p, "meta", enough).total_peak for p in kind.pipeline_ranks)
        assert max(others, default=0) <= first
        losses = (count - enough) * GPU_BLOCK if kind.pipeline_rank == 3 else 0
        assert run_rank(config, kind.pipeline_rank, "meta", count).total_peak == first + losses


def test_fewer_micro_batches_are_grouped_as_all_of_them() -> None:
    """24 over 5 ranks pass in groups of 6. 19, which leave as many over, would begin with a group of 7, and the warm-up
    would be longer by one."""
    config = make(
        num_layers=10, num_layers_per_virtual_pipeline_stage=1, pipeline_model_parallel_size=5, world_size=5,
        global_batch_size=48, bf16=True,
    )  # fmt: skip
    enough, count = enough_micro_batches(config), config.num_micro_batches()
    assert enough < count
    for rank in (0, 1, 3):
        assert run_rank(config, rank, "meta", enough).total_peak == run_rank(config, rank, "meta", count).total_peak


# -- what is found -----------------------------------------------------------------------------------------------------


def test_a_job_that_runs() -> None:
    config = make(**{**PP4, "world_size": 16}, tensor_model_parallel_size=2, sequence_parallel=True, bf16=True)
    found = rehearse(config, load_cluster("frontier"))
    assert found.findings == () and found.fits and found.device == "gpu"
    assert sum(rank.stands_for for rank in found.ranks) == 16
    for rank in found.ranks:
        assert sum(rank.peak.values()) == rank.total_peak_bytes
        assert all(rank.peak_of[name] >= n for name, n in rank.peak.items())
        weights, masters = rank.peak["weights"], rank.peak["master"]
        # bf16 weights, fp32 masters over two data-parallel ranks: both 2 bytes a parameter, but for padding.
        assert weights == pytest.approx(2 * rank.parameters, rel=0.05)
        assert masters == pytest.approx(4 / 2 * rank.parameters, rel=0.05)
        assert rank.peak["moments"] == pytest.approx(8 / 2 * rank.parameters, rel=0.05)
        assert rank.peak["gradients"] == pytest.approx(4 * rank.parameters, rel=0.05)


def test_messages_are_buffers_until_they_are_used() -> None:
    """A middle rank has at most two receives posted (schedule.peak_receives) and SENDS_IN_FLIGHT sent tensors."""
    config = make(**PP4, bf16=True)
    message = 64 * 2 * 64 * 2  # [s, b, h] in bf16
    found = run_rank(config, 1, "meta", enough_micro_batches(config))
    assert found.peak_of["buffers"] == (2 + SENDS_IN_FLIGHT) * message


def broken(config: Config, **more: Any) -> Rehearsal:
    found = rehearse(config, load_cluster("frontier"), **more)
    assert found.findings
    return found


def test_a_message_of_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Exchange.send

    def shorter(self: Exchange, instruction: Any, tensor: torch.Tensor) -> None:
        send(self, instruction, tensor[:32] if instruction.stage == 1 and instruction.micro_batch == 2 else tensor)

    monkeypatch.setattr(Exchange, "send", shorter)
    found = broken(make(**PP4, bf16=True))
    text = " ".join(f.text for f in found.findings)
    assert "from rank 1 to rank 2" in text and "[32, 2, 64]" in text and "[64, 2, 64]" in text


def test_one_receive_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver makes up a tensor instead."""
    receive, take = Exchange.receive, Exchange.take

    def forgotten(instruction: Any) -> bool:
        return instruction.op.name == "RECV_FORWARD" and instruction.stage == 3 and instruction.micro_batch == 4

    def fewer(self: Exchange, instruction: Any, *args: Any) -> None:
        if not forgotten(instruction):
            receive(self, instruction, *args)

    def anything(self: Exchange, instruction: Any) -> torch.Tensor:
        return torch.zeros(64, 2, 64, dtype=torch.bfloat16, device="meta") if forgotten(instruction) else take(
            self, instruction
        )

    monkeypatch.setattr(Exchange, "receive", fewer)
    monkeypatch.setattr(Exchange, "take", anything)
    (finding,) = broken(make(**PP4, bf16=True)).findings
    assert finding.kind == "messages" and "from rank 2 to rank 3" in finding.text


def test_a_rank_that_waits_for_another_type() -> None:
    def alter(pipeline_rank: int, executor: Any) -> None:
        if pipeline_rank == 1:
            executor.message_dtype = torch.float32

    finding, *_ = broken(make(**PP4, bf16=True), alter=alter).findings
    assert finding.kind == "messages" and "bfloat16" in finding.text and "float32" in finding.text


def test_code_that_fails_names_rank_and_line() -> None:
    def alter(pipeline_rank: int, executor: Any) -> None:
        if pipeline_rank == 1:
            executor.message_shape = (64, 2, 63)

    found = broken(make(**PP4, bf16=True), alter=alter)
    (finding,) = found.findings
    assert finding.kind == "error" and finding.rank == 1
    assert "63" in finding.text and "megatron/layers/" in finding.text
    assert "CANNOT RUN: rank 1: RuntimeError" in render(found)
    assert [rank.pipeline_rank for rank in found.ranks] == [0, 3], "the others are shown all the same"


def test_a_layer_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.model import gpt

    assign = gpt.assign_layers

    def without_one(*args: Any) -> Any:
        return (*assign(*args)[:-1], range(3, 3))

    monkeypatch.setattr(gpt, "assign_layers", without_one)
    kinds = {f.kind for f in broken(make(**PP4, bf16=True)).findings}
    assert "parameters" in kinds


def test_collectives_that_differ_between_tensor_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.parallel import collectives

    gather = collectives.gather_first_async

    def twice(x: torch.Tensor, group: Any) -> Any:
        if group.kind == "tensor" and group.is_last:
            gather(x, group)
        return gather(x, group)

    monkeypatch.setattr(collectives, "gather_first_async", twice)
    config = make(world_size=2, global_batch_size=4, tensor_model_parallel_size=2, sequence_parallel=True, bf16=True)
    assert "tensor groups" in " ".join(f.text for f in broken(config).findings)


def test_what_does_not_fit_is_named_with_what_to_do() -> None:
    cluster = dataclasses.replace(load_cluster("frontier"), memory_gib=rehearsal.RESERVE_GIB + 0.002)
    found = rehearse(make(**PP4, bf16=True), cluster)
    assert not found.fits
    finding = found.findings[0]
    assert finding.kind == "memory" and finding.rank == 0
    assert "What does not fit any more: [" in finding.text and "megatron/" in finding.text
    assert "--pipeline-model-parallel-size" in finding.text
    assert found.ranks[0].broken_by is not None


def test_advice_names_what_can_be_changed() -> None:
    """Logits of all tokens at once, which a smaller number than 0 would not mend, and scores that are stored."""
    cluster = dataclasses.replace(load_cluster("frontier"), memory_gib=rehearsal.RESERVE_GIB + 0.01)
    wide = dict(vocab_size=100000, cross_entropy_chunk_tokens=0, num_layers=1, micro_batch_size=16)
    texts = [
        rehearse(make(bf16=True, world_size=1, **{**BASE, **fields}), cluster).findings[0].text
        for fields in (
            wide, {**wide, "cross_entropy_chunk_tokens": 512}, dict(attention_backend="unfused", seq_length=2048),
        )
    ]
    assert "no --cross-entropy-chunk-tokens 0" in texts[0] and "a smaller --cross" not in texts[0]
    assert "a smaller --cross-entropy-chunk-tokens than 512" in texts[1]
    assert "--attention-backend auto" in texts[2]


def test_a_cpu_is_known_by_its_type() -> None:
    cluster = dataclasses.replace(load_cluster("frontier"), device="EPYC 7A53", device_type="cpu")
    assert rehearsal.device_of(cluster) == "cpu"


MODELS: list[dict[str, Any]] = [
    dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    dict(recompute_granularity="selective", recompute_modules=("core_attn", "mlp_act")),
    dict(bf16=False, fp16=True, hidden_dropout=0.1, attention_dropout=0.1),
    dict(bf16=False, position_embedding_type="rope", swiglu=True, normalization="rmsnorm", num_key_value_heads=2),
    dict(position_embedding_type="alibi", untie_embeddings_and_output_weights=True, optimizer="sgd"),
    dict(attention_backend="unfused", fp32_residual_connection=True, zero_stage=0),
    dict(attention_backend="blocked", num_key_value_heads=2, gradient_accumulation_fusion=False),
]


@pytest.mark.parametrize(
    ("device", "fields"), [*(("gpu", fields) for fields in MODELS), *(("cpu", MODELS[i]) for i in (2, 3, 6))]
)
def test_every_kind_of_model_runs(device: str, fields: dict[str, Any]) -> None:
    config = make(**{**dict(world_size=2, global_batch_size=8, pipeline_model_parallel_size=2, bf16=True), **fields})
    assert rehearse(config, None, device).findings == ()
