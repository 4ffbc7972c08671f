"""Checks of what an operator is given, with messages that name the argument."""
from __future__ import annotations

import torch

from megatron.errors import KernelError
from megatron.kernels.library import TYPES


def check_type(operator: str, **tensors: torch.Tensor | None) -> None:
    """All fp32, fp16 or bf16, and all the same."""
    first: tuple[str, torch.dtype] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in TYPES:
            raise KernelError(f"{operator}: {name} is {tensor.dtype}; it must be float32, float16 or bfloat16")
        if first is None:
            first = name, tensor.dtype
        elif tensor.dtype != first[1]:
            raise KernelError(f"{operator}: {name} is {tensor.dtype} but {first[0]} is {first[1]}; they must be equal")


def check_device(operator: str, **tensors: torch.Tensor | None) -> None:
    """All on one device."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise KernelError(f"{operator}: {name} is on {tensor.device} but {first[0]} on {first[1]}")


def check_shape(operator: str, name: str, tensor: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """`shape`, where the tensor is given."""
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise KernelError(f"{operator}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}")


def check_columns(operator: str, name: str, tensor: torch.Tensor) -> None:
    """At least one dimension, and fewer than 2^28 columns: GPUs count the threads of a grid in 32 bits."""
    check(operator, tensor.dim() >= 1, f"{name} has no dimension; [.., n] is needed")
    check(operator, tensor.shape[-1] < 2**28, f"{name} has {tensor.shape[-1]} columns; fewer than 2^28 are needed")


def check(operator: str, condition: bool, message: str) -> None:
    """`condition`, else a KernelError with the operator's name before the message."""
    if not condition:
        raise KernelError(f"{operator}: {message}")
