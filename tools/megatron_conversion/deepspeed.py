"""Reader of DeepSpeed engine checkpoints: Megatron-DeepSpeed's, with or without pipeline.

    global_step100/
        mp_rank_01_model_states.pt
            a model-parallel rank (stage x tensor size + tensor rank): counters, arguments and,
            without pipeline, the weights
        layer_03-model_01-model_states.pt
            with pipeline: the weights of a layer on tensor rank 1
        bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt
            a shard of the optimizer's state

Shards of ZeRO stages 1 and 2 are supported. The parameters of a group are concatenated into one
flat array, which is partitioned over the data-parallel ranks. Each shard maps parameters to ranges
of its partition (param_slice_mappings). Older shards do not: there the ranges follow from the
shapes of the parameters in mp_rank_NN_model_states.pt (param_shapes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.errors import CheckpointError
from megatron_conversion.names import WORD_EMBEDDINGS, PipelineNames, flatten, ours
from megatron_conversion.source import (
    MOMENTS,
    ParameterShard,
    SourceCheckpoint,
    aligned,
    check_ranks,
    source_of,
)
from megatron_conversion.unpickle import attributes, load_file

_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")
_SHARD = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")

Weights = list[dict[str, torch.Tensor]]
"""Weights of each tensor rank, by our names."""


def is_deepspeed(folder: Path) -> bool:
    """Return whether DeepSpeed's engine wrote this folder, at a ZeRO stage up to 2."""
    return any(_MODEL.match(path.name) for path in folder.iterdir())


