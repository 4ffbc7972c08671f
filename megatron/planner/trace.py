"""Traces of a model's modules, recorded from the code (recorder.py) and cached by their inputs.

They are cached in memory, and in files in $XDG_CACHE_HOME/megatron/traces (default ~/.cache), under
a digest of torch's version and of the sources in _SOURCES: traces of other versions of these are
never read. MEGATRON_TRACE_CACHE replaces $XDG_CACHE_HOME/megatron; "none" disables the files. The
digest for a CPU also covers its kernels, their measured times and the number of threads. torch has
to be installed, but is imported only for a trace that is not cached, and for the digest for a CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import operator
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from megatron.config import Config
from megatron.config.model import ADAPTERS, NOTHING_BEFORE, LayerKind, ModelConfig
from megatron.config.parallel import RecomputeConfig
from megatron.config.pieces import PLAIN, Pieces
from megatron.config.settings import SECTIONS
from megatron.errors import MegatronError
from megatron.model.formulas import ModelSizes
from megatron.parallel.sharding import Sharding
from megatron.planner.events import GroupMessage, Pass, PassEvent, Trace, TracedModule

FOLDER = "MEGATRON_TRACE_CACHE"

# Settings that a trace does not depend on. It depends on all others in these sections, including
# future ones.
_DOES_NOT_COUNT = {
    "model": (
        "num_layers layernorm_epsilon rotary_base init_method_std init_method_xavier_uniform"
    ),
    "parallel": (
        "pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage pipeline_layout "
        "virtual_pipeline_model_parallel_size pipeline_schedule distributed_backend "
        "distributed_timeout_minutes rank_order device_order cluster local_rank master_addr "
        "master_port world_size data_parallel_size"
    ),
    "recompute": "recompute_method recompute_num_layers",
    "batch": (
        "global_batch_size rampup_batch_size step_batch_size_schedule train_iters train_samples "
        "train_tokens"
    ),
    "precision": ("loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"),
    "kernels": "optimizer_implementation",
}
_COUNTS = {"data": "reset_position_ids", "optimizer": "qk_clip"}
"""Settings in the other sections that a trace does depend on."""
_PACKAGE = Path(__file__).resolve().parents[1]
_SOURCES = (
    "config layers model kernels parallel data/sampler.py engine/gradients.py engine/optimizer.py "
    "planner/recorder.py planner/tensors.py planner/events.py planner/trace.py"
).split()
GPT2_VOCABULARY = 50257
"""Vocabulary size assumed if the actual size depends on the tokenizer's files."""


def trace(config: Config, device: str) -> Trace:
    """Trace the model's modules for one micro-batch on one "cuda" (any GPU) or "cpu" device.

    For a GPU, which this machine need not have, all kernels are assumed to be built; for a CPU,
    only the kernels built on this machine.
    """
    device = "cpu" if device == "cpu" else "cuda"
    pieces = config.pieces.layer, config.pieces.model
    kinds, _, of_head = _kinds_of(config)
    key = device, pieces, _counted()(config), kinds, of_head
    traced = _traces.get(key)
    if traced is None:
        plain = dataclasses.replace(config, recompute=RecomputeConfig())
        # layers of multi-token prediction are like the last one
        head = _with_layers(plain, of_head) if of_head else plain
        traced = _traces[key] = Trace(
            _traced_module(plain, "embedding", device),
            tuple(_layers(config, device, kind) for kind in kinds),
            _traced_module(head, "head", device),
        )
    return traced


def sized(config: Config) -> Config:
    """Return the configuration with GPT-2's vocabulary if that depends on tokenizer files."""
    model = config.model
    model = dataclasses.replace(model, vocab_size=model.vocab_size or GPT2_VOCABULARY)
    return dataclasses.replace(config, model=model)


def kinds_of_layers(config: Config) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """Return the kinds of a model's layers, and for each layer the index of its kind.

    Their `freeze` and `lora_target` have exact names in layer 0.
    """
    return _kinds_of(config)[:2]


_Kinds = tuple[tuple[LayerKind, ...], tuple[int, ...], LayerKind | None]


def _kinds_of(config: Config) -> _Kinds:
    """Return kinds_of_layers, and the kind of the head where it differs from the model's settings.

    The head's kind has the exact names of a model of one layer.
    """
    model = config.model
    key = model, config.pieces
    if key not in _kinds:
        kind_of_layer = list(map(model.layer_kind, range(model.num_layers)))
        head = kind_of_layer[-1] if model.mtp_num_layers else None
        if model.trains_in_part:
            *kind_of_layer, head = _trained_in_part(config, kind_of_layer)
        kinds = list(dict.fromkeys(kind_of_layer))
        _kinds[key] = tuple(kinds), tuple(map(kinds.index, kind_of_layer)), head
    return _kinds[key]


