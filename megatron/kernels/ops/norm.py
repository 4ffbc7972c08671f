"""LayerNorm and RMSNorm, each with an optional residual that is added first.

Bytes moved for N elements of e bytes: forward N e in and N e out, with a residual 2 N e in and 2 N
e out; backward 2 N e in and N e out, and N e more in if there is a gradient of the sum. The
gradients of weight and bias come from the same pass over the rows; their partial sums, fp32, out
and in again, add at most about a twelfth (CUDA: a third) unless a compute unit has only a few rows.

Rows that are too wide for registers or do not consist of full packs of 16 bytes move more.
Forward: above 65,536 elements (fp32 32,768; on CUDA a quarter of either) the input of the norm is
read up to three times. Backward: if the sums of the columns do not fit, a second kernel reads dy
and x once more for them, and dx if the residual sum includes a shift. They fit up to 16,384
elements (RMSNorm without shift in 16 bits 32,768; LayerNorm with shift in fp32 8,192); on CUDA up
to 16,384 in 16 bits and 8,192 in fp32, for LayerNorm with shift half as many.

On a CPU the rows stay in its cache from one reading to the next.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import Function, nodes_for
from megatron.kernels.operators import (
    BLOCK_ROWS,
    HOST_ROW_BLOCKS,
    Gradient,
    check_all,
    check_beside,
    fits,
    narrow,
    operator,
)
from megatron.kernels.ops.elementwise import bias_gradient
from megatron.parallel.autograd import Context
from megatron.parallel.gradient_accumulator import gradient_output, gradient_written

_FORWARD = Function("mk_norm", "ppppppppllffi")
_BACKWARD = Function("mk_norm_backward", "pppppppppplllfii")


class _Inputs(NamedTuple):
    """The inputs of add_norm; norm has neither shift nor residual."""

    x: Tensor
    shift: Tensor | None
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    eps: float
    one_plus: bool
    rms: bool


def _plain(x: Tensor, *rest: Any) -> _Inputs:
    """Return the inputs of norm."""
    return _Inputs(x, None, None, *rest)


def _check(name: str, norm: _Inputs) -> None:
    x, shift, residual, weight, bias = norm[:5]
    if fits(x, weight, bias, shift, residual=residual):
        return
    name = "rms_norm" if norm.rms else "layer_norm"
    check_all(name, x.shape, x=x, residual=residual)
    column = (torch.float32, x.dtype), x.shape[-1:]
    check_beside(name, x, *column, weight=weight, bias=bias)
    check_beside(name, x, *column, shift=shift)


def _reference(norm: _Inputs) -> tuple[Tensor, ...]:
    """Compute the results with torch's operators, in fp32."""
    x = norm.x
    bias = norm.bias
    wide = x.float()
    if norm.residual is not None:
        wide = wide if norm.shift is None else wide + narrow(norm.shift, x).float()
        x = (wide + norm.residual.float()).to(x.dtype)
        wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide if norm.rms else wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    y = centred * rstd * (narrow(norm.weight, x).float() + float(norm.one_plus))
    if bias is not None:
        y = y + narrow(bias, x).float()
    statistics = [rstd.flatten()] if norm.rms else [rstd.flatten(), mean.flatten()]
    total = () if norm.residual is None else (x,)
    return y.to(x.dtype), *total, torch.stack(statistics)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])  # not Size.numel(), which fixes the sizes of a compiled graph


def _like(norm: _Inputs) -> tuple[Tensor, ...]:
    """Return empty tensors for the norm, the sum if there is a residual, and the statistics.

    The statistics are fp32 [1 or 2, rows]: rstd and, except for RMSNorm, the mean.
    """
    sums = 1 if norm.rms else 2
    total = () if norm.residual is None else (torch.empty_like(norm.x),)
    statistics = norm.x.new_empty((sums, _rows(norm.x)), dtype=torch.float32)
    return torch.empty_like(norm.x), *total, statistics


def _forward(out: tuple[Tensor, ...], norm: _Inputs) -> None:
    x = norm.x
    bias = norm.bias
    shift = norm.shift
    y, *total, statistics = out
    _FORWARD(
        x,
        y,
        total[0] if total else None,
        statistics,
        x,
        None if shift is None else narrow(shift, x),
        norm.residual,
        narrow(norm.weight, x),
        None if bias is None else narrow(bias, x),
        statistics.shape[1],
        x.shape[-1],
        norm.eps,
        float(norm.one_plus),
        int(norm.rms),
    )


