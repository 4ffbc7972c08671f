"""Reader of Megatron's torch_dist format: iter_0000100/ with common.pt, .metadata, __R_S.distcp.

Megatron core writes it with torch.distributed.checkpoint, as shards of global tensors, so the
layout of the writer does not matter. Each layer has its own tensors, or is an index into the first
dimension of a tensor of all layers. .metadata, a pickle, lists the shards; its objects are read as
Records. The tensors of Adam are used if they have the names and shapes of the parameters.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.files import METADATA
from megatron.checkpoint.reader import read_tensor
from megatron.checkpoint.shards import Stored, checked_entry, incomplete, named
from megatron.errors import CheckpointError
from megatron.untrusted import open_regular, read_bytes, read_json
from megatron.untrusted_pickle import check_pickle
from megatron_conversion.megatron import take_loss_scale
from megatron_conversion.names import ours
from megatron_conversion.source import MOMENTS, ParameterShard, SourceCheckpoint, source_of
from megatron_conversion.unpickle import Record, attributes, load_file

COMMON = "common.pt"
BACKENDS = "metadata.json"
_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.")
_OTHER_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_STACKED = re.compile(r"^((?:module\.)?decoder\.layers\.)(?!\d+\.)(.+)$")
_HALF = re.compile(r"(?<=\.linear_fc1\.)(weight|bias)_([wv])$")
_LAYERS_LIMIT = 1 << 12
_JSON_LIMIT_BYTES = 1 << 20
_METADATA_LIMIT_BYTES = 1 << 30


class _Location(NamedTuple):
    """Location of a parameter or a half of it: the entire tensor `key`, or one layer of it."""

    key: str
    layer: int | None


def is_torch_dist(folder: Path) -> bool:
    """Return whether Megatron core wrote this folder, in torch_dist or another sharded format."""
    return (folder / BACKENDS).is_file()


def read_torch_dist(folder: Path, optimizer: bool, plain: Sequence[str] = ()) -> SourceCheckpoint:
    """Read a folder in torch_dist format. Arguments are those of `read_deepspeed`.

    Raises CheckpointError for another format, and for files that are missing or damaged.
    """
    backend = read_json(folder / BACKENDS, _JSON_LIMIT_BYTES, error=CheckpointError)
    if backend.get("sharded_backend") != "torch_dist":
        raise CheckpointError(
            f"{folder} has the format {str(backend.get('sharded_backend'))[:40]!r} (--ckpt-format "
            "of Megatron): load it in Megatron and save it as torch_dist or torch"
        )
    common = load_file(folder / COMMON, plain)
    arguments = attributes(common.get("args"))
    source = source_of(
        "Megatron",
        {folder / COMMON: common},
        folder,
        common.get("checkpoint_version", 3.0),
        int(arguments.get("tensor_model_parallel_size") or 1),
        int(arguments.get("pipeline_model_parallel_size") or 1),
    )
    entries = _unchecked_entries(folder / METADATA)
    weights = _locations(entries, [key for key in entries if not _OTHER_STATE.match(key)], "")
    state: dict[str, dict[str, list[_Location]]] = {}
    if optimizer:
        state = _optimizer(source, common, entries, weights)
    used = {
        location.key for each in (weights, *state.values()) for p in each.values() for location in p
    }
    stored = {key: _entry(folder, key, entries[key]) for key in sorted(used)}
    if wrong := incomplete(stored):
        raise CheckpointError(f"{folder} is incomplete: {named(wrong)}")
    source.files += [folder / METADATA, *_data_files(folder, stored)]
    for name, locations in weights.items():
        dtype = getattr(torch, stored[locations[0].key]["dtype"])
        # if the optimizer has no masters, the weights themselves are the masters
        of_kind = {kind: by_name[name] for kind, by_name in state.items()}
        of_kind = {"weight": locations, "master": locations, **of_kind}
        read = partial(_read, folder, stored, of_kind)
        source.parameters[name] = [
            ParameterShard(
                torch.empty(_shape(entries, locations), dtype=dtype, device="meta"),
                read if state else None,
                partial(read, "weight"),
            )
        ]
    return source


def _optimizer(
    source: SourceCheckpoint,
    common: Mapping[str, Any],
    entries: Mapping[str, Any],
    weights: Mapping[str, list[_Location]],
) -> dict[str, dict[str, list[_Location]]]:
    """Return the location of the optimizer's state, by kind and parameter.

    It is empty, with a note, if the state cannot be used. Otherwise the source gets the optimizer's
    step and the state of its loss scale.
    """
    keys: dict[str, list[str]] = {}
    for key in entries:
        if match := _STATE.match(key):
            keys.setdefault("master" if "param" in match[1] else match[1], []).append(key)
    state = {kind: _locations(entries, each, _STATE) for kind, each in keys.items()}
    steps = set(_steps(common.get("optimizer")))
    has_state = any(map(_OTHER_STATE.match, entries)) or bool(attributes(common.get("optimizer")))
    problem = None
    if not has_state:
        problem = "it has no optimizer state"
    elif not set(MOMENTS) <= state.keys() or any(
        each.keys() != weights.keys()
        or any(
            _shape(entries, locations) != _shape(entries, weights[name])
            for name, locations in each.items()
        )
        for each in state.values()
    ):
        problem = (
            "its optimizer's state is not Adam's, or is in the layout of the run that wrote it "
            "(save it with --dist-ckpt-optim-fully-reshardable)"
        )
    elif len(steps) != 1:
        problem = f"the step count of its optimizer is unknown ({named(sorted(map(str, steps)))})"
    if problem:
        source.notes.append(f"{problem}: only the weights are converted")
        return {}
    source.optimizer_step = steps.pop()
    take_loss_scale(source, common.get("optimizer"))
    return state


def _steps(value: Any, depth: int = 8) -> Iterator[int]:
    """Yield Adam's step counts in the state of one optimizer or several, as common.pt has it."""
    entries = value.items() if isinstance(value, dict) else ()
    for name, item in entries:
        if name in ("step", "common_step"):
            yield int(item)
        elif depth and name == "param_groups" and isinstance(item, list):
            for group in item:
                yield from _steps(group, 0)
        elif depth:
            yield from _steps(item, depth - 1)


