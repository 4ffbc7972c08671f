"""The ways that docs/training.md and docs/huggingface.md show: their commands run as written."""

import json
import os
import re
import shlex
import shutil
import signal

import pytest
import torch

from megatron.data.tokenizer import build_tokenizer
from megatron.metrics_file import read_records
from tests.helpers import fault_points
from tests.helpers.hugging_face import identical, tensors
from tests.helpers.launching import ROOT, Script

TRAINING = (ROOT / "docs/training.md").read_text().partition("## From text to a report\n")[2]


def commands(shown):
    """Return the words of the shown commands, without `python`."""
    block = "\n".join(re.findall(r"^    (.*)$", shown, re.MULTILINE))
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words for python, *words in lines if python == "python"]


def begin(folder, ctrl_c_after):
    """Change to the folder; press Ctrl-C after so many steps."""
    os.chdir(folder)
    if ctrl_c_after is not None:
        press = lambda *_: signal.raise_signal(signal.SIGINT)  # noqa: E731
        fault_points.on("megatron.run.step", press, ctrl_c_after)


def run(folder, script, words, ctrl_c_after=None):
    log = folder / f"{len([*folder.iterdir()])}.log"
    with Script(script, words, log, arm=(begin, folder, ctrl_c_after)) as running:
        outcome = running.wait(120)
    assert outcome.code == 0, (script, outcome.output[-3000:])


TRAINED = commands(TRAINING.partition("\n## ")[0])
EXPORTED = commands((ROOT / "docs/huggingface.md").read_text())
PREPARATION = 3  # commands that both begin with: corpus, tokenizer, token files


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    assert (len(TRAINED), len(EXPORTED)) == (9, 10)
    assert TRAINED[:PREPARATION] == EXPORTED[:PREPARATION]
    for script, *words in TRAINED[:PREPARATION]:
        run(folder, script, words)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)  # eight programs, one after the other
def test_from_text_to_a_report(prepared, tmp_path):
    """Shorter than on the page, which saves seconds."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    trainings = [words for words in TRAINED if words[0] == "pretrain_gpt.py"]
    assert len(trainings) == 3 and trainings[0][4] == "60"
    for command in TRAINED[PREPARATION:]:
        script, *words = ["12" if word == "60" else word for word in command]
        run(tmp_path, script, words, 6 if command == trainings[0] else None)
    # the two runs differ in a setting, and are compared
    run(tmp_path, "tools/report.py", ["runs/a", "runs/b", "--format", "json"])

    a, b = (read_records(tmp_path / "runs" / name / "metrics.jsonl") for name in "ab")
    starts = [record["iteration"] for record in a if record["event"] == "start"]
    ends = [record["iteration"] for record in a if record["event"] == "end"]
    assert starts == [0, 6] and ends == [6, 12]
    losses = [record["lm_loss"] for record in a if record["event"] == "iteration"]
    assert losses[-1] < losses[0] - 0.1
    assert [r["iteration"] for r in b if r["event"] == "end"] == [12]
    for report in ("runs/a/report.html", "report.html"):
        assert (tmp_path / report).read_text().startswith("<!DOCTYPE html>")
    report = json.loads((tmp_path / "report.json").read_text())["sections"]
    blocks = {section["title"]: section["blocks"] for section in report}
    differing = {row["setting"]: row for row in blocks["Comparison"][-1]["rows"]}
    assert (differing["lr"]["in a"], differing["lr"]["in b"]) == (1e-3, 3e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)  # six programs, one after the other
def test_from_text_to_hugging_face_and_back(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    for script, *words in EXPORTED[PREPARATION:]:
        if script == "-c":
            monkeypatch.chdir(tmp_path)
            exec(words[0])
        else:
            run(tmp_path, script, ["2" if word in ("20", "30") else word for word in words])

    from transformers import AutoTokenizer

    models = [tmp_path / "models" / name for name in "abc"]
    identical(models[1], models[2])
    embeddings = [tensors(folder)["transformer.wte.weight"] for folder in models]
    assert not torch.equal(embeddings[0], embeddings[1])
    text = (tmp_path / "README.md").read_text()
    ours = build_tokenizer(
        "GPTSentencePieceTokenizer", tokenizer_model=str(tmp_path / "words.model")
    )
    for folder in models:
        converted = AutoTokenizer.from_pretrained(folder)
        assert converted(text).input_ids == ours.encode(text)
        assert converted.eos_token_id == ours.eod
