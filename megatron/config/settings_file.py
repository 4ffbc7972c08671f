"""Settings as a TOML file: the file given with --config, and the resolved settings of a run.

A key is the name of a setting, or any flag, with underscores or dashes. Tables named after the
sections of a configuration may group keys. Since names are unique, a key may be in any table.
This module writes TOML itself because each line includes the origin of its value, which a library
that writes only data would drop. A run writes its settings for a single start into [start], which
--config does not repeat.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.option import options_of, shown
from megatron.config.settings import SECTIONS, cluster_of_environment
from megatron.errors import ConfigError
from megatron.untrusted import read_text, read_toml

if TYPE_CHECKING:
    from megatron.config.config import Config

_MOST_BYTES = 1 << 20
_FIRST_LINE = "# Every setting of a run."  # how files that runs write begin, in all versions
_DEFAULT = "# default"  # ends the lines of settings that nobody chose
_START = "start"

Entry = tuple[str, list[str], str, bool]


def read_settings_file(path: str) -> tuple[list[Entry], bool]:
    """Return the entries in a file, and whether a run wrote the file.

    An entry consists of a key, its value as a flag's words, 'FILE:LINE: key', and whether a run
    wrote the value as a default. Raises ConfigError if the file cannot be read or is not TOML.
    """
    content = read_toml(path, _MOST_BYTES, error=ConfigError)
    text = read_text(path, _MOST_BYTES, error=ConfigError)
    of_a_run = text.startswith(_FIRST_LINE)

    def entries(table: dict[str, object]) -> Iterator[Entry]:
        for key, value in table.items():
            if key in (*SECTIONS, _START) and isinstance(value, dict):
                yield from entries(value)
                continue
            line = re.search(
                rf"^[ \t]*([\w-]+\.)*[\"']?{re.escape(key)}[\"']?[ \t]*=.*", text, re.MULTILINE
            )
            at = "" if line is None else f":{1 + text.count(chr(10), 0, line.start())}"
            default = of_a_run and line is not None and line[0].rstrip().endswith(_DEFAULT)
            yield key, words_of(value), f"{path}{at}: {shown(key)}", default

    return list(entries(content)), of_a_run


def words_of(value: object) -> list[str]:
    """Return a value as the words of a flag.

    >>> words_of(True), words_of([0.3, "a"]), words_of(False)
    ([], ['0.3', 'a'], ['false'])
    """
    values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
    return ["false" if item is False else str(item) for item in values]


# --- writing


def render_settings(config: Config) -> str:
    """Return all settings as a TOML file that --config accepts, each with its origin.

    Values derived from others or from the launch are comments: they will be derived again. Chosen
    settings for a single start are in a separate table.
    """
    lines = [f"{_FIRST_LINE} --config takes this file; flags override its values."]
    start = ["", f"[{_START}]  # of the start that wrote this file: --config does not repeat it"]
    if config.pieces.file is not None:
        lines.append(f"pieces = {written(config.pieces.file)}")
    for attribute, section in SECTIONS.items():
        lines += ["", f"[{attribute}]"]
        for option in options_of(section):
            name = option.name
            origin = config.origin(option.name)
            used = option.named(getattr(getattr(config, attribute), name))
            value = option.named(config.explicit.get(name, used))
            chosen = name in config.explicit or origin == "default"
            if name == "cluster" and value is None and cluster_of_environment() is not None:
                value = used = "none"  # without this line, the variable would count again
                origin = "not that of MEGATRON_CLUSTER"
            if value != used:
                origin += f": {written(used)}"
            line = f"{name} = {written(value)}  # {origin}"
            commented = value in (None, ()) or not option.flags or option.one_start or not chosen
            if option.one_start and value != option.default and chosen and origin != "launcher":
                start.append(line)
            else:
                lines.append(f"{'# ' * commented}{line}")
    return "\n".join([*lines, *(start if len(start) > 2 else ()), ""])


def written(value: object) -> str:
    """Return a value as TOML. TOML has no null: None becomes the word unset, for comments.

    >>> print(written((True, 0.5, "a\\n")))
    [true, 0.5, "a\\n"]
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(written, value))}]"
    if value is None:
        return "unset"
    # JSON strings, numbers and booleans are valid TOML, except for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_settings(path: Path, text: str, iteration: int) -> None:
    """Write the result of `render_settings` for a run that starts at `iteration`.

    Settings that were read from this file keep their lines, with the original origin. An existing
    file with different settings is kept as settings-ITERATION.toml, unless that exists: between two
    starts at the same iteration there is no training worth recording. Raises OSError or ValueError
    if the text cannot be written.
    """
    try:
        before = read_toml(path, _MOST_BYTES, error=ConfigError)
        lines = read_text(path, _MOST_BYTES, error=ConfigError).split("\n")
    except ConfigError:
        before = {}
        lines = []

    def first(match: re.Match[str]) -> str:
        earlier = lines[int(match[3]) - 1] if 0 < int(match[3]) <= len(lines) else ""
        same = os.path.abspath(match[2]) == os.path.abspath(path)
        return earlier if same and earlier.startswith(match[1]) else match[0]

    text = re.sub(r"^(.*  # )(.+):(\d+): .*$", first, text, flags=re.MULTILINE)
    temporary = path.with_suffix(".tmp")
    earlier = path.with_stem(f"{path.stem}-{iteration:07d}")
    temporary.write_text(text, encoding="utf-8")  # first: the disk may be full
    if before != tomllib.loads(text) and path.exists() and not earlier.exists():
        os.rename(path, earlier)
    os.replace(temporary, path)
