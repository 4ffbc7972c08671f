"""What a parameter's name means: a flag of pretrain_gpt.py, or a short name of something that flags say together."""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.command_line import OWN_FLAGS, Flag, flag_table, read_settings, settings_flags
from megatron.config.layout import parse_layout, recompute_settings
from megatron.config.option import Option
from megatron.config.parallel import SCHEDULES
from megatron.config.presets import PRESETS
from megatron.config.settings import all_options, did_you_mean, raise_problems, section_of
from megatron.errors import ConfigError

Value = int | float | str | bool | None
"""Value of a parameter. None: the flag is not given."""
READ_ONLY = "dp"
"""A name that expressions may use and nobody may set."""
CHUNK = "num_layers_per_virtual_pipeline_stage"
_SETTING_OF: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "mbs": "micro_batch_size",
    "gbs": "global_batch_size", "sp": "sequence_parallel", "zero": "zero_stage", "overlap": "tp_comm_overlap",
    "order": "rank_order", "devices": "device_order",
}  # fmt: skip
_SPECIAL: Mapping[str, tuple[str, ...]] = {
    "nodes": ("world_size",), "processes": ("world_size",), "preset": ("preset",), "chunks": (CHUNK,),
    "schedule": ("enable_zbh1_pipeline",), "recompute": tuple(recompute_settings("none")),
}  # fmt: skip
# What a trial or the tuner says, or what has no one step time.
_REFUSED: Mapping[str, str] = {
    instead: why for why, names in {
        "give processes or nodes": "world_size data_parallel_size",
        "give chunks": "virtual_pipeline_model_parallel_size",
        "give --cluster to the tuner": "cluster",
        "give its settings as flags": "deepspeed_config",
        "a batch that grows has no one step time": "rampup_batch_size",
        "the length of a trial is the tuner's: --iterations and --warm-up":
            "train_iters train_samples train_tokens exit_interval exit_duration_in_mins skip_train",
        "a trial neither saves nor loads": "save save_interval save_interval_minutes load load_tag finetune",
        "a trial is too short for it, and its speed does not depend on it": "lr_warmup_iters lr_warmup_samples "
            "lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples",
        "each trial has its own": "metrics_file log_interval eval_iters timing_log_level",
        "the tuner starts the trials": "master_addr master_port local_rank walltime requeue",
    }.items() for instead in names.split()
}  # fmt: skip
LEFT_OUT = frozenset({
    "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_save_dir", "profile", "trace_dir", "straggler_report",
})  # fmt: skip
"""Settings of a training's own command line that would write beside a trial or cost time in it: a trial is without."""


@dataclass(frozen=True)
class Subject:
    """What a name stands for.

    id        the same for every spelling: a setting's name, a short name, or a flag of its own
    settings  that it decides, which nothing else may say
    spelling  of the one flag that says it, as Megatron has it, where there is one; flag: what that does
    """

    id: str
    settings: tuple[str, ...]
    spelling: str = ""
    flag: Flag | None = None

    @property
    def of_model(self) -> bool:
        """Whether settings follow from it that expressions may ask for."""
        return self.id == "preset" or any(section_of(s) == "model" for s in self.settings if s in all_options())

    def accept(self, value: Any) -> Value:
        """The value of a space as it is kept; ValueError says what was expected."""
        option = self.flag.option if self.flag else None
        own_none = self.id == "recompute" or (option is not None and "none" in (option.choices or ()))
        if isinstance(value, str) and value.lower() == "none" and not own_none:
            return None
        if self.flag is None or option is None:
            return _special(self.id, value)
        if type(value) not in (int, float, str, bool) or not str(value).isprintable() or value in ("", None):
            raise ValueError(f"is a {type(value).__name__}, which no flag takes, or cannot be printed")
        if isinstance(value, str) and value.startswith("-"):
            raise ValueError("begins with a dash: it would be read as a flag")
        if isinstance(value, bool) == (self.flag.kind == "value"):
            raise ValueError(f"is {value!r}: {self.spelling} takes {option.kind.__name__}")
        if problems := read_settings(self.words(value)).problems:
            raise ValueError(f"is not possible: {problems[0]}")
        found: Value = value
        return found

    def words(self, value: Value) -> list[str]:
        """The flags that say an accepted value, of a name that one flag says."""
        flag, option = self.flag, self.flag.option if self.flag else None
        assert flag is not None and option is not None
        if flag.kind != "value":
            # Turned off by its opposite, where it has one.
            off = (option.flags if flag.value is False else option.off_flags) if option.kind is bool else ()
            return [self.spelling] if value else list(off[:1] if value is not None else ())
        if value is None:
            return [self.spelling, "none"] if option.has_none else []
        words = _split(str(value)) if option.many else [str(value)]
        return [self.spelling, *([",".join(words)] if option.many and option.kind is int else words)]


