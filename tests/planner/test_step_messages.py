"""Messages of a step, against closed forms and against those that processes send."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.config import Config
from megatron.planner.events import Message
from megatron.planner.placement import StepMessages, step_messages
from tests.helpers.processes import run_processes
from tests.helpers.training import BASE, train_in_process

H, S, L, V = 64, 32, 8, 128
FIELDS: dict[str, Any] = dict(
    num_layers=L,
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    vocab_size=V,
    make_vocab_size_divisible_by=8,
    micro_batch_size=2,
    bf16=True,
)


def made(**fields: Any) -> StepMessages:
    return step_messages(Config.create(**{**FIELDS, **fields}), "cuda")


@pytest.mark.parametrize(
    ("fields", "reduced", "gathered"),
    [
        # A layer has 4 all-reduces, and 2 more to recompute it; the embedding has one forward, the
        # output layer one backward.
        ({}, 4 * L + 2, 0),
        ({"recompute_granularity": "selective"}, 4 * L + 2, 0),
        # A recomputation ends before its last product, and the message of that.
        ({"recompute_granularity": "full"}, 6 * L - L + 2, 0),
        ({"recompute_granularity": "full", "recompute_num_layers": 4}, 6 * L - L // 4 + 2, 0),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            4 * L + 2 * 3 - 3 + 2,
            0,
        ),
        # Each all-reduce is one of both, and inputs are gathered again for the weight gradients.
        ({"sequence_parallel": True}, 4 * L + 2, 6 * L + 2),
    ],
)
def test_tensor_parallel_messages(fields: dict[str, Any], reduced: int, gathered: int) -> None:
    micro_batches, n = 5, 4
    found = made(
        **fields, tensor_model_parallel_size=n, world_size=n, global_batch_size=2 * micro_batches
    ).collectives
    kind = "reduce_scatter" if gathered else "all_reduce"
    # of the softmax, fp32 [3, tokens] of each rank
    tensor, statistics = S * 2 * H * 2, 3 * 4 * S * 2 * n
    expected = {Message(kind, tensor): reduced, Message("all_gather", tensor): gathered}
    expected[Message("all_gather", statistics)] = 1
    assert {m: count for m, count in found.items() if m.group == "tensor"} == {
        message: count * micro_batches for message, count in expected.items() if count
    }


def test_pipeline_messages() -> None:
    fields = dict(pipeline_model_parallel_size=4, world_size=4, global_batch_size=12)
    plain = made(**fields)
    assert (plain.message_bytes, plain.messages, plain.tied_bytes) == (S * 2 * H * 2, 6, 4 * V * H)
    assert made(**fields, num_layers_per_virtual_pipeline_stage=1).messages == 12
    assert made(**fields, untie_embeddings_and_output_weights=True).tied_bytes == 0
    parts = dict(tensor_model_parallel_size=2, sequence_parallel=True, world_size=8)
    assert made(**fields | parts).message_bytes == plain.message_bytes // 2
    assert made(**fields, fp32_residual_connection=True).message_bytes == 2 * plain.message_bytes
    assert made(world_size=4).messages == 0


def test_data_parallel_messages() -> None:
    """Gradients are sent in fp32, weights come back in 16 bit.

    ZeRO stage 0 sums all gradients everywhere.
    """
    layer = 12 * H * H + 13 * H
    count = V * H + S * H + L * layer + 2 * H
    assert set(made(world_size=4).collectives) == {
        Message("reduce_scatter", 4 * count, "data"),
        Message("all_gather", 2 * count, "data"),
    }
    assert set(made(world_size=4, zero_stage=0).collectives) == {
        Message("all_reduce", 4 * count, "data")
    }
    stages = made(world_size=8, pipeline_model_parallel_size=4).collectives
    first = V * H + S * H + 2 * layer  # with both embeddings it has the peak
    assert Message("reduce_scatter", 4 * first, "data") in stages


# -- against the messages of real processes --------------------------------------------------------


def sent(rank: int, fields: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return (call, kind of group, bytes) of everything that a rank posts in one step."""
    from megatron.parallel.flight import FlightRecorder
    from megatron.pipeline.executor import Exchange

    found: list[tuple[str, str, int]] = []
    enter, send = FlightRecorder.enter, Exchange.send

    def note(self: Any, call: bytes, kind: str, size_bytes: int, *args: Any, **where: int) -> int:
        if not where:  # neither a message nor the wait for a collective
            found.append((call.decode(), kind, size_bytes))
        return enter(self, call, kind, size_bytes, *args, **where)

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
    # fp32 on a CPU
    tensor = model.seq_length * config.batch.micro_batch_size * model.hidden_size * 4
    # on one of two ranks
    statistics = 3 * 4 * tensor // (4 * model.hidden_size) * config.num_micro_batches()
    planned = [
        (message, count)
        for message, count in step_messages(config, "cpu").collectives.items()
        if message.group == "tensor"
    ]
    expected = (
        sum(PASSES[message.kind] * count * message.bytes / 2 for message, count in planned)
        - statistics
    )
    for found in run_processes(2, sent, fields):
        passes = [PASSES[call] for call, kind, size in found if kind == "tensor" and size == tensor]
        assert sum(passes) * tensor / 2 == expected


