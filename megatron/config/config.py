"""The configuration of a run: one frozen object with one section per subject."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import attention
from megatron.config.deepspeed_json import merge_deepspeed_json
from megatron.config.io import parse_blend_schedule
from megatron.config.model import EVEN_CHOICES, GATES, ModelConfig
from megatron.config.option import pairs
from megatron.config.parallel import SIZES, V_SHAPED, layout_counts
from megatron.config.parallel_checks import ring_limits
from megatron.config.phases import parse_batch_sizes
from megatron.config.pieces import PLAIN, Piece, Pieces
from megatron.config.presets import give_preset
from megatron.config.settings import (
    Sections,
    Settings,
    all_options,
    raise_problems,
    section_of,
)
from megatron.config.training_checks import RATE_SCHEDULE, piece_problems
from megatron.config.validate import run_requirements, validate
from megatron.errors import ConfigError

Export = Callable[[ModelConfig, Pieces], str]
"""Returns why --save-hf could not write a model; "" if it could."""


@dataclass(frozen=True)
class Config(Sections):
    """All settings of a run, resolved and checked. Use Config.create(...) or parse_args(...).

    explicit          chosen settings and their values
    origins           origin of each setting (see origin)
    notices           messages for the user about settings that have no effect or were translated
    standing_notices  the notices that replace(...) keeps, because they cannot be derived from the
                      settings: about flags that are not settings, and about the DeepSpeed JSON
    pieces            the user's own pieces (see with_pieces); to_dict omits them
    """

    explicit: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    origins: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    notices: tuple[str, ...] = dataclasses.field(compare=False, repr=False, default=())
    standing_notices: tuple[str, ...] = dataclasses.field(compare=False, repr=False, default=())
    pieces: Pieces = PLAIN

    @classmethod
    def create(cls, preset: str | None = None, **values: object) -> Config:
        """Create a configuration from settings by name: Config.create(num_layers=4, ...).

        num_layers, hidden_size, num_attention_heads and seq_length are required. `preset` names a
        preset, whose values `values` override. Of settings in neither, micro_batch_size is 1, lr is
        1e-4, train_iters (or train_samples, if the schedule is in samples) is one more than warm-up
        and final decay take, and world_size is the smallest that the parallel sizes allow. Raises
        ConfigError with all problems.
        """
        settings = Settings()
        if preset is not None:
            give_preset(settings, preset, chosen=values)
        settings.give_arguments(values)
        return finish(settings)

    def replace(self, **values: object) -> Config:
        """Return a copy with some settings changed and dependent settings derived again.

        None resets a setting to its derived or default value. Raises ConfigError with all problems.
        """
        settings = Settings(
            explicit=dict(self.explicit),
            origins={n: self.origins[n] for n in self.explicit},
            notices=list(self.standing_notices),
            pieces=self.pieces,
        )
        settings.give_arguments(values)
        merge = values.get("deepspeed_config") is not None
        return finish(settings, merge_json=merge)

    def with_pieces(self, **pieces: Any) -> Config:
        """Return a copy with the user's own pieces.

        The keywords are the fields of Pieces. Raises ConfigError if a piece is not callable or does
        not work with --cuda-graph-impl.
        """
        merged = dataclasses.replace(self.pieces, **pieces)
        chosen = {n: v for n, v in self.explicit.items() if not _of_preset(self.origins[n])}
        raise_problems(list(piece_problems(self.kernels.cuda_graph_impl, merged, chosen)))
        return dataclasses.replace(self, pieces=merged)

    @property
    def loss_components(self) -> tuple[str, ...]:
        """Return the names of what the training loss reports beside its value."""
        depths = range(1, self.model.mtp_num_layers + 1)  # Megatron-LM's names
        return (*self.pieces.loss_components, *(f"mtp_{k} loss" for k in depths))

    @property
    def loss_name(self) -> str:
        """Return the name of the training loss in logs and trackers."""
        return "lm loss" if self.pieces.loss is None else "loss"

    @property
    def schedule(self) -> str | Piece:
        """Return the pipeline schedule: its name, or the user's function (protocols.Order)."""
        return self.pieces.schedule or self.parallel.schedule

    @property
    def schedule_name(self) -> str:
        """Return the name of the pipeline schedule."""
        schedule = self.schedule
        return (
            schedule
            if isinstance(schedule, str)
            else getattr(schedule, "__name__", type(schedule).__name__)
        )

    def origin(self, name: str) -> str:
        """Return the origin of a setting.

        Examples are 'default', 'command line', 'preset X', 'FILE:LINE: key' and 'derived ...'.
        Raises ConfigError for an unknown name.
        """
        section_of(name)
        return self.origins[name]

    @property
    def metrics_path(self) -> Path | None:
        """Return --metrics-file, or metrics.jsonl in the --save folder; None without either."""
        if self.logging.metrics_file:
            return Path(self.logging.metrics_file)
        return Path(self.checkpoint.save) / "metrics.jsonl" if self.checkpoint.save else None

    def num_micro_batches(self, global_batch_size: int | None = None) -> int:
        """Return the number of micro-batches in a step on each replica.

        `global_batch_size` defaults to the setting. Raises ConfigError if it is not a multiple of
        micro-batch size x data-parallel size.
        """
        size = global_batch_size or self.batch.global_batch_size
        per_round = self.batch.micro_batch_size * self.parallel.data_parallel_size
        if size % per_round:
            raise ConfigError(
                f"global batch size {size} is not a multiple of micro-batch-size "
                f"{self.batch.micro_batch_size} x data-parallel size "
                f"{self.parallel.data_parallel_size} = {per_round}"
            )
        return size // per_round

    def to_dict(self) -> dict[str, object]:
        """Return all settings by name, JSON-serializable, for checkpoints and logs."""
        return {name: _plain(o.named(self.get(name))) for name, o in all_options().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Config:
        """Create a configuration from the result of `to_dict`.

        Values that follow from the others stay derived. Raises ConfigError for an unknown name or
        an invalid value.
        """
        options = all_options()
        settable = {n: v for n, v in values.items() if n not in options or not options[n].internal}
        chosen = {
            n: v
            for n, v in settable.items()
            if n not in options or (not options[n].derived and v != _plain(options[n].default))
        }
        while True:  # a value may follow from one that is chosen here
            trial = Settings()
            trial.give_arguments(chosen)
            resolve(trial)
            left = (
                n
                for n, v in settable.items()
                if n not in chosen
                and v is not None
                and v != _plain(options[n].named(trial.values[n]))
            )
            if (name := next(left, None)) is None:
                settings = Settings()
                settings.give_arguments(chosen)
                return finish(settings, merge_json=False)
            chosen[name] = settable[name]


def _plain(value: object) -> object:
    """Return a value in its JSON representation."""
    return list(value) if isinstance(value, tuple) else value


def finish(
    settings: Settings,
    *,
    merge_json: bool = True,
    run: bool = False,
    export: Export | None = None,
) -> Config:
    """Return a configuration: chosen settings, derived ones and defaults, all of them checked.

    merge_json  whether to merge the DeepSpeed JSON into `settings`
    run         whether to require the settings that only a training run needs
    export      function that returns why --save-hf could not write the model; None: no check

    Raises ConfigError with all problems.
    """
    if merge_json:
        merge_deepspeed_json(settings)
    if run:
        run_requirements(settings)
    if settings.pieces.learning_rate is not None:  # takes the place of a preset's schedule
        for name in list(settings.explicit):
            if name.startswith(RATE_SCHEDULE) and _of_preset(settings.origins[name]):
                settings.give(name, None, "")
    standing = tuple(dict.fromkeys(settings.notices))
    resolve(settings)
    for name, value in settings.explicit.items():
        option = all_options()[name]
        if option.inert and value != option.default and not _of_preset(settings.origins[name]):
            settings.notices.append(f"{option.written(value)} has no effect: {option.inert}")
        # many scripts name runs without naming a project
        if name.startswith("wandb_") and not settings.values["wandb_project"]:
            settings.notices.append(
                f"{option.written(value)} has no effect: --wandb-project is not given"
            )
    validate(settings)
    if export is not None and settings.values["save_hf"] is not None:
        try:
            if problem := export(settings.sections().model, settings.pieces):
                settings.problems.append(f"--save-hf: {problem}")
        except Exception:
            if not settings.problems:  # with other problems, there may be no model to export
                raise
    raise_problems([_located(settings, problem) for problem in settings.problems])
    return Config(
        **vars(settings.sections()),
        explicit=settings.explicit,
        origins=settings.origins,
        notices=tuple(dict.fromkeys(settings.notices)),
        standing_notices=standing,
        pieces=settings.pieces,
    )


def _of_preset(origin: str) -> bool:
    return origin.startswith("preset ")


def _located(settings: Settings, problem: str) -> str:
    """Return a problem with the FILE:LINE origins of the settings whose flags it names."""
    flags = {*re.findall(r"--[\w-]+", problem)}
    locations = [
        settings.origins[name]
        for name in settings.explicit
        if flags.intersection((*all_options()[name].flags, *all_options()[name].off_flags))
        and re.search(r":\d+: ", settings.origins[name])
        and settings.origins[name] not in problem
    ]
    return f"{problem} ({', '.join(locations)})" if locations else problem


# --- resolve


# For library users and tests: a training run must set the value; see run_requirements.
_STAND_IN_ORIGIN = "default; a training run must give it"
# Setting -> value and origin if it is unset.
_FALLBACKS: Mapping[str, tuple[object, str]] = {
    "micro_batch_size": (1, _STAND_IN_ORIGIN),
    "lr": (1e-4, _STAND_IN_ORIGIN),
    "dataloader_type": ("single", "default"),
}


def default_of(name: str) -> object:
    """Return the value of a setting that is neither chosen nor derived from others."""
    return _FALLBACKS[name][0] if name in _FALLBACKS else all_options()[name].default


# Setting -> the setting whose value it takes if it is unset.
_SAME_AS = pairs(
    "num_key_value_heads=num_attention_heads max_position_embeddings=seq_length "
    "decoupled_lr=lr decoupled_min_lr=min_lr "
    "start_weight_decay=weight_decay end_weight_decay=weight_decay "
    "expert_tensor_parallel_size=tensor_model_parallel_size"
)


def resolve(s: Settings) -> None:
    """Fill `s.values` with chosen values, defaults and derived values."""
    v = s.values
    options = all_options()
    defaults = {name: copy.copy(option.default) for name, option in options.items()}
    v.update(defaults | s.explicit)
    s.origins = dict.fromkeys(options, "default") | s.origins
    # Megatron-LM's examples quote this value twice
    v["split"] = v["split"].strip("'\"")
    for name, (value, origin) in _FALLBACKS.items():
        s.fill(name, value, origin)
    for name, other in _SAME_AS.items():
        if s.usable(other):
            s.fill(name, v[other], f"derived from {other.replace('_', '-')}")
    _tokenizer(s)
    _model(s)
    _parallel(s)
    _steps(s)
    if v["recompute_granularity"] == "full":
        s.fill("recompute_method", "uniform", "derived from recompute-granularity full")
    if v["loss_scale"] == 0:
        s.derive("loss_scale", None, s.origins["loss_scale"])
    if v["zero_allgather_bucket_size"] == 0:
        s.derive("zero_allgather_bucket_size", 50_000_000, "derived: 0 means the default")
    s.fill("exit_signal_handler", v["save"] is not None, "derived from save")
    s.fill("max_consecutive_skips", 100 if v["fp16"] else 10, "derived from fp16")
    if v["save_interval"] is not None and v["save"] is None:
        s.ignore("save_interval", "nothing is saved without --save FOLDER")
    for name in ("data_order", "max_epochs"):
        if v[name] is not None and v["mock_data"]:
            s.ignore(name, "--mock-data has no documents")
    if v["dataloader_type"] == "cyclic":
        s.fill("data_order", "megatron", "derived from dataloader-type cyclic")
    if v["train_data_exact_num_epochs"]:
        s.fill("data_order", "megatron", "derived from train-data-exact-num-epochs")
    s.fill("data_order", "stream", "derived")
    if s.usable("blend_schedule") and parse_blend_schedule(v["blend_schedule"])[0][0] == 0:
        for name in ("data_path", "data_file_list", "train_data_path"):
            if v[name]:
                use = "not used" if name == "train_data_path" else "for validation and test only"
                s.notices.append(
                    f"the weights of {all_options()[name].flag} are {use}: --blend-schedule begins at "
                    "0 tokens"
                )
    if v["data_packing"] == "best-fit" and v["mock_data"]:
        s.ignore("data_packing", "--mock-data has no documents to pack")
    elif v["data_packing"] == "best-fit":
        for name in ("reset_position_ids", "reset_attention_mask"):
            if name not in s.explicit:
                s.derive(name, True, "derived from data-packing best-fit")
    if v["loss_mask"] in ("required", "optional") and "calculate_per_token_loss" not in s.explicit:
        s.derive("calculate_per_token_loss", True, "derived from loss-mask")
    _context(s)


def _context(s: Settings) -> None:
    """Set cp_comm_type to a2a if it is not chosen, and a2a is possible but a ring is not."""
    v = s.values
    name = "cp_comm_type"
    size = s.values["context_parallel_size"]
    if name in s.explicit or not s.usable(name, *SIZES, "num_attention_heads") or size == 1:
        return
    limits = [limit for limit, _ in ring_limits(s.sections(), size)]
    if limits and v["num_attention_heads"] % (v["tensor_model_parallel_size"] * size) == 0:
        s.derive(name, "a2a", "derived: a ring does not support it")
        s.notices.append(f"--cp-comm-type is a2a: {'; '.join(limits)}")


def _tokenizer(s: Settings) -> None:
    v = s.values
    chosen = v["vocab_size"] is not None and not _of_preset(s.origins["vocab_size"])
    if v["vocab_file"] and v["merge_file"] and not chosen:
        s.fill("tokenizer_type", "GPT2BPETokenizer", "derived from vocab-file and merge-file")
    # A preset's vocabulary size is that of the model's own tokenizer; other tokenizers differ.
    kind = v["tokenizer_type"]
    if kind not in (None, "NullTokenizer") and _of_preset(s.origins["vocab_size"]):
        s.explicit.pop("vocab_size", None)
        s.derive("vocab_size", None, "default")


def _model(s: Settings) -> None:
    v = s.values
    gate = next((name for name in GATES if v[name]), "")

    def mlp_width(hidden: int) -> int:
        # Three matrices instead of two: 2/3 of the width keeps the number of parameters the same
        # (Shazeer 2020, arXiv 2002.05202).
        return max(64, int(4 * hidden * 2 / 3 / 64) * 64) if gate else 4 * hidden

    explicit_width = v["ffn_hidden_size"] is not None
    if not explicit_width and s.usable("hidden_size"):
        origin = f"derived from hidden-size{' and ' if gate else ''}{gate}"
        s.derive("ffn_hidden_size", mlp_width(v["hidden_size"]), origin)
    attention.derive(s)
    _experts(s)
    if s.usable("lora_rank"):
        s.fill("lora_alpha", 2.0 * v["lora_rank"], "derived from lora-rank")
    sizes = "hidden_size", "num_layers", "ffn_hidden_size", "num_attention_heads", "kv_channels"
    if v["use_mup"] and s.usable(*sizes):
        _mup(s, None if explicit_width else mlp_width)


def _experts(s: Settings) -> None:
    """Derive the settings of experts; without experts, reset them to their defaults."""
    v = s.values
    if v["num_experts"] in (0, 1):
        s.ignore("num_experts", "it means no experts")
    if v["num_experts"] is None:
        for name in filter(s.changed, all_options()):
            if name.startswith("moe_"):
                s.ignore(name, "there are no experts")
        return
    if v["moe_router_force_load_balancing"]:
        s.notices.append(EVEN_CHOICES)
    if s.usable("ffn_hidden_size"):
        s.fill("moe_ffn_hidden_size", v["ffn_hidden_size"], "derived from ffn-hidden-size")
        softmax = v["moe_router_score_function"] == "softmax"
        if v["moe_router_pre_softmax"] and not softmax:  # as DeepSeek-V3's scripts have it
            s.ignore("moe_router_pre_softmax", "there is no softmax")
        if softmax and v["moe_router_topk"] == 1 and not v["moe_router_pre_softmax"]:
            s.notices.append(
                "--moe-router-topk 1 with a softmax over the chosen expert alone gives it the "
                "weight 1, and the router no gradient: --moe-router-pre-softmax gives it one"
            )


def _mup(s: Settings, mlp_width: Callable[[int], int] | None) -> None:
    """Derive the sizes of muP's base model, and the factors for attention and output scores."""
    v = s.values

    def derive(name: str, value: object) -> None:
        s.fill(name, value, "derived from use-mup")

    derive("mup_base_hidden_size", v["hidden_size"])
    derive("mup_base_num_layers", v["num_layers"])
    if not s.usable("mup_base_hidden_size"):
        return
    base = v["mup_base_hidden_size"]
    hidden = v["hidden_size"]
    head = v["kv_channels"]
    width = max(1, round(v["ffn_hidden_size"] * base / hidden))
    derive("mup_base_ffn_hidden_size", mlp_width(base) if mlp_width else width)
    heads, rest = divmod(
        v["num_attention_heads"] * head * base, hidden * (v["mup_base_head_dim"] or head)
    )
    if heads and not rest:
        derive("mup_base_num_attention_heads", heads)
    if s.usable("mup_base_num_attention_heads", "num_key_value_heads"):
        heads = v["mup_base_num_attention_heads"]
        groups = max(1, v["num_key_value_heads"] * heads // v["num_attention_heads"])
        derive("mup_base_num_key_value_heads", math.gcd(heads, groups))
    derive("mup_output_mult", base / hidden)
    scale = math.sqrt(v["mup_base_head_dim"] or 1) / head ** v["mup_attn_scale_power"]
    derive("softmax_scale", scale)


def _parallel(s: Settings) -> None:
    v = s.values
    v["data_parallel_size"] = None
    v["virtual_pipeline_model_parallel_size"] = 1
    setting = "expert_tensor_parallel_size"
    ranks = v["tensor_model_parallel_size"]
    if v["num_experts"] is None and v[setting] not in (None, ranks) and setting not in s.bad:
        s.ignore(setting, "there are no experts")
        s.derive(setting, ranks, "derived: there are no experts")
    if s.usable(*SIZES):
        tensor, pipeline, context, expert = (v[name] for name in SIZES)
        replica = tensor * pipeline * context
        # tensor-parallel groups that together hold all experts
        expert *= v[setting] if s.usable(setting) else tensor
        group_size = math.lcm(context, math.lcm(tensor, expert) // tensor)
        one = "one replica" if group_size == context else "the ranks of all experts"
        s.fill("world_size", tensor * pipeline * group_size, f"derived: {one}")
        if s.usable("world_size") and v["world_size"] % replica == 0:
            s.derive(
                "data_parallel_size",
                v["world_size"] // replica,
                "derived from world size, tensor, pipeline and context size",
            )
    _chunks(s)
    tensor = "tensor_model_parallel_size"
    pipeline = "pipeline_model_parallel_size"
    for name, size in (
        ("sequence_parallel", tensor),
        ("tp_comm_overlap", tensor),
    ):
        if v[name] and v[size] == 1 and s.usable(size):
            s.ignore(name, s.written(size))
    _schedule(s)
    if s.changed("tp_comm_overlap_chunks") and not v["tp_comm_overlap"]:
        s.ignore("tp_comm_overlap_chunks", "--tp-comm-overlap is off")


def _schedule(s: Settings) -> None:
    name = "pipeline_schedule"
    size = "pipeline_model_parallel_size"
    if name in s.bad or not s.usable(size):
        return
    chosen = s.values[name]
    if chosen is not None and s.pieces.schedule is not None:
        s.notices.append(f"{s.written(name)} has no effect: the schedule is your own piece")
    if s.values[size] == 1:
        if chosen not in (None, "1f1b"):
            s.ignore(name, s.written(size))
        s.derive(name, "1f1b", f"derived from {s.written(size)[2:]}")
    elif chosen is None:
        chunks = s.values["virtual_pipeline_model_parallel_size"]
        s.derive(name, "interleaved" if chunks > 1 else "1f1b", "derived from the chunks of a rank")


def _chunks(s: Settings) -> None:
    v = s.values
    pipeline = v["pipeline_model_parallel_size"]
    per_chunk = v["num_layers_per_virtual_pipeline_stage"]
    origin = "virtual_pipeline_model_parallel_size"
    if v["pipeline_layout"] is not None and s.usable(
        "pipeline_layout", "pipeline_model_parallel_size"
    ):
        counts = layout_counts(v["pipeline_layout"])
        if counts and len(counts) % pipeline == 0:
            s.derive(origin, len(counts) // pipeline, "derived from pipeline-layout")
    elif s.usable(
        "num_layers_per_virtual_pipeline_stage", "num_layers", "pipeline_model_parallel_size"
    ):
        chunks, remainder = divmod(v["num_layers"], pipeline * per_chunk)
        if remainder == 0 and chunks == 1:
            s.ignore("num_layers_per_virtual_pipeline_stage", "each pipeline rank has one chunk")
        elif remainder == 0:
            s.derive(origin, chunks, "derived from num-layers-per-virtual-pipeline-stage")
    elif s.usable("pipeline_schedule") and v["pipeline_schedule"] in V_SHAPED and pipeline != 1:
        s.derive(origin, 2, "derived from pipeline-schedule")


def _steps(s: Settings) -> None:
    v = s.values
    if s.usable("step_batch_size_schedule"):
        size = parse_batch_sizes(v["step_batch_size_schedule"])[-1][1]
        s.fill("global_batch_size", size, "derived from step-batch-size-schedule")
    if s.usable("micro_batch_size", "data_parallel_size"):
        size = v["micro_batch_size"] * v["data_parallel_size"]
        s.fill("global_batch_size", size, "derived from micro-batch-size and data-parallel size")
    if s.is_unset("train_iters", "train_samples", "train_tokens"):
        # Long enough for the given warm-up and final decay, in their unit.
        unit = (
            "samples"
            if any(v[f"lr_{what}_samples"] for what in ("decay", "warmup", "wsd_decay"))
            else "iters"
        )
        length = 1 + (v[f"lr_warmup_{unit}"] or 0) + (v[f"lr_wsd_decay_{unit}"] or 0)
        s.derive(f"train_{unit}", length, _STAND_IN_ORIGIN)
    style = all_options()["lr_decay_style"]
    if v["lr_schedule"] is not None:
        if style.name in s.explicit and v[style.name] != style.default:
            both = f"--lr-schedule and {style.written(v[style.name])}"
            s.problems.append(f"{both} contradict each other: choose one")
    elif s.is_unset("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"):
        for unit in ("iters", "samples", "tokens"):
            if s.usable(f"train_{unit}"):
                s.derive(f"lr_decay_{unit}", v[f"train_{unit}"], f"derived from train-{unit}")
                break
