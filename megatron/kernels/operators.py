"""Register operators with torch under `torch.ops.megatron`, and check their arguments.

Each operator has an implementation for CPU and CUDA (ROCm) tensors, a rule for the shapes of its
results, so that torch.compile can trace it, and, where it has a gradient, an autograd rule. The
implementation calls the compiled kernel if there is one, and torch's own operators otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron.errors import KernelError
from megatron.kernels.library import TYPES, available
from megatron.kernels.work import Computation

_LIBRARY = torch.library.Library("megatron", "DEF")

WORK: dict[str, str | Callable[..., Computation]] = {}
"""The declared work of each operator, by name."""


def operator(
    schema: str,
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    shapes: Callable[..., Any] | None = None,
    *,
    check: Callable[..., None] | None = None,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    work: str | Callable[..., Computation] = "copy",
) -> Any:
    """Define `megatron::<schema>` and return it, ready to call.

    kernel     computes it with the compiled library: (results of `shapes`, if there are any,
               *inputs); called only if the first input is not an empty tensor
    reference  computes it with torch's operators
    shapes     makes empty results of the right shape, dtype and device; None for an operator
               without results
    check      (name, *inputs): raises KernelError if an input does not fit; None for the backward
               passes, which get what autograd and the forward pass have checked
    save       (ctx, inputs, output): keeps what the backward pass needs
    backward   (ctx, *gradients): one gradient or None for each input; a second derivative is an
               error, since torch would treat the gradients as constants
    work       the kind of a memory-bound kernel that reads its inputs and writes its results once
               (work.Memory), or (inputs) -> its work if that is not enough
    """
    name = schema.partition("(")[0]

    def run(*inputs: Any) -> Any:
        if check is not None:
            check(name, *inputs)
        first = inputs[0]
        if isinstance(first, Tensor):
            compiled = available(first.device) and first.numel() > 0
        else:
            compiled = available(first[0].device)
        if not compiled:
            return reference(*inputs)
        if shapes is None:
            return kernel(*inputs)
        results = shapes(*inputs)
        kernel(results, *inputs)
        return results

    WORK[name] = work
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"megatron::{name}", shapes or (lambda *_: None), lib=_LIBRARY)
    if backward is not None:
        differentiate = backward

        def once(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
                raise KernelError(
                    f"{name} has no second derivative; use torch's own operators where one is "
                    "needed"
                )
            return differentiate(ctx, *gradients)

        torch.library.register_autograd(f"megatron::{name}", once, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.megatron, name).default


def empty_like_first(first: Tensor, *_: Any) -> Tensor:
    """Return an empty result like the first input: the rule of shapes of many operators."""
    return torch.empty_like(first)


def narrow(parameter: Tensor, x: Tensor) -> Tensor:
    """Convert a parameter in fp32, whose gradient is not to be rounded, to the type of x."""
    return parameter.to(x.dtype) if parameter.dtype == torch.float32 else parameter


# -- checks ----------------------------------------------------------------------------------------


def check(operator: str, condition: bool, message: str) -> None:
    """Raise a KernelError with the operator's name unless `condition` holds."""
    if not condition:
        raise KernelError(f"{operator}: {message}")


def check_type(
    operator: str, allowed: Iterable[torch.dtype] = TYPES, **tensors: Tensor | None
) -> None:
    """Check that the tensors have one type, one of `allowed`."""
    types = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(types), "")
    for name, dtype in types.items():
        if dtype not in allowed:
            names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
            raise KernelError(f"{operator}: {name} is {dtype}; it must be {names}")
        if dtype != types[first]:
            raise KernelError(
                f"{operator}: {name} is {dtype} but {first} is {types[first]}; they must be equal"
            )


def check_device(operator: str, **tensors: Tensor | None) -> None:
    """Check that the tensors are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(devices))
    for name, device in devices.items():
        if device != devices[first]:
            raise KernelError(f"{operator}: {name} is on {device} but {first} on {devices[first]}")


def check_contiguous(operator: str, **tensors: Tensor | None) -> None:
    """Check that the tensors are contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(f"{operator}: {name} of strides {tensor.stride()} is not contiguous")


def check_shape(operator: str, shape: Iterable[int], **tensors: Tensor | None) -> None:
    """Check that each of the tensors has this shape."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise KernelError(
                f"{operator}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}"
            )


def check_all(operator: str, **tensors: Tensor | None) -> None:
    """Check that the tensors have one floating type, are on one device, contiguous, and not a
    single number.
    """
    check_type(operator, TYPES, **tensors)
    check_device(operator, **tensors)
    check_contiguous(operator, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() == 0:
            raise KernelError(f"{operator}: {name} has no dimension; [.., n] is needed")


def check_beside(
    operator: str, x: Tensor, allowed: Iterable[torch.dtype], **tensors: Tensor | None
) -> None:
    """Check that the tensors have one type, one of `allowed`, are on the device of x, and
    contiguous.
    """
    check_type(operator, allowed, **tensors)
    check_device(operator, x=x, **tensors)
    check_contiguous(operator, **tensors)


# -- sums over rows --------------------------------------------------------------------------------

# least rows of a part: its sums, 8 bytes a column, stay below 6 % of what it reads and writes
PART_ROWS = 32
# of 256 threads: more than two for each place that 110 (MI250X) or 132 (H100) compute units have
_BLOCKS = 2048
HOST_PARTS = 64  # more than threads


def partial_sums(like: Tensor, wanted: bool, sums: int = 1) -> tuple[int, Tensor | None]:
    """Return how many parts the rows of `like` are divided into, and memory for their sums: fp32
    [parts, sums, n].

    Each part's sums are added up afterwards, as for the gradient of a bias. The number of parts
    depends on the shape and the kind of device alone, not on threads or compute units, so that
    results are reproducible.

    sums    how many sums each column has
    wanted  if false, there is nothing to sum: (0, None)
    """
    if not wanted:
        return 0, None
    columns = like.shape[-1]
    # blocks of 64 lanes of 16 bytes side by side
    across = -(-columns * like.element_size() // (16 * 64))
    most = HOST_PARTS if like.device.type == "cpu" else max(1, _BLOCKS // across)
    parts = max(1, min(most, -(-like.numel() // columns // PART_ROWS)))
    return parts, torch.empty(parts, sums, columns, dtype=torch.float32, device=like.device)