def _locations(
    entries: Mapping[str, Any], keys: Sequence[str], prefix: str | re.Pattern[str]
) -> dict[str, list[_Location]]:
    """Return the locations of each parameter by our names: one, or those of gate and value.

    prefix   pattern to remove from the keys

    Raises CheckpointError if a parameter is stored twice, or if one of its halves is missing.
    """
    locations: dict[str, dict[str, _Location]] = {}
    for key in keys:
        full_name = re.sub(prefix, "", key)
        match = _HALF.search(full_name)
        name = _HALF.sub(r"\1", full_name)
        half = match[2] if match else ""
        names: dict[str, int | None] = {name: None}
        if stacked := _STACKED.match(name):
            layers = entries[key]["shape"][0]
            if not 0 < layers <= _LAYERS_LIMIT:
                raise CheckpointError(f"{key} has {layers} layers, which cannot be right")
            names = {f"{stacked[1]}{i}.{stacked[2]}": i for i in range(layers)}
        for layer_name, layer in names.items():
            if our_name := ours(layer_name):
                if half in locations.setdefault(our_name, {}):
                    raise CheckpointError(
                        f"{our_name} is stored twice: {locations[our_name][half].key}, {key}"
                    )
                locations[our_name][half] = _Location(key, layer)
    for our_name, halves in locations.items():
        if set(halves) not in ({""}, {"w", "v"}):
            raise CheckpointError(f"{our_name} lacks its gate or value, or is also stored unsplit")
    return {
        our_name: [halves[half] for half in ("", "w", "v") if half in halves]
        for our_name, halves in locations.items()
    }


