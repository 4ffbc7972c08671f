"""Reader of Megatron's torch format: iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt.

A rank's file holds arguments, weights (`model`, or `model0`, `model1`, ... with virtual stages) and
the optimizer's state. That state has no parameter names: its tensors are in the order of the
parameters, those with weight decay before those without. They are assigned by order and shape, and
checked against the weights: a master must round to its weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron_conversion.names import flatten, ours
from megatron_conversion.source import (
    MOMENTS,
    ParameterShard,
    SourceCheckpoint,
    aligned,
    check_ranks,
    source_of,
)
from megatron_conversion.unpickle import attributes, load_file

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

Models = list[dict[str, torch.Tensor]]
"""Weights of a rank's virtual stages, in order, by the names in its file."""
State = dict[tuple[int, str], Callable[[str], torch.Tensor]]
"""Optimizer state by (virtual stage, name in the file): a function that returns a kind of it."""


def is_megatron(folder: Path) -> bool:
    """Return whether Megatron wrote this folder in its torch format."""
    return any(_RANK.match(path.name) and (path / FILE).is_file() for path in folder.iterdir())


def read_megatron(folder: Path, optimizer: bool, plain: Sequence[str] = ()) -> SourceCheckpoint:
    """Read a folder that Megatron wrote in its torch format.

    Arguments are those of `read_deepspeed`. Raises CheckpointError for files that are missing,
    damaged or from another checkpoint.
    """
    files = {
        (int(match[1]), int(match[2] or 0)): path / FILE
        for path in sorted(folder.iterdir())
        if (match := _RANK.match(path.name))
    }
    states = {rank: load_file(files[rank], plain) for rank in sorted(files)}
    models = {rank: _models(state) for rank, state in states.items()}
    first = next(iter(states.values()))
    arguments = attributes(first.get("args"))
    tensor = int(arguments.get("tensor_model_parallel_size") or 1 + max(t for t, _ in files))
    pipeline = int(arguments.get("pipeline_model_parallel_size") or 1 + max(p for _, p in files))

    def file_of(t: int, p: int) -> str:
        return f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 or p else "") + f"/{FILE}"

    check_ranks(folder, tensor, pipeline, set(files), file_of)
    source = source_of(
        "Megatron",
        {files[rank]: state for rank, state in states.items()},
        folder,
        first.get("checkpoint_version", 0),
        tensor,
        pipeline,
    )
    optimizers = _optimizers(source, states, models) if optimizer else {}
    each: list[dict[str, ParameterShard]] = [{} for _ in range(tensor)]
    for t, shards in enumerate(each):
        for p, chunk, names in _chunks([models[t, p] for p in range(pipeline)]):
            for name, our_name in names.items():
                state = optimizers.get((t, p), {}).get((chunk, name))
                shards.setdefault(our_name, ParameterShard(models[t, p][chunk][name], state))
    source.parameters = aligned(folder, each)
    return source


def _models(state: Mapping[str, Any]) -> Models:
    numbered = sorted(
        (k for k in state if re.fullmatch(r"model\d+", k)), key=lambda key: int(key[len("model") :])
    )
    keys = ["model"] if "model" in state else numbered
    if not keys or not all(isinstance(state[key], Mapping) for key in keys):
        raise CheckpointError(
            f"a {FILE} has no weights under 'model' or 'model0': did Megatron write it?"
        )
    return [flatten(state[key]) for key in keys]


def _chunks(models: Sequence[Models]) -> list[tuple[int, int, dict[str, str]]]:
    """Return a list of (pipeline rank, virtual stage, {name in the file: our name}).

    The list is in the order of the model. The files number the layers of every virtual stage from
    0; our names number them through the whole model.
    """
    if len({len(chunks) for chunks in models}) > 1:
        raise CheckpointError(
            "pipeline ranks have different numbers of virtual stages: files of several runs?"
        )
    ordered = []
    first = 0
    for chunk in range(len(models[0])):
        for p, chunks in enumerate(models):
            ordered.append(
                (
                    p,
                    chunk,
                    {name: our_name for name in chunks[chunk] if (our_name := ours(name, first))},
                )
            )
            first += len({match[1] for name in chunks[chunk] if (match := _LAYER.search(name))})
    return ordered


