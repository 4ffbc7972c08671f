"""Writes models in Hugging Face's format.

    FOLDER/config.json, generation_config.json     settings of the model and of generation
           model.safetensors                       all tensors; or, for a large model,
           model-00001-of-00007.safetensors ...    several files with its tensors, and
           model.safetensors.index.json            the file of each tensor
           tokenizer.json ...                      files of the tokenizer
           adapter/                                LoRA's adapters in the format of PEFT, if there
                                                   are any; the tensors above include them

One rank writes each file, tensor by tensor; several files are written at once. The folder has a
temporary name until all of it is on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save

from megatron.checkpoint.export import export_problem, family_of, without_mup
from megatron.checkpoint.families import FAMILIES, Family
from megatron.checkpoint.family_rules import Values
from megatron.checkpoint.files import to_json, write_bytes, write_text
from megatron.checkpoint.folder import name_folder, start_folder
from megatron.checkpoint.huggingface_config import (
    CONFIG,
    GENERATION,
    TOKENIZER_CONFIG,
    is_huggingface,
    read_config,
    write_fields,
)
from megatron.checkpoint.huggingface_load import (
    ADAPTER,
    DTYPES,
    INDEX,
    SINGLE,
    Matrix,
    Shapes,
    check_finite,
    is_beside,
    matrix_of,
)
from megatron.checkpoint.shared_errors import decided_by_first, errors_on_all_ranks
from megatron.checkpoint.writer import Alive, SyncedFile, nothing
from megatron.config import Config
from megatron.config.io import TokenizerConfig, hugging_face_folder
from megatron.config.model import ADAPTERS, EVEN_CHOICES, ModelConfig
from megatron.config.option import options_of
from megatron.data.tokenizer import build_tokenizer
from megatron.engine.optimizer import persistent_tensors, unique_parameters
from megatron.errors import CheckpointError, ConfigError
from megatron.limited import LimitedProcess
from megatron.parallel.collectives import gather_first, gather_objects
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from megatron.untrusted import read_bytes

FILE_BYTES = 2 << 30
"""Largest size of the tensors in a file, unless a single parameter needs more."""
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    *"special_tokens_map.json added_tokens.json tokenizer.model vocab.json merges.txt".split(),
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)
_TOKENIZER_LIMIT_BYTES = 1 << 28
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# ---- factors of muP


def take_up(model: ModelConfig, name: str, values: torch.Tensor) -> torch.Tensor:
    """Return a full parameter of a muP model with the model's factors folded in.

    The embedding factor goes into the embedding tables, or, for word embeddings that have a norm,
    into this norm. The factor on output scores goes into the final norm, since the output layer may
    be a tied table; the final norm is also divided by the embedding factor if a tied table holds
    it. The factor on a residual branch goes into the last matrix or the norm of the branch, the
    attention factor into the queries or their norm, and the factors on routers and gates into
    their weights.
    """
    embed = model.mup_embedding_mult
    scores = model.mup_output_mult
    attention = (model.softmax_scale or 1.0) * math.sqrt(model.kv_channels)
    normed = model.embedding_layernorm
    tied = not model.untie_embeddings_and_output_weights
    module = name.rpartition(".")[0]
    name_in_layer = module.split(".", 2)[-1] if module.startswith("layers.") else module
    if name_in_layer == "self_attention.query_key_value" and not model.qk_layernorm:
        groups = model.num_key_value_heads
        heads = model.query_heads // groups
        changed = values.float().view(groups, heads + 2, model.kv_channels, -1).clone()
        changed[:, : heads : 1 + model.attention_output_gate] *= attention
        return changed.view(values.shape)
    last = model.residual_scale if model.norm_position == "pre" else 1.0
    factor = {
        "embedding_layernorm": embed,
        "embedding.position_embeddings": embed,
        "embedding.word_embeddings": 1.0 if normed else embed,
        "final_layernorm": scores / embed if tied and not normed else scores,
        "post_self_attn_layernorm": model.residual_scale,
        "post_mlp_layernorm": model.residual_scale,
        "mlp.router": model.router_scale,
        "mlp.shared_experts.gate": model.router_scale,
        "self_attention.q_layernorm": attention,
        "self_attention.dense": last,
    }.get(name_in_layer, last if name_in_layer.endswith(".dense_4h_to_h") else 1.0)
    if model.apply_layernorm_1p and name.endswith("layernorm.weight"):
        return (values.float() + 1.0) * factor - 1.0
    return values.float() * factor


# ---- files other than tensors


@dataclass(frozen=True)
class Companions:
    """Files and fields that accompany the tensors of a model.

    files   contents of tokenizer files and of generation_config.json, by name
    ids     fields of config.json with the ids of special tokens
    kind    model_type of the Hugging Face folder they come from; None if they come from elsewhere
    note    what the folder will lack, and why results may differ; "" if there is nothing to say
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, object] = field(default_factory=dict)
    kind: str | None = None
    note: str = ""


