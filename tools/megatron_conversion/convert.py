"""Conversion of a foreign checkpoint: find it, check its parameters, write it in our format."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import MANIFEST, SHARD_INDEX
from megatron.checkpoint.folder import TRACKER, tagged_name
from megatron.checkpoint.huggingface_load import check_finite
from megatron.checkpoint.shards import named
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.model.gpt import global_shapes
from megatron.untrusted import read_bytes
from megatron_conversion.deepspeed import is_deepspeed, read_deepspeed
from megatron_conversion.megatron import FILE, is_megatron, read_megatron
from megatron_conversion.names import (
    OUTPUT_LAYER,
    POSITION_EMBEDDINGS,
    WORD_EMBEDDINGS,
    NameRules,
    is_replicated,
    merge,
)
from megatron_conversion.source import (
    KINDS,
    ParameterShard,
    SourceCheckpoint,
    configure,
    layout_errors,
    settings_of,
)
from megatron_conversion.torch_dist import BACKENDS, is_torch_dist, read_torch_dist
from megatron_conversion.write import TensorShard, tensor_shards, write_offline

_TRACKER_LIMIT_BYTES = 4096


@dataclass
class Plan:
    """Plan to convert a foreign checkpoint.

    source   the foreign checkpoint
    config   configuration of the converted checkpoint
    shapes   global shape of each parameter, by our names
    rules    layout of the source's tensor-parallel shards
    notes    remarks for the user
    """

    source: SourceCheckpoint
    config: Config
    shapes: dict[str, tuple[int, ...]]
    rules: NameRules
    notes: list[str] = field(default_factory=list)

    @property
    def optimizer(self) -> bool:
        return self.source.optimizer_step is not None


def find_source(directory: str | os.PathLike[str], tag: str | None = None) -> Path:
    """Return the folder of a foreign checkpoint.

    It is the folder `tag` in DIRECTORY. Without `tag` it is DIRECTORY itself, if a reader supports
    it, otherwise the folder that the tracker file in DIRECTORY names. Raises CheckpointError if
    there is no such folder, or if the tracker file is missing or damaged.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is not a folder: give a folder with a Megatron or DeepSpeed checkpoint"
        )
    if tag is not None:
        folder = root / tag if os.path.isdir(root / tag) else root / tagged_name(tag)
    elif reader_of(root):
        return root
    else:
        folder = root / _tracked(root)
    if not folder.is_dir():
        folders = named(sorted(p.name for p in root.iterdir() if p.is_dir()))
        raise CheckpointError(f"{folder} does not exist; {root} has: {folders or 'no folder'}")
    return folder


def _tracked(root: Path) -> str:
    """Return the folder's name in a tracker file; that of DeepSpeed takes precedence."""
    for name in ("latest", TRACKER):
        if (root / name).is_file():
            data = read_bytes(root / name, _TRACKER_LIMIT_BYTES, error=CheckpointError)
            text = data.decode(errors="replace").strip()
            if not text or "/" in text or len(text) > 200:
                raise CheckpointError(
                    f"{root / name} contains {text[:40]!r}, not the name of a folder: give the "
                    "name with --load-tag"
                )
            return tagged_name(text)
    if why := _why_unreadable(root):
        raise CheckpointError(f"{root} {why}")
    raise CheckpointError(
        f"{root} is not a folder that can be converted, and has neither latest nor {TRACKER}: name "
        "a folder in it with --load-tag"
    )


def reader_of(folder: Path) -> Callable[..., SourceCheckpoint] | None:
    """Return the reader of a foreign checkpoint's folder; None if no reader supports it."""
    for recognizes, read in (
        (is_deepspeed, read_deepspeed),
        (is_megatron, read_megatron),
        (is_torch_dist, read_torch_dist),
    ):
        if recognizes(folder):
            return read
    return None


def read_source(
    folder: Path, *, optimizer: bool = True, version: float | None = None, plain: Sequence[str] = ()
) -> SourceCheckpoint:
    """Read a foreign checkpoint's folder. Tensors stay in the files until they are converted.

    version   checkpoint_version to use instead of the one in the files

    Other arguments are those of `read_deepspeed`. Raises CheckpointError if no reader supports the
    folder, and the errors of the readers.
    """
    if read := reader_of(folder):
        with layout_errors(folder):
            source = read(folder, optimizer, plain)
        return source if version is None else dataclasses.replace(source, version=version)
    why = _why_unreadable(folder) or (
        f"has neither DeepSpeed's mp_rank_00_model_states.pt nor Megatron's mp_rank_00/{FILE} "
        f"or {BACKENDS} (torch_dist)"
    )
    raise CheckpointError(f"{folder} {why}")


