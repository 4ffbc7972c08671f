"""Attention inside documents, against a float64 softmax with an explicit mask."""

from __future__ import annotations

import contextlib
import math
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import Config
from megatron.kernels.choose import ALL, NONE
from megatron.layers import attention_fused
from megatron.layers.attention import SelfAttention
from megatron.layers.attention_fused import flash_attention, torch_attention
from megatron.layers.attention_unfused import PLAIN, Scoring
from megatron.layers.context import CallContext
from megatron.layers.positions import Alibi, Documents, alibi_slopes
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.keyed_random import DropoutKey, seeded
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from megatron.planner.dryrun.rank import member
from megatron.planner.tensors import Follower, without_data
from tests.helpers.fusions import context

D = 8
# Lengths of the documents of each sample; samples of one case are equally long.
CASES = {
    "one sample": [[7, 1, 12, 3]],
    "two samples": [[7, 1, 12, 3], [23]],
    "tiny documents": [[1] * 20 + [2, 1, 2, 3], [1, 2] * 9 + [1]],
    "equal lengths": [[5, 5, 5, 5], [10, 10], [5, 5, 10]],
    "whole samples": [[9], [9]],
}


def documents_of(lengths: list[list[int]]) -> Documents:
    joined = np.concatenate(lengths)
    return Documents(
        torch.from_numpy(np.append(0, joined.cumsum()).astype(np.int32)), joined, len(lengths)
    )


