"""Loads models in Hugging Face's format: config.json and safetensors files.

Each rank reads only the rows and columns that it needs, from one memory-mapped file after another.
Nothing in the folder is executed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron.checkpoint.families import FAMILIES, Family
from megatron.checkpoint.family_rules import groups_of
from megatron.checkpoint.huggingface_config import CONFIG, read_model
from megatron.checkpoint.load import starts_anew
from megatron.checkpoint.settings import check_architecture, plain
from megatron.checkpoint.shards import named
from megatron.checkpoint.shared_errors import decided_by_first, errors_on_all_ranks
from megatron.checkpoint.tensors import KEPT, MASTER, LocalShards, clear_padding, tensors_to_load
from megatron.checkpoint.upcycle import dense, from_dense, scale_outputs
from megatron.checkpoint.writer import Alive, nothing
from megatron.config import Config
from megatron.config.model import ADAPTERS, ModelConfig, may_be_missing
from megatron.engine.engine import Engine
from megatron.engine.optimizer import Index, persistent_tensors
from megatron.errors import CheckpointError
from megatron.model.gpt import global_shapes, meta_chunks
from megatron.parallel.topology import Topology
from megatron.untrusted import is_file_name, open_regular, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_INDEX_LIMIT_BYTES = 1 << 28
Shapes = Mapping[str, Index]
"""Global shapes of tensors, by name."""
# Names of constants that old files contain in addition to the parameters.
_NO_PARAMETERS = re.compile(
    r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias|attention\.(masked_)?bias)$"
)


@functools.cache
def rows_by_group(groups: int, widths: tuple[int, ...]) -> torch.Tensor:
    """Return, for each row of [group][part][width of this part], its number in Hugging Face.

    There, the rows are [part][group][width].

    >>> rows_by_group(2, (2, 1, 1)).tolist()
    [0, 1, 4, 6, 2, 3, 5, 7]
    """
    blocks = torch.arange(groups * sum(widths)).split([groups * width for width in widths])
    return torch.cat([rows.view(groups, -1) for rows in blocks], 1).flatten()


@dataclass(frozen=True)
class Matrix:
    """One of our parameters, whose rows are those of Hugging Face tensors, perhaps reordered.

    shape        shape of our parameter
    counts       number of rows of each Hugging Face tensor, by name
    columns      number of columns; None for vectors
    order        number of the Hugging Face row for each of our rows; None: the same number
    transposed   whether the Hugging Face tensors are [columns, rows]
    convolution  whether they are [rows, 1, columns]
    constants    values of tensors without dimensions that a folder has beside them, by name

    NAME[E] is slice E of a tensor of all experts.
    """

    shape: Index
    counts: Mapping[str, int]
    columns: int | None
    order: torch.Tensor | None
    transposed: bool
    convolution: bool = False
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def their_shapes(self) -> dict[str, Index]:
        """Return the shape of each Hugging Face tensor."""
        columns = () if self.columns is None else (self.columns,)
        shapes: dict[str, Index] = {}
        for key, rows in self.counts.items():
            name, indexed, _ = key.partition("[")
            shape = (*columns, rows) if self.transposed else (rows, *columns)
            if self.convolution:
                shape = (rows, 1, *columns)
            if indexed:
                shape = (shapes[name][0] + 1 if name in shapes else 1, *shape)
            shapes[name] = shape
        return shapes | dict.fromkeys(self.constants, ())

    def rows(self, offset: Index, sizes: Index) -> torch.Tensor:
        """Return the numbers of the Hugging Face rows that make up a shard, in our order."""
        leading = slice(None) if self.columns is None else slice(-1)
        index = torch.zeros(1, dtype=torch.int64)
        for start, size, extent in zip(
            offset[leading], sizes[leading], self.shape[leading], strict=True
        ):
            index = (index[:, None] * extent + torch.arange(start, start + size)).flatten()
        return index if self.order is None else self.order[index]

    def cut(self, full: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the Hugging Face tensors that make up our full parameter, one after another."""
        flat = full.reshape(-1) if self.columns is None else full.reshape(-1, self.columns)
        if self.order is not None:
            flat = flat.index_select(0, self.order.argsort())
        for rows in flat.split(list(self.counts.values())):
            rows = rows.unsqueeze(1) if self.convolution else rows
            yield (rows.t() if self.transposed else rows).contiguous()


