"""Fixtures shared by the tests of the tuner."""

import shlex

import pytest

from megatron.jobs.space import load_space
from tests.jobs.small_spaces import ONE


@pytest.fixture
def read(tmp_path):
    def from_text(text, flags=ONE):
        path = tmp_path / "space.toml"
        path.write_text(f"flags = {shlex.split(flags)}\n{text}", encoding="utf-8")
        return load_space(str(path))

    return from_text
