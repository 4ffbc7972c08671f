"""LayerNorm and RMSNorm, each with a residual added first where one is given.

Bytes moved for N elements of e bytes: forward N e in and N e out, with a residual 2 N e in and 2 N
e out; backward 2 N e in and N e out, with a gradient of the sum N e more in. The gradients of
weight and bias come from the same pass over the rows; their partial sums, fp32, out and in again,
add at most a twelfth to that where a compute unit has 32 rows or more, and more where it has fewer.

Rows that are too wide for registers, or not made of full packs of 16 bytes, take more. Forward:
above 65,536 elements (fp32 32,768; on CUDA a quarter of either) the input of the norm is read up to
three times. Backward: where the sums of the columns do not fit (above 16,384 elements, RMSNorm of
16 bits 32,768; on CUDA 16,384 and, fp32, 8,192), a second kernel reads dy and x once more for them.

On a CPU the rows stay in its cache from one reading to the next.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.library import (
    HOST_PARTS,
    PART_ROWS,
    Function,
    check_all,
    check_beside,
    check_shape,
    fits,
    narrow,
    operator,
)
from megatron.parallel.sharding import left_to_autograd

_FORWARD = Function("mk_norm", "ppppppppllffi")
_BACKWARD = Function("mk_norm_backward", "ppppppppplllfi")

Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""Norm, sum (empty without a residual), mean (empty for an RMS norm) and rstd of each row."""


def _check(
    name: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, *rest: Any
) -> None:
    if fits(x, weight, bias, residual=residual):
        return
    name = "rms_norm" if rest[-1] else "layer_norm"
    check_all(name, x=x, residual=residual)
    check_beside(name, x, (torch.float32, x.dtype), weight=weight, bias=bias)
    check_shape(name, x.shape, residual=residual)
    check_shape(name, x.shape[-1:], weight=weight, bias=bias)


def _reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool,
    rms: bool,
) -> Results:
    """Compute the results with torch's operators, in fp32."""
    total = x if residual is None else x + residual
    wide = total.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide if rms else wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * (narrow(weight, x).float() + float(one_plus))
    if bias is not None:
        y = y + narrow(bias, x).float()
    if residual is None:
        total = x.new_empty(0)
    return y.to(x.dtype), total, mean.new_empty(0) if rms else mean.flatten(), rstd.flatten()


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])  # not Size.numel(), which fixes the sizes of a compiled graph


def _like(x: Tensor, residual: Tensor | None, *rest: Any) -> Results:
    """Return empty results; mean and rstd are fp32."""
    total = x.new_empty(0) if residual is None else torch.empty_like(x)
    rows = _rows(x)
    mean, rstd = (x.new_empty(n, dtype=torch.float32) for n in (0 if rest[-1] else rows, rows))
    return torch.empty_like(x), total, mean, rstd


def _forward(
    out: Results,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool,
    rms: bool,
) -> None:
    weight, bias = narrow(weight, x), None if bias is None else narrow(bias, x)
    n, plus = x.shape[-1], float(one_plus)
    _FORWARD(x, *out, x, residual, weight, bias, _rows(x), n, eps, plus, int(rms))


