"""A foreign checkpoint as a reader returns it, and our settings from Megatron's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron.config import Config
from megatron.config.command_line import settings_flags
from megatron.config.flags_of_others import changes_model
from megatron.config.model import ACTIVATIONS, ModelConfig
from megatron.config.option import Option, options_of
from megatron.config.validate import unneeded
from megatron.errors import CheckpointError, ConfigError
from megatron.untrusted import is_count
from megatron_conversion.unpickle import attributes

T = TypeVar("T")
MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("master", *MOMENTS)

_RUN = (
    "lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction "
    "lr_warmup_iters lr_warmup_samples start_weight_decay end_weight_decay "
    "weight_decay_incr_style weight_decay adam_beta1 adam_beta2 adam_eps clip_grad train_iters "
    "train_samples seed fp16 bf16 global_batch_size micro_batch_size"
).split()
PRECISION = {"fp16", "bf16"}  # a choice of one replaces both
# Arguments of models whose parameters have no counterpart here: (name, values that mean off).
_UNSUPPORTED = (
    ("num_experts", (None, 0, 1, [1], (1,))),
    ("multi_latent_attention", (None, False)),
    ("rotary_scaling_factor", (None, 1, 1.0)),
    ("num_residual_layers_per_attention", (None, 1)),
    ("use_mup", (None, False)),
    ("mtp_num_layers", (None, 0)),
    ("softmax_type", (None, "vanilla", "off-by-one")),
    ("attention_output_gate", (None, False)),
    ("experimental_attention_variant", (None,)),
)
_OTHERS = {name for name, _ in _UNSUPPORTED}
_OF_MODEL = {
    option.name
    for option in options_of(ModelConfig)
    if not option.inert and not option.name.startswith(("num_experts", "moe_"))
}


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


def _of_model(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return settings of the model, and the arguments that cannot be read.

    Arguments are named like flags, which the command line reads in the same way.
    """
    settings: dict[str, Any] = {}
    unread = []
    for spelling, flag in settings_flags().items():
        name = spelling.lstrip("-").replace("-", "_")
        value = arguments.get(name)
        option = flag.option
        if value is None or name in _OTHERS or not _OF_MODEL.issuperset(flag.settings):
            continue
        try:
            if option is None:
                translated = flag.read([str(value)]) if flag.read and value else {}
                settings = translated | settings
            elif spelling in option.shortcuts and value is True:
                settings[option.name] = flag.value
            elif (
                spelling in option.flags
                and (accepted := _accepted(option, value)) != option.default
            ):
                settings.setdefault(option.name, accepted)
        except (ConfigError, ValueError):
            unread.append(f"{name}={value!r:.60}")
    return settings, unread


def _accepted(option: Option, value: Any) -> Any:
    """Return an argument's value in the type of a setting. Raises ValueError."""
    if isinstance(value, str):
        return option.parse([value])
    return option.accept([value] if option.many and not isinstance(value, (list, tuple)) else value)


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings, by name, from those of Megatron's arguments that are present.

    Raises CheckpointError, naming the features of the model that are not supported.
    """
    of_model, unread = _of_model(arguments)
    unsupported = [
        f"{name}={arguments[name]!r}"
        for name, off in _UNSUPPORTED
        if arguments.get(name) not in off
    ]
    unsupported += unread
    unsupported += [
        f"{name}={value!r:.60}"
        for name, value in arguments.items()
        if name not in _OTHERS and changes_model(name, value, arguments)
    ]
    if unsupported:
        raise CheckpointError(
            f"the checkpoint's model has unsupported features: {', '.join(unsupported)}"
        )
    settings = {
        name: arguments[name]
        for name in _RUN
        if isinstance(arguments.get(name), (bool, int, float, str))
    }
    settings |= {name: of_model[name] for name in of_model.keys() - unneeded(of_model)}
    if "position_embedding_type" not in arguments and not arguments.get(
        "add_position_embedding", True
    ):
        settings.setdefault("position_embedding_type", "none")
    if arguments.get("group_query_attention") is False:
        settings.pop("num_key_value_heads", None)
    gelu = not any(settings.get(name) for name in ACTIVATIONS)
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