class _Unusable(Exception):
    """Reason why the optimizer's state cannot be used."""


def _optimizers(
    source: SourceCheckpoint,
    states: Mapping[tuple[int, int], dict[str, Any]],
    models: Mapping[tuple[int, int], Models],
) -> dict[tuple[int, int], State]:
    """Return the optimizer's state of each rank; empty, with a note, if it cannot be used.

    The source gets the optimizer's step and the state of its loss scale. Raises CheckpointError if
    the ranks' steps differ.
    """
    try:
        by_rank = {rank: _optimizer(state, models[rank]) for rank, state in states.items()}
    except _Unusable as why:
        source.notes.append(f"{why}: only the weights are converted")
        return {}
    steps = {step for _, step in by_rank.values()}
    if len(steps) > 1:
        raise CheckpointError(f"{source.folder}: optimizers of different steps: {sorted(steps)}")
    source.optimizer_step = steps.pop()
    take_loss_scale(source, next(iter(states.values()))["optimizer"])
    return {rank: state for rank, (state, _) in by_rank.items()}


def take_loss_scale(source: SourceCheckpoint, optimizer: Any) -> None:
    """Copy the state of a dynamic loss scale, if any, from Megatron's optimizer to a source."""
    scaler = attributes(attributes(optimizer).get("grad_scaler"))
    if "scale" in scaler and "growth_tracker" in scaler:
        source.loss_scale = {
            "scale": float(scaler["scale"]),
            "good_steps": int(scaler["growth_tracker"]),
        }
        if "hysteresis_tracker" in scaler:
            source.loss_scale["allowance"] = max(int(scaler["hysteresis_tracker"]), 1)


def _optimizer(state: Mapping[str, Any], models: Models) -> tuple[State, int]:
    """Return (optimizer state by parameter, Adam's step count) of one rank. Raises _Unusable."""
    optimizer = state.get("optimizer")
    if not isinstance(optimizer, Mapping):
        raise _Unusable("it has no optimizer state")
    base = optimizer.get("optimizer", optimizer)
    entries = (base.get("state"), base.get("param_groups")) if isinstance(base, Mapping) else ()
    if [type(entry) for entry in entries] != [dict, list]:
        raise _Unusable(
            "its optimizer's state is not in model_optim_rng.pt (--use-distributed-optimizer), or "
            "is not Adam's"
        )
    moments = base["state"]
    groups = base["param_groups"]
    masters = optimizer.get("fp32_from_fp16_params")
    # word_embeddings_for_head is a separate parameter only if the embedding is on another rank.
    embedding = any(
        "word_embeddings_for_head" not in n and "word_embeddings." in n for m in models for n in m
    )
    parameters = [
        ((chunk, name), weight)
        for chunk, model in enumerate(models)
        for name, weight in model.items()
        if ours(name) is not None or ("word_embeddings_for_head" in name and not embedding)
    ]
    decay = [p for p in parameters if p[1].dim() != 1 and not p[0][1].endswith(".bias")]
    no_decay = [p for p in parameters if p[1].dim() == 1 or p[0][1].endswith(".bias")]
    ordered = [parameters] if len(groups) == 1 else [decay, no_decay]
    unknown = _Unusable("the tensors of its optimizer cannot be assigned to its parameters")
    if [len(group["params"]) for group in groups] != list(map(len, ordered)):
        raise unknown
    result: State = {}
    step: int | None = None
    for g, group in enumerate(groups):
        for i, (number, (key, weight)) in enumerate(zip(group["params"], ordered[g], strict=True)):
            entry = moments.get(number, {})
            if not all(isinstance(entry.get(kind), torch.Tensor) for kind in MOMENTS):
                raise _Unusable("its optimizer is not Adam")
            master = weight.float() if masters is None else masters[g][i]
            tensors = {"master": master} | {kind: entry[kind] for kind in MOMENTS}
            if any(tuple(x.shape) != tuple(weight.shape) for x in tensors.values()):
                raise unknown
            if not torch.equal(master.to(weight.dtype), weight):
                raise _Unusable("the masters of its optimizer do not round to its weights")
            step = int(entry.get("step", group.get("step", 0)))
            result[key] = tensors.__getitem__
    if step is None:
        raise _Unusable("its optimizer has no step count")
    return result, step
