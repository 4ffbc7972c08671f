"""ALiBi slopes and rotations against the papers' formulas, the bias against loops."""

import cmath

import numpy as np
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


@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("rotary", [8, 4])
def test_rotation_is_multiplication_by_a_complex_number(rotary, neighbours):
    d = 8
    base = 10000.0
    x = torch.randn(
        6, 2, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).float()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [5, 4, 3, 2, 1, 0]])
    model = ModelConfig(rotary_interleaved=neighbours)
    embedding = RotaryEmbedding(rotary, base, fused=True, model=model)
    angles = embedding.angles(6, positions, x.device)
    out = embedding.rotate(x, angles).numpy()
    groups = embedding.rotate_groups(x.unflatten(2, (3, 1)), angles)
    assert np.array_equal(out, groups.numpy())
    half = rotary // 2
    for s in range(6):
        for b in range(2):
            for k in range(half):
                turn = cmath.exp(1j * positions[b, s].item() * base ** (-2 * k / rotary))
                real, imaginary = (2 * k, 2 * k + 1) if neighbours else (k, k + half)
                z = (x[s, b, :, real].numpy() + 1j * x[s, b, :, imaginary].numpy()) * turn
                np.testing.assert_allclose(out[s, b, :, real], z.real, atol=1e-6)
                np.testing.assert_allclose(out[s, b, :, imaginary], z.imag, atol=1e-6)
    np.testing.assert_array_equal(out[..., rotary:], x.numpy()[..., rotary:])


SCALINGS = {
    "linear": (dict(rope_scaling_factor=4.0), dict(factor=4.0)),
    # those of Llama 3.1 8B
    "llama3": (dict(), dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    # those of the YaRN paper's Llama 2 with 64k
    "yarn": (dict(rope_scaling_factor=16.0, rope_original_positions=4096), dict(factor=16.0)),
    "yarn of other bounds": (
        dict(yarn_beta_fast=20.0, yarn_beta_slow=2.0, yarn_attention_factor=1.5),
        dict(factor=8.0, beta_fast=20.0, beta_slow=2.0, attention_factor=1.5),
    ),
    "yarn of DeepSeek and gpt-oss": (
        dict(yarn_mscale=0.8, yarn_mscale_all_dim=0.5, yarn_truncate=False),
        dict(factor=8.0, mscale=0.8, mscale_all_dim=0.5, truncate=False),
    ),
}


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize(("dimension", "base"), [(128, 500000.0), (64, 10000.0)])
def test_scaled_frequencies_are_those_of_transformers(case, dimension, base):
    """Frequencies, and the factor of cosines and sines, equal transformers', which are in fp32."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    kind, (fields, reference_fields) = case.split()[0], SCALINGS[case]
    model = ModelConfig(rope_scaling=kind, **fields)
    config = transformers.LlamaConfig(
        head_dim=dimension,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": base,
            "original_max_position_embeddings": model.rope_original_positions,
            **reference_fields,
        },
    )
    expected, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    frequencies = rotary_frequencies(dimension, base, model)
    torch.testing.assert_close(frequencies, expected.double(), rtol=1e-6, atol=0)
    plain = rotary_frequencies(dimension, base, None)
    assert (frequencies < 0.9 * plain).any()
    assert kind == "linear" or (frequencies == plain).any()
    embedding = RotaryEmbedding(dimension, base, model=model)
    cos, sin = embedding.angles(1000, None, torch.device("cpu"))
    length = (cos.double() ** 2 + sin.double() ** 2).sqrt()
    torch.testing.assert_close(length, torch.full_like(length, factor), rtol=1e-6, atol=0)
    angle = 999 * expected.double()
    difference = (angle.cos() * factor - cos[999, 0, 0]).abs().max()
    assert difference < 1e-3  # an fp32 frequency times 999 positions


@pytest.mark.parametrize("length", [16, 64, 65, 200])
def test_dynamic_frequencies_of_a_length_are_those_of_transformers(length):
    """Tokens in a cache count: one more at the last position has the angles of the full length."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}
    config = transformers.LlamaConfig(head_dim=12, max_position_embeddings=64, rope_parameters=rope)
    reference = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    expected, _ = reference(torch.zeros(1), torch.arange(length).unsqueeze(0))
    model = ModelConfig(rope_scaling="dynamic", rope_scaling_factor=3.0, rope_original_positions=64)
    embedding = RotaryEmbedding(12, 500.0, model=model)
    for ids, positions in ((None, length), (torch.tensor([[length - 1]]), 1)):
        embedding.angles(1000, None, torch.device("cpu"))
        cos, _ = embedding.angles(positions, ids, torch.device("cpu"))
        torch.testing.assert_close(cos[-1, 0, 0], expected[0, -1, :6], rtol=0, atol=2e-5)
