"""muP: initial weights, learning rates and factors against closed forms, and activations by size."""

import math

import pytest
import torch

from benchmarks.mup import BASE, LIMIT, MUP, configured, mean_coordinates, synthetic_text
from megatron.checkpoint.huggingface_save import take_up, without_mup
from megatron.config import Config
from megatron.engine.buckets import mup_scales
from megatron.parallel.sharding import Sharding, sharding_of
from tests.helpers.hugging_face import COMMON, FAMILIES, micro_batch
from tests.helpers.tiny import one_stage

FACTORS = dict(
    use_mup=True,
    mup_base_hidden_size=8,
    mup_base_num_layers=1,
    mup_embedding_mult=3.0,
    mup_base_num_attention_heads=1,
)


def build(config):
    return one_stage(config).eval()


@pytest.mark.parametrize("style", [*FAMILIES, "embedding norm, untied"])
def test_weights_take_up_the_factors(style):
    """A model without muP has the same scores, with weights that have taken up all factors."""
    fields = FAMILIES.get(style) or {
        **FAMILIES["bloom"],
        "untie_embeddings_and_output_weights": True,
    }
    config = Config.create(**{**fields, **FACTORS, "init_method_std": 0.3})
    model = build(config)
    plain = build(config.replace(**dict.fromkeys([*FACTORS, "softmax_scale"])))
    assert without_mup(config.model) == plain.config.model
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p, other in zip(model.parameters(), plain.parameters(), strict=True):
            if p.ndim == 1:  # norms and biases that are not at their neutral initial values
                p.add_(torch.randn(p.shape, generator=draw) * 0.1)
            s = sharding_of(p)
            real = tuple(slice(0, n) for n in s.extent)
            other.zero_()
            other[real] = take_up(config.model, s.name, p[real])
        scores, expected = (m.logits(micro_batch(), None)[..., :50] for m in (model, plain))
    assert scores.std() > 0.1, "the comparison has something to compare"
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_base_model_is_the_usual_one():
    """A model with the sizes of its base has the same weights and scores as without muP."""
    fields = {**COMMON, "init_method_std": 0.2}
    usual = build(Config.create(**fields))
    base = build(Config.create(**fields, use_mup=True, mup_base_head_dim=8))
    for p, q in zip(usual.parameters(), base.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(usual.logits(micro_batch(), None), base.logits(micro_batch(), None))


WIDE = dict(
    COMMON,
    num_layers=6,
    hidden_size=256,
    num_attention_heads=16,
    num_key_value_heads=1,
    ffn_hidden_size=1280,
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    use_mup=True,
    mup_base_hidden_size=64,
    mup_base_num_layers=2,
    mup_base_ffn_hidden_size=160,
    mup_base_num_attention_heads=8,
    init_method_std=0.02,
    num_experts=4,
    moe_layer_freq=(0, 0, 0, 0, 1, 0),
    moe_ffn_hidden_size=640,
    moe_router_topk=2,
)
# Growth of width 4, of the MLP 8, of the heads 2, of the depth 3. Standard deviation, and factors
# of Adam's rate, SGD's rate and epsilon; fan out / fan in times depth for SGD's hidden matrices.
# Of 18 heads, key and value have half the deviation: their rows do not grow, their inputs by 4.
OUTPUT_STD = 0.02 / math.sqrt(2 * 2)
QKV_STD = math.sqrt((16 * 0.01**2 + 2 * 0.005**2) / 18)
TABLE = {
    "embedding.word_embeddings.weight": (0.02, 1, 4, 1 / 4),
    "embedding.position_embeddings.weight": (0.02, 1, 4, 1 / 4),
    "layers.5.input_layernorm.weight": (0, 1, 4 * 3, 1 / 12),
    "layers.5.self_attention.query_key_value.weight": (QKV_STD, 1 / 4, 2 / 4 * 3, 1 / 12),
    "layers.5.self_attention.dense.weight": (OUTPUT_STD / 2**0.5, 1 / 2, 4 / 2 * 3, 1 / 12),
    "layers.5.mlp.dense_h_to_4h.weight": (0.01, 1 / 4, 8 / 4 * 3, 1 / 12),
    "layers.5.mlp.dense_h_to_4h.bias": (0, 1, 8 * 3, 1 / 12),
    "layers.5.mlp.dense_4h_to_h.weight": (OUTPUT_STD / 8**0.5, 1 / 8, 4 / 8 * 3, 1 / 12),
    "layers.4.mlp.router.weight": (0.02, 1, 4 * 3, 1 / 12),
    "layers.4.mlp.experts.dense_h_to_4h.weight": (0.01, 1 / 4, 8 / 4 * 3, 1 / 12),
    "layers.4.mlp.experts.dense_4h_to_h.weight": (OUTPUT_STD / 8**0.5, 1 / 8, 4 / 8 * 3, 1 / 12),
    "final_layernorm.bias": (0, 1, 4, 1 / 4),
    "output_layer.weight": (0.02, 1, 4, 1 / 4),
}


def test_initial_weights_and_scales():
    config = Config.create(**WIDE)
    grouped = config.replace(optimizer="sgd", num_key_value_heads=4)
    adam = mup_scales(config)
    sgd = mup_scales(grouped)
    parameters = {sharding_of(p).name: p for p in build(config).parameters()}
    shardings = {sharding_of(p).name: sharding_of(p) for p in build(grouped).parameters()}
    for name, (std, adam_lr, sgd_lr, eps) in TABLE.items():
        p = parameters[name].detach()
        s = sharding_of(parameters[name])
        # of n numbers, with a standard error of std / sqrt(2 n)
        assert float(p[: s.extent[0]].std()) == pytest.approx(std, rel=4 / math.sqrt(2 * p.numel()))
        assert adam(s) == pytest.approx((adam_lr, eps)), name
        assert sgd(shardings[name]) == pytest.approx((sgd_lr, eps)), name
    assert mup_scales(config.replace(**dict.fromkeys(MUP_FIELDS)))(s) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("mode", "factor"), [("unit_rms_norm", 1), ("shape_scaling", 1), ("spectral", 1 / 2)]
)
def test_updates_of_muon_have_the_norm_of_mup(mode, factor):
    """Four times as many outputs and inputs, for which the scales of updates are 1, 1 and 2."""
    config = Config.create(**{**WIDE, "optimizer": "muon", "muon_scale_mode": mode})
    s = Sharding("layers.0.x.weight", (96, 64), (96, 64), (0, 0), (96, 64), base_shape=(24, 16))
    assert mup_scales(config)(s)[0] == pytest.approx(factor)


