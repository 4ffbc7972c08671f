"""Arguments of the kernels of each backend, and bits of recomputed attention.

Numbers are compared in test_attention.py; packages that are not installed have stand-ins with their
interfaces.
"""

import sys
import types

import pytest
import torch

from megatron.layers import attention_fused
from megatron.layers.attention_fused import flash_attention, torch_attention
from megatron.layers.attention_unfused import PLAIN, Scoring
from megatron.layers.positions import Alibi, alibi_slopes
from tests.layers.test_attention import (
    TWO_SAMPLES,
    dense,
    documents_of,
    inputs,
    output_and_gradients,
)

BOUNDS = [0, 7, 8, 20, 23, 46]  # of TWO_SAMPLES, one after the other


def by_document(q, k, v, bounds, slopes=None, scoring=PLAIN):
    """Return what a kernel of packed rows [tokens, heads, d] returns, from the reference."""
    documents = zip(*(x.split(bounds.diff().tolist()) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            dense(
                *(x.unsqueeze(1) for x in document), slopes, [[len(document[0])]], scoring
            ).squeeze(1)
            for document in documents
        ]
    )


@pytest.mark.parametrize("scoring", [PLAIN, Scoring(0.3, 2.0, 7)], ids=["plain", "told"])
def test_what_flash_attention_is_told(monkeypatch, scoring):
    """Packed rows, int32 bounds, the longest as a number; window, cap and scale if there are any.

    Those are told by the names of flash-attn 2.6.
    """
    seen, options = [], dict(softmax_scale=0.3, softcap=2.0, window_size=(7, 0))

    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, causal, alibi_slopes=None, **more):
        assert cu_q.dtype == cu_k.dtype == torch.int32 and type(max_q) is type(max_k) is int
        assert causal and dropout_p == 0.0
        seen.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, more))
        return by_document(q, k, v, cu_q, alibi_slopes, scoring)

    def fixed_length(q, k, v, *, dropout_p, causal, alibi_slopes=None, **more):
        assert causal and dropout_p == 0.0
        seen.append(more)
        transposed = [x.transpose(0, 1) for x in (q, k, v)]
        lengths = [[q.shape[1]]] * q.shape[0]
        return dense(*transposed, alibi_slopes, lengths, scoring).transpose(0, 1)

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen
    module.flash_attn_func = fixed_length
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    slopes, tensors = alibi_slopes(4), inputs(23, 2, 4, 2)
    for lengths, documents in ((TWO_SAMPLES, documents_of(TWO_SAMPLES)), ([[23], [23]], None)):
        full_scoring = scoring._replace(alibi=Alibi(slopes), documents=documents)
        actual = output_and_gradients(
            lambda *x, full_scoring=full_scoring: flash_attention(*x, full_scoring), tensors
        )
        expected = output_and_gradients(
            lambda *x, n=lengths: dense(*x, slopes, n, scoring), tensors
        )
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    more = {} if scoring is PLAIN else options
    assert seen == [(BOUNDS, BOUNDS, 23, 23, more), more]


@pytest.mark.parametrize(
    "scoring", [PLAIN, Scoring(0.3, window=4), Scoring(window=23)], ids=["all", "4", "longest"]
)
def test_torch_gets_all_documents_at_once_on_a_gpu(monkeypatch, scoring):
    """Torch's flash attention, by a stand-in with its interface, gets all documents in one call."""
    seen = []

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **more):
        left = more.pop("window_size_left")
        right = more.pop("window_size_right")
        assert is_causal and right == 0 and not dropout_p and not return_debug_mask
        assert cu_q.dtype == cu_k.dtype == torch.int32 and type(max_q) is type(max_k) is int
        seen.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k))
        kernel_scoring = PLAIN._replace(**more) if left < 0 else Scoring(window=left, **more)
        return by_document(q, k, v, cu_q, None, kernel_scoring), None, None, None, None

    monkeypatch.setattr(attention_fused, "_takes_bounds", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel)
    tensors = inputs(23, 2, 4, 2)
    actual = output_and_gradients(
        lambda *x: torch_attention(*x, scoring._replace(documents=documents_of(TWO_SAMPLES))),
        tensors,
    )
    expected = output_and_gradients(lambda *x: dense(*x, None, TWO_SAMPLES, scoring), tensors)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert seen == [(BOUNDS, BOUNDS, 23, 23)]


def test_cudnn_gets_fixed_shapes_alone(monkeypatch):
    """cuDNN, which plans for each new shape, may compute training without documents alone."""
    allowed = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    tensors = inputs(23, 2, 4, 2)
    documents = documents_of(TWO_SAMPLES)
    for alibi in (None, Alibi(alibi_slopes(4))):
        scoring = Scoring(alibi=alibi)
        torch_attention(*tensors, scoring)
        assert allowed == [True]
        torch_attention(*tensors, scoring._replace(documents=documents))
        with torch.no_grad():
            torch_attention(*tensors, scoring)
        assert len(allowed) > 2 and not any(allowed[1:])
        assert torch.backends.cuda.cudnn_sdp_enabled()
        allowed.clear()
