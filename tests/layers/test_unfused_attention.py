"""--attention-backend unfused: explicit softmax, against a dense one in float64 and torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.choose import Fusions
from megatron.layers.attention_fused import torch_attention
from megatron.layers.attention_unfused import Scoring, unfused_attention
from tests.helpers.fusions import Operators
from tests.layers.test_attention import (
    CASES,
    D,
    dense,
    documents_of,
    inputs,
    output_and_gradients,
    slopes_and_bias,
)

SOFTMAX, NONE = Fusions(masked_softmax=True), Fusions()


@pytest.mark.parametrize("fusions", [SOFTMAX, NONE], ids=["fused", "torch"])
@pytest.mark.parametrize(("heads", "groups", "alibi"), [(4, 4, False), (6, 2, True), (4, 1, False)])
@pytest.mark.parametrize("case", ["one sample", "two samples", "whole samples", "no documents"])
def test_against_a_dense_mask_and_torch_attention(case, heads, groups, alibi, fusions):
    """Compare with a dense mask and torch's attention.

    In fp32, sums of up to 23 terms of size 1 and gradients through them have some 10 units of
    2^-23.
    """
    lengths = CASES.get(case, [[23], [23]])
    documents = None if case == "no documents" else documents_of(lengths)
    slopes, bias = slopes_and_bias(heads) if alibi else (None, None)
    tensors = inputs(sum(lengths[0]), len(lengths), heads, groups, torch.float32)
    with Operators() as seen:
        found = output_and_gradients(
            lambda *x: unfused_attention(
                *x, Scoring(alibi=bias, documents=documents, fusions=fusions)
            ),
            tensors,
        )
    assert dict(seen.calls) == (
        {"softmax": 1, "softmax_backward": 1} if fusions.masked_softmax else {}
    )
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = output_and_gradients(lambda *x: dense(*x, slopes, lengths), exact)
    same = output_and_gradients(
        lambda *x: torch_attention(*x, Scoring(alibi=bias, documents=documents)), tensors
    )
    for a, b, c in zip(found, expected, same, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-6, atol=5e-6)
        torch.testing.assert_close(a, c, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("fusions", [SOFTMAX, NONE], ids=["fused", "torch"])
@pytest.mark.parametrize(("case", "alibi"), [("two samples", True), ("no documents", False)])
def test_strided_inputs_in_bf16(case, alibi, fusions):
    """Queries, keys and values may be slices of the fused projection.

    The bound is a few roundings of the format.
    """
    lengths, heads, groups = CASES["two samples"] if case in CASES else [[23], [23]], 4, 2
    slopes, bias = slopes_and_bias(heads) if alibi else (None, None)
    documents = documents_of(lengths) if case in CASES else None
    q, k, v = (x.detach() for x in inputs(23, 2, heads, groups, torch.bfloat16))
    fused = torch.cat((k, v), dim=-1)
    tensors = [
        q.requires_grad_(),
        fused[..., :D].detach().requires_grad_(),
        fused[..., D:].detach().requires_grad_(),
    ]
    assert not tensors[1].is_contiguous()
    found = output_and_gradients(
        lambda *x: unfused_attention(*x, Scoring(alibi=bias, documents=documents, fusions=fusions)),
        tensors,
    )
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = output_and_gradients(lambda *x: dense(*x, slopes, lengths), exact)
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < 2e-2 * b.norm()


class Copies(TorchDispatchMode):
    """Record the sizes of the copies made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in (
            "aten::clone",
            "aten::_to_copy",
            "aten::copy_",
            "aten::repeat_interleave",
        ):
            self.sizes.append(result.numel())
        return result


def test_grouped_keys_and_values_are_not_copied():
    s, b, heads, groups = 20, 2, 6, 2
    mixed = torch.randn(s, b, groups, heads // groups + 2, D)
    q = mixed[:, :, :, :-2].reshape(s, b, heads, D)
    with Copies() as seen:
        unfused_attention(q, mixed[:, :, :, -2], mixed[:, :, :, -1], Scoring(fusions=SOFTMAX))
    assert seen.sizes == [q.numel()]  # the queries, as rows of their groups


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_acts_on_the_weights_and_repeats(fused):
    """Dropout acts on the weights and repeats for a seed.

    With equal scores and one-hot values the output is the weights: 1 / (keys seen), dropped or
    scaled up.
    """
    p, s, b, heads = 0.25, 32, 6, 8
    zeros = torch.zeros(s, b, heads, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, b, heads, s)
    fusions = Fusions(masked_softmax=fused, bias_dropout=fused)

    def draw(seed: int) -> torch.Tensor:
        with Operators() as seen:
            out = unfused_attention(
                zeros, zeros, values, Scoring(fusions=fusions, dropout=p, seed=seed)
            )
        assert seen.calls["bias_dropout_add"] == fused
        return out

    a, again, other = draw(3), draw(3), draw(4)
    assert torch.equal(a, again) and not torch.equal(a, other)
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    weights = a.permute(1, 2, 0, 3)  # [b, heads, query, key]
    assert not weights[..., ~seen].any()
    full = (1 / torch.arange(1, s + 1) / (1 - p)).view(s, 1).expand(s, s)
    kept = (weights != 0)[..., seen].double()
    assert torch.allclose(weights[weights != 0], full.expand_as(weights)[weights != 0], rtol=1e-5)
    assert abs(kept.mean().item() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    assert len({tuple(row) for row in kept.view(b * heads, -1).tolist()}) == b * heads
