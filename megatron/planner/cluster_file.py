"""Dataclasses as TOML files. Each field names its key (`at`); its annotation says what is read, checked and written.

Annotations are text, Literal, the numbers of this module, and tuples, mappings and NamedTuples of these. A NamedTuple
with defaults is a table in the file, any other one a row, as are the entries of a mapping whose keys are numbers.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from megatron.errors import ConfigError
from megatron.untrusted import read_toml

_MOST_BYTES = 1 << 22  # of a file: measured ones have some ten thousand
_MOST = {int: 10**7, float: 1e30}  # nodes, devices, cores; seconds, TFLOP/s, GB/s

Whole = Annotated[int, "a whole number"]
Count = Annotated[int, "a whole number above 0"]
Number = Annotated[float, "a number"]
Positive = Annotated[float, "a number above 0"]


def at(key: str, default: Any = dataclasses.MISSING) -> Any:
    """A field that stands under `key` ("table.name") in the file; without a default it has to be there."""
    metadata = {"key": key, "default": default}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Facts:
    """A parsed file. Raises ConfigError, with the file and the key, for what is missing, wrong or misspelt."""

    def __init__(self, path: Path) -> None:
        self._path, self._tables = path, read_toml(path, _MOST_BYTES, error=ConfigError)
        self._known: set[str] = set()

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}: {problem}")

    def find(self, key: str) -> Any:
        """What stands under a key; None for nothing."""
        value: Any = self._tables
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def take(self, key: str, kind: Any, default: Any = dataclasses.MISSING) -> Any:
        """The value under `key`, made into what the annotation `kind` says."""
        self._known.add(key)
        value = self.find(key)
        if value is None:
            if default is dataclasses.MISSING:
                raise self.error(key, "is missing: see the files of known machines for what it is")
            return default
        try:
            return _read(value, kind)
        except (ValueError, TypeError) as error:  # TypeError: a row that is no list
            raise self.error(key, f"expected {error}, got {value!r}") from error

    def take_fields(self, of: type[Any]) -> dict[str, Any]:
        """The fields of a dataclass that name a key."""
        hints = get_type_hints(of, include_extras=True)
        return {
            field.name: self.take(field.metadata["key"], hints[field.name], field.metadata["default"])
            for field in dataclasses.fields(of) if "key" in field.metadata
        }  # fmt: skip

    def check_known(self) -> None:
        """Raise ConfigError for a key that was never asked for."""
        for key in self._unknown(self._tables, ""):
            raise self.error(key, "is no fact that is known here: see the files of known machines for all of them")

    def _unknown(self, table: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in table.items():
            key = prefix + name
            if key in self._known:
                continue
            if isinstance(value, dict):
                yield from self._unknown(value, f"{key}.")
            else:
                yield key


def _read(value: Any, kind: Any) -> Any:
    """A value of a TOML file as an annotation says. Raises ValueError with what is expected where it is another."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        of, words = args
        _require(type(value) is int or (of is float and type(value) is float), words)
        _require(0 <= value <= _MOST[of] and (value > 0 or "above" not in words), words)
        return of(value)
    if origin is Literal:
        _require(value in args, f"one of {', '.join(args)}")
        return value
    if type(None) in args:  # which a file has no value for
        return _read(value, args[0])
    if kind is str:
        _require(isinstance(value, str), "a text")
        return value
    if origin is Mapping and args[0] is str:
        _require(isinstance(value, dict), "a table")
        return {name: _read(item, args[1]) for name, item in value.items()}
    if origin is None and kind._field_defaults:
        hints = get_type_hints(kind, include_extras=True)
        needed = hints.keys() - kind._field_defaults.keys()
        _require(isinstance(value, dict) and needed <= value.keys() <= hints.keys(), f"a table of {', '.join(hints)}")
        return kind(**{name: _read(item, hints[name]) for name, item in value.items()})
    _require(isinstance(value, list), "a list")
    if origin is Mapping:
        return {_read(row[:-1], args[0]): _read(row[-1], args[1]) for row in value}
    kinds = args or tuple(get_type_hints(kind, include_extras=True).values())
    if kinds[-1] is ...:
        kinds = kinds[:1] * len(value)
    _require(len(value) == len(kinds), f"{len(kinds)} entries")
    row = tuple(_read(item, of) for item, of in zip(value, kinds, strict=True))
    return row if origin is tuple else kind(*row)


def _require(holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(expected)


# -- writing -----------------------------------------------------------------------------------------------------------


def tables_of(facts: Any) -> dict[str, dict[str, Any]]:
    """Values of the fields of a dataclass by table ("" for none) and name, without those that are None or empty."""
    found: dict[str, dict[str, Any]] = {"": {}}
    for field in dataclasses.fields(facts):
        table, _, name = field.metadata.get("key", "").rpartition(".")
        value = getattr(facts, field.name)
        if not name or value in (None, {}):
            continue
        if not table and isinstance(value, Mapping):
            found[name] = dict(value)
        else:
            found.setdefault(table, {})[name] = value
    return found


def render_tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML that is read as the same tables."""
    lines: list[str] = []
    for name, values in tables.items():
        lines += ["", f"[{name}]"] if name else []
        lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    return "\n".join([*lines, ""])


def _key(name: str) -> str:
    plain = name.replace("_", "").replace("-", "")
    return name if plain.isascii() and plain.isalnum() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        # A basic string of TOML is one of JSON, where characters beyond 16 bits are not escaped in halves, and DEL is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if getattr(value, "_field_defaults", None):
        value = {name: item for name, item in value._asdict().items() if item is not None}
    if isinstance(value, Mapping):
        if any(isinstance(key, tuple) for key in value):
            return _value([(*key, item) for key, item in value.items()])
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Iterable):
        found = [_value(item) for item in value]
        text = "[" + ", ".join(found) + "]"
        return text if len(text) < 100 else "[\n" + "".join(f"    {item},\n" for item in found) + "]"
    return repr(value)
