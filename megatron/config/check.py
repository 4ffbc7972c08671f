"""Checks of a resolved configuration, each beside the settings that it is about: see *_checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from megatron.config.settings import Sections, all_options

Problems = Callable[[Sections], Iterator[str]]


class Check(NamedTuple):
    """A check that runs if all settings of `needs` have valid values."""

    needs: tuple[str, ...]
    problems: Problems


def check(*needs: str) -> Callable[[Problems], Check]:
    """Make a check of a function that yields problems; validate.py collects them."""
    return partial(Check, needs)


def nearest_multiples(value: int, step: int) -> str:
    """Return the multiples of `step` nearest to a value, as '640 or 768'."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def multiple(config: Sections, name: str, of: str, remedy: str = "") -> Iterator[str]:
    """Yield a problem where a setting is not a multiple of another one."""
    size = config.get(name)
    divisor = config.get(of)
    if size % divisor:
        flags = all_options()
        yield (
            f"{flags[name].flag} {size} is not a multiple of {flags[of].flag} {divisor}: use "
            f"{nearest_multiples(size, divisor)}{remedy}"
        )
