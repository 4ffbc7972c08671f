"""File names that the system refuses or that are not text.

Every tool ends in a message, or does its work.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.helpers.launching import Script

LONG = "a" * 5000


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("build_corpus", ["--stdlib", "{tmp}", "--output", LONG]),
        ("inspect_dataset", [LONG]),
        ("merge_datasets", ["--inputs", LONG, "--output-prefix", "x"]),
        ("report", [LONG, "--output", "x.html"]),
        ("show_placement", ["--cluster", LONG, "--world-size", "2", "--preset", "tiny"]),
        ("show_recipe", ["--cluster", LONG, "--preset", "tiny"]),
        ("inspect_checkpoint", [LONG]),
        ("calibrate", ["--refine", "x", "--cluster", LONG, "--output", "y"]),
        ("convert_checkpoint", [LONG, "--dry-run"]),
        ("plan", ["--cluster", LONG, "--model", "tiny", "--nodes", "1"]),
    ],
)
def test_a_name_that_is_too_long(
    tool: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"tools.{tool}").main
    assert main([word.replace("{tmp}", str(tmp_path)) for word in words]) == 2
    assert "aaaa" in capsys.readouterr().err and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "module.py").write_text(
        "x = 1  # long enough to be a document of the corpus, as it is\n" * 2
    )
    output = tmp_path / "corpus\udcff.jsonl"
    words = ["--stdlib", str(tmp_path / "lib"), "--output", str(output)]
    with Script("tools/build_corpus.py", words, tmp_path / "log") as script:
        outcome = script.wait()
    assert outcome.code == 0 and output.exists() and "Traceback" not in outcome.output, outcome
