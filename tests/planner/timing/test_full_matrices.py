"""What the planner counts for an optimizer that takes matrices whole, against closed forms."""

import pytest

from megatron.kernels.cost import Product
from megatron.planner.cluster import load_cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.recorder import record_update
from megatron.planner.timing import estimate
from tests.planner.layouts import planned

FRONTIER = load_cluster("frontier")
H = 64
LAYERS = 4
STEPS = 5


def configured(*flags):
    return planned(
        f"--num-layers {LAYERS} --hidden-size {H} --num-attention-heads 4 --seq-length 32",
        "--vocab-size 128 --global-batch-size 8",
        *flags,
    )


def optimizer_s(*flags):
    config = configured("--optimizer muon --bf16 --num-attention-heads 16", *flags)
    return estimate(config, FRONTIER).breakdown["optimizer"]


def steps_on(rows, columns):
    """Return the operations of Newton-Schulz steps: two products with m x n, one of m x m."""
    m, n = sorted((rows, columns))
    return STEPS * (4.0 * m * m * n + 2.0 * m**3)


def test_work_on_each_matrix_is_that_of_newton_schulz():
    shapes = {
        "layers.0.self_attention.query_key_value.weight": (3 * H, H),
        "layers.0.self_attention.dense.weight": (H, H),
        "layers.0.mlp.dense_h_to_4h.weight": (2, 4 * H, H),
    }
    expected = [3 * steps_on(H, H), steps_on(H, H), 2 * steps_on(4 * H, H)]
    recorded, value_bytes = record_update(configured("--optimizer muon"), shapes)
    products = [
        sum(each.flops for each in passes.computations() if isinstance(each, Product))
        for passes in recorded.values()
    ]
    assert products == expected and value_bytes == 2
    fp32 = configured("--optimizer muon --muon-fp32-matmul-prec high")
    assert record_update(fp32, shapes)[1] == 4


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("experts", [False, True])
def test_moments_of_matrices_take_half_of_those_of_others(zero, experts):
    layout = f"--world-size 4 --tensor-model-parallel-size 2 --zero-stage {zero}"
    if experts:  # four on each of two data-parallel ranks, which share nothing of them
        layout += " --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2"
    adam, muon = (
        memory_of_ranks(configured(layout, f"--optimizer {name}"), "cpu")[0].moments
        for name in ("adam", "muon")
    )
    attention, mlp = (LAYERS * n * H * H / 2 / (2 if zero else 1) for n in (4, 8))  # on a rank
    matrices = attention + (mlp if not experts else 4 * LAYERS * 8 * H * H / 2)
    assert adam - muon == pytest.approx(4 * matrices)


def test_experts_are_worked_on_one_by_one_by_all_ranks():
    """Each rank has the same work with twice as many experts on twice as many ranks."""

    def of_experts(experts, ranks, zero):
        return optimizer_s(
            f"--hidden-size 1024 --num-experts {experts} --moe-router-topk 2 --zero-stage {zero}",
            f"--world-size {ranks} --expert-model-parallel-size {ranks}",
        )

    few = of_experts(8, 1, 0)
    many = of_experts(16, 2, 0)
    assert many == pytest.approx(few, rel=0.05) and of_experts(16, 1, 0) > 1.7 * few
    assert of_experts(16, 2, 1) < many


def test_more_ranks_share_the_work():
    """The update of large matrices takes more time than Adam's, and less with every kind of rank."""
    wide = "--hidden-size 2048"
    alone = optimizer_s(wide)
    adam = optimizer_s(wide, "--optimizer adam")
    # not less than products of these sizes at the peak of the machine
    operations = LAYERS * (4 * steps_on(2048, 2048) + 2 * steps_on(4 * 2048, 2048))
    assert alone > adam + operations / (FRONTIER.peak_tflops["bfloat16"] * 1e12)
    two, four = (optimizer_s(wide, f"--world-size {size}") for size in (2, 4))
    assert four < two < 0.7 * alone
    assert optimizer_s(wide, "--world-size 2 --tensor-model-parallel-size 2") < 0.7 * alone
    assert optimizer_s(wide, "--world-size 4 --zero-stage 0") == pytest.approx(alone)
