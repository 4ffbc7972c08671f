"""The command line: flags generated from the settings, every problem found together, readable
help.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import flags_of_others
from megatron.config.config import Config, finish
from megatron.config.flags_of_others import Foreign
from megatron.config.help_text import render_config, render_help
from megatron.config.option import Option
from megatron.config.pieces import PLAIN, Pieces, load_pieces
from megatron.config.presets import PRESETS, give_preset
from megatron.config.settings import Settings, all_options, did_you_mean
from megatron.config.translate import DIRECT, LATE, is_off, meaning, translate_late
from megatron.errors import ConfigError

OWN_FLAGS: Mapping[str, str] = {
    "--help": "0",
    "-h": "0",
    "--print-config": "0",
    "--dry-run": "0",
    "--rank": "1",
    "--preset": "1",
    "--pieces": "1",
}


@dataclass(frozen=True)
class Flag:
    """Meaning of one spelling.

    kind: 'value', 'set' (to `value`), 'weak' (set unless another flag sets it), 'translated',
    'foreign' or 'own'.
    """

    kind: str
    option: Option | None = None
    value: Any = None
    foreign: Foreign | None = None
    translated: tuple[str, ...] = ()  # the settings that a translated one may give

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the names of the settings that it may set."""
        return self.translated if self.option is None else (self.option.name,)


@functools.cache
def settings_flags() -> Mapping[str, Flag]:
    """Return every spelling that sets a setting, with its meaning."""
    table: dict[str, Flag] = {}

    def add(spelling: str, flag: Flag) -> None:
        assert spelling not in table, f"two meanings of {spelling}"
        table[spelling] = flag

    for option in all_options().values():
        for spelling in option.flags:
            add(
                spelling,
                Flag("set", option, True) if option.kind is bool else Flag("value", option),
            )
        for spelling in option.off_flags:
            add(spelling, Flag("set", option, False))
        for spelling, value in option.shortcuts.items():
            add(spelling, Flag("set", option, value))
        for spelling, value in option.weak_shortcuts.items():
            add(spelling, Flag("weak", option, value))
    for spelling, direct in DIRECT.items():
        add(spelling, Flag("translated", translated=direct.settings))
    for spelling, settings in LATE.items():
        add(spelling, Flag("translated", translated=settings))
    for spelling in OWN_FLAGS:
        add(spelling, Flag("own"))
    return table


class _AllFlags(Mapping[str, Flag]):
    """Mapping of every accepted spelling. Foreign flags are looked up in their file on demand."""

    def __getitem__(self, spelling: str) -> Flag:
        flag = settings_flags().get(spelling)
        if flag is None:
            foreign = flags_of_others.find(spelling)
            if foreign is None:
                raise KeyError(spelling)
            flag = Flag("foreign", foreign=foreign)
        return flag

    def __iter__(self) -> Iterator[str]:
        yield from settings_flags()
        yield from flags_of_others.spellings()

    def __len__(self) -> int:
        return sum(1 for _ in self)


def flag_table() -> Mapping[str, Flag]:
    """Return every spelling that a command line may contain."""
    return _AllFlags()


@dataclass
class Scanned:
    """Words of a command line by flag. `flags` has each spelling once, with the words of its last
    use.
    """

    flags: dict[str, list[str]]
    problems: list[str]


