"""Random models on random layouts, compared with one process.

A large Adam epsilon makes the update nearly linear in the gradient, so that rounding is not
magnified where a random model has small gradients, while a wrong scale, a missing term or a wrong
mask still shows. MEGATRON_TEST_LAYOUTS=N draws N cases instead of 8.
"""

import math
import os
import random

import pytest

from megatron.config.parallel import SCHEDULES, V_SHAPED
from tests.helpers.processes import run_processes
from tests.parity.cases import BLOCK, FULL, FULL2, NONE, SELECTIVE, train
from tests.parity.test_grid import check

CASES = int(os.environ.get("MEGATRON_TEST_LAYOUTS", "8"))


def draw_layout(draw):
    """Draw (world size, fields of layout, schedule and recomputation)."""
    tp = draw.choice([1, 2, 4, 8])
    pp = draw.choice([p for p in (1, 2, 3, 4, 8) if tp * p <= 8])
    dp = draw.choice([d for d in (1, 2, 3, 4) if tp * pp * d <= 8])
    micro_batch = draw.choice([1, 2])
    stage = draw.choice([0, 1, 2, 3] if pp == 1 else [0, 1, 2])
    shard = draw.choice([n for n in (1, 2, 3, 4) if dp % n == 0])
    states = draw.choice([n for n in (1, 2, 3, 4) if n % shard == dp % n == 0])
    fields = dict(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1 and draw.random() < 0.6,
        zero_stage=stage,
        zero_shard_size=shard if stage else 0,
        zero_state_shard_size=states if stage else 0,
        micro_batch_size=micro_batch,
        global_batch_size=micro_batch * dp * draw.choice([1, 2, 3, 5]),
        num_layers=max(pp, 4) + draw.choice([0, 1]),
        **draw.choice([NONE, FULL, FULL2, BLOCK, SELECTIVE]),
    )
    schedule = draw.choice([*SCHEDULES, "uneven"]) if pp > 1 else "1f1b"
    if schedule == "interleaved":
        each = draw.choice([1, 2])
        fields.update(
            num_layers=pp * draw.choice([2, 3]) * each, num_layers_per_virtual_pipeline_stage=each
        )
    elif schedule == "zb-h1":
        fields["pipeline_schedule"] = schedule
    elif schedule in V_SHAPED:
        fields.update(pipeline_schedule=schedule, num_layers=2 * pp + draw.choice([0, 1, 2]))
    elif schedule == "uneven":
        counts = [draw.choice([1, 2]) for _ in range(pp * draw.choice([1, 2]))]
        fields.update(num_layers=sum(counts), pipeline_layout=",".join(map(str, counts)))
    return tp * pp * dp, fields


def draw_model(draw, tp):
    """Draw the fields of a model."""
    return dict(
        hidden_size=64,
        num_attention_heads=8,
        max_position_embeddings=draw.choice([16, 32]),
        adam_eps=1e-2,
        vocab_size=draw.choice([37, 50, 64, 101]),
        make_vocab_size_divisible_by=draw.choice([1, 8, 32]),
        position_embedding_type=draw.choice(["learned_absolute", "rope", "alibi", "none"]),
        normalization=draw.choice(["layernorm", "rmsnorm"]),
        swiglu=draw.random() < 0.5,
        ffn_hidden_size=draw.choice([128, 160]),
        num_key_value_heads=draw.choice([g for g in (1, 2, 4, 8) if 0 in (g % tp, tp % g)]),
        window_size=draw.choice([None, (0, 0), (7, 0)]),
        attention_logit_softcapping=draw.choice([None, None, 1.0]),
        add_bias_linear=draw.random() < 0.5,
        untie_embeddings_and_output_weights=draw.random() < 0.5,
        fp32_residual_connection=draw.random() < 0.2,
        apply_layernorm_1p=draw.random() < 0.2,
        init_method_xavier_uniform=draw.random() < 0.2,
        reset_attention_mask=draw.random() < 0.3,
        reset_position_ids=draw.random() < 0.3,
        hidden_dropout=draw.choice([0.0, 0.1]),
        attention_dropout=draw.choice([0.0, 0.1]),
    )