_kinds: dict[tuple[ModelConfig, Pieces], _Kinds] = {}


def _trained_in_part(config: Config, kinds: list[LayerKind]) -> list[LayerKind]:
    """Return the kinds of all layers and of the head, with exact names."""
    from megatron.model.gpt import check_patterns

    model = dataclasses.replace(config.model, vocab_size=config.model.vocab_size or 1)
    names = check_patterns(dataclasses.replace(config, model=model))
    count = len(kinds)
    # of each layer, and of the head: parameters, and their names in a model of one layer
    by_layer: list[dict[str, str]] = [{} for _ in range(count + 1)]
    for name in names:
        head, number, rest = (*name.split(".", 2), "")[:3]
        layer = int(number) if head == "layers" else count
        in_one_layer = f"layers.{max(0, layer - count + 1)}.{rest}" if head == "layers" else name
        by_layer[min(layer, count)][name] = in_one_layer
    backward = any(model.trains(name) for name in names if name.startswith("embedding"))
    result = []
    for kind, renamed in zip([*kinds, kinds[-1]], by_layer, strict=True):
        frozen = [new for name, new in renamed.items() if not model.trains(name)]
        adapters = [new for new in renamed.values() if new.endswith(ADAPTERS[0])]
        freeze = *frozen, *([] if backward else [NOTHING_BEFORE])
        adapted = tuple(new.removesuffix(ADAPTERS[0]) for new in adapters)
        result.append(kind._replace(freeze=freeze, lora_target=adapted))
        backward = backward or any(map(model.trains, renamed))
    return result


def _layers(
    config: Config, device: str, kind: LayerKind
) -> tuple[TracedModule, TracedModule | None]:
    """Trace a layer of this kind, and with full recomputation also the same layer recomputed."""
    config = _with_layers(config, kind)
    if config.recompute.recompute_granularity != "full":
        return _traced_module(config, "layer", device), None
    plain = dataclasses.replace(config, recompute=RecomputeConfig())
    return _traced_module(plain, "layer", device), _traced_module(config, "layer", device)


def _with_layers(config: Config, kind: LayerKind) -> Config:
    """Return a configuration all of whose layers are of one kind."""
    return dataclasses.replace(config, model=config.model.of_kind(kind))


_traces: dict[tuple[Any, ...], Trace] = {}


@functools.cache
def _names() -> dict[str, list[str]]:
    """List the settings of each section on which a trace depends."""
    return {
        name: [
            field.name
            for field in dataclasses.fields(section)
            if (
                field.name not in _DOES_NOT_COUNT[name].split()
                if name in _DOES_NOT_COUNT
                else field.name in _COUNTS.get(name, "").split()
            )
        ]
        for name, section in SECTIONS.items()
    }


@functools.cache
def _counted() -> Callable[[Any], Any]:
    """Return a function that reads from a configuration all settings that a trace depends on."""
    return operator.attrgetter(
        *(f"{section}.{name}" for section, names in _names().items() for name in names)
    )


