"""Checkpoints of Megatron without DeepSpeed: iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt.

A rank's file holds arguments, weights (`model`, or `model0`, `model1`, ... with virtual stages) and the optimizer. That
has no names in it: its tensors are in the order of the parameters, those with weight decay before those without. Which
is which is found out by order and shape, and proved with the weights: a master must round to its weight.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.foreign.deepspeed import counters
from megatron.checkpoint.foreign.names import flatten, ours
from megatron.checkpoint.foreign.source import MOMENTS, Part, Source
from megatron.checkpoint.foreign.unpickle import attributes, load_file
from megatron.errors import CheckpointError

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

Named = dict[str, torch.Tensor]
State = dict[str, Callable[[str], torch.Tensor]]


def is_megatron(folder: Path) -> bool:
    """Whether Megatron wrote this folder."""
    return any(_RANK.match(path.name) and (path / FILE).is_file() for path in folder.iterdir())


def read_megatron(folder: Path, optimizer: bool, version: float | None = None, plain: Sequence[str] = ()) -> Source:
    """What is in a folder that Megatron wrote; arguments and errors as those of read_deepspeed."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        if match := _RANK.match(path.name):
            files[int(match[1]), int(match[2] or 0)] = path / FILE
    states = {rank: load_file(path, plain) for rank, path in files.items()}
    first = states[min(states)]
    arguments = attributes(first.get("args"))
    tensor, pipeline = _sizes(folder, files, arguments)
    iteration = _iteration(states, files)
    if version is None:
        version = float(first.get("checkpoint_version", 0))
    schedule = attributes(first.get("opt_param_scheduler") or first.get("lr_scheduler"))
    source = Source(
        kind="Megatron", folder=folder, iteration=iteration, arguments=arguments, version=version, tensor_size=tensor,
        pipeline_size=pipeline, parts={}, files=list(files.values()),
        counters=counters(
            arguments, iteration, arguments.get("consumed_train_samples"), first.get("tokens"),
            int(arguments.get("skipped_iterations") or 0), schedule,
        ),
    )  # fmt: skip
    if not arguments:
        source.notes.append("it holds no arguments of Megatron: settings come from the command line")
    states_of = _optimizers(source, states) if optimizer else {}
    for t in range(tensor):
        found: dict[str, Part] = {}
        for p, chunk, names in _chunks(states, t, pipeline):
            for name, own in names.items():
                given = states_of.get((t, p), {}).get(_key(chunk, name))
                found.setdefault(own, Part(_models(states[t, p])[chunk][name], given))
        for own, part in found.items():
            parts = source.parts.setdefault(own, [])
            if len(parts) != t:
                raise CheckpointError(f"{folder}: only some tensor-parallel ranks have {own}")
            parts.append(part)
    return source


def _sizes(folder: Path, files: Mapping[tuple[int, int], Path], arguments: Mapping[str, Any]) -> tuple[int, int]:
    tensor = int(arguments.get("tensor_model_parallel_size") or 1 + max(t for t, _ in files))
    pipeline = int(arguments.get("pipeline_model_parallel_size") or 1 + max(p for _, p in files))
    most = len(files) + 1  # enough to miss one, whatever the file says
    expected = {(t, p) for t in range(min(tensor, most)) for p in range(min(pipeline, most))}
    if expected != set(files):
        missing, more = sorted(expected - set(files)), sorted(set(files) - expected)
        t, p = (missing or more)[0]
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 or p else "")
        raise CheckpointError(
            f"{folder} was written with tensor-parallel size {tensor} and pipeline size {pipeline}, but {name}/{FILE} "
            f"is {'missing' if missing else 'too many'}"
        )
    return tensor, pipeline


def _iteration(states: Mapping[tuple[int, int], dict[str, Any]], files: Mapping[tuple[int, int], Path]) -> int:
    found: dict[int, Path] = {}
    for rank, state in states.items():
        value = state.get("iteration", 0)
        found.setdefault(int(value) if isinstance(value, int) else 0, files[rank])
    if len(found) > 1:
        listed = ", ".join(f"{path}: {iteration}" for iteration, path in sorted(found.items()))
        raise CheckpointError(f"files of different iterations are mixed ({listed})")
    return next(iter(found))


def _models(state: Mapping[str, Any]) -> list[Named]:
    """The weights of a rank's virtual stages, in order; one without them."""
    keys = ["model"] if "model" in state else sorted((k for k in state if re.fullmatch(r"model\d+", k)), key=_number)
    if not keys or not all(isinstance(state[key], Mapping) for key in keys):
        raise CheckpointError(f"a {FILE} holds no weights under 'model': is it Megatron's?")
    return [flatten(state[key]) for key in keys]


def _number(key: str) -> int:
    return int(key.removeprefix("model"))


def _key(chunk: int, name: str) -> str:
    return f"{chunk}:{name}"