def matrix_of(family: Family, model: ModelConfig, name: str, shape: Index) -> Matrix:
    """Return how a model of this family stores one of our parameters.

    Raises CheckpointError if the family has no such parameter.
    """
    hf_modules, names = family.hf_tensors(name, shape[0])
    vector = len(shape) == 1 or name.endswith(".bias")
    columns = None if vector else shape[-1]
    rows = math.prod(shape if vector else shape[:-1])
    counts = [rows // len(names)] * len(names)
    order = None
    if hf_modules.by_head:
        groups, widths = groups_of(model, name)
        order = rows_by_group(groups, widths)
        if len(names) == len(widths):
            counts = [groups * width for width in widths]
    if hf_modules.interleaved:  # ours are [expert][gate, value][row]
        order = torch.arange(rows).view(shape[0], -1, 2).transpose(1, 2).flatten()
    number = name.split(".")[1] if name.startswith("layers.") else ""
    return Matrix(
        shape,
        dict(zip(names, counts, strict=True)),
        columns,
        order,
        hf_modules.transposed and not vector,
        hf_modules.convolution,
        {constant.format(number): x for constant, x in hf_modules.constants.items()},
    )


def tensors_of(family: Family, model: ModelConfig, shapes: Shapes) -> Shapes:
    """Return the shapes of the Hugging Face tensors, by name, for parameters of `shapes`."""
    hf_shapes: dict[str, Index] = {}
    for name, shape in shapes.items():
        hf_shapes |= matrix_of(family, model, name, shape).their_shapes
    return hf_shapes


def is_beside(name: str) -> bool:
    """Return whether Hugging Face models have this persistent tensor, too: biases of experts.

    They are stored in fp32.
    """
    return name.endswith(".expert_bias")


def stored_shapes(config: Config) -> dict[str, Index]:
    """Return the global shapes of all parameters, and of tensors that are stored beside them."""
    shapes = global_shapes(config)
    if config.model.moe_router_enable_expert_bias:
        tensors = persistent_tensors(meta_chunks(config))
        shapes |= {name: tuple(tensors[name].shape) for name in filter(is_beside, tensors)}
    return shapes


# ---- files

TensorLocations = Mapping[str, tuple[str, str]]
"""(file, name in this file) of each tensor, by the tensor's name in transformers."""


def open_tensors(path: Path) -> Any:
    """Open a safetensors file and check its header. Raises CheckpointError."""
    open_regular(path, error=CheckpointError).close()
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # the library's SafetensorError is not an OSError
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({str(error)[:200]}): get it again"
        ) from error


def find_tensors(
    folder: Path, family: Family, layers: int, shapes: Shapes, optional: Collection[str] = ()
) -> tuple[TensorLocations, list[str]]:
    """Return the location of each tensor of a model, from the headers of all files, and a note.

    The note is about tensors that are not read; there may be none.

    layers    number of the model's layers
    shapes    shapes of the model's tensors, by their names in transformers
    optional  tensors that may be missing, as constants may

    Raises CheckpointError for files that are missing or damaged, for tensors that are missing,
    unknown, stored twice, or of another shape or type, and for a tied output layer that is stored
    but differs from the embedding.
    """
    locations: dict[str, tuple[str, str]] = {}
    unknown = []
    unread = []
    wrong = []
    # A tied output layer may be stored as well.
    (head,) = family.hf_tensors("output_layer.weight")[1]
    (embedding,) = family.hf_tensors("embedding.word_embeddings.weight")[1]
    tied = head not in shapes
    known = {head: shapes[embedding], **shapes}
    for file in _files(folder):
        opened = open_tensors(folder / file)
        for key in opened.keys():  # noqa: SIM118  not a dict
            name = key if key in known else family.prefix + key
            expected = known.get(name)
            if expected is None:
                beyond = re.fullmatch(family.unread or "", key)
                if beyond and all(int(number) >= layers for number in beyond.groups()):
                    unread.append(key)
                elif not _NO_PARAMETERS.search(key):
                    unknown.append(key)
                continue
            header = opened.get_slice(key)
            shape = tuple(header.get_shape())
            dtype = header.get_dtype()
            if name in locations:
                wrong.append(f"{key} is in {locations[name][0]} and in {file}")
            elif shape != expected:
                wrong.append(f"{key} is {shape} in {file}, expected {expected}")
            elif dtype not in DTYPES:
                wrong.append(f"{key} is of type {dtype} in {file}, not one of {', '.join(DTYPES)}")
            locations[name] = (file, key)
    missing = [
        name
        for name, shape in shapes.items()
        if shape and name not in locations and name not in optional
    ]
    lists = (("it has no", missing), ("it also has", unknown))
    wrong += [f"{what} {named(names)}" for what, names in lists if names]
    if wrong:
        raise CheckpointError(
            f"{folder} does not have the tensors that its {CONFIG} describes: {'; '.join(wrong[:8])}"
        )
    if tied and head in locations:
        read = SafetensorsReader(folder, locations)
        stored = [read(name) for name in (head, embedding)]
        if stored[0].dtype != stored[1].dtype or not torch.equal(*stored):
            raise CheckpointError(
                f"{folder}: its {CONFIG} has tie_word_embeddings, but {head} and {embedding} are "
                "not equal, and transformers treats such a model as untied: set "
                f"tie_word_embeddings to false, or remove {head} from its files"
            )
        del locations[head]
    notes = [f"not read, as in transformers: {named(unread)}"] if unread else []
    return locations, notes


