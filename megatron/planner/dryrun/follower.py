"""Record of one rank's allocations and messages in a dry run, and checks of the messages."""

from __future__ import annotations

import contextlib
import itertools
import unittest.mock
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.parallel.flight import FlightRecorder
from megatron.pipeline.orders import COMPUTE, RECEIVES, SENDS, Instruction, Op
from megatron.planner import tensors
from megatron.planner.events import Give, Take
from megatron.planner.tensors import Work


class Finding(NamedTuple):
    """Problem of a rank.

    kind  "memory", "messages" or "error" (the code could not run)
    """

    kind: str
    rank: int
    text: str


class Message(NamedTuple):
    """Message between two pipeline ranks, as posted by one of them."""

    instruction: Instruction
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} ({self.instruction})"


class Collective(NamedTuple):
    """Collective of a group, as posted by one member.

    shapes   of inputs, then of outputs
    content  the dtype, or the value if it is not a tensor
    """

    call: str
    shapes: tuple[tuple[int, ...], ...]
    content: str

    def __str__(self) -> str:
        return (
            f"{self.call} {' -> '.join(str(list(shape)) for shape in self.shapes)} of "
            f"{self.content}"
        )


Collectives = Mapping[tuple[int, ...], Sequence[Collective]]
"""Collectives of one rank in order, by the ranks of their group."""


def check_messages(
    rank: int,
    posted: Sequence[Message],
    plan: Sequence[Instruction],
    shape: tuple[int, ...],
    dtype: str,
) -> list[Finding]:
    """Find a rank's first message that differs from its schedule, or from this shape and dtype.

    Messages have no tags: the n-th that one rank sends to another is the n-th that the other
    receives from it. The lists of a schedule match each other (pipeline/schedule.py), so it is
    enough to compare each rank with its list.
    """
    expected = [Message(i, shape, dtype) for i in plan if i.op in SENDS | RECEIVES]
    for n, (here, there) in enumerate(itertools.zip_longest(posted, expected), 1):
        if here != there:
            text = (
                f"its message {n} is {here or 'missing'}, but the other rank expects "
                f"{there or 'none'}"
            )
            return [Finding("messages", rank, text)]
    return []


def check_collectives(posted: Mapping[int, Collectives]) -> list[Finding]:
    """Find the first differing collective of each two ranks that share a group."""
    findings = []
    for (a, of_a), (b, of_b) in itertools.combinations(sorted(posted.items()), 2):
        for group in dict.fromkeys((*of_a, *of_b)):
            if a not in group or b not in group:
                continue
            for n, (x, y) in enumerate(
                itertools.zip_longest(of_a.get(group, ()), of_b.get(group, ())), 1
            ):
                if x != y:
                    ranks = ", ".join(map(str, group[:4])) + (
                        f", ... {group[-1]}" if len(group) > 4 else ""
                    )
                    text = f"collective {n} in the group of ranks {ranks} is {x or 'missing'}"
                    findings.append(Finding("messages", a, f"{text}, on rank {b} {y or 'missing'}"))
                    break
    return findings


_aten = torch.ops.aten


