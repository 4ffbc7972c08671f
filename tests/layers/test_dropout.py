"""Dropout masks: keyed, with the right probability, equal where required, otherwise independent."""

import torch

from megatron.kernels.ops.elementwise import keyed_dropout
from megatron.parallel.hashing import mix
from megatron.parallel.keyed_random import DropoutKey, Site, dropout_mask, seeded

X = torch.ones(64, 8, 128)


def test_probability_and_scale():
    p = 0.1
    out = keyed_dropout(X, p, seed=5)
    fraction = (out != 0).double().mean().item()
    assert abs(fraction - (1 - p)) < 5 * (p * (1 - p) / X.numel()) ** 0.5  # five standard errors
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
    base = DropoutKey(1, 40)
    seeds = {base.at(3, Site.MLP_OUTPUT), base.at(4, Site.MLP_OUTPUT), base.at(3, Site.ATTENTION)}
    seeds.add(DropoutKey(2, 40).at(3, Site.MLP_OUTPUT))
    assert len(seeds) == 4


def test_a_part_has_its_part_of_the_mask():
    """Each part gets its part of the mask by torch; that of the kernels: tests/kernels/numerics.

    Parts are one sample of a micro-batch, a part of the sequence, and some of the heads.
    """

    def drop(shape, layout):
        return keyed_dropout(torch.ones(shape), 0.5, 7, False, layout)

    s = 12
    b = 3
    heads = 6
    h = 20
    key = DropoutKey(1, 40)
    third = DropoutKey(1, 2, samples=torch.tensor([40]))
    x = torch.ones(s, b, h)
    hidden = drop((s, b, h), key.hidden(x))
    weights = drop((b, heads, s, s), key.weights(s, heads))
    for rank in range(3):
        assert torch.equal(
            drop((4, b, h), key.hidden(x[:4], rank, 3)), hidden[4 * rank : 4 * rank + 4]
        )
        assert torch.equal(
            drop((b, 2, s, s), key.weights(s, 2, rank, 3)), weights[:, 2 * rank : 2 * rank + 2]
        )
    assert torch.equal(drop((s, 1, h), third.hidden(x[:, :1])), hidden[:, 2:])
    assert torch.equal(drop((1, heads, s, s), third.weights(s, heads)), weights[2:])
    rows = [*(hidden != 0).view(-1, h).tolist(), *(weights != 0).view(-1, s).tolist()]
    assert len(set(map(tuple, rows))) > 0.9 * len(rows)


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