@functools.cache
def _compute_units(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _parts(x: Tensor, rows: int, sums: int) -> int:
    """Return how many parts the rows are divided into, one for each block of a GPU.

    Each part has separate sums. The number depends on the shape and the device alone, so that
    results are reproducible. There are as many blocks as the compute units hold at once, but fewer
    if their sums were more than a twelfth of the bytes moved, down to one for each unit. On CUDA
    they are those that were fastest on an H200, with up to a third.
    """
    if x.device.type == "cpu":
        return min(HOST_PARTS, -(-rows // PART_ROWS))
    units = _compute_units(x.device.index)
    row_bytes = x.shape[-1] * x.element_size()
    if torch.version.hip is None:
        held = 8 if row_bytes <= 2048 else 4 if row_bytes <= 4096 else 2 if row_bytes <= 8192 else 1
        share = 8
    else:
        held, share = 4 if row_bytes <= 8192 else 2 if row_bytes <= 32768 else 1, 32
    # 8 bytes of sums, out and in, to 3 elements of each row
    cheap = rows * x.element_size() // (share * sums * units)
    return min(units * max(1, min(held, cheap)), -(-rows // 4))


def _backward(
    results: tuple[Tensor, Tensor],
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    one_plus: bool,
    rms: bool,
) -> None:
    """Write the gradients of the norm's input and, fp32, of weight and bias.

    The latter are [2 or, RMS, 1, h], in this order.
    """
    rows, (sums, n) = _rows(x), results[1].shape
    parts, weight = _parts(x, rows, sums), narrow(weight, x)
    partial = x.new_empty(parts, sums, n, dtype=torch.float32)
    shape = rows, n, parts
    _BACKWARD(
        x, *results, partial, dy, dsum, x, weight, mean, rstd, *shape, float(one_plus), int(rms)
    )


def _reference_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    one_plus: bool,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    rows, n = _rows(x), x.shape[-1]
    g, h = dy.float().reshape(rows, n), x.float().reshape(rows, n)
    rstd = rstd.unsqueeze(1)
    h = h * rstd if rms else (h - mean.unsqueeze(1)) * rstd
    parameters = [(g * h).sum(0)] if rms else [(g * h).sum(0), g.sum(0)]
    g = g * (narrow(weight, x).float() + float(one_plus))
    dx = rstd * (g - h * (g * h).mean(1, keepdim=True) - (0.0 if rms else g.mean(1, keepdim=True)))
    dx = dx.reshape(x.shape) if dsum is None else dx.reshape(x.shape) + dsum.float()
    return dx.to(x.dtype), torch.stack(parameters)


def _like_gradients(
    dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    sums = 1 if rest[-1] else 2
    return torch.empty_like(x), weight.new_empty(sums, x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    x, residual, weight, bias, _, ctx.one_plus, ctx.rms = inputs
    _, total, mean, rstd = output
    ctx.added = residual is not None
    ctx.parameters = weight, bias  # themselves: saved tensors may be copies, without sinks
    ctx.save_for_backward(total if ctx.added else x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = dsum, None, None
    if dy is not None:
        dsum = None if dsum is None else dsum.contiguous()
        dx, parameters = _norm_backward(
            dy.contiguous(), dsum, x, weight, mean, rstd, ctx.one_plus, ctx.rms
        )
        weight, bias = ctx.parameters
        dweight = left_to_autograd(weight, parameters[0])
        dbias = left_to_autograd(bias, parameters[-1])
    return dx, dx if ctx.added else None, dweight, dbias, None, None, None


_norm_backward = operator(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "bool one_plus, bool rms) -> (Tensor, Tensor)",
    _backward,
    _reference_backward,
    _like_gradients,
    work="norm",
)
_norm = operator(
    "norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, bool one_plus, bool "
    "rms) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _reference,
    _like,
    check=_check,
    save=_save,
    backward=_gradient,
    work="norm",
)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool = False,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (norm of sum, sum), where sum = x + residual, rounded to the type.

    Without a residual, the norm of x and an empty sum.

    LayerNorm is (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., arXiv 1607.06450);
    with `rms` it is x / sqrt(mean of x^2 + eps) * weight (Zhang and Sennrich, arXiv 1910.07467).
    With `one_plus` the gain is weight + 1. Statistics are those of the last dimension, and in fp32,
    as all arithmetic. x, residual [.., h], copied unless contiguous; weight, bias [h]. The
    gradients of weight and bias are not rounded if these are in fp32 and x in 16 bits; those of x
    and residual are one tensor. Raises KernelError for types other than fp32, fp16 and bf16, or
    other shapes.
    """
    residual = None if residual is None else residual.contiguous()
    y, total, _, _ = _norm(x.contiguous(), residual, weight, bias, eps, one_plus, rms)
    return y, total
