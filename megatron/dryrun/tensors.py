"""The operators of a rank on tensors without data: what they allocate, whom they reach, and answers in place of values.

A GPU's tensors are torch's meta tensors, a CPU's are fake ones (torch._subclasses.fake_tensor), because the code
decides by the device of a tensor what it does. Everything torch is asked passes through `Operators`.
"""
from __future__ import annotations

import contextlib
import importlib
import unittest.mock
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.dryrun.memory import Memory
from megatron.dryrun.messages import Collective, Log, Message
from megatron.pipeline.instructions import Instruction, Op

_aten = torch.ops.aten
_VALUE = 1.0
"""What a number reads as that no tensor has: finite, so that no step is skipped."""


class Operators(TorchDispatchMode):
    """Follows what operators return; keeps a log of the messages.

    device   "meta" or "cpu"
    memory   of the device; `host` where the device is not the host
    """

    def __init__(self, device: str, memory: Memory, host: Memory, log: Log) -> None:
        super().__init__()
        self.device, self.memory, self.host, self.log = device, memory, host, log
        self._nowhere = Memory(1)
        self.vocabulary = -1  # length of the last dimension of logits, while there are some
        self.instruction = Instruction(Op.FORWARD, 0, 0)
        self._received: dict[Instruction, Any] = {}
        self._works: dict[int, _Work] = {}
        self._members: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args)
        if func is _aten._local_scalar_dense.default and _empty(args[0]):
            return _number(args[0].dtype)
        if func is _aten.equal.default and _empty(args[0]):
            return True
        if func is _aten._fused_sgd_.default and _empty(args[0][0]):
            return None  # torch has no rule for it; it makes nothing
        to_host = self.device == "meta" and func is _aten._to_copy.default and args[0].is_meta
        if to_host := to_host and _named(kwargs.get("device")) == "cpu":
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        memory = self.host if to_host else self.memory
        if func is _aten.zeros_like.default and _named(kwargs.get("device")) == "meta":
            memory = self._nowhere  # DeepSpeed keeps shapes in such tensors, on any device
        if isinstance(out, torch.Tensor):
            self._see(out, memory)
        elif isinstance(out, (tuple, list)):
            for each in out:
                if isinstance(each, torch.Tensor):
                    self._see(each, memory)
        return out

    def _see(self, out: torch.Tensor, memory: Memory) -> None:
        if not _empty(out):
            return
        if self.host.knows(out) or self._nowhere.knows(out):
            return
        if self.vocabulary > 0 and out.dim() >= 2 and out.shape[-1] == self.vocabulary and memory is self.memory:
            before, memory.category = memory.category, "logits"
            memory.see(out)
            memory.category = before
            return
        memory.see(out)

    def take(self, receive: Instruction, category: str) -> None:
        """What this instruction received is used now, and counted under `category`."""
        tensor = self._received.pop(receive, lambda: None)()
        if tensor is not None:
            self.memory.move([tensor], category)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _communicate(self, func: Any, args: Any) -> Any:
        name = func._schema.name.partition("::")[2].rstrip("_")
        tensors = [t for t in _flat(args) if isinstance(t, torch.Tensor)]
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        ranks = self._ranks(dist.ProcessGroup.unbox(group))
        if name in ("send", "recv"):
            (tensor,) = tensors
            peer = ranks[args[2]]
            self.log.messages.append(Message(self.instruction, peer, tuple(tensor.shape), _word(tensor.dtype)))
            self.memory.move(tensors, "buffers")
            if name == "recv":
                self._received[self.instruction] = weakref.ref(tensor)
        else:
            shapes = tuple(tuple(t.shape) for t in tensors[:2])
            self.log.collectives.append(Collective(name, ranks, shapes, _word(tensors[0].dtype) if tensors else ""))
        work = self._work(tensors).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def gather_objects(self, found: list[Any], mine: Any, group: Any = None) -> None:
        """In place of dist.all_gather_object: every member has the same to say. What it was is compared later."""
        ranks = self._ranks(dist.group.WORLD if group is None else group)
        self.log.collectives.append(Collective("all_gather_object", ranks, (), repr(mine)))
        found[:] = [mine] * len(ranks)

    def _ranks(self, group: Any) -> list[int]:
        """The same list for the same group: one may have 75,000 members."""
        name = group.group_name
        if name not in self._members:
            self._members[name] = dist.get_process_group_ranks(group)
        return self._members[name]

    def _work(self, tensors: list[torch.Tensor]) -> _Work:
        """What is on its way holds its tensors until somebody waits for it; nothing arrives before."""
        work = _Work(tensors, self._works)
        self._works[id(work)] = work
        return work


class _Work(dist.Work):
    """The handle of a message that is there once it is waited for."""

    def __init__(self, tensors: list[torch.Tensor], alive: dict[int, Any]) -> None:
        super().__init__()
        self._tensors, self._alive, self._done = tensors, alive, False

    def wait(self, timeout: Any = None) -> bool:
        self._tensors, self._done = [], True
        self._alive.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        return self._done


def _empty(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _number(dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return False
    return _VALUE if dtype.is_floating_point else int(_VALUE)


def _named(device: Any) -> str:
    return "" if device is None else torch.device(device).type


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
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
def without_data(device: str, memory: Memory, host: Memory, log: Log) -> Iterator[Operators]:
    """Inside, tensors on `device` ("cpu", or "meta" for a GPU) have no data, and what is done with them is followed."""
    operators = Operators(device, memory, host, log)
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
        stack.enter_context(unittest.mock.patch.object(dist, "all_gather_object", operators.gather_objects))
        yield stack.enter_context(operators)
