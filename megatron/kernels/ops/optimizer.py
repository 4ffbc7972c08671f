"""AdamW over many tensors, and scaling of many tensors with the sum of their squares; one pass each.

Bytes moved for N elements. AdamW with gradients of g bytes: in 12 N (weights, both moments) + g N, out 12 N, and 2 N
more where the weights have a 16-bit copy. Scaling of elements of e bytes: in N e, out N e; without a factor only in.
"""
from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from megatron.kernels.checks import check
from megatron.kernels.library import TYPES, Function, available
from megatron.kernels.register import operator

_ADAMW = Function("mk_adamw", "ippllpffffff")
_SCALE_AND_NORM = Function("mk_scale_and_norm", "ppppllf")

# Each block has a chunk of a tensor: `_SMALLEST` elements (csrc/kernels/tensor_list.h wants a multiple of it), more
# where there would be too many blocks. The norm leaves a number for each, which one block adds up.
_SMALLEST, _MOST_UPDATES, _MOST_SUMS = 4096, 1 << 18, 1 << 14

Tensors = Sequence[torch.Tensor]


def _chunk(sizes: Sequence[int], most: int) -> int:
    """Elements of a chunk, so that there are about `most` chunks or fewer."""
    chunk, total = _SMALLEST, sum(sizes)
    while total > chunk * most:
        chunk *= 2
    return chunk


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _check_list(name: str, what: str, tensors: Tensors, like: Tensors, dtypes: Sequence[torch.dtype]) -> None:
    """One dtype out of `dtypes`, contiguous, and as `like` in number, shapes and device."""
    check(name, len(tensors) == len(like), f"there are {len(tensors)} {what} for {len(like)} tensors")
    device, dtype = like[0].device, tensors[0].dtype
    allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    check(name, dtype in dtypes, f"{what}[0] is {dtype}; it must be {allowed}")
    for i, (tensor, model) in enumerate(zip(tensors, like, strict=True)):
        if tensor.dtype != dtype:
            check(name, False, f"{what}[{i}] is {tensor.dtype} but {what}[0] is {dtype}; they must be equal")
        if tensor.device != device:
            check(name, False, f"{what}[{i}] is on {tensor.device} but the first tensor on {device}")
        if tensor.shape != model.shape:
            check(name, False, f"{what}[{i}] has shape {list(tensor.shape)}; it must be {list(model.shape)}")
        if not tensor.is_contiguous():
            check(name, False, f"{what}[{i}] of strides {tensor.stride()} is not contiguous")


# -- AdamW -------------------------------------------------------------------------------------------------------------


def adamw_reference_(
    parameters: Tensors, gradients: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: torch.Tensor,
) -> None:
    """The same with torch's fused AdamW: what serves where there is no kernel."""
    wide = list(torch._foreach_mul([g.float() for g in gradients], gradient_scale))
    steps = [torch.full((), float(step), device=p.device) for p in parameters]
    torch._fused_adamw_(
        list(parameters), wide, list(exp_avgs), list(exp_avg_sqs), [], steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        found_inf=torch.isfinite(gradient_scale).logical_not().float(),
    )  # fmt: skip
    if copies:
        torch._foreach_copy_(list(copies), list(parameters))


@torch.no_grad()
def _run_adamw(
    parameters: Tensors, gradients: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, step: int, gradient_scale: torch.Tensor,
) -> None:
    name = "adamw_"
    _check_list(name, "parameters", parameters, parameters, [torch.float32])
    _check_list(name, "gradients", gradients, parameters, list(TYPES))
    _check_list(name, "exp_avgs", exp_avgs, parameters, [torch.float32])
    _check_list(name, "exp_avg_sqs", exp_avg_sqs, parameters, [torch.float32])
    if copies:
        _check_list(name, "copies", copies, parameters, [torch.float16, torch.bfloat16])
    check(name, 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0, f"betas ({beta1}, {beta2}) must lie in [0, 1)")
    check(name, step >= 1, f"step is {step}; the first is 1")
    first, scale = parameters[0], gradient_scale
    fits = scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == first.device
    found = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
    check(name, fits, f"gradient_scale is {found}; it must be one fp32 number on {first.device}")
    if not available(first.device):
        adamw_reference_(
            parameters, gradients, exp_avgs, exp_avg_sqs, copies, lr, beta1, beta2, eps, weight_decay, step,
            gradient_scale,
        )  # fmt: skip
        return
    sizes = [p.numel() for p in parameters]
    lists = (parameters, gradients, exp_avgs, exp_avg_sqs, copies or parameters)  # without copies that row is not read
    _ADAMW(
        first, TYPES[copies[0].dtype] if copies else -1, _array([t.data_ptr() for tensors in lists for t in tensors]),
        _array(sizes), len(sizes), _chunk(sizes, _MOST_UPDATES), gradient_scale, 1.0 - beta1, 1.0 - beta2,
        lr / (1.0 - beta1**step), 1.0 / math.sqrt(1.0 - beta2**step), eps, lr * weight_decay, type_of=gradients[0],
    )  # fmt: skip