@pytest.mark.slow
def test_pipeline_and_data_parallel_messages_of_four_processes() -> None:
    """Two stages of two chunks with two replicas send as predicted.

    gloo reduces to each owner in turn; together that is all gradients.
    """
    fields = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "num_layers_per_virtual_pipeline_stage": 1,
    }
    config = Config.create(**{**BASE, **fields, "world_size": 4})
    messages = step_messages(config, "cpu")
    ranks = run_processes(4, sent, fields)
    sends = [
        sum(call == "send" for call, kind, _ in found if kind == "pipeline") for found in ranks
    ]
    # Messages of both chunks over the boundary, and those from the first chunk to the second; in
    # both directions.
    assert sum(sends) == 2 * 2 * (messages.messages + config.num_micro_batches())
    assert {size for found in ranks for call, kind, size in found if call == "send"} == {
        messages.message_bytes
    }
    of_data = [message for message in messages.collectives if message.group == "data"]
    for call, message in zip(("reduce", "all_gather"), of_data, strict=True):
        totals = [
            sum(size for c, kind, size in found if (c, kind) == (call, "data")) for found in ranks
        ]
        assert max(totals) / 2 == pytest.approx(message.bytes / 2, rel=0.01), (
            "buckets are padded to whole parts"
        )
    tied = max(
        sum(size for c, kind, size in found if (c, kind) == ("all_reduce", "pipeline"))
        for found in ranks
    )
    assert tied == pytest.approx(messages.tied_bytes, rel=0.5)


def sent_in_a_step(rank: int, fields: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Return the bytes of each kind of message over data-parallel groups in a second step."""
    from megatron.engine.engine import Engine, build_executor
    from megatron.model.gpt import build_chunks, layer_context
    from megatron.parallel.flight import FlightRecorder
    from tests.helpers.groups import join
    from tests.helpers.training import batches, configured, dist_world_size

    found: dict[tuple[str, str], int] = {}
    enter = FlightRecorder.enter

    def note(self: Any, call: bytes, kind: str, size_bytes: int, *args: Any, **where: int) -> int:
        if not where and size_bytes > 64:  # norms are a few numbers
            key = call.decode(), kind
            found[key] = found.get(key, 0) + size_bytes
        return enter(self, call, kind, size_bytes, *args, **where)

    FlightRecorder.enter = note  # type: ignore[method-assign]
    config = configured(fields, dist_world_size())
    engine_settings = config.engine
    topology = join(
        config.parallel.tensor_model_parallel_size,
        zero_shard_size=engine_settings.zero_shard_size,
        zero_state_shard_size=engine_settings.zero_state_shard_size,
    )
    late = engine_settings.zero_stage == 3
    chunks = build_chunks(config, topology, layer_context(config, topology, late=late))
    engine = Engine(config, topology, chunks)
    executor = build_executor(config, topology, chunks, engine)
    for step in range(2):
        found.clear()
        executor.train(batches(config, step, topology.replica))
        engine.step(1e-3)
    return {key: size for key, size in found.items() if key[1].startswith("data")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "stage", "sizes"),
    [(2, 2, (0, 0)), (2, 3, (0, 0)), (4, 3, (2, 0)), (4, 3, (2, 2)), (4, 2, (2, 4))],
)
def test_messages_of_zero_are_the_fewest_of_its_stage(
    processes: int, stage: int, sizes: tuple[int, int]
) -> None:
    """Each pass sums the gradients once, and with stage 3 gathers each matrix once.

    The output layer's stays from the forward to the backward pass, in which the embedding needs
    none. What other ranks have too is summed, and gathered, once in a step.
    """
    fields = dict(
        zero_stage=stage, zero_shard_size=sizes[0], zero_state_shard_size=sizes[1], num_layers=4
    ) | dict(untie_embeddings_and_output_weights=True, global_batch_size=4 * processes)
    config = Config.create(**{**BASE, **fields, "world_size": processes})
    planned: dict[tuple[str, str], float] = {}
    for message, count in step_messages(config, "cpu").collectives.items():
        key = message.kind, message.group
        planned[key] = planned.get(key, 0.0) + count * message.bytes
    model, m = config.model, config.num_micro_batches()
    h, v = model.hidden_size, model.padded_vocab_size(1)
    layer, vectors = 12 * h * h, 4 * (9 * h + 4 * h) + 2 * h
    tables = v * h + model.max_position_embeddings * h
    n = 4 * layer + vectors + tables + v * h
    inner = sizes[0] or processes
    states = sizes[1] or processes
    name = "data" if inner == processes else "data.inner"
    least = {("reduce_scatter", name): 4 * m * n}
    if stage == 3:
        least["all_gather", name] = 4 * (m * (8 * layer + tables + v * h) + vectors)
    else:
        least["all_gather", name] = 4 * n
    if states > inner:
        least |= {(kind, "data.outer"): 4 * n // inner for kind in ("reduce_scatter", "all_gather")}
    if states < processes:
        least["all_reduce", "data.copies"] = 4 * n // states
    assert planned == least
    for found in run_processes(processes, sent_in_a_step, fields):
        of_engine = {
            ("reduce_scatter" if kind == "reduce" else kind, group): size
            for (kind, group), size in found.items()
        }
        assert of_engine == pytest.approx(least, rel=0.02), "buckets are padded to whole parts"
