"""Command line of a training run.

Its flags are generated from the settings, and all problems are reported together.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.config.config import Config, Export, default_of, finish
from megatron.config.flags_of_others import Foreign, foreign_flags
from megatron.config.help_text import render_config, render_help
from megatron.config.io import hugging_face_folder
from megatron.config.option import Option, Values, shown
from megatron.config.pieces import PLAIN, Pieces, load_pieces
from megatron.config.presets import PRESETS, give_preset, yielding
from megatron.config.settings import Settings, all_options, cluster_of_environment, did_you_mean
from megatron.config.translate import DIRECT, LATE, Flags, is_off, meaning, translate_late
from megatron.config.validate import DATA, REQUIRED, missing
from megatron.errors import CheckpointError, ConfigError

# Returns the file with a checkpoint's settings, the settings that must match the checkpoint's, and
# those that apply unless the run gives others. The argument holds the settings given so far,
# including `load` or `model_from`.
# Raises CheckpointError.
ReadCheckpoint = Callable[
    [Mapping[str, object]], tuple[str, Mapping[str, object], Mapping[str, object]]
]

META_SWITCHES = frozenset("--help -h --print-config --complete --dry-run --trust-config".split())
META_FLAGS = META_SWITCHES | {"--rank", "--preset", "--pieces", "--config"}
_FLAG = re.compile(r"-(?!\.?[0-9])\S+")  # neither a negative number nor text with spaces
GROUPED = "--group-query-attention"  # without it --num-query-groups has no effect


@dataclass(frozen=True)
class Flag:
    """Meaning of one spelling of a flag.

    settings  names of the settings that the flag may set
    option    declaration of the setting, for a flag that sets a single one
    value     value that the flag sets if it is given without words; None: it needs words, unless
              the option has an implied value
    weak      whether every flag for the same setting that is not weak overrides this one
    foreign   another framework's flag that has no setting here
    read      function that translates the flag's words into settings
    """

    settings: tuple[str, ...] = ()
    option: Option | None = None
    value: object = None
    weak: bool = False
    foreign: Foreign | None = None
    read: Callable[[list[str]], Values] | None = None


class ChosenValue(NamedTuple):
    """A chosen value, with its flag as written and its origin."""

    written: str
    value: object
    origin: str


@functools.cache
def settings_flags() -> Mapping[str, Flag]:
    """Return every spelling that sets a setting or is in META_FLAGS, with its meaning."""
    table: dict[str, Flag] = {}

    def add(spelling: str, flag: Flag) -> None:
        assert spelling not in table, f"two meanings of {spelling}"
        table[spelling] = flag

    for option in all_options().values():
        on = True if option.kind is bool else None
        for values in (
            dict.fromkeys(option.flags, on),
            dict.fromkeys(option.off_flags, False),
            option.shortcuts,
            option.weak_shortcuts,
        ):
            for spelling, value in values.items():
                weak = values is option.weak_shortcuts
                add(spelling, Flag((option.name,), option, value, weak))
    for spelling, direct in DIRECT.items():
        add(spelling, Flag(direct.settings, read=direct.read))
    for spelling, settings in LATE.items():
        add(spelling, Flag(settings))
    for spelling in META_FLAGS:
        add(spelling, Flag())
    return table


@functools.cache
def flag_table() -> Mapping[str, Flag]:
    """Return every spelling that a command line may contain, with its meaning.

    Flags of other frameworks are also accepted with dashes for underscores, and with underscores
    for dashes.
    """
    table = dict(settings_flags())
    for spelling, foreign in foreign_flags().items():
        assert spelling not in table, f"two meanings of {spelling}"
        flag = table[spelling] = Flag(foreign=foreign)
        table.setdefault(spelling.replace("_", "-"), flag)
        table.setdefault("--" + spelling[2:].replace("-", "_"), flag)
    return table


class Scanned(NamedTuple):
    """Words of a command line by flag.

    `flags` contains each spelling once, with the words of its last use. `problems` names unknown
    flags and words that belong to no flag.
    """

    flags: dict[str, list[str]]
    problems: list[str]


def add_preset(parser: argparse._ActionsContainer, more: str = "") -> None:
    """Add the option --preset to a tool's parser. `more` names additional accepted values."""
    text = f"preset: {', '.join(PRESETS)}{more}; flags of pretrain_gpt.py override its values"
    parser.add_argument("--preset", "--model", metavar="NAME", help=text)


