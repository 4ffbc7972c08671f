"""--attention-backend blocked against a dense softmax in float64, and against torch's attention."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.choose import ALL, NONE
from megatron.layers import attention_blocked as module
from megatron.layers.attention_blocked import block_length, blocked_attention
from megatron.layers.attention_fused import torch_attention
from megatron.layers.attention_unfused import Scoring
from megatron.layers.positions import Alibi, alibi_slopes
from tests.helpers.fusions import Operators
from tests.layers.test_attention import CASES, Largest, dense, documents_of, output_and_gradients


def projection(s: int, b: int, groups: int, share: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(s, b, groups, share + 2, d, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def dense_of(mixed, slopes, lengths):
    return dense(
        mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :], slopes, lengths
    )


def scoring_of(fused, slopes=None, **more):
    """Return the scoring of attention whose blocks are computed by kernels, if `fused`."""
    alibi = None if slopes is None else Alibi(slopes)
    return Scoring(alibi=alibi, fusions=ALL if fused else NONE, **more)


def compare(mixed, slopes, lengths, documents, fused, bound):
    """Compare output and gradient with float64.

    `bound` is in the Frobenius norm relative to the whole.
    """
    scoring = scoring_of(fused, slopes, documents=documents)
    found = output_and_gradients(lambda x: blocked_attention((x,), scoring), [mixed])
    exact = mixed.detach().double().requires_grad_()
    expected = output_and_gradients(lambda x: dense_of(x, slopes, lengths), [exact])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == mixed.dtype and (a.double() - b).norm() <= bound * b.norm()


# One block; blocks that end within a tile; several blocks, the last of them short; blocks above the
# minimum.
SHAPES = [(1, 1, 1, 1, 4), (5, 2, 3, 2, 3), (70, 2, 2, 3, 16), (131, 2, 3, 1, 8), (520, 1, 2, 1, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_float64(shape):
    """Compute blocks alone by torch's operators, with the rounding of float64."""
    s, b, groups, share, _ = shape
    for slopes in (None, alibi_slopes(groups * share)):
        compare(projection(*shape, torch.float64), slopes, [[s]] * b, None, False, 1e-14)


