"""Tensors of which a rank holds some boxes, for torch.distributed.checkpoint.

Its own sharded tensors are cut along dimensions of a device mesh. A ZeRO fragment is a list of boxes instead; writing
and reading those needs no gathering and no communication but the plan.
"""
from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.engine.fragments import Index
from megatron.errors import CheckpointError

_NAMED = 8


@dataclass(frozen=True)
class Shards:
    """A tensor of `shape`, of which this rank holds `pieces`: {global offset: view}."""

    shape: tuple[int, ...]
    pieces: Mapping[Index, torch.Tensor]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size(o), sizes=view.size()) for o, view in self.pieces.items()]


class ShardsSavePlanner(SavePlanner):
    """Writes {name: Shards}. No two ranks may offer the same element."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any | None = None, is_coordinator: bool = False
    ) -> None:
        self._tensors: Mapping[str, Shards] = state_dict

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, shards in self._tensors.items():
            for chunk, view in zip(shards.chunks(), shards.pieces.values(), strict=True):
                data = TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(view), size=torch.Size(shards.shape)
                )
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("ranks do not confer about plans: each writes what it holds (boxes.py)")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        offset = write_item.index.offset
        assert offset is not None, "every piece was planned with its offset"
        return self._tensors[write_item.index.fqn].pieces[tuple(offset)].detach()


class ShardsLoadPlanner(LoadPlanner):
    """Reads into {name: Shards}, in place, converting to the dtype of the views."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None, "the reader always gives metadata"
        self._tensors: Mapping[str, Shards] = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, shards in self._tensors.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata), "checked by check_tensors"
            items += create_read_items_for_chunk_list(name, stored, shards.chunks())
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("checkpoints hold tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offset = read_item.dest_index.offset
        assert offset is not None, "every piece was planned with its offset"
        view = self._tensors[read_item.dest_index.fqn].pieces[tuple(offset)].detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The reader wrote into the view itself."""


def incomplete(metadata: Metadata, names: Iterable[str] | None = None) -> list[str]:
    """Tensors whose stored boxes do not have as many elements together as the tensor."""
    found = []
    for name in metadata.state_dict_metadata if names is None else names:
        stored = metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            held = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
            if held != math.prod(stored.size):
                found.append(name)
    return found


def check_tensors(tensors: Mapping[str, Shards], metadata: Metadata, where: str) -> None:
    """Raise CheckpointError, naming tensors, unless all of them are stored completely and in the same shape."""
    stored = metadata.state_dict_metadata
    problems = []
    missing = [name for name in tensors if not isinstance(stored.get(name), TensorStorageMetadata)]
    if missing:
        problems.append(f"it has no {named(missing)}")
    present = [name for name in tensors if name not in missing]
    for name in present:
        size = tuple(stored[name].size)  # type: ignore[union-attr]
        if size != tensors[name].shape:
            problems.append(f"{name} is {size} there and {tensors[name].shape} in this model")
    partial = incomplete(metadata, present)
    if partial:
        problems.append(f"parts are missing of {named(partial)}")
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise CheckpointError(f"{where} does not fit this model: {'; '.join(problems[:_NAMED])}{more}")


def named(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
