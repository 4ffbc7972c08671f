"""torch's optimizers without what they do for torch's compiler.

torch marks methods of its optimizers as not to be traced. To do so it imports the compiler when they are first called,
which takes a process half as long as importing torch itself. Nothing here is ever traced, so the methods are taken as
they are below the marks.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch


class Untraced:
    """To be named before torch.optim.Optimizer, or an optimizer of torch's, among the bases of a class."""

    add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def untraced_step(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The method `step` of one of torch's optimizers; like that one it records no gradients."""
    return torch.no_grad()(inspect.unwrap(optimizer.step))


class AdamW(Untraced, torch.optim.AdamW):
    """torch.optim.AdamW."""

    step = untraced_step(torch.optim.AdamW)


class SGD(Untraced, torch.optim.SGD):
    """torch.optim.SGD."""

    step = untraced_step(torch.optim.SGD)
