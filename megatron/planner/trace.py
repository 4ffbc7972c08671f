"""Traces of a model's parts: read once off the code (recorder.py), then kept, by all that they depend on.

In memory, and in files of the user's cache folder ($XDG_CACHE_HOME/megatron/traces, ~/.cache without that) under a
digest of the sources: one that was made by other code is never read. MEGATRON_TRACE_CACHE names another folder, or
"none". Needs torch where a trace has to be made.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import operator
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.parallel import RecomputeConfig
from megatron.config.pieces import PLAIN, Pieces
from megatron.config.settings import SECTIONS
from megatron.errors import ConfigError
from megatron.kernels.work import Attention, Memory, Product
from megatron.planner.events import Again, Give, Message, Parameter, Part, Pass, Post, Step, Take, Trace, Wait

FOLDER = "MEGATRON_TRACE_CACHE"

# Settings that a trace does not depend on. All others of these sections count, a new one too.
_DOES_NOT_COUNT = {
    "model": (
        "num_layers", "layernorm_epsilon", "rotary_base", "init_method_std", "init_method_xavier_uniform",
    ),
    "parallel": (
        "pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage", "pipeline_layout",
        "virtual_pipeline_model_parallel_size", "enable_zbh1_pipeline", "distributed_backend",
        "distributed_timeout_minutes", "rank_order", "device_order", "cluster", "local_rank", "master_addr",
        "master_port", "world_size", "data_parallel_size",
    ),
    "recompute": ("recompute_method", "recompute_num_layers"),
    "batch": ("global_batch_size", "rampup_batch_size", "train_iters", "train_samples", "train_tokens"),
    "precision": ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
    "kernels": ("optimizer_implementation",),
}  # fmt: skip
_NOT_FOR_LAYERS = {
    "model": (
        "vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings", "untie_embeddings_and_output_weights",
    ),
    "kernels": ("cross_entropy_loss_fusion", "cross_entropy_chunk_tokens"),
}  # fmt: skip
_NOT_FOR_ONE = {
    "parallel": (
        "sequence_parallel", "async_tensor_model_parallel_allreduce", "tp_comm_overlap", "tp_comm_overlap_chunks",
    ),
}  # fmt: skip
_COUNTS = {"data": ("reset_position_ids",)}
"""Settings of the other sections that count."""
_KEPT = 4
"""Folders of traces of other sources, such as those of another checkout."""
_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = (
    "layers", "model", "kernels", "parallel", "engine/gradients.py", "engine/terms.py", "planner/recorder.py",
    "planner/tensors.py", "planner/events.py", "planner/trace.py",
)  # fmt: skip


GPT2_VOCABULARY = 50257
"""Entries that a model is taken to have where only the tokenizer's files would tell."""


def trace(config: Config, device: str) -> Trace:
    """What the parts of this model do for one micro-batch, on one rank of a "cuda" (a GPU of either make) or "cpu"
    device. The kernels count as there on a GPU, which is elsewhere; on a CPU they are those of this machine."""
    own = config.pieces.layer, config.pieces.model
    key = device, own, *(counts(getattr(config, section)) for section, counts in _that_count())
    found = _traces.get(key)
    if found is None:
        found = _traces[key] = _trace(config, device)
    return found


_traces: dict[tuple[Any, ...], Trace] = {}


@functools.cache
def _that_count() -> list[tuple[str, Callable[[Any], Any]]]:
    """Make for each section a function that reads all of it on which a trace depends."""
    return [
        (name, operator.attrgetter(*(
            field.name for field in dataclasses.fields(section)
            if (field.name not in _DOES_NOT_COUNT[name] if name in _DOES_NOT_COUNT else field.name in _COUNTS[name])
        )))
        for name, section in SECTIONS.items() if name in _DOES_NOT_COUNT or name in _COUNTS
    ]  # fmt: skip


def _trace(config: Config, device: str) -> Trace:
    none = dataclasses.replace(config, recompute=RecomputeConfig())
    full = config.recompute.recompute_granularity == "full"
    return _alike(
        embedding=_part(that_counts(none, "embedding"), "embedding", device),
        layer=_part(that_counts(none if full else config, "layer"), "layer", device),
        again=_part(that_counts(config, "layer"), "layer", device) if full else None,
        head=_part(that_counts(none, "head"), "head", device),
    )


@functools.cache
def _alike(embedding: Part, layer: Part, again: Part | None, head: Part) -> Trace:
    """The same object for the same parts, by which their seconds are known."""
    return Trace(embedding, layer, again, head)


