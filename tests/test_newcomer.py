"""The ways that docs/training.md and docs/huggingface.md show: their commands run as written."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch

from megatron.data.tokenizer import build_tokenizer
from megatron.metrics_file import read_records
from tests.checkpoint.hugging_face import identical, tensors
from tests.helpers import fault_points
from tests.helpers.launching import ROOT, Script

TRAINING = (ROOT / "docs/training.md").read_text().partition("## From text to a report\n")[2]


def commands(shown: str) -> list[list[str]]:
    """Return the words of the shown commands, without `python`."""
    block = "\n".join(re.findall(r"^    (.*)$", shown, re.MULTILINE))
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words for python, *words in lines if python == "python"]


def begin(folder: Path, ctrl_c_after: int | None) -> None:
    """Change to the folder; press Ctrl-C after so many steps."""
    os.chdir(folder)
    if ctrl_c_after is not None:
        press = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
        fault_points.on("megatron.run.step", press, ctrl_c_after)


@pytest.mark.slow
@pytest.mark.timeout(300)  # eleven programs, one after the other
def test_from_text_to_a_report(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    ways = commands(TRAINING.partition("\n## ")[0])
    trainings = [words for words in ways if words[0] == "pretrain_gpt.py"]
    assert len(ways) == 9 and len(trainings) == 3
    for number, (script, *words) in enumerate(ways):
        ctrl_c = 30 if [script, *words] == trainings[0] else None
        log = tmp_path / f"{number}.log"
        with Script(script, words, log, arm=(begin, tmp_path, ctrl_c)) as running:
            outcome = running.wait(120)
        assert outcome.code == 0, (script, outcome.output[-3000:])

    a, b = (read_records(tmp_path / "runs" / name / "metrics.jsonl") for name in "ab")
    starts = [record["iteration"] for record in a if record["event"] == "start"]
    ends = [record["iteration"] for record in a if record["event"] == "end"]
    assert starts == [0, 30] and ends == [30, 60]
    losses = [record["lm_loss"] for record in a if record["event"] == "iteration"]
    assert losses[-1] < losses[0] - 0.5
    ways_of_b = [(r["event"], r["iteration"]) for r in b if r["event"] in ("start", "end")]
    assert ways_of_b == [("start", 0), ("end", 60)]
    for report in ("runs/a/report.html", "report.html"):
        assert (tmp_path / report).read_text().startswith("<!DOCTYPE html>")

    # the two runs differ in what was given, and are compared
    both = ["runs/a", "runs/b", "--format", "json"]
    with Script("tools/report.py", both, tmp_path / "log", arm=(begin, tmp_path, None)) as running:
        assert running.wait().code == 0
    report = json.loads((tmp_path / "report.json").read_text())["sections"]
    comparison = next(section for section in report if section["title"] == "Comparison")
    differing = {row["setting"]: row for row in comparison["blocks"][-1]["rows"]}
    assert (differing["lr"]["in a"], differing["lr"]["in b"]) == (1e-3, 3e-3)
    events = next(section for section in report if section["title"] == "Events")
    assert {"end", "resume"} <= {row["event"] for row in events["blocks"][0]["rows"]}


@pytest.mark.slow
@pytest.mark.timeout(300)  # nine programs, one after the other
def test_from_text_to_hugging_face_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    ways = commands((ROOT / "docs/huggingface.md").read_text())
    assert len(ways) == 10
    for number, (script, *words) in enumerate(ways):
        if script == "-c":
            monkeypatch.chdir(tmp_path)
            exec(words[0])
            continue
        log = tmp_path / f"{number}.log"
        with Script(script, words, log, arm=(begin, tmp_path, None)) as running:
            outcome = running.wait(120)
        assert outcome.code == 0, (script, outcome.output[-3000:])

    from transformers import AutoTokenizer

    models = [tmp_path / "models" / name for name in "abc"]
    identical(models[1], models[2])
    embeddings = [tensors(folder)["transformer.wte.weight"] for folder in models]
    assert not torch.equal(embeddings[0], embeddings[1])
    text = (tmp_path / "README.md").read_text()
    own = build_tokenizer(
        "GPTSentencePieceTokenizer", tokenizer_model=str(tmp_path / "words.model")
    )
    for folder in models:
        theirs = AutoTokenizer.from_pretrained(folder)
        assert theirs(text).input_ids == own.encode(text)
        assert theirs.eos_token_id == own.eod
