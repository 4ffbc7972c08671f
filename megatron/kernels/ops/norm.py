"""LayerNorm and RMSNorm, each with a residual added first where one is given.

Bytes moved for N elements of e bytes: forward N e in and N e out, with a residual 2 N e in and 2 N e out; backward
2 N e in and N e out, with a gradient of the sum N e more in. The gradients of weight and bias come from the same pass
over the rows; their partial sums, fp32, out and in again, add at most a twelfth to that where a compute unit has 32
rows or more, and more where it has fewer.

Rows that are too wide for registers, or not made of full packs of 16 bytes, take more. Forward: above 65,536 elements
(fp32 32,768; on CUDA a quarter of either) what is normalised is read up to three times. Backward: where the sums of the
columns do not fit (above 16,384 elements, RMSNorm of 16 bits 32,768; on CUDA 16,384 and, fp32, 8,192), a second kernel
reads dy and x once more for them.

On a CPU the rows stay in its cache from one reading to the next.
"""
from __future__ import annotations

import functools
import math
from typing import Any

import torch

from megatron.kernels.checks import check, check_columns, check_device, check_shape, check_type
from megatron.kernels.library import Function, available
from megatron.kernels.register import operator

_FORWARD = Function("mk_norm", "ppppppppllffi")
_BACKWARD = Function("mk_norm_backward", "ppppppppplllfi")

_HOST_PARTS, _HOST_ROWS = 64, 32


def _check(
    name: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    given = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    check_type(name, **given)
    check_device(name, **given)
    check_columns(name, "x", x)
    check_shape(name, "residual", residual, tuple(x.shape))
    check_shape(name, "weight", weight, (x.shape[-1],))
    check_shape(name, "bias", bias, (x.shape[-1],))
    for argument, tensor in given.items():
        check(
            name, tensor is None or tensor.is_contiguous(),
            f"{argument} of strides {tensor.stride() if tensor is not None else ()} is not contiguous",
        )


def reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    one_plus: bool, rms: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same in torch's operators, in fp32 (fp64 for fp64): (y, sum, mean, rstd); mean is empty for an RMS norm."""
    total = x if residual is None else x + residual
    wide = total if total.dtype == torch.float64 else total.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide if rms else wide - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * (weight.to(wide.dtype) + float(one_plus))
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype), total, mean.new_empty(0) if rms else mean.flatten(), rstd.flatten()


