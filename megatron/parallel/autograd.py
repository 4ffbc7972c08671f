"""Typed autograd functions that have only a first derivative, and their context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Context(Protocol):
    """The first argument of both passes; the forward pass sets attributes for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...


class Node(torch.autograd.Function):
    """Base of functions without a second derivative: torch raises an error if one is needed."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *inputs: object) -> Tensor: ...

    def __init_subclass__(cls) -> None:
        cls.backward = staticmethod(once_differentiable(cls.backward))  # type: ignore[assignment]
