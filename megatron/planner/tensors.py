"""Operators on tensors without data: answers in place of values, and messages that go nowhere.

A GPU's tensors are torch's meta tensors, a CPU's are fake ones (torch._subclasses.fake_tensor), because the code
decides by the device of a tensor what it does. Everything torch is asked passes through `Operators`.
"""
from __future__ import annotations

import contextlib
import importlib
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_VALUE = 1.0
"""What a number reads as that no tensor has: finite, so that no step is skipped."""


class Operators(TorchDispatchMode):
    """Lets operators run on tensors without data. Who follows them extends `run`, `sent` and `arrived`."""

    def __init__(self) -> None:
        super().__init__()
        self._works: dict[int, Work] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds, to keep it away from here, at each operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return self._communicate(func, args)
        if func is _aten._local_scalar_dense.default and is_empty(args[0]):
            return _number(args[0].dtype)
        if func is _aten.equal.default and is_empty(args[0]):
            return True
        if func is _aten._fused_sgd_.default and is_empty(args[0][0]):
            return None  # torch has no rule for it; it makes nothing
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute an operator."""
        return func(*args, **kwargs)

    def sent(self, name: str, args: Any, tensors: list[torch.Tensor], work: Work) -> None:
        """A message was posted: torch's name for it, and the tensors that it reads and writes."""

    def arrived(self, work: Work) -> None:
        """Somebody waits for a message."""

    def _communicate(self, func: Any, args: Any) -> Any:
        tensors = [t for t in flat(args) if isinstance(t, torch.Tensor)]
        # What is on its way holds its tensors until somebody waits for it; nothing arrives before.
        work = Work(tensors, self._works, self.arrived)
        self._works[id(work)] = work
        self.sent(func._schema.name.partition("::")[2].rstrip("_"), args, tensors, work)
        return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())


class Work(dist.Work):
    """The handle of a message that is there once it is waited for."""

    def __init__(self, tensors: list[torch.Tensor], alive: dict[int, Any], arrived: Any) -> None:
        super().__init__()
        self._tensors, self._alive, self._arrived, self._done = tensors, alive, arrived, False

    def wait(self, timeout: Any = None) -> bool:
        self._tensors, self._done = [], True
        self._arrived(self)
        self._alive.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        return self._done


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _number(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return _VALUE if dtype.is_floating_point else int(_VALUE)


def flat(values: Any) -> Iterator[Any]:
    """The items of nested lists and tuples."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from flat(value)
        else:
            yield value


def _fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention as a GPU does it, in one kernel that keeps no scores: without a mask and in 16 bits
    flash attention, else the memory-efficient one. Of meta tensors torch would take the explicit softmax."""
    if attn_mask is None and q.dtype != torch.float32:
        out: torch.Tensor = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return out
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    keep = torch.is_grad_enabled()
    found: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, keep, dropout_p, is_causal, scale=scale
    )[0]
    return found


def _apply(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
    """torch.nn.Module._apply as it is for tensors with data: parameters stay the same objects.

    For fake ones torch puts new objects in their place, without the attributes that hang on the old ones.
    """
    for each in module.modules() if recurse else [module]:
        with torch.no_grad():
            for p in each._parameters.values():
                if p is not None:
                    p.data = function(p)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = function(buffer)
    return module


def _passes(*_: Any, **__: Any) -> None:
    """In place of torch's check that a fused optimizer has the device's operator."""


@contextlib.contextmanager
def without_data(device: str, operators: Operators) -> Iterator[None]:
    """Inside, tensors on `device` ("cpu", or "meta" for a GPU) have no data, and `operators` run."""
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            # DeepSpeed asks for the alignment of its flat weights, which is that of address 0 here.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(unittest.mock.patch.object(torch.nn.Module, "_apply", _apply))
        else:
            # Our layers look it up there at each call. A mode for torch's functions is off in backward passes.
            place = torch.nn.functional
            stack.enter_context(unittest.mock.patch.object(place, "scaled_dot_product_attention", _fused_attention))
        sgd = importlib.import_module("torch.optim.sgd")  # which torch takes out of its package
        stack.enter_context(unittest.mock.patch.object(sgd, "_device_dtype_check_for_fused", _passes))
        stack.enter_context(operators)
        yield
