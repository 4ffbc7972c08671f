"""tools/tune.py as it is called: what it says before a search, mistakes, a search of real trials that goes on."""
from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from megatron.calibration import processes as calibrated
from megatron.data.folder_claim import FolderClaim
from megatron.errors import ConfigError
from megatron.planning.cluster import load_cluster
from megatron.tuning import command
from megatron.tuning.command import exit_code
from megatron.tuning.journal import NAME
from megatron.tuning.layouts import Layout
from megatron.tuning.report.context import ReportContext
from megatron.tuning.session import ALLOCATION, BUDGET, EXHAUSTED, NODES, SIGNAL, TIME, Ending, Session
from megatron.tuning.setup import digest, make_setup
from megatron.tuning.types import DONE, FAILED, OUT_OF_MEMORY, Candidate, Result, Trial
from tests.tuning.made import GIB
from tools import tune

# Of two layouts the second needs gigabytes for its weights.
SPACE = """
title = "tiny"
flags = ["--num-layers", "1", "--num-attention-heads", "4", "--seq-length", "32",
         "--vocab-size", "128", "--global-batch-size", "8", "--num-workers", "0", "--lr", "1e-4"]
[parameters]
tp = [1, 2]
mbs = [1, 2]
[derived]
processes = "1"
hidden-size = "32 if mbs == 2 else 8192"
[constraints]
"two of the four" = "tp == 1"
[trial]
iterations = 3
warm_up = 1
"""


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SPACE)
    return path


