"""A foreign checkpoint as a reader returns it, and our settings from Megatron's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.checkpoint.settings import ARCHITECTURE
from megatron.config import Config
from megatron.config.flags_of_others import changes_model
from megatron.config.settings import all_options
from megatron.errors import CheckpointError, ConfigError
from megatron.untrusted import is_count
from megatron_conversion.unpickle import attributes

T = TypeVar("T")
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)

_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
    "apply_layernorm_1p",
    "swiglu",
    "squared_relu",
    "openai_gelu",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
    "rotary_percent",
    "rotary_interleaved",
    "apply_residual_connection_post_layernorm",
    "fp32_residual_connection",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
)
_RUN = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_fraction",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "clip_grad",
    "train_iters",
    "train_samples",
    "seed",
    "fp16",
    "bf16",
    "global_batch_size",
    "micro_batch_size",
)
PRECISION = {"fp16", "bf16"}  # a choice of one replaces both
# Arguments that are not supported, unless they are off: (name, values that mean off).
_UNSUPPORTED = (
    ("num_experts", (None, 0, 1, [1], (1,))),
    ("multi_latent_attention", (None, False)),
    ("rotary_scaling_factor", (None, 1, 1.0)),
    ("num_residual_layers_per_attention", (None, 1)),
    ("use_mup", (None, False)),
    ("mtp_num_layers", (None, 0)),
    ("window_size", (None,)),
    ("softmax_type", (None, "vanilla")),
    ("attention_output_gate", (None, False)),
    ("no_rope_freq", (None,)),
)
# Prefixes of our settings that settings_of reads separately, or _UNSUPPORTED rejects.
_READ_SEPARATELY = (
    *("vocab_size", "num_key_value_heads", "num_experts", "moe_", "position_embedding_type"),
    *("rope_", "yarn_", "rotary_base", "normalization", "layernorm_epsilon"),
    *("embedding_layernorm", "exact_gelu", "use_mup", "mup_", "window_size"),
)


@dataclass(frozen=True)
class ParameterShard:
    """Shard of a parameter on one tensor-parallel rank.

    weight   shard in the model's dtype; on the meta device if only `load` returns its values
    state    returns "master", "exp_avg" or "exp_avg_sq", of the weight's shape; None without
             optimizer state
    load     returns the shard from its file; None if `weight` has the values
    """

    weight: torch.Tensor
    state: Callable[[str], torch.Tensor] | None = None
    load: Callable[[], torch.Tensor] | None = None

    def values(self) -> torch.Tensor:
        """Return the shard with its values."""
        return self.weight if self.load is None else self.load()


@dataclass
class SourceCheckpoint:
    """Foreign checkpoint. Tensors stay in the files until they are converted.

    kind             "Megatron", or "DeepSpeed" with its version and ", pipeline" if it was used
    folder           folder with the files
    iteration        completed iterations
    arguments        training arguments, by Megatron's names; empty if the files have none
    version          Megatron's checkpoint_version
    tensor_size      tensor-parallel size of the job that wrote it
    pipeline_size    pipeline-parallel size of that job
    files            files that the conversion reads
    parameters       shards of each parameter in order of tensor rank, by our names
    counters         consumed samples and the like, by their names in our state
    optimizer_step   Adam's step count; None without optimizer state
    loss_scale       state of a dynamic loss scale; None without one
    data_size        number of data-parallel ranks with optimizer shards; None except for DeepSpeed
    notes            remarks for the user
    """

    kind: str
    folder: Path
    iteration: int
    arguments: Mapping[str, Any]
    version: float
    tensor_size: int
    pipeline_size: int
    files: list[Path]
    parameters: dict[str, list[ParameterShard]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    optimizer_step: int | None = None
    loss_scale: dict[str, Any] | None = None
    data_size: int | None = None
    notes: list[str] = field(default_factory=list)


def source_of(
    kind: str,
    states: Mapping[Path, Mapping[str, Any]],
    folder: Path,
    version: Any,
    tensor: int,
    pipeline: int,
) -> SourceCheckpoint:
    """Return a source with the arguments and counters of the first rank, without parameters.

    `states` has the content of each model-parallel rank's file, in order of ranks. Raises
    CheckpointError if the files' iterations differ, or if a file has none.
    """
    first = next(iter(states.values()))
    arguments = attributes(first.get("args"))
    unnamed = 0 if kind == "Megatron" else None  # Megatron's released checkpoints have no iteration
    iterations = {
        path: state.get("iteration", state.get("global_steps", unnamed))
        for path, state in states.items()
    }
    for path, iteration in iterations.items():
        if not is_count(iteration):
            raise CheckpointError(f"{path} has no valid iteration")
    if len(set(iterations.values())) > 1:
        listed = ", ".join(
            f"{path.relative_to(folder)}: {iteration}" for path, iteration in iterations.items()
        )
        raise CheckpointError(f"{folder} mixes files of different iterations ({listed})")
    iteration = next(iter(iterations.values()))
    source = SourceCheckpoint(
        kind, folder, iteration, arguments, float(version), tensor, pipeline, list(states)
    )
    if not arguments:
        source.notes.append(
            "it has no Megatron arguments: settings come from the tensors and the command line"
        )
    sequence = int(arguments.get("seq_length") or 0)
    samples = int(arguments.get("consumed_train_samples") or first.get("global_samples") or 0)
    tokens = first.get("tokens") or arguments.get("consumed_train_tokens") or samples * sequence
    skipped = int(first.get("skipped_steps") or arguments.get("skipped_iterations") or 0)
    scheduled = attributes(first.get("opt_param_scheduler") or first.get("lr_scheduler")).get(
        "num_steps"
    )
    # Megatron's scheduler counts only samples of steps that were not skipped.
    if not isinstance(scheduled, int):
        scheduled = samples * (iteration - skipped) // iteration if iteration else samples
    source.counters = {
        "iteration": iteration,
        "consumed_samples": samples,
        "consumed_tokens": int(tokens),
        "consumed_valid_samples": int(arguments.get("consumed_valid_samples") or 0),
        "skipped_iterations": skipped,
        "scheduled_iterations": iteration - skipped,
        "scheduled_samples": scheduled,
        "scheduled_tokens": scheduled * sequence,
    }
    return source


def check_ranks(
    folder: Path,
    tensor: int,
    pipeline: int,
    ranks: set[tuple[int, int]],
    file_of: Callable[[int, int], str],
) -> None:
    """Raise CheckpointError unless `ranks` has every (tensor, pipeline) rank and no other."""
    limit = len(ranks) + 1  # enough to detect a missing rank, whatever sizes a file claims
    expected = {(t, p) for p in range(min(pipeline, limit)) for t in range(min(tensor, limit))}
    if expected != ranks:
        missing = sorted(expected - ranks)
        extra = sorted(ranks - expected)
        raise CheckpointError(
            f"{folder} was written with tensor-parallel size {tensor} and pipeline-parallel size "
            f"{pipeline}, but {file_of(*(missing or extra)[0])} is "
            f"{'missing' if missing else 'unexpected'}"
        )


def aligned(folder: Path, each: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """Return {parameter: the tensor ranks' values} from each rank's {parameter: value}.

    Raises CheckpointError if the ranks have different parameters.
    """
    for t, other in enumerate(each):
        if different := sorted(each[0].keys() ^ other.keys()):
            raise CheckpointError(
                f"{folder}: tensor ranks 0 and {t} have different parameters: {different[:4]}"
            )
    return {name: [values[name] for values in each] for name in each[0]}


@contextlib.contextmanager
def layout_errors(folder: Path) -> Iterator[None]:
    """Turn errors from unexpected types or sizes in foreign files into CheckpointError."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise CheckpointError(
            f"{folder} does not have the layout of Megatron or DeepSpeed ({type(error).__name__}: "
            f"{reason})"
        ) from error


