"""Settings by name while a configuration is assembled: values, origins and problems."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from megatron.config.io import CheckpointConfig, DataConfig, LoggingConfig, TokenizerConfig
from megatron.config.model import ModelConfig
from megatron.config.option import Option, options_of
from megatron.config.parallel import EngineConfig, ParallelConfig, RecomputeConfig
from megatron.config.pieces import PLAIN, Pieces
from megatron.config.training import (
    BatchConfig,
    KernelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Sections:
    """The sections of a configuration, in the order of --help."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig
    recompute: RecomputeConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    engine: EngineConfig
    kernels: KernelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    training: TrainingConfig
    logging: LoggingConfig

    def get(self, name: str) -> Any:
        """Return the value of a setting. Raises ConfigError for an unknown name."""
        return getattr(getattr(self, section_of(name)), name)

    def written(self, name: str) -> str:
        """Return the flag that sets the value of a setting."""
        return all_options()[name].written(self.get(name))

    def changed(self, name: str) -> bool:
        """Return whether a setting has a value, and not its default."""
        return self.get(name) not in (None, all_options()[name].default)


SECTIONS: Mapping[str, type] = get_type_hints(Sections)


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Return every setting by name, in section order."""
    return {o.name: o for section in SECTIONS.values() for o in options_of(section)}


@functools.cache
def section_of(name: str) -> str:
    """Return the section that holds a setting. Raises ConfigError for an unknown name."""
    for attribute, section in SECTIONS.items():
        if any(option.name == name for option in options_of(section)):
            return attribute
    raise ConfigError(f"unknown setting '{name}'{did_you_mean(name, all_options())}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ', did you mean --x or --y?', or an empty string.

    If one to three names begin with the word (of at least two letters), only these are suggested;
    otherwise up to three similar names.
    """
    names = sorted(known)
    near = [n for n in names if n.startswith(word)] if len(word.strip("-_")) >= 2 else []
    if not 1 <= len(near) <= 3:
        near = difflib.get_close_matches(word, names, n=3, cutoff=0.75)
    return f", did you mean {' or '.join(near)}?" if near else ""


def raise_problems(problems: list[str]) -> None:
    """Raise ConfigError with all problems, numbered if there are several.

    Return if there are none.
    """
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise ConfigError(f"the configuration has 1 problem: {unique[0]}")
    if unique:
        lines = "\n".join(f"  {i}. {text}" for i, text in enumerate(unique, 1))
        raise ConfigError(f"the configuration has {len(unique)} problems:\n{lines}")


@dataclass
class Settings:
    """Values by setting name.

    `explicit` holds chosen values; `values` adds defaults and derived values. Settings in `bad`
    were given an invalid value: checks that need them are skipped.
    """

    explicit: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    pieces: Pieces = PLAIN

    def give_arguments(self, values: Mapping[str, object]) -> None:
        """Choose the values of a call's arguments, by name."""
        for name, value in values.items():
            self.give(name, value, "argument")

    def give(self, name: str, value: object, origin: str) -> None:
        """Choose a value; None resets the setting to its derived or default value.

        A problem is recorded if the name is unknown or the value invalid.
        """
        option = all_options().get(name)
        if option is None:
            self.problems.append(f"unknown setting '{name}'{did_you_mean(name, all_options())}")
            return
        if option.internal:
            self.problems.append(f"{name} is computed from other settings and cannot be set")
            return
        try:
            accepted = None if value is None else option.accept(value)
        except ValueError as error:
            self.mark_bad(name, f"{option.flag} {error}", origin)
            return
        if accepted is None:
            self.explicit.pop(name, None)
            self.origins.pop(name, None)
        else:
            self.explicit[name] = accepted
            self.origins[name] = origin

    def mark_bad(self, name: str, problem: str, origin: str) -> None:
        """Record that a setting has no valid value."""
        self.bad.add(name)
        self.problems.append(
            problem if origin in ("command line", "argument") else f"{problem} ({origin})"
        )

    def derive(self, name: str, value: object, origin: str) -> None:
        """Set a derived value; `origin` says how it was derived."""
        self.values[name] = value
        self.origins[name] = origin

    def fill(self, name: str, value: object, origin: str) -> None:
        """Derive a value unless one is given, valid or not."""
        if self.is_unset(name):
            self.derive(name, value, origin)

    def ignore(self, name: str, reason: str) -> None:
        """Set the default instead of a value that has no effect, and say so."""
        flag = self.origins[name].removeprefix("command line: ")  # of another framework
        flag = flag if flag.startswith("--") else self.written(name)
        self.notices.append(f"{flag} has no effect: {reason}")
        self.derive(name, all_options()[name].default, f"derived: {reason}")

    def written(self, name: str) -> str:
        """Return the flag that sets the value of a setting."""
        return all_options()[name].written(self.values[name])

    def changed(self, name: str) -> bool:
        """Return whether a setting has a value, and not its default."""
        return self.values[name] not in (None, all_options()[name].default)

    def sections(self) -> Sections:
        """Return `values` as sections; settings without a valid value are None or the default."""
        return Sections(
            **{
                attribute: section(**{o.name: self.values[o.name] for o in options_of(section)})
                for attribute, section in SECTIONS.items()
            }
        )

    def is_unset(self, *names: str) -> bool:
        """Return whether none of these settings has a value or was given an invalid one."""
        return all(self.values[n] is None and n not in self.bad for n in names)

    def usable(self, *names: str) -> bool:
        """Return whether all of these settings have valid values."""
        return all(n not in self.bad and self.values.get(n) is not None for n in names)


def cluster_of_environment() -> str | None:
    """Return the machine that MEGATRON_CLUSTER names, the default of --cluster; None without one."""
    name = os.environ.get("MEGATRON_CLUSTER", "").strip()
    return None if name in ("", "none") else name
