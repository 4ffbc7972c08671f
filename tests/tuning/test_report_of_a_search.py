"""What a report is told of its search: the memory that layouts might use, the flags that trials had."""
from __future__ import annotations

from pathlib import Path

import pytest

from megatron.tuning import command
from megatron.tuning.report.context import ReportContext
from megatron.tuning.types import Trial
from tests.tuning.made import GIB
from tools import tune

SPACE = """
flags = ["--preset", "gpt-1.4b", "--fp16", "--initial-loss-scale", "4096", "--global-batch-size", "64"]
[parameters]
tp = [1, 2]
"""


def test_it_has_the_headroom_and_the_flags_that_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 GiB less a quarter; --bf16 takes back --fp16 and its loss scale. Nothing was measured to update a file by."""
    space, seen = tmp_path / "some.toml", list[ReportContext]()
    space.write_text(SPACE)

    def keep(_folder: Path, context: ReportContext) -> list[Path]:
        seen.append(context)
        return []

    def dry(setup: command.Setup, found: command.Enumeration, _show: object) -> None:
        trials = [Trial(1, found.candidates[0], "planner", "trials/0001")]
        command._report(setup, found, trials, tmp_path / "new.toml")

    monkeypatch.setattr(command, "write_report", keep)
    monkeypatch.setattr(command, "dry_run", dry)
    words = ["--space", str(space), "--cluster", "frontier", "--nodes", "1", "--headroom", "25%", "--dry-run"]
    assert tune.main([*words, "--out", str(tmp_path), "--", "--bf16"]) == 0
    (context,) = seen
    assert context.capacity_bytes == 48 * GIB and context.cluster is not None and context.cluster.memory_gib == 64
    assert list(context.flags) == ["--preset", "gpt-1.4b", "--global-batch-size", "64", "--bf16"]
    assert set(context.flags) <= set(context.candidates[0].flags)
    assert f"--update-cluster {tmp_path}/new.toml: not written" in capsys.readouterr().out
