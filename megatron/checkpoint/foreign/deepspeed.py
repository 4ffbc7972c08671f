"""Checkpoints that DeepSpeed's engine wrote: those of Megatron-DeepSpeed, with or without pipeline.

    global_step100/mp_rank_01_model_states.pt               a model-parallel rank (stage x tensor size + tensor rank):
                                                            counters, arguments, and without pipeline the weights
                   layer_03-model_01-model_states.pt        with pipeline: a layer's weights, of tensor rank 1
                   bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt      a shard of the optimizer's state (zero.py)
"""
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.foreign.names import WORD_EMBEDDINGS, PipelineNames, flatten, ours
from megatron.checkpoint.foreign.source import Part, Source
from megatron.checkpoint.foreign.unpickle import attributes, load_file
from megatron.checkpoint.foreign.zero import ZeroShards, shards_in
from megatron.errors import CheckpointError

_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")


_Shards = dict[int, tuple[ZeroShards, dict[str, str]]]
"""Of each model-parallel rank: its shards, and by our names of parameters theirs."""


def is_deepspeed(folder: Path) -> bool:
    """Whether DeepSpeed's engine wrote this folder."""
    return any(_MODEL.match(path.name) for path in folder.iterdir())


def read_deepspeed(folder: Path, optimizer: bool, version: float | None = None, plain: Sequence[str] = ()) -> Source:
    """What is in a folder that DeepSpeed's engine wrote.

    optimizer   whether its state is wanted
    version     checkpoint_version, instead of what the files say
    plain       see unpickle.load_file

    Raises CheckpointError, naming files, where some are missing, damaged or not of one checkpoint.
    """
    return _Reader(folder, plain).read(optimizer, version)


