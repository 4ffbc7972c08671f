"""tools/inspect_checkpoint.py: its output, as tables and as JSON, and its exit code."""

import json
import math
from typing import Any

import pytest
import torch

from tests.checkpoint.written import make, tensors
from tools import inspect_checkpoint

VALUES = tensors()


Run = Any  # Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys):
    """Call the tool; return (exit code, output)."""

    def call(*arguments):
        code = inspect_checkpoint.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_contents(tmp_path, run):
    folder = make(tmp_path, 100, VALUES)
    code, output = run(folder)
    assert code == 0
    lines = output.splitlines()
    (row,) = [line for line in lines if "layers.0.mlp.weight" in line]
    expected = (
        "layers.0.mlp.weight 4 x 2 x 3 float32 master, exp_avg, exp_avg_sq 6 __0_0.distcp, "
        "__1_0.distcp"
    )
    assert row.split() == expected.split()
    assert any(line.split() == ["parameters", "61"] for line in lines)
    assert any(line.split() == ["iteration", "100"] for line in lines)
    code, output = run(folder, "--json")
    report = json.loads(output)
    assert report["checkpoint"]["provenance"]["versions"] == {"torch": "1.2"}
    assert report["tensors"]["master.embedding.weight"]["shape"] == [10, 3]


def test_a_folder_of_checkpoints(tmp_path, run):
    make(tmp_path, 100, VALUES)
    newest = make(tmp_path, 200, VALUES)
    (newest / "state.json").write_text("{}")
    code, output = run(tmp_path)
    assert code == 0 and "iter_0000200" in output and "state.json" in output
    report = json.loads(run(tmp_path, "--json")[1])
    assert report["checkpoint"]["iteration"] == 100
    assert [c["problem"] is None for c in report["checkpoints"]] == [False, True]
    assert run(newest)[0] == 1
    assert run(tmp_path, "--tag", "200")[0] == 1
    assert run(tmp_path, "--tag", 100, "--json")[0] == 0


def test_norms(tmp_path, run):
    folder = make(tmp_path, 1, {**VALUES, "master.bad": torch.tensor([3.0, math.nan, 4.0])})
    code, output = run(folder, "--norms", "--match", "master.*")
    (row,) = [line for line in output.splitlines() if "master.bad" in line]
    assert code == 0 and row.split() == ["master.bad", "3", "float32", "5", "4", "1"]
    assert "exp_avg." not in output
    report = json.loads(run(folder, "--norms", "--json")[1])
    exact = VALUES["exp_avg.embedding.weight"].double().norm().item()
    # Both are in float64; the order of 30 additions differs.
    assert report["tensors"]["exp_avg.embedding.weight"]["norm"] == pytest.approx(exact, rel=1e-14)
    damage(folder / "__1_0.distcp")
    code, output = run(folder, "--norms")
    assert code == 1 and "damaged: " in output and "__1_0.distcp" in output


def test_verification(tmp_path, run):
    old = make(tmp_path, 50, VALUES)
    folder = make(tmp_path, 100, VALUES)
    assert run(tmp_path, "--verify")[0] == 0
    damage(folder / "__0_0.distcp")
    for arguments in ((tmp_path,), (folder,), (tmp_path, "--tag", "100")):
        code, output = run(*arguments, "--verify")
        assert code == 1 and f"{folder}/__0_0.distcp" in output
    assert run(old, "--verify")[0] == 0
    assert run(old, "--verify", "--norms")[0] == 2
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    report = json.loads(run(tmp_path, "--verify", "--json")[1])["problems"]
    assert "7" in report["tracker"][0] and report["iter_0000050"] == []


def test_difference(tmp_path, run):
    changed = {**VALUES, "master.embedding.weight": VALUES["master.embedding.weight"] * 1.5}
    first = make(tmp_path / "a", 1, VALUES, config={"training": {"seed": 1}})
    same = make(tmp_path / "b", 1, VALUES, config={"training": {"seed": 2}}, files=3)
    make(tmp_path / "c", 1, changed)
    code, output = run("--diff", first, same)
    assert code == 0 and "training.seed" in output
    code, output = run("--diff", tmp_path / "a", tmp_path / "c")
    (row,) = [line for line in output.splitlines() if "master.embedding.weight" in line]
    assert code == 1 and "30 of 30" in row and row.split()[-1] == "0.5"
    both = "--diff", first, tmp_path / "c"
    assert json.loads(run(*both, "--json")[1])["same"] is False
    assert run(*both, "--match", "layers.*")[0] == 0
