"""tools/show_placement.py: its output, its table, and its exit code."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import ROOT

RUN = ("--cluster", "frontier", "--preset", "gpt-175b")


def tool() -> Any:
    specification = importlib.util.spec_from_file_location(
        "show_placement", ROOT / "tools/show_placement.py"
    )
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


Run = Any  # Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the tool on a terminal of 100 columns; return (exit code, output, errors)."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("MEGATRON_CLUSTER", raising=False)
    main = tool().main

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_table_and_first_node(run: Run) -> None:
    code, output, _ = run(*RUN, "--world-size", 1024)
    lines = [line.split() for line in output.splitlines()]
    assert code == 0
    assert ["2", "0", "6", "hsn3", "2", "0", "0", "0", "0", "0-5"] in lines, (
        "rank, node, device, card, tp, dp, cp, ep, pp, layers"
    )
    assert not [line for line in lines if line and line[0] == "8"], "one node is shown"


def test_rank_table(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    flags = "--cluster frontier --preset gpt-1t --world-size 3072 --global-batch-size 9600 --table"
    code, output, _ = run(*flags.split(), path)
    assert code == 0 and "3072 ranks" in output
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in rows] == list(range(3072))
    assert {row["layers"] for row in rows} == {
        f"{2 * stage}-{2 * stage + 1}" for stage in range(64)
    }
    assert len({(row["tp"], row["dp"], row["pp"]) for row in rows}) == 3072


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-size", 8), "dgx-h100, dgx-h200, frontier, lumi"),
        (("--cluster", "frontier", "--world-size", 12), "12"),
        (
            ("--cluster", "frontier", "--world-size", 8, "--device-order", "0,1,2"),
            "--device-order 0,1,2",
        ),
        (("--cluster", "frontier", "--world-size", 8, "--rank-order", "pp"), "tp-dp-pp"),
        (("--cluster", "frontier", "--wrold-size", 8), "--wrold-size"),
        (
            ("--cluster", "frontier", "--world-size", 8, "--table", "/nowhere/x.csv"),
            "/nowhere/x.csv",
        ),
    ],
)
def test_errors(run: Run, arguments: tuple[object, ...], message: str) -> None:
    code, _, errors = run("--preset", "tiny", "--global-batch-size", 48, *arguments)
    assert (
        code == 2
        and errors.startswith("error: ")
        and message in errors
        and "Traceback" not in errors
    )
