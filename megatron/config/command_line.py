"""The command line: flags generated from the settings, every problem found together, readable help."""
from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.config import Config, finish
from megatron.config.help_text import render_help
from megatron.config.legacy import ACCEPTED, NO_PIPELINE, REFUSED, TRIVIAL, Legacy
from megatron.config.option import Option, Parser
from megatron.config.presets import PRESETS, give_preset
from megatron.config.settings import Settings, all_options, did_you_mean
from megatron.config.show import render_config
from megatron.errors import ConfigError

OWN_FLAGS: Mapping[str, str] = {
    "--help": "0", "-h": "0", "--print-config": "0", "--dry-run": "0", "--rank": "1", "--preset": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """What one spelling does. kind: 'value', 'set' (to `value`), 'weak' (set unless another flag does), 'accepted',
    'trivial', 'refused' or 'own'."""

    kind: str
    option: Option | None = None
    value: Any = None
    legacy: Legacy | None = None


@functools.cache
def flag_table() -> Mapping[str, Flag]:
    """Every accepted spelling. A spelling that two settings claim is a mistake of ours."""
    table: dict[str, Flag] = {}

    def add(spelling: str, flag: Flag) -> None:
        assert spelling not in table, f"two meanings of {spelling}"
        table[spelling] = flag

    for option in all_options().values():
        for spelling in option.flags:
            add(spelling, Flag("set", option, True) if option.kind is bool else Flag("value", option))
        for spelling in option.off_flags:
            add(spelling, Flag("set", option, False))
        for spelling, value in option.shortcuts.items():
            add(spelling, Flag("set", option, value))
        for spelling, value in option.weak_shortcuts.items():
            add(spelling, Flag("weak", option, value))
    for kind, flags in (("accepted", ACCEPTED), ("trivial", TRIVIAL), ("refused", REFUSED)):
        for spelling, legacy in flags.items():
            add(spelling, Flag(kind, legacy=legacy))
    add(NO_PIPELINE, Flag("own"))
    for spelling in OWN_FLAGS:
        add(spelling, Flag("own"))
    return table


class _Collect(argparse.Action):
    """Note a flag and its words, in order; their meaning comes later, so that all problems are found."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.found.append((option_string, list(values)))


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pretrain_gpt.py", add_help=False, argument_default=argparse.SUPPRESS)
    for spelling in flag_table():
        parser.add_argument(spelling, action=_Collect, nargs="*", dest="found")
    return parser


@dataclass
class Scanned:
    """The words of a command line, by flag. `flags` has each spelling once, with the words of its last use."""

    flags: dict[str, list[str]]
    problems: list[str]


def add_preset(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Give a tool the option of a model by name; `more`: other names that it takes."""
    text = f"the model: {', '.join(PRESETS)}{more}; flags of pretrain_gpt.py win over its values"
    parser.add_argument("--preset", "--model", metavar="NAME", help=text)


def with_preset(name: str | None, flags: Sequence[str]) -> list[str]:
    """The flags of pretrain_gpt.py with the preset that a tool was given. Raises ConfigError for two presets."""
    if name is not None and any(word.partition("=")[0] == "--preset" for word in flags):
        raise ConfigError(f"--preset {name} stands beside another --preset: give one")
    return list(flags) if name is None else ["--preset", name, *flags]


def split_at_dashes(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The words of a tool, and after the first -- the flags of pretrain_gpt.py. None: the words of this process."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def scan(argv: Sequence[str]) -> Scanned:
    """Split a command line into flags and their words. Unknown flags become problems."""
    namespace = argparse.Namespace(found=[])
    _, strays = _parser().parse_known_args(list(argv), namespace)
    flags: dict[str, list[str]] = {}
    for spelling, words in namespace.found:
        flags.pop(spelling, None)  # a repeated flag counts where it comes last
        flags[spelling] = words
    return Scanned(flags, _stray_problems(strays))


def _stray_problems(strays: list[str]) -> list[str]:
    problems = []
    after_unknown = False
    for word in strays:
        if word.startswith("-"):
            name = word.split("=")[0]
            problems.append(f"unknown flag {name}{did_you_mean(name, (f for f in flag_table() if f != '-h'))}")
            after_unknown = True
        elif not after_unknown:  # words behind an unknown flag are its values
            problems.append(f"'{word}' belongs to no flag")
    return problems


def parse_command_line(argv: Sequence[str], world_size: int | None = None) -> tuple[Config, list[str]]:
    """(configuration, notices) of a training command line.

    world_size: processes that the launcher started; None when there is no launcher. --help and --print-config print
    and raise SystemExit(0). Raises ConfigError with all problems as a numbered list.
    """
    scanned = scan(argv)
    if "--help" in scanned.flags or "-h" in scanned.flags:
        print(render_help())
        raise SystemExit(0)
    printing = "--print-config" in scanned.flags
    settings = Settings(problems=scanned.problems)
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


def parse_plan(argv: Sequence[str]) -> Config:
    """The configuration of a command line that is looked at before a launch: --world-size says how many processes there
    will be, and what only a run needs (data, a length, a learning rate) may be absent. Raises ConfigError."""
    return finish(read_settings(argv))


def read_settings(argv: Sequence[str]) -> Settings:
    """What a command line chooses, a preset's values included: not yet resolved; what is wrong is among `problems`."""
    scanned = scan(argv)
    settings = Settings(problems=scanned.problems)
    _give_flags(settings, scanned.flags)
    return settings


def parse_args(argv: Sequence[str], world_size: int | None = None) -> Config:
    """The configuration of a training command line; see parse_command_line."""
    return parse_command_line(argv, world_size)[0]


def _give_launch(settings: Settings, world_size: int | None, flags: dict[str, list[str]], printing: bool) -> None:
    words = flags.get("--world-size")
    if world_size is None or (printing and words is not None):
        return
    if words is not None:
        del flags["--world-size"]
        if words != [str(world_size)]:
            settings.problems.append(
                f"--world-size {' '.join(words)} contradicts the launcher, which started {world_size} processes: "
                "remove it; it is for --print-config"
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
    if "--rank" in flags and "--dry-run" not in flags:
        settings.problems.append("--rank asks a dry run about one rank: give --dry-run, or remove it")
    for name, (_, value) in chosen.items():
        settings.give(name, value, "command line")
    if "--deepspeed" in flags or "--no-deepspeed" in flags:
        settings.notices.append("--deepspeed changes nothing: the engine is always DeepSpeed")
    if NO_PIPELINE in flags:
        _no_pipeline(settings)


def _no_pipeline(settings: Settings) -> None:
    stages = settings.given.get("pipeline_model_parallel_size", 1)
    if stages > 1:
        settings.problems.append(
            f"{NO_PIPELINE} contradicts --pipeline-model-parallel-size {stages} "
            f"({settings.origins['pipeline_model_parallel_size']}): remove one"
        )
    else:
        settings.notices.append(f"{NO_PIPELINE} has no effect: --pipeline-model-parallel-size alone decides")


def _chosen_values(settings: Settings, flags: Mapping[str, list[str]]) -> dict[str, tuple[str, Any]]:
    """setting -> (flag as written, value). Two flags that give one setting different values are a problem."""
    chosen: dict[str, tuple[str, Any]] = {}
    weak: dict[str, tuple[str, Any]] = {}
    for spelling, words in flags.items():
        flag = flag_table()[spelling]
        if flag.legacy is not None:
            _legacy(settings, spelling, flag, words)
            continue
        written = " ".join([spelling, *words])
        if flag.option is None:
            if OWN_FLAGS.get(spelling, "0") == "0" and words:
                settings.problems.append(f"{written}: {spelling} takes no value")
            continue
        name = flag.option.name
        try:
            value = _value(flag, words)
        except ValueError as error:
            settings.mark_bad(name, f"{spelling} {error}", "command line")
            continue
        if flag.kind == "weak":
            weak[name] = (written, value)
        elif name in chosen and chosen[name][1] != value:
            problem = f"{chosen[name][0]} and {written} contradict each other: choose one"
            settings.mark_bad(name, problem, "command line")
        else:
            chosen[name] = (written, value)
    return weak | chosen


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


def _legacy(settings: Settings, spelling: str, flag: Flag, words: list[str]) -> None:
    legacy = flag.legacy
    assert legacy is not None
    written = " ".join([spelling, *words])
    if flag.kind == "refused":
        settings.problems.append(f"{written} is not supported: {legacy.text}")
        return
    if (legacy.values == "0" and words) or (legacy.values == "1" and len(words) != 1):
        settings.problems.append(f"{spelling} takes {'no' if legacy.values == '0' else 'one'} value, got {len(words)}")
    elif flag.kind == "accepted":
        settings.notices.append(f"{written} has no effect: {legacy.text}")
    elif legacy.is_harmless(words):
        settings.notices.append(f"{written} has no effect: that is always so here")
    else:
        settings.problems.append(f"{written} is not supported: {legacy.text}")


def command_line_of(config: Config) -> list[str]:
    """A command line that gives the same configuration: only what was chosen, in the order of the sections."""
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
    return argv