@functools.cache
def _compute_units(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _row_blocks(x: Tensor, rows: int, sums: int) -> int:
    """Return the number of row blocks of x; see _count_row_blocks."""
    return _count_row_blocks(
        rows, x.shape[-1] * x.element_size(), x.element_size(), x.get_device(), sums
    )


@functools.lru_cache(1024)
def _count_row_blocks(rows: int, row_bytes: int, element_size: int, device: int, sums: int) -> int:
    """Return the number of row blocks, each of which has separate sums.

    The number depends only on the shape, the type and the device, so that results are reproducible.
    On a GPU a thread block computes each of them. There are as many as the compute units hold at
    once, but fewer (down to one per unit) if their sums would exceed a twelfth of the bytes moved,
    and at most one for every 4 rows. On CUDA, sums may be up to a third of the bytes, and the
    numbers of blocks per unit are those that were fastest on an H200.
    """
    if device < 0:  # a CPU
        return min(HOST_ROW_BLOCKS, -(-rows // BLOCK_ROWS))
    units = _compute_units(device)
    if torch.version.hip is None:
        per_unit = (
            8 if row_bytes <= 2048 else 4 if row_bytes <= 4096 else 2 if row_bytes <= 8192 else 1
        )
        share = 8
    else:
        per_unit = 4 if row_bytes <= 8192 else 2 if row_bytes <= 32768 else 1
        share = 32
    # 8 bytes of sums (out and in) per column, compared with 3 elements for each row
    cheap = rows * element_size // (share * sums * units)
    return min(units * max(1, min(per_unit, cheap)), -(-rows // 4))


class _Gradient(NamedTuple):
    """The inputs of norm_backward.

    dweight, dbias and dshift are written, or added to if their bit of `adds` (1, 2, 4) is set.
    """

    dy: Tensor
    dsum: Tensor | None
    x: Tensor
    weight: Tensor
    statistics: Tensor
    dweight: Tensor
    dbias: Tensor | None
    dshift: Tensor | None
    adds: int
    one_plus: bool
    rms: bool


def _backward(dx: Tensor, of: _Gradient) -> None:
    x = of.x
    dbias = of.dbias
    rows = of.statistics.shape[1]
    n = x.shape[-1]
    sums = (1 if of.rms else 2) + (of.dshift is not None)
    row_blocks = _row_blocks(x, rows, sums)
    partial = x.new_empty((row_blocks, sums, n), dtype=torch.float32)
    # The kernel writes a bias's gradient for every LayerNorm; without a bias, to scratch memory.
    if dbias is None and not of.rms:
        dbias = x.new_empty((n,), dtype=torch.float32)
    _BACKWARD(
        x,
        dx,
        of.dweight,
        dbias,
        of.dshift,
        partial,
        of.dy,
        of.dsum,
        x,
        narrow(of.weight, x),
        of.statistics,
        rows,
        n,
        row_blocks,
        float(of.one_plus),
        int(of.rms),
        of.adds,
    )


def _reference_backward(of: _Gradient) -> Tensor:
    x = of.x
    statistics = of.statistics
    rows = _rows(x)
    n = x.shape[-1]
    g = of.dy.float().reshape(rows, n)
    h = x.float().reshape(rows, n)
    rstd = statistics[0].unsqueeze(1)
    h = h * rstd if of.rms else (h - statistics[1].unsqueeze(1)) * rstd
    of_weight = (g * h).sum(0)
    of_bias = g.sum(0)
    g = g * (narrow(of.weight, x).float() + float(of.one_plus))
    mean = 0.0 if of.rms else g.mean(1, keepdim=True)
    dx = rstd * (g - h * (g * h).mean(1, keepdim=True) - mean)
    if of.dsum is not None:
        dx = dx + of.dsum.float().reshape(rows, n)
    outputs = of.dweight, of.dbias, of.dshift
    for i, (out, gradient) in enumerate(zip(outputs, (of_weight, of_bias, dx.sum(0)), strict=True)):
        if out is not None:
            out.copy_(out + gradient if of.adds >> i & 1 else gradient)
    return dx.reshape(x.shape).to(x.dtype)


def _save(ctx: Context, norm: _Inputs, output: tuple[Tensor, ...]) -> None:
    x = norm.x if norm.residual is None else output[1]
    # the parameters themselves: saved tensors may be copies, without accumulators
    ctx.parameters = norm.weight, norm.bias, norm.shift
    ctx.save_for_backward(x, norm.weight, output[-1])
    ctx.one_plus = norm.one_plus
    ctx.rms = norm.rms
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Context, dy: Tensor, dsum: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the norm's input, weight, bias and shift."""
    x, weight, statistics = ctx.saved_tensors
    of_weight, of_bias, of_shift = ctx.parameters
    dweight, add_weight = gradient_output(of_weight)
    dbias, add_bias = gradient_output(of_bias)
    dshift, add_shift = gradient_output(of_shift)
    dx = _norm_backward(
        dy.contiguous(),
        None if dsum is None else dsum.contiguous(),
        x,
        weight,
        statistics,
        dweight,
        dbias,
        dshift,
        add_weight | add_bias << 1 | add_shift << 2,
        ctx.one_plus,
        ctx.rms,
    )
    return (
        dx,
        gradient_written(of_weight, dweight),
        gradient_written(of_bias, dbias),
        gradient_written(of_shift, dshift),
    )


def _gradient(ctx: Context, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    dx, dweight, dbias, _ = _gradients(ctx, dy, None)
    return dx, dweight, dbias, None, None, None


def _gradient_added(
    ctx: Context, dy: Tensor | None, dsum: Tensor | None
) -> tuple[Tensor | None, ...]:
    if dy is not None:
        dx, dweight, dbias, dshift = _gradients(ctx, dy, dsum)
        return dx, dshift, dx, dweight, dbias, *[None] * 3
    shift = ctx.parameters[-1]
    dshift = None if dsum is None or shift is None else bias_gradient(shift, dsum)
    return dsum, dshift, dsum, *[None] * 5


_norm_backward = operator(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor statistics, "
    "Tensor(a!) dweight, Tensor(b!)? dbias, Tensor(c!)? dshift, int adds, bool one_plus, bool rms)"
    " -> Tensor",
    _backward,
    _reference_backward,
    lambda of: torch.empty_like(of.x),
    record=_Gradient,
    work="norm",
)
_norm = operator(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool one_plus, bool rms) -> (Tensor, "
    "Tensor)",
    _forward,
    _reference,
    _like,
    record=_plain,
    check=_check,
    gradient=Gradient(_save, _gradient, hidden=1),
    work="norm",
)
_add_norm = operator(
    "add_norm(Tensor x, Tensor? shift, Tensor residual, Tensor weight, Tensor? bias, float eps, "
    "bool one_plus, bool rms) -> (Tensor, Tensor, Tensor)",
    _forward,
    _reference,
    _like,
    record=_Inputs,
    check=_check,
    gradient=Gradient(_save, _gradient_added, hidden=1),
    work="norm",
)


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool = False,
    rms: bool = False,
) -> Tensor:
    """Return the norm of x over its last dimension.

    LayerNorm is (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., arXiv 1607.06450);
    with `rms` it is x / sqrt(mean of x^2 + eps) * weight (Zhang and Sennrich, arXiv 1910.07467).
    With `one_plus` the gain is weight + 1. Statistics are in fp32, as is all arithmetic. x [.., h],
    copied unless contiguous; weight, bias [h], in the type of x or in fp32. The gradients of weight
    and bias are summed in fp32; those of fp32 parameters, or for fp32 accumulators, are not rounded
    to 16 bits. Raises KernelError for types other than fp32, fp16 and bf16, or other shapes.
    """
    if (nodes := nodes_for(x)) is not None:
        row_blocks = _node_row_blocks(x, rms, False)
        made: Tensor = nodes.norm(x, None, None, weight, bias, eps, one_plus, rms, row_blocks)
        if made is not NotImplemented:
            return made
    y: Tensor = _norm(x.contiguous(), weight, bias, eps, one_plus, rms)  # type: ignore[assignment]
    return y


def add_norm(
    x: Tensor,
    shift: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool = False,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (norm of total, total), where total = x + shift + residual, rounded to the type of x.

    shift: the bias of the preceding layer, [h], or None; residual like x; the others as in `norm`.
    The gradients of x and residual are one tensor; the gradient of shift comes from the same pass.
    """
    if (nodes := nodes_for(x)) is not None:
        row_blocks = _node_row_blocks(x, rms, shift is not None)
        both: tuple[Tensor, Tensor] = nodes.norm(
            x, shift, residual, weight, bias, eps, one_plus, rms, row_blocks
        )
        if both is not NotImplemented:
            return both
    y, total = _add_norm(
        x.contiguous(), shift, residual.contiguous(), weight, bias, eps, one_plus, rms
    )
    return y, total


def _node_row_blocks(x: Tensor, rms: bool, shifts: bool) -> int:
    """Return the number of row blocks in the backward pass of a norm of x."""
    columns = x.shape[-1]
    return _row_blocks(x, x.numel() // columns if columns else 0, (1 if rms else 2) + shifts)
