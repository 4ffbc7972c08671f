"""The command line, in one process and in two."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.preflight.measure import report
from megatron.preflight.measure.command import add_arguments, run, settings_of
from tests.helpers.processes import free_port

ROOT = Path(__file__).resolve().parents[3]
CODE = """
import argparse, sys
from megatron.preflight.measure import command
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args()))
"""
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "MEGATRON_CLUSTER")


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments], cwd=ROOT, env=environ | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=280)
    return process.returncode, output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "nowhere"], "--cluster nowhere is neither a known machine"),
        (["--nodes-needed", "0"], "--nodes-needed 0: at least one node"),
        (["--nodes-needed", "2"], "--nodes-needed 2 is more than the 1 node(s)"),
        (["--seconds", "1"], "--seconds 1 is too short"),
        (["--out", "/proc/nothing"], "--out /proc/nothing cannot be written"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(_LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    assert run(parsed(*arguments)) == 2
    assert words in capsys.readouterr().err


def test_the_clusters_disk_is_tested_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "ada")
    settings = settings_of(parsed("--cluster", "frontier", "--disk", "/x"))
    assert (settings.nvme, settings.disks) == ("/mnt/bb/ada", ("/mnt/bb/ada", "/x", "/tmp", "/dev/shm"))
    assert settings_of(parsed("--cluster", "none")).nvme == ""


def test_two_processes_as_a_user_starts_them(tmp_path: Path) -> None:
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        start("--out", str(tmp_path), "--seconds", "90", RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]
    (code, output), other = map(ended, processes)
    assert (code, other) == (0, (0, "")), output
    assert "1 of 1 nodes are good, 1 needed" in output
    assert "--exclude" not in output
    content = json.loads((tmp_path / "preflight.json").read_text())
    (host,) = content["good_hosts"]
    assert (tmp_path / "good_hosts").read_text() == f"{host}\n"
    assert (tmp_path / "bad_hosts").read_text() == ""
    assert set(content["hosts"][host]["ranks"]) == {"0", "1"}
    assert [step["step"] for step in content["steps"]] == ["arrival", "device", "links within nodes"]


def test_the_second_node_speaks_when_rank_0_is_lost(tmp_path: Path) -> None:
    """Nobody serves the store."""
    variables = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
                 "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
                 "SLURM_STEP_NODELIST": "node[01-02]", "SLURMD_NODENAME": "node02"}  # fmt: skip
    process = start("--out", str(tmp_path), "--seconds", "5", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()),
                    **variables)  # fmt: skip
    code, output = ended(process)
    assert code == 4, output
    assert "node01: rank 0 did not come, died or hangs: rank 1 on node node02 does not reach" in output
    assert "--exclude=node01" in output
    assert (tmp_path / "bad_hosts").read_text() == "node01\n"
    assert (tmp_path / "good_hosts").read_text() == ""


def test_who_cannot_write_accuses_nobody() -> None:
    assert not report.write_for_rank_0(Path("/proc/nothing"), "node01", "lost", wait_s=0)


def test_rank_0s_own_word_stays(tmp_path: Path) -> None:
    (tmp_path / "preflight.json").write_text("{}")
    assert not report.write_for_rank_0(tmp_path, "node01", "lost", wait_s=0)
    assert (tmp_path / "preflight.json").read_text() == "{}"
