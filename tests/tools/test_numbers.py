"""Numbers on the tools' command lines have ranges, like settings."""

from __future__ import annotations

import argparse
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.config.option import real, whole
from megatron.errors import ConfigError

TOOLS = sorted((Path(__file__).parents[2] / "tools").glob("*.py"))
EXTREMES = ("0", "-1", "nan", "-inf", "1e308", "5e-324", str(2**64), "9" * 5000)


def parsers() -> dict[str, argparse.ArgumentParser]:
    found = {tool.name: runpy.run_path(str(tool)).get("build_parser") for tool in TOOLS}
    return {name: build() for name, build in found.items() if build is not None}


def test_every_number_of_a_tool_has_a_range() -> None:
    ranges = 0
    for tool, parser in parsers().items():
        for action in parser._actions:
            assert action.type not in (int, float), (tool, action.option_strings)
            ranges += action.type is not None
    assert ranges > 50


@pytest.mark.parametrize(
    ("make", "accepted"),
    [
        (whole(), 1),
        (whole(0, 64), 0),
        (real(60), 1e-3),
        (real(least=0), 0.0),
        (real(least=5), 5.0),
    ],
)
def test_a_number_is_within_its_range_or_refused(
    make: Callable[[str], Any], accepted: float
) -> None:
    assert make(str(accepted)) == accepted
    for text in EXTREMES:
        try:
            found = make(text)
        except argparse.ArgumentTypeError:
            continue
        assert math.isfinite(found) and 0 <= found <= 10**9, text


@pytest.mark.parametrize("text", ["", ",", "1,x", "0", "-1"])
def test_a_list_of_numbers_has_some_and_each_has_a_range(text: str) -> None:
    with pytest.raises(ConfigError, match="--values"):
        parsers()["run_experiment.py"].parse_args(["weak", f"--values={text}"])