_OF_TRAINING = (
    "moe_expert_capacity_factor moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps "
    "logit_z_loss"
).split()


def lacking(model: ModelConfig) -> list[str]:
    """Return notes about the settings of a model that config.json cannot represent."""
    notes = list[str]()
    flags = [
        option.written(value)
        for option in options_of(ModelConfig)
        if option.name in _OF_TRAINING and (value := getattr(model, option.name)) != option.default
    ]
    if flags:
        notes.append(f"config.json lacks {', '.join(flags)}: to continue training, pass them again")
    dense = "layers.0.mlp.dense_h_to_4h", "layers.0.mlp.shared_experts.dense_h_to_4h"
    if model.num_experts is not None and any(map(model.adapter, dense)):
        notes.append(
            "in some families with experts PEFT takes adapters of MLPs for those of experts: use the "
            "merged weights, or compare"
        )
    if model.mtp_num_layers:
        notes.append("layers of multi-token prediction are left out: transformers has none")
    if model.moe_router_force_load_balancing:
        notes.append(f"the weights are those of {EVEN_CHOICES}")
    if (factor := model.moe_eval_capacity_factor) is not None:
        notes.append(
            "transformers drops no tokens, but evaluation here does (--moe-eval-capacity-factor "
            f"{factor}): results differ"
        )
    return notes


def check_export(config: Config) -> str:
    """Raise MegatronError at the start if --save-hf could not write the model at the end.

    Returns a note on parts that it will not write; "" if there are none.
    """
    if problem := export_problem(config.model, config.pieces):
        raise ConfigError(f"--save-hf: {problem}")
    folder = Path(config.checkpoint.save_hf or "")
    if os.path.lexists(folder):
        free = next(
            name for n in itertools.count(2) if not os.path.lexists(name := f"{folder}-{n}")
        )
        raise ConfigError(
            f"--save-hf {folder} ({config.origin('save_hf')}) exists; it may be the "
            f"model that an earlier start of this run wrote: give --save-hf {free}, or rename "
            f"or remove {folder}"
        )
    return companions_of(config).note


def companions_of(config: Config) -> Companions:
    """Return the tokenizer files and the special ids for `config`, as transformers reads them.

    Raises DataError or CheckpointError for files that cannot be read, and the errors of
    `build_tokenizer`.
    """
    tokenizer = config.tokenizer
    kind = tokenizer.tokenizer_type
    notes = lacking(config.model)
    if kind in (None, "NullTokenizer"):
        notes = ["no tokenizer is written: the model has none", *notes]
        return Companions(note="; ".join(notes))
    path = Path(tokenizer.tokenizer_model or tokenizer.vocab_file or "")
    folder = path if path.is_dir() else path.parent
    fields = read_config(folder) if is_huggingface(folder) else {}
    model_type = fields.get("model_type")
    if model_type in FAMILIES:
        files = read_files(folder)
        ids = {name: fields[name] for name in _TOKEN_IDS if name in fields}
    else:
        model_type = None
        files, ids = _of_tokenizer(tokenizer, folder)
    if not ids:
        known = build_tokenizer(**dataclasses.asdict(tokenizer), vocab_size=config.model.vocab_size)
        ids = {"eos_token_id": known.eod}
    if not files:
        notes.insert(
            0,
            f"no tokenizer is written: transformers has none for the files of {kind}; "
            "see docs/huggingface.md for how to add one",
        )
    named = {name: i for name, i in ids.items() if i is not None}
    files.setdefault(GENERATION, to_json(named, GENERATION).encode())
    return Companions(files, ids, model_type, "; ".join(notes))


