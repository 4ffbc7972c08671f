"""Fixtures shared by the tests of the tuner."""

import shlex

import pytest

from megatron.jobs import setup
from megatron.jobs.space import load_space
from tests.jobs.small_spaces import ONE


@pytest.fixture
def read(tmp_path):
    """Return a reader of spaces; with `flags` None the text says its own."""

    def from_text(text, flags=ONE):
        path = tmp_path / "space.toml"
        first = "" if flags is None else f"flags = {shlex.split(flags)}\n"
        path.write_text(first + text, encoding="utf-8")
        return load_space(str(path))

    return from_text


@pytest.fixture(autouse=True)
def nowhere(monkeypatch):
    """Run outside a job, on a machine without GPUs; another process is asked for those."""
    monkeypatch.setattr(setup, "gpus_here", lambda: 0)
    for name in ("SLURM_JOB_ID", "MEGATRON_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
