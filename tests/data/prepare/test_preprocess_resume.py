"""Runs that are killed, stopped, refused or out of disk go on, and leave no data set that reads wrong."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.data import file_lock
from megatron.data.file_lock import Owner
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.prepare import journal, sources
from megatron.data.prepare import preprocess as library
from megatron.data.prepare.encode import PreprocessOptions
from megatron.data.prepare.journal import locked
from megatron.data.prepare.preprocess import Listeners, PreprocessStopped, Totals, preprocess
from megatron.errors import DataError
from tests.helpers.killing import forked, signal_at, wait_for
from tests.helpers.preprocessing import NULL_FLAGS, json_lines, null_options, pack, pair_bytes, write_input
from tools import preprocess_data

TEXTS = [" ".join(str((i * j) % 100) for j in range(1 + i % 5)) for i in range(30)]
TITLES = [str(i) for i in range(30)]
KEYS = ("text", "title")
NOBODY = Listeners()
BAD_LINE = b'{"text": "bad"}\n'


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 200)
    monkeypatch.setattr(file_lock, "_UNWRITTEN_S", 0.1)  # a lock of a process that was killed before it wrote its name


@dataclass
class Job:
    """A small job, and what it makes when nothing disturbs it."""

    folder: Path
    inputs: list[Path]
    expected: dict[str, bytes]

    def run(
        self,
        name: str = "o",
        listeners: Listeners = NOBODY,
        *,
        workers: int = 1,
        restart: bool = False,
        often: bool = False,
    ) -> Totals:
        """The job; `often`: with a journal after each block."""
        return preprocess(
            self.inputs, self.folder / name, null_options(*KEYS, append_eod=True), workers=workers, restart=restart,
            on_bad_input="skip", journal_interval_s=0.0 if often else 1e9, listeners=listeners,
        )  # fmt: skip

    def written(self, name: str = "o") -> dict[str, bytes]:
        files = (path for path in self.folder.glob(f"{name}_*") if path.is_file() and path.suffix != ".lock")
        return {path.name.removeprefix(name): path.read_bytes() for path in files}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two keys; plain, packed and parquet input; lines that are left out."""
    lines = json_lines(TEXTS, TITLES)
    (tmp_path / "a.jsonl").write_bytes(lines + BAD_LINE + lines)
    (tmp_path / "b.jsonl.gz").write_bytes(pack(BAD_LINE + lines, ".gz", 2))
    write_input(tmp_path / "c.parquet", TEXTS, TITLES, members=3)
    job = Job(tmp_path, [tmp_path / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")], {})
    totals = job.run("expected")
    assert (totals.documents, totals.bad_documents) == (240, 2)
    job.expected = job.written("expected")
    assert len(job.expected) == 5
    return job


def killed_run(job: Job, arm: Callable[[], None], *, often: bool = True) -> int:
    """The job in a child that `arm` prepares; its exit code. Forked: a new interpreter would cost a second."""

    def child() -> None:
        arm()
        job.run(often=often)

    return wait_for(forked(child))


def killed_at(job: Job, moment: int) -> int:
    return killed_run(job, lambda: signal_at(moment, job.folder / "o"))


def check_what_is_there(job: Job, old: dict[str, bytes]) -> None:
    """Each pair opens as what it was before, or as what it shall be, or not at all."""
    for key in KEYS:
        prefix = job.folder / f"o_{key}_document"
        try:
            IndexedDataset(prefix)
        except DataError:
            continue
        found = pair_bytes(prefix)
        kinds = (files.get(f"_{key}_document.bin") for files in (old, job.expected))
        indices = (files.get(f"_{key}_document.idx") for files in (old, job.expected))
        assert found in list(zip(kinds, indices, strict=True))


def finish(job: Job) -> None:
    job.run()
    assert job.written() == job.expected
    assert not (job.folder / "o_partial").exists() and not (job.folder / "o_partial.lock").exists()


def earlier_output(job: Job) -> dict[str, bytes]:
    """A finished data set of other text under the same names."""
    path = write_input(job.folder / "old.jsonl", ["5 5 5"], ["6"])
    preprocess([path], job.folder / "o", null_options(*KEYS))
    return job.written()


def kill_again_and_again(job: Job, kills: int, seed: int) -> None:
    """Kill at random file operations, several times within a job, until there were so many kills."""
    chance, done = random.Random(seed), 0
    while done < kills:
        old = earlier_output(job)
        assert old != job.expected
        while (code := killed_at(job, chance.randrange(150))) < 0:
            assert code == -signal.SIGKILL
            check_what_is_there(job, old)
            done += 1
        assert code == 0 and job.written() == job.expected


def test_killed_runs_go_on(job: Job) -> None:
    kill_again_and_again(job, 8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_forty_more_kills(job: Job, seed: int) -> None:
    kill_again_and_again(job, 10, seed)


@pytest.mark.slow
def test_a_kill_at_each_step_of_the_end(job: Job) -> None:
    """From the journal that says that all input is written on, every file operation."""
    reached = 0
    for moment in range(200):
        old = earlier_output(job)

        def at_the_end(moment: int = moment) -> None:
            seal = library._Run._seal

            def armed(run: library._Run) -> None:
                signal_at(moment, job.folder / "o")
                seal(run)

            library._Run._seal = armed  # type: ignore[method-assign]

        code = killed_run(job, at_the_end, often=False)
        if code == 0:
            break
        check_what_is_there(job, old)
        finish(job)
        reached += 1
    assert reached > 20


class Fsyncs:
    """Keeps, outside of the process, how much of each file was brought to disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def arm(self, kill_at: int) -> None:
        fsync, left = os.fsync, kill_at

        def noting(descriptor: int) -> None:
            nonlocal left
            fsync(descriptor)
            status = os.fstat(descriptor)
            with self.path.open("a") as file:
                file.write(f"{status.st_ino} {status.st_size}\n")
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = noting

    def lose_the_rest(self, folder: Path) -> None:
        """What a power cut may do: files lose what was not brought to disk."""
        sizes = {int(inode): int(size) for inode, size in map(str.split, self.path.read_text().splitlines())}
        for path in folder.glob("o_partial/*"):
            length = min(path.stat().st_size, sizes.get(path.stat().st_ino, 0))
            os.truncate(path, length)


@pytest.mark.parametrize("kill_at", [0, 1, 8, 9, 10, 11, 12, 30, 75, 120])
def test_a_power_cut_loses_only_what_the_journal_does_not_count(job: Job, kill_at: int) -> None:
    fsyncs = Fsyncs(job.folder / "fsyncs")
    assert killed_run(job, lambda: fsyncs.arm(kill_at)) == -signal.SIGKILL
    fsyncs.lose_the_rest(job.folder)
    finish(job)


@pytest.mark.parametrize("blocks", [1, 8])
def test_no_worker_outlives_a_tool_that_is_killed(job: Job, blocks: int) -> None:
    noted, seen = job.folder / "workers", []

    def kill(totals: Totals) -> None:
        seen.append(totals)
        if len(seen) == blocks:
            noted.write_text(" ".join(str(process.pid) for process in multiprocessing.active_children()))
            os.kill(os.getpid(), signal.SIGKILL)

    listeners = Listeners(on_progress=kill)
    assert wait_for(forked(lambda: job.run(listeners=listeners, workers=2, often=True))) == -signal.SIGKILL
    workers = [int(pid) for pid in noted.read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 120
    while any(is_running(pid) for pid in workers):
        assert time.monotonic() < deadline, "worker processes outlive the tool"
        time.sleep(0.01)
    check_what_is_there(job, {})
    finish(job)


def test_kills_while_a_run_begins_anew(job: Job) -> None:
    """What is thrown away is thrown away journal first: the next run finds all of it or nothing."""
    for moment in range(4, 20):
        with pytest.raises(PreprocessStopped):
            job.run(listeners=stop_after(14))  # some lines are left out by then

        def child(moment: int = moment) -> None:
            signal_at(moment, job.folder / "o")
            job.run(restart=True)

        assert wait_for(forked(child)) == -signal.SIGKILL
        finish(job)
        for path in job.folder.glob("o_*"):
            path.unlink()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def stop_after(blocks: int) -> Listeners:
    """Listeners that ask for the end after so many blocks."""
    seen: list[int] = []
    return Listeners(on_progress=lambda totals: seen.append(1), should_stop=lambda: len(seen) >= blocks)


@pytest.mark.parametrize("workers", [1, 2])
def test_stopped_runs_go_on_with_other_workers(job: Job, workers: int) -> None:
    notes: list[str] = []
    with pytest.raises(PreprocessStopped, match=r"stopped; \d+ documents are done and kept in .*o_partial, the same"):
        job.run(workers=workers, listeners=stop_after(3))
    assert job.written() == {}
    totals = job.run(workers=3 - workers, listeners=Listeners(on_note=notes.append))
    assert job.written() == job.expected
    assert notes == [f"resuming after {totals.earlier_documents} documents, in {job.inputs[0]} after line "
                     f"{notes[0].split()[-1]}"]  # fmt: skip
    assert 0 < totals.earlier_documents < totals.documents and 0 < totals.earlier_bytes < totals.input_bytes


@pytest.mark.parametrize("blocks", [1, 14, 21])
def test_places_in_every_kind_of_file(job: Job, blocks: int) -> None:
    """Bad lines are named by the same numbers after a run that went on: they are in the files that are compared."""
    with pytest.raises(PreprocessStopped):
        job.run(listeners=stop_after(blocks))
    finish(job)


def test_stopped_before_anything_was_done(job: Job) -> None:
    with pytest.raises(PreprocessStopped, match="stopped; nothing was done yet"):
        job.run(listeners=stop_after(0))
    assert not list(job.folder.glob("o*"))


def differing(job: Job) -> dict[str, Callable[[], object]]:
    inputs, prefix, tmp = job.inputs, job.folder / "o", job.folder
    bigger = {"tokenizer_type": "NullTokenizer", "vocab_size": 200}

    def rewritten() -> None:
        os.utime(inputs[2], ns=(1, 1))
        job.run()

    def longer() -> None:
        with inputs[0].open("ab") as file:
            file.write(b"\n")
        job.run()

    return {
        r"--append-eod was True, now False": lambda: preprocess(inputs, prefix, null_options(*KEYS)),
        r"--json-keys was text title, now text": lambda: preprocess(inputs, prefix, null_options(append_eod=True)),
        r"--vocab-size was 100, now 200": lambda: preprocess(inputs, prefix, PreprocessOptions(bigger, KEYS, True)),
        r"--input named 3 files, now 2, without .*c.parquet": lambda: preprocess(
            inputs[:2], prefix, null_options(*KEYS, append_eod=True)
        ),
        r"now 3, in another order": lambda: preprocess(inputs[::-1], prefix, null_options(*KEYS, append_eod=True)),
        r"c.parquet was written to since": rewritten,
        rf"a.jsonl had \d+ bytes, now {(tmp / 'a.jsonl').stat().st_size + 1}": longer,
    }


@pytest.mark.parametrize("number", range(7))
def test_another_command_is_refused_and_told_what_differs(job: Job, number: int) -> None:
    with pytest.raises(PreprocessStopped):
        job.run(listeners=stop_after(3))
    message, run = list(differing(job).items())[number]
    with pytest.raises(DataError, match=rf"\d+ documents of a run that was not finished.*{message}.*--restart") as info:
        run()
    assert "\n" not in str(info.value)
    totals = job.run(restart=True)
    assert totals.earlier_documents == 0 and job.written() == job.expected


def test_a_tokenizer_file_that_changed_is_noticed(tmp_path: Path) -> None:
    from tests.helpers.preprocessing import byte_tokenizer

    arguments = byte_tokenizer(tmp_path)
    path = write_input(tmp_path / "c.jsonl", TEXTS)
    with pytest.raises(PreprocessStopped):
        preprocess([path], tmp_path / "o", PreprocessOptions(arguments), listeners=stop_after(2))
    model = Path(arguments["tokenizer_model"])
    moved = {**arguments, "tokenizer_model": shutil.copy(model, tmp_path / "moved.json")}
    model.write_text(model.read_text() + " ")
    with pytest.raises(DataError, match="the file of --tokenizer-model has another content"):
        preprocess([path], tmp_path / "o", PreprocessOptions(arguments))
    assert preprocess([path], tmp_path / "o", PreprocessOptions(moved)).documents == 30


def test_damage_in_the_partial_folder(job: Job) -> None:
    for name, content, message in (
        ("o_text_document.bin.part", b"", "if this cannot be mended, --restart begins anew"),
        ("bad_input.txt", None, "cannot continue; if this cannot be mended, --restart"),
        ("journal.json", b"{", "journal.json: damaged .*; --restart begins anew"),
        ("job.json", b"{", "this one differs: it was begun by a version of this tool with format None"),
    ):
        with pytest.raises(PreprocessStopped):
            job.run(listeners=stop_after(20))
        path = job.folder / "o_partial" / name
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            job.run()
        totals = job.run(restart=True)
        assert totals.earlier_documents == 0 and job.written() == job.expected


def test_two_runs_at_once(job: Job) -> None:
    with locked(str(job.folder / "o"), print), pytest.raises(DataError, match="process .* is writing it: wait for its"):
        job.run()
    finish(job)


def lock_of_another_host(path: Path) -> None:
    owner = Owner("other", "00000000", 1, 1, 0.0, "token")
    path.write_text(json.dumps(vars(owner)))


def test_a_run_of_another_host_that_is_alive(tmp_path: Path) -> None:
    """Its lock is touched while we look."""
    path, notes = tmp_path / "o_partial.lock", []
    lock_of_another_host(path)

    def touch() -> None:
        if notes:
            os.utime(path, ns=(1, 1))

    with (
        pytest.raises(DataError, match=r"process 1 on other .* is writing it"),
        locked(str(tmp_path / "o"), notes.append, touch, stale_s=1000.0),
    ):
        pass
    assert "looking for up to 1000 s whether that still runs" in notes[0]


def test_a_run_of_another_host_that_died(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_LOOK_S", 0.01)
    with pytest.raises(PreprocessStopped):
        job.run(listeners=stop_after(3))
    lock_of_another_host(job.folder / "o_partial.lock")
    notes: list[str] = []
    with locked(str(job.folder / "o"), notes.append, stale_s=0.2):
        assert len(notes) == 1
    finish(job)


def test_a_run_whose_lock_was_taken_over_stops(job: Job) -> None:
    """It must not write a journal over that of its successor."""

    def take_over(totals: Totals) -> None:
        if totals.documents > 20:
            lock_of_another_host(job.folder / "o_partial.lock")

    with pytest.raises(DataError, match="process 1 on other .* has taken over"):
        job.run(listeners=Listeners(on_progress=take_over), often=True)
    assert (job.folder / "o_partial" / "journal.json").exists()
    (job.folder / "o_partial.lock").unlink()
    finish(job)


def test_a_worker_that_is_killed(job: Job) -> None:
    def kill_one(totals: Totals) -> None:
        killed = [process for process in multiprocessing.active_children()[:1] if not dead]
        for process in killed:
            process.kill()
        dead.extend(killed)

    dead: list[object] = []

    with pytest.raises(DataError, match=r"worker process was killed by SIGKILL.*fewer --workers; \d+ documents are"):
        job.run(workers=2, listeners=Listeners(on_progress=kill_one))
    assert not multiprocessing.active_children()
    finish(job)


@pytest.mark.parametrize("limit", [60, 200, 500, 700, 1000])
def test_a_full_disk(job: Job, limit: int) -> None:
    """A limit on the size of files stands for it: the same writes fail, in the middle."""
    message = job.folder / "message"

    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    assert wait_for(forked(lambda: limited(job, limit, hard, message))) == 0
    assert "cannot be written: File too large" in message.read_text()
    assert job.written() == {}
    finish(job)


def limited(job: Job, limit: int, hard: int, message: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    error = ""
    try:
        job.run()
    except DataError as failure:
        error = str(failure)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    message.write_text(error)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_tool_and_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    path = write_input(tmp_path / "c.jsonl", TEXTS)
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), *NULL_FLAGS, "--workers", "1"]
    handlers = [signal.getsignal(s) for s in preprocess_data.StopSignal.SIGNALS]
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_data.Progress, "update", lambda *_: os.kill(os.getpid(), number))
        assert preprocess_data.main(arguments) == 128 + number
    assert handlers == [signal.getsignal(s) for s in preprocess_data.StopSignal.SIGNALS]
    said = capsys.readouterr().err
    assert f"{number.name}: stopped; " in said and "the same command goes on after them" in said
    assert preprocess_data.main(arguments) == 0
    streams = capsys.readouterr()
    assert "resuming after" in streams.err and "documents of an earlier run" in streams.out
    assert preprocess_data.main([*arguments[:3], str(tmp_path / "again"), *arguments[4:]]) == 0
    assert pair_bytes(tmp_path / "o_text_document") == pair_bytes(tmp_path / "again_text_document")


def test_a_second_signal_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_input(tmp_path / "c.jsonl", TEXTS)

    def twice(*_: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(preprocess_data.Progress, "update", twice)
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), *NULL_FLAGS, "--workers", "1"]
    assert preprocess_data.main(arguments) == 130
    assert "stopped at once" in capsys.readouterr().err