def _narrow(parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A parameter in fp32, whose gradient is not to be rounded, in the type of x."""
    return parameter.to(x.dtype) if parameter.dtype == torch.float32 else parameter


def _rows(x: torch.Tensor) -> int:
    return math.prod(x.shape[:-1])  # not Size.numel(), which fixes the sizes of a compiled graph


def _forward(
    name: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
    eps: float, one_plus: bool, rms: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    weight, bias = _narrow(weight, x), None if bias is None else _narrow(bias, x)
    _check(name, x, residual, weight, bias)
    if not available(x.device) or not x.numel():
        return reference(x, residual, weight, bias, eps, one_plus, rms)
    y, total = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    mean, rstd = _statistics(x, rms)
    _FORWARD(x, y, total, mean, rstd, x, residual, weight, bias, _rows(x), x.shape[-1], eps, float(one_plus), int(rms))
    return y, total, mean, rstd


def _statistics(x: torch.Tensor, rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _rows(x)
    return x.new_empty(0 if rms else rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)


def _norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, one_plus: bool, rms: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mean, rstd = _forward("rms_norm" if rms else "layer_norm", x, None, weight, bias, eps, one_plus, rms)
    return y, mean, rstd


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    one_plus: bool, rms: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    return _forward("add_rms_norm" if rms else "add_layer_norm", x, residual, weight, bias, eps, one_plus, rms)


@functools.cache
def _compute_units(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _parts(x: torch.Tensor, rows: int, sums: int) -> int:
    """Into how many parts the rows are cut, each with its own sums: one for each block of a GPU.

    A function of the shape and the device alone, so that results are. As many blocks as the compute units hold at once,
    but fewer where their sums would be more than a twelfth of the bytes moved, down to one for each unit.
    """
    if x.device.type == "cpu":
        return min(_HOST_PARTS, -(-rows // _HOST_ROWS))
    units = _compute_units(x.device.index)
    row_bytes = x.shape[-1] * x.element_size()
    held = 4 if row_bytes <= 8192 else 2 if row_bytes <= 32768 else 1
    cheap = rows * x.element_size() // (32 * sums * units)  # 8 bytes of sums, out and in, to 3 elements of each row
    return min(units * max(1, min(held, cheap)), -(-rows // 4))


def _backward(
    dy: torch.Tensor, dsum: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor, one_plus: bool, rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of what was normalised, and, fp32 [2 or, RMS, 1, h], of weight and bias in this order."""
    weight = _narrow(weight, x)
    name = "rms_norm_backward" if rms else "layer_norm_backward"
    given = {"dy": dy, "dsum": dsum, "x": x}
    check_type(name, **given, weight=weight)
    check_device(name, **given, weight=weight, mean=mean, rstd=rstd)
    for argument, tensor in given.items():
        check_shape(name, argument, tensor, tuple(x.shape))
        check(name, tensor is None or tensor.is_contiguous(), f"{argument} is not contiguous")
    check_shape(name, "weight", weight, (x.shape[-1],))
    rows, n, sums = _rows(x), x.shape[-1], 1 if rms else 2
    types = f"mean and rstd are {mean.dtype} and {rstd.dtype}; float32 is needed"
    check(name, mean.dtype == rstd.dtype == torch.float32, types)
    check_shape(name, "mean", mean, (0 if rms else rows,))
    check_shape(name, "rstd", rstd, (rows,))
    if not available(x.device) or not x.numel():
        return _reference_backward(dy, dsum, x, weight, mean, rstd, one_plus, rms)
    dx, parameters = torch.empty_like(x), weight.new_empty(sums, n, dtype=torch.float32)
    parts = _parts(x, rows, sums)
    partial = x.new_empty(parts, sums, n, dtype=torch.float32)
    plus = float(one_plus)
    _BACKWARD(x, dx, parameters, partial, dy, dsum, x, weight, mean, rstd, rows, n, parts, plus, int(rms))
    return dx, parameters


def _reference_backward(
    dy: torch.Tensor, dsum: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor, one_plus: bool, rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, n = _rows(x), x.shape[-1]
    g, h = dy.float().reshape(rows, n), x.float().reshape(rows, n)
    rstd = rstd.unsqueeze(1)
    h = h * rstd if rms else (h - mean.unsqueeze(1)) * rstd
    parameters = [(g * h).sum(0)] if rms else [(g * h).sum(0), g.sum(0)]
    g = g * (weight.float() + float(one_plus))
    dx = rstd * (g - h * (g * h).mean(1, keepdim=True) - (0.0 if rms else g.mean(1, keepdim=True)))
    dx = dx.reshape(x.shape) if dsum is None else dx.reshape(x.shape) + dsum.float()
    return dx.to(x.dtype), torch.stack(parameters)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Inputs x, [residual,] weight, bias, eps, one_plus, rms; outputs y, [sum,] mean, rstd."""
    ctx.added = len(output) == 4
    normalised = output[1] if ctx.added else inputs[0]
    weight, bias = inputs[-5], inputs[-4]
    ctx.save_for_backward(normalised, weight, *output[-2:])
    ctx.one_plus, ctx.rms, ctx.biased = inputs[-2], inputs[-1], bias is not None
    ctx.mark_non_differentiable(*output[-2:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: torch.Tensor | None, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dsum = others[0] if ctx.added else None
    dx, dweight, dbias = dsum, None, None
    if dy is not None:
        dsum = None if dsum is None else dsum.contiguous()
        dx, parameters = _norm_backward(dy.contiguous(), dsum, x, weight, mean, rstd, ctx.one_plus, ctx.rms)
        dweight, dbias = parameters[0], parameters[-1] if ctx.biased else None
    return (*([dx, dx] if ctx.added else [dx]), dweight, dbias, None, None, None)


_norm_backward = operator(
    "norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool one_plus, bool rms)"
    " -> (Tensor, Tensor)",
    _backward,
    lambda dy, dsum, x, weight, mean, rstd, one_plus, rms: (
        torch.empty_like(x), weight.new_empty(1 if rms else 2, x.shape[-1], dtype=torch.float32)
    ),
    work="norm",
)
_norm_operator = operator(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool one_plus, bool rms) -> (Tensor, Tensor, Tensor)",
    _norm,
    lambda x, weight, bias, eps, one_plus, rms: (torch.empty_like(x), *_statistics(x, rms)),
    save=_save, backward=_gradient, work="norm",
)
_add_norm_operator = operator(
    "add_norm(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps, bool one_plus, bool rms)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _add_norm,
    lambda x, residual, weight, bias, eps, one_plus, rms: (
        torch.empty_like(x), torch.empty_like(x), *_statistics(x, rms)
    ),
    save=_save, backward=_gradient, work="norm",
)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, one_plus: bool = False
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba et al., arXiv 1607.06450).

    x [.., h], contiguous or copied; weight, bias [h], all of one type; statistics and arithmetic in fp32. The gradients
    of weight and bias are not rounded where these are given in fp32 beside x in 16 bits. With `one_plus` the gain is
    weight + 1. Raises KernelError for other types than fp32, fp16 and bf16, or other shapes.
    """
    return _norm_operator(x.contiguous(), weight, bias, eps, one_plus, False)[0]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, one_plus: bool = False) -> torch.Tensor:
    """x / sqrt(mean of x^2 + eps) * weight over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Arguments and errors as for `layer_norm`.
    """
    return _norm_operator(x.contiguous(), weight, None, eps, one_plus, True)[0]


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float,
    one_plus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`layer_norm` of sum, sum), where sum = x + residual, rounded to the type. x, residual [.., h].

    The gradients of x and residual are one tensor.
    """
    y, total, _, _ = _add_norm_operator(x.contiguous(), residual.contiguous(), weight, bias, eps, one_plus, False)
    return y, total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, one_plus: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`rms_norm` of sum, sum), where sum = x + residual, rounded to the type. x, residual [.., h].

    The gradients of x and residual are one tensor.
    """
    y, total, _, _ = _add_norm_operator(x.contiguous(), residual.contiguous(), weight, None, eps, one_plus, True)
    return y, total
