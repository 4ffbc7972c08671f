"""Bytes of a step: against closed forms, and against what processes really send."""
from __future__ import annotations

from typing import Any

import pytest

from megatron.config import Config
from megatron.planner.traffic import traffic_of
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
    """An all-reduce over n ranks sends 2 (n - 1) / n of the tensor; a layer has 4, and 2 more to recompute it. The
    embedding has one forward, the output layer one backward, and the softmax's statistics, fp32 [3, tokens]."""
    tensor, micro_batches, n = S * 2 * H * 2, 5, 4
    fields = dict(tensor_model_parallel_size=n, world_size=n, global_batch_size=2 * micro_batches)
    one = 2 * (n - 1) / n * tensor * micro_batches
    statistics = (n - 1) / n * 3 * 4 * S * 2 * n * micro_batches

    def sent(**more: Any) -> dict[str, float]:
        """All-reduces of each kind of pass, but for the statistics."""
        found = dict.fromkeys(("forward", "backward", "again"), 0.0)
        for flow in traffic_of(made(**fields, **more), "cuda").tensor:
            name = "again" if flow.name.startswith("recomputed") else flow.name.split()[0]
            found[name] += flow.bytes / one
        return {**found, "backward": found["backward"] - statistics / one}

    assert sent() == pytest.approx({"forward": 2 * L + 1, "backward": 2 * L + 1, "again": 0})
    # torch makes each layer again within its backward pass, and of groups all but the last layer before it.
    assert sent(recompute_granularity="full")["backward"] == pytest.approx(4 * L + 1)
    groups = sent(recompute_granularity="full", recompute_num_layers=4)
    assert groups["again"] == pytest.approx(2 * 6) and groups["backward"] == pytest.approx(2 * L + 2 * 2 + 1)
    block = sent(recompute_granularity="full", recompute_method="block", recompute_num_layers=3)
    assert block["backward"] == pytest.approx(2 * L + 2 * 3 + 1)
    assert sent(recompute_granularity="selective") == pytest.approx(sent())
    # Under sequence parallelism a layer gathers its two inputs once more for the weight gradients: half an all-reduce,
    # and so does the output layer's.
    parts = sent(sequence_parallel=True)
    assert parts["forward"] == pytest.approx(2 * L + 0.5) and parts["backward"] == pytest.approx(3 * L + 1.5)
    assert traffic_of(made(world_size=2), "cuda").tensor == ()


def test_pipeline_messages() -> None:
    fields = dict(pipeline_model_parallel_size=4, world_size=4, global_batch_size=12)
    plain = traffic_of(made(**fields), "cuda")
    assert (plain.message_bytes, plain.boundary, plain.wrap, plain.stages) == (S * 2 * H * 2, 6, 0, 4)
    assert plain.tied is not None and plain.tied.bytes == 4 * V * H
    chunks = traffic_of(made(**fields, num_layers_per_virtual_pipeline_stage=1), "cuda")
    assert (chunks.boundary, chunks.wrap, chunks.stages) == (12, 6, 8)
    untied = traffic_of(made(**fields, untie_embeddings_and_output_weights=True), "cuda")
    assert untied.tied is None
    parts = dict(tensor_model_parallel_size=2, sequence_parallel=True, world_size=8)
    assert traffic_of(made(**fields | parts), "cuda").message_bytes == plain.message_bytes // 2
    assert traffic_of(made(**fields, fp32_residual_connection=True), "cuda").message_bytes == 2 * plain.message_bytes
    assert traffic_of(made(world_size=4), "cuda").boundary == 0


def test_data_parallel_bytes() -> None:
    """Gradients go in fp32, weights come back in 16 bit; ZeRO stage 0 sums all gradients everywhere."""
    layer = 12 * H * H + 13 * H
    count = V * H + S * H + L * layer + 2 * H
    scatter, gather = traffic_of(made(world_size=4), "cuda").data
    assert scatter.bytes == 3 / 4 * 4 * count and gather.bytes == 3 / 4 * 2 * count
    (reduce,) = traffic_of(made(world_size=4, zero_stage=0), "cuda").data
    assert reduce.bytes == 2 * 3 / 4 * 4 * count
    stages = traffic_of(made(world_size=8, pipeline_model_parallel_size=4), "cuda").data[0].bytes
    assert stages == 1 / 2 * 4 * (V * H + S * H + 2 * layer), "the first stage, with both embeddings, is the fullest"


# -- against what is really sent -------------------------------------------------------------------------------------


def sent(rank: int, fields: dict[str, Any]) -> list[tuple[str, str, int]]:
    """(call, kind of group, bytes) of everything that a rank posts in one step."""
    from megatron.parallel.flight import FlightRecorder
    from megatron.pipeline.exchange import Exchange

    found: list[tuple[str, str, int]] = []
    enter, send = FlightRecorder.enter, Exchange.send

    def note(self: Any, call: bytes, kind: str, size_bytes: int, by_host: bool = False) -> int:
        found.append((call.decode(), kind, size_bytes))
        return enter(self, call, kind, size_bytes, by_host)

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
    statistics = 3 * 4 * tensor // (4 * model.hidden_size) * config.num_micro_batches()  # on one of two ranks
    expected = sum(flow.bytes for flow in traffic_of(config, "cpu").tensor) - statistics
    for found in run_processes(2, sent, fields):
        passes = [PASSES[call] for call, kind, size in found if kind == "tensor" and size == tensor]
        assert sum(passes) * tensor / 2 == expected


@pytest.mark.slow
def test_pipeline_and_data_parallel_messages_of_four_processes() -> None:
    """Two stages of two chunks, two replicas. gloo reduces to each owner in turn; together that is all gradients."""
    fields = {"pipeline_model_parallel_size": 2, "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
    config = Config.create(**{**BASE, **fields, "world_size": 4})
    traffic = traffic_of(config, "cpu")
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