def that_counts(config: Config, kind: str) -> Config:
    """Return the configuration with defaults for all settings that do not affect a trace.

    It has one layer, and no more ranks than the tensor, context and expert groups need.

    kind  part of the model to trace (recorder.record): only "layer" depends on a user's layer
    """
    config = sized(config)
    sections = {}
    for name, section in SECTIONS.items():
        reset = {
            f.name: f.default for f in dataclasses.fields(section) if f.name not in _names()[name]
        }
        sections[name] = dataclasses.replace(getattr(config, name), **reset)
    model = sections["model"]
    parallel = sections["parallel"]
    context = parallel.context_parallel_size
    tensor = parallel.tensor_model_parallel_size
    ranks = math.lcm(context, math.lcm(tensor, parallel.expert_ranks) // tensor)
    sections["model"] = dataclasses.replace(model, num_layers=1)
    sections["parallel"] = dataclasses.replace(
        parallel,
        world_size=parallel.tensor_model_parallel_size * ranks,
        data_parallel_size=ranks // context,
    )
    has_layer = kind == "layer" or (kind == "head" and config.model.mtp_num_layers)
    pieces = Pieces(layer=config.pieces.layer if has_layer else None, model=config.pieces.model)
    return Config(**sections, explicit={}, origins={}, pieces=pieces)


class NeedsTorch(MegatronError, ImportError):
    """Error raised if torch is not installed, as on a login node, or cannot be imported.

    It is no ConfigError, since it says nothing about the layout that was to be traced.
    """


def _needs_torch(problem: str = "is not installed") -> NeedsTorch:
    return NeedsTorch(
        f"the planner traces the model's code with torch, which {problem}: run `make setup`, or "
        f"install any build of torch (no GPU is needed) for {sys.executable}"
    )


def check_torch() -> None:
    """Raise NeedsTorch if torch is not installed, for callers that need it only later."""
    if importlib.util.find_spec("torch") is None:
        raise _needs_torch()


def _import_torch() -> None:
    """Import torch. Raises NeedsTorch if that fails, for example for lack of a library."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise _needs_torch(f"cannot be imported ({error})") from error


def _traced_module(config: Config, kind: str, device: str) -> TracedModule:
    config = that_counts(config, kind)

    def record_module() -> TracedModule:
        _import_torch()
        from megatron.planner.recorder import record

        return record(config, device, kind)

    key = repr((kind, device, _counted()(config)))
    module: TracedModule = _cached(key, device, config.pieces, record_module)
    return module


def cached_sizes(config: Config) -> ModelSizes:
    """Return model.gpt.model_sizes of `sized(config)`, from files like a trace."""
    config = sized(config)

    def build() -> tuple[Any, ...]:
        _import_torch()
        from megatron.model.gpt import model_sizes

        sizes = model_sizes(config)
        return tuple(sizes.shapes.items()), tuple(sizes.core_flops.items())

    shapes, core_flops = _cached(repr(config.model), "cuda", config.pieces.architecture, build)
    return ModelSizes(config.model, dict(shapes), dict(core_flops))


# -- files -----------------------------------------------------------------------------------------


@functools.cache
def _folder(device: str) -> Path | None:
    """Return the folder for traces of these sources; None if traces are not kept in files."""
    chosen = os.environ.get(FOLDER)
    if chosen == "none":
        return None
    base = Path(
        chosen or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron"
    )
    try:
        depends = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise _needs_torch() from None
    if device == "cpu":  # the operators depend on this machine
        _import_torch()
        import torch

        from megatron.kernels import library, measured_times

        depends += f" {library.find('cpu').line} {torch.get_num_threads()} {measured_times.find()}"
    digest = hashlib.sha256(depends.encode())
    for source in _SOURCES:
        path = _PACKAGE / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else (path,):
            digest.update(file.read_bytes())
    folder = base / "traces" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


_modules: dict[tuple[str, Pieces], Any] = {}


def _cached(key: str, device: str, pieces: Pieces, make: Callable[[], Any]) -> Any:
    """Return make(), a TracedModule or a tuple, or the result of an earlier call with this key."""
    value = _modules.get((key, pieces))
    if value is None:
        # The sources of user-supplied pieces are unknown: keep what they give in memory only.
        folder = _folder(device) if pieces == PLAIN else None
        path = folder and folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        # the file may be missing or truncated
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if path is not None:
                value = _made(json.loads(path.read_text()))
        if not isinstance(value, TracedModule | tuple):
            value = make()
            # a full or read-only disk only means that the value is not cached in a file
            with contextlib.suppress(OSError):
                if path is not None:
                    with tempfile.TemporaryDirectory(dir=path.parent) as made:
                        file = Path(made, path.name)
                        file.write_text(json.dumps(_plain(value), separators=(",", ":")))
                        file.replace(path)
        _modules[key, pieces] = value
    return value


_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (TracedModule, Pass, Sharding, GroupMessage, *get_args(PassEvent))
}


def _plain(value: Any) -> Any:
    """Convert a value for JSON: objects and tuples become lists of type name and contents."""
    if isinstance(value, TracedModule | Pass | Sharding):
        return [type(value).__name__, *map(_plain, vars(value).values())]
    if isinstance(value, tuple):
        return [type(value).__name__, *map(_plain, value)]
    return value


def _made(plain: Any) -> Any:
    """Return the value that `_plain` converted."""
    if not isinstance(plain, list):
        return plain
    name = plain[0]
    values = map(_made, plain[1:])
    return tuple(values) if name == "tuple" else _TYPES[name](*values)
