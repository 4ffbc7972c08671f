"""Torch's operators, as a test sees them run: forward, backward and within our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Look = Callable[[str, tuple[Any, ...], list[torch.Tensor]], object]


class OperatorWatch(TorchDispatchMode):
    """Call `look(name, arguments, tensors returned)` after each operator."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self._look(func.overloadpacket.__name__, args, returned)
        return out
