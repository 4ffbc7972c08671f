"""Bytes of a step: against closed forms, and against what processes really send."""
from __future__ import annotations

from typing import Any

import pytest

from megatron.config import Config
from megatron.planning.traffic import traffic_of
from tests.helpers.processes import run_processes
from tests.helpers.training import BASE, train_in_process

H, S, L, V = 64, 32, 8, 128
FIELDS: dict[str, Any] = dict(
    num_layers=L, hidden_size=H, num_attention_heads=4, seq_length=S, vocab_size=V, make_vocab_size_divisible_by=8,
    micro_batch_size=2, bf16=True,
)


def made(**fields: Any) -> Config:
    return Config.create(**{**FIELDS, **fields})


def test_tensor_parallel_bytes() -> None:
    """An all-reduce over n ranks sends 2 (n - 1) / n of the tensor; a layer has 4, and 2 more to recompute it."""
    tensor, micro_batches, n = S * 2 * H * 2, 5, 4
    fields = dict(tensor_model_parallel_size=n, world_size=n, global_batch_size=2 * micro_batches)
    one = 2 * (n - 1) / n * tensor * micro_batches
    plain = traffic_of(made(**fields)).tensor
    assert [flow.bytes for flow in plain] == [2 * L * one, 2 * L * one, 2 * one]
    again = traffic_of(made(**fields, recompute_granularity="full")).tensor
    assert [flow.bytes for flow in again] == [2 * L * one, 2 * L * one, 2 * L * one, 2 * one]
    block = made(**fields, recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    assert traffic_of(block).tensor[1].bytes == 2 * 3 * one
    selective = traffic_of(made(**fields, recompute_granularity="selective")).tensor
    assert selective == plain
    # Under sequence parallelism a layer gathers its two inputs once more for the weight gradients: half an all-reduce.
    parts = traffic_of(made(**fields, sequence_parallel=True)).tensor
    assert [flow.bytes for flow in parts] == [2 * L * one, 3 * L * one, 2 * one]
    assert traffic_of(made(world_size=2)).tensor == ()


def test_pipeline_messages() -> None:
    fields = dict(pipeline_model_parallel_size=4, world_size=4, global_batch_size=12)
    plain = traffic_of(made(**fields))
    assert (plain.message_bytes, plain.boundary, plain.wrap, plain.stages) == (S * 2 * H * 2, 6, 0, 4)
    assert plain.tied is not None and plain.tied.bytes == 4 * V * H
    chunks = traffic_of(made(**fields, num_layers_per_virtual_pipeline_stage=1))
    assert (chunks.boundary, chunks.wrap, chunks.stages) == (12, 6, 8)
    untied = traffic_of(made(**fields, untie_embeddings_and_output_weights=True))
    assert untied.tied is None
    parts = dict(tensor_model_parallel_size=2, sequence_parallel=True, world_size=8)
    assert traffic_of(made(**fields | parts)).message_bytes == plain.message_bytes // 2
    assert traffic_of(made(**fields, fp32_residual_connection=True)).message_bytes == 2 * plain.message_bytes
    assert traffic_of(made(world_size=4)).boundary == 0


def test_data_parallel_bytes() -> None:
    """Gradients go in fp32, weights come back in 16 bit; ZeRO stage 0 sums all gradients everywhere."""
    layer = 12 * H * H + 13 * H
    count = V * H + S * H + L * layer + 2 * H
    scatter, gather = traffic_of(made(world_size=4)).data
    assert scatter.bytes == 3 / 4 * 4 * count and gather.bytes == 3 / 4 * 2 * count
    (reduce,) = traffic_of(made(world_size=4, zero_stage=0)).data
    assert reduce.bytes == 2 * 3 / 4 * 4 * count
    stages = traffic_of(made(world_size=8, pipeline_model_parallel_size=4)).data[0].bytes
    assert stages == 1 / 2 * 4 * (V * H + S * H + 2 * layer), "the first stage, with both embeddings, is the fullest"


# -- against what is really sent -------------------------------------------------------------------------------------


def sent(rank: int, fields: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(call, kind of group, bytes) of everything that a rank posts in one step."""
    from megatron.parallel.flight import FlightRecorder
    from megatron.pipeline.exchange import Exchange

    found: list[tuple[str, str, int]] = []
    enter, send = FlightRecorder.enter, Exchange.send

    def note(self: Any, call: bytes, kind: str, size_bytes: int) -> int:
        found.append((call.decode(), kind, size_bytes))
        return enter(self, call, kind, size_bytes)

    def note_message(self: Any, instruction: Any, tensor: Any) -> None:
        found.append(("send", "pipeline", tensor.nbytes))
        send(self, instruction, tensor)

    FlightRecorder.enter = note  # type: ignore[method-assign]
    Exchange.send = note_message  # type: ignore[method-assign]
    train_in_process(rank, fields, steps=1)
    return found


PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"sequence_parallel": True, "recompute_granularity": "full"}],
    ids=["all-reduce", "sequence parallel, recomputed"],
)
def test_tensor_parallel_messages_of_two_processes(fields: dict[str, Any]) -> None:
    fields = {**fields, "tensor_model_parallel_size": 2, "num_layers": 3}
    config = Config.create(**{**BASE, **fields, "world_size": 2})
    model = config.model
    tensor = model.seq_length * config.batch.micro_batch_size * model.hidden_size * 4  # fp32 on a CPU
    expected = sum(flow.bytes for flow in traffic_of(config).tensor)
    for found in run_processes(2, sent, fields):
        passes = [PASSES[call] for call, kind, size in found if kind == "tensor" and size == tensor]
        assert sum(passes) * tensor / 2 == expected


@pytest.mark.slow
def test_pipeline_and_data_parallel_messages_of_four_processes() -> None:
    """Two stages of two chunks, two replicas. gloo reduces to each owner in turn; together that is all gradients."""
    fields = {"pipeline_model_parallel_size": 2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
    config = Config.create(**{**BASE, **fields, "world_size": 4})
    traffic = traffic_of(config)
    ranks = run_processes(4, sent, fields)
    sends = [sum(call == "send" for call, kind, _ in found if kind == "pipeline") for found in ranks]
    # Forward messages of both chunks but the last, backward messages of both chunks but the first.
    assert sum(sends) == 2 * 2 * (traffic.boundary + traffic.wrap)
    assert {size for found in ranks for call, kind, size in found if call == "send"} == {traffic.message_bytes}
    scatter, gather = traffic.data
    for call, flow in (("reduce", scatter), ("all_gather", gather)):
        totals = [sum(size for c, kind, size in found if (c, kind) == (call, "data")) for found in ranks]
        assert max(totals) / 2 == pytest.approx(flow.bytes, rel=0.01), "buckets are padded to whole parts"
    tied = max(sum(size for c, kind, size in found if (c, kind) == ("all_reduce", "pipeline")) for found in ranks)
    assert traffic.tied is not None and tied == pytest.approx(traffic.tied.bytes, rel=0.5)