def add_preset(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Add the option --preset to a tool's parser. `more` names further accepted values."""
    text = f"preset: {', '.join(PRESETS)}{more}; flags of pretrain_gpt.py override its values"
    parser.add_argument("--preset", "--model", metavar="NAME", help=text)


def with_preset(name: str | None, flags: Sequence[str]) -> list[str]:
    """Return the training flags with a tool's preset in front. Raises ConfigError for two
    presets.
    """
    if name is not None and any(word.partition("=")[0] == "--preset" for word in flags):
        raise ConfigError(f"--preset {name} stands beside another --preset: give one")
    return list(flags) if name is None else ["--preset", name, *flags]


def split_at_dashes(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split a tool's words at the first --: its own, and the training flags. None: sys.argv."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def scan(argv: Sequence[str]) -> Scanned:
    """Split a command line into flags and their words. Unknown flags become problems."""
    flags: dict[str, list[str]] = {}
    problems: list[str] = []
    words: list[str] | None = None  # where the next word belongs; None: to no flag
    for place, word in enumerate(argv):
        spelling, equals, value = word.partition("=")
        # as forks write them, and Megatron-LM's attributes
        if "_" in spelling and spelling not in flag_table():
            spelling = spelling.replace("_", "-")
        if word == "--":
            problems += [f"'{stray}' belongs to no flag" for stray in argv[place + 1 :]]
            break
        if not _is_flag(spelling):
            if words is None:
                problems.append(f"'{word}' belongs to no flag")
            else:
                words.append(word)
        elif spelling not in flag_table():
            known = (flag for flag in settings_flags() if flag != "-h")
            problems.append(f"unknown flag {spelling}{did_you_mean(spelling, known)}")
            words = []  # what follows are its values
        else:
            flags.pop(spelling, None)  # a repeated flag counts where it comes last
            flags[spelling] = [value] if equals else []
            words = None if equals else flags[spelling]
    return Scanned(flags, problems)


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag: it begins with a dash, and is neither a negative number nor
    text with spaces.
    """
    return (
        word.startswith("-")
        and len(word) > 1
        and not re.match(r"-\.?[0-9]", word)
        and not re.search(r"\s", word)
    )


def parse_command_line(
    argv: Sequence[str], world_size: int | None = None, pieces: Pieces = PLAIN
) -> tuple[Config, list[str]]:
    """Return the configuration of a training command line, and its notices.

    world_size: number of processes that the launcher started; None without a launcher. --help and
    --print-config print and raise SystemExit(0). Raises ConfigError with all problems as a numbered
    list.
    """
    scanned = scan(argv)
    if "--help" in scanned.flags or "-h" in scanned.flags:
        print(render_help())
        raise SystemExit(0)
    printing = "--print-config" in scanned.flags
    settings = Settings(problems=scanned.problems, pieces=pieces)
    if (cluster := os.environ.get("MEGATRON_CLUSTER", "").strip()) not in ("", "none"):
        settings.give("cluster", cluster, "variable MEGATRON_CLUSTER")
    _give_launch(settings, world_size, scanned.flags, printing)
    _give_flags(settings, scanned.flags)
    config = finish(settings, run=not printing)
    if printing:
        for notice in config.notices:
            print(f"notice: {notice}", file=sys.stderr)
        print(render_config(config))
        raise SystemExit(0)
    return config, list(config.notices)


def parse_plan(argv: Sequence[str], pieces: Pieces = PLAIN) -> Config:
    """Return the configuration of a command line for planning, before a launch.

    --world-size gives the number of processes. Settings that only a run needs (data, length,
    learning rate) may be absent. Raises ConfigError.
    """
    return finish(read_settings(argv, pieces))


def read_settings(argv: Sequence[str], pieces: Pieces = PLAIN) -> Settings:
    """Return the settings that a command line chooses, including those of a preset, before they are
    resolved. Problems are collected in `problems`.
    """
    scanned = scan(argv)
    settings = Settings(problems=scanned.problems, pieces=pieces)
    _give_flags(settings, scanned.flags)
    return settings


def parse_args(
    argv: Sequence[str], world_size: int | None = None, pieces: Pieces = PLAIN
) -> Config:
    """Return the configuration of a training command line; see parse_command_line."""
    return parse_command_line(argv, world_size, pieces)[0]


def _give_launch(
    settings: Settings, world_size: int | None, flags: dict[str, list[str]], printing: bool
) -> None:
    words = flags.get("--world-size")
    if world_size is None or (printing and words is not None):
        return
    if words is not None:
        del flags["--world-size"]
        if words != [str(world_size)]:
            settings.problems.append(
                f"--world-size {' '.join(words)} contradicts the launcher, which started "
                f"{world_size} processes: remove it; it is for --print-config"
            )
    settings.give("world_size", world_size, "launcher")


def _give_flags(settings: Settings, flags: Mapping[str, list[str]]) -> None:
    chosen = _chosen_values(settings, flags)
    if "--preset" in flags:
        words = flags["--preset"]
        if len(words) == 1:
            give_preset(settings, words[0], chosen={n: given for n, (_, given) in chosen.items()})
        else:
            settings.problems.append(f"--preset takes one name, got {len(words)}")
    if "--pieces" in flags:
        _give_pieces(settings, flags["--pieces"])
    if "--rank" in flags:
        settings.notices.append("--rank has no effect: the launcher tells the rank")
    for name, (_, value) in chosen.items():
        settings.give(name, value, "command line")
    if "--deepspeed" in flags or "--no-deepspeed" in flags:
        settings.notices.append("--deepspeed changes nothing: the engine is always DeepSpeed")
    translate_late(settings, flags)
    for spelling, words in flags.items():
        if (foreign := flag_table()[spelling].foreign) is not None:
            _foreign(settings, spelling, foreign, words)


def _give_pieces(settings: Settings, words: list[str]) -> None:
    try:
        if len(words) != 1 or settings.pieces != PLAIN:
            raise ConfigError(
                f"--pieces {' '.join(words)}: give one file, and none to a program that has its own"
            )
        settings.pieces = load_pieces(words[0])
    except ConfigError as error:
        settings.problems.append(str(error))


def _chosen_values(
    settings: Settings, flags: Mapping[str, list[str]]
) -> dict[str, tuple[str, Any]]:
    """Return (flag as written, value) by setting. Two flags with different values for a setting are
    a problem.
    """
    chosen: dict[str, tuple[str, Any]] = {}
    weak: dict[str, tuple[str, Any]] = {}
    for spelling, words in flags.items():
        flag, written = flag_table()[spelling], " ".join([spelling, *words])
        if flag.kind == "own" and OWN_FLAGS[spelling] == "0" and words:
            settings.problems.append(f"{written}: {spelling} takes no value")
        for name, value in _values(settings, spelling, flag, words).items():
            if flag.kind == "weak":
                weak[name] = (written, value)
            elif name in chosen and chosen[name][1] != value:
                problem = f"{chosen[name][0]} and {written} contradict each other: choose one"
                settings.mark_bad(name, problem, "command line")
            else:
                chosen[name] = (written, value)
        if flag.option is not None:
            for key in (spelling, *(word.lower() for word in words)):
                for name, value in flag.option.implies.get(key, {}).items():
                    weak[name] = (written, value)
    return weak | chosen


def _values(settings: Settings, spelling: str, flag: Flag, words: list[str]) -> dict[str, Any]:
    """Return the settings that one flag sets. Invalid words are recorded as problems."""
    direct = DIRECT.get(spelling)
    names = (
        direct.settings
        if direct is not None
        else (flag.option.name,)
        if flag.option is not None
        else ()
    )
    written = " ".join([spelling, *words])
    try:
        if direct is not None and not is_off(words):
            found = {
                name: all_options()[name].accept(value)
                for name, value in direct.read(words).items()
            }
            settings.notices.append(meaning(written, found))
            return found
        if flag.option is None:
            return {}
        value = _value(flag, words)
    except ValueError as error:
        for name in names:
            settings.mark_bad(name, f"{spelling} {error}", "command line")
        return {}
    if flag.option.choices is None and len(words) == 1 and words[0] in flag.option.value_names:
        settings.notices.append(f"{written} means {flag.option.written(value)}: {flag.option.hint}")
    return {flag.option.name: value}


def _value(flag: Flag, words: list[str]) -> Any:
    assert flag.option is not None
    if flag.kind in ("set", "weak"):
        if not words:
            return flag.value
        if flag.option.kind is bool and flag.value is True and len(words) == 1:
            return flag.option.parse(words)  # --flag true, --flag=false
        raise ValueError(f"takes no value, got {' '.join(words)}")
    if not words and flag.option.implied is not None:
        return flag.option.implied
    if not words and flag.option.many:
        raise ValueError("takes at least one value, got none")
    return flag.option.parse(words)


def _foreign(settings: Settings, spelling: str, foreign: Foreign, words: list[str]) -> None:
    """Record a notice or a problem for a flag that is not a setting."""

    def value_of(name: str) -> Any:
        return settings.given.get(name, all_options()[name].default)

    written = " ".join([spelling, *words])
    if foreign.family.refused:
        if foreign.is_harmless(words, value_of):
            settings.notices.append(f"{written} has no effect: that is always so here")
        else:
            settings.problems.append(f"{written} is not supported: {foreign.family.reason}")
    elif problem := foreign.miscounted(words):
        settings.problems.append(f"{spelling} {problem}")
    else:
        settings.notices.append(f"{written} has no effect: {foreign.family.reason}")


def command_line_of(config: Config) -> list[str]:
    """Return a command line for the same configuration, with the chosen settings only, by
    section.
    """
    argv: list[str] = []
    for name, option in all_options().items():
        if name not in config.given or not option.flags:
            continue
        value = config.given[name]
        if option.kind is bool:
            if value == option.default:
                continue
            argv.append(option.written(value))
        elif option.many:
            argv += [option.flags[0], *map(str, value)]
        else:
            argv.append(f"{option.flags[0]}={value}")
    return argv if config.pieces.file is None else [*argv, "--pieces", config.pieces.file]
