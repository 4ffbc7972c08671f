"""Messages of a step, against closed forms.

Those that a run sends are compared in test_zero_plan.py and timing/test_operations_of_a_run.py.
"""

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