@pytest.fixture
def words(space: Path, tmp_path: Path) -> list[str]:
    """Of a search in that space."""
    return ["--space", str(space), "--no-prior", "--search", "exhaustive", "--processes", "2", "--out",
            str(tmp_path / "out")]  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of a job, on a machine without GPUs: another process is asked for those."""
    monkeypatch.setattr(calibrated, "gpus_here", lambda: 0)
    for name in ("SLURM_JOB_ID", "MEGATRON_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = tune.main(words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def records(out: Path, event: str) -> list[dict[str, Any]]:
    return [r for line in (out / NAME).read_text().splitlines() if (r := json.loads(line))["event"] == event]


# -- before a search ---------------------------------------------------------------------------------------------------


def test_dry_run_of_a_described_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = call(capsys, "--space", "scaling-tp", "--nodes", "4", "--dry-run", "--max-trials", "20", "--search",
                      "exhaustive")  # fmt: skip
    assert code == 0, text
    for words in ("57.6", "64.0 GiB", "tp=8", "--preset gpt-22b", "--cluster frontier", "3 trials"):
        assert words in text, words
    assert text.index(" tp=4 ") < text.index(" tp=2 ") < text.index(" tp=1 "), "the fastest by the planner first"


def test_a_dry_run_says_which_flags_win_and_counts_all_trials(
    capsys: pytest.CaptureFixture[str], words: list[str], tmp_path: Path
) -> None:
    """Trials of half an hour on one node; of a single layout there is nothing to confirm."""
    for more, trials, hours in (((), 2, "2.5"), (("--confirm", "0"), 2, "1.0"), (("--max-trials", "1"), 1, "0.5")):
        code, text = call(capsys, *words, "--dry-run", *more, "--", "--num-layers", "3")
        assert code == 0 and f"{trials} trials" in text and f"{hours} node-hours" in text, text
        assert "--num-layers 3" in text
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "said"), [
    ((), "--space FILE|NAME"), (("--space", "nowhere"), "nowhere"),
    (("--space", "two-cores"), "tools/calibrate.py"),
    (("--space", "two-cores", "--no-prior", "--walltime", "soon"), "--walltime soon"),
    (("--space", "two-cores", "--no-prior", "--parallel", "2"), "--launcher slurm"),
    (("--space", "two-cores", "--no-prior", "--launcher", "local", "--nodes", "2"), "--nodes"),
    (("--space", "paper-175b", "--launcher", "slurm"), "--hosts-file"),
    (("--space", "paper-175b", "--launcher", "slurm", "--processes", "4"), "--tasks-per-node"),
    (("--space", "paper-175b", "--hosts-file", "/nowhere"), "/nowhere"),
    (("--space", "two-cores", "--no-prior", "--launcher", "slurm", "--report-only"), "--report-only"),
    (("--space", "two-cores", "--no-prior", "--update-cluster", "x.toml"), "--update-cluster"),
    (("--space", "two-cores", "--no-prior", "--dry-run", "--report-only"), "--report-only"),
    (("--space", "two-cores", "--cluster", "frontier", "--headroom", "200%"), "--headroom 200%"),
    (("--space", "two-cores", "--no-prior", "--dry-run", "--", "--train-iters", "5"), "--iterations"),
])  # fmt: skip
def test_mistakes_end_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    here = list(words)
    if here:
        here[2:2] = ["--search", "exhaustive", "--out", str(tmp_path / "out")]
    code, text = call(capsys, *here)
    assert code == 2 and text.startswith("error: ") and said in text and not (tmp_path / "out").exists(), text


def test_hosts_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    words = ["--space", "paper-175b", "--hosts-file", str(hosts), "--search", "exhaustive"]
    for content, said in ((b"", ""), (b"\xff\xfe", ""), (b"n1\nn2\nn1\n", "n1")):
        hosts.write_bytes(content)
        code, text = call(capsys, *words)
        assert code == 2 and str(hosts) in text and said in text
    hosts.write_text("\n".join(f"n{i}" for i in range(12)))
    setup = make_setup(tune.build_parser().parse_args(words), [])
    assert setup.place.hosts == tuple(f"n{i}" for i in range(12)) and setup.machine.max_nodes == 12
    assert setup.place.launcher == "slurm" and setup.place.parallel == 12 and setup.place.tasks_per_node == 8
    assert setup.cluster is not None and setup.cluster.name == "frontier" and setup.prior
    # Without one and --nodes: the most nodes that the space speaks of.
    dry = tune.build_parser().parse_args(["--space", "paper-175b", "--launcher", "slurm", "--dry-run"])
    assert make_setup(dry, []).machine.max_nodes == 16


def test_what_a_machine_says_names_it_and_not_where_its_file_lies(tmp_path: Path) -> None:
    frontier = load_cluster("frontier")
    copy = tmp_path / "copy.toml"
    shutil.copy(frontier.path, copy)
    other = tmp_path / "other.toml"
    other.write_text(copy.read_text().replace("memory_gib = 64", "memory_gib = 65"))
    assert digest(load_cluster(copy)) == digest(frontier) != digest(load_cluster(other))


@pytest.mark.parametrize(("said", "gpus", "found"), [("4", 0, 4), ("tp", 0, 2), ("4", 3, 3)])
def test_processes_that_a_space_names_may_share_cores(
    space: Path, monkeypatch: pytest.MonkeyPatch, said: str, gpus: int, found: int
) -> None:
    space.write_text(SPACE.replace('processes = "1"', f'processes = "{said}"'))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(calibrated, "gpus_here", lambda: gpus)
    args = tune.build_parser().parse_args(["--space", str(space), "--no-prior", "--dry-run"])
    assert make_setup(args, []).machine.processes_per_node == found


def test_exit_codes() -> None:
    candidate = Candidate(0, "a", {}, (), 1, 1, 1)
    best = Layout(candidate, (Trial(1, candidate, "x", "f", result=Result(DONE, step_s=1.0)),))
    assert [exit_code(Ending(why, 1, best)) for why in (EXHAUSTED, BUDGET, TIME, SIGNAL, ALLOCATION)] == [0, 0, 3, 3, 3]
    assert exit_code(Ending(NODES, 0, best)) == 3, "another start has other nodes"
    assert [exit_code(Ending(why, 1, None)) for why in (EXHAUSTED, BUDGET, TIME, SIGNAL)] == [1, 1, 3, 3]
    assert exit_code(Ending(TIME, 0, best)) == 4, "what started nothing would start nothing again"


# -- around a search ---------------------------------------------------------------------------------------------------


def ending_with(monkeypatch: pytest.MonkeyPatch, why: str, number: int = 1) -> list[int]:
    """Searches that end at once; returns how many trials each was to confirm."""
    asked = list[int]()

    def run(self: Session) -> Ending:
        asked.append(self._plan.confirm)
        return Ending(why, number, None)

    monkeypatch.setattr(Session, "run", run)
    return asked


def test_how_many_confirm_is_what_was_asked_for(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one search: it may change from start to start, and the seed may not. Nobody else may be there."""
    asked = ending_with(monkeypatch, BUDGET)
    for more in ((), ("--confirm", "5"), ("--confirm", "0")):
        call(capsys, *words, *more)
    assert asked == [3, 5, 0]
    starts = [*records(tmp_path / "out", "begin"), *records(tmp_path / "out", "resumed")]
    assert [r["settings"]["confirm"] for r in starts] == asked
    code, text = call(capsys, *words, "--seed", "1")
    assert code == 2 and "seed" in text and len(asked) == 3
    claim = FolderClaim(tmp_path / "out", "the folder")
    claim.take(print)
    code, text = call(capsys, *words)
    claim.release()
    assert code == 2 and f"--out {tmp_path / 'out'}" in text and len(asked) == 3