# fp32: sums of up to 520 terms, some units of 2^-24, through two products. 16 bits: scores,
# weights, their gradients and the results are rounded to 2^-9 (2^-12) of themselves at most; a
# score of size 3 is an exponent, so that its rounding, with a root mean square of 2^-9 / 3^(1/2),
# comes up to 3 times into its weight: together less than 2^-7 (2^-10).
BOUNDS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_every_format(shape, dtype, fused):
    """Compare in every format, with ALiBi where the kernel has it, in half of the cases."""
    s, b, groups, share, _ = shape
    slopes = alibi_slopes(groups * share) if fused == (s % 2 == 0) else None
    with Operators() as seen:
        compare(projection(*shape, dtype), slopes, [[s]] * b, None, fused, BOUNDS[dtype])
    blocks = -(-s // block_length(s, dtype))
    expected = (
        {"attention_weights_": blocks, "attention_gradient_": blocks, "row_dots": 1}
        if fused
        else {}
    )
    assert dict(seen.calls) == expected


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_documents(case, fused):
    lengths, groups, share = CASES[case], 2, 3
    slopes = alibi_slopes(groups * share) if len(lengths) > 1 else None
    dtype = torch.float32 if fused else torch.float64
    mixed = projection(sum(lengths[0]), len(lengths), groups, share, 8, dtype)
    packed = documents_of(lengths)
    with Operators() as seen:
        compare(mixed, slopes, lengths, packed, fused, 2.0**-20 if fused else 1e-14)
    batches = len(packed.groups.shapes)  # each is no longer than a block
    names = ("attention_weights_", "attention_gradient_", "row_dots")
    assert dict(seen.calls) == (dict.fromkeys(names, batches) if fused else {})


@pytest.mark.parametrize("share", [1, 2])
def test_queries_keys_and_values_apart(share):
    """Separate queries, keys and values agree with torch's attention.

    They are separate after a rotary embedding.
    """
    s, b, groups, d = 140, 2, 2, 8
    mixed = projection(s, b, groups, share, d, torch.float64).detach()
    parts = [mixed[..., :-2, :].flatten(2, 3), mixed[..., -2, :], mixed[..., -1, :]]
    assert not parts[1].is_contiguous()
    parts = [x.requires_grad_() for x in parts]
    apart = output_and_gradients(lambda *x: blocked_attention(x), parts)
    same = output_and_gradients(torch_attention, parts)
    for a, b in zip(apart, same, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_of_queries_adds_up_in_fp32(monkeypatch, dtype, fused):
    """The gradient of queries is summed in fp32.

    There are eight blocks of 32 keys; each but the first adds a quarter of the format's unit, which
    alone would be lost.

    All scores are 0, so that the last query has weights of exactly 2^-8. Values, and the weights'
    gradients, alternate between 1 and -1 with mean 0, and with keys of the same sign each product
    is positive.
    """
    monkeypatch.setattr(module, "block_length", lambda *_: 32)
    s, unit = 256, torch.finfo(dtype).eps / 4
    sign = torch.ones(s).index_fill_(0, torch.arange(1, s, 2), -1.0)
    q, k, v = (torch.zeros(s, 1, 1, 4, dtype=dtype) for _ in range(3))
    k[:, 0, 0, 0] = sign * torch.full((s,), unit).index_fill_(0, torch.arange(32), 1.0)
    v[:, 0, 0, 0] = sign
    q.requires_grad_()
    blocked_attention((q, k, v), scoring_of(fused))[..., 0].sum().backward()
    exact = torch.tensor(32 * 2.0**-8 / 2 * (1 + 7 * unit))  # 2: the root of the head dimension
    assert q.grad[-1, 0, 0, 0] == exact.to(dtype) > torch.tensor(32 * 2.0**-8 / 2)


@pytest.mark.slow
# Products of one head may be summed in another order than those of four: in fp32 some units of
# 2^-24. In bf16 a sum may then be rounded to its neighbour: 2^-8 of it, after which scores of size
# 3 move weights by 3 times that at most.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2.0**-20), (torch.bfloat16, 2.0**-6)], ids=str
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
@pytest.mark.parametrize("documents", [False, True])
def test_parts_of_the_heads_change_nothing(monkeypatch, fused, documents, dtype, bound):
    """Splitting the heads into parts changes nothing.

    They are split where their scores would be many; ALiBi and dropout use the global head number.
    """
    lengths = CASES["two samples"] if documents else [[70], [70]]
    packed = documents_of(lengths) if documents else None
    mixed = projection(sum(lengths[0]), 2, 2, 2, 8, dtype)
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 1)

    scoring = scoring_of(fused, alibi_slopes(4), documents=packed, dropout=0.3, seed=11)

    def run() -> list[torch.Tensor]:
        return output_and_gradients(lambda x: blocked_attention((x,), scoring), [mixed])

    whole, each = run(), 70 * 2 * 64 if dtype == torch.float32 else 70 * 2 * 70
    for scores in (1, 3 * each):  # one head at a time, and several
        monkeypatch.setattr(module, "_SCORES", scores)
        for a, b in zip(whole, run(), strict=True):
            assert (a - b).double().norm() <= bound * a.double().norm()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_documents_have_masks_of_their_own(fused):
    """Documents have their own masks, even in different batches.

    Documents of different lengths are in different batches. Other seeds give other masks.
    """
    p, lengths, heads = 0.5, [[31, 20, 4], [31, 20, 4]], 2
    s = sum(lengths[0])
    zeros = torch.zeros(s, 2, heads, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, 2, heads, s)
    packed = documents_of(lengths)
    masks = []
    for seed in (3, 4):
        scoring = scoring_of(fused, documents=packed, dropout=p, seed=seed)
        out = blocked_attention((zeros, zeros, values), scoring).permute(1, 2, 0, 3)
        for start, end in ((0, 31), (31, 51)):
            # The first 20 queries and keys of each document and head, without the part above the
            # diagonal.
            block = out[:, :, start:end, start:end][..., :20, :20] != 0
            masks += [tuple(row) for row in block.reshape(2 * heads, -1).tolist()]
    assert len(set(masks)) == len(masks) == 2 * 2 * 2 * heads
    whole = blocked_attention((zeros, zeros, values), scoring._replace(dropout=1.0))
    assert torch.equal(whole, torch.zeros_like(whole))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_dropout_acts_on_the_weights_and_repeats(fused):
    """Dropout acts on the weights and repeats for a seed.

    With equal scores and one-hot values the output is the weights: 1 / (keys seen), dropped or
    scaled up.
    """
    p, s, b, heads = 0.25, 70, 2, 8
    zeros = torch.zeros(s, b, heads, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, b, heads, s)
    a, again, other = (
        blocked_attention((zeros, zeros, values), scoring_of(fused, dropout=p, seed=seed))
        for seed in (3, 3, 4)
    )
    assert torch.equal(a, again) and not torch.equal(a, other)
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    weights = a.permute(1, 2, 0, 3)  # [b, heads, query, key]
    assert not weights[..., ~seen].any()
    full = (1 / torch.arange(1, s + 1) / (1 - p)).view(s, 1).expand(s, s)
    torch.testing.assert_close(
        weights[weights != 0], full.expand_as(weights)[weights != 0], rtol=1e-5, atol=0
    )
    kept = (weights != 0)[..., seen].double()
    assert abs(kept.mean().item() - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    assert len({tuple(row) for row in kept.view(b * heads, -1).tolist()}) == b * heads
    whole = blocked_attention((zeros, zeros, values), scoring_of(fused, dropout=1.0))
    assert torch.equal(whole, torch.zeros_like(whole))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_gradients_with_dropout(fused):
    """Gradients with dropout equal autograd's through a dense softmax with the same mask.

    They are compared in float64; the mask is read from outputs for one-hot values.
    """
    p, s, heads, d = 0.4, 75, 2, 75
    mixed = projection(s, 1, heads, 1, d, torch.float32)
    q, k = (mixed[..., i, :].detach() for i in range(2))
    one_hot = torch.eye(s).view(s, 1, 1, s).expand(s, 1, heads, s)
    scoring = scoring_of(fused, dropout=p, seed=5)
    dropped = blocked_attention((q, k, one_hot), scoring)
    exact = mixed.detach().double().requires_grad_()

    def reference(x: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("ibhd,jbhd->bhij", x[..., 0, :], x[..., 1, :]) / d**0.5
        hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        mask = (dropped.permute(1, 2, 0, 3) != 0) / (1 - p)
        return torch.einsum("bhij,jbhd->ibhd", weights * mask, x[..., 2, :])

    found = output_and_gradients(lambda x: blocked_attention((x,), scoring), [mixed])
    for a, b in zip(found, output_and_gradients(reference, [exact]), strict=True):
        assert (a.double() - b).norm() <= 2.0**-20 * b.norm()


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])
def test_nothing_is_of_the_size_of_the_sample_squared(fused):
    s = 1280
    mixed = projection(s, 1, 2, 1, 4, torch.float32)
    with Largest() as seen:
        scoring = scoring_of(fused, dropout=0.1, seed=3)
        output_and_gradients(lambda x: blocked_attention((x,), scoring), [mixed])
    # The scores of a block, twice in the backward pass, for both heads.
    assert seen.elements <= 2 * 2 * block_length(s, torch.float32) * s < s * s
