"""Texts of --help and --print-config.

--help lists the settings by section with their defaults, at most 100 columns wide.
"""

from __future__ import annotations

import re
import textwrap

from megatron.config.config import Config, default_of
from megatron.config.flags_of_others import FILE, foreign_flags
from megatron.config.option import Option, options_of
from megatron.config.presets import PRESETS
from megatron.config.settings import SECTIONS, all_options
from megatron.config.translate import DIRECT, LATE

WIDTH = 100
_INDENT = 44
_NAME_WIDTH = 48
_VALUE_WIDTH = 28
_METAVARS = {int: "N", float: "X", str: "TEXT"}
# Headings of sections where they differ from the attribute names.
_TITLES = {
    "parallel": "parallelism and launch",
    "recompute": "recomputation",
    "batch": "batch and length of the run",
    "optimizer": "optimizer and learning rate",
    "engine": "DeepSpeed engine",
    "checkpoint": "checkpoints",
    "training": "training loop",
}

_START = (
    ("--help, -h", "Show this help and exit."),
    (
        "--print-config",
        "Print the resolved configuration with the origin of each value, and exit.",
    ),
    ("--complete", "With --print-config: fail as a run would before its first step."),
    (
        "--dry-run",
        "Run set-up and two training steps of one rank of each kind (for example, of each pipeline "
        "stage) without data or devices, for any --world-size and --cluster, and report how much "
        "memory each kind needs. Exit code 0; 3 if a step fails or the model does not fit.",
    ),
    (
        "--pieces FILE",
        "Python file with your own layer, model, loss, optimizer, data sets and others "
        "(docs/extending.md).",
    ),
    (
        "--preset NAME",
        f"Start from a preset; other flags override it. One of {', '.join(PRESETS)}.",
    ),
    (
        "--config FILE",
        "Read settings by name from a TOML file, such as the settings.toml that a run writes. "
        "These settings override a preset; flags override them.",
    ),
    ("--trust-config", "Accept --pieces and --callback, which run code, in the file of --config."),
)


def render_help() -> str:
    """Return the help text."""
    text = (
        "Train a GPT. Flags have Megatron's names and cannot be abbreviated. --flag VALUE and "
        "--flag=VALUE are equivalent; the last use of a flag wins. Switches have a --no- form."
    )
    usage = "usage: pretrain_gpt.py [--preset NAME] [--flag VALUE ...]"
    lines = [usage, "", *textwrap.wrap(text, WIDTH), "", "start:"]
    for entry in _START:
        lines += _entry(*entry)
    for attribute, section in SECTIONS.items():
        lines += ["", f"{_TITLES.get(attribute, attribute)}:"]
        for option in options_of(section):
            if not option.internal and option.flags:
                lines += _entry(_heading(option), _description(option))
    lines += ["", f"flags of other frameworks (megatron/config/{FILE.name} has the reasons):"]
    refused = sum(flag.refused for flag in foreign_flags().values())
    for sentence in (
        f"Translated into settings: {', '.join((*DIRECT, *LATE))}.",
        f"Accepted without effect: {len(foreign_flags()) - refused} flags.",
        f"Refused, with the reason, unless the value turns the feature off: {refused} flags.",
    ):
        lines += textwrap.wrap(
            sentence, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _entry(heading: str, description: str) -> list[str]:
    """Return the lines of an entry, with the heading on the left and the description on the right.

    A long heading gets its own line.
    """
    wrapped = textwrap.wrap(description, WIDTH - _INDENT, break_on_hyphens=False)
    left = f"  {heading}"
    if len(left) <= _INDENT - 2:
        first = left.ljust(_INDENT) + wrapped[0]
        wrapped = wrapped[1:]
    else:
        first = left
    return [first, *(" " * _INDENT + line for line in wrapped)]


def _heading(option: Option) -> str:
    if option.kind is bool:
        return option.off_flags[0] if option.shown_off else option.flags[0]
    value = option.metavar or _METAVARS[option.kind]
    if _choices_fit(option):
        value = option.metavar or "{" + ",".join(_choices(option)) + "}"
    elif option.none_word:
        value += "|none"
    return f"{option.flags[0]} {value}"


def _choices(option: Option) -> list[str]:
    unset = [word for word, value in option.value_names.items() if value is None]
    return [str(c) for c in option.choices or ()] + (unset or ["none"] * option.has_none)


def _choices_fit(option: Option) -> bool:
    """Return whether the choices fit next to the flag. A longer list goes into the description."""
    return option.choices is not None and len(",".join(_choices(option))) <= 70


def _description(option: Option) -> str:
    text = option.help
    if option.shown_off:
        text = f"Do not {text[0].lower()}{text[1:]}"
    if option.choices is not None and not _choices_fit(option):
        text += f" One of {', '.join(_choices(option))}."
    meanings = {**option.shortcuts, **option.weak_shortcuts}
    also = [*option.flags[1:], *(f"{flag} (= {value})" for flag, value in meanings.items())]
    if option.kind is bool:
        off_flag = "--no-" + option.name.replace("_", "-")
        hidden = (_heading(option), off_flag, option.flags[0])
        also = [flag for flag in (*option.flags, *option.off_flags) if flag not in hidden]
    if also:
        text += f" Also {', '.join(also)}."
    if option.inert:
        text += f" No effect: {option.inert}."
    default = option.derived or option.default
    if option.kind is bool:
        return f"{text} (default: on)" if default and not option.shown_off else text
    if default in (None, "", ()):
        return text
    return f"{text} (default: {f'{default:g}' if isinstance(default, float) else _text(default)})"


# --- print-config


def render_config(config: Config) -> str:
    """Return all settings by section, with their values and origins."""
    lines = ["------------------------ arguments ------------------------"]
    for attribute, section in SECTIONS.items():
        lines.append(f"{_TITLES.get(attribute, attribute)}:")
        for option in options_of(section):
            value = _text(option.named(getattr(getattr(config, attribute), option.name)))
            dots = "." * max(3, _NAME_WIDTH - len(option.name))
            lines.append(
                f"  {option.name} {dots} {value:<{_VALUE_WIDTH}} ({config.origin(option.name)})"
            )
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def differences(config: Config) -> dict[str, object]:
    """Return chosen settings that differ from their defaults, JSON-serializable.

    Settings that the launcher chose are left out.
    """
    return {
        name: value
        for name, value in config.to_dict().items()
        if name in config.explicit
        and config.get(name) != default_of(name)
        and config.origin(name) != "launcher"
    }


def render_differences(config: Config) -> list[str]:
    """Return the result of `differences` as text, one line for each origin."""
    lines: dict[str, str] = {}
    for name in differences(config):
        source = config.origin(name)
        line = ""
        if of_file := re.fullmatch(r"(.+):(\d+): \S+", source):
            source = of_file[1]
            line = f" (line {of_file[2]})"
        title = "" if source in ("command line", "argument") else f"{source}: "
        before = f"{lines[title]}, " if title in lines else title
        value = all_options()[name].named(config.get(name))
        lines[title] = f"{before}{name}={_text(value)}{line}"
    return list(lines.values())


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)
    return str(value) if value != "" else "''"
