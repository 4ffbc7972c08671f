"""Runs that are killed, stopped, refused or out of disk resume, and leave no wrong data set."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import resource
import select
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError
from megatron_preparation import sources
from megatron_preparation.encode import PreprocessOptions
from megatron_preparation.preprocess import Listeners, PreprocessStopped, preprocess
from tests.data.forks import MOMENTS, killed_at_each
from tests.helpers.killing import forked, wait_for
from tests.helpers.preprocessing import (
    NULL_FLAGS,
    byte_tokenizer,
    json_lines,
    null_options,
    pack,
    pair_bytes,
    write_input,
)
from tools import preprocess_data

TEXTS = [" ".join(str((i * j) % 100) for j in range(1 + i % 5)) for i in range(30)]
TITLES = [str(i) for i in range(30)]
KEYS = ("text", "title")
NOBODY = Listeners()
BAD_LINE = b'{"text": "bad"}\n'


def settings(patch):
    patch.setattr(sources, "BLOCK_BYTES", 200)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    settings(monkeypatch)


@dataclass
class Job:
    """Small job, and its output when undisturbed."""

    folder: Path
    inputs: list[Path]
    expected: dict[str, bytes]

    def run(
        self,
        listeners=NOBODY,
        *,
        workers=1,
        restart=False,
        often=False,
    ):
        """Run the job. `often`: with a journal after each block."""
        return preprocess(
            self.inputs,
            self.folder / "o",
            null_options(*KEYS, append_eod=True),
            workers=workers,
            restart=restart,
            on_bad_input="skip",
            journal_interval_s=0.0 if often else 1e9,
            listeners=listeners,
        )

    def stop(self, blocks):
        with pytest.raises(PreprocessStopped):
            self.run(stop_after(blocks))

    def written(self):
        files = (
            path for path in self.folder.glob("o_*") if path.is_file() and path.suffix != ".lock"
        )
        return {path.name: path.read_bytes() for path in files}

    def finish(self):
        totals = self.run()
        assert self.written() == self.expected and (totals.documents, totals.bad_documents) == (
            240,
            2,
        )
        assert (
            not (self.folder / "o_partial").exists()
            and not (self.folder / "o_partial.lock").exists()
        )
        return totals

    def at(self, folder):
        return Job(folder, self.inputs, self.expected)


@pytest.fixture(scope="module")
def finished_job(tmp_path_factory):
    """Provide a job of two keys; plain, packed and parquet input; and lines that are left out."""
    folder = tmp_path_factory.mktemp("job")
    lines = json_lines(TEXTS, TITLES)
    (folder / "a.jsonl").write_bytes(lines + BAD_LINE + lines)
    (folder / "b.jsonl.gz").write_bytes(pack(BAD_LINE + lines, ".gz", 2))
    write_input(folder / "c.parquet", TEXTS, TITLES, members=3)
    job = Job(folder, [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")], {})
    with pytest.MonkeyPatch.context() as patch:
        settings(patch)
        totals = job.run()
    assert (totals.documents, totals.bad_documents) == (240, 2)
    job.expected = job.written()
    assert len(job.expected) == 7
    return job


def test_a_finished_command_has_nothing_to_do(job):
    job.run()
    before = {path: path.stat().st_mtime_ns for path in job.folder.iterdir()}
    totals = job.run()
    assert {path: path.stat().st_mtime_ns for path in job.folder.iterdir()} == before
    assert (totals.documents, job.written()) == (240, job.expected)
    job.run(restart=True)
    assert {path: path.stat().st_mtime_ns for path in job.folder.iterdir()} != before
    (job.folder / "o_text_document.idx").unlink()
    job.finish()


@pytest.fixture
def job(finished_job, tmp_path):
    return finished_job.at(tmp_path)


def stop_after(blocks):
    """Return listeners that request the end after `blocks` blocks."""
    seen = []
    return Listeners(
        on_progress=lambda totals: seen.append(1), should_stop=lambda: len(seen) >= blocks
    )


def check_what_is_there(job, old):
    """Check that each pair opens as its old or its new version, or not at all."""
    for name in (f"o_{key}_document" for key in KEYS):
        with contextlib.suppress(DataError):
            IndexedDataset(job.folder / name)
            pairs = [
                (files.get(f"{name}.bin"), files.get(f"{name}.idx"))
                for files in (old, job.expected)
            ]
            assert pair_bytes(job.folder / name) in pairs


@pytest.mark.slow
@MOMENTS
def test_killed_runs_go_on(job, every):
    """Resume killed runs. In the campaign the journal is written after each block."""
    old = job.at(job.folder / "old")
    old.folder.mkdir()
    preprocess(
        [write_input(job.folder / "old.jsonl", ["5 5 5"], ["6"])],
        old.folder / "o",
        null_options(*KEYS),
    )

    def prepare(here):
        shutil.copytree(old.folder, here, dirs_exist_ok=True)

    for folder in killed_at_each(
        job.folder, lambda here: job.at(here).run(often=every), every, prepare
    ):
        check_what_is_there(job.at(folder), old.written())
        job.at(folder).finish()


@pytest.mark.slow
@MOMENTS
def test_killed_while_a_run_begins_anew(job, every):
    """Discard the journal first, so that the next run finds all discarded output or none."""

    def begin_anew(folder):
        with pytest.raises(PreprocessStopped):
            job.at(folder).run(stop_after(1), restart=True)

    stopped = job.at(job.folder / "stopped")
    stopped.folder.mkdir()
    stopped.stop(14)  # some lines have been left out by then

    def prepare(here):
        shutil.copytree(stopped.folder, here, dirs_exist_ok=True)

    for folder in killed_at_each(job.folder, begin_anew, every, prepare):
        job.at(folder).finish()


def power_cut(folder, sizes):
    """Simulate a power cut: files lose what was not synced to disk."""
    for path in folder.glob("o_partial/*"):
        os.truncate(path, min(path.stat().st_size, sizes.get(path.stat().st_ino, 0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "syncs",
    [[1, 10, 31, 76], pytest.param(range(1, 125), marks=pytest.mark.campaign("kills"))],
    ids=["some", "all"],
)
def test_a_power_cut_loses_only_what_the_journal_does_not_count(job, syncs):
    """A power cut loses only data that the journal does not count.

    The run is killed after a number of syncs.
    """
    for kill_after in syncs:
        noted, here = job.folder / f"{kill_after}.syncs", job.at(job.folder / str(kill_after))
        here.folder.mkdir()

        def child():
            fsync, left = os.fsync, [kill_after]  # noqa: B023

            def noting(descriptor):
                fsync(descriptor)
                status = os.fstat(descriptor)
                with noted.open("a") as file:  # noqa: B023
                    file.write(f"{status.st_ino} {status.st_size}\n")
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

            os.fsync = noting
            here.run(often=True)  # noqa: B023

        assert wait_for(forked(child)) == -signal.SIGKILL
        power_cut(
            here.folder, {int(a): int(b) for a, b in map(str.split, noted.read_text().splitlines())}
        )
        here.finish()


@pytest.mark.slow
def test_no_worker_outlives_a_tool_that_is_killed(job):
    noted = job.folder / "workers"

    def kill(_):
        noted.write_text(
            " ".join(str(process.pid) for process in multiprocessing.active_children())
        )
        os.kill(os.getpid(), signal.SIGKILL)

    assert (
        wait_for(forked(lambda: job.run(Listeners(on_progress=kill), workers=2, often=True)))
        == -signal.SIGKILL
    )
    workers = [int(pid) for pid in noted.read_text().split()]
    assert len(workers) == 2
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            select.select([ended], [], [])
            os.close(ended)
    check_what_is_there(job, {})
    job.finish()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.campaign("kills"))])
def test_stopped_runs_go_on_with_other_workers(job, workers):
    job.stop(0)  # before any work
    assert not list(job.folder.glob("o*"))
    with pytest.raises(PreprocessStopped, match=str(job.folder / "o_partial")):
        job.run(stop_after(3), workers=workers)
    assert job.written() == {}
    totals = job.run(workers=3 - workers)
    assert job.written() == job.expected and (totals.documents, totals.bad_documents) == (240, 2)
    assert (
        0 < totals.earlier_documents < totals.documents
        and 0 < totals.earlier_bytes < totals.input_bytes
    )


@pytest.mark.slow
def test_workers_that_are_killed(job):
    """Kill all workers, because work left by one could be done by another before it is noticed."""

    def kill(_):
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(DataError, match="SIGKILL.*--workers"):
        job.run(Listeners(on_progress=kill), workers=2)
    assert not multiprocessing.active_children()
    job.finish()


def test_another_command_is_refused_and_told_what_differs(finished_job, tmp_path):
    inputs = [Path(shutil.copy2(path, tmp_path)) for path in finished_job.inputs]
    job = Job(tmp_path, inputs, {})
    prefix = tmp_path / "o"
    bigger = {"tokenizer_type": "NullTokenizer", "vocab_size": 200}
    job.stop(3)

    def refused(pattern, run):
        with pytest.raises(DataError, match=rf"{prefix}_partial.*{pattern}.*--restart"):
            run()

    options = null_options(*KEYS, append_eod=True)
    refused("--append-eod", lambda: preprocess(inputs, prefix, null_options(*KEYS)))
    refused(
        "--vocab-size .*100.*200",
        lambda: preprocess(inputs, prefix, PreprocessOptions(bigger, KEYS, True)),
    )
    refused("--input", lambda: preprocess(inputs[::-1], prefix, options))
    size = inputs[0].stat().st_size
    with inputs[0].open("ab") as file:
        file.write(b"\n")
    refused(rf"a.jsonl .*{size}.*{size + 1}", job.run)
    totals = job.run(restart=True)
    assert (totals.earlier_documents, totals.documents, totals.bad_documents) == (0, 240, 2)


def test_a_tokenizer_file_that_changed_is_noticed(tmp_path):
    arguments = byte_tokenizer(tmp_path)
    path = write_input(tmp_path / "c.jsonl", TEXTS)
    with pytest.raises(PreprocessStopped):
        preprocess([path], tmp_path / "o", PreprocessOptions(arguments), listeners=stop_after(2))
    model = Path(arguments["tokenizer_model"])
    moved = {**arguments, "tokenizer_model": shutil.copy(model, tmp_path / "moved.json")}
    model.write_text(model.read_text() + " ")
    with pytest.raises(DataError, match="--tokenizer-model"):
        preprocess([path], tmp_path / "o", PreprocessOptions(arguments))
    assert preprocess([path], tmp_path / "o", PreprocessOptions(moved)).documents == 30


@pytest.mark.slow
def test_damage_in_the_partial_folder(job):
    for name, content in (
        ("o_text_document.bin.part", b""),
        ("bad_input.txt", None),
        ("journal.json", b"{"),
        ("job.json", b'{"format": 1, "options": 3}'),
        *(
            (
                "journal.json",
                lambda text, new=new: re.sub(rb'"source": \d', b'"source": ' + new, text),
            )
            for new in (b"3", b"-1", b'"x"', b"true")
        ),
    ):
        (job.folder / "o_text_document.tokenizer.json").unlink(missing_ok=True)
        job.stop(20)
        path = job.folder / "o_partial" / name
        content = content(path.read_bytes()) if callable(content) else content
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(
            DataError, match=f"{path if name != 'job.json' else path.parent}.*--restart"
        ):
            job.run()
        totals = job.run(restart=True)
        assert totals.earlier_documents == 0 and job.written() == job.expected


@pytest.mark.slow
@pytest.mark.parametrize("limit", [60, 1000])
def test_a_full_disk(job, limit):
    """Run on a full disk.

    A limit on the size of files stands for it: the same writes fail, in the middle.
    """

    def limited():
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(DataError, match=f"{job.folder}/o.*{os.strerror(errno.EFBIG)}"):
            job.run()

    assert wait_for(forked(limited)) == 0 and job.written() == {}
    job.finish()


# Signals


def test_signals_stop_the_tool_and_it_goes_on(tmp_path, capsys, monkeypatch):
    path = write_input(tmp_path / "c.jsonl", TEXTS)

    def run(name):
        words = f"--input {path} --output-prefix {tmp_path / name} --workers 1".split()
        return preprocess_data.main([*words, *NULL_FLAGS]), capsys.readouterr().err

    handlers = [signal.getsignal(s) for s in preprocess_data.SIGNALS]
    assert run("whole")[0] == 0
    # Twice: at once.
    for number, times in ((signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGINT, 2)):

        def kill(*_):
            for _ in range(times):  # noqa: B023
                os.kill(os.getpid(), number)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(preprocess_data.PreprocessProgress, "update", kill)
            code, errors = run(f"o{number}{times}")
        assert code == 128 + number and handlers == [
            signal.getsignal(s) for s in preprocess_data.SIGNALS
        ]
        assert times == 2 or (number.name in errors and f"o{number}1_partial" in errors)
        code, errors = run(f"o{number}{times}")
        assert code == 0 and ("resuming" in errors) == (times == 1)
        assert pair_bytes(tmp_path / f"o{number}{times}_text_document") == pair_bytes(
            tmp_path / "whole_text_document"
        )


def test_a_signal_that_was_ignored_before_stays_so(tmp_path, monkeypatch):
    """A signal that was ignored at the start stays ignored.

    Under nohup the end of the terminal does not end the tool.
    """
    write_input(tmp_path / "c.jsonl", TEXTS)
    monkeypatch.setattr(
        preprocess_data.PreprocessProgress, "update", lambda *_: os.kill(os.getpid(), signal.SIGHUP)
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        words = f"--input {tmp_path}/c.jsonl --output-prefix {tmp_path}/o --workers 1".split()
        assert preprocess_data.main([*words, *NULL_FLAGS]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
