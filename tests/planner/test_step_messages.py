"""Messages of a step, against closed forms.

Those that a run sends are compared in test_zero_plan.py and timing/test_operations_of_a_run.py.
"""

from collections import Counter

import pytest

from megatron.planner.events import GroupMessage
from megatron.planner.placement import step_messages
from tests.planner.layouts import planned

H = 64
S = 32
L = 8
V = 128
FIELDS = (
    f"--num-layers {L} --hidden-size {H} --num-attention-heads 4 --seq-length {S} --vocab-size {V} "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --bf16"
)


def made(*flags):
    return step_messages(planned(FIELDS, *flags), "cuda")


def test_pipeline_messages():
    fields = "--pipeline-model-parallel-size 4 --world-size 4 --global-batch-size 12"
    plain = made(fields)
    assert (plain.message_bytes, plain.messages, plain.tied_bytes) == (S * 2 * H * 2, 6, 4 * V * H)
    assert made(f"{fields} --num-layers-per-virtual-pipeline-stage 1").messages == 12
    assert made(f"{fields} --untie-embeddings-and-output-weights").tied_bytes == 0
    tensor_flags = "--tensor-model-parallel-size 2 --sequence-parallel --world-size 8"
    halves = made(fields, tensor_flags)
    assert halves.message_bytes == plain.message_bytes // 2
    # of a tensor rank's rows, a replica has half
    assert halves.tied_bytes == plain.tied_bytes / 2
    assert made(f"{fields} --world-size 8").tied_bytes == plain.tied_bytes / 2
    assert made(f"{fields} --fp32-residual-connection").message_bytes == 2 * plain.message_bytes
    assert made("--world-size 4").messages == 0


LAYER = 12 * H * H + 13 * H
TABLES = V * H + S * H


def test_data_parallel_messages():
    """Gradients are sent in fp32, weights come back in 16 bit.

    ZeRO stage 0 sums all gradients everywhere.
    """
    count = TABLES + L * LAYER + 2 * H
    assert set(made("--world-size 4").collectives) == {
        GroupMessage("reduce_scatter", 4 * count, "data"),
        GroupMessage("all_gather", 2 * count, "data"),
    }
    assert set(made("--world-size 4 --zero-stage 0").collectives) == {
        GroupMessage("all_reduce", 4 * count, "data")
    }
    stages = made("--world-size 8 --pipeline-model-parallel-size 4").collectives
    first = TABLES + 2 * LAYER  # with both embeddings it has the peak
    assert GroupMessage("reduce_scatter", 4 * first, "data") in stages


@pytest.mark.parametrize(("zero", "inner", "states"), [(2, 4, 4), (3, 4, 4), (3, 2, 2), (2, 2, 4)])
def test_messages_of_shards(zero, inner, states):
    """Each pass sums the gradients once, and with stage 3 gathers each matrix once.

    The output layer's stays from the forward to the backward pass, in which the embedding needs
    none. What other ranks have too is summed, and gathered, once in a step.
    """
    micro_batches = 3
    config = (
        f"--world-size 4 --global-batch-size {2 * 4 * micro_batches} --zero-stage {zero} "
        f"--zero-shard-size {inner} --zero-state-shard-size {states} "
        "--untie-embeddings-and-output-weights"
    )
    vectors = L * 13 * H + 2 * H
    n = L * (LAYER - 13 * H) + vectors + TABLES + V * H
    name = "data" if inner == 4 else "data.inner"
    expected = {("reduce_scatter", name): 4 * micro_batches * n}
    if zero == 3:
        matrices = 2 * L * 12 * H * H + TABLES + V * H
        expected["all_gather", name] = 2 * (micro_batches * matrices + vectors)
    else:
        expected["all_gather", name] = 2 * n
    if states > inner:
        expected["reduce_scatter", "data.outer"] = 4 * n // inner
        expected["all_gather", "data.outer"] = 2 * n // inner
    if states < 4:
        expected["all_reduce", "data.copies"] = 4 * n // states
    totals = Counter()
    for message, count in made(config).collectives.items():
        totals[message.kind, message.group] += int(count * message.bytes)
    assert totals == expected
