"""Conversion from and to Hugging Face folders, tensor by tensor.

Both directions divide the work among all processes, whatever the layout of the training.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.checkpoint.families import FAMILIES
from megatron.checkpoint.find import find_folder, open_checkpoint
from megatron.checkpoint.folder import folder_name, name_folder, start_folder
from megatron.checkpoint.huggingface_config import CONFIG, read_model, tokenizer_settings
from megatron.checkpoint.huggingface_load import (
    SafetensorsReader,
    TensorLocations,
    find_tensors,
    is_beside,
    matrix_of,
    stored_shapes,
    tensors_of,
)
from megatron.checkpoint.huggingface_save import (
    TOKENIZER_FILES,
    Companions,
    Parameters,
    adapters_of,
    exported,
    read_files,
    write_files,
    write_model,
)
from megatron.checkpoint.load import require_kind
from megatron.checkpoint.reader import read_tensor
from megatron.checkpoint.settings import pieces_of_model, plain
from megatron.checkpoint.shards import Entries, incomplete, named, read_stored
from megatron.checkpoint.shared_errors import decided_by_first
from megatron.checkpoint.tensors import KEPT, MASTER
from megatron.config import Config
from megatron.config.pieces import PLAIN
from megatron.config.settings import all_options
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.topology import Topology
from megatron.training.run.schedules import Progress
from megatron_conversion.convert import (
    find_source,
    plan_conversion,
    read_source,
    reader_of,
    whole_tensor,
)
from megatron_conversion.source import PRECISION
from megatron_conversion.write import TensorShard, rows_of_shards, write_offline

BESIDE = "huggingface"
"""Folder beside a converted checkpoint, with config.json and the files of the tokenizer."""
_PRECISIONS: dict[torch.dtype, dict[str, bool]] = {
    torch.bfloat16: {"bf16": True},
    torch.float16: {"fp16": True},
}

Shapes = Mapping[str, tuple[int, ...]]
T = TypeVar("T")


@dataclass(frozen=True)
class Incoming:
    """A Hugging Face folder to convert to a checkpoint.

    kind        model_type in its config.json
    config      configuration of the checkpoint
    shapes      shape of each parameter, by our names
    locations   where the tensors are in its files
    dtype       type of its first tensor
    notes       remarks for the user
    """

    folder: Path
    kind: str
    config: Config
    shapes: Shapes
    locations: TensorLocations
    dtype: torch.dtype
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Outgoing:
    """A checkpoint to convert to a Hugging Face folder.

    shapes  shape of each parameter, by our names
    load    returns a parameter by its name, in fp32 or in the type of the settings
    notes   remarks for the user
    """

    folder: Path
    config: Config
    shapes: Shapes
    load: Callable[[str], torch.Tensor]
    notes: Sequence[str] = ()


def read_folder(folder: Path, chosen: Mapping[str, Any]) -> Incoming:
    """Read a Hugging Face folder, without the tensors.

    chosen   settings to add, or to use instead of the folder's

    Raises CheckpointError for files that are damaged or not supported, and ConfigError for invalid
    settings.
    """
    kind, model = read_model(folder)
    settings = _known(plain(model))
    shapes = stored_shapes(Config.create(**settings))
    expected = tensors_of(FAMILIES[kind], model, shapes)
    locations, notes = find_tensors(folder, FAMILIES[kind], model.num_layers, expected)
    dtype = SafetensorsReader(folder, locations)(next(iter(expected))).dtype
    config = Config.create(**{**settings, **_precision(dtype, chosen), **chosen})
    return Incoming(folder, kind, config, shapes, locations, dtype, notes)


def to_checkpoint(
    incoming: Incoming,
    directory: Path,
    topology: Topology,
    provenance: Mapping[str, Any],
    overwrite: bool,
    progress: Callable[[int, int], None],
) -> Path:
    """Write the checkpoint DIRECTORY/iter_0000000 of a model, and return its folder.

    config.json, and files of the tokenizer if there are any, are copied to DIRECTORY/huggingface.

    progress   called with (parameters written by this process, number of its parameters)

    All processes must call it. Raises CheckpointError on all of them if files exist without
    `overwrite` or cannot be written. Nothing has changed then, unless the checkpoint was complete
    and only DIRECTORY/huggingface could not get its name.
    """
    beside = directory.absolute() / BESIDE

    def prepare() -> Path:
        for path in (directory / folder_name(0), beside):
            if path.exists() and not overwrite:
                raise ConfigError(
                    f"{path} exists: choose another TARGET, or replace it with --overwrite"
                )
        temporary = start_folder(beside)
        write_files(temporary, read_files(incoming.folder, (*TOKENIZER_FILES, CONFIG)))
        return temporary

    temporary = decided_by_first(topology, prepare)
    origin = {"kind": "Hugging Face", "folder": str(incoming.folder.absolute())}
    try:
        folder = write_offline(
            directory,
            0,
            prefetched(_masters(incoming, topology, progress)),
            config=_with_tokenizer(incoming, beside),
            state=dataclasses.asdict(Progress()),
            scalars={"optimizer_step": 0, "skipped_steps": 0, "loss_scale": None},
            optimizer=False,
            provenance={**provenance, "converted_from": {**origin, "model_type": incoming.kind}},
            topology=topology,
        )
        decided_by_first(topology, lambda: name_folder(temporary, beside, overwrite))
    finally:
        if topology.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # if it was not renamed
    return folder


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """Yield items; a thread produces each one while the previous one is in use."""
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(next, items, None)
        while (item := made.result()) is not None:
            made = thread.submit(next, items, None)
            yield item


def _with_tokenizer(incoming: Incoming, beside: Path) -> Config:
    """Return the configuration with the tokenizer in `beside`, unless another one is chosen."""
    config = incoming.config
    if config.tokenizer.tokenizer_type is not None:
        return config
    return config.replace(**tokenizer_settings(incoming.folder, beside))


def _masters(
    incoming: Incoming, topology: Topology, progress: Callable[[int, int], None]
) -> Iterator[TensorShard]:
    """Yield the fp32 shards of this process's share of the parameters.

    A shard's values are valid until the next but one is requested.
    """
    family = FAMILIES[incoming.kind]
    read = SafetensorsReader(incoming.folder, incoming.locations)
    local_names = list(incoming.shapes)[topology.rank :: topology.world.size]
    # One buffer is written to disk while the other is filled. Allocating memory for every shard
    # would take longer.
    buffers = [torch.empty(0), torch.empty(0)]
    for done, name in enumerate(local_names, 1):
        shape = incoming.shapes[name]
        matrix = matrix_of(family, incoming.config.model, name, shape)
        for first, rows in rows_of_shards(shape):
            sizes = (rows, *shape[1:])
            offset = (first, *(0 for _ in shape[1:]))
            buffers.reverse()
            if buffers[0].numel() < math.prod(sizes):
                buffers[0] = torch.empty(math.prod(sizes))
            view = buffers[0][: math.prod(sizes)].view(sizes)
            read.fill(view, offset, matrix)
            yield _key(name, MASTER), shape, offset, view
        progress(done, len(local_names))


def read_checkpoint(
    directory: Path,
    tag: str | None,
    chosen: Mapping[str, Any],
    kind: str = MASTER,
    pieces: str | None = None,
) -> Outgoing:
    """Read one of our checkpoints, without the tensors.

    chosen   settings to replace, such as the path of a tokenizer that was moved
    kind     MASTER: the weights; AVERAGE: their average
    pieces   file of the user's own layer or model, if the model has the built-in parameters

    Raises CheckpointError if the checkpoint is missing, damaged, or lacks parameters or their
    average. Raises ConfigError for invalid settings.
    """
    checkpoint = open_checkpoint(find_folder(directory, tag))
    sections = ["model", "tokenizer"]
    if not chosen.keys() & PRECISION:
        sections.append("precision")
    settings: dict[str, Any] = {}
    for section in sections:
        settings |= checkpoint.config.get(section, {})
    config = Config.create(**_known({**settings, **chosen}))
    shapes = stored_shapes(config)
    own = pieces_of_model(checkpoint.config, pieces, checkpoint.folder)
    notes = []
    if own != PLAIN:
        all_shapes = stored_shapes(config.with_pieces(layer=own.layer, model=own.model))
        where = ", ".join(own.describe().values())
        if differing := [n for n, _ in sorted(all_shapes.items() ^ shapes.items())]:
            raise ConfigError(
                f"the parameters of {where} are not those of the built-in layers, which a Hugging "
                f"Face model has: they differ in {named(differing)}. Read the model with "
                "megatron.load_model(FOLDER, pieces=FILE)"
            )
        notes.append(f"config.json is that of the built-in layers: transformers needs {where}")
    require_kind(checkpoint, kind)
    stored = read_stored(checkpoint.manifest, [_key(name, kind) for name in shapes])
    wrong = incomplete(stored) + [
        name
        for name, shape in shapes.items()
        if stored.get(_key(name, kind), {}).get("shape") != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder} does not have the parameters of its model: {named(wrong)}"
        )
    # None: in fp32, in which muP's factors are multiplied
    dtype = None if config.model.use_mup else getattr(torch, config.precision.dtype_name)
    load = partial(_parameter, checkpoint.folder, stored, kind, dtype)  # other ranks get a copy
    return Outgoing(checkpoint.folder, config, shapes, load, notes)


def _parameter(
    folder: Path, stored: Entries, kind: str, dtype: torch.dtype | None, name: str
) -> torch.Tensor:
    return read_tensor(folder, stored, _key(name, kind), dtype=dtype)


def _key(name: str, kind: str) -> str:
    """Return the name in a checkpoint for a parameter or for a tensor that is stored beside."""
    return f"{KEPT if is_beside(name) else kind}.{name}"


def foreign_folder(directory: Path, tag: str | None) -> Path | None:
    """Return the folder of a checkpoint of Megatron or DeepSpeed; None if there is none."""
    with suppress(CheckpointError):
        folder = find_source(directory, tag)
        if reader_of(folder):
            return folder
    return None


def read_foreign(
    folder: Path, chosen: Mapping[str, Any], version: float | None, plain_classes: Sequence[str]
) -> Outgoing:
    """Read a checkpoint of Megatron or DeepSpeed; its tensors stay in the files.

    Arguments and errors are those of `read_source` and `plan_conversion`.
    """
    source = read_source(folder, optimizer=False, version=version, plain=plain_classes)
    dtype = next(
        (shard.weight.dtype for shards in source.parameters.values() for shard in shards), None
    )
    plan = plan_conversion(source, {**_precision(dtype, chosen), **chosen})
    load = partial(whole_tensor, plan, MASTER)
    return Outgoing(folder, plan.config, plan.shapes, load, plan.notes)


def _precision(dtype: torch.dtype | None, chosen: Mapping[str, Any]) -> dict[str, bool]:
    """Return the setting of tensors of this type; none if one is chosen."""
    if dtype is None or chosen.keys() & PRECISION:
        return {}
    return _PRECISIONS.get(dtype, {})


def to_huggingface(
    outgoing: Outgoing,
    folder: Path,
    topology: Topology,
    companions: Companions,
    overwrite: bool,
    progress: Callable[[int, int], None],
) -> int:
    """Write a model in the format of Hugging Face; return the size of its tensors in bytes.

    companions  files and settings to write beside the tensors
    overwrite   replace a folder that exists
    progress    called with (parameters loaded by this process, number of all parameters)

    All processes must call it. Errors are those of `write_model`.
    """
    done = 0
    # A single process writes all parameters in order, so the next one can be read ahead.
    shapes = outgoing.shapes
    order = [
        each
        for name in exported(outgoing.config.model, shapes)
        for each in (name, *adapters_of(name, shapes))
    ]
    in_order = prefetched(map(outgoing.load, order)) if topology.world.size == 1 else None

    def load(name: str) -> torch.Tensor:
        nonlocal done
        tensor = outgoing.load(name) if in_order is None else next(in_order)
        done += 1
        progress(done, len(shapes))
        return tensor

    parameters = Parameters(shapes, load)
    return write_model(folder, outgoing.config, topology, parameters, companions, overwrite)


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that have a value and may be set."""
    options = all_options()
    return {
        name: value
        for name, value in settings.items()
        if value is not None and not (name in options and options[name].internal)
    }
