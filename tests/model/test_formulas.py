"""Counts of parameters and operations, against published totals, closed forms and torch."""

import math

import pytest
from torch.utils.flop_counter import FlopCounterMode

from examples.extend.layer import ParallelLayer
from megatron.config import Config
from megatron.config.parallel import RecomputeConfig
from megatron.model.formulas import paper_flops
from megatron.model.gpt import model_sizes
from megatron.parallel.sharding import sharding_of
from tests.helpers.hugging_face import COMMON, FAMILIES, B, S, micro_batch
from tests.helpers.tiny import LINEAR, one_stage

FULL = RecomputeConfig("full")
SELECTIVE = RecomputeConfig("selective", ("core_attn",))


def gpt(layers, hidden, heads, seq, vocab, **changes):
    """Return a GPT-2 style model; `changes` make it another one."""
    sizes = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads)
    return Config.create(**{**sizes, "seq_length": seq, "vocab_size": vocab, **changes})


LLAMA = {
    "normalization": "rmsnorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
RELEASED = {
    "gpt2": (gpt(12, 768, 12, 1024, 50257), 124_439_808),
    "Meta-Llama-3-8B": (
        gpt(*(32, 4096, 32, 8192, 128256), ffn_hidden_size=14336, num_key_value_heads=8, **LLAMA),
        8_030_261_248,
    ),
    "DeepSeek-V2": (
        gpt(
            *(60, 5120, 128, 4096, 102400),
            **LLAMA,
            ffn_hidden_size=12288,
            multi_latent_attention=True,
            qk_layernorm=True,
            q_lora_rank=1536,
            kv_lora_rank=512,
            num_experts=160,
            moe_layer_freq=(0, *[1] * 59),
            moe_router_topk=6,
            moe_ffn_hidden_size=1536,
            moe_shared_expert_intermediate_size=3072,
        ),
        235_741_434_880,
    ),
    "gemma-2-2b": (
        gpt(
            *(26, 2304, 8, 8192, 256000),
            **{**LLAMA, "swiglu": False, "untie_embeddings_and_output_weights": False},
            ffn_hidden_size=9216,
            num_key_value_heads=4,
            kv_channels=256,
            norm_position="both",
            geglu=True,
        ),
        2_614_341_888,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_totals_of_released_models(name):
    """Count what was counted over the released weights, as Hugging Face shows it."""
    config, total = RELEASED[name]
    sizes = model_sizes(config)
    assert sizes.parameters() == total
    if config.model.num_experts is not None:  # 154 of 160 experts do not see a token
        total -= 59 * 154 * 3 * 5120 * 1536
    assert sizes.parameters(active=True) == total


def test_parameters_and_flops_of_linear_attention():
    """Count a layer of gated DeltaNet and one of softmax attention, with an MLP each."""
    h = COMMON["hidden_size"]
    sizes = model_sizes(Config.create(**COMMON | dict(num_layers=2), **LINEAR))
    keys, states, k, v = 4, 8, 6, 5
    matrices = h * (2 * keys * k + 2 * states * v + 2 * states) + states * v * h
    vectors = (2 * keys * k + states * v) * 3 + 2 * states + v
    softmax = 4 * h * h
    of_layers = {n: s for n, s in sizes.shapes.items() if ".self_attention." in n}
    assert sum(map(math.prod, of_layers.values())) == matrices + vectors + softmax + 4 * h
    plain = model_sizes(Config.create(**COMMON | dict(num_layers=2)))
    less = 2 * softmax + 4 * S * h
    more = 2 * matrices + 6 * states * k * v
    assert sizes.flops_per_token() == plain.flops_per_token() + 3 * (more - less)


def test_flops_of_experts_are_those_that_a_token_sees():
    h, f, vocab = 32, 24, 40
    experts = dict(
        num_experts=8, moe_router_topk=3, moe_ffn_hidden_size=f, swiglu=True, add_bias_linear=False
    )
    shared = dict(moe_shared_expert_intermediate_size=20, moe_shared_expert_gate=True)
    config = gpt(2, h, 4, 24, vocab, **experts, **shared, moe_layer_freq=(0, 1))
    dense = 4 * h * h + 3 * h * config.model.ffn_hidden_size
    mixed = 4 * h * h + 3 * h * (3 * f + 20) + 8 * h + h
    sizes = model_sizes(config)
    assert sizes.flops_per_token() == 6 * (dense + mixed + h * vocab) + 3 * 2 * 4 * 24 * h
    again = RecomputeConfig("selective", ("moe",))
    assert sizes.recompute_flops_per_token(again, []) == 2 * (mixed - 4 * h * h)


def test_a_layer_of_ones_own_counts_by_its_matrices_and_its_attention():
    config = gpt(3, 32, 4, 24, 40)
    own = model_sizes(config.with_pieces(layer=ParallelLayer)).flops_per_token()
    assert own == model_sizes(config).flops_per_token()  # other norms, the same products


# of Narayanan et al., arXiv 2104.04473: layers, hidden size, heads and parameters
PAPER = [(48, 6144, 48, 22e9), (96, 12288, 96, 175e9), (128, 25600, 128, 1e12)]


@pytest.mark.parametrize(
    "fields",
    [
        *FAMILIES.values(),
        dict(COMMON, swiglu=True, ffn_hidden_size=100, kv_channels=10),
        dict(COMMON, attention_output_gate=True, softmax_type="learnable", num_key_value_heads=2),
        dict(COMMON, multi_latent_attention=True, qk_layernorm=True),
        dict(COMMON, multi_latent_attention=True, q_lora_rank=9, qk_layernorm=True, v_head_dim=7),
        dict(COMMON, xielu=True),
        dict(COMMON, **LINEAR, qk_layernorm=True),
        dict(COMMON, reglu=True, num_experts=4, moe_router_bias=True),
        dict(FAMILIES["mixtral"], mtp_num_layers=2),
    ],
    ids=[
        *FAMILIES,
        *("biases of swiglu", "gates and sinks", "latents", "latents of queries, too", "xielu"),
        *("linear attention", "router bias", "later tokens"),
    ],
)
def test_matrices_are_drawn_with_the_deviation_of_the_flag(fields):
    config = Config.create(**fields)
    built = list(one_stage(config).parameters())
    # a smaller one if residuals follow
    deviation = config.model.init_method_std
    usual = deviation, deviation / math.sqrt(2 * config.model.num_layers)
    for p in built:
        name = sharding_of(p).name
        if p.dim() > 1 and not name.endswith(("bias", "conv1d.weight")):
            drawn = float(p.detach()[: sharding_of(p).extent[0]].std())
            near = [pytest.approx(std, rel=5 / math.sqrt(2 * p.numel())) for std in usual]
            assert drawn in near, name


def test_later_tokens_take_a_layer_a_projection_and_the_output_layer():
    """Each depth costs what a model with one more layer does, a projection, and another head."""
    config = gpt(3, 32, 4, 24, 40, position_embedding_type="rope")
    deeper = model_sizes(config.replace(num_layers=5))
    later = model_sizes(config.replace(mtp_num_layers=2))
    more = 2 * 6 * (2 * 32 * 32 + 32 * 40)
    assert later.flops_per_token() == deeper.flops_per_token() + more
    norms_and_projection = 3 * 2 * 32 + 2 * 32 * 32
    assert later.parameters() == deeper.parameters() + 2 * norms_and_projection


@pytest.mark.parametrize(
    ("fields", "spared"),
    [
        ({}, 0),
        (dict(num_key_value_heads=2, swiglu=True, ffn_hidden_size=72, kv_channels=6), 0),
        (dict(multi_latent_attention=True, q_lora_rank=9, v_head_dim=7), 0),
        (dict(freeze=("embedding", "layers.0", "layers.1.mlp", "bias")), 0),
        (dict(freeze=("layers.[12].mlp.*4h_to_h", "final_layernorm")), 0),
        (dict(embedding_layernorm=True, freeze=("embedding", "layers.0")), 0),
        # the first layer's input needs no gradient
        (dict(lora_rank=3, lora_target=("self_attention", "mlp")), 2 * (96 + 3) * 32),
    ],
)
def test_flops_are_those_that_torch_counts(fields, spared):
    plain = COMMON | dict(num_layers=3, attention_backend="unfused", make_vocab_size_divisible_by=1)
    config = Config.create(**plain | fields)
    model = one_stage(config)
    with FlopCounterMode(display=False) as counter:
        model(micro_batch(), None).backward()
    per_token = model_sizes(config).flops_per_token()
    per_token += 2 * 32 * COMMON["vocab_size"]  # without late_loss, scores are computed twice
    assert counter.get_total_flops() + spared * B * S == per_token * B * S


@pytest.mark.parametrize(("layers", "hidden", "heads", "named"), PAPER)
def test_flops_agree_with_the_papers_formula(layers, hidden, heads, named):
    batch = 640
    seq = 2048
    vocab = 51200
    sizes = model_sizes(gpt(layers, hidden, heads, seq, vocab))
    ours = sizes.flops_per_token() * batch * seq
    recomputed = sizes.recompute_flops_per_token(FULL, [layers]) + 2 * hidden * 4 * hidden
    hardware = ours + recomputed * batch * seq
    assert hardware == pytest.approx(paper_flops(batch, seq, layers, hidden, vocab), rel=1e-12)
    # Without checkpointing the paper counts 4.5 h V for the head's 6 h V.
    paper = paper_flops(batch, seq, layers, hidden, vocab, checkpointing=False)
    assert ours - paper == pytest.approx(1.5 * batch * seq * hidden * vocab, rel=1e-6)


def test_a_window_counts_the_keys_of_a_query():
    """A late query of a layer with a window sees LEFT keys and its own, of others as many as s."""
    skip = dict(window_attn_skip_freq=(1, 0, 1, 1, 0, 1))
    sizes = model_sizes(gpt(6, 64, 4, 128, 512, window_size=(31, 0), **skip))
    unwindowed = model_sizes(gpt(6, 64, 4, 128, 512))
    scores = 4 * (4 * 32 + 2 * 128) * 64
    saved = 6 * 4 * 128 * 64 - scores
    assert sizes.flops_per_token() == unwindowed.flops_per_token() - 3 * saved
    assert sizes.recompute_flops_per_token(SELECTIVE, []) == scores
    full = unwindowed.recompute_flops_per_token(FULL, [6])
    assert sizes.recompute_flops_per_token(FULL, [6]) == full - saved
    wide = model_sizes(gpt(6, 64, 4, 128, 512, window_size=(500, 0)))
    assert wide.flops_per_token() == unwindowed.flops_per_token()


def test_recomputation_adds_what_is_run_again():
    sizes = model_sizes(gpt(6, 64, 4, 128, 512))
    layer = 2 * 12 * 64 * 64 + 4 * 128 * 64
    last = 2 * 64 * 4 * 64
    assert sizes.recompute_flops_per_token(RecomputeConfig(), []) == 0
    assert sizes.recompute_flops_per_token(FULL, [6]) == 6 * layer - last
    assert sizes.recompute_flops_per_token(FULL, [1, 1]) == 2 * (layer - last)
    assert sizes.recompute_flops_per_token(SELECTIVE, []) == 6 * 4 * 128 * 64
