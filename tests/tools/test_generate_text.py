"""tools/generate_text.py as called by a user: the checkpoint that generates the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launching import TINY, launch


@pytest.mark.slow
def test_the_checkpoint_that_is_named_speaks(tmp_path: Path) -> None:
    """The named checkpoint generates the text.

    A step between two checkpoints of one run changes every weight by about 1: their texts differ. A
    folder with only the first shows which text is its.
    """
    flags = [*TINY, "--lr", "1", "--train-iters", "2", "--save-interval", "1"]
    (trained,) = launch(1, [*flags, "--save", str(tmp_path / "run")])
    (alone,) = launch(1, [*flags, "--save", str(tmp_path / "first"), "--exit-interval", "1"])
    assert trained is not None and trained.code == 0 and alone is not None and alone.code == 0, (
        trained,
        alone,
    )

    def text(folder: str, *more: str) -> str:
        metrics = tmp_path / "-".join([folder, *more, "metrics.jsonl"])
        words = [
            "--prompt",
            "5 17 3",
            "--tokens",
            "12",
            "--temperature",
            "0",
            "--metrics-file",
            str(metrics),
        ]
        (done,) = launch(
            1, ["--load", str(tmp_path / folder), *words, *more], script="tools/generate_text.py"
        )
        assert done is not None and done.code == 0, done
        (record,) = [json.loads(line) for line in metrics.read_text().splitlines()]
        return str(record["text"])

    first = text("first")
    assert text("run", "--load-tag", "iter_0000001") == first != text("run")
