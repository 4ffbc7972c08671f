"""Settings as a TOML file: reading of --config, and the resolved settings beside a run.

A key is the name of a setting, with underscores or dashes, or another spelling of its flag; `preset`
and `pieces` are those flags. Tables named after the sections of a configuration may group keys. As
names are unique, a key may stand in any of them. TOML is written here because each line carries the
origin of its value, which a library that writes only data would lose.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.option import Option, options_of
from megatron.config.settings import SECTIONS, Settings, all_options, did_you_mean
from megatron.errors import ConfigError
from megatron.untrusted import read_text, read_toml

if TYPE_CHECKING:
    from megatron.config.config import Config

_MOST_BYTES = 1 << 20
_OWN = ("preset", "pieces")
# Facts of a launch, which is another one when the file is given back.
_OF_A_LAUNCH = ("world_size", "local_rank", "master_addr", "master_port")


def read_settings_file(settings: Settings, path: str) -> dict[str, tuple[Any, str]]:
    """Return {name: (value, origin)} of a file, also of `preset` and `pieces`.

    Problems are added to `settings`. Values are not checked, except that `none` is None and that a
    list may be given as one value, and names as numbers.
    """
    try:
        content = read_toml(path, _MOST_BYTES, error=ConfigError)
        text = read_text(path, _MOST_BYTES, error=ConfigError)
    except ConfigError as error:
        settings.problems.append(f"--config: {error}")
        return {}
    found: dict[str, tuple[Any, str]] = {}
    for key, value in _entries(content):
        line = re.search(rf"^[ \t]*[\"']?{re.escape(key)}[\"']?[ \t]*=", text, re.MULTILINE)
        at = path if line is None else f"{path}:{1 + text.count(chr(10), 0, line.start())}"
        name = _name(key)
        if name is None:
            settings.problems.append(f"{at}: unknown key {key}{_hint(key)}")
        elif name in found:
            settings.problems.append(f"{at}: {key} is given a second time: remove one")
        else:
            option = all_options().get(name)
            found[name] = (value if option is None else _value(option, value), f"{at}: {key}")
    return found


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, those of the tables of sections included."""
    for key, value in content.items():
        if key in SECTIONS and isinstance(value, dict):
            yield from value.items()
        else:
            yield key, value


def _name(key: str) -> str | None:
    """Return the setting of a key, 'preset' or 'pieces'; None for an unknown key."""
    name, flag = key.replace("-", "_"), "--" + key.replace("_", "-")
    if name in _OWN or name in all_options():
        return name
    return next((n for n, o in all_options().items() if {f"--{key}", flag} & {*o.flags}), None)


def _hint(key: str) -> str:
    """Return what to write instead of an unknown key."""
    flag = "--" + key.replace("_", "-")
    for name, option in all_options().items():
        if flag in option.off_flags:
            return f": write {name} = false"
        for spelling, value in {**option.shortcuts, **option.weak_shortcuts}.items():
            if flag == spelling:
                return f": write {name} = {written(value)}"
    return did_you_mean(key.replace("-", "_"), {*all_options(), *SECTIONS, *_OWN})


def _value(option: Option, value: Any) -> Any:
    if option.has_none and value == "none":
        return None
    if not option.many:
        return value
    values = value if isinstance(value, list) else [value]
    numbers = option.kind is str  # the weights of a blend
    return [str(v) if numbers and type(v) in (int, float) else v for v in values]


# --- writing


def render_settings(config: Config) -> str:
    """Return all settings as a TOML file that --config accepts, each with its origin.

    Values that follow from others or from the launch are comments: they are derived again.
    """
    lines = ["# Every setting of a run. --config takes this file; flags override its values."]
    if config.pieces.file is not None:
        lines.append(f"pieces = {written(config.pieces.file)}")
    for attribute, section in SECTIONS.items():
        lines += ["", f"[{attribute}]"]
        for option in options_of(section):
            name, origin = option.name, config.origin(option.name)
            used = getattr(getattr(config, attribute), name)
            value = config.given.get(name, used)
            if value != used:
                origin += f": {written(used)}"
            chosen = name in config.given or origin == "default"
            again = value is None or option.internal or name in _OF_A_LAUNCH or not chosen
            lines.append(f"{'# ' * again}{name} = {written(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def written(value: Any) -> str:
    """Return a value as TOML, which has no null: entries without a value are left out.

    >>> print(written((True, 0.5, "a\\n", {"b": 1, "c": None})))
    [true, 0.5, "a\\n", {"b" = 1}]
    """
    if isinstance(value, Mapping):
        pairs = (f"{written(k)} = {written(v)}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(written(item) for item in value if item is not None)}]"
    if value is None or isinstance(value, float):
        return "unset" if value is None else repr(value)
    # JSON's strings, whole numbers and booleans are TOML's, but for one character
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_settings(path: Path, text: str, iteration: int) -> None:
    """Write the result of `render_settings` beside a run that starts at `iteration`.

    A file with other settings is kept as settings-ITERATION.toml, unless there is one: between two
    starts at the same iteration nothing was trained that counts. Raises OSError and ValueError.
    """
    try:
        before = read_toml(path, _MOST_BYTES, error=ConfigError)
    except ConfigError:
        before = {}
    temporary, earlier = path.with_suffix(".tmp"), path.with_stem(f"{path.stem}-{iteration:07d}")
    temporary.write_text(text, encoding="utf-8")  # first: the disk may be full
    if before != tomllib.loads(text) and path.exists() and not earlier.exists():
        os.rename(path, earlier)
    os.replace(temporary, path)