def test_norms_through_which_the_stream_passes():
    fields = {**WIDE, "apply_residual_connection_post_layernorm": True}
    config = Config.create(**{**fields, "num_key_value_heads": 4})
    for name, adam, sgd in (
        ("layers.5.input_layernorm.bias", 1 / 3, 4 / 3),
        ("layers.5.self_attention.dense.bias", 1, 4 * 3),
        ("final_layernorm.weight", 1, 4),
        ("scale", 1, 4),
    ):
        s = Sharding(name, (256,), (256,), (0,), (256,), base_shape=(64,))
        assert mup_scales(config)(s)[0] == pytest.approx(adam), name
        assert mup_scales(config.replace(optimizer="sgd"))(s)[0] == pytest.approx(sgd), name


MUP_FIELDS = [name for name in WIDE if "mup" in name]


def test_xavier_is_that_of_the_base_model():
    config = Config.create(**{**WIDE, "init_method_xavier_uniform": True})
    p = {sharding_of(p).name: p for p in build(config).parameters()}
    # bounds of uniform numbers: those of the base matrix, times sqrt(base inputs / inputs)
    for name, rows, columns, growth in (
        ("layers.0.mlp.dense_4h_to_h.weight", 64, 160, 8),
        ("embedding.word_embeddings.weight", 50, 64, 1),
    ):
        bound = math.sqrt(6 / (rows + columns) / growth)
        assert float(p[name].detach().abs().max()) == pytest.approx(bound, rel=1e-3)


# ---- activations by width and depth


def spread(sizes, seeds=3, **fields):
    """Return the largest ratio between models of activations after some steps, or their change."""
    common = dict(seq_length=32, lr=1e-3, untie_embeddings_and_output_weights=True)
    configs = [configured(width, num_layers=n, **common, **fields) for width, n in sizes]
    rows = mean_coordinates(configs, synthetic_text(1 << 14), steps=5, seeds=seeds)
    columns = zip(*(row.values() for row in rows), strict=True)
    return max(max(column) / min(column) for column in columns)


# From twice the base width: at the base, random parts of the updates still count.
WIDTHS = [(2 * BASE, 2), (8 * BASE, 2)]
DEPTHS = [(BASE, 4), (BASE, 16)]


@pytest.mark.slow
def test_activations_are_alike_at_any_width():
    """Of one seed; LIMIT is that of three."""
    assert spread([(2 * BASE, 2), (4 * BASE, 2)], 1, **MUP) < 1.2
    assert spread([(BASE, 2), (4 * BASE, 2)], 1) > 2.0


@pytest.mark.campaign("mup")
@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        (WIDTHS, {}),
        (WIDTHS, dict(num_experts=4, moe_router_topk=2, add_bias_linear=False)),
        (DEPTHS, dict(mup_base_num_layers=4)),
        (DEPTHS, dict(mup_base_num_layers=4, apply_residual_connection_post_layernorm=True)),
    ],
    ids=["width", "experts", "depth", "norms"],
)
def test_activations_of_other_models_are_alike(sizes, fields):
    assert spread(sizes, **MUP, **fields) < LIMIT