class _Reader:
    def __init__(self, folder: Path, plain: Sequence[str]) -> None:
        self.folder, self.plain = folder, plain
        listed = sorted(folder.iterdir())
        experts = [path.name for path in listed if "_expert_" in path.name]
        if experts:
            raise CheckpointError(f"{folder} is of a model with experts ({experts[0]} ...), which this program has not")
        self.model_files = {int(m[1]): path for path in listed if (m := _MODEL.match(path.name))}
        self.layer_files: dict[int, dict[int, Path]] = {}
        for path in listed:
            if match := _LAYER.match(path.name):
                self.layer_files.setdefault(int(match[1]), {})[int(match[2] or 0)] = path
        self.states = {rank: load_file(path, plain) for rank, path in self.model_files.items()}

    def read(self, optimizer: bool, version: float | None) -> Source:
        first = self.states[min(self.states)]
        arguments = attributes(first.get("args"))
        tensor, pipeline = self._sizes(first, arguments)
        iteration = self._iteration()
        weights = self._layers(tensor) if self.layer_files else self._modules()
        if version is None:
            version = float(first.get("checkpoint_version", 0.0 if arguments else 3.0))
        source = Source(
            kind=f"DeepSpeed {first.get('ds_version', '')}".strip() + (", pipeline" if self.layer_files else ""),
            folder=self.folder, iteration=iteration, arguments=arguments, version=version,
            tensor_size=tensor, pipeline_size=pipeline, parts={}, counters=_counters(first, arguments, iteration),
            files=[*self.model_files.values(), *(path for f in self.layer_files.values() for path in f.values())],
        )  # fmt: skip
        if not arguments:
            source.notes.append("it holds no arguments of Megatron: settings come from the command line")
        shards = self._shards(source, tensor * pipeline) if optimizer else {}
        for name, parts in weights.items():
            source.parts[name] = [
                Part(weight, self._state(shards, name, weight, t, tensor)) for t, (weight, _) in enumerate(parts)
            ]
        return source

    def _sizes(self, first: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[int, int]:
        """Tensor and pipeline size; all files of the model-parallel ranks must be there."""
        count = len(self.model_files)
        written = attributes(first.get("checkpoint_parallel_dimensions"))
        tensor = arguments.get("tensor_model_parallel_size") or arguments.get("model_parallel_size")
        if tensor is None and self.layer_files:
            tensor = max(len(files) for files in self.layer_files.values())
        tensor = int(tensor or written.get("tp_degree") or first.get("mp_world_size") or count)
        pipeline = arguments.get("pipeline_model_parallel_size") or max(1, count // tensor)
        pipeline = int(pipeline) if self.layer_files else 1
        most = min(tensor * pipeline, count + 1)  # enough to miss one, whatever the file says
        expected = {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(most)}
        there = {path.name for path in self.model_files.values()}
        if expected != there:
            missing, more = sorted(expected - there), sorted(there - expected)
            wrong = f"{', '.join(missing[:4])} missing" if missing else f"{', '.join(more[:4])} too many"
            raise CheckpointError(
                f"{self.folder} was written with tensor-parallel size {tensor} and pipeline size {pipeline}, but it "
                f"has {count} mp_rank files: {wrong}"
            )
        return tensor, pipeline

    def _iteration(self) -> int:
        """The iteration, which all files must agree on."""
        found: dict[int, str] = {}
        for rank, state in self.states.items():
            iteration = state.get("iteration", state.get("global_steps"))
            if not isinstance(iteration, int):
                raise CheckpointError(f"{self.model_files[rank]} does not say its iteration: is it DeepSpeed's?")
            found.setdefault(iteration, self.model_files[rank].name)
        if len(found) > 1:
            listed = ", ".join(f"{name}: {iteration}" for iteration, name in sorted(found.items()))
            raise CheckpointError(f"{self.folder} mixes files of different iterations ({listed})")
        return next(iter(found))

    def _modules(self) -> dict[str, list[tuple[torch.Tensor, str]]]:
        """{our name: [(weight, its name there) for each tensor rank]} of a checkpoint without pipeline."""
        # Two names of one tensor: the optimizer knows it by the first. A tied embedding is an embedding to us.
        again = attributes(self.states[min(self.states)].get("shared_params"))
        tied = {first: WORD_EMBEDDINGS for second, first in again.items() if ours(second) == WORD_EMBEDDINGS}
        self._translate: Any = lambda name: tied.get(name) or ours(name)
        each = []
        for rank in sorted(self.states):
            module = self.states[rank].get("module")
            if not isinstance(module, Mapping):
                raise CheckpointError(
                    f"{self.model_files[rank]} holds no weights, and there are no layer_NN-model_NN-model_states.pt "
                    f"files: the checkpoint is not complete"
                )
            named = {name: weight for name, weight in flatten(module).items() if name not in again}
            each.append({own: (weight, name) for name, weight in named.items() if (own := self._translate(name))})
        return _aligned(each, [self.model_files[rank] for rank in sorted(self.states)])

    def _layers(self, tensor: int) -> dict[str, list[tuple[torch.Tensor, str]]]:
        """The same of a checkpoint with pipeline; a layer's file of each tensor rank."""
        for files in self.layer_files.values():
            if sorted(files) != list(range(tensor)):
                example = re.sub(r"model_\d+-", "model_%02d-", next(iter(files.values())).name)
                absent = sorted(set(range(tensor)) - set(files)) or sorted(files)[tensor:]
                raise CheckpointError(
                    f"{self.folder} was written by {tensor} tensor-parallel ranks, of which "
                    f"{example.replace('%02d', f'{absent[0]:02d}')} is missing or too many"
                )
        loaded = {n: [load_file(files[t], self.plain) for t in range(tensor)] for n, files in self.layer_files.items()}
        names = PipelineNames({number: ranks[0] for number, ranks in loaded.items()})
        self._translate = names.in_module
        each: list[dict[str, tuple[torch.Tensor, str]]] = [{} for _ in range(tensor)]
        for number in sorted(loaded):
            for t, content in enumerate(loaded[number]):
                for name, weight in flatten(content).items():
                    own = names.in_file(number, name)
                    if own:
                        each[t].setdefault(own, (weight, name))  # a tied embedding that is stored again comes later
        return _aligned(each, [self.folder] * tensor)

    def _shards(self, source: Source, ranks: int) -> _Shards:
        """The optimizer's shards of each model-parallel rank, with their names of parameters by ours; empty: none."""
        files = shards_in(self.folder)
        if not files:
            kept = any(state.get("optimizer") for state in self.states.values())
            source.notes.append(
                "its optimizer's state is not in ZeRO's shards, and without names of parameters: only weights are taken"
                if kept else "it has no optimizer state: only weights are taken"
            )
            return {}
        absent = [rank for rank in range(ranks) if rank not in files]
        if absent:
            raise CheckpointError(
                f"{self.folder} has optimizer shards, but none of model-parallel rank {absent[0]} "
                f"(*zero_pp_rank_*_mp_rank_{absent[0]:02d}_optim_states.pt): find them, or convert without the "
                f"optimizer (--no-optim)"
            )
        found = {}
        for rank in range(ranks):
            shards = ZeroShards(files[rank], self.states[rank].get("param_shapes"), self.plain)
            found[rank] = (shards, {own: name for name in shards.names if (own := self._translate(name))})
            source.files += shards.files
        steps = {shards.step for shards, _ in found.values()}
        if len(steps) > 1:
            raise CheckpointError(f"{self.folder}: optimizer shards of different steps: {sorted(map(str, steps))}")
        if not all(shards.is_adam for shards, _ in found.values()):
            source.notes.append("its optimizer is not Adam: only weights are taken")
            return {}
        source.optimizer_step = steps.pop()
        source.loss_scale = loss_scale_of(found[0][0].loss_scaler)
        source.data_size = len(files[0])
        return found

    def _state(self, shards: _Shards, name: str, weight: torch.Tensor, t: int, tensor: int) -> Any:
        """What gives the optimizer's state of one part: of the first stage that has the parameter."""
        if not shards:
            return None
        for rank in range(t, len(shards), tensor):
            held, names = shards[rank]
            if name in names:
                return partial(held.tensor, name=names[name], shape=tuple(weight.shape))
        raise CheckpointError(f"{self.folder}: no optimizer shard has {name}; convert without it (--no-optim)")


def _aligned(
    each: Sequence[Mapping[str, tuple[torch.Tensor, str]]], where: Sequence[Path]
) -> dict[str, list[tuple[torch.Tensor, str]]]:
    """Parts by parameter; every tensor rank must have the same ones."""
    for other, place in zip(each[1:], where[1:], strict=True):
        different = sorted(each[0].keys() ^ other.keys())
        if different:
            raise CheckpointError(f"{place} and {where[0]} hold different parameters: {', '.join(different[:4])}")
    return {name: [parts[name] for parts in each] for name in each[0]}


def loss_scale_of(scaler: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of our dynamic loss scale from the attributes of DeepSpeed's; None where its scale is fixed."""
    if "scale_window" not in scaler:
        return None
    steps = int(scaler["cur_iter"]) - int(scaler["last_overflow_iter"]) - 1
    return {
        "scale": float(scaler["cur_scale"]), "good_steps": max(steps, 0) % int(scaler["scale_window"]),
        "allowance": int(scaler.get("cur_hysteresis", 1)),
    }  # fmt: skip


def _counters(state: Mapping[str, Any], arguments: Mapping[str, Any], iteration: int) -> dict[str, int]:
    """The counters of our training loop."""
    samples = arguments.get("consumed_train_samples")
    skipped = int(state.get("skipped_steps") or 0)
    tokens = state.get("tokens") or arguments.get("consumed_train_tokens")
    schedule = attributes(state.get("opt_param_scheduler") or state.get("lr_scheduler"))
    return counters(arguments, iteration, samples or state.get("global_samples"), tokens, skipped, schedule)


def counters(
    arguments: Mapping[str, Any], iteration: int, samples: int | None, tokens: int | None, skipped: int,
    schedule: Mapping[str, Any],
) -> dict[str, int]:
    """How far the run came. Megatron's scheduler counts samples, and only of steps that were taken."""
    sequence = int(arguments.get("seq_length") or 0)
    samples = int(samples or 0)
    scheduled = schedule.get("num_steps")
    if not isinstance(scheduled, int):
        scheduled = samples if not iteration else samples * (iteration - skipped) // iteration
    return {
        "iteration": iteration, "consumed_samples": samples, "consumed_tokens": int(tokens or samples * sequence),
        "consumed_valid_samples": int(arguments.get("consumed_valid_samples") or 0), "skipped_iterations": skipped,
        "scheduled_iterations": iteration - skipped, "scheduled_samples": int(scheduled),
        "scheduled_tokens": int(scheduled) * sequence,
    }  # fmt: skip
