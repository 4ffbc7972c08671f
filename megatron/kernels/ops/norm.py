"""LayerNorm and RMSNorm, each with a residual added first where one is given.

Bytes moved for N elements of e bytes: forward N e in and N e out, with a residual 2 N e in and 2 N
e out; backward 2 N e in and N e out, with a gradient of the sum N e more in. The gradients of
weight and bias come from the same pass over the rows; their partial sums, fp32, out and in again,
add at most a twelfth to that where a compute unit has 32 rows or more, and more where it has fewer.

Rows that are too wide for registers, or not made of full packs of 16 bytes, take more. Forward:
above 65,536 elements (fp32 32,768; on CUDA a quarter of either) what is normalised is read up to
three times. Backward: where the sums of the columns do not fit (above 16,384 elements, RMSNorm of
16 bits 32,768; on CUDA 16,384 and, fp32, 8,192), a second kernel reads dy and x once more for them.

On a CPU the rows stay in its cache from one reading to the next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.library import Function
from megatron.kernels.operators import (
    check_all,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
    operator,
)

_FORWARD = Function("mk_norm", "ppppppppllffi")
_BACKWARD = Function("mk_norm_backward", "ppppppppplllfi")

_HOST_PARTS, _HOST_ROWS = 64, 32


def _check(
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool,
    rms: bool,
) -> None:
    name = ("add_" if residual is not None else "") + ("rms_norm" if rms else "layer_norm")
    check_all(name, x=x, residual=residual)
    parameters = {"weight": weight, "bias": bias}
    for argument, parameter in parameters.items():
        if parameter is not None and parameter.dtype != torch.float32:
            check_type(name, x=x, **{argument: parameter})
    check_device(name, x=x, **parameters)
    check_contiguous(name, **parameters)
    check_shape(name, x.shape, residual=residual)
    check_shape(name, x.shape[-1:], **parameters)


def _reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (y, sum, mean, rstd) with torch's operators, in fp32; mean is empty for an RMS
    norm.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide if rms else wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * (_narrow(weight, x).float() + float(one_plus))
    if bias is not None:
        y = y + _narrow(bias, x).float()
    return y.to(x.dtype), total, mean.new_empty(0) if rms else mean.flatten(), rstd.flatten()


def _narrow(parameter: Tensor, x: Tensor) -> Tensor:
    """Convert a parameter in fp32, whose gradient is not to be rounded, to the type of x."""
    return parameter.to(x.dtype) if parameter.dtype == torch.float32 else parameter


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])  # not Size.numel(), which fixes the sizes of a compiled graph


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool,
    rms: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    y, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    mean, rstd = _statistics(x, rms)
    narrow = _narrow(weight, x), None if bias is None else _narrow(bias, x)
    _FORWARD(
        x,
        y,
        total,
        mean,
        rstd,
        x,
        residual,
        *narrow,
        _rows(x),
        x.shape[-1],
        eps,
        float(one_plus),
        int(rms),
    )
    return y, total, mean, rstd


def _statistics(x: Tensor, rms: bool) -> tuple[Tensor, Tensor]:
    """Return empty fp32 tensors for mean and rstd of each row."""
    rows = _rows(x)
    return x.new_empty(0 if rms else rows, dtype=torch.float32), x.new_empty(
        rows, dtype=torch.float32
    )


def _alone(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Make a norm without a residual of one with it."""

    def run(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        y, _, mean, rstd = compute(x, None, *rest)
        return y, mean, rstd

    return run


@functools.cache
def _compute_units(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _parts(x: Tensor, rows: int, sums: int) -> int:
    """Return how many parts the rows are divided into, each with its own sums: one for each block
    of a GPU.

    It depends on the shape and the device alone, so that results are reproducible. There are as
    many blocks as the compute units hold at once, but fewer if their sums were more than a twelfth
    of the bytes moved, down to one for each unit.
    """
    if x.device.type == "cpu":
        return min(_HOST_PARTS, -(-rows // _HOST_ROWS))
    units = _compute_units(x.device.index)
    row_bytes = x.shape[-1] * x.element_size()
    held = 4 if row_bytes <= 8192 else 2 if row_bytes <= 32768 else 1
    # 8 bytes of sums, out and in, to 3 elements of each row
    cheap = rows * x.element_size() // (32 * sums * units)
    return min(units * max(1, min(held, cheap)), -(-rows // 4))


def _check_backward(
    name: str,
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    one_plus: bool,
    rms: bool,
) -> None:
    name = "rms_norm_backward" if rms else "layer_norm_backward"
    _check(name, x, dsum, weight, None, 0.0, one_plus, rms)
    check_all(name, dy=dy, x=x)
    check_device(name, x=x, mean=mean, rstd=rstd)
    check_type(name, [torch.float32], mean=mean, rstd=rstd)
    check_shape(name, x.shape, dy=dy)
    check_shape(name, (0 if rms else _rows(x),), mean=mean)
    check_shape(name, (_rows(x),), rstd=rstd)


def _backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    one_plus: bool,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of what was normalised, and, fp32 [2 or, RMS, 1, h], of weight and bias
    in this order.
    """
    dx, parameters = _like_gradients(dy, dsum, x, weight, mean, rstd, one_plus, rms)
    rows, (sums, n) = _rows(x), parameters.shape
    parts, weight = _parts(x, rows, sums), _narrow(weight, x)
    partial = x.new_empty(parts, sums, n, dtype=torch.float32)
    plus = float(one_plus)
    _BACKWARD(
        x, dx, parameters, partial, dy, dsum, x, weight, mean, rstd, rows, n, parts, plus, int(rms)
    )
    return dx, parameters


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
    g = g * (_narrow(weight, x).float() + float(one_plus))
    dx = rstd * (g - h * (g * h).mean(1, keepdim=True) - (0.0 if rms else g.mean(1, keepdim=True)))
    dx = dx.reshape(x.shape) if dsum is None else dx.reshape(x.shape) + dsum.float()
    return dx.to(x.dtype), torch.stack(parameters)


def _like_gradients(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    one_plus: bool,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), weight.new_empty(1 if rms else 2, x.shape[-1], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save of the inputs x, [residual,] weight, bias, eps, one_plus, rms and the outputs y, [sum,]
    mean, rstd.
    """
    ctx.added = len(output) == 4
    normalised = output[1] if ctx.added else inputs[0]
    weight, bias = inputs[-5], inputs[-4]
    ctx.save_for_backward(normalised, weight, *output[-2:])
    ctx.one_plus, ctx.rms, ctx.biased = inputs[-2], inputs[-1], bias is not None
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dsum = others[0] if ctx.added else None
    dx, dweight, dbias = dsum, None, None
    if dy is not None:
        dsum = None if dsum is None else dsum.contiguous()
        dx, parameters = _norm_backward(
            dy.contiguous(), dsum, x, weight, mean, rstd, ctx.one_plus, ctx.rms
        )
        dweight, dbias = parameters[0], parameters[-1] if ctx.biased else None
    return (*([dx, dx] if ctx.added else [dx]), dweight, dbias, None, None, None)


def _like(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), *_statistics(x, rest[-1])


_norm_backward = operator(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "bool one_plus, bool rms) -> (Tensor, Tensor)",
    _backward,
    _reference_backward,
    _like_gradients,
    check=_check_backward,
    work="norm",
)
_norm_operator = operator(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool one_plus, bool rms) -> (Tensor, "
    "Tensor, Tensor)",
    _alone(_forward),
    _alone(_reference),
    _alone(_like),
    check=lambda name, x, *rest: _check(name, x, None, *rest),
    save=_save,
    backward=_gradient,
    work="norm",
)
_add_norm_operator = operator(
    "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool one_plus, "
    "bool rms) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _reference,
    _like,
    check=_check,
    save=_save,
    backward=_gradient,
    work="norm",
)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, one_plus: bool = False
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., arXiv 1607.06450).

    Statistics are those of the last dimension, and in fp32, as all arithmetic. x [.., h], copied
    unless contiguous; weight, bias [h], all of one type. The gradients of weight and bias are not
    rounded if these are in fp32 beside x in 16 bits. With `one_plus` the gain is weight + 1. Raises
    KernelError for types other than fp32, fp16 and bf16, or other shapes.
    """
    result: Tensor = _norm_operator(x.contiguous(), weight, bias, eps, one_plus, False)[0]
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """Return x / sqrt(mean of x^2 + eps) * weight over the last dimension (Zhang and Sennrich,
    arXiv 1910.07467).

    Arguments and errors as for `layer_norm`.
    """
    result: Tensor = _norm_operator(x.contiguous(), weight, None, eps, one_plus, True)[0]
    return result


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    one_plus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (`layer_norm` of sum, sum), where sum = x + residual, rounded to the type. x, residual
    [.., h].

    The gradients of x and residual are one tensor.
    """
    y, total, _, _ = _add_norm_operator(
        x.contiguous(), residual.contiguous(), weight, bias, eps, one_plus, False
    )
    return y, total


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, one_plus: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (`rms_norm` of sum, sum), where sum = x + residual, rounded to the type. x, residual
    [.., h].

    The gradients of x and residual are one tensor.
    """
    y, total, _, _ = _add_norm_operator(
        x.contiguous(), residual.contiguous(), weight, None, eps, one_plus, True
    )
    return y, total