def draw_context(draw, ranks, model):
    """Draw the fields of context parallelism for a job that has `ranks` processes without it."""
    size = draw.choice([c for c in (1, 2, 4) if ranks * c <= 8])
    # on a ring, attention dropout needs longer sequences
    kind = "a2a" if model["attention_dropout"] else draw.choice(["p2p", "a2a"])
    return dict(context_parallel_size=size, cp_comm_type=kind)


def draw_experts(draw, ranks, fields):
    """Draw the fields of experts for stages of so many ranks; for half of the models, none."""
    if draw.random() < 0.5:
        return {}
    tp = fields["tensor_model_parallel_size"]
    experts = draw.choice([4, 6, 8])
    meshes = [
        (each, size)
        for each in (1, 2, 4, 8)
        for size in (1, 2, 3, 4, 8)
        if ranks % (each * size) == experts % size == max(tp, each) % min(tp, each) == 0
    ]
    each, size = draw.choice(meshes)
    shared = draw.choice([None, 64])
    score = draw.choice(["softmax", "sigmoid"])
    if ranks // tp % (size * each // math.gcd(size * each, tp)):
        fields |= dict(zero_shard_size=0, zero_state_shard_size=0)
    return dict(
        num_experts=experts,
        expert_tensor_parallel_size=each,
        expert_model_parallel_size=size,
        expert_ranks_per_node=draw.choice([n for n in (1, 2, 4) if size % n == 0]),
        moe_router_topk=draw.choice([2, 3]),
        moe_router_score_function=score,
        moe_router_enable_expert_bias=score == "sigmoid" and draw.random() < 0.5,
        moe_ffn_hidden_size=draw.choice([32, 64]),
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=shared is not None and draw.random() < 0.5,
        moe_router_load_balancing_type=(
            draw.choice(["aux_loss", "seq_aux_loss", "global_aux_loss"]),
        ),
        moe_aux_loss_coeff=(0.1,),
        moe_z_loss_coeff=draw.choice([None, 0.01]),
        moe_expert_capacity_factor=draw.choice([None, 1.0]),
        add_bias_linear=shared is None and fields["add_bias_linear"],
    )


def draw_part(draw, fields):
    """Draw what is frozen, or adapters; for half of the models, nothing."""
    patterns = ["embedding", "layers.[01]", "*layernorm*", "mlp", "self_attention.dense", "*.bias"]
    frozen = dict(freeze=tuple(draw.sample(patterns, 2)))
    targets = ["self_attention", "dense", "query_*"] + ["mlp"] * ("num_experts" not in fields)
    adapted = dict(lora_rank=draw.choice([1, 3, 8]), lora_target=(draw.choice(targets),))
    return draw.choice([{}, {}, frozen, adapted])


@pytest.mark.campaign("parity")
@pytest.mark.parametrize("seed", range(CASES))
def test_drawn_layout_equals_one_process(seed):
    draw = random.Random(seed)
    world_size, fields = draw_layout(draw)
    fields |= draw_model(draw, fields["tensor_model_parallel_size"])
    context = draw_context(draw, world_size, fields)
    fields |= context
    world_size *= context["context_parallel_size"]
    fields |= draw_experts(draw, world_size // fields["pipeline_model_parallel_size"], fields)
    fields |= draw_part(draw, fields)
    if "lora_rank" not in fields and "embedding" not in fields.get("freeze", ()):
        fields["decoupled_lr"] = draw.choice([1e-2, 3e-3])
    if fields["position_embedding_type"] != "learned_absolute":
        fields["mtp_num_layers"] = draw.choice([0, 1, 2])
    check(
        fields, [result for (result,) in run_processes(world_size, train, [fields], timeout_s=600)]
    )
