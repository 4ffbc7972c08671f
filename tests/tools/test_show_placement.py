"""tools/show_placement.py: its output, its table, and its exit code."""

import csv
from collections import defaultdict
from typing import Any

import pytest

from tools import show_placement

RUN = ("--cluster", "frontier", "--preset", "gpt-175b")


Run = Any  # Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys, monkeypatch):
    """Call the tool on a terminal of 100 columns; return (exit code, output, errors)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("MEGATRON_CLUSTER", raising=False)

    def call(*arguments):
        code = show_placement.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_rank_table(run, tmp_path):
    path = tmp_path / "ranks.csv"
    code, output, _ = run(*RUN, "--world-size", 256, "--global-batch-size", 640, "--table", path)
    assert code == 0 and "256 ranks" in output
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in rows] == list(range(256))
    assert {row["layers"] for row in rows} == {f"{6 * n}-{6 * n + 5}" for n in range(16)}
    assert len({(row["tp"], row["dp"], row["pp"]) for row in rows}) == 256
    modules = defaultdict(set)  # pairs of devices of each tensor-parallel group, by node
    for row in rows:
        device = int(row["device"])
        assert (row["node"], row["nic"]) == (str(int(row["rank"]) // 8), f"hsn{device // 2}")
        modules[row["dp"], row["pp"], row["node"]].add(device // 2)
    assert len(modules) == 256 / 4 and all(len(pairs) == 2 for pairs in modules.values())