class Follower(tensors.Follower):
    """Record allocations, releases and messages.

    device       "cpu", or "meta" for a GPU
    steps        in order; a storage that changes its category is released and allocated again
    shapes       of storages, by number
    alive        storages by number
    messages, collectives   what was posted, collectives by group
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.steps: list[Take | Give] = []
        self.shapes: dict[int, str] = {}
        self.alive: dict[int, Take] = {}
        self.messages: list[Message] = []
        self.collectives: dict[tuple[int, ...], list[Collective]] = {}
        self.flight = _Flight(self)
        self.last_stage, self.rows = -1, -1
        self._now = Instruction(Op.FORWARD, 0, 0)
        self._received: dict[Instruction, Any] = {}
        self._calls: dict[str, list[Collective]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        to = _type(kwargs.get("device"))
        to_host = (
            self.device == "meta"
            and func is _aten._to_copy.default
            and args[0].is_meta
            and to == "cpu"
        )
        if to_host:
            kwargs = {**kwargs, "device": torch.device("meta")}
        out = func(*args, **kwargs)
        # Neither host memory counts, nor tensors in which DeepSpeed keeps shapes, on any device.
        self.see(
            out, counts=not to_host and not (func is _aten.zeros_like.default and to == "meta")
        )
        return out

    def taken(self, step: Take, tensor: torch.Tensor) -> None:
        self.steps.append(step)
        self.alive[step.id] = step
        self.shapes[step.id] = f"{list(tensor.shape)} {_word(tensor.dtype)}"

    def given(self, step: Give) -> None:
        if self.alive.pop(step.id, None) is not None:
            self.steps.append(step)

    def move(self, moved: Iterable[torch.Tensor], category: str) -> None:
        """Move the storages of these tensors to another category."""
        for tensor in moved:
            step = self.alive.get(self.number_of(tensor) or 0)
            if step is not None and step.category != category:
                self.alive[step.id] = step._replace(category=category)
                self.steps += [Give(step.id), self.alive[step.id]]

    def begin(self, this: Instruction) -> None:
        """Count further allocations under the category of this instruction."""
        self._now, self.vocabulary = this, -1
        if this.op is Op.FORWARD:
            self.category = "activations"
            self._use(Instruction(Op.RECV_FORWARD, this.stage, this.micro_batch))
        elif this.op in COMPUTE:
            self.category = "temporary"
            self._use(Instruction(Op.RECV_BACKWARD, this.stage, this.micro_batch))
            self.vocabulary = self.rows if this.stage == self.last_stage else -1
        else:
            self.category = "buffers"

    def _use(self, receive: Instruction) -> None:
        tensor = self._received.pop(receive, lambda: None)()
        if tensor is not None:
            self.move([tensor], self.category)

    # -- messages ----------------------------------------------------------------------------------

    def sent(self, name: str, args: Any, posted: list[torch.Tensor], work: Work) -> None:
        group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
        if name in ("send", "recv"):
            self.messages.append(Message(self._now, tuple(posted[0].shape), _word(posted[0].dtype)))
            self.move(posted, "buffers")
            if name == "recv":
                self._received[self._now] = weakref.ref(posted[0])
        else:
            shapes = tuple(tuple(t.shape) for t in posted[:2])
            self._of(group).append(
                Collective(name, shapes, _word(posted[0].dtype) if posted else "")
            )

    def gather_objects(self, found: list[Any], mine: Any, group: Any = None) -> None:
        """Replace dist.all_gather_object: all members give this rank's value; compared later."""
        self._of(dist.group.WORLD if group is None else group).append(
            Collective("all_gather_object", (), repr(mine))
        )
        found[:] = [mine] * len(found)

    def _of(self, group: Any) -> list[Collective]:
        name = group.group_name  # query its ranks only once: there may be 75,000
        if name not in self._calls:
            self._calls[name] = self.collectives.setdefault(
                tuple(dist.get_process_group_ranks(group)), []
            )
        return self._calls[name]


class _Flight(FlightRecorder):
    """Flight recorder that forwards the executor's instructions."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def instruction(self, name: bytes, stage: int, micro_batch: int) -> None:
        super().instruction(name, stage, micro_batch)
        self._follower.begin(Instruction(Op[name.decode()], stage, micro_batch))

    def computed(self) -> None:
        super().computed()
        self._follower.category = "temporary"
        self._follower.vocabulary = -1


def _type(device: Any) -> str:
    return "" if device is None else torch.device(device).type


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def followed(follower: Follower) -> Iterator[None]:
    """Record operations on tensors of the follower's device; they have no data in this context."""
    gather = unittest.mock.patch.object(dist, "all_gather_object", follower.gather_objects)
    with gather, tensors.without_data(follower.device, follower):
        yield