def _why_unreadable(folder: Path) -> str:
    """Return why a folder in a known other format cannot be converted; "" for any other folder."""
    names = {path.name for path in folder.iterdir()}
    if any(
        name.startswith("zero_pp_rank_") and name.endswith("_model_states.pt") for name in names
    ):
        return (
            "was saved with ZeRO stage 3: extract its weights with the zero_to_fp32.py next to it"
        )
    if "zero" in names:
        return "is a universal checkpoint: convert the one that it was made from"
    if MANIFEST in names or SHARD_INDEX in names:
        return "is one of this program's own: load it with --load"
    return ""


def plan_conversion(source: SourceCheckpoint, chosen: Mapping[str, Any]) -> Plan:
    """Return the plan, after checking the source against the model that the settings describe.

    chosen   the user's settings, which take precedence over the source's arguments

    Raises CheckpointError for unsupported features of the model, for missing settings, and for
    tensors that are missing, unknown or of another shape. Raises ConfigError for invalid settings.
    """
    with layout_errors(source.folder):
        settings = settings_of(source.arguments)
        config, notes = configure(_completed(settings, source, chosen), chosen)
        model = config.model
        vocab_size = model.vocab_size
        assert vocab_size is not None, "configure requires it"
        layers = _count_layers(source)
        if model.num_layers > layers:
            raise CheckpointError(
                f"{source.folder} has {layers} layers, but with these settings the model has "
                f"{model.num_layers}: correct --num-layers"
            )
        shapes = global_shapes(config)
        _check_names(source, shapes)
        rules = NameRules(source.version, model.kv_channels, vocab_size, model.gated)
        plan = Plan(source, config, shapes, rules, [*source.notes, *notes])
        padded = _padded_vocab_size(source)
        if padded > vocab_size:
            plan.notes.append(
                f"{padded - vocab_size} of {padded} vocabulary rows are padding and are "
                "dropped; Megatron's loss includes them, so it is slightly higher than ours"
            )
        for name, shape in shapes.items():
            source_shape = tuple(
                merge(
                    name, [shard.weight.to("meta") for shard in source.parameters[name]], rules
                ).shape
            )
            if source_shape != shape:
                raise CheckpointError(
                    f"{source.folder}: {name} has shape {source_shape}, but "
                    f"{shape} with these settings"
                )
        return plan


def _count_layers(source: SourceCheckpoint) -> int:
    return len({name.split(".")[1] for name in source.parameters if name.startswith("layers.")})


def _padded_vocab_size(source: SourceCheckpoint) -> int:
    """Return the number of rows of the embedding: the size of the vocabulary, with padding."""
    return sum(len(shard.weight) for shard in source.parameters[WORD_EMBEDDINGS])