_adamw_ = operator(
    "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] copies, float lr, float beta1, float beta2, float eps, float weight_decay, SymInt step, "
    "Tensor gradient_scale) -> ()",
    _run_adamw, lambda *_: None,
)  # fmt: skip


@torch.no_grad()
def adamw_(
    parameters: Tensors, gradients: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, copies: Tensors | None = None, *,
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
    gradient_scale: float | torch.Tensor = 1.0,
) -> None:
    """One step of AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) on lists of tensors.

    It is torch.optim.AdamW's: the weight decay is multiplied by `lr`.

    parameters, exp_avgs, exp_avg_sqs   fp32
    gradients        fp32, fp16 or bf16, all of one type; multiplied by `gradient_scale` before use
    gradient_scale   a number, or one fp32 number on the device; where it is not finite the step is skipped: nothing is
                     written
    copies           fp16 or bf16 tensors that get the new weights, rounded; None where there are none
    step             counts from 1: the bias correction is that of `step` steps

    Tensors at one place of the lists have one shape; all are contiguous and on one device. Empty lists and tensors are
    allowed. Raises KernelError.

    torch.compile takes lr as a constant and would compile again for each value: call it outside.
    """
    if parameters or gradients or exp_avgs or exp_avg_sqs or copies:
        check("adamw_", bool(parameters), "there are no parameters for the other lists")
        check("adamw_", bool(gradients and exp_avgs and exp_avg_sqs), "a list is empty but there are parameters")
        if not isinstance(gradient_scale, torch.Tensor):
            gradient_scale = torch.full((), gradient_scale, dtype=torch.float32, device=parameters[0].device)
        _adamw_(
            parameters, gradients, exp_avgs, exp_avg_sqs, copies or [], lr, beta1, beta2, eps, weight_decay, step,
            gradient_scale,
        )  # fmt: skip


# -- scaling and norm --------------------------------------------------------------------------------------------------


def scale_and_norm_reference_(tensors: Tensors, factor: float) -> torch.Tensor:
    """The same in torch's operators: what serves where there is no kernel."""
    if factor != 1.0:
        torch._foreach_mul_(list(tensors), factor)
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(norms).square().sum().float()


@torch.no_grad()
def _run_scale_and_norm(tensors: Tensors, factor: float) -> torch.Tensor:
    _check_list("scale_and_norm_", "tensors", tensors, tensors, list(TYPES))
    first = tensors[0]
    if not available(first.device):
        return scale_and_norm_reference_(tensors, factor)
    sizes = [t.numel() for t in tensors]
    chunk = _chunk(sizes, _MOST_SUMS)
    parts = sum(-(-size // chunk) for size in sizes)
    partial = torch.empty(parts, dtype=torch.float64, device=first.device)
    out = torch.empty((), dtype=torch.float32, device=first.device)
    pointers = _array([t.data_ptr() for t in tensors])
    _SCALE_AND_NORM(first, out, partial, pointers, _array(sizes), len(sizes), chunk, factor)
    return out


_scale_and_norm_ = operator(
    "scale_and_norm_(Tensor(a!)[] tensors, float factor) -> Tensor", _run_scale_and_norm,
    lambda tensors, factor: tensors[0].new_empty((), dtype=torch.float32),
)


@torch.no_grad()
def scale_and_norm_(tensors: Tensors, factor: float = 1.0) -> torch.Tensor:
    """Multiply all tensors by `factor` in place and return the sum of squares of what they then hold.

    tensors  fp32, fp16 or bf16, all of one type, contiguous and on one device; some may be empty

    The sum is taken in fp64 and in a fixed order: the same bits every time. It comes as a 0-dimensional fp32 tensor on
    the tensors' device, NaN or infinite where an element is, and infinite above 3.4e38;
    without a copy to the host. An empty list gives 0, on the
    CPU. With a factor of 1 nothing is written. Raises KernelError.
    """
    if not tensors:
        return torch.zeros(())
    return _scale_and_norm_(tensors, float(factor))
