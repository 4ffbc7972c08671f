"""Reader of TOML files about machines, which may include others; errors name the file and the key.

This module does not need torch.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from megatron.config.settings import did_you_mean
from megatron.errors import ConfigError
from megatron.planner.compute import COLUMNS
from megatron.untrusted import read_toml

_PACKAGE = Path(__file__).parent
_MOST_BYTES = 1 << 22  # of a file; that of a measured machine has about ten thousand
_KNOWN_FILES = "see the files of known machines for its meaning"
_WORDS = {
    "Input should be": "expected",
    "Extra inputs are not permitted": "is not a known key",
    "Field required": "is missing",
}
"""Words of pydantic's messages, and what stands for them here."""

Holders = dict[str, Path]
"""Files that hold values, by key; a key without an entry is in the file of its table."""


class Facts:
    """Contents of a parsed file, over those of the files that it includes.

    Raises ConfigError if a file cannot be read. `take` raises ConfigError for a missing or invalid
    value, and `check_known` for an unknown key. Their messages name the file, the key, the value
    and, for a value of an included file, this file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables, self._holders = _read_with_includes(path)
        self._known: set[str] = set()

    def error(self, key: str, problem: str, *, inner: str = "", of: str = "") -> ConfigError:
        """Return the error of a key.

        inner  place within its value, such as "[0]"
        of     key of the value that needs this one, which is missing
        """
        present = of or (key if self.find(key) is not None else "")
        holder = _holder(self._holders, present) if present else self._path
        place = f"{key}{inner}" if holder == self._path else f"{key}{inner}, included from {holder}"
        return ConfigError(f"{self._path}: {place}: {problem}")

    def find(self, key: str) -> Any:
        """Return the value under a key, or None."""
        return _find(self._tables, key)

    def know(self, keys: Iterable[str]) -> None:
        """Note that these keys may be in a file, whether or not they are taken."""
        self._known.update(keys)

    def take(self, key: str, kind: Any, default: Any = MISSING, *, write: str = "") -> Any:
        """Return the value under `key` as the type `kind`, or `default` if there is no value.

        write  for the message: what to write
        """
        self._known.add(key)
        value = self.find(key)
        advice = f": write {write}" if write else ""
        if value is None:
            self._check_tables(key)
            if default is MISSING:
                table = key.rpartition(".")[0] if write else ""
                raise self.error(key, f"is missing{advice or f': {_KNOWN_FILES}'}", of=table)
            return default
        if get_origin(kind) is Mapping and get_args(kind)[0] is not str and isinstance(value, list):
            try:
                value = {tuple(row[:-1]): row[-1] for row in value}
            except (TypeError, LookupError):
                raise self.error(key, f"is not a list of rows: {quoted(value)}") from None
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            loc = [*first["loc"]]
            while loc and isinstance(loc[0], str) and self.find(f"{key}.{loc[0]}") is not None:
                key = f"{key}.{loc.pop(0)}"
            inner = "".join(f"[{at}]" for at in loc)
            expected = first["msg"]
            for words, shorter in _WORDS.items():
                expected = expected.replace(words, shorter)
            if isinstance(first["input"], str) and "number" in expected:
                advice = f"{advice or ': write it'}, without quotation marks"
            text = f"{expected}, got {quoted(first['input'])}{advice}"
            raise self.error(key, text, inner=inner) from None

    def check_known(self, table: Mapping[str, Any] | None = None, prefix: str = "") -> None:
        """Raise ConfigError for a key that was never read, and for a value in place of a table."""
        for name, value in (self._tables if table is None else table).items():
            key = prefix + name
            if "." in name:
                parent, _, last = key.rpartition(".")
                text = f"is one quoted name with dots: write [{parent}], and {last} below it"
                raise self.error(key, text)
            if key in self._known:
                continue
            if not any(known.startswith(f"{key}.") for known in self._known):
                beside = {known for known in self._known if known.startswith(prefix)}
                names = sorted({known.removeprefix(prefix).split(".")[0] for known in beside})
                choices = did_you_mean(name, names) or f": the keys here are {', '.join(names)}"
                raise self.error(key, f"is not a known key (its value is {quoted(value)}){choices}")
            if isinstance(value, dict):
                self.check_known(value, f"{key}.")
            elif key.removeprefix("compute.") not in COLUMNS:  # a figure has an error of its own
                raise self._no_table(key, value)

    def _check_tables(self, key: str) -> None:
        """Raise ConfigError if a table that may hold this key is something else."""
        words = key.split(".")
        for count in range(1, len(words)):
            table = ".".join(words[:count])
            value = self.find(table)
            if value is not None and not isinstance(value, dict):
                raise self._no_table(table, value)

    def _no_table(self, key: str, value: Any) -> ConfigError:
        text = f"is not a table, but {quoted(value)}: write [{key}], and its keys below it"
        return self.error(key, text)


def quoted(value: Any) -> str:
    """Return a value for a message, shortened if it is long."""
    return reprlib.repr(value)


def _find(tables: Mapping[str, Any], key: str) -> Any:
    value: Any = tables
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


# -- files that include others ---------------------------------------------------------------------


def _read_with_includes(path: Path) -> tuple[dict[str, Any], Holders]:
    """Read a file, and complete it by the files of this package that its `include` names.

    A table is completed key by key, and any other value is taken as a whole from the last file that
    has it; the file itself is the last. `include` is a list such as ["devices/mi250x"]. A figure is
    replaced as a whole, with its basis and range. Its source is that of the same file.
    """
    tables = read_toml(path, _MOST_BYTES, error=ConfigError)
    included = tables.pop("include", [])
    merged: dict[str, Any] = {}
    holders: Holders = {"": path}
    names = included if isinstance(included, list) else [included]
    known = _files_to_include() if names else {}
    for number, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            raise ConfigError(
                f"{path}: include: there is no file {quoted(name)}: choose from "
                f"{', '.join(sorted(known))}"
            )
        if name in names[:number]:
            raise ConfigError(f"{path}: include: names {name} twice: name each file once")
        _put_over(merged, holders, *_read_with_includes(known[name]))
    _put_over(merged, holders, tables, {"": path})
    return merged, holders


def _files_to_include() -> dict[str, Path]:
    """Map the names of this package's files on devices and machines, without suffix, to paths."""
    return {
        f"{folder}/{path.stem}": path
        for folder in ("devices", "clusters")
        for path in (_PACKAGE / folder).glob("*.toml")
    }


