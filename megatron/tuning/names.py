"""What a parameter's name means: a flag of pretrain_gpt.py, or a short name of something that flags say together."""
from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.command_line import OWN_FLAGS, Flag, flag_table, settings_flags
from megatron.config.option import Option
from megatron.config.presets import PRESETS
from megatron.config.settings import all_options, did_you_mean, raise_problems, section_of
from megatron.errors import ConfigError
from megatron.planning.search.choices import SCHEDULES, parse_choices, recompute_settings
from megatron.tuning.types import Value

_SETTING_OF: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "mbs": "micro_batch_size",
    "gbs": "global_batch_size", "sp": "sequence_parallel", "zero": "zero_stage", "overlap": "tp_comm_overlap",
    "order": "rank_order", "devices": "device_order",
}  # fmt: skip
_CHUNK = "num_layers_per_virtual_pipeline_stage"
_SPECIAL: Mapping[str, tuple[str, ...]] = {
    "nodes": ("world_size",), "processes": ("world_size",), "preset": ("preset",), "chunks": (_CHUNK,),
    "schedule": ("enable_zbh1_pipeline",), "recompute": tuple(recompute_settings("none")),
}  # fmt: skip
READ_ONLY = ("dp",)
"""Names that expressions may use and nobody may set."""

# What a trial or the tuner says, or what has no one step time.
_REFUSED: Mapping[str, str] = {
    "world_size": "give processes or nodes",
    "data_parallel_size": "it follows from processes, tp and pp",
    "virtual_pipeline_model_parallel_size": "give chunks",
    "cluster": "give --cluster to the tuner",
    "deepspeed_config": "give its settings as flags: it would say again what the tuner varies",
    "rampup_batch_size": "a batch that grows has no one step time",
    "skip_train": "a trial is training",
    **dict.fromkeys(("train_iters", "train_samples", "train_tokens", "exit_interval", "exit_duration_in_mins"),
                    "the length of a trial is the tuner's: --iterations and --warm-up"),
    **dict.fromkeys(("save", "save_interval", "save_interval_minutes", "load", "load_tag", "finetune"),
                    "a trial neither saves nor loads"),
    **dict.fromkeys(("lr_warmup_iters", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_iters",
                     "lr_wsd_decay_samples"), "a trial is too short for it, and its speed does not depend on it"),
    **dict.fromkeys(("metrics_file", "log_interval", "eval_iters", "timing_log_level"), "each trial has its own"),
    **dict.fromkeys(("master_addr", "master_port", "local_rank", "walltime", "requeue"), "the tuner starts the trials"),
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
    flag      as Megatron spells it, where one flag says it
    """

    id: str
    settings: tuple[str, ...]
    flag: str = ""

    @property
    def of_model(self) -> bool:
        """Whether settings follow from it that expressions may ask for."""
        return self.id == "preset" or any(section_of(s) == "model" for s in self.settings if s in all_options())

    def accept(self, value: Any) -> Value:
        """The value in its own type; ValueError says what was expected."""
        several = self.flag and (option := flag_table()[self.flag].option) is not None and option.many
        words = value if isinstance(value, list) and several else [value]
        if not words or any(not isinstance(word, (str, int, float)) for word in words):
            raise ValueError(f"is a {type(value).__name__}, which no flag takes")
        if any(isinstance(word, str) and word.startswith("-") for word in words):
            raise ValueError("begins with a dash: it would be read as a flag")
        if any(isinstance(word, str) and not word.isprintable() for word in words):
            raise ValueError("has a line break or another character that cannot be printed")
        if isinstance(value, str) and value.lower() == "none" and not self._has_none:
            return None
        return _SPECIAL_VALUES[self.id](value) if self.id in _SPECIAL_VALUES else self._accept_flag(value)

    def _accept_flag(self, value: Any) -> Value:
        flag = flag_table()[self.flag]
        assert flag.option is not None
        if flag.kind != "value":
            if not isinstance(value, bool):
                raise ValueError(f"is {value!r}: {self.flag} is on or off, so give true or false")
            return value
        if flag.option.many:
            return ("-" if flag.option.kind is int else " ").join(map(str, flag.option.parse(_split(value))))
        if isinstance(value, bool):
            raise ValueError(f"is {str(value).lower()}: {self.flag} takes {flag.option.kind.__name__}")
        if isinstance(value, str) and value.lower() == "auto" and flag.option.value_names.get("auto", "") is None:
            return "auto"
        found: Value = flag.option.parse([str(value)])
        return found

    def words(self, value: Value) -> list[str]:
        """The flags that say an accepted value, of a name that one flag says."""
        flag = flag_table()[self.flag]
        assert flag.option is not None
        if value is None:
            return [self.flag, "none"] if flag.kind == "value" and flag.option.has_none else []
        if flag.kind == "value":
            if not flag.option.many:
                return [self.flag, str(value)]
            return [self.flag, *([",".join(_split(value))] if flag.option.kind is int else _split(value))]
        if value:
            return [self.flag]
        spellings = (flag.option.flags if flag.value is False else flag.option.off_flags) if self._switch else ()
        return list(spellings[:1])

    def setting(self, value: Value) -> Value:
        """What its one setting becomes by an accepted value; None: nothing that is known from it."""
        flag = flag_table()[self.flag]
        if flag.kind == "value":
            return None if value == "auto" else value
        if value:
            chosen: Value = flag.value
            return chosen
        return not flag.value if self._switch else None

    @property
    def _has_none(self) -> bool:
        """Whether the word none is a value of its own, as of --position-embedding-type."""
        option = flag_table()[self.flag].option if self.flag else None
        return self.id == "recompute" or (option is not None and "none" in (option.choices or ()))

    @property
    def _switch(self) -> bool:
        """Whether its flag has an opposite."""
        option = flag_table()[self.flag].option
        return option is not None and option.kind is bool


def _split(value: Any) -> list[str]:
    """The words of a value; several stand in a list, or apart by spaces or commas, numbers also by dashes."""
    if isinstance(value, (list, tuple)):
        return [str(part) for part in value]
    words = str(value).replace(",", " ").split() if isinstance(value, str) else [str(value)]
    if len(words) == 1 and all(number.isdecimal() for number in words[0].split("-")):
        return words[0].split("-")
    return words


# -- values of short names ---------------------------------------------------------------------------------------------


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf or value % 1:
        raise ValueError(f"is {value!r}, but must be a whole number of at least 1")
    return int(value)


def _schedule(value: Any) -> str:
    if value not in SCHEDULES:
        raise ValueError(f"is {value!r}, not one of {', '.join(SCHEDULES)}")
    return str(value)


def _recompute(value: Any) -> str:
    """A pattern of the planner's, all of it said."""
    try:
        found = str(parse_choices(f"recompute={value}", "")["recompute"][0])
    except ConfigError:
        raise ValueError(f"is {value!r}: give none, selective:MODULE+MODULE of core_attn, mlp_act and layernorm, "
                         "full:uniform:LAYERS or full:block:LAYERS") from None  # fmt: skip
    if found == "selective":
        return "selective:core_attn"
    return {"full": "full:uniform:1", "full:uniform": "full:uniform:1", "full:block": "full:block:1"}.get(found, found)


def _preset(value: Any) -> str:
    if value not in PRESETS:
        hint = did_you_mean(str(value), PRESETS) or f": choose one of {', '.join(PRESETS)}"
        raise ValueError(f"is {value!r}, which is unknown{hint}")
    return str(value)


_SPECIAL_VALUES: Mapping[str, Any] = {
    "nodes": _count, "processes": _count, "chunks": _count, "schedule": _schedule, "recompute": _recompute,
    "preset": _preset,
}  # fmt: skip


def recompute_words(pattern: str) -> list[str]:
    """The flags of a pattern.

    >>> recompute_words("selective:mlp_act+layernorm")
    ['--recompute-granularity', 'selective', '--recompute-modules', 'mlp_act', 'layernorm']
    """
    settings = recompute_settings(pattern)
    words = ["--recompute-granularity", settings["recompute_granularity"] or "none"]
    if settings["recompute_modules"]:
        words += ["--recompute-modules", *settings["recompute_modules"]]
    if settings["recompute_method"]:
        words += ["--recompute-method", settings["recompute_method"]]
        words += ["--recompute-num-layers", str(settings["recompute_num_layers"])]
    return words


# -- names -------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def subject(name: str) -> Subject:
    """What a name of a space stands for, with or without dashes before and within it.

    Raises ConfigError for a name that is no flag and no short name, and for a flag that a trial cannot have or that
    changes nothing in one.
    """
    short = name.lstrip("-").replace("-", "_")
    if short in READ_ONLY:
        raise ConfigError(f"'{name}' follows from processes, tp and pp: give one of those")
    if short in _SPECIAL:
        return Subject(short, _SPECIAL[short])
    option = all_options().get(_SETTING_OF.get(short, short))
    if option is not None:
        _refuse_to_vary(option, name)
        return Subject(option.name, (option.name,), option.flags[0])
    table = flag_table()
    spelling = name if name in table else next((s for s in table if s.lstrip("-").replace("-", "_") == short), None)
    flag = flag_table()[spelling] if spelling is not None else Flag("own")
    if flag.option is None:
        if flag.foreign is not None:
            raise ConfigError(f"{spelling} varies nothing: {flag.foreign.family.reason}")
        if spelling is not None:
            instead = f"give {all_options()[flag.translated[0]].flag}" if flag.translated else "it is no setting"
            raise ConfigError(f"{spelling} has no place here: {instead}")
        known = sorted({*_SETTING_OF, *_SPECIAL, *(s.lstrip("-") for s in settings_flags())})
        hint = did_you_mean(name.lstrip("-").replace("_", "-"), known)
        raise ConfigError(f"'{name}' is no flag of pretrain_gpt.py{hint}; short names are "
                          f"{', '.join([*_SETTING_OF, *_SPECIAL])}")  # fmt: skip
    _refuse_to_vary(flag.option, name)
    assert spelling is not None
    plain = flag.kind == "value" or (flag.kind == "set" and flag.option.kind is bool and flag.value is True)
    return Subject(flag.option.name if plain else short, (flag.option.name,), spelling)


def _refuse_to_vary(option: Option, written: str) -> None:
    refuse(option, written)
    if option.inert:
        raise ConfigError(f"{written} varies nothing: {option.inert}")
    if option.name in LEFT_OUT:
        raise ConfigError(f"{written} varies nothing: a trial is without it")


def refuse(option: Option, written: str) -> None:
    """Raises ConfigError for a setting that a trial cannot have from a space or a command line."""
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
                refuse(all_options()[name], written)
            except ConfigError as error:
                problems.append(str(error))
            found[name] = written
    raise_problems(problems)
    return found
