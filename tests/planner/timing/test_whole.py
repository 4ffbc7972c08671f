"""What the planner counts for an optimizer that takes matrices whole, against closed forms."""

import pytest

from megatron.config import Config
from megatron.kernels.cost import Product
from megatron.planner.cluster import load_cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.recorder import record_update
from megatron.planner.timing import estimate

H, LAYERS, STEPS = 64, 4, 5


def configured(**settings):
    return Config.create(
        **{
            **dict(num_layers=LAYERS, hidden_size=H, num_attention_heads=4, seq_length=32),
            **dict(vocab_size=128, micro_batch_size=1, global_batch_size=8, lr=1e-3),
            **settings,
        }
    )


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
    found, value_bytes = record_update(configured(optimizer="muon"), shapes)
    products = [
        sum(each.flops for each in passes.computations() if isinstance(each, Product))
        for passes in found.values()
    ]
    assert products == expected and value_bytes == 2
    fp32 = configured(optimizer="muon", muon_fp32_matmul_prec="high")
    assert record_update(fp32, shapes)[1] == 4


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("experts", [None, 8])
def test_moments_of_matrices_take_half_of_those_of_others(zero, experts):
    settings = dict(
        world_size=4, tensor_model_parallel_size=2, zero_stage=zero, num_experts=experts
    )
    if experts:  # four on each of two data-parallel ranks, which share nothing of them
        settings |= dict(expert_model_parallel_size=2, moe_router_topk=2)
    adam, muon = (
        memory_of_ranks(configured(**settings, optimizer=name), "cpu")[0].moments
        for name in ("adam", "muon")
    )
    attention, mlp = (LAYERS * n * H * H / 2 / (2 if zero else 1) for n in (4, 8))  # on a rank
    matrices = attention + (mlp if not experts else 4 * LAYERS * 8 * H * H / 2)
    assert adam - muon == pytest.approx(4 * matrices)


def test_experts_are_worked_on_one_by_one_by_all_ranks():
    """Each rank has the same work with twice as many experts on twice as many ranks."""
    cluster = load_cluster("frontier")

    def optimizer_s(experts, expert, zero):
        config = configured(
            optimizer="muon",
            bf16=True,
            hidden_size=1024,
            num_attention_heads=16,
            num_experts=experts,
            moe_router_topk=2,
            world_size=expert,
            expert_model_parallel_size=expert,
            zero_stage=zero,
        )
        return estimate(config, cluster).breakdown["optimizer"]

    few, many = optimizer_s(8, 1, 0), optimizer_s(16, 2, 0)
    assert many == pytest.approx(few, rel=0.05) and optimizer_s(16, 1, 0) > 1.7 * few
    assert optimizer_s(16, 2, 1) < many


def test_more_ranks_share_the_work():
    """The update of large matrices takes more time than Adam's, and less with every kind of rank."""
    cluster = load_cluster("frontier")

    def optimizer_s(tensor, data, name="muon", zero=1):
        config = configured(
            optimizer=name,
            bf16=True,
            hidden_size=2048,
            num_attention_heads=16,
            world_size=tensor * data,
            tensor_model_parallel_size=tensor,
            zero_stage=zero,
        )
        return estimate(config, cluster).breakdown["optimizer"]

    alone = optimizer_s(1, 1)
    # not less than products of these sizes at the peak of the machine
    operations = LAYERS * (4 * steps_on(2048, 2048) + 2 * steps_on(4 * 2048, 2048))
    assert alone > optimizer_s(1, 1, "adam") + operations / (cluster.peak_tflops["bfloat16"] * 1e12)
    assert optimizer_s(1, 4) < optimizer_s(1, 2) < 0.7 * alone
    assert optimizer_s(2, 1) < 0.7 * alone
    assert optimizer_s(1, 4, zero=0) == pytest.approx(alone)