def _chunks(
    states: Mapping[tuple[int, int], dict[str, Any]], t: int, pipeline: int
) -> list[tuple[int, int, dict[str, str]]]:
    """(pipeline rank, virtual stage, {name there: our name}) in order of the model.

    Layers are counted from 0 in every virtual stage; those of later stages come after all before them.
    """
    models = {p: _models(states[t, p]) for p in range(pipeline)}
    found, first = [], 0
    for chunk in range(max(len(chunks) for chunks in models.values())):
        for p in range(pipeline):
            if chunk >= len(models[p]):
                raise CheckpointError(f"pipeline rank {p} has fewer virtual stages than others: files of several runs?")
            names = {name: own for name in models[p][chunk] if (own := ours(name, first))}
            layers = {int(match[1]) for name in models[p][chunk] if (match := _LAYER.search(name))}
            first += len(layers)
            found.append((p, chunk, names))
    return found


def _optimizers(source: Source, states: Mapping[tuple[int, int], dict[str, Any]]) -> dict[tuple[int, int], State]:
    """The optimizer's state of each rank, by virtual stage and name; empty, with a note, where it cannot be had."""
    found, steps = {}, set()
    for rank, state in states.items():
        outcome = _optimizer(state)
        if isinstance(outcome, str):
            source.notes.append(f"{outcome}: only weights are taken")
            return {}
        found[rank], step = outcome
        steps.add(step)
    if len(steps) > 1:
        raise CheckpointError(f"{source.folder}: optimizers of different steps: {sorted(steps)}")
    source.optimizer_step = steps.pop()
    scaler = attributes(attributes(next(iter(states.values()))["optimizer"]).get("grad_scaler"))
    if "scale" in scaler and "growth_tracker" in scaler:
        source.loss_scale = {"scale": float(scaler["scale"]), "good_steps": int(scaler["growth_tracker"])}
        if "hysteresis_tracker" in scaler:
            source.loss_scale["allowance"] = max(int(scaler["hysteresis_tracker"]), 1)
    return found


def _optimizer(state: Mapping[str, Any]) -> tuple[State, int] | str:
    """(what gives each parameter's state, Adam's steps) of one rank, or why it cannot be had."""
    held = state.get("optimizer")
    if not isinstance(held, Mapping):
        return "it has no optimizer state"
    base = held.get("optimizer", held)
    entries = (base.get("state"), base.get("param_groups")) if isinstance(base, Mapping) else ()
    if [type(entry) for entry in entries] != [dict, list]:
        return "its optimizer's state is not in this file (--use-distributed-optimizer) or not Adam's"
    moments, groups = base["state"], base["param_groups"]
    masters = held.get("fp32_from_fp16_params")
    names = _in_groups(state, [len(group["params"]) for group in groups])
    if names is None:
        return "which state of its optimizer is which parameter's cannot be told"
    result: State = {}
    step: int | None = None
    for g, group in enumerate(groups):
        for i, (number, (key, weight)) in enumerate(zip(group["params"], names[g], strict=True)):
            entry = moments.get(number, {})
            if not all(isinstance(entry.get(kind), torch.Tensor) for kind in MOMENTS):
                return "its optimizer is not Adam"
            master = weight.float() if masters is None else masters[g][i]
            if any(tuple(x.shape) != tuple(weight.shape) for x in (master, *(entry[kind] for kind in MOMENTS))):
                return "which state of its optimizer is which parameter's cannot be told"
            if not torch.equal(master.to(weight.dtype), weight):
                return "the masters of its optimizer do not round to its weights, so they are others'"
            step = int(entry.get("step", group.get("step", 0)))
            result[key] = partial(_pick, {"master": master} | {kind: entry[kind] for kind in MOMENTS})
    return (result, step) if step is not None else "its optimizer has no steps"


def _pick(tensors: Mapping[str, torch.Tensor], kind: str) -> torch.Tensor:
    return tensors[kind].detach().float()


def _in_groups(state: Mapping[str, Any], counts: Sequence[int]) -> list[list[tuple[str, torch.Tensor]]] | None:
    """The rank's parameters in the groups of its optimizer: those with weight decay, then the others; None: unknown."""
    parameters: list[tuple[str, torch.Tensor]] = []
    for chunk, model in enumerate(_models(state)):
        for name, weight in model.items():
            head_copy = "word_embeddings_for_head" in name and not _has_embedding(state)
            if ours(name) is not None or head_copy:
                parameters.append((_key(chunk, name), weight))
    if len(counts) == 1:
        groups = [parameters]
    else:
        no_decay = [name.endswith(".bias") or weight.dim() == 1 for name, weight in parameters]
        groups = [[p for p, off in zip(parameters, no_decay, strict=True) if off == second] for second in (False, True)]
    return groups if [len(group) for group in groups] == list(counts) else None


def _has_embedding(state: Mapping[str, Any]) -> bool:
    """Whether the first embedding is on this rank, so that the head's weight is the same parameter."""
    return any("word_embeddings_for_head" not in n and "word_embeddings." in n for m in _models(state) for n in m)
