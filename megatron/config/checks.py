"""Checks of resolved settings, which stand beside the settings; validate.py collects them.

A module with checks may also have rules, as texts with a rule per line: CONFLICTS, ASCENDING
and NEEDED (see validate.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

Problems = Iterator[str]
"""Problems with a configuration, one sentence each."""


class Resolved(Protocol):
    """Sections, as the checks of modules below settings.py see them."""

    @property
    def model(self) -> Any: ...

    def get(self, name: str) -> Any: ...

    def written(self, name: str) -> str: ...

    def changed(self, name: str) -> bool: ...


class Unresolved(Protocol):
    """Settings, as derivations in modules below settings.py see them."""

    explicit: dict[str, Any]
    origins: dict[str, str]
    values: dict[str, Any]
    notices: list[str]

    def usable(self, *names: str) -> bool: ...

    def derive(self, name: str, value: object, origin: str) -> None: ...

    def fill(self, name: str, value: object, origin: str) -> None: ...

    def written(self, name: str) -> str: ...

    def changed(self, name: str) -> bool: ...


class Check(NamedTuple):
    """A check that runs if all settings in `needs` are set, to valid values."""

    needs: tuple[str, ...]
    problems: Callable[[Any], Problems]


def check(*needs: str) -> Callable[[Callable[[Any], Problems]], Check]:
    """Turn a function that yields problems of resolved settings into a check."""
    return functools.partial(Check, needs)


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` nearest to a value, as '640 or 768'."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def multiple(config: Resolved, name: str, of: str, remedy: str = "") -> Problems:
    """Yield a problem if a setting that has a value is not a multiple of another setting."""
    size = config.get(name)
    divisor = config.get(of)
    if size is not None and size % divisor:
        yield (
            f"{config.written(name)} is not a multiple of {config.written(of)}: use "
            f"{nearest_multiples(size, divisor)}{remedy}"
        )