def _files(folder: Path) -> list[str]:
    """Return the names of a folder's safetensors files. Raises CheckpointError.

    As in transformers, a single file takes precedence over an index, which may be left over from an
    earlier model.
    """
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} has an {ADAPTER}, which changes the model: merge it into the weights "
            "(merge_and_unload() of peft), or remove it to load the model without it"
        )
    if (folder / SINGLE).exists():
        return [SINGLE]
    if (folder / INDEX).exists():
        listed = read_json(folder / INDEX, _INDEX_LIMIT_BYTES, error=CheckpointError)
        files = listed.get("weight_map")
        if not isinstance(files, dict) or not all(map(is_file_name, files.values())):
            raise CheckpointError(f"{folder / INDEX} does not name the file of each tensor")
        return sorted(set(files.values()))
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = (
            "; its pytorch_model.bin is a pickle, which is not read: AutoModelForCausalLM."
            "from_pretrained(FOLDER).save_pretrained(NEW) in transformers writes safetensors"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")


class SafetensorsReader:
    """Reader of a folder's tensors, by their names in transformers, as views of a mapped file."""

    def __init__(self, folder: Path, locations: TensorLocations) -> None:
        self._folder = folder
        self._locations = locations
        self._file = ""
        self._opened: Any = None

    def __call__(self, name: str) -> torch.Tensor:
        name, _, index = name.partition("[")
        file, key = self._locations[name]
        if file != self._file:
            self._opened = None  # unmapped before another file is mapped
            self._file = file
            self._opened = open_tensors(self._folder / file)
        try:
            tensor: torch.Tensor = (
                self._opened.get_slice(key)[int(index.rstrip("]"))]
                if index
                else self._opened.get_tensor(key)
            )
        except Exception as error:
            raise CheckpointError(
                f"{self._folder / file}: {key} cannot be read ({str(error)[:200]})"
            ) from error
        return tensor

    def fill(self, target: torch.Tensor, offset: Index, matrix: Matrix) -> None:
        """Fill `target`, the shard at `offset` of one of our parameters.

        Raises CheckpointError if a tensor cannot be read or a value is not finite.
        """
        index = matrix.rows(offset, tuple(target.shape))
        in_place = target.is_contiguous() and target.is_cpu  # experts are large
        filled = target if in_place else torch.empty(target.shape, dtype=target.dtype)
        columns = () if matrix.columns is None else target.shape[-1:]
        out = filled.view(len(index), *columns)
        start = 0
        for name, count in matrix.counts.items():
            here = (index >= start) & (index < start + count)
            if here.any():
                values = self(name).t() if matrix.transposed else self(name)
                if columns:
                    values = values.flatten(1).narrow(1, offset[-1], *columns)
                rows = index[here] - start
                first = int(rows[0])
                if bool((rows.diff() == 1).all()):  # a view
                    picked = values[first : first + len(rows)]
                else:
                    picked = values.index_select(0, rows)
                if here.all():
                    out.copy_(picked)
                    break
                out[here] = picked.to(out.dtype)
            start += count
        if not in_place:
            target.copy_(filled)
        for name, constant in matrix.constants.items():
            # files in bf16 round it
            if name in self._locations and not math.isclose(self(name), constant, rel_tol=0.01):
                raise CheckpointError(
                    f"{self._folder}: {name} is {float(self(name)):g}, but only {constant:g} is "
                    "supported"
                )
        names = ", ".join(list(matrix.counts)[:4])
        check_finite(target, f"{names} in {self._folder}, as {target.dtype},")


def check_finite(values: torch.Tensor, what: str) -> None:
    """Raise CheckpointError, naming `what`, if some of the values are not finite."""
    # The extremes are not finite if any value is not; counting would need copies of the tensor.
    if values.numel() and not all(map(math.isfinite, map(float, torch.aminmax(values)))):
        bad = values.numel() - int(torch.isfinite(values).sum())
        raise CheckpointError(
            f"{bad:,} of {values.numel():,} values of {what} are not finite (NaN or infinite): the "
            "weights are damaged, or too large for the format"
        )


# ---- a full model


def fill_shards(
    folder: Path,
    tensors: Iterable[tuple[str, LocalShards]],
    topology: Topology,
    config: Config,
    alive: Alive = nothing,
) -> list[str]:
    """Fill the views of `tensors` (megatron.checkpoint.tensors), by name, from a folder.

    Tensors of kind KEPT stay as they are, except for biases of experts, and so do parameters that
    the model may lack (may_be_missing). Return notes about those, and about tensors of the folder
    that are not read. All ranks call it; `alive` is called after every tensor that is filled.
    Raises CheckpointError on every rank if the model differs, or if a file or tensor is missing or
    damaged; views filled before keep their new values.
    """

    def describe() -> tuple[str, TensorLocations, list[str], list[str]]:
        kind, hf_model = read_model(folder)
        check_architecture({"model": plain(hf_model)}, config, str(folder / CONFIG))
        family = FAMILIES[kind]
        patterns = config.checkpoint.load_missing
        theirs: dict[str, Shapes] = {}
        for name, shape in stored_shapes(config).items():
            theirs[name] = {}
            try:
                if not name.endswith(ADAPTERS):
                    theirs[name] = tensors_of(family, config.model, {name: shape})
            except CheckpointError:  # the family has no such parameter
                if not may_be_missing(name, patterns):
                    raise
        expected = {n: shape for of_one in theirs.values() for n, shape in of_one.items()}
        optional = {n for name in theirs if may_be_missing(name, patterns) for n in theirs[name]}
        layers = config.model.num_layers
        locations, notes = find_tensors(folder, family, layers, expected, optional)
        lacks = [
            name
            for name, of_one in theirs.items()
            if not of_one or any(shape and n not in locations for n, shape in of_one.items())
        ]
        return kind, locations, lacks, notes

    kind, locations, fresh, notes = decided_by_first(topology, describe)
    with errors_on_all_ranks(topology, f"reading {folder}"):
        read = SafetensorsReader(folder, locations)
        for key, shards in tensors:
            name = key.removeprefix(f"{MASTER}.").removeprefix(f"{KEPT}.")
            if name in fresh or (key.startswith(f"{KEPT}.") and not is_beside(name)):
                continue
            matrix = matrix_of(FAMILIES[kind], config.model, name, shards.shape)
            for offset, view in shards.views.items():
                read.fill(view.detach(), offset, matrix)
            alive()
    return notes + ([starts_anew(fresh, folder)] if fresh else [])


def load_engine(
    folder: Path, engine: Engine, topology: Topology, config: Config, alive: Alive = nothing
) -> list[str]:
    """Load the weights in a Hugging Face folder into an engine of any layout and precision.

    Return the notes of `fill_shards`.

    The optimizer's moments are unchanged; an average of the weights begins with the loaded ones. A
    dense model fills the experts if moe_use_upcycling is set. All ranks call it. Raises the errors
    of `fill_shards`.
    """
    clear_padding(engine, False)
    tensors = tensors_to_load(engine, False, False)
    model = config.model
    if model.moe_use_upcycling and decided_by_first(
        topology, lambda: read_model(folder)[1].num_experts is None
    ):
        notes = fill_shards(folder, from_dense(tensors, model), topology, dense(config), alive)
        scale_outputs(tensors, model)
    else:
        notes = fill_shards(folder, tensors.items(), topology, config, alive)
    engine.update_working_weights()
    engine.start_average()
    return notes