def inputs(
    s: int, b: int, heads: int, groups: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(s, b, n, D) for n in (heads, groups, groups)]
    return [
        torch.randn(x, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for x in shapes
    ]


def dense(q, k, v, slopes, lengths, scoring=PLAIN):
    """Return the reference: all scores, with unseen ones masked.

    Head h reads group h // (heads / groups).
    """
    s, _, heads, d = q.shape
    group = [h // (heads // k.shape[2]) for h in range(heads)]
    k, v = k[:, :, group], v[:, :, group]
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * (scoring.scale or 1 / math.sqrt(d))
    if scoring.cap:
        scores = scoring.cap * torch.tanh(scores / scoring.cap)
    i, j = torch.arange(s).view(s, 1), torch.arange(s).view(1, s)
    if slopes is not None:
        scores = scores - slopes.double().view(heads, 1, 1) * (i - j)
    # [b, s]
    ids = torch.stack(
        [torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in lengths]
    )
    seen = (j <= i) & (j >= i - scoring.window)
    seen = seen & (ids.unsqueeze(2) == ids.unsqueeze(1))  # [b, s, s]
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bhij,jbhd->ibhd", weights, v)


def slopes_and_bias(heads: int) -> tuple[torch.Tensor, Alibi]:
    return alibi_slopes(heads), Alibi(alibi_slopes(heads))


def output_and_gradients(attend, tensors):
    out = attend(*tensors)
    weights = torch.arange(out.numel(), dtype=torch.float64).cos().view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


@pytest.mark.parametrize(
    ("heads", "groups", "alibi"), [(4, 4, False), (6, 2, True), (4, 1, True), (6, 2, False)]
)
@pytest.mark.parametrize("case", CASES)
def test_against_a_dense_mask(case, heads, groups, alibi):
    lengths = CASES[case]
    slopes, bias = slopes_and_bias(heads) if alibi else (None, None)
    tensors = inputs(sum(lengths[0]), len(lengths), heads, groups)
    expected = output_and_gradients(lambda *x: dense(*x, slopes, lengths), tensors)
    scoring = Scoring(alibi=bias, documents=documents_of(lengths))
    found = output_and_gradients(lambda *x: torch_attention(*x, scoring), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if case == "whole samples":
        plain = output_and_gradients(lambda *x: torch_attention(*x, Scoring(alibi=bias)), tensors)
        for a, b in zip(plain, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
def test_strided_inputs_in_bf16(alibi):
    """Keys and values may be slices of the fused projection.

    The bound is a few roundings of the format, relative to the whole.
    """
    lengths, heads, groups = CASES["two samples"], 4, 2
    slopes, bias = slopes_and_bias(heads) if alibi else (None, None)
    q, k, v = (x.detach() for x in inputs(sum(lengths[0]), 2, heads, groups, torch.bfloat16))
    fused = torch.cat((k, v), dim=-1)
    tensors = [
        q.requires_grad_(),
        fused[..., :D].detach().requires_grad_(),
        fused[..., D:].detach().requires_grad_(),
    ]
    assert not tensors[1].is_contiguous()
    scoring = Scoring(alibi=bias, documents=documents_of(lengths))
    found = output_and_gradients(lambda *x: torch_attention(*x, scoring), tensors)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = output_and_gradients(lambda *x: dense(*x, slopes, lengths), exact)
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < 1e-2 * b.norm()


class Largest(TorchDispatchMode):
    """Record the largest size of a tensor returned by an operation, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


@pytest.mark.parametrize(("alibi", "dropout"), [(False, 0.0), (True, 0.1)])
def test_nothing_is_of_the_size_of_the_sample_squared(alibi, dropout):
    lengths, heads = [[32] * 30 + [16] * 4, [20, 30] * 20 + [24]], 2
    s = sum(lengths[0])
    tensors = inputs(s, 2, heads, heads, torch.float32)
    bias = Alibi(alibi_slopes(heads)) if alibi else None
    scoring = Scoring(alibi=bias, documents=documents_of(lengths), dropout=dropout)
    with Largest() as seen:
        output_and_gradients(lambda *x: torch_attention(*x, scoring), tensors)
    # Padded scores of documents, for dropout: b * s * 1.25 * 32 for each head.
    assert seen.elements <= 2 * s * 1.25 * 32 * heads < s * s / 4


def test_dropout_acts_inside_documents_and_repeats():
    """Dropout acts within documents and repeats for a seed.

    With equal scores and one-hot values the output is the weights: 1 / (keys seen), dropped or
    scaled up.
    """
    p, b, heads = 0.25, 6, 8
    lengths = [[25, 14, 1, 24]] * b
    s = sum(lengths[0])
    zeros = torch.zeros(s, b, heads, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, b, heads, s)
    draws = []
    scoring = Scoring(documents=documents_of(lengths), dropout=p)
    for seed in (3, 3, 4):
        with seeded(torch.device("cpu"), seed):
            draws.append(torch_attention(zeros, zeros, values, scoring))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    kept, at = [], 0
    for n in lengths[0]:
        for i in range(n):
            weights = draws[0][at + i]  # [b, heads, s]
            assert not weights[..., :at].any() and not weights[..., at + i + 1 :].any()
            inside = weights[..., at : at + i + 1]
            full = torch.tensor(1 / (i + 1) / (1 - p))
            assert ((inside == 0) | torch.isclose(inside, full, rtol=1e-5)).all()
            kept.append(inside.flatten() != 0)
        at += n
    share = torch.cat(kept).double()
    assert abs(share.mean().item() - (1 - p)) < 5 * (p * (1 - p) / len(share)) ** 0.5
    # Documents of equal length are drawn separately: samples and heads have their own masks.
    last = draws[0][24, :, :, :25].reshape(b * heads, 25) != 0
    assert len({tuple(row) for row in last.tolist()}) > b * heads // 2


@pytest.mark.parametrize(
    ("attention", "fusions", "documents", "rope", "dropout"),
    [
        ("torch", NONE, True, False, 0.0),
        ("torch", NONE, True, True, 0.3),
        ("blocked", ALL, True, False, 0.3),
        ("blocked", ALL, False, True, 0.3),
        ("blocked", NONE, False, False, 0.3),
        ("unfused", ALL, True, False, 0.3),
        ("unfused", ALL, False, True, 0.3),
        ("unfused", NONE, True, True, 0.3),
    ],
)
def test_recomputing_attention_repeats_every_bit(attention, fusions, documents, rope, dropout):
    config = Config.create(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        seq_length=23,
        vocab_size=8,
        attention_dropout=dropout,
        position_embedding_type="rope" if rope else "learned_absolute",
        init_method_std=0.2,
        micro_batch_size=2,
        global_batch_size=2,
    )
    call = CallContext(
        documents=documents_of(CASES["two samples"]) if documents else None,
        dropout=DropoutKey(1, 2),
    )
    results = []
    for recompute in (False, True):
        layer = SelfAttention(
            context(fusions),
            "a",
            config.model,
            0,
            recompute,
            attention,
        )
        x = inputs(23, 2, 4, 4, torch.float32)[0].detach().flatten(2).requires_grad_()
        out, _ = layer(x, call)
        weights = [layer.query_key_value.weight, layer.dense.weight]
        results.append([out.detach(), *torch.autograd.grad(out, [x, *weights], out.detach().cos())])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def by_document(q, k, v, bounds, slopes=None, scoring=PLAIN):
    """Return what a kernel of packed rows [tokens, heads, d] returns, from the reference."""
    pieces = zip(*(x.split(bounds.diff().tolist()) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            dense(*(x.unsqueeze(1) for x in piece), slopes, [[len(piece[0])]], scoring).squeeze(1)
            for piece in pieces
        ]
    )


def test_flash_attention_is_given_the_lengths(monkeypatch):
    """Flash attention gets the lengths: packed rows, int32 bounds, the longest as a number.

    A stand-in has the interface of flash-attn 2.
    """
    seen = []

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, causal, alibi_slopes):
        assert cu_q.dtype == cu_k.dtype == torch.int32 and type(max_q) is type(max_k) is int
        assert causal and dropout_p == 0.0
        seen.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k))
        return by_document(q, k, v, cu_q, alibi_slopes)

    def whole(q, k, v, *, dropout_p, causal, alibi_slopes):
        assert causal and dropout_p == 0.0
        pieces = [x.transpose(0, 1) for x in (q, k, v)]
        return dense(*pieces, alibi_slopes, [[q.shape[1]]] * q.shape[0]).transpose(0, 1)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func, module.flash_attn_func = varlen, whole
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    lengths, (slopes, bias) = CASES["two samples"], slopes_and_bias(4)
    tensors = inputs(23, 2, 4, 2)
    for cut, documents in ((lengths, documents_of(lengths)), ([[23], [23]], None)):
        found = output_and_gradients(
            lambda *x, d=documents: flash_attention(*x, Scoring(alibi=bias, documents=d)), tensors
        )
        expected = output_and_gradients(lambda *x, n=cut: dense(*x, slopes, n), tensors)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    bounds = [0, 7, 8, 20, 23, 46]
    assert seen == [(bounds, bounds, 23, 23)]


@pytest.mark.parametrize(
    "scoring", [PLAIN, Scoring(0.3, window=4), Scoring(window=23)], ids=["all", "4", "longest"]
)
def test_torch_gets_all_documents_at_once_on_a_gpu(monkeypatch, scoring):
    """Torch's flash attention, by a stand-in with its interface, gets all documents in one call."""
    seen = []

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **more):
        left, right = more.pop("window_size_left"), more.pop("window_size_right")
        assert is_causal and right == 0 and not dropout_p and not return_debug_mask
        assert cu_q.dtype == cu_k.dtype == torch.int32 and type(max_q) is type(max_k) is int
        seen.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k))
        law = PLAIN._replace(**more) if left < 0 else Scoring(window=left, **more)
        return by_document(q, k, v, cu_q, None, law), None, None, None, None

    monkeypatch.setattr(attention_fused, "_takes_bounds", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    lengths, tensors = CASES["two samples"], inputs(23, 2, 4, 2)
    found = output_and_gradients(
        lambda *x: torch_attention(*x, scoring._replace(documents=documents_of(lengths))), tensors
    )
    expected = output_and_gradients(lambda *x: dense(*x, None, lengths, scoring), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    bounds = [0, 7, 8, 20, 23, 46]
    assert seen == [(bounds, bounds, 23, 23)]


def test_cudnn_gets_fixed_shapes_alone(monkeypatch):
    """cuDNN, which plans for each new shape, may compute training without documents alone."""
    allowed, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    tensors, documents = inputs(23, 2, 4, 2), documents_of(CASES["two samples"])
    _, bias = slopes_and_bias(4)
    for alibi in (None, bias):
        scoring = Scoring(alibi=alibi)
        torch_attention(*tensors, scoring)
        assert allowed == [True]
        torch_attention(*tensors, scoring._replace(documents=documents))
        with torch.no_grad():
            torch_attention(*tensors, scoring)
        assert len(allowed) > 2 and not any(allowed[1:])
        assert torch.backends.cuda.cudnn_sdp_enabled()
        allowed.clear()


class Copies(TorchDispatchMode):
    """Count the operators that only copy `elements` or more elements into another layout.

    Before its backward pass each of torch's kernels copies an output and a gradient that are not
    contiguous as [samples, s, heads, d]
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu): they are counted too.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "contiguous") and args[0].numel() >= self.elements:
            self.count += 1
        if name.startswith("_scaled_dot_product") and name.endswith("backward"):
            gradient, out = args[0], args[4]
            self.count += sum(not x.transpose(1, 2).is_contiguous() for x in (gradient, out))
        return result


@pytest.mark.parametrize("rope", [False, True], ids=["no rope", "rope"])
@pytest.mark.parametrize("groups", [8, 4], ids=["MHA", "GQA"])
@pytest.mark.parametrize(
    ("device", "tp", "kernels"),
    [("cpu", 1, True), ("cpu", 1, False), ("meta", 1, True), ("meta", 2, True)],
    ids=["CPU", "CPU, no kernels", "GPU", "GPU, TP 2, SP"],
)
def test_nothing_is_copied_into_another_layout(device, tp, kernels, groups, rope):
    """No tensor is copied into another layout.

    On a CPU this is torch's CPU attention; on tensors without data, a GPU's kernels as torch
    describes them.

    Queries of groups that no rotation rewrites are copied once: heads of different groups have no
    common stride.
    """
    heads, s, b = 8, 16, 2
    config = Config.create(
        num_layers=1,
        hidden_size=heads * D,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        seq_length=s,
        vocab_size=64,
        attention_dropout=0.0,
        micro_batch_size=b,
        global_batch_size=b,
        bf16=device == "meta" or None,
        position_embedding_type="rope" if rope else "none",
        tensor_model_parallel_size=tp,
        world_size=tp,
        sequence_parallel=tp > 1,
        attention_backend="fused",
        rope_fusion=kernels,
    )
    dtype = torch.bfloat16 if device == "meta" else torch.float32
    with contextlib.ExitStack() as stack:
        if device == "meta":
            topology = stack.enter_context(member(config, 0, device))
            stack.enter_context(without_data(device, Follower()))
        else:
            topology = Topology.from_layout(Layout(), 0, device=torch.device(device))
        chunk = build_chunks(config, topology, layer_context(config, topology)).to(dtype)["0"]
        layer = chunk.layers[0].self_attention
        x = torch.randn(s // tp, b, heads * D, device=device, dtype=dtype).requires_grad_()
        gradient = torch.empty_like(x)
        layer(x, CallContext())  # builds the tables of the rotation
        with Copies(s * b * groups * D // tp) as seen:
            out, _ = layer(x, CallContext())
            torch.autograd.grad(
                out, [x, layer.query_key_value.weight, layer.dense.weight], gradient
            )
    assert seen.count == (1 if groups < heads and not rope else 0)


def test_all_layers_of_a_rank_share_one_bias_of_alibi():
    """All layers of a rank, in two chunks, keep one ALiBi bias for the backward pass.

    It has the size of all pairs of positions.
    """
    heads, s, b = 4, 64, 2
    config = Config.create(
        num_layers=8,
        hidden_size=heads * D,
        num_attention_heads=heads,
        seq_length=s,
        vocab_size=8,
        micro_batch_size=b,
        global_batch_size=2 * b,
        attention_dropout=0.0,
        position_embedding_type="alibi",
        attention_backend="fused",
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=2,
        world_size=2,
    )
    topology = Topology.from_layout(Layout(pipeline=2), 0, device=torch.device("cpu"))
    layers = [layer for chunk in build_chunks(config, topology).values() for layer in chunk.layers]
    kept = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    hidden = torch.randn(s, b, heads * D, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        for layer in layers:
            hidden, _ = layer.self_attention(hidden, CallContext())
    assert len(layers) == 4
    assert [n for n in kept.values() if n >= 4 * heads * s * s] == [4 * heads * s * s]
