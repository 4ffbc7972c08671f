"""Fixtures shared by the tests of the tuner."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.jobs.space import SearchSpace, load_space
from tests.jobs.small_spaces import ONE, Read


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def from_text(text: str, flags: str = ONE) -> SearchSpace:
        path = tmp_path / "space.toml"
        path.write_text(f"flags = {shlex.split(flags)}\n{text}", encoding="utf-8")
        return load_space(str(path))

    return from_text