def _shape(entries: Mapping[str, Any], locations: Sequence[_Location]) -> tuple[int, ...]:
    """Return the shape of a parameter."""
    shapes = [
        tuple(entries[location.key]["shape"])[location.layer is not None :]
        for location in locations
    ]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(shapes) > 1 else shapes[0]


def _read(
    folder: Path,
    stored: Mapping[str, Stored],
    of_kind: Mapping[str, Sequence[_Location]],
    kind: str,
) -> torch.Tensor:
    """Return a parameter, or the optimizer's state of a kind, from the data files."""
    tensors = [read_tensor(folder, stored, key, layer) for key, layer in of_kind[kind]]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _entry(folder: Path, key: str, value: Any) -> Stored:
    """Return a tensor's entry in .metadata after checking it. Raises CheckpointError."""
    try:
        return checked_entry(value)
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / METADATA} does not list the shards of {key} as torch does "
            f"({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _data_files(folder: Path, stored: Mapping[str, Stored]) -> list[Path]:
    """Return the data files of the tensors. Raises CheckpointError if one is missing or short."""
    ends: dict[str, int] = {}
    for entry in stored.values():
        for shard in entry["boxes"]:
            ends[shard.file] = max(ends.get(shard.file, 0), shard.start + shard.length)
    for name, end in ends.items():
        with open_regular(folder / name, error=CheckpointError) as file:
            size = file.seek(0, os.SEEK_END)
        if size < end:
            raise CheckpointError(
                f"{folder / name} has {size} bytes, but at least {end} were written"
            )
    return [folder / name for name in sorted(ends)]


def _unchecked_entries(path: Path) -> dict[str, Any]:
    """Return the tensors in a .metadata as unchecked entries, by key."""
    data = read_bytes(path, _METADATA_LIMIT_BYTES, error=CheckpointError)
    try:
        check_pickle(data, path, CheckpointError)
        metadata = attributes(_Unpickler(BytesIO(data)).load())
        tensors = {
            str(key): attributes(value)
            for key, value in metadata["state_dict_metadata"].items()
            if "chunks" in attributes(value)  # others are bytes: states of random generators, FP8
        }
        entries: dict[str, Any] = {}
        sizes: dict[tuple[Any, Any], Any] = {}
        for name, tensor in tensors.items():
            dtype = attributes(tensor["properties"])["dtype"]
            chunks = tensor["chunks"]
            entries[name] = {"shape": tensor["size"], "dtype": dtype, "boxes": []}
            for chunk in map(attributes, chunks):
                sizes[name, chunk["offsets"]] = chunk["sizes"]
        for index, location in metadata["storage_data"].items():
            key, offset = (attributes(index).get(field) for field in ("fqn", "offset"))
            if key not in entries:
                continue
            at = attributes(location)
            if at.get("transform_descriptors"):
                raise ValueError("its tensors are compressed or encrypted")
            where = (at["relative_path"], at["offset"], at["length"], None)
            entries[key]["boxes"].append((offset, sizes[key, offset], *where))
        return entries
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]}): it is damaged, "
            "or torch.distributed.checkpoint did not write it"
        ) from error


class _Properties(Record):
    """Properties of a tensor, whose state is a tuple that begins with the dtype."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["dtype"] = state[0]


class _Unpickler(pickle._Unpickler):
    """Reader of .metadata. It imports nothing: find_class replaces every name in the file.

    It derives from pickle's reader in Python: the one in C would allocate memory for any memo index
    in a file.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a class or a dtype. Raises UnpicklingError for other names."""
        match module, name:
            case "torch", "Size":
                return tuple
            case "torch.distributed.checkpoint.metadata", "TensorProperties":
                return _Properties
            case "torch", _ if isinstance(vars(torch).get(name), torch.dtype):
                return name
            case "collections", "OrderedDict":
                return dict
            case "torch.serialization", "_get_layout":
                return Record
        if module.startswith(("torch.distributed.checkpoint.", "megatron.core.", "pathlib")):
            return Record
        raise pickle.UnpicklingError(f"{module}.{name} is not part of such a file")
