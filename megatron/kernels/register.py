"""Registers operators with torch under `torch.ops.megatron`.

Each has an implementation for CPU and CUDA (ROCm) tensors, a rule for the shapes of its results, so that torch.compile
passes through it, and where it has a gradient, an autograd rule. An implementation calls the compiled kernel where
there is one and torch's own operators where there is none.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.errors import KernelError
from megatron.kernels.work import Computation

_LIBRARY = torch.library.Library("megatron", "DEF")

WORK: dict[str, str | Callable[..., Computation]] = {}
"""What each operator says of its work, by name."""


def _once(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise KernelError(f"{name} has no second derivative; use torch's own operators where one is needed")
        return backward(ctx, *gradients)

    return run


def operator(
    schema: str, run: Callable[..., Any], shapes: Callable[..., Any], *,
    save: Callable[..., None] | None = None, backward: Callable[..., Any] | None = None, twice: bool = False,
    work: str | Callable[..., Computation] = "copy",
) -> Any:
    """Define `megatron::<schema>` and return it, ready to call.

    run       computes it, on any device
    shapes    makes empty results of the right shape, dtype and device
    save      (ctx, inputs, output): keeps what the backward pass needs
    backward  (ctx, *gradients): one gradient or None for each input
    twice     the backward pass has a gradient of its own; a second derivative of the others is an error, as torch would
              take their results for constants
    work      the kind of a memory-bound kernel that reads its inputs and writes its results once (work.Memory), or
              (inputs) -> its work where that says too little
    """
    name = schema.partition("(")[0]
    WORK[name] = work
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"megatron::{name}", shapes, lib=_LIBRARY)
    if backward is not None:
        backward = backward if twice else _once(name, backward)
        torch.library.register_autograd(f"megatron::{name}", backward, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.megatron, name).default
