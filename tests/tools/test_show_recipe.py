"""The command that shows a configuration's memory and where its time would go."""
from __future__ import annotations

import pytest

from tools.show_recipe import main


def show(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str, str]:
    code = main(line.split())
    return code, *capsys.readouterr()


def test_a_row_for_each_value(capsys):
    line = "--preset gpt-22b --world-size 64 --vary global-batch-size 64 640 --cluster none --markdown"
    code, out, _ = show(capsys, line)
    layout, _, work = out.strip().split("\n\n")
    assert code == 0
    assert [row.split(" | ")[6] for row in layout.split("\n")[2:]] == ["8", "80"]  # micro-batches of 8 replicas
    # 1F1B: 7 passes of the pipeline are idle beside 8 and 80, a little less as the last stage has the output layer.
    bubbles = [float(row.split(" | ")[1].removesuffix(" %")) for row in work.split("\n")[2:]]
    assert bubbles == pytest.approx([100 * 7 / 15, 100 * 7 / 87], rel=0.1)
    assert all(row.endswith("|  |  |") for row in work.split("\n")[2:]), "no machine, no seconds"


def test_a_vocabulary_that_the_tokenizer_has_is_assumed(capsys):
    code, out, _ = show(capsys, "--preset gpt-22b-frontier --world-size 128 --vocab-file v.json --merge-file m.txt")
    assert code == 0 and "50257" in out


@pytest.mark.parametrize(("line", "words"), [
    ("--preset gpt-22b --world-size 12", "12"),
    ("--preset gpt-22c", "gpt-22c"),
    ("--all --seed 3", "--all"),
    ("--world-size 8", "--num-layers"),
])  # fmt: skip
def test_errors_are_told_on_one_line(capsys, line, words):
    code, out, error = show(capsys, line)
    assert code == 2 and not out
    assert error.startswith("error: ") and words in error and "Traceback" not in error