def _split(text: str) -> list[str]:
    """Words that stand apart by spaces or commas, numbers also by dashes."""
    words = text.replace(",", " ").split()
    dashed = len(words) == 1 and all(number.isdecimal() for number in words[0].split("-"))
    return words[0].split("-") if dashed else words


def _special(name: str, value: Any) -> Value:
    """Of a short name that is no flag. Raises ValueError."""
    if name == "recompute":
        try:
            found = str(parse_layout(f"recompute={value}", "")["recompute"][0])
        except ConfigError:
            raise ValueError(f"is {value!r}: give none, selective:MODULE+MODULE of core_attn, mlp_act and layernorm, "
                             "full:uniform:LAYERS or full:block:LAYERS") from None  # fmt: skip
        whole = {"selective": "selective:core_attn", "full": "full:uniform:1"}
        return whole.get(found, found if found.count(":") != 1 or "selective" in found else f"{found}:1")
    if name in ("schedule", "preset"):
        known = SCHEDULES if name == "schedule" else tuple(PRESETS)
        if value not in known:
            raise ValueError(f"is {value!r}, not one of {', '.join(known)}{did_you_mean(str(value), known)}")
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value % 1:
        raise ValueError(f"is {value!r}, but must be a whole number of at least 1")
    return int(value)


def recompute_words(pattern: str) -> list[str]:
    """The flags of a pattern.

    >>> recompute_words("selective:mlp_act+layernorm")
    ['--recompute-granularity', 'selective', '--recompute-modules', 'mlp_act', 'layernorm']
    """
    settings = {name: value for name, value in recompute_settings(pattern).items() if value is not None}
    words = [] if settings else ["--recompute-granularity", "none"]
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
    return words


@functools.lru_cache(maxsize=1024)
def subject(name: str) -> Subject:
    """What a name of a space stands for, with or without dashes before and within it.

    Raises ConfigError for a name that is no flag and no short name, and for a flag that a trial cannot have or that
    changes nothing in one.
    """
    short = name.lstrip("-").replace("-", "_")
    if short == READ_ONLY:
        raise ConfigError(f"'{name}' follows from processes, tp and pp: give one of those")
    if short in _SPECIAL:
        return Subject(short, _SPECIAL[short])
    table = flag_table()
    option = all_options().get(_SETTING_OF.get(short, short))
    spelling = option.flags[0] if option is not None and option.flags else name if name in table else next(
        (s for s in table if s.lstrip("-").replace("-", "_") == short), None)  # fmt: skip
    flag = table[spelling] if spelling is not None else None
    if spelling is None or flag is None:
        known = sorted({*_SETTING_OF, *_SPECIAL, *(s.lstrip("-") for s in settings_flags())})
        raise ConfigError(f"'{name}' is no flag of pretrain_gpt.py{did_you_mean(name.lstrip('-'), known)}; short names "
                          f"are {', '.join([*_SETTING_OF, *_SPECIAL])}")  # fmt: skip
    if flag.option is None:
        other = f"give {all_options()[flag.translated[0]].flag}" if flag.translated else "it is no setting"
        raise ConfigError(f"{spelling} varies nothing: {flag.foreign.family.reason if flag.foreign else other}")
    _refuse(flag.option, name)
    if flag.option.inert or flag.option.name in LEFT_OUT:
        raise ConfigError(f"{name} varies nothing: {flag.option.inert or 'a trial is without it'}")
    plain = flag.kind == "value" or (flag.kind == "set" and flag.option.kind is bool and flag.value is True)
    return Subject(flag.option.name if plain else short, (flag.option.name,), spelling, flag)


def _refuse(option: Option, written: str) -> None:
    if option.name in _REFUSED or not option.flags:
        raise ConfigError(f"{written} has no place here: {_REFUSED.get(option.name, 'it has no flag')}")


def settings_of_flags(flags: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """setting -> flag with its words, of flags as `scan` gives them. Raises ConfigError with all that have no place."""
    found, problems = dict[str, str](), list[str]()
    for spelling, words in flags.items():
        written, flag = " ".join([spelling, *words]), flag_table()[spelling]
        if spelling == "--preset":
            found["preset"] = written
        elif spelling in OWN_FLAGS:
            problems.append(f"{spelling} has no place here: it starts no run")
        for name in flag.settings:
            try:
                _refuse(all_options()[name], written)
            except ConfigError as error:
                problems.append(str(error))
            found[name] = written
    raise_problems(problems)
    return found
