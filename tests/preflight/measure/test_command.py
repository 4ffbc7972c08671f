"""The command line of tools/preflight.py measure."""
from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.preflight.measure import command, report
from megatron.preflight.measure.command import add_arguments, run, settings_of
from tests.helpers.processes import free_port
from tests.preflight.measure.test_allocation import variables

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MEGATRON_CLUSTER")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("words", [
    ["--cluster", "nowhere"], ["--nodes-needed", "2"], ["--out", "/proc/nothing"],
], ids=" ".join)  # fmt: skip
def test_wrong_settings_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(parsed(*words)) == 2
    assert " ".join(words) in capsys.readouterr().err


def test_the_clusters_disk_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    settings = settings_of(parsed("--cluster", "frontier", "--disk", "/x"))
    assert (settings.nvme, settings.disks) == ("/mnt/bb/ada", ("/mnt/bb/ada", "/x", "/tmp", "/dev/shm"))
    assert settings_of(parsed("--cluster", "none")).nvme == ""


@pytest.mark.parametrize(("rank", "speaks"), [(1, False), (2, True), (3, False)])
def test_the_first_of_the_second_node_speaks_when_rank_0_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, speaks: bool
) -> None:
    """Nobody serves the store."""
    waited: list[float] = []
    for name, value in variables(rank, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "settings_of", lambda args: replace(settings_of(args), seconds=0.05))
    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=waited.append))
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)  # where there are several processes, it does not return
    run(parsed("--out", str(tmp_path)))
    said = capsys.readouterr().err
    if not speaks:
        assert (ends, said, list(tmp_path.iterdir())) == ([0], "", [])
        return
    assert ends == [4] and len(waited) == 1 and "node01: " in said and "--exclude=node01" in said
    assert ((tmp_path / "bad_hosts").read_text(), (tmp_path / "good_hosts").read_text()) == ("node01\n", "")
    # Who cannot write accuses nobody, and rank 0's own word stays.
    (tmp_path / "preflight.json").write_text("{}")
    assert not report.write_for_rank_0(tmp_path, "node01", "lost")
    assert (tmp_path / "preflight.json").read_text() == "{}"
    assert not report.write_for_rank_0(Path("/proc/nothing"), "node01", "lost")
