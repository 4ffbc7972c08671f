"""Masks: keyed, with the right probability, equal where they must be and independent where they must be."""
import torch

from megatron.layers.dropout import bias_dropout_add, keyed_dropout
from megatron.parallel.random import DropoutKey, Site, dropout_mask, mix, seeded

X = torch.ones(64, 8, 128)


def test_probability_and_scale():
    p = 0.1
    out = keyed_dropout(X, p, seed=5)
    kept = (out != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / X.numel()) ** 0.5  # five standard errors
    assert torch.allclose(out[out != 0], torch.tensor(1 / (1 - p)))
    assert torch.equal(keyed_dropout(X, 0.0, 5), X)
    assert torch.equal(keyed_dropout(X, p, None), X)
    assert torch.count_nonzero(keyed_dropout(X, 1.0, 5)) == 0


def test_gradient_uses_the_same_mask():
    x = torch.randn(32, 4, 16, requires_grad=True)
    out = keyed_dropout(x, 0.5, 11)
    out.sum().backward()
    assert torch.equal(x.grad != 0, dropout_mask(x, 0.5, 11))


def test_keys_differ_where_masks_must():
    base = DropoutKey(1, 40, 0)
    seeds = {
        base.at(3, Site.MLP_OUTPUT, False),
        base.at(4, Site.MLP_OUTPUT, False),
        base.at(3, Site.ATTENTION, False),
        DropoutKey(2, 40, 0).at(3, Site.MLP_OUTPUT, False),
        DropoutKey(1, 41, 0).at(3, Site.MLP_OUTPUT, False),
        DropoutKey(1, 40, 0).at(3, Site.MLP_OUTPUT, True),
        DropoutKey(1, 40, 1).at(3, Site.MLP_OUTPUT, True),
    }
    assert len(seeds) == 7
    assert DropoutKey(1, 40, 1).at(3, Site.MLP_OUTPUT, False) == base.at(3, Site.MLP_OUTPUT, False)


def test_masks_of_different_keys_are_uncorrelated():
    masks = [dropout_mask(X, 0.5, mix(1, k)).double().flatten() for k in range(6)]
    correlation = torch.corrcoef(torch.stack(masks))
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 5 / X.numel() ** 0.5


def test_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    keyed_dropout(X, 0.3, 9)
    with seeded(torch.device("cpu"), 3):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(torch.device("cpu"), 3):
        assert torch.equal(torch.rand(3), inside)


def test_bias_dropout_add():
    x, bias, residual = torch.randn(4, 2, 8), torch.randn(8), torch.randn(4, 2, 8)
    expected = residual + (x + bias) * dropout_mask(x, 0.25, 7) / 0.75
    torch.testing.assert_close(bias_dropout_add(x, bias, residual, 0.25, 7), expected)
