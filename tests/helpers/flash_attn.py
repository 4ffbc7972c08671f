"""A stand-in for the low-level functions of flash-attn, with their signatures since version 2.7.

It computes the formula in float64, and rounds outputs and gradients to the type of the queries as
the kernels do. Masks are those of the package's README: the last query is aligned with the last
key, and a window of -1 means none.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor


def module() -> types.ModuleType:
    """Return a stand-in for the module `flash_attn.flash_attn_interface`."""
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward, interface._flash_attn_backward = _forward, _backward  # type: ignore[attr-defined]
    return interface


def _forward(
    q: Tensor,  # [b, rows, heads, d]
    k: Tensor,  # [b, keys, kv heads, d]
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
    window = window_size_left, 0 if causal else window_size_right
    scores, v = _scores(q.double(), k.double(), v.double(), softmax_scale, window, softcap)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).to(q.dtype)
    of_sums = torch.promote_types(q.dtype, torch.float32)
    return out, scores.logsumexp(-1).to(of_sums), torch.empty(0), torch.empty(2)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,  # [b, heads, rows]
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    assert (dropout_p, alibi_slopes) == (0.0, None) and softmax_lse.is_contiguous()
    assert dq is not None and dk is not None and dv is not None and rng_state is not None
    window = window_size_left, 0 if causal else window_size_right
    dots = torch.einsum("bihd,bihd->bhi", dout.double(), out.double())
    with torch.enable_grad():
        inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        scores, values = _scores(*inputs, softmax_scale, window, softcap)
        weights = (scores - softmax_lse.unsqueeze(-1)).exp()
        products = torch.einsum("bihd,bjhd->bhij", dout.double(), values)
        total = (weights * (products - dots.unsqueeze(-1))).sum()
    for target, gradient in zip((dq, dk, dv), torch.autograd.grad(total, inputs), strict=True):
        target.copy_(gradient)
    return dots


def _scores(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: tuple[int, int], cap: float
) -> tuple[Tensor, Tensor]:
    """Return scores [b, heads, rows, keys], and v [b, keys, heads, d]."""
    share = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(share, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    rows = q.shape[1]
    keys = k.shape[1]
    ahead = (torch.arange(keys) - keys) - (torch.arange(rows) - rows).unsqueeze(1)
    left, right = (keys + rows if side < 0 else side for side in window)
    return scores.masked_fill((ahead > right) | (ahead < -left), -torch.inf), v
