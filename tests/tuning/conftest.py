"""What tests of the tuner share."""
from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from megatron.tuning.space import Space
from megatron.tuning.space_file import load_space
from tests.tuning.small_spaces import ONE, Read


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def from_text(text: str, flags: str = ONE) -> Space:
        path = tmp_path / "space.toml"
        path.write_text(f"flags = {shlex.split(flags)}\n{text}", encoding="utf-8")
        return load_space(str(path))

    return from_text


@pytest.fixture
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of journals that nobody goes on with after a crash of the machine."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