def _of_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> tuple[dict[str, bytes], Values]:
    """Return the tokenizer files for transformers, and the special ids as fields of config.json.

    The ids are {} if only a built tokenizer knows them.
    """
    kind = tokenizer.tokenizer_type
    model = Path(tokenizer.tokenizer_model or "")
    if kind == "HFTokenizer":
        tokenizer_json = {"tokenizer.json": _read(model)} if model.is_file() else {}
        return {**read_files(folder), **tokenizer_json}, {}
    if kind == "GPT2BPETokenizer":
        files = {"vocab.json": tokenizer.vocab_file, "merges.txt": tokenizer.merge_file}
        ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
        settings = to_json({"tokenizer_class": "GPT2Tokenizer"} | ends, kind).encode()
        return {name: _read(path or "") for name, path in files.items()} | {
            TOKENIZER_CONFIG: settings
        }, {}
    if kind == "TikTokenizer":
        return {}, {}
    known = build_tokenizer(**dataclasses.asdict(tokenizer))
    target = "megatron.data.tokenizer_adapters:sentence_piece_facts"
    facts = LimitedProcess(target, model, str(model), model.stat().st_size).ask(None, 0)
    # SentencePieceTokenizer appends tokens to those in the file.
    appended = {i: known.decode([i]) for i in range(len(facts["names"]), known.vocab_size)}
    ids = {f"{name}_token": i for name, i in facts["ids"].items()} | {"eos_token": known.eod}
    ids = {name: i for name, i in ids.items() if i >= 0}
    fields = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": tokenizer.tokenizer_type == "Llama2Tokenizer",
        "add_eos_token": False,
        "add_prefix_space": facts["prefix"],
        "clean_up_tokenization_spaces": False,
        "legacy": False,
        "added_tokens_decoder": {i: {"content": n, "special": True} for i, n in appended.items()},
    }
    named = {f"{name}_id": i for name, i in ids.items() if name != "unk_token"}
    names = {name: appended.get(i) or facts["names"][i] for name, i in ids.items()}
    settings = to_json(fields | names, TOKENIZER_CONFIG).encode()
    return {"tokenizer.model": _read(model), TOKENIZER_CONFIG: settings}, named


def _read(path: str | Path) -> bytes:
    return read_bytes(path, _TOKENIZER_LIMIT_BYTES, error=CheckpointError)


