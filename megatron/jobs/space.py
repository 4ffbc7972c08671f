"""What a tuner varies: a TOML file, or one of those that come with this package (`spaces/`).

    [parameters]   name = [values]
    [variables]    the same, for names that are no flags
    [derived]      name = "expression"
    [constraints]  "reason that is shown" = "expression that must hold"
    [trial]        iterations, warm_up

beside title, source, flags and cluster. A name is any flag of pretrain_gpt.py or a short one (names.py).
"""
from __future__ import annotations

import hashlib
import keyword
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.command_line import scan
from megatron.config.settings import did_you_mean, raise_problems
from megatron.errors import ConfigError
from megatron.jobs.expressions import RESERVED, Expression, parse_expression
from megatron.jobs.names import READ_ONLY, Value, settings_of_flags, subject
from megatron.untrusted import read_toml

SPACES = Path(__file__).with_name("spaces")
_MOST_BYTES = 1 << 22  # of a file
_MOST = 2**63  # of a number: what any setting can be
_KEYS: Mapping[str, type] = {
    "title": str, "source": str, "cluster": str, "flags": list, "parameters": dict, "variables": dict, "derived": dict,
    "constraints": dict, "trial": dict,
}  # fmt: skip
_TRIAL = {"iterations": 5, "warm_up": 3}


@dataclass(frozen=True)
class Parameter:
    """One thing that varies. `values` in the order in which neighbours are alike; ordered: whether that means anything
    (numbers do, names do not)."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True


@dataclass(frozen=True)
class Space:
    """A space file, read and checked; `load_space` makes one.

    parameters   all that varies, with the variables, in the order of the file; combinations are numbered along them,
                 the last one fastest
    variables    names of those that are no flags and stand in expressions only
    flags        of pretrain_gpt.py that all layouts have
    derived      name -> what it is
    constraints  reason that is shown -> what must hold
    cluster      name of the machine that it is meant for; ""
    iterations   of a trial that are measured, after `warm_up` that are not
    """

    name: str
    title: str
    source: str
    path: str
    cluster: str
    flags: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    variables: frozenset[str]
    derived: Mapping[str, Expression]
    constraints: Mapping[str, Expression]
    iterations: int
    warm_up: int

    @property
    def combinations(self) -> int:
        """Count of all combinations of values, whether they make a layout or not."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    def combination(self, number: int) -> dict[str, Value]:
        """The values of one combination, by parameter."""
        found: dict[str, Value] = {}
        for parameter in reversed(self.parameters):
            number, place = divmod(number, len(parameter.values))
            found[parameter.name] = parameter.values[place]
        return dict(reversed(found.items()))

    def digest(self) -> str:
        """The same for spaces that mean the same layouts in the same order, whatever their titles and reasons are."""
        meaning = (self.parameters, sorted(self.variables), self.flags,
                   sorted((name, e.text) for name, e in self.derived.items()),
                   sorted(e.text for e in self.constraints.values()))  # fmt: skip
        return hashlib.sha256(repr(meaning).encode()).hexdigest()[:16]


def write_key(values: Mapping[str, Value]) -> str:
    """The name of a combination: tp=2,pp=4,sp=on."""
    return ",".join(f"{name}={value_text(value)}" for name, value in values.items())


def value_text(value: Value) -> str:
    """Write a value as a user reads it, and no digit less.

    >>> [value_text(value) for value in (None, True, 4, 0.1, "selective")]
    ['none', 'on', '4', '0.1', 'selective']
    """
    return {None: "none", True: "on", False: "off"}[value] if value is None or isinstance(value, bool) else str(value)


def known_spaces() -> dict[str, str]:
    """Name -> title of the spaces that come with this package."""
    return {path.stem: _Reader(path).space().title for path in sorted(SPACES.glob("*.toml"))}


