"""tools/tune.py as it is called: what it says before a search, mistakes, real searches that are killed and go on."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron.calibration import processes as calibrated
from megatron.errors import ConfigError
from megatron.planning.cluster import load_cluster
from megatron.tuning.command import exit_code
from megatron.tuning.journal import NAME
from megatron.tuning.layouts import Layout
from megatron.tuning.session import ALLOCATION, BUDGET, EXHAUSTED, NODES, SIGNAL, TIME, Ending, Session
from megatron.tuning.setup import digest, make_setup
from megatron.tuning.types import DONE, Candidate, Result, Trial
from tests.helpers.fresh_python import assert_tool_loads_none
from tests.helpers.launching import ROOT
from tools import tune

SPACE = """
title = "tiny"
flags = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32",
         "--vocab-size", "128", "--global-batch-size", "8", "--num-workers", "0", "--lr", "1e-4"]
[parameters]
tp = [1, 2]
mbs = [1, 2]
[derived]
processes = "2"
[trial]
iterations = 3
warm_up = 1
"""


@pytest.fixture
def space(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SPACE)
    return path


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "MEGATRON_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = tune.main(words)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def records(out: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (out / NAME).read_text().splitlines()]
    except (FileNotFoundError, json.JSONDecodeError):
        return []


def count(out: Path, event: str) -> int:
    return sum(record["event"] == event for record in records(out))


# -- before a search ---------------------------------------------------------------------------------------------------


def test_help_and_the_ready_spaces(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        tune.main(["--help"])
    text = capsys.readouterr().out
    said = ("--no-prior", "--confirm", "deephyper", "Exit code", "--walltime")
    assert end.value.code == 0 and all(word in text for word in said)
    code, text = call(capsys, "--list-spaces")
    assert code == 0 and "paper-175b " in text and "two-cores" in text


def test_dry_run_of_the_papers_space(capsys: pytest.CaptureFixture[str]):
    code, text = call(capsys, "--space", "paper-175b", "--nodes", "16", "--dry-run", "--max-trials", "20", "--search",
                      "exhaustive")  # fmt: skip
    assert code == 0, text
    for words in ("3,264 combinations", "on 16 node(s) of 8 processes, described by frontier", "57.6 of 64.0 GiB",
                  "TP x PP does not divide the processes", "best by the planner, none of it measured",
                  "a trial of the first is", "--preset gpt-175b", "--cluster frontier",
                  "at most 20 trials of 2 + 10 steps and 3 more that measure the leading ones again, none",
                  "node-hours"):  # fmt: skip
        assert words in text, words
    # Without a hosts file and --nodes: the most nodes that the space speaks of.
    assert call(capsys, "--space", "paper-175b", "--launcher", "slurm", "--dry-run", "--search", "exhaustive")[0] == 0


def test_dry_run_says_which_flags_win(capsys: pytest.CaptureFixture[str], space: Path):
    code, text = call(capsys, "--space", str(space), "--no-prior", "--search", "random", "--processes", "2",
                      "--dry-run", "--", "--hidden-size", "64")  # fmt: skip
    assert code == 0 and "flags after --, which win: --hidden-size 64" in text and "--hidden-size 32" in text
    line = text[text.index("a trial of the first is") :].splitlines()[1]
    assert "--hidden-size 64" in line and "--hidden-size 32" not in line
    assert "4 combinations: 4 layouts can be tried" in text


def test_dry_run_counts_the_trials_that_confirm(capsys: pytest.CaptureFixture[str], space: Path):
    """Trials of half an hour on one node; of a single layout there is nothing to confirm."""
    for words, said in (
        ((), "at most 4 trials of 1 + 3 steps and 3 more that measure the leading ones again, none longer than 30:00: "
             "at most 3.5 node-hours"),
        (("--confirm", "0"), "at most 4 trials of 1 + 3 steps, none longer than 30:00: at most 2.0 node-hours"),
        (("--max-trials", "1"), "at most 1 trials of 1 + 3 steps, none longer than 30:00: at most 0.5 node-hours"),
    ):  # fmt: skip
        code, text = call(capsys, "--space", str(space), "--no-prior", "--search", "random", "--processes", "2",
                          "--dry-run", *words)  # fmt: skip
        assert code == 0 and said in text, text


def test_it_needs_no_torch_on_a_login_node():
    words = ["--space", "paper-175b", "--nodes", "16", "--dry-run"]
    assert_tool_loads_none("tune", words, ("torch", "deepspeed", "optuna", "sklearn", "deephyper"))


@pytest.mark.parametrize(("words", "said"), [
    ((), "--space FILE|NAME"), (("--space", "nowhere"), "nowhere"),
    (("--space", "two-cores"), "tools/calibrate.py"), (("--space", "two-cores", "--max-trials", "0"), "at least 1"),
    (("--space", "two-cores", "--no-prior", "--confirm", "-1"), "--confirm -1: at least 0"),
    (("--space", "two-cores", "--no-prior", "--walltime", "soon"), "--walltime soon"),
    (("--space", "two-cores", "--no-prior", "--parallel", "2"), "slow each other down"),
    (("--space", "two-cores", "--no-prior", "--launcher", "local", "--nodes", "2"), "--nodes beside --launcher local"),
    (("--space", "paper-175b", "--launcher", "slurm"), "give --hosts-file"),
    (("--space", "paper-175b", "--launcher", "slurm", "--processes", "4"), "--tasks-per-node"),
    (("--space", "paper-175b", "--hosts-file", "/nowhere"), "/nowhere cannot be read"),
    (("--space", "two-cores", "--cluster", "frontier", "--processes", "9"), "9 processes on a node"),
    (("--space", "two-cores", "--no-prior", "--launcher", "slurm", "--report-only"), "--report-only without --hosts"),
    (("--space", "two-cores", "--no-prior", "--update-cluster", "x.toml"), "--update-cluster corrects"),
    (("--space", "two-cores", "--no-prior", "--trial-limit", "-1"), "a number above 0"),
    (("--space", "two-cores", "--no-prior", "--memory-limit", "nan"), "a number above 0"),
    (("--space", "two-cores", "--no-prior", "--memory-limit", "1e300"), "a number above 0, at most 1e+06"),
    (("--space", "two-cores", "--no-prior", "--dry-run", "--report-only"), "give one of them"),
    (("--space", "two-cores", "--cluster", "frontier", "--headroom", "200%"), "--headroom 200%"),
    (("--space", "two-cores", "--no-prior", "--dry-run", "--", "--train-iters", "5"), "--iterations"),
])  # fmt: skip
def test_mistakes_end_with_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...],
                                      said: str):  # fmt: skip
    here = list(words)
    if here:
        here[2:2] = ["--search", "exhaustive", "--out", str(tmp_path / "out")]
    code, text = call(capsys, *here)
    assert code == 2 and text.startswith("error: ") and said in text and not (tmp_path / "out").exists(), text


def test_hosts_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    hosts = tmp_path / "hosts"
    words = ["--space", "paper-175b", "--hosts-file", str(hosts), "--search", "exhaustive"]
    hosts.write_text("")
    assert "names no node" in call(capsys, *words)[1]
    hosts.write_bytes(b"\xff\xfe")
    assert "cannot be read: it is no text" in call(capsys, *words)[1]
    hosts.write_text("n1\nn2\nn1\n")
    assert "names n1 twice" in call(capsys, *words)[1]
    hosts.write_text("\n".join(f"n{i}" for i in range(12)))
    args = tune.build_parser().parse_args(words)
    setup = make_setup(args, [])
    assert setup.place.hosts == tuple(f"n{i}" for i in range(12)) and setup.machine.max_nodes == 12
    assert setup.place.launcher == "slurm" and setup.place.parallel == 12 and setup.place.tasks_per_node == 8
    assert setup.cluster is not None and setup.cluster.name == "frontier" and setup.prior


def test_what_a_machine_says_names_it_and_not_where_its_file_lies(tmp_path: Path):
    frontier = load_cluster("frontier")
    copy = tmp_path / "copy.toml"
    shutil.copy(frontier.path, copy)
    other = tmp_path / "other.toml"
    other.write_text(copy.read_text().replace("memory_gib = 64", "memory_gib = 65"))
    assert digest(load_cluster(copy)) == digest(frontier) != digest(load_cluster(other))


def test_how_many_confirm_is_what_was_asked_for(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = list[int]()

    def run(self: Session) -> Ending:
        asked.append(self._plan.confirm)
        return Ending(BUDGET, 0, None)

    monkeypatch.setattr("megatron.tuning.command.Session.run", run)
    for words in ((), ("--confirm", "5"), ("--confirm", "0")):  # of one search: it may change
        call(capsys, "--space", str(space), "--no-prior", "--search", "random", "--processes", "2", "--out",
             str(tmp_path / "out"), *words)  # fmt: skip
    assert asked == [3, 5, 0]
    assert [r["settings"]["confirm"] for r in records(tmp_path / "out") if "settings" in r] == asked


def test_exit_codes():
    candidate = Candidate(0, "a", {}, (), 1, 1, 1)
    best = Layout(candidate, (Trial(1, candidate, "x", "f", result=Result(DONE, step_s=1.0)),))
    assert [exit_code(Ending(why, 1, best)) for why in (EXHAUSTED, BUDGET, TIME, SIGNAL, ALLOCATION)] == [0, 0, 3, 3, 3]
    assert exit_code(Ending(NODES, 0, best)) == 3, "another start has other nodes"
    assert [exit_code(Ending(why, 1, None)) for why in (EXHAUSTED, BUDGET, TIME, SIGNAL)] == [1, 1, 3, 3]
    assert exit_code(Ending(TIME, 0, best)) == 4, "what started nothing would start nothing again"


def test_a_report_needs_trials(capsys: pytest.CaptureFixture[str], space: Path, tmp_path: Path):
    code, text = call(capsys, "--space", str(space), "--no-prior", "--search", "random", "--processes", "2",
                      "--report-only", "--out", str(tmp_path / "out"))  # fmt: skip
    assert code == 2 and "has no trials" in text and not (tmp_path / "out").exists()


# -- searches ----------------------------------------------------------------------------------------------------------


LIMIT_S = 600
"""Of a tuner that starts, or of a trial, on a machine that does other things as well."""


def start(space: Path, out: Path, *words: str, search: str = "random", flags: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, str(ROOT / "tools" / "tune.py"), "--space", str(space), "--no-prior", "--search", search,
            "--processes", "2", "--confirm", "0", "--out", str(out), *words, "--", *flags]  # fmt: skip


def ended(out: Path) -> list[int]:
    return [record["number"] for record in records(out) if record["event"] == "ended"]


def wait_for(process: subprocess.Popen[str], out: Path, event: str, number: int) -> None:
    end = time.monotonic() + LIMIT_S
    while True:
        ended = process.poll() is not None  # asked first: what it noted at its end is there by then
        if count(out, event) >= number:
            return
        assert not ended and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As long as this file is there the ranks of trial 2 do not get past the start of their interpreter, so that the
    trial runs however late the test acts."""
    file, hook = tmp_path / "held", tmp_path / "hook/sitecustomize.py"
    file.touch()
    hook.parent.mkdir()
    hook.write_text(
        "import os, sys, time\n"
        "if any('trials/0002/' in word for word in sys.orig_argv):\n"
        f"    while os.path.exists({str(file)!r}):\n        time.sleep(0.05)\n"
    )
    paths = [str(hook.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return file


def processes_of(out: Path) -> list[int]:
    """Processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{out}/trials".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(8 * LIMIT_S)
def test_killed_and_called_again_it_repeats_nothing(space: Path, tmp_path: Path, held: Path):
    out = tmp_path / "out"
    command = start(space, out)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as first:
        wait_for(first, out, "started", 2)
        end = time.monotonic() + LIMIT_S
        while len(processes_of(out)) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        second = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert second.returncode == 2 and "is in use by another run" in second.stderr, second.stdout + second.stderr
        first.send_signal(signal.SIGKILL)
        first.wait()
    end = time.monotonic() + LIMIT_S
    while processes_of(out) and time.monotonic() < end:
        time.sleep(0.1)
    assert processes_of(out) == [], "ranks outlive the tuner"
    before = (out / NAME).read_bytes()
    noted, begun = ended(out), count(out, "started")
    assert (noted, begun) == ([1], 2)
    held.unlink()

    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on: {len(noted)} of {begun} trials have ended" in done.stdout and "Best:" in done.stdout
    assert (out / NAME).read_bytes().startswith(before)
    keys = {r["number"]: r["candidate"]["key"] for r in records(out) if r["event"] == "proposed"}
    starts = Counter(record["number"] for record in records(out) if record["event"] == "started")
    assert len(set(keys.values())) == len(keys) == 4 and sorted(ended(out)) == [1, 2, 3, 4]
    assert all(starts[number] == 1 for number in noted), "what had ended is run again"
    assert sum(starts.values()) == 4 + begun - len(noted)
    results = {r["number"]: r["result"] for r in records(out) if r["event"] == "ended"}
    assert all(r["status"] == "done" and r["steady"] == 3 for r in results.values()), results
    fastest = min(results, key=lambda number: results[number]["step_s"])
    assert f"(trial {fastest})" in done.stdout
    best = (out / "report" / "best.txt").read_text()
    assert "pretrain_gpt.py" in best and "--hidden-size 32" in best

    # Once more: nothing is left, nothing is run, the report is written again. Then another search in its place.
    again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 0 and "nothing is left to try: 0 trial(s)" in again.stdout
    other = subprocess.run(start(space, out, "--seed", "1"), capture_output=True, text=True, timeout=LIMIT_S)
    assert other.returncode == 2 and "seed was 0, now it is 1" in other.stderr and "Traceback" not in other.stderr


@pytest.mark.slow
@pytest.mark.timeout(5 * LIMIT_S)
def test_a_signal_stops_the_trial_and_the_report_is_written(space: Path, tmp_path: Path, held: Path):
    out = tmp_path / "out"
    command = start(space, out, "--max-trials", "2")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tuner:
        wait_for(tuner, out, "started", 2)
        tuner.send_signal(signal.SIGUSR1)
        wait_for(tuner, out, "closed", 1)
        tuner.send_signal(signal.SIGTERM)  # Slurm says it again, while the report is written
        text, _ = tuner.communicate(timeout=LIMIT_S)
    assert tuner.returncode == 3 and "interrupted by SIGUSR1" in text and "the same command goes on" in text, text
    assert processes_of(out) == [] and (out / "report" / "trials.md").exists()
    held.unlink()
    assert ended(out) == [1] and [r["number"] for r in records(out) if r["event"] == "interrupted"] == [2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and ended(out) == [1, 2], done.stdout + done.stderr
    assert (out / "trials" / "0002" / "attempt-1").is_dir(), "what the first attempt left is kept"


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_without_a_valid_trial_there_is_no_best(space: Path, tmp_path: Path):
    out = tmp_path / "out"
    words = start(space, out, "--max-trials", "1", "--memory-limit", "1", flags=("--hidden-size", "2048"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1, done.stdout + done.stderr
    (end,) = [record["result"] for record in records(out) if record["event"] == "ended"]
    assert (end["status"], end["kind"]) == ("failed", "out of memory")
    assert "out of memory" in done.stdout and "Traceback" not in done.stderr
    assert not (out / "report" / "best.txt").exists()


@pytest.mark.parametrize(("why", "expected"), [(TIME, 3), (SIGNAL, 3), (EXHAUSTED, 2)])
def test_a_report_that_fails_does_not_keep_a_search_from_going_on(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str,
    expected: int,
):  # fmt: skip
    def fails(*_args: object) -> int:
        raise ConfigError("--update-cluster x.toml: nothing to correct it by")

    monkeypatch.setattr("megatron.tuning.command.Session.run", lambda self: Ending(why, 1, None))
    monkeypatch.setattr("megatron.tuning.command._report", fails)
    code, text = call(capsys, "--space", str(space), "--no-prior", "--search", "random", "--processes", "2", "--out",
                      str(tmp_path / "out"))  # fmt: skip
    assert code == expected and "error: --update-cluster x.toml: nothing" in text


def test_interrupted_before_the_first_trial_nothing_is_lost(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stuck(*_args: object, **_kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        raise ConfigError("not interrupted")

    monkeypatch.setattr("megatron.tuning.command.enumerate_candidates", stuck)
    code, text = call(capsys, "--space", str(space), "--no-prior", "--search", "random", "--processes", "2", "--out",
                      str(tmp_path / "out"))  # fmt: skip
    assert code == 3 and "interrupted by SIGTERM" in text and not (tmp_path / "out" / NAME).exists()


@pytest.mark.parametrize(("said", "gpus", "found"), [("4", 0, 4), ("1", 0, 2), ("tp", 0, 2), ("4", 3, 3)])
def test_processes_that_a_space_names_may_share_cores(
    space: Path, monkeypatch: pytest.MonkeyPatch, said: str, gpus: int, found: int
) -> None:
    space.write_text(SPACE.replace('processes = "2"', f'processes = "{said}"'))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(calibrated, "gpus_here", lambda: gpus)
    args = tune.build_parser().parse_args(["--space", str(space), "--no-prior", "--dry-run"])
    assert make_setup(args, []).machine.processes_per_node == found