def that_counts(config: Config, kind: str) -> Config:
    """A configuration in which all that a trace of this kind does not depend on has its default."""
    reset: list[Mapping[str, tuple[str, ...]]] = [_DOES_NOT_COUNT]
    if kind == "layer":
        reset.append(_NOT_FOR_LAYERS)
    if config.parallel.tensor_model_parallel_size == 1:
        reset.append(_NOT_FOR_ONE)
    if config.recompute.recompute_granularity != "selective":
        reset.append({"recompute": ("recompute_modules",)})
    sections = {}
    for name, section in SECTIONS.items():
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        own, names = getattr(config, name), {n for each in reset for n in each.get(name, ())}
        if name not in _DOES_NOT_COUNT:
            names = defaults.keys() - set(_COUNTS.get(name, ()))
        sections[name] = dataclasses.replace(own, **{n: defaults[n] for n in names})
    model, tensor = sections["model"], sections["parallel"].tensor_model_parallel_size
    sections["model"] = dataclasses.replace(model, num_layers=1, vocab_size=model.vocab_size or GPT2_VOCABULARY)
    sections["parallel"] = dataclasses.replace(sections["parallel"], world_size=tensor, data_parallel_size=1)
    pieces = Pieces(layer=config.pieces.layer if kind == "layer" else None, model=config.pieces.model)
    return Config(**sections, given={}, origins={}, pieces=pieces)


class NeedsTorch(ConfigError, ImportError):
    """torch is not installed, as on a login node."""


_parts: dict[tuple[str, Pieces], Part] = {}


def _part(config: Config, kind: str, device: str) -> Part:
    key = repr((kind, device, *(getattr(config, name) for name in (*_DOES_NOT_COUNT, *_COUNTS))))
    own = config.pieces != PLAIN  # whose sources nobody knows: kept in memory only
    found = _parts.get((key, config.pieces))
    if found is None:
        path = None if own else _folder(device)
        path = None if path is None else path / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        found = _read(path)
        if found is None:
            from megatron.planner.recorder import record

            found = record(config, device, kind)
            _write(path, found)
        _parts[key, config.pieces] = found
    return found


# -- files -------------------------------------------------------------------------------------------------------------


@functools.cache
def _folder(device: str) -> Path | None:
    """Where traces of these sources are; None: nowhere. Those of sources that are gone are removed."""
    wanted = os.environ.get(FOLDER)
    if wanted == "none":
        return None
    base = Path(wanted or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron") / "traces"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise NeedsTorch(
            "what a layer computes, sends and keeps is read off the code, which needs torch, though no device: install "
            "any build of torch"
        ) from None
    digest = hashlib.sha256(f"{version} {_of_machine(device)}".encode())
    for source in _SOURCES:
        path = _PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            digest.update(file.read_bytes())
    folder = base / digest.hexdigest()[:16]
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            own = [path for path in base.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)]
            for old in sorted(own, key=lambda p: p.stat().st_mtime)[:-_KEPT]:
                shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return None
    return folder


def _of_machine(device: str) -> str:
    """What a CPU's operators depend on beside the sources."""
    if device != "cpu":
        return ""
    import torch

    from megatron.kernels import library

    return f"{library.find('cpu').line} {torch.get_num_threads()}"


def _read(path: Path | None) -> Part | None:
    if path is None:
        return None
    try:
        parameters, hands_on, tables, *passes = json.loads(path.read_text())
        return Part(
            tuple(Parameter(n, tuple(shape), tuple(whole), *more) for n, shape, whole, *more in parameters),
            hands_on,
            tables,
            *(Pass(tuple(map(_step, steps)), tuple(labels)) for steps, labels in passes),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None  # not there, or cut off


def _write(path: Path | None, part: Part) -> None:
    if path is None:
        return
    passes = (part.forward, part.backward, part.inputs, part.weights)
    found = [part.parameters, part.hands_on, part.tables, *([list(map(_plain, p.steps)), p.labels] for p in passes)]
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(found, file, separators=(",", ":"))
        os.replace(file.name, path)
    except OSError:
        pass  # a full or read-only home costs time, not the answer


_STEPS: dict[str, Any] = {c.__name__: c for c in (Product, Attention, Memory, Wait, Take, Give)}


def _plain(step: Step) -> list[Any]:
    if isinstance(step, Again):
        return ["Again", _plain(step.operation)]
    if isinstance(step, Post):
        return ["Post", list(step.message), step.number]
    return [type(step).__name__, *step]


def _step(plain: list[Any]) -> Step:
    name, *values = plain
    if name == "Again":
        return Again(_step(values[0]))  # type: ignore[arg-type]
    if name == "Post":
        return Post(Message(*values[0]), values[1])
    found: Step = _STEPS[name](*values)
    return found
