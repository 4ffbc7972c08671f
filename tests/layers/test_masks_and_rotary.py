"""ALiBi slopes and rotations against the papers' formulas, the bias against loops."""

import cmath

import numpy as np
import pytest
import torch

from megatron.layers.positions import Alibi, RotaryEmbedding, alibi_bias, alibi_slopes


def test_slopes():
    """Slopes for 12 heads are the 8 for the next lower power of two, then every second of the 16
    for the next.
    """
    eight = [2.0**-i for i in range(1, 9)]
    expected = eight + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)]
    assert alibi_slopes(8).tolist() == pytest.approx(eight)
    assert alibi_slopes(12).tolist() == pytest.approx(expected)


def test_alibi_bias():
    bias = alibi_bias(torch.tensor([0.5, 0.25]), 4, torch.float32)
    for h, slope in enumerate((0.5, 0.25)):
        for i in range(4):
            for j in range(4):
                assert bias[0, h, i, j] == (-slope * (i - j) if j <= i else float("-inf"))


def test_a_shorter_sequence_has_a_corner_of_the_bias_of_a_longer_one():
    alibi = Alibi(alibi_slopes(2))

    def storage(length: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> int:
        found = alibi.bias(length, 100, dtype, scale)
        assert torch.equal(found, alibi_bias(alibi_slopes(2) / scale, length, dtype))
        assert found.stride(2) % 16 == 0 and found.stride(3) == 1
        assert found.untyped_storage().nbytes() <= 2 * 112 * 112 * dtype.itemsize, (
            "no longer than the sequence"
        )
        return found.untyped_storage().data_ptr()

    assert storage(33) == storage(5) == storage(64) == storage(17)
    longest = storage(100)
    assert storage(65) == storage(100) == longest
    storage(20, torch.bfloat16)
    storage(20, torch.bfloat16, 0.5)


@pytest.mark.parametrize("rotary", [8, 4])
def test_rotation_is_multiplication_by_a_complex_number(rotary):
    d, base = 8, 10000.0
    x = torch.randn(
        6, 2, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).float()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [5, 4, 3, 2, 1, 0]])
    embedding = RotaryEmbedding(rotary, base)
    out = embedding.rotate(x, embedding.angles(6, positions, x.device)).numpy()
    half = rotary // 2
    for s in range(6):
        for b in range(2):
            for k in range(half):
                turn = cmath.exp(1j * positions[b, s].item() * base ** (-2 * k / rotary))
                z = (x[s, b, :, k].numpy() + 1j * x[s, b, :, k + half].numpy()) * turn
                np.testing.assert_allclose(out[s, b, :, k], z.real, atol=1e-6)
                np.testing.assert_allclose(out[s, b, :, k + half], z.imag, atol=1e-6)
    np.testing.assert_array_equal(out[..., rotary:], x.numpy()[..., rotary:])


def test_plain_positions_equal_given_ones():
    x = torch.randn(5, 1, 2, 4)
    embedding = RotaryEmbedding(4, 500.0)
    ids = torch.arange(5).unsqueeze(0)
    plain = embedding.rotate(x, embedding.angles(5, None, x.device))
    assert torch.equal(plain, embedding.rotate(x, embedding.angles(5, ids, x.device)))