def with_preset(name: str | None, flags: Sequence[str]) -> list[str]:
    """Return the training flags, preceded by a tool's preset.

    Raises ConfigError if there are two presets.
    """
    if name is not None and any(word.partition("=")[0] == "--preset" for word in flags):
        raise ConfigError(f"--preset {name} and a second --preset are given: give one")
    return list(flags) if name is None else ["--preset", name, *flags]


def split_at_dashes(argv: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Split a tool's command line at the first --: words for the tool, and training flags.

    None stands for sys.argv[1:].
    """
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def scan(argv: Sequence[str]) -> Scanned:
    """Split a command line into flags and their words. Unknown flags become problems."""
    flags: dict[str, list[str]] = {}
    problems: list[str] = []
    words: list[str] | None = None  # words of the current flag; None: no flag takes them
    for index, word in enumerate(argv):
        spelling, equals, value = word.partition("=")
        # Flags of forks and Primus, and names of Megatron-LM's attributes, have underscores.
        if "_" in spelling and spelling not in flag_table():
            spelling = spelling.replace("_", "-")
        if word == "--":
            problems += [f"'{shown(stray)}' belongs to no flag" for stray in argv[index + 1 :]]
            break
        if not _FLAG.fullmatch(spelling):
            if words is None:
                problems.append(f"'{shown(word)}' belongs to no flag")
            else:
                words.append(word)
        elif spelling not in flag_table():
            known = (flag for flag in settings_flags() if flag != "-h")
            unknown = shown(spelling)
            problems.append(f"unknown flag {unknown}{did_you_mean(unknown, known)}")
            words = []  # the words after it are its values
        else:
            flags.pop(spelling, None)  # a repeated flag takes its last position
            flags[spelling] = [value] if equals else []
            words = None if equals else flags[spelling]
    return Scanned(flags, problems)


def parse_args(
    argv: Sequence[str],
    world_size: int | None = None,
    pieces: Pieces = PLAIN,
    checkpoint: ReadCheckpoint | None = None,
    export: Export | None = None,
    check: Callable[[Config], list[str]] | None = None,
) -> Config:
    """Return the configuration of a training command line.

    world_size  number of processes that were started, spare ones included; None: --world-size, or
                its default, applies
    pieces      the user's own pieces
    checkpoint  function that reads the settings for --use-checkpoint-args, --load hf:FOLDER and
                --model-from; None: no checkpoint is read
    export      see finish
    check       function that checks what --complete prints, files included, and returns notices

    --help and --print-config print and raise SystemExit(0); with --complete, --print-config
    requires the settings that a run needs, and calls `check`. Raises ConfigError with all problems,
    numbered if there are several.
    """
    scanned = scan(argv)
    if "--help" in scanned.flags or "-h" in scanned.flags:
        print(render_help())
        raise SystemExit(0)
    printing = "--print-config" in scanned.flags
    settings = Settings(problems=scanned.problems, pieces=pieces)
    settings.give("cluster", cluster_of_environment(), "variable MEGATRON_CLUSTER")
    _give_flags(settings, scanned.flags, checkpoint)
    explicit = settings.explicit.get("world_size")
    if world_size is not None and not (printing and explicit is not None):
        world_size = _without_spares(settings, world_size)
        if explicit not in (None, world_size):
            settings.problems.append(
                f"--world-size {explicit} ({settings.origins['world_size']}) contradicts the "
                f"launcher, which started {world_size} processes: remove it; it is for "
                "--print-config and --dry-run"
            )
        settings.give("world_size", world_size, "launcher")
    complete = not printing or "--complete" in scanned.flags
    config = finish(settings, run=complete, export=export)
    if printing:
        if complete:
            checked = check(config) if check is not None else []
        else:
            checked = [f"a run would fail: {problem}" for problem in missing(settings)]
        for notice in (*config.notices, *checked):
            print(f"notice: {notice}", file=sys.stderr)
        print(render_config(config))
        raise SystemExit(0)
    return config


def _without_spares(settings: Settings, started: int) -> int:
    """Return the number of ranks among the processes that were started."""
    spares: int = settings.explicit.get("spare_ranks", 0)
    if started > spares:
        return started - spares
    settings.problems.append(
        f"--spare-ranks {spares} leaves none of the {started} processes that the launcher started: "
        "start more processes, or give fewer spare ranks"
    )
    return started


def parse_plan(
    argv: Sequence[str], pieces: Pieces = PLAIN, checkpoint: ReadCheckpoint | None = None
) -> Config:
    """Return the configuration of a command line for planning, before a launch.

    --world-size gives the number of processes. Settings that only a run needs (data, length,
    learning rate) may be absent. Raises ConfigError with all problems.
    """
    return finish(read_settings(argv, pieces, checkpoint))


def read_settings(
    argv: Sequence[str], pieces: Pieces = PLAIN, checkpoint: ReadCheckpoint | None = None
) -> Settings:
    """Return the settings chosen by a command line, its preset and its --config file.

    They are not resolved: there are no defaults or derived values. Problems are collected in the
    result's `problems`.
    """
    scanned = scan(argv)
    settings = Settings(problems=scanned.problems, pieces=pieces)
    _give_flags(settings, scanned.flags, checkpoint)
    return settings


def _give_flags(settings: Settings, flags: Flags, checkpoint: ReadCheckpoint | None) -> None:
    chosen = _chosen_values(settings, flags)
    defaults = set[str]()
    if "--config" in flags:
        file, origins, defaults = _flags_of_file(settings, flags, _values_of(chosen))
        below = _chosen_values(settings, file, origins)
        winners = yielding(_values_of(below), _values_of(chosen))
        for name, winner in winners.items():
            lost = below.pop(name)
            won = chosen[winner]
            if winner != name or lost.value != won.value:
                settings.notices.append(f"{won.written} overrides {lost.written} ({lost.origin})")
        for spelling in file.keys() & flags.keys() & META_FLAGS:
            settings.notices.append(f"{spelling} overrides {origins[spelling]}")
        flags = {**file, **flags}
        chosen = below | chosen
    groups = chosen.get("num_key_value_heads")
    if (
        groups is not None
        and "--num-query-groups" in groups.written
        and "--preset" not in flags  # a preset's model may group queries
        and is_off(flags.get(GROUPED, ["none"]))
    ):
        del chosen["num_key_value_heads"]
        settings.notices.append(
            f"{groups.written} has no effect without {GROUPED}, as in Megatron-LM: each head has "
            f"its own key and value. --num-key-value-heads {groups.value} alone groups the queries"
        )
    if "--preset" in flags:
        words = flags["--preset"]
        if len(words) == 1:
            give_preset(settings, words[0], chosen=_values_of(chosen))
        else:
            settings.problems.append(f"--preset takes one name, got {len(words)}")
    if "--pieces" in flags:
        words = flags["--pieces"]
        try:
            if len(words) != 1 or settings.pieces != PLAIN:
                raise ConfigError(
                    f"--pieces {' '.join(words)}: give one file, and none to a program that passes "
                    "its own pieces"
                )
            settings.pieces = load_pieces(words[0])
        except ConfigError as error:
            settings.problems.append(str(error))
    if "--rank" in flags:
        settings.notices.append("--rank has no effect: the launcher sets the rank")
    for name, one in chosen.items():
        if one.origin not in defaults or one.value != default_of(name):
            settings.give(name, one.value, one.origin)
    from_there = hugging_face_folder(settings.explicit.get("load")) is not None
    loaded = from_there or settings.explicit.get("use_checkpoint_args")
    if "model_from" in settings.explicit and (loaded or "--preset" in flags):
        other = f"--load {settings.explicit['load']}" if from_there else "--use-checkpoint-args"
        settings.problems.append(
            f"--model-from {settings.explicit['model_from']} and {other if loaded else '--preset'} "
            "both set the model: use one of them"
        )
        settings.bad.update((*REQUIRED, "vocab_size"))
    elif checkpoint is not None and (loaded or "model_from" in settings.explicit):
        _give_checkpoint(settings, checkpoint, "load" if loaded else "model_from")
    if settings.explicit.get("deepspeed") or "--no-deepspeed" in flags:
        settings.notices.append("--deepspeed has no effect: the engine is always DeepSpeed")
    translate_late(settings, flags)
    for spelling, words in flags.items():
        foreign = flag_table()[spelling].foreign
        if foreign is not None and not (spelling == GROUPED and "--num-query-groups" in flags):
            foreign.judge(settings, spelling, words)


def _give_checkpoint(settings: Settings, read: ReadCheckpoint, named_by: str) -> None:
    """Set the checkpoint's settings, and record contradictions with its architecture.

    named_by   the setting that names the checkpoint or the model
    """
    source = ""
    fixed: Mapping[str, object] = {}
    suggested: Mapping[str, object] = {}
    try:
        if named_by in settings.explicit:
            source, fixed, suggested = read(settings.explicit)
    except CheckpointError as error:
        written = all_options()[named_by].written(settings.explicit[named_by])
        settings.problems.append(f"{written}: {error}")
    if not source:  # that these are missing is not an additional problem
        settings.bad.update((*REQUIRED, "vocab_size"))
    for name, value in {**suggested, **fixed}.items():
        chosen = settings.explicit.get(name)
        if value is None or name in settings.bad:
            continue
        value = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        if chosen is None:
            settings.give(name, value, f"checkpoint {source}")
        elif name in fixed and chosen != value:
            settings.problems.append(
                f"{all_options()[name].written(chosen)} ({settings.origins[name]}) contradicts "
                f"{name} {value} of {source}, whose model is loaded: remove it, or load another "
                "checkpoint"
            )


def _flags_of_file(
    settings: Settings, explicit: Flags, chosen: Mapping[str, Any]
) -> tuple[dict[str, list[str]], dict[str, str], set[str]]:
    """Return the flags in the file named by --config, with their words, and their origins.

    Also return the origins of values that were defaults in the run that wrote the file: if such a
    value is still the default, it does not count as chosen.

    explicit  flags on the command line, with their words
    chosen    settings that these flags set

    If a run wrote the file, even with an older version, settings for a single start are omitted,
    and if --save differs, also the locations of that run's outputs. A notice lists what is omitted,
    except defaults and settings that are chosen again. Flags that name code are a problem unless
    they are overridden or --trust-config is given, since such files are shared.
    """
    from megatron.config.settings_file import read_settings_file, words_of

    words = explicit["--config"]
    flags = dict[str, list[str]]()
    origins = dict[str, str]()
    defaults = set[str]()
    left_out = list[str]()
    try:
        if len(words) != 1:
            raise ConfigError(f"takes one file, got {len(words)}")
        entries, of_a_run = read_settings_file(words[0])
    except ConfigError as error:
        settings.problems.append(f"--config {error}")
        return flags, origins, defaults
    folders = {
        os.path.abspath(word) for key, values, *_ in entries if key == "save" for word in values
    }
    elsewhere = "save" in chosen and os.path.abspath(chosen["save"]) not in folders
    for key, values, origin, default in entries:
        key = key.removeprefix("--")  # as on the command line
        option = all_options().get(key.replace("-", "_"))
        if of_a_run and option and (option.one_start or (elsewhere and option.of_folder)):
            if values != words_of(option.default) and option.name not in chosen:
                left_out.append(" ".join([option.flag, *values]))
            continue
        scanned = scan([option.flags[0] if option and option.flags else f"--{key}"])
        spelling = next(iter(scanned.flags), "")
        setting = flag_table()[spelling].option if spelling else None
        names_code = spelling == "--pieces" or (setting is not None and setting.names_code)
        problems = scanned.problems if spelling or scanned.problems else ["it names no flag"]
        if spelling in flags:
            problems = [f"{spelling} is given twice: remove one"]
        elif spelling in META_FLAGS - {"--preset", "--pieces"}:
            problems = [f"{spelling} is for the command line only: remove it"]
        elif names_code and explicit.keys().isdisjoint(("--trust-config", spelling)):
            problems = [
                f"{' '.join([spelling, *values])} names code, which a file may not do: give it on "
                "the command line, or --trust-config if you trust whoever wrote the file"
            ]
        elif spelling:
            flags[spelling] = values
            origins[spelling] = origin
            defaults |= {origin} if default else set()
        settings.problems += [f"{problem} ({origin})" for problem in problems]
    if left_out:
        settings.notices.append(
            "not repeated, because they belong to a single start or to the --save folder of the "
            f"run that wrote {words[0]}: {', '.join(left_out)}. Give those that this start needs "
            "on the command line"
        )
    return flags, origins, defaults


def _values_of(chosen: Mapping[str, ChosenValue]) -> Values:
    return {name: one.value for name, one in chosen.items()}


def _chosen_values(
    settings: Settings, flags: Flags, origins: Mapping[str, str] = MappingProxyType({})
) -> dict[str, ChosenValue]:
    """Return the chosen value of each setting.

    `origins` holds the origins of flags that are not on the command line. Two flags with different
    values for a setting are a problem, unless one of them overrides the other.
    """
    chosen: dict[str, ChosenValue] = {}
    weak: dict[str, ChosenValue] = {}
    for spelling, words in flags.items():
        flag = flag_table()[spelling]
        written = " ".join([spelling, *words])
        origin = origins.get(spelling, "command line")
        if spelling in META_SWITCHES and words:
            settings.problems.append(f"{written}: {spelling} takes no value")
        for name, value in _values(settings, spelling, flag, words, origin).items():
            choice = ChosenValue(written, value, origin)
            if flag.weak:
                weak[name] = choice
            elif name not in chosen or chosen[name].value == value:
                chosen[name] = choice
            elif (winner := _winner(chosen[name], choice)) is None:
                both = f"{chosen[name].written} and {written} contradict each other: choose one"
                settings.mark_bad(name, both, origin)
            else:
                loser = chosen[name] if winner is choice else choice
                chosen[name] = winner
                settings.notices.append(f"{winner.written} overrides {loser.written}")
        if flag.option is not None:
            for key in (spelling, *(word.lower() for word in words)):
                for name, value in flag.option.implies.get(key, {}).items():
                    weak[name] = ChosenValue(written, value, origin)
    # The last of --mock-data and data files wins, but a settings file has no order.
    sources = [n for n, one in chosen.items() if n in (*DATA, "mock_data") and one.value]
    for name in sources if "mock_data" in sources and not origins else ():
        if (name == "mock_data") != (sources[-1] == "mock_data"):
            lost = chosen.pop(name)
            settings.notices.append(f"{chosen[sources[-1]].written} overrides {lost.written}")
    return weak | chosen


# Pairs of flags of which the first wins, as in Megatron-LM.
_DECIDES = {
    ("--recompute-activations", "--recompute-granularity"),
    ("--data-parallel-sharding-strategy", "--use-distributed-optimizer"),
}


def _winner(one: ChosenValue, other: ChosenValue) -> ChosenValue | None:
    """Return the one of two values that wins; None if they contradict each other."""
    for first, second in ((one, other), (other, one)):
        flags = first.written.split()[0], second.written.split()[0]
        # Every ZeRO stage but 0 distributes the optimizer.
        if flags in _DECIDES or (flags[1] == "--use-distributed-optimizer" and first.value):
            return first
    return None


def _values(settings: Settings, spelling: str, flag: Flag, words: list[str], origin: str) -> Values:
    """Return the settings that one flag sets. Invalid words are recorded as problems."""
    option = flag.option
    written = " ".join([spelling, *words])
    values: Values = {}
    try:
        if flag.read is not None and not is_off(words):
            for name, value in flag.read(words).items():
                values[name] = all_options()[name].accept(value)
            settings.notices.append(meaning(written, values))
        elif option is not None:
            if flag.value is None and not words and option.implied is not None:
                value = option.implied
            elif flag.value is None and not words and option.many:
                raise ValueError("takes at least one value, got none")
            elif flag.value is not None and not words:
                value = flag.value
            elif flag.value is not None and option.kind is not bool and words == ["false"]:
                value = option.default  # a shortcut that a settings file turns off
            elif flag.value is None or (option.kind is bool and flag.value and len(words) == 1):
                value = option.named(option.parse(words))  # also for --flag true, --flag=false
            else:
                raise ValueError(f"takes no value, got {shown(' '.join(words))}")
            values[option.name] = value
            worded = option.choices is None and len(words) == 1 and words[0] in option.value_names
            # Without a hint, or without another name, the word is its value's usual name.
            if worded and option.hint and value != words[0]:
                settings.notices.append(f"{written} means {option.written(value)}: {option.hint}")
    except (ValueError, ConfigError) as error:
        for name in flag.settings:
            settings.mark_bad(name, f"{spelling} {error}", origin)
        return {}
    return values


def command_line_of(config: Config) -> list[str]:
    """Return a command line for the same configuration.

    It contains the chosen settings that have an effect, by section.
    """
    argv: list[str] = []
    for name, option in all_options().items():
        if name not in config.explicit or not option.flags or option.inert:
            continue
        value = config.explicit[name]
        if option.kind is bool:
            if value == option.default:
                continue
            argv.append(option.written(value))
        elif option.many:
            argv += [option.flags[0], *map(str, value)]
        else:
            argv.append(f"{option.flags[0]}={option.named(value)}")
    return argv if config.pieces.file is None else [*argv, "--pieces", config.pieces.file]