@pytest.mark.parametrize(("why", "expected"), [(TIME, 3), (EXHAUSTED, 2)])
def test_a_report_that_fails_does_not_keep_a_search_from_going_on(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str, expected: int
) -> None:
    def fails(*_args: object) -> int:
        raise ConfigError("--update-cluster x.toml: nothing to correct it by")

    ending_with(monkeypatch, why)
    monkeypatch.setattr(command, "_report", fails)
    code, text = call(capsys, *words)
    assert code == expected and "--update-cluster x.toml" in text


def test_signals_before_the_first_trial_and_while_the_report_is_written_lose_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm may say several times that the end is near."""
    with monkeypatch.context() as early:
        early.setattr(command, "enumerate_candidates", lambda *_args, **_more: signal.raise_signal(signal.SIGTERM))
        code, text = call(capsys, *words)
    assert code == 3 and "SIGTERM" in text and not (tmp_path / "out" / NAME).exists()
    ending_with(monkeypatch, SIGNAL)
    written = list[int]()

    def report(*_args: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        written.append(1)
        return 0

    monkeypatch.setattr(command, "_report", report)
    assert call(capsys, *words)[0] == 3 and written


@pytest.mark.slow
def test_a_search_of_real_trials_goes_on_where_it_ended_and_names_the_best(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pretrain_gpt.py twice: one layout runs out of the memory that it may take, the other has figures."""
    monkeypatch.setattr("megatron.tuning.report.write._draw", lambda *_: [])  # test_report.py has the pictures
    out = tmp_path / "out"
    code, text = call(capsys, *words, "--max-trials", "1", "--memory-limit", "1")
    assert code == 1 and OUT_OF_MEMORY in text and not (out / "report/best.txt").exists(), text
    code, text = call(capsys, *words, "--memory-limit", "1")
    assert code == 0 and [r["number"] for r in records(out, "started")] == [1, 2], text
    first, second = (r["result"] for r in records(out, "ended"))
    assert (first["status"], first["kind"]) == (FAILED, OUT_OF_MEMORY) and second["status"] == DONE, (first, second)
    lines = map(json.loads, (out / "trials/0002/metrics.jsonl").read_text().splitlines())
    steps = [r["step_time_s"] for r in lines if r["event"] == "iteration"]
    assert len(steps) == 4 and second["steady"] == 3 and second["step_s"] == statistics.median(steps[1:])
    assert second["tokens_per_s"] == pytest.approx(8 * 32 / second["step_s"])
    best = (out / "report/best.txt").read_text()
    assert "--micro-batch-size 2" in best and "--hidden-size 32" in best and best.strip() in text
    # Once more: nothing is left, nothing is run, the report is written again.
    (out / "report/best.txt").unlink()
    code, text = call(capsys, *words, "--memory-limit", "1")
    assert code == 0 and len(records(out, "started")) == 2 and (out / "report/best.txt").exists(), text


def test_a_report_has_the_headroom_and_the_flags_that_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 GiB less a quarter; --bf16 takes back --fp16 and its loss scale. Nothing was measured to update a file by."""
    space, seen = tmp_path / "some.toml", list[ReportContext]()
    space.write_text('flags = ["--preset", "gpt-1.4b", "--fp16", "--initial-loss-scale", "4096", '
                     '"--global-batch-size", "64"]\n[parameters]\ntp = [1, 2]\n')  # fmt: skip

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
    assert f"--update-cluster {tmp_path}/new.toml" in capsys.readouterr().out
