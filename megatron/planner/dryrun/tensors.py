"""The operators of a rank on tensors without data: what they allocate and whom they reach."""
from __future__ import annotations

import contextlib
import unittest.mock
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.pipeline.instructions import Instruction, Op
from megatron.planner import tensors as planning
from megatron.planner.dryrun.memory import Memory
from megatron.planner.dryrun.messages import Collective, Log, Message
from megatron.planner.tensors import Work, is_empty

_aten = torch.ops.aten


class Operators(planning.Operators):
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
        self._members: dict[str, list[int]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        to_host = self.device == "meta" and func is _aten._to_copy.default and args[0].is_meta
        if to_host := to_host and _named(kwargs.get("device")) == "cpu":
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        memory = self.host if to_host else self.memory
        if func is _aten.zeros_like.default and _named(kwargs.get("device")) == "meta":
            memory = self._nowhere  # DeepSpeed keeps shapes in such tensors, on any device
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self._see(each, memory)
        return out

    def _see(self, out: torch.Tensor, memory: Memory) -> None:
        if not is_empty(out):
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

    def sent(self, name: str, args: Any, tensors: list[torch.Tensor], work: Work) -> None:
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


def _named(device: Any) -> str:
    return "" if device is None else torch.device(device).type


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def without_data(device: str, memory: Memory, host: Memory, log: Log) -> Iterator[Operators]:
    """Inside, tensors on `device` ("cpu", or "meta" for a GPU) have no data, and what is done with them is followed."""
    operators = Operators(device, memory, host, log)
    gather = unittest.mock.patch.object(dist, "all_gather_object", operators.gather_objects)
    with gather, planning.without_data(device, operators):
        yield operators
