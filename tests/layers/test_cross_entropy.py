"""Vocabulary-parallel cross entropy against torch's on the whole, unpadded vocabulary in
float64.
"""

import numpy as np
import pytest
import torch

from megatron.layers.vocabulary import vocab_parallel_cross_entropy
from megatron.parallel.sharding import shard
from megatron.parallel.topology import Group
from tests.helpers.groups import join
from tests.helpers.processes import run_processes


def reference(logits, labels, weights):
    x = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        x.flatten(0, 1), labels.flatten(), reduction="none"
    ).view(labels.shape)
    (losses * weights).sum().backward()
    return losses.detach(), x.grad


def data(vocab):
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 3, vocab, generator=g) * 8
    return logits, torch.randint(0, vocab, (5, 3), generator=g), torch.rand(5, 3, generator=g)


# of 20 the last two ranks have no entry
CASES = [(vocab, fused) for vocab in (64, 50, 20) for fused in (False, True)]
PADDED = 64


def body(rank):
    group, found = join(tensor=4).tensor, []
    for vocab, fused in CASES:
        logits, labels, weights = data(vocab)
        s = shard("x", (vocab, 1), 0, rank, 4, padded=PADDED)
        mine = torch.full((5, 3, PADDED // 4), 50.0)  # what stands in the padding must not matter
        mine[..., : s.extent[0]] = logits[..., s.offset[0] : s.offset[0] + s.extent[0]]
        mine.requires_grad_()
        losses = vocab_parallel_cross_entropy(
            mine, labels, group, s.offset[0], s.extent[0], fused=fused
        )
        (losses * weights).sum().backward()
        found.append((losses.detach().numpy(), mine.grad.numpy(), s.extent[0]))
    return found


@pytest.mark.slow
def test_four_ranks_equal_one():
    for (vocab, _), ranks in zip(CASES, zip(*run_processes(4, body), strict=True), strict=True):
        losses, gradient = reference(*data(vocab))
        for found, g, real in ranks:
            np.testing.assert_allclose(found, losses.numpy(), rtol=2e-6, atol=2e-6)
            assert not np.any(g[..., real:])
        whole = np.concatenate([g[..., :real] for _, g, real in ranks], axis=-1)
        # fp32 rounding of numbers up to 1
        np.testing.assert_allclose(whole, gradient.numpy(), atol=3e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_bf16_logits_give_fp32_losses(fused):
    logits, labels, weights = data(40)
    x = logits.bfloat16().requires_grad_()
    expected, gradient = reference(x.detach().float(), labels, weights)
    losses = vocab_parallel_cross_entropy(x, labels, Group((0,), 0), fused=fused)
    (losses * weights).sum().backward()
    assert losses.dtype == torch.float32
    np.testing.assert_allclose(losses.detach().numpy(), expected.numpy(), rtol=2e-6, atol=2e-6)
    assert x.grad.dtype == torch.bfloat16
    np.testing.assert_allclose(x.grad.float().numpy(), gradient.numpy(), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_extreme_logits_do_not_overflow(fused):
    x = torch.tensor([[[1e4, -1e4, 0.0]]])
    losses = vocab_parallel_cross_entropy(x, torch.tensor([[1]]), Group((0,), 0), fused=fused)
    assert losses.item() == pytest.approx(2e4)