def load_space(name_or_path: str) -> Space:
    """The space of this name, or of this file.

    Raises ConfigError for an unknown name, a file that cannot be read, and everything in it that is unknown, cannot be
    read or is said twice; with the file, the table and the key.
    """
    own = SPACES / f"{name_or_path}.toml"
    if "/" not in name_or_path and own.is_file():
        return _Reader(own).space()
    if Path(name_or_path).is_file():
        return _Reader(Path(name_or_path)).space()
    names = sorted(path.stem for path in SPACES.glob("*.toml"))
    raise ConfigError(f"--space {name_or_path} is neither a file nor a space that is known"
                      f"{did_you_mean(name_or_path, names)}; known: {', '.join(names)}")  # fmt: skip


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path, self._file = path, read_toml(path, _MOST_BYTES, error=ConfigError)

    def _error(self, where: str, problem: object) -> ConfigError:
        return ConfigError(f"{self._path}: {where}: {problem}")

    def _get(self, key: str) -> Any:
        value, kind = self._file.get(key, _KEYS[key]()), _KEYS[key]
        if not isinstance(value, kind):
            what = {"str": "text", "list": 'a list such as ["--bf16"]'}.get(kind.__name__, f"a table [{key}]")
            raise self._error(key, f"expected {what}, got {value!r}")
        return value

    def space(self) -> Space:
        self._known("", self._file, _KEYS)
        flags = self._flags()
        variables, derived = frozenset(self._get("variables")), dict(self._expressions("derived"))
        constraints = dict(self._expressions("constraints"))
        parameters = [
            Parameter(name, *self._values(f"[{table}] {key}", given, accept))
            for table in ("parameters", "variables") for key, given in self._get(table).items()
            for name, accept in [self._named(table, key)]
        ]  # fmt: skip
        if not parameters:
            raise self._error("[parameters]", "nothing varies: give at least one, such as tp = [1, 2, 4]")
        trial = self._get("trial")
        self._known("[trial] ", trial, _TRIAL)
        for key, value in trial.items():
            if type(value) is not int or value < (key == "iterations"):
                raise self._error(f"[trial] {key}", f"expected a whole number, got {value!r}")
        self._check_once(flags, derived)
        read = {name for rule in (*derived.values(), *constraints.values()) for name in rule.names}
        for name in sorted(variables - read):
            raise self._error(f"[variables] {name}", "stands in no expression, so that it changes nothing")
        return Space(
            self._path.stem, self._get("title") or self._path.stem, self._get("source"), str(self._path),
            self._get("cluster"), flags, tuple(parameters), variables, derived, constraints, **(_TRIAL | trial),
        )  # fmt: skip

    def _known(self, where: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        for key in given:
            if key not in known:
                raise self._error(where + key, f"is not known here{did_you_mean(key, known)}; known: "
                                  f"{', '.join(known)}")  # fmt: skip

    def _flags(self) -> tuple[str, ...]:
        words = [str(word) for word in self._get("flags")]
        try:
            scanned = scan(words)
            raise_problems(scanned.problems)
            settings_of_flags(scanned.flags)
        except ConfigError as error:
            raise self._error("flags", error) from None
        return tuple(words)

    def _named(self, table: str, key: str) -> tuple[str, Callable[[Any], Value]]:
        """A parameter's name, and what its values have to be."""
        where = f"[{table}] {key}"
        try:
            meant = subject(key)
        except ConfigError as error:
            if table == "parameters":
                raise self._error(where, error) from None
            if not key.isidentifier() or keyword.iskeyword(key) or key in RESERVED or key == READ_ONLY:
                raise self._error(where, "is no name that could stand in an expression") from None
            return key, _plain
        if table == "variables":
            raise self._error(where, "is a flag or a short name: put it into [parameters]")
        return key.lstrip("-").replace("-", "_"), meant.accept

    def _values(self, where: str, given: Any, accept: Callable[[Any], Value]) -> tuple[tuple[Value, ...], bool]:
        found = dict[str, Value]()
        for value in given if isinstance(given, list) else []:
            try:
                if isinstance(value, int | float) and not abs(value) <= _MOST:
                    raise ValueError("is no number that could be used")
                accepted = accept(value)
            except (ValueError, OverflowError) as error:
                raise self._error(where, f"{str(value)[:60]} {error}") from None
            key = value_text(accepted)  # as reports tell them apart: true and 'on' are one
            if key in found:
                raise self._error(where, f"{value} is given twice")
            found[key] = accepted
        values = tuple(found.values())
        if not values:
            raise self._error(where, f"expected values such as [1, 2, 4], got {given!r}")
        if not all(value is None or isinstance(value, int | float) for value in values):
            return values, False
        # Neighbours are alike; of those that are not given nobody knows.
        return tuple(sorted(values, key=lambda v: (v is not None, v or 0))), True

    def _expressions(self, table: str) -> Iterator[tuple[str, Expression]]:
        for key, given in self._get(table).items():
            where = f"[{table}] {key!r}" if table == "constraints" else f"[{table}] {key}"
            try:
                if table == "derived":
                    subject(key)
                found = parse_expression(str(given).lower() if isinstance(given, bool) else str(given))
                for name in found.names - {READ_ONLY, *self._get("variables")}:
                    subject(name)
            except (ConfigError, ValueError) as error:
                raise self._error(where, f"'{given}': {error}") from None
            yield (key.lstrip("-").replace("-", "_") if table == "derived" else key), found

    def _check_once(self, flags: tuple[str, ...], derived: Mapping[str, Expression]) -> None:
        """Raises ConfigError for a setting that a parameter, a derived name or a flag says, and another one too."""
        by = {setting: f"flags has {written}" for setting, written in settings_of_flags(scan(flags).flags).items()}
        for table, names in (("parameters", self._get("parameters")), ("derived", derived)):
            for name in names:
                for setting in subject(name).settings:
                    if setting in by:
                        raise self._error(f"[{table}] {name}", f"{by[setting]}, which says the same: leave one out")
                    by[setting] = f"[{table}] has {name}"


def _plain(value: Any) -> Value:
    """Value of a variable. Raises ValueError."""
    if type(value) not in (int, float, str, bool) or not str(value).isprintable():
        raise ValueError("is neither a number, nor text on one line, nor true or false")
    found: Value = value
    return found
