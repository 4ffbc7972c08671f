"""ALiBi slopes against the paper's formula, and angles of RoPE that no family of models has.

Rotations: tests/kernels/numerics/test_rotary.py and tests/checkpoint/test_float64.py.
"""

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.layers.positions import (
    RotaryEmbedding,
    alibi_slopes,
    rotary_frequencies,
)


def test_slopes():
    """Slopes for 12 heads are the 8 for the next lower power of two, then every second of the 16
    for the next.
    """
    eight = [2.0**-i for i in range(1, 9)]
    expected = eight + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(8).tolist() == pytest.approx(eight)
    assert alibi_slopes(12).tolist() == pytest.approx(expected)


def test_frequencies_of_yarn_with_other_bounds_are_those_of_transformers():
    """Frequencies, and the factor of cosines and sines, equal transformers', which are in fp32."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    bounds = dict(yarn_beta_fast=20.0, yarn_beta_slow=2.0, yarn_attention_factor=1.5)
    model = ModelConfig(rope_scaling="yarn", **bounds)
    rope = dict(rope_type="yarn", rope_theta=10000.0, factor=8.0)
    rope |= dict(beta_fast=20.0, beta_slow=2.0, attention_factor=1.5)
    rope |= dict(original_max_position_embeddings=model.rope_original_positions)
    config = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=131072, rope_parameters=rope
    )
    expected, factor = utils.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    frequencies = rotary_frequencies(64, 10000.0, model)
    torch.testing.assert_close(frequencies, expected.double(), rtol=1e-6, atol=0)
    cos, sin = RotaryEmbedding(64, 10000.0, model=model).angles(9, None, torch.device("cpu"))
    length = (cos.double() ** 2 + sin.double() ** 2).sqrt()
    torch.testing.assert_close(length, torch.full_like(length, factor), rtol=1e-6, atol=0)
