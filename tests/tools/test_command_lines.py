"""Common behaviour of all tools: mistakes, the form of --help, and models by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.launching import ROOT

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))
# Arguments that each tool with a model needs beside it.
OF_A_MODEL = {
    "calibrate": ["-o", "x.toml"],
    "plan": ["--nodes", "1"],
    "run_experiment": ["weak", "--dry-run"],
    "show_placement": ["--cluster", "frontier", "--world-size", "8"],
    "show_recipe": [],
    "tune": ["--space", "two-cores", "--dry-run", "--no-prior"],
}


def call(tool: str, words: Sequence[str]) -> int:
    try:
        return importlib.import_module(f"tools.{tool}").main(
            [*(["measure"] if tool == "preflight" else []), *words]
        )
    except SystemExit as end:  # of --help
        return int(end.code or 0)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mistake_ends_with_2_and_one_prefix(
    tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tool, ["--no-such-flag"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and out == "" and "Traceback" not in err


@pytest.mark.parametrize("tool", TOOLS)
def test_help_is_readable(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tool, ["--help"]) == 0
    out, err = capsys.readouterr()
    assert len(out) > 100 and "%%" not in out and err == ""
    assert ("  --preset NAME, --model NAME" in out) == (tool in OF_A_MODEL)


@pytest.mark.parametrize("flag", ["--preset", "--model"])
@pytest.mark.parametrize("tool", OF_A_MODEL)
def test_a_model_has_a_name(
    tool: str,
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(tool, [*OF_A_MODEL[tool], flag, "gpt-7t"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "gpt-7t" in err and not [*tmp_path.iterdir()]