def read_files(folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> dict[str, bytes]:
    """Return the contents of the files `names` that a folder has. Raises CheckpointError."""
    return {name: _read(folder / name) for name in names if (folder / name).is_file()}


def config_fields(config: Config, companions: Companions) -> Values:
    """Return the content of config.json. Raises ConfigError if no family describes the model."""
    kind = family_of(config.model, companions.kind)
    fields = write_fields(kind, without_mup(config.model))
    ids = dict.fromkeys(_TOKEN_IDS) | dict(companions.ids)
    return fields | ids | {"torch_dtype": config.precision.dtype_name}


# ---- adapters


def adapters_of(name: str, shapes: Shapes) -> list[str]:
    """Return the names of the two factors of a weight's adapter; [] if it has none."""
    module = name.removesuffix(".weight")
    return [module + end for end in ADAPTERS if module + end in shapes and module != name]


def _merged(
    model: ModelConfig, parameters: Parameters, name: str, adapters: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return a full parameter with its adapter, whose factors are added to `adapters`."""
    tensor = parameters.full(name)
    factors = {n: parameters.full(n) for n in adapters_of(name, parameters.shapes)}
    if tensor is None or not factors:
        return tensor
    adapters.update((n, x) for n, x in factors.items() if x is not None)
    a, b = (adapters[n].float() for n in factors)
    adapter = model.adapter(name.removesuffix(".weight"))
    assert adapter is not None, "it has factors"
    return tensor.float() + adapter[1] * (b @ a)


def _peft_files(
    family: Family, config: Config, adapters: Mapping[str, torch.Tensor]
) -> dict[str, bytes]:
    """Return the files of PEFT for adapters with these factors, by name.

    Projections that a Hugging Face model has apart get the same A, and their rows of B.
    """
    model = config.model
    tensors = {}
    transposed = False
    for name, b in adapters.items():
        module = name.removesuffix(ADAPTERS[1])
        if module == name:
            continue
        matrix = matrix_of(family, model, f"{module}.weight", tuple(b.shape))
        transposed |= matrix.transposed
        parts = dataclasses.replace(matrix, transposed=False).cut(b)
        for their_name, rows in zip(matrix.counts, parts, strict=True):
            their_module = f"base_model.model.{their_name.removesuffix('.weight')}"
            tensors[f"{their_module}.lora_A.weight"] = adapters[module + ADAPTERS[0]].clone()
            tensors[f"{their_module}.lora_B.weight"] = rows.clone()
    source = hugging_face_folder(config.checkpoint.load)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else str(source),
        "r": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": sorted({".".join(name.split(".")[2:-2]) for name in tensors}),
        "inference_mode": True,
    }
    return {
        f"adapter/{ADAPTER}": to_json(fields, ADAPTER).encode(),
        "adapter/adapter_model.safetensors": save(tensors, {"format": "pt"}),
    }


# ---- tensors


@dataclass(frozen=True)
class Parameters:
    """Parameters of this rank's pipeline stages.

    shapes   their global shapes, by name, and those of tensors beside them
    full     returns a full parameter on the rank that is the first in both its tensor- and its
             expert-parallel group, and None on the other ranks of these groups; all of them call
             it, for the same names in the same order
    passes   called in place of `full` for parameters that other data-parallel ranks write; None if
             `full` does not need all data-parallel ranks
    """

    shapes: Shapes
    full: Callable[[str], torch.Tensor | None]
    passes: Callable[[str], None] | None = None


@dataclass(frozen=True)
class _OutputFile:
    """A file to write: our parameters in it, its header, and the size in bytes of each tensor."""

    parameters: Mapping[str, Matrix]
    header: bytes
    tensors: Mapping[str, int]


def exported(model: ModelConfig, shapes: Shapes) -> list[str]:
    """Return the parameters that have tensors in the format of Hugging Face.

    Adapters are merged, and layers of multi-token prediction are left out.
    """
    later = tuple(f"layers.{model.num_layers + i}." for i in range(model.mtp_num_layers))
    return [n for n in shapes if not n.endswith(ADAPTERS) and not n.startswith(later)]


def _distribute(family: Family, config: Config, shapes: Shapes) -> list[_OutputFile]:
    """Distribute parameters over files, in order.

    https://github.com/huggingface/safetensors describes the format of a file's header.
    """
    groups: list[dict[str, Matrix]] = []
    filled = FILE_BYTES
    for name in exported(config.model, shapes):
        shape = shapes[name]
        size = math.prod(shape) * _stored_as(name, config).itemsize
        if not groups or filled + size > FILE_BYTES:
            groups.append({})
            filled = 0
        groups[-1][name] = matrix_of(family, config.model, name, shape)
        filled += size
    files = []
    for group in groups:
        header: Values = {"__metadata__": {"format": "pt"}}
        sizes = {}
        at = 0
        for own_name, matrix in group.items():
            stored = _stored_as(own_name, config)
            for name, shape in matrix.their_shapes.items():
                sizes[name] = math.prod(shape) * stored.itemsize
                header[name] = {
                    "dtype": _DTYPE_NAMES[stored],
                    "shape": shape,
                    "data_offsets": (at, at + sizes[name]),
                }
                at += sizes[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        files.append(_OutputFile(group, len(text).to_bytes(8, "little") + text, sizes))
    return files


def _stored_as(name: str, config: Config) -> torch.dtype:
    """Return the type of one of our tensors in the files."""
    name = "float32" if is_beside(name) else config.precision.dtype_name
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _write_file(
    path: Path | None,
    output: _OutputFile,
    values: Iterator[torch.Tensor | None],
    config: Config,
) -> Exception | None:
    """Write a file, or only take part in its collectives if `path` is None.

    values   the full parameters of the file, in order; None on ranks that do not write

    Returns the OSError or CheckpointError that occurred, or None.
    """
    failure: Exception | None = None
    try:
        if path is not None:
            with contextlib.closing(SyncedFile(path)) as file:
                file.write(output.header)
                for (name, matrix), tensor in zip(output.parameters.items(), values, strict=True):
                    assert tensor is not None, "the first rank has each full parameter"
                    tensor = tensor.to(_stored_as(name, config))
                    named = ", ".join(list(matrix.counts)[:2])
                    check_finite(tensor, f"{named}, written in {tensor.dtype}")
                    constants = (tensor.new_tensor(x) for x in matrix.constants.values())
                    for cut in (*matrix.cut(tensor), *constants):
                        file.write(cut.view(-1).view(torch.uint8).numpy().data)
                    del tensor  # before the next one is made
                file.finish()
    except (OSError, CheckpointError) as error:
        failure = error
    for _ in values:
        pass  # even after an error, the other ranks wait for this rank's shards
    return failure


def write_model(
    folder: Path,
    config: Config,
    topology: Topology,
    parameters: Parameters,
    companions: Companions | None = None,
    overwrite: bool = False,
    alive: Alive = nothing,
) -> int:
    """Write a model in Hugging Face's format; return the size of its tensors in bytes.

    parameters   parameters of this rank's pipeline stages
    companions   by default those from `companions_of`
    overwrite    whether to replace a folder that exists
    alive        called after every parameter

    All ranks call it. Raises CheckpointError on every rank, for example if `folder` exists or no
    family describes the model. No new folder has appeared then, unless only the last sync failed.
    """

    def prepare() -> tuple[Companions, Values]:
        if os.path.lexists(folder) and not (overwrite and folder.is_dir()):
            raise ConfigError(f"{folder} exists: choose another folder for the model, or remove it")
        beside = companions_of(config) if companions is None else companions
        return beside, config_fields(config, beside)

    adapters: dict[str, torch.Tensor] = {}

    def values(file: _OutputFile) -> Iterator[torch.Tensor | None]:
        for name in file.parameters:
            tensor = _merged(config.model, parameters, name, adapters)
            if tensor is not None and config.model.use_mup:
                tensor = take_up(config.model, name, tensor)
            yield tensor
            del tensor  # before the next one is made
            alive()

    what = f"writing {folder}"
    beside, fields = decided_by_first(topology, prepare)
    owners = gather_objects(parameters.shapes, topology.pipeline)
    with errors_on_all_ranks(topology, what):
        family = FAMILIES[fields["model_type"]]
        listed = [_distribute(family, config, shapes) for shapes in owners]
    files = [file for of_owner in listed for file in of_owner]
    before = sum(map(len, listed[: topology.pipeline.rank]))
    temporary = decided_by_first(topology, lambda: start_folder(folder))
    try:
        failures = []
        # data-parallel neighbours that gather full parameters together
        together = topology.expert_span.size
        sets = topology.data.size // together
        number_of_set = topology.data.rank // together
        writer = topology.tensor.is_first and topology.expert_span.is_first
        for number, file in enumerate(listed[topology.pipeline.rank]):
            if number % sets == number_of_set:
                path = temporary / _file_name(before + number, len(files)) if writer else None
                failures.append(_write_file(path, file, values(file), config))
            elif parameters.passes is not None:
                for name in file.parameters:
                    for each in (name, *adapters_of(name, parameters.shapes)):
                        parameters.passes(each)
        if config.model.lora_rank is not None:
            for of_rank in gather_objects(adapters, topology.world):
                adapters |= of_rank
        with errors_on_all_ranks(topology, what):
            for failure in filter(None, failures):
                raise failure
            apart = _peft_files(family, config, adapters) if adapters else {}
        small = {**beside.files, **apart}
        return decided_by_first(
            topology, lambda: _finish(temporary, folder, files, fields, small, overwrite)
        )
    finally:
        if topology.world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # no effect once it has its final name


def _file_name(number: int, total: int) -> str:
    return SINGLE if total == 1 else f"model-{number + 1:05d}-of-{total:05d}.safetensors"


def _finish(
    temporary: Path,
    folder: Path,
    tensor_files: list[_OutputFile],
    fields: Values,
    files: Mapping[str, bytes],
    overwrite: bool,
) -> int:
    """Write the small files and rename the folder; return the size of all tensors in bytes."""
    size = sum(sum(file.tensors.values()) for file in tensor_files)
    try:
        if len(tensor_files) > 1:
            weight_map = {
                name: _file_name(number, len(tensor_files))
                for number, file in enumerate(tensor_files)
                for name in file.tensors
            }
            listed = {"metadata": {"total_size": size}, "weight_map": weight_map}
            write_text(temporary / INDEX, to_json(listed, INDEX))
        write_text(temporary / CONFIG, to_json(fields, CONFIG))
        write_files(temporary, files)
        name_folder(temporary, folder, overwrite)
    except OSError as error:
        raise CheckpointError(f"writing {folder} failed: {error}") from error
    return size


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write new files and sync them to disk. Raises OSError."""
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write_bytes(folder / name, data)


# ---- the model of a run


def export(
    folder: Path,
    config: Config,
    topology: Topology,
    chunks: torch.nn.Module,
    alive: Alive = nothing,
    arriving: Callable[[Iterable[torch.nn.Parameter]], Iterator[torch.nn.Parameter]] = iter,
    on_all: bool = False,
) -> int:
    """Write a run's model in its training precision; return the size of its tensors in bytes.

    arriving   yields parameters when their values are available (Engine.arriving)
    on_all     whether all data-parallel ranks must call `arriving` for the same parameters

    All ranks call it. In addition to the model, a rank needs memory for one full parameter, which
    it gathers from the tensor-parallel and the experts' groups. Raises the errors of `write_model`.
    """
    owned: dict[str, list[torch.nn.Parameter]] = {}
    for p in unique_parameters(chunks):
        copy = topology.embedding is not None and not topology.has_first_stage
        if not (sharding_of(p).tied and copy):
            owned.setdefault(sharding_of(p).name, []).append(p)
    shapes = {name: sharding_of(shards[0]).global_shape for name, shards in owned.items()}
    beside = {n: tensor for n, tensor in persistent_tensors(chunks).items() if is_beside(n)}
    shapes |= {name: tuple(tensor.shape) for name, tensor in beside.items()}

    def full(name: str) -> torch.Tensor | None:
        if name in beside:
            return beside[name].cpu()
        return _gathered(arriving(owned[name]), topology)

    def passes(name: str) -> None:
        for _ in arriving(owned.get(name, [])):
            pass

    parameters = Parameters(shapes, full, passes if on_all else None)
    return write_model(folder, config, topology, parameters, alive=alive)


def _gathered(parameters: Iterable[torch.Tensor], topology: Topology) -> torch.Tensor | None:
    """Return the full parameter of which `parameters` are this rank's shards, in host memory.

    Only the first tensor-parallel rank of the first member of `expert_span` gets it; the other
    ranks get None.
    """
    writer = topology.tensor.is_first and topology.expert_span.is_first
    full = None
    for parameter in parameters:
        sharding = sharding_of(parameter)
        boxes = [(sharding.offset, sharding.extent)]
        shards = parameter.detach().unsqueeze(0)
        tensor = topology.tensor_of(sharding)
        for group, divides in (
            (topology.expert, sharding.experts),
            (tensor, sharding.dim is not None),
        ):
            if divides and group.size > 1:
                boxes = [one for of_rank in gather_objects(boxes, group) for one in of_rank]
                shards = gather_first(shards, group)
        if not writer:
            continue
        if full is None:
            full = torch.empty(sharding.global_shape, dtype=parameter.dtype)
        for shard, (offset, extent) in zip(shards, boxes, strict=True):
            region = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
            full[region] = shard[tuple(slice(0, n) for n in extent)].cpu()
    return full
