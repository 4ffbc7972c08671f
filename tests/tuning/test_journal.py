"""The journal: what is written is read, whatever a kill left of its last line, and another search's is refused."""
from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.tuning.journal import NAME, Journal, read_journal
from megatron.tuning.types import DONE, FAILED, Candidate, Result, Trial

WHO: dict[str, Any] = {"space": "made", "flags": ["--num-layers", "2"], "seed": 0, "prior": True}
FIRST = Candidate(5, "tp=2,sp=on", {"tp": 2, "sp": True, "x": None, "r": 0.5}, ("--tp", "2"), 8, 1, 4096, 2.0**30, 0.5)


def proposed(**changed: Any) -> str:
    """A line of the journal, of a candidate in which something is another value."""
    candidate = {name: v for name, v in dataclasses.asdict(FIRST).items() if name != "index"} | changed
    return json.dumps({"event": "proposed", "number": 1, "by": "x", "folder": "f", "candidate": candidate})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, WHO, {"max_trials": 3})
    one = Trial(1, FIRST, "planner", "trials/0001")
    two = dataclasses.replace(one, number=2, by="optuna", folder="trials/0002")
    for trial in (one, two):
        journal.proposed(trial)
        journal.started(dataclasses.replace(trial, hosts=("n1", "n2"), started=10.0))
    done = dataclasses.replace(one, hosts=("n1", "n2"), started=10.0, ended=20.0,
                               result=Result(DONE, step_s=0.25, notes=("a note",), steady=5))  # fmt: skip
    journal.finished(done)
    journal.interrupted(two, "SIGTERM")
    assert [t.number for t in journal.ended] == [1]
    journal.close("interrupted")
    saved = read_journal(tmp_path / NAME)
    assert saved.identity == WHO and saved.ends == [1]
    assert dataclasses.replace(saved.trials[1], candidate=FIRST) == done
    assert dataclasses.replace(saved.trials[1].candidate, index=5) == FIRST
    second = saved.trials[2]
    assert second.result is None and second.ended is not None and second.hosts == ("n1", "n2")
    events = [json.loads(line)["event"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert events == ["begin", "proposed", "started", "proposed", "started", "ended", "interrupted", "closed"]


def test_a_trial_that_ended_twice_counts_once_where_it_ended_last(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, WHO, {})
    trials = [Trial(n, FIRST, "x", f"trials/{n}", (), 1.0, 2.0, Result(FAILED, "crash")) for n in (1, 2)]
    for trial in trials:
        journal.proposed(trial)
        journal.started(trial)
        journal.finished(trial)
    journal.retried(trials[0])
    assert [t.number for t in journal.ended] == [2] and journal.trials[0].result is None
    journal.started(trials[0])
    journal.finished(dataclasses.replace(trials[0], result=Result(DONE, step_s=1.0)))
    assert [t.number for t in journal.ended] == [2, 1]


def test_a_record_is_on_the_disk_before_it_is_acted_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (real(file), synced.append(os.fstat(file).st_size)))
    journal = Journal.open(tmp_path, WHO, {})
    journal.proposed(Trial(1, FIRST, "x", "f"))
    assert synced[-1] == (tmp_path / NAME).stat().st_size and len(synced) == 3  # the folder, and each record


def test_a_disk_that_is_full_for_a_moment_leaves_no_part_of_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, trial, write = Journal.open(tmp_path, WHO, {}), Trial(1, FIRST, "x", "f"), os.write
    journal.proposed(trial)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, line: write(file, line[: len(line) // 2]))
        with pytest.raises(OSError):
            journal.started(trial)
    journal.interrupted(trial, "the tuner failed")
    assert read_journal(tmp_path / NAME).trials[1].started is None


@pytest.mark.usefixtures("no_waiting_for_disks")
@given(part=st.floats(0, 1))
def test_cut_anywhere_it_is_its_whole_lines_and_can_be_gone_on_with(tmp_path: Path, part: float) -> None:
    path = tmp_path / NAME
    path.unlink(missing_ok=True)
    journal = Journal.open(tmp_path, WHO, {})
    for number in range(1, 4):
        trial = Trial(number, dataclasses.replace(FIRST, key="key=ä\u2028"), "x", "f", (), 1.0, 2.0, Result(DONE))
        journal.proposed(trial)
        journal.started(trial)
        journal.finished(trial)
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    cut = first + round(part * (len(content) - first))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    saved = read_journal(path)
    assert (len(saved.trials), len(saved.ends)) == ((whole + 1) // 3, (whole - 1) // 3)
    Journal.open(tmp_path, WHO, {}).close("test")
    lines = path.read_bytes().splitlines()
    assert lines[:whole] == content[:cut].splitlines()[:whole]
    assert [json.loads(line)["event"] for line in lines[whole:]] == ["resumed", "closed"]


def test_figures_that_are_no_numbers_do_not_stop_it(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, WHO, {})
    trial = Trial(1, FIRST, "x", "f", (), 1.0, 2.0, Result("invalid", "invalid", "nan", step_s=float("nan"),
                                                           tokens_per_s=float("inf"), memory_bytes=7))  # fmt: skip
    journal.proposed(trial)
    journal.finished(trial)
    result = read_journal(tmp_path / NAME).trials[1].result
    assert result is not None and (result.step_s, result.tokens_per_s, result.memory_bytes) == (None, None, 7)


@pytest.mark.parametrize(("line", "said"), [
    ("nonsense", "line 2"), ('{"event": "ended", "number": 4}', "4"), ('{"event": "started", "number": 1e999}', "inf"),
    ('{"event": "dance"}', "dance"), ("[]", "line 2"), ("{}", "event"),
    ('{"event": "proposed", "number": 1, "by": "x", "folder": "f", "candidate": {}}', "line 2"),
    ('{"event": ' * 5000, "line 2"), (proposed(processes="all"), "all"), (proposed(step_s=1e300), "step_s"),
    (proposed(flags=[7]), "flags"),
])  # fmt: skip
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, said: str) -> None:
    Journal.open(tmp_path, WHO, {}).close("")
    path = tmp_path / NAME
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, lines[1]]) + "\n")
    with pytest.raises(ConfigError) as error:
        read_journal(path)
    assert said in str(error.value) and "--out" in str(error.value)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(ConfigError, match=NAME):
        read_journal(tmp_path / NAME)


def test_of_another_search_it_is_not_touched(tmp_path: Path) -> None:
    Journal.open(tmp_path, WHO, {"max_trials": 3}).close("")
    before = (tmp_path / NAME).read_bytes()
    for changed in ({"seed": 1}, {"flags": []}, {"cluster": "frontier"}):
        with pytest.raises(ConfigError, match="--out") as error:
            Journal.open(tmp_path, WHO | changed, {})
        assert next(iter(changed)) in str(error.value)
    assert (tmp_path / NAME).read_bytes() == before
    Journal.open(tmp_path, WHO, {"max_trials": 99}).close("")  # that may change


def test_a_file_of_something_else_is_not_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"event": "resumed"}\n')
    with pytest.raises(ConfigError, match=NAME):
        Journal.open(tmp_path, WHO, {})
    (tmp_path / NAME).write_text('{"event": "begin", "format": 99, "identity": {}}\n')
    with pytest.raises(ConfigError, match="99"):
        Journal.open(tmp_path, WHO, {})
