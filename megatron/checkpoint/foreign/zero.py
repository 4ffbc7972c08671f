"""The optimizer's state in the shards that DeepSpeed's ZeRO stages 1 and 2 write.

A group of parameters is one line of numbers, cut over the data-parallel ranks. Each shard says which stretch of its
piece belongs to which parameter (param_slice_mappings); older ones only say how long the parameters are (param_shapes),
which lie end to end.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.foreign.source import MOMENTS
from megatron.checkpoint.foreign.unpickle import attributes, load_file
from megatron.errors import CheckpointError

_SHARD = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")


def shards_in(folder: Path) -> dict[int, dict[int, Path]]:
    """{model-parallel rank: {data-parallel rank: file}}. Raises CheckpointError where one rank has two files."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD.match(path.name):
            data, model = int(match[1]), int(match[2])
            other = found.setdefault(model, {}).setdefault(data, path)
            if other != path:
                raise CheckpointError(
                    f"{other} and {path.name} are shards of the same rank: remove those of the other run or precision"
                )
    return found


@dataclass(frozen=True)
class _Stretch:
    """`numel` numbers from `start` of a group's piece in the shard of data-parallel rank `data`."""

    data: int
    group: int
    start: int
    numel: int


class ZeroShards:
    """The shards of one model-parallel rank.

    step         Adam's steps; None where the optimizer is not Adam
    loss_scaler  attributes of DeepSpeed's loss scaler; empty where there is none
    names        parameters, by their names in the module
    """

    def __init__(self, files: Mapping[int, Path], param_shapes: Any, plain: Sequence[str] = ()) -> None:
        self.files = [files[data] for data in sorted(files)]
        shards = [load_file(path, plain) for path in self.files]
        try:
            self._read([shard["optimizer_state_dict"] for shard in shards], sorted(files), param_shapes)
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.files[0].parent}: the shards {self.files[0].name} ... are not laid out as those of ZeRO stage "
                f"1 or 2 ({type(error).__name__}: {error}); convert without the optimizer (--no-optim)"
            ) from error

    def _read(self, states: list[dict[str, Any]], ranks: list[int], param_shapes: Any) -> None:
        counts = states[0]["partition_count"]
        expected = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
        if ranks != list(range(min(expected, len(ranks) + 1))):
            missing = sorted(set(range(min(expected, len(ranks) + 1))) - set(ranks))
            example = re.sub(r"pp_rank_\d+", f"pp_rank_{missing[0] if missing else expected}", self.files[0].name)
            wrong = f"{example} is missing" if missing else f"{example} is of another run"
            raise CheckpointError(
                f"{self.files[0].parent} has shards of {len(ranks)} data-parallel ranks where {expected} wrote: {wrong}"
            )
        self._pieces = [_pieces(state) for state in states]
        self.loss_scaler = attributes(states[0].get("loss_scaler"))
        steps = {_step(state) for state in states}
        if len(steps) > 1:
            listed = ", ".join(sorted(map(str, steps)))
            raise CheckpointError(f"{self.files[0].parent}: the shards are of different steps: {listed}")
        self.step = steps.pop()
        self._where = _mapped(states) if "param_slice_mappings" in states[0] else _laid(self._pieces, param_shapes)
        self.names = list(self._where)

    @property
    def is_adam(self) -> bool:
        """Whether both of Adam's moments are there."""
        groups = [group for pieces in self._pieces for group in pieces]
        return self.step is not None and all(kind in group for group in groups for kind in MOMENTS)

    def tensor(self, kind: str, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The fp32 master, exp_avg or exp_avg_sq of a parameter, of the shape given. Raises CheckpointError."""
        stretches = self._where.get(name)
        if stretches is None:
            raise CheckpointError(
                f"{self.files[0].parent}: the optimizer's shards ({self.files[0].name} ...) have no {name}"
            )
        held = sum(s.numel for s in stretches)
        if held != math.prod(shape):
            raise CheckpointError(
                f"{self.files[0].parent}: the optimizer's shards have {held} numbers of {name}, which is "
                f"{tuple(shape)}: files of different runs?"
            )
        found = []
        for s in stretches:
            piece = self._pieces[s.data][s.group][kind]
            if s.start + s.numel > piece.numel():
                raise CheckpointError(f"{self.files[s.data]} ends within {name}: the file is damaged")
            found.append(piece.detach().view(-1)[s.start : s.start + s.numel].float())
        return (found[0] if len(found) == 1 else torch.cat(found)).view(*shape)


def _pieces(state: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """The flat tensors of a shard: of each group {"master": ..., "exp_avg": ..., "exp_avg_sq": ...}."""
    masters = state["single_partition_of_fp32_groups"]
    base = state["base_optimizer_state"]
    # A plain torch state dict, or with DeepSpeed's elastic checkpoints a list over the groups.
    each = base if isinstance(base, list) else [base["state"].get(g, {}) for g in range(len(masters))]
    return [
        {"master": master} | {kind: moments[kind] for kind in MOMENTS if isinstance(moments.get(kind), torch.Tensor)}
        for master, moments in zip(masters, each, strict=True)
    ]


def _step(state: Mapping[str, Any]) -> int | None:
    """Adam's count, which optimizers keep for each tensor or for each group."""
    base = state["base_optimizer_state"]
    each = base if isinstance(base, list) else list(base["state"].values())
    groups = [] if isinstance(base, list) else base["param_groups"]
    for place in (*each, *groups, {"step": state.get("base_optimizer_state_step")}):
        if place.get("step") is not None:
            return int(place["step"])
    return None


def _mapped(states: Sequence[Mapping[str, Any]]) -> dict[str, list[_Stretch]]:
    """Where parameters are, as the shards say: in the order of data-parallel ranks, the parts follow one another."""
    found: dict[str, list[_Stretch]] = {}
    for data, state in enumerate(states):
        for group, mapping in enumerate(state["param_slice_mappings"]):
            for name, address in mapping.items():
                at = attributes(address)
                found.setdefault(name, []).append(_Stretch(data, group, int(at["start"]), int(at["numel"])))
    return found


def _laid(pieces: Sequence[Sequence[Mapping[str, torch.Tensor]]], param_shapes: Any) -> dict[str, list[_Stretch]]:
    """Where parameters are when they lie end to end in the order of `param_shapes`, a dict for each group."""
    if not param_shapes:
        raise CheckpointError(
            "the ZeRO shards do not say where parameters are (neither param_slice_mappings nor param_shapes): convert "
            "without the optimizer (--no-optim)"
        )
    found: dict[str, list[_Stretch]] = {}
    for group, shapes in enumerate(param_shapes if isinstance(param_shapes, (list, tuple)) else [param_shapes]):
        bounds = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + piece[group]["master"].numel())
        start = 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            for data in range(len(pieces)):
                low, high = max(start, bounds[data]), min(stop, bounds[data + 1])
                if low < high:
                    found.setdefault(name, []).append(_Stretch(data, group, low - bounds[data], high - low))
            start = stop
    return found
