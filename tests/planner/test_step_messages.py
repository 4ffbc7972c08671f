"""Messages of a step, against closed forms and against those that processes send."""

from collections import Counter

import pytest

from megatron.config import Config
from megatron.planner.events import GroupMessage
from megatron.planner.placement import step_messages
from tests.helpers.processes import run_processes
from tests.helpers.training import BASE, Job, configured, dist_world_size
from tests.planner.layouts import planned

H, S, L, V = 64, 32, 8, 128
FIELDS = (
    f"--num-layers {L} --hidden-size {H} --num-attention-heads 4 --seq-length {S} --vocab-size {V} "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --bf16"
)


def made(*flags):
    return step_messages(planned(FIELDS, *flags), "cuda")


FULL = "--recompute-granularity full"


@pytest.mark.parametrize(
    ("fields", "reduced", "gathered"),
    [
        # A layer has 4 all-reduces, and 2 more to recompute it; the embedding has one forward, the
        # output layer one backward.
        ("", 4 * L + 2, 0),
        ("--recompute-granularity selective", 4 * L + 2, 0),
        # A recomputation ends before its last product, and the message of that.
        (FULL, 6 * L - L + 2, 0),
        (f"{FULL} --recompute-num-layers 4", 6 * L - L // 4 + 2, 0),
        (f"{FULL} --recompute-method block --recompute-num-layers 3", 4 * L + 2 * 3 - 3 + 2, 0),
        # Each all-reduce is one of both, and inputs are gathered again for the weight gradients.
        ("--sequence-parallel", 4 * L + 2, 6 * L + 2),
    ],
)
def test_tensor_parallel_messages(fields, reduced, gathered):
    micro_batches, n = 5, 4
    size = f"--tensor-model-parallel-size {n} --global-batch-size {2 * micro_batches}"
    found = made(fields, size).collectives
    kind = "reduce_scatter" if gathered else "all_reduce"
    # of the softmax, fp32 [3, tokens] of each rank
    tensor, statistics = S * 2 * H * 2, 3 * 4 * S * 2 * n
    expected = {GroupMessage(kind, tensor): reduced, GroupMessage("all_gather", tensor): gathered}
    expected[GroupMessage("all_gather", statistics)] = 1
    assert {m: count for m, count in found.items() if m.group == "tensor"} == {
        message: count * micro_batches for message, count in expected.items() if count
    }


def test_pipeline_messages():
    fields = "--pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 12"
    plain = made(fields)
    assert (plain.message_bytes, plain.messages, plain.tied_bytes) == (S * 2 * H * 2, 6, 4 * V * H)
    assert made(f"{fields} --num-layers-per-virtual-pipeline-stage 1").messages == 12
    assert made(f"{fields} --untie-embeddings-and-output-weights").tied_bytes == 0
    parts = "--tensor-model-parallel-size 2 --sequence-parallel --world-size 8"
    assert made(fields, parts).message_bytes == plain.message_bytes // 2
    assert made(f"{fields} --fp32-residual-connection").message_bytes == 2 * plain.message_bytes
    assert made("--world-size 4").messages == 0


def test_data_parallel_messages():
    """Gradients are sent in fp32, weights come back in 16 bit.

    ZeRO stage 0 sums all gradients everywhere.
    """
    layer = 12 * H * H + 13 * H
    count = V * H + S * H + L * layer + 2 * H
    assert set(made("--world-size 4").collectives) == {
        GroupMessage("reduce_scatter", 4 * count, "data"),
        GroupMessage("all_gather", 2 * count, "data"),
    }
    assert set(made("--world-size 4 --zero-stage 0").collectives) == {
        GroupMessage("all_reduce", 4 * count, "data")
    }
    stages = made("--world-size 8 --pipeline-model-parallel-size 4").collectives
    first = V * H + S * H + 2 * layer  # with both embeddings it has the peak
    assert GroupMessage("reduce_scatter", 4 * first, "data") in stages


# -- against the messages of real processes --------------------------------------------------------

"""(call, kind of group, bytes) of everything that a rank posts in a step."""


def sent(rank, cases):
    """Return what a rank posts in its second step, by case."""
    from megatron.parallel.flight import FlightRecorder
    from megatron.pipeline.executor import StageMessages

    found = []
    enter, send = FlightRecorder.enter, StageMessages.send

    def note(self, call, kind, size_bytes, *args, **where):
        if not where:  # neither a message nor the wait for a collective
            found.append((call.decode(), kind, size_bytes))
        return enter(self, call, kind, size_bytes, *args, **where)

    def note_message(self, instruction, tensor):
        found.append(("send", "pipeline", tensor.nbytes))
        send(self, instruction, tensor)

    FlightRecorder.enter = note
    StageMessages.send = note_message
    results = []
    for fields in cases:
        job = Job(configured(fields, dist_world_size()))
        for step in range(2):
            found.clear()
            job.train(step)
            job.step()
        results.append([*found])
    return results


CUT = dict(tensor_model_parallel_size=2, num_layers=3)
CHUNKS = dict(pipeline_model_parallel_size=2, num_layers=4, num_layers_per_virtual_pipeline_stage=1)
ZERO = dict(num_layers=4, untie_embeddings_and_output_weights=True)
# By processes.
CASES = {
    2: [
        CUT,
        dict(CUT, sequence_parallel=True, recompute_granularity="full"),
        dict(ZERO, zero_stage=2),
        dict(ZERO, zero_stage=3),
    ],
    4: [
        CHUNKS,
        dict(ZERO, zero_stage=3, zero_shard_size=2),
        dict(ZERO, zero_stage=3, zero_shard_size=2, zero_state_shard_size=2),
        dict(ZERO, zero_stage=2, zero_shard_size=2, zero_state_shard_size=4),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", CASES)
def test_real_processes_send_what_was_planned(processes):
    cases = [dict(case, global_batch_size=4 * processes) for case in CASES[processes]]
    ranks = run_processes(processes, sent, cases)
    for i, fields in enumerate(cases):
        config = Config.create(**{**BASE, **fields, "world_size": processes})
        found, planned = [rank[i] for rank in ranks], step_messages(config, "cpu")
        if "tensor_model_parallel_size" in fields:
            check_tensor(config, planned, found)
        elif "pipeline_model_parallel_size" in fields:
            check_pipeline(config, planned, found)
        else:
            check_zero(config, planned, found)


PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def check_tensor(config, planned, ranks):
    model = config.model
    # fp32 on a CPU
    tensor = model.seq_length * config.batch.micro_batch_size * model.hidden_size * 4
    # on one of two ranks
    statistics = 3 * 4 * tensor // (4 * model.hidden_size) * config.num_micro_batches()
    expected = -statistics + sum(
        PASSES[message.kind] * count * message.bytes / 2
        for message, count in planned.collectives.items()
        if message.group == "tensor"
    )
    for found in ranks:
        passes = [PASSES[call] for call, kind, size in found if kind == "tensor" and size == tensor]
        assert sum(passes) * tensor / 2 == expected


def check_pipeline(config, planned, ranks):
    """Check what two stages of two chunks with two replicas send.

    gloo reduces to each owner in turn; together that is all gradients.
    """

    def most(call, kind):
        return max(sum(size for c, k, size in found if (c, k) == (call, kind)) for found in ranks)

    sends = [size for found in ranks for call, _, size in found if call == "send"]
    # Messages of both chunks over the boundary, and those from the first chunk to the second; in
    # both directions.
    assert len(sends) == 2 * 2 * (planned.messages + config.num_micro_batches())
    assert set(sends) == {planned.message_bytes}
    of_data = [message for message in planned.collectives if message.group == "data"]
    for call, message in zip(("reduce", "all_gather"), of_data, strict=True):
        assert most(call, "data") == pytest.approx(message.bytes, rel=0.01), (
            "buckets are padded to whole parts"
        )
    assert most("all_reduce", "pipeline") == pytest.approx(planned.tied_bytes, rel=0.5)


def check_zero(config, planned, ranks):
    """Each pass sums the gradients once, and with stage 3 gathers each matrix once.

    The output layer's stays from the forward to the backward pass, in which the embedding needs
    none. What other ranks have too is summed, and gathered, once in a step.
    """
    model, engine, m = config.model, config.engine, config.num_micro_batches()
    h, v = model.hidden_size, model.padded_vocab_size(1)
    layer, vectors = 12 * h * h, 4 * (9 * h + 4 * h) + 2 * h
    tables = v * h + model.max_position_embeddings * h
    n = 4 * layer + vectors + tables + v * h
    inner = engine.zero_shard_size or len(ranks)
    states = engine.zero_state_shard_size or len(ranks)
    name = "data" if inner == len(ranks) else "data.inner"
    least = {("reduce_scatter", name): 4 * m * n}
    if engine.zero_stage == 3:
        least["all_gather", name] = 4 * (m * (8 * layer + tables + v * h) + vectors)
    else:
        least["all_gather", name] = 4 * n
    if states > inner:
        least |= {(kind, "data.outer"): 4 * n // inner for kind in ("reduce_scatter", "all_gather")}
    if states < len(ranks):
        least["all_reduce", "data.copies"] = 4 * n // states
    totals = Counter[tuple[str, str]]()
    for message, count in planned.collectives.items():
        totals[message.kind, message.group] += int(count * message.bytes)
    assert totals == least
    for found in ranks:
        of_engine = Counter[tuple[str, str]]()
        for call, group, size in found:
            if group.startswith("data") and size > 64:  # norms are a few numbers
                of_engine["reduce_scatter" if call == "reduce" else call, group] += size
        assert of_engine == pytest.approx(least, rel=0.02), "buckets are padded to whole parts"