def read_deepspeed(folder: Path, optimizer: bool, plain: Sequence[str] = ()) -> SourceCheckpoint:
    """Read a folder that DeepSpeed's engine wrote.

    optimizer   whether to read the optimizer's state
    plain       see unpickle.load_file

    Raises CheckpointError for a model with experts, and for files that are missing, damaged or from
    another checkpoint.
    """
    listed = sorted(folder.iterdir())
    experts = [path.name for path in listed if "_expert_" in path.name]
    if experts:
        raise CheckpointError(
            f"{folder} has a model with experts ({experts[0]} ...), which are not supported"
        )
    model_files = {int(match[1]): path for path in listed if (match := _MODEL.match(path.name))}
    layer_files: dict[int, dict[int, Path]] = {}
    for path in listed:
        if match := _LAYER.match(path.name):
            layer_files.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
    states = {rank: load_file(model_files[rank], plain) for rank in sorted(model_files)}
    first = next(iter(states.values()))
    arguments = attributes(first.get("args"))
    count = len(states)
    written = attributes(first.get("checkpoint_parallel_dimensions"))
    tensor = arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size")
    if tensor is None and layer_files:
        tensor = max(len(files) for files in layer_files.values())
    tensor = int(tensor or written.get("tp_degree") or first.get("mp_world_size") or count)
    pipeline = (
        int(arguments.get("pipeline_model_parallel_size") or max(1, count // tensor))
        if layer_files
        else 1
    )
    check_ranks(
        folder,
        tensor,
        pipeline,
        {(rank % tensor, rank // tensor) for rank in states},
        lambda t, p: f"mp_rank_{p * tensor + t:02d}_model_states.pt",
    )
    kind = f"DeepSpeed {first.get('ds_version', '')}".strip() + (
        ", pipeline" if layer_files else ""
    )
    version = first.get("checkpoint_version", 0.0 if arguments else 3.0)
    files = {model_files[rank]: state for rank, state in states.items()}
    source = source_of(kind, files, folder, version, tensor, pipeline)
    source.files += [path for files in layer_files.values() for path in files.values()]
    if layer_files:
        weights, translate = _layers(folder, layer_files, tensor, plain)
    else:
        weights, translate = _modules(files)
    shards = _shards(source, states, translate, plain) if optimizer else []
    for name, weight_shards in aligned(folder, weights).items():
        source.parameters[name] = [
            ParameterShard(
                weight, _state(shards[t::tensor], folder, name, weight) if shards else None
            )
            for t, weight in enumerate(weight_shards)
        ]
    return source


def _modules(
    states: Mapping[Path, Mapping[str, Any]],
) -> tuple[Weights, Callable[[str], str | None]]:
    """Return the weights, and a function that translates the names in the optimizer's shards.

    For checkpoints without pipeline. Raises CheckpointError if a file has no weights.
    """
    # The optimizer uses the first of the two names of a shared tensor; we use the embedding's.
    shared = attributes(next(iter(states.values())).get("shared_params"))
    tied = {
        first: WORD_EMBEDDINGS
        for second, first in shared.items()
        if ours(second) == WORD_EMBEDDINGS
    }

    def translate(name: str) -> str | None:
        return tied.get(name) or ours(name)

    each = []
    for path, state in states.items():
        module = state.get("module")
        if not isinstance(module, Mapping):
            raise CheckpointError(
                f"{path} has no weights, and there are no layer_NN-model_NN-model_states.pt files: "
                "the checkpoint is incomplete"
            )
        each.append(
            {
                our_name: weight
                for name, weight in flatten(module).items()
                if name not in shared and (our_name := translate(name))
            }
        )
    return each, translate


def _layers(
    folder: Path, layer_files: Mapping[int, Mapping[int, Path]], tensor: int, plain: Sequence[str]
) -> tuple[Weights, Callable[[str], str | None]]:
    """Return the weights, and a function that translates the names in the optimizer's shards.

    For checkpoints with pipeline. Raises CheckpointError if a layer's file is missing or damaged.
    """
    for files in layer_files.values():
        if sorted(files) != list(range(tensor)):
            example = re.sub(r"model_\d+-", "model_NN-", next(iter(files.values())).name)
            raise CheckpointError(
                f"{folder} was written by {tensor} tensor-parallel ranks, but {example} exists for "
                f"ranks {sorted(files)}"
            )
    loaded = {
        n: [load_file(files[t], plain) for t in range(tensor)]
        for n, files in sorted(layer_files.items())
    }
    names = PipelineNames({number: ranks[0] for number, ranks in loaded.items()})
    each: Weights = [{} for _ in range(tensor)]
    for number, ranks in loaded.items():
        for t, content in enumerate(ranks):
            for name, weight in flatten(content).items():
                if our_name := names.in_file(number, name):
                    # a tied embedding is stored again in a later layer
                    each[t].setdefault(our_name, weight)
    return each, names.in_module


def _shards(
    source: SourceCheckpoint,
    states: Mapping[int, Mapping[str, Any]],
    translate: Callable[[str], str | None],
    plain: Sequence[str],
) -> list[tuple[ZeroShards, dict[str, str]]]:
    """Return each model-parallel rank's optimizer shards, with {our name: name in the shards}.

    The result is empty, with a note in `source`, if there are no shards or the optimizer is not
    Adam. Otherwise the source gets the optimizer's step, the state of a dynamic loss scale and the
    data-parallel size. Raises CheckpointError if a rank has no shards, or if steps differ.
    """
    files = shards_in(source.folder)
    if not files:
        has_state = any(state.get("optimizer") for state in states.values())
        source.notes.append(
            "its optimizer's state is not in ZeRO shards and has no parameter names: only the "
            "weights are converted"
            if has_state
            else "it has no optimizer state: only the weights are converted"
        )
        return []
    absent = [rank for rank in states if rank not in files]
    if absent:
        raise CheckpointError(
            f"{source.folder} has optimizer shards, but none of model-parallel rank {absent[0]} "
            f"(*zero_pp_rank_*_mp_rank_{absent[0]:02d}_optim_states.pt): find them, or convert "
            "without the optimizer (--no-optim)"
        )
    rank_shards = []
    for rank, state in states.items():
        shards = ZeroShards(files[rank], state.get("param_shapes"), plain)
        rank_shards.append(
            (shards, {our_name: name for name in shards.names if (our_name := translate(name))})
        )
        source.files += shards.files
    steps = {shards.step for shards, _ in rank_shards}
    if len(steps) > 1:
        raise CheckpointError(
            f"{source.folder}: optimizer shards of different steps: {sorted(map(str, steps))}"
        )
    if not all(shards.is_adam for shards, _ in rank_shards):
        source.notes.append("its optimizer is not Adam: only the weights are converted")
        return []
    scaler = rank_shards[0][0].loss_scaler
    if "scale_window" in scaler:  # a dynamic loss scale
        steps_since = int(scaler["cur_iter"]) - int(scaler["last_overflow_iter"]) - 1
        source.loss_scale = {
            "scale": float(scaler["cur_scale"]),
            "good_steps": max(steps_since, 0) % int(scaler["scale_window"]),
            "allowance": int(scaler.get("cur_hysteresis", 1)),
        }
    source.optimizer_step = steps.pop()
    source.data_size = len(files[0])
    return rank_shards


def _state(
    stages: Sequence[tuple[ZeroShards, dict[str, str]]],
    folder: Path,
    name: str,
    weight: torch.Tensor,
) -> Callable[[str], torch.Tensor]:
    """Return a function that returns the optimizer state of `name` on a tensor rank, by kind.

    stages   optimizer shards of the rank's pipeline stages; the first stage with `name` is used

    Raises CheckpointError if no stage has `name`.
    """
    for shards, names in stages:
        if name in names:
            return partial(shards.tensor, name=names[name], shape=tuple(weight.shape))
    raise CheckpointError(
        f"{folder}: no optimizer shard has {name}; convert without the optimizer (--no-optim)"
    )


def shards_in(folder: Path) -> dict[int, dict[int, Path]]:
    """Return {model-parallel rank: {data-parallel rank: file}}.

    Raises CheckpointError if a rank has two files, which differ in the prefix (bf16_, fp16_).
    """
    files: dict[int, dict[int, Path]] = {}
    for path in sorted(folder.iterdir()):
        if match := _SHARD.match(path.name):
            data = int(match[1])
            model = int(match[2])
            other = files.setdefault(model, {}).setdefault(data, path)
            if other != path:
                raise CheckpointError(
                    f"{other} and {path.name} are shards of the same rank: remove those of the "
                    "other run or precision"
                )
    return files


class _Slice(NamedTuple):
    """Range of a group's flat tensors in the shard of data-parallel rank `data`."""

    data: int
    flat: Mapping[str, torch.Tensor]
    start: int
    numel: int


class ZeroShards:
    """Optimizer shards of one model-parallel rank.

    files        the shards' files, in order of data-parallel rank
    step         Adam's step count; None if the shards have none
    is_adam      whether the shards have a step count and both of Adam's moments
    loss_scaler  attributes of DeepSpeed's loss scaler; empty if there is none
    names        names of the parameters in DeepSpeed's module

    Raises CheckpointError for shards that are missing, damaged or of different steps.
    """

    def __init__(
        self, files: Mapping[int, Path], param_shapes: Any, plain: Sequence[str] = ()
    ) -> None:
        self.files = [files[data] for data in sorted(files)]
        shards = [load_file(path, plain) for path in self.files]
        try:
            self._read(
                [shard["optimizer_state_dict"] for shard in shards], sorted(files), param_shapes
            )
        except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.files[0].parent}: the shards {self.files[0].name} ... do not have the "
                f"layout of ZeRO stage 1 or 2 ({type(error).__name__}: {error}); convert without "
                "the optimizer (--no-optim)"
            ) from error

    def _read(self, states: list[dict[str, Any]], ranks: list[int], param_shapes: Any) -> None:
        counts = states[0]["partition_count"]
        expected = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
        expected_ranks = list(range(min(expected, len(ranks) + 1)))
        if ranks != expected_ranks:
            missing = sorted(set(expected_ranks) - set(ranks))
            rank = missing[0] if missing else min(set(ranks) - set(expected_ranks))
            example = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", self.files[0].name)
            raise CheckpointError(
                f"{self.files[0].parent} has shards of {len(ranks)} data-parallel ranks, but "
                f"{expected} wrote it: {example} is {'missing' if missing else 'from another run'}"
            )
        partitions = [_partition(state) for state in states]
        self.loss_scaler = attributes(states[0].get("loss_scaler"))
        steps = {_step(state) for state in states}
        if len(steps) > 1:
            raise CheckpointError(
                f"{self.files[0].parent}: shards of different steps: {sorted(map(str, steps))}"
            )
        self.step = steps.pop()
        mapped = "param_slice_mappings" in states[0]
        self._slices = (
            _mapped_slices(states, partitions)
            if mapped
            else _concatenated_slices(partitions, param_shapes)
        )
        self.names = list(self._slices)
        groups = [group for partition in partitions for group in partition]
        self.is_adam = self.step is not None and all(
            kind in group for group in groups for kind in MOMENTS
        )

    def tensor(self, kind: str, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return the fp32 master, exp_avg or exp_avg_sq of a parameter of a given shape.

        Raises CheckpointError if the shards have another number of elements of the parameter, or
        if a file ends within the parameter.
        """
        slices = self._slices[name]
        numel = sum(s.numel for s in slices)
        if numel != math.prod(shape):
            raise CheckpointError(
                f"{self.files[0].parent}: the optimizer's shards have {numel} elements of {name}, "
                f"whose shape is {tuple(shape)}: files of different runs?"
            )
        values = []
        for s in slices:
            flat = s.flat[kind].detach().view(-1)
            if s.start + s.numel > flat.numel():
                raise CheckpointError(
                    f"{self.files[s.data]} ends within {name}: the file is damaged"
                )
            values.append(flat[s.start : s.start + s.numel].float())
        return (values[0] if len(values) == 1 else torch.cat(values)).view(*shape)


def _partition(state: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return the flat tensors of a shard's groups, by kind: "master" and the moments it has."""
    masters = state["single_partition_of_fp32_groups"]
    base = state["base_optimizer_state"]
    # A plain torch state dict; in DeepSpeed's elastic checkpoints, a list of the groups' states.
    each = (
        base if isinstance(base, list) else [base["state"].get(g, {}) for g in range(len(masters))]
    )
    return [
        {"master": master}
        | {kind: moments[kind] for kind in MOMENTS if isinstance(moments.get(kind), torch.Tensor)}
        for master, moments in zip(masters, each, strict=True)
    ]


def _step(state: Mapping[str, Any]) -> int | None:
    """Return Adam's step count, which optimizers store per tensor or per group; None if absent."""
    base = state["base_optimizer_state"]
    entries = base if isinstance(base, list) else [*base["state"].values(), *base["param_groups"]]
    for entry in (*entries, {"step": state.get("base_optimizer_state_step")}):
        if entry.get("step") is not None:
            return int(entry["step"])
    return None


_Partition = list[dict[str, torch.Tensor]]


def _mapped_slices(
    states: Sequence[Mapping[str, Any]], partitions: Sequence[_Partition]
) -> dict[str, list[_Slice]]:
    """Return each parameter's slices, in order of data-parallel rank, from param_slice_mappings."""
    slices: dict[str, list[_Slice]] = {}
    for data, state in enumerate(states):
        for flat, mapping in zip(partitions[data], state["param_slice_mappings"], strict=True):
            for name, address in mapping.items():
                at = attributes(address)
                slices.setdefault(name, []).append(
                    _Slice(data, flat, int(at["start"]), int(at["numel"]))
                )
    return slices


def _concatenated_slices(
    partitions: Sequence[_Partition], param_shapes: Any
) -> dict[str, list[_Slice]]:
    """Return the slices of parameters that are concatenated in the order of `param_shapes`.

    param_shapes   a list with {name: shape} for each group, or one such dict for a single group

    Raises CheckpointError if `param_shapes` is empty or None.
    """
    if not param_shapes:
        raise CheckpointError(
            "the positions of parameters in the ZeRO shards are unknown (neither "
            "param_slice_mappings nor param_shapes is present): convert without the optimizer "
            "(--no-optim)"
        )
    slices: dict[str, list[_Slice]] = {}
    for group, shapes in enumerate(
        param_shapes if isinstance(param_shapes, (list, tuple)) else [param_shapes]
    ):
        bounds = [0]
        for partition in partitions:
            bounds.append(bounds[-1] + partition[group]["master"].numel())
        start = 0
        for name, shape in shapes.items():
            stop = start + math.prod(shape)
            for data, partition in enumerate(partitions):
                low = max(start, bounds[data])
                high = min(stop, bounds[data + 1])
                if low < high:
                    slices.setdefault(name, []).append(
                        _Slice(data, partition[group], low - bounds[data], high - low)
                    )
            start = stop
    return slices