def _unread(name: str, value: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether an argument changes the model, but `settings_of` does not read it."""
    is_architecture = name in ARCHITECTURE and name not in _MODEL
    if is_architecture and not name.startswith(_READ_SEPARATELY):
        return value is not None and value != all_options()[name].default
    return changes_model(name, value, arguments)


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings, by name, from those of Megatron's arguments that are present.

    Raises CheckpointError, naming the features of the model that are not supported.
    """
    unsupported = [
        f"{name}={arguments[name]!r}"
        for name, off in _UNSUPPORTED
        if arguments.get(name) not in off
    ]
    unsupported += [
        f"{name}={value!r:.60}"
        for name, value in arguments.items()
        if name not in dict(_UNSUPPORTED) and _unread(name, value, arguments)
    ]
    positions = arguments.get("position_embedding_type")
    if arguments.get("use_rotary_position_embeddings"):
        positions = "rope"
    elif not isinstance(positions, str):
        alibi = arguments.get("use_alibi_position_embeddings")
        positions = (
            "alibi"
            if alibi
            else "none"
            if arguments.get("add_position_embedding") is False
            else None
        )
    if positions not in (None, "learned_absolute", "rope", "none", "alibi"):
        unsupported.append(f"position_embedding_type={positions!r}")
    if unsupported:
        raise CheckpointError(
            f"the checkpoint's model has unsupported features: {', '.join(unsupported)}"
        )
    settings = {
        name: arguments[name]
        for name in (*_MODEL, *_RUN)
        if isinstance(arguments.get(name), (bool, int, float, str))
    }
    settings["vocab_size"] = arguments.get("vocab_size")
    settings["embedding_layernorm"] = arguments.get("embed_layernorm")
    interpolation_factor = arguments.get("rotary_seq_len_interpolation_factor")
    if arguments.get("use_rope_scaling"):
        settings["rope_scaling"] = "llama3"
        settings["rope_scaling_factor"] = arguments.get("rope_scaling_factor")
    elif interpolation_factor not in (None, 1):
        settings["rope_scaling"] = "linear"
        settings["rope_scaling_factor"] = interpolation_factor
    settings["position_embedding_type"] = positions
    if arguments.get("group_query_attention") is not False:
        settings["num_key_value_heads"] = arguments.get("num_key_value_heads") or arguments.get(
            "num_query_groups"
        )
    settings["layernorm_epsilon"] = arguments.get(
        "layernorm_epsilon", arguments.get("norm_epsilon")
    )
    settings["rotary_base"] = arguments.get(
        "rotary_base", arguments.get("rotary_position_embeddings_theta")
    )
    if isinstance(arguments.get("normalization"), str):
        settings["normalization"] = arguments["normalization"].lower()
    gelu = not any(arguments.get(name) for name in ("swiglu", "squared_relu", "openai_gelu"))
    te = arguments.get("use_te_activation_func")
    if arguments and gelu and arguments.get("bias_gelu_fusion") is False and not te:
        # Megatron's fused GELU and Transformer Engine's are the tanh approximation; Megatron's
        # unfused GELU is exact.
        settings["exact_gelu"] = True
    return {name: value for name, value in settings.items() if value is not None}


def configure(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """Return (configuration, notes) from the checkpoint's settings, overridden by `chosen`.

    If only the checkpoint's settings of the training are invalid, all of these are dropped, with a
    note. Raises CheckpointError, naming the flags of missing settings, and ConfigError if settings
    of the model or of the user are invalid.
    """
    if chosen.keys() & PRECISION:
        settings = {name: value for name, value in settings.items() if name not in PRECISION}
    values = {**settings, **chosen}
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    missing = [f"--{name.replace('_', '-')}" for name in needed if values.get(name) is None]
    if missing:
        raise CheckpointError(
            f"the checkpoint does not contain {', '.join(missing)}: add these flags with the "
            "values of the training (--vocab-size as the tokenizer has it, without padding)"
        )
    try:
        return Config.create(**values), []
    except ConfigError as error:
        config = Config.create(
            **{name: v for name, v in values.items() if name not in _RUN or name in chosen}
        )
        problems = " ".join(str(error).split())
        return config, [
            f"its settings of the training are not used, as some are invalid here: {problems}"
        ]
