"""In what two checkpoints differ, tensor by tensor; the layouts that wrote them do not matter."""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint.inspect import PART, Contents, Count, matching, no_count
from megatron.checkpoint.reader import read_whole

Change = tuple[str, Any, Any]
"""Name, value in the first checkpoint, value in the second; ABSENT where it is missing."""
ABSENT = "(absent)"


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor of two checkpoints is apart.

    elements     whose bits differ
    of           elements of the tensor
    largest      the largest absolute difference; inf where one of them is not finite
    relative     Euclidean norm of the difference over that of the first; inf where that is 0 or not finite
    """

    elements: int
    of: int
    largest: float
    relative: float


@dataclass(frozen=True)
class Difference:
    """Of two checkpoints: tensors that are in one of them only, that have another shape or dtype, or other values;
    settings, and what else is kept of a run. `equal` is the number of tensors that are the same to the bit."""

    only_first: list[str]
    only_second: list[str]
    kinds: list[Change]
    tensors: dict[str, TensorDifference]
    equal: int
    settings: list[Change]
    state: list[Change]

    @property
    def same(self) -> bool:
        """Whether tensors and state are the same; settings may differ."""
        return not (self.only_first or self.only_second or self.kinds or self.tensors or self.state)


def compare(first: Contents, second: Contents, pattern: str | None = None, count: Count = no_count) -> Difference:
    """Compare two checkpoints; only tensors that `pattern` matches. Two whole tensors are in memory at a time.

    count   hears how many bytes were read

    Raises CheckpointError naming the file that is damaged.
    """
    names, others = matching(first, pattern), set(matching(second, pattern))
    kinds: list[Change] = []
    tensors: dict[str, TensorDifference] = {}
    equal = 0
    for name in names:
        if name not in others:
            continue
        ours, theirs = first.stored[name], second.stored[name]
        if (ours["shape"], ours["dtype"]) != (theirs["shape"], theirs["dtype"]):
            kinds.append((name, f"{ours['shape']} {ours['dtype']}", f"{theirs['shape']} {theirs['dtype']}"))
            continue
        a, b = read_whole(first.folder, name, first.stored), read_whole(second.folder, name, second.stored)
        count(sum(box[4] for entry in (ours, theirs) for box in entry["boxes"]))
        apart = tensor_difference(a, b)
        if apart is None:
            equal += 1
        else:
            tensors[name] = apart
    return Difference(
        [name for name in names if name not in others], sorted(others - set(names)), kinds, tensors, equal,
        changes(first.checkpoint.config, second.checkpoint.config),
        changes(_lasting(first.checkpoint.state), _lasting(second.checkpoint.state)),
    )  # fmt: skip


def tensor_difference(a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    """How far two tensors of one shape and dtype are apart, in float64; None where all bits are the same."""
    elements, largest, squares, norm = 0, 0.0, 0.0, 0.0
    for x, y in zip(a.reshape(-1).split(PART), b.reshape(-1).split(PART), strict=True):
        bits = _bytes(x) != _bytes(y)
        different = bits.any(dim=1)
        elements += int(different.sum())
        exact, other = x.double(), y.double()
        norm += float(torch.dot(exact, exact))
        apart = torch.where(different, (exact - other).abs(), 0.0).nan_to_num(nan=math.inf)
        largest = max(largest, float(apart.max())) if apart.numel() else largest
        squares += float(torch.dot(apart, apart))
    if not elements:
        return None
    relative = math.sqrt(squares) / math.sqrt(norm) if norm and math.isfinite(norm) else math.inf
    return TensorDifference(elements, a.numel(), largest, relative)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8).view(values.numel(), values.element_size())  # [n, bytes of one]


def changes(first: Any, second: Any) -> list[Change]:
    """The values in which two nested dicts differ, under names joined by dots.

    >>> changes({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "b": 4})
    [('a.y', 2, 3), ('b', '(absent)', 4)]
    """
    ours, theirs = dict(_flat(first)), dict(_flat(second))
    return [
        (name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def _lasting(state: dict[str, Any]) -> dict[str, Any]:
    """State that a run goes on from, without the time at which older versions say that it was written."""
    return {name: value for name, value in state.items() if name != "saved_at_s"}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