def _completed(
    settings: dict[str, Any], source: SourceCheckpoint, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings, completed from the tensors if the source has no arguments.

    Raises CheckpointError if the source has arguments, but neither these nor the user specify the
    size of the vocabulary.
    """
    parameters = source.parameters
    if not source.arguments:
        inferred: dict[str, Any] = {
            "num_layers": _count_layers(source),
            "untie_embeddings_and_output_weights": OUTPUT_LAYER in parameters,
            "add_bias_linear": any(name.endswith("dense.bias") for name in parameters),
            "normalization": "layernorm" if "final_layernorm.bias" in parameters else "rmsnorm",
        }
        if POSITION_EMBEDDINGS in parameters:
            inferred["max_position_embeddings"] = len(parameters[POSITION_EMBEDDINGS][0].weight)
        if WORD_EMBEDDINGS in parameters:
            inferred["hidden_size"] = parameters[WORD_EMBEDDINGS][0].weight.shape[-1]
        return {**inferred, **settings}
    if (
        settings.get("vocab_size") is None
        and chosen.get("vocab_size") is None
        and WORD_EMBEDDINGS in parameters
    ):
        raise CheckpointError(
            f"{source.folder} does not contain the size of the vocabulary without padding: give "
            "--vocab-size with the number of entries of the tokenizer (at most "
            f"{_padded_vocab_size(source)}, the size with padding)"
        )
    return settings


def _check_names(source: SourceCheckpoint, shapes: Mapping[str, Any]) -> None:
    missing = [name for name in shapes if name not in source.parameters]
    unknown = [name for name in source.parameters if name not in shapes]
    if OUTPUT_LAYER in unknown and _is_tied_copy(source):
        unknown.remove(OUTPUT_LAYER)
    lists = (("it has no", missing), ("it also has", unknown))
    if problems := [f"{what} {named(names)}" for what, names in lists if names]:
        hint = " (--untie-embeddings-and-output-weights?)" if OUTPUT_LAYER in unknown else ""
        raise CheckpointError(
            f"{source.folder} has other parameters than a model with these settings: "
            f"{'; '.join(problems)}{hint}"
        )


def _is_tied_copy(source: SourceCheckpoint) -> bool:
    """Return whether the output layer equals the embedding.

    Megatron core stores a tied embedding under both names if it has several pipeline stages.
    """
    both = [source.parameters.get(name, []) for name in (OUTPUT_LAYER, WORD_EMBEDDINGS)]
    return len(both[0]) == len(both[1]) and all(
        torch.equal(one.values(), other.values()) for one, other in zip(*both, strict=True)
    )


def convert(
    plan: Plan,
    directory: str | os.PathLike[str],
    provenance: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write the checkpoint to DIRECTORY, tensor by tensor, and return its folder.

    provenance   recorded in the checkpoint, together with the source's kind, folder and layout
    progress     called with (parameters written, number of all parameters)

    Raises CheckpointError if the source is damaged, if values are not finite, if a master does not
    round to its weight, or if the checkpoint cannot be written.
    """
    source = plan.source
    state = dict(source.counters)
    # without arguments, only our settings have the sequence length
    for kind in ("consumed", "scheduled"):
        state[f"{kind}_tokens"] = (
            state[f"{kind}_tokens"] or state[f"{kind}_samples"] * plan.config.model.seq_length
        )
    scalars = {
        "optimizer_step": source.optimizer_step or 0,
        "skipped_steps": source.counters.get("skipped_iterations", 0),
        "loss_scale": source.loss_scale,
    }
    origin = {
        "kind": source.kind,
        "folder": str(source.folder.absolute()),
        "tensor_parallel_size": source.tensor_size,
        "pipeline_parallel_size": source.pipeline_size,
        "data_parallel_size": source.data_size,
        "checkpoint_version": source.version,
        "notes": plan.notes,
    }
    return write_offline(
        directory,
        source.iteration,
        _tensors(plan, progress),
        config=plan.config,
        state=state,
        scalars=scalars,
        optimizer=plan.optimizer,
        provenance={**(provenance or {}), "converted_from": origin},
    )


def _tensors(plan: Plan, progress: Callable[[int, int], None]) -> Iterator[TensorShard]:
    """Yield the shards of the fp32 tensors. One full tensor is made at a time."""
    for done, name in enumerate(plan.shapes, 1):
        shards = plan.source.parameters[name]
        if is_replicated(name) and any(
            not torch.equal(shard.weight, shards[0].weight) for shard in shards[1:]
        ):
            plan.notes.append(f"{name} differs between tensor ranks: using the first rank's")
        for kind in KINDS if plan.optimizer else KINDS[:1]:
            yield from tensor_shards(f"{kind}.{name}", whole_tensor(plan, kind, name))
        progress(done, len(plan.shapes))


def whole_tensor(plan: Plan, kind: str, name: str) -> torch.Tensor:
    """Return a full tensor of a kind (KINDS) of a parameter, in fp32. Raises CheckpointError.

    Without optimizer state, it is the parameter itself.
    """
    with layout_errors(plan.source.folder):
        values = [_value(plan, name, shard, kind) for shard in plan.source.parameters[name]]
        tensor = merge(name, values, plan.rules)
    check_finite(tensor, f"{kind} of {name} in {plan.source.folder}")
    return tensor


def _value(plan: Plan, name: str, shard: ParameterShard, kind: str) -> torch.Tensor:
    """Return a shard's values of a kind in fp32; without optimizer state, those of the weight.

    Raises CheckpointError if a master does not round to the weight.
    """
    if shard.state is None or not plan.optimizer:
        return shard.values().float()
    value = shard.state(kind).detach().float()
    if kind == "master" and not torch.equal(value.to(shard.weight.dtype), shard.values()):
        raise CheckpointError(
            f"{plan.source.folder}: the optimizer's fp32 {name} does not round to the weight: the "
            "files are from different steps or layouts. If the weights are the right ones, "
            "convert without the optimizer (--no-optim)"
        )
    return value