def _holder(holders: Holders, key: str) -> Path:
    """Return the file that holds the value under a key."""
    while key not in holders:
        key = key.rpartition(".")[0]
    return holders[key]


def _put_over(
    below: dict[str, Any], holders: Holders, above: Mapping[str, Any], its_holders: Holders
) -> None:
    """Put a file over those that it includes. Each figure keeps the source that its file names."""
    expected = {**_sources_by_figure(below), **_sources_by_figure(above)}
    _merge(below, holders, above, its_holders)
    sources = below.get("sources")
    if not isinstance(sources, dict):
        return
    for figure, source in expected.items():
        if source_of(sources, figure) != source:
            sources[source_key(figure)] = source


def _sources_by_figure(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of each figure of these tables by its name; "" for one without a source."""
    sources = tables.get("sources")
    known = sources if isinstance(sources, dict) else {}
    return {
        name: source_of(known, name)
        for name in COLUMNS
        if _find(tables, f"compute.{name}") is not None
    }


def _merge(
    below: dict[str, Any],
    holders: Holders,
    above: Mapping[str, Any],
    its_holders: Holders,
    prefix: str = "",
) -> None:
    """Put the values of `above` into `below`; tables without a basis are merged key by key."""
    for name, value in above.items():
        key = prefix + name
        old = below.get(name)
        if isinstance(value, dict) and isinstance(old, dict) and "basis" not in {*value, *old}:
            below[name] = dict(old)
            _merge(below[name], holders, value, its_holders, f"{key}.")
            continue
        below[name] = value
        for inner in [inner for inner in holders if inner.startswith(f"{key}.")]:
            del holders[inner]
        inside = {k: file for k, file in its_holders.items() if k.startswith(f"{key}.")}
        holders.update(inside | {key: _holder(its_holders, key)})


# -- sources of figures ----------------------------------------------------------------------------


def source_key(figure: str) -> str:
    """Return the longest key of [sources] for a figure."""
    return f"compute.{figure}".replace(".", "_")


def source_of(sources: Mapping[str, str], figure: str) -> str:
    """Return the text of [sources] under the longest prefix of a figure's key; "" for none.

    The key is compute_NAME, with underscores for dots; a prefix consists of whole words.
    """
    words = source_key(figure).split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((sources[known] for known in names if known in sources), "")
