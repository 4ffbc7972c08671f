"""What a reader says of a foreign checkpoint."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.untrusted import is_count

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)


@dataclass(frozen=True)
class Part:
    """What one tensor rank holds of a parameter.

    weight   as the model computes with it
    state    gives master, exp_avg or exp_avg_sq, of the weight's shape, by that word; None without optimizer state
    """

    weight: torch.Tensor
    state: Callable[[str], torch.Tensor] | None = None


@dataclass
class Source:
    """A foreign checkpoint. Tensors stay in its files until they are asked for.

    kind             which program's it is, for people
    iteration        iterations done
    arguments        the settings it was trained with, by Megatron's names; empty where it has none
    version          Megatron's checkpoint_version
    parts            by our name of each parameter: what each tensor rank has of it
    counters         consumed samples and the like, by the names of our state
    optimizer_step   Adam's count of steps; None without optimizer state
    loss_scale       state of a dynamic loss scale
    data_size        data-parallel ranks whose shards were found
    notes            what a user should know
    files            all files that were read
    """

    kind: str
    folder: Path
    iteration: int
    arguments: Mapping[str, Any]
    version: float
    tensor_size: int
    pipeline_size: int
    parts: dict[str, list[Part]]
    counters: dict[str, int] = field(default_factory=dict)
    optimizer_step: int | None = None
    loss_scale: dict[str, Any] | None = None
    data_size: int | None = None
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not is_count(self.iteration):
            raise CheckpointError(f"{self.folder} is of no iteration that there can be")


@contextlib.contextmanager
def laid_out(folder: Path) -> Iterator[None]:
    """Raise CheckpointError where the body stumbles over values of a checkpoint that are of another kind or size than
    those programs write: its files can hold anything."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise CheckpointError(
            f"{folder} is not laid out as Megatron and DeepSpeed do it ({type(error).__name__}: {reason})"
        ) from error
