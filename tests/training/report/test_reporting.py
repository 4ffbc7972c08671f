"""Console, TensorBoard, timers and the ends of processes."""

import contextlib
import io
import os
import pty
import re
import sys
import threading
from functools import partial

import pytest
import torch

from megatron.config.duration import show_duration
from megatron.errors import ConfigError
from megatron.training.report.metrics import Profiler, Stopwatch
from megatron.training.report.reporter import Console
from megatron.training.run.process import run_guarded
from tests.helpers.clock import VirtualClock
from tests.helpers.launching import TINY
from tests.helpers.processes import run_processes
from tests.helpers.tiny import tiny

LINE = " iteration [red]1[/red] | " + "x" * 300


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_log_files_get_plain_lines_and_other_ranks_are_silent():
    for speaks, stream, written in ((True, io.StringIO(), LINE + "\n"), (False, Terminal(), "")):
        console = Console(speaks, stream)
        with console.doing("step", 10):
            console.advance()
            console.note("loss 2")
            console.say(LINE)
        assert stream.getvalue() == written


@contextlib.contextmanager
def two_steps(clock):
    """Yield a console after two steps of 1000: 10 s for the first, 3 s for the second."""
    stream = io.StringIO()
    console = Console(True, stream, clock)
    with console.doing("step", 1000):
        for step, seconds in ((1, 10.0), (2, 3.0)):
            clock.now += seconds
            console.advance(step, tokens=3960)
        yield console, stream


def test_a_file_tells_the_time_left_after_the_second_step():
    clock = VirtualClock()
    with two_steps(clock) as (console, stream):
        (line,) = stream.getvalue().splitlines()
        # The first step is no measure of the others: 998 of 3 s are left.
        for text in (
            "step 2/1000 |",
            "1,320 tokens/s",
            "0:13 elapsed",
            "3.000 s/step",
            "49:54 left",
        ):
            assert text in line
        assert "iteration" not in line
        # A step takes 3 s, but the 4 s of an evaluation pass again and again.
        with console.doing("evaluation: batch", 4):
            clock.now += 4.0
        clock.now += 3.0
        console.advance(3, tokens=3960)
        console.tell()
    line = stream.getvalue().splitlines()[-1]
    assert "3.000 s/step" in line and f"{show_duration(997 * (3 + 4 / 2))} left" in line


def test_a_file_gets_a_line_when_nothing_else_was_printed_for_30_s():
    clock = VirtualClock()
    with two_steps(clock) as (console, stream):
        for seconds, text, lines in ((29, "", 0), (1, "", 1), (20, "log", 1), (20, "", 0)):
            before = len(stream.getvalue().splitlines())
            clock.now += seconds
            if text:
                console.say(text)
            console.tell(30)
            assert len(stream.getvalue().splitlines()) - before == lines


def train_on_a_terminal(rank):
    """Return pretrain_gpt.py's exit code, and its output on a terminal."""
    from megatron import program

    controller, terminal = pty.openpty()
    os.environ.update(TERM="xterm", COLUMNS="120")
    sys.stdout, chunks = open(terminal, "w", buffering=1), []  # noqa: SIM115

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(controller, 65536):
                chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    code = program.run(TINY)
    sys.stdout.close()
    reader.join()
    return code, b"".join(chunks).decode(errors="replace")


@pytest.mark.slow
def test_a_run_on_a_terminal_shows_its_progress_and_whole_lines():
    ((code, text),) = run_processes(1, train_on_a_terminal)
    assert code == 0 and re.search(r"step [0-4]/4", text), text[-2000:]
    complete_line = re.compile(
        r" iteration +[1-4]/ +4 \| .*elapsed time per iteration \(ms\): [\d.]+ \| .*\|$"
    )
    assert (
        len(
            [
                line
                for line in text.replace("\r", "\n").splitlines()
                if complete_line.search(line.rstrip())
            ]
        )
        == 4
    )


def profile_config(**fields):
    return tiny(**{"world_size": 2, "profile": "pt", **fields})


@pytest.mark.parametrize(
    "flag", ["trace_dir", "tensorboard_dir", "metrics_file", "memory_snapshot_path"]
)
def test_a_profile_needs_a_folder_before_the_run_not_after(tmp_path, flag, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "x") + ("/name" if flag.endswith(("file", "path")) else "")
    config = profile_config(record_memory_history=True, **{flag: path})
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/x"):
        Profiler(config, 0, print, device="cuda")


def test_a_profile_is_written_beside_the_metrics(tmp_path):
    messages = []
    config = profile_config(save=str(tmp_path), profile_step_start=2, profile_step_end=4)
    profiler = Profiler(config, 0, messages.append, range(6))
    for iteration in range(6):
        profiler.step(iteration)
        assert (tmp_path / "trace_rank0.json").exists() == (iteration >= 4)
    profiler.close()
    # iterations are counted from 0 in the flags, and from 1 in the log
    assert len(messages) == 1 and f"3 to 4 written to {tmp_path}/trace_rank0.json" in messages[0]


@pytest.mark.parametrize(("length", "end", "named"), [(6, 3, "3 to 3"), (6, 1, "2"), (1, 1, "1")])
def test_a_run_that_ends_early_reports_its_profile_once(tmp_path, length, end, named):
    messages = []
    config = profile_config(save=str(tmp_path), profile_step_start=2, profile_step_end=4)
    profiler = Profiler(config, 0, messages.append, range(length))
    for iteration in range(end):
        profiler.step(iteration)
    profiler.close()
    assert len(messages) == 1 and named in messages[0]


def test_stopwatch_leaves_pauses_out():
    clock = VirtualClock()
    watch = Stopwatch(clock=clock)
    clock.advance(5.0)
    with watch.paused():
        clock.advance(100.0)
    clock.advance(1.0)
    assert watch.lap() == 6.0
    clock.advance(2.0)
    assert watch.lap() == 2.0


def raise_(error):
    raise error


def test_user_errors_have_one_message_and_others_a_traceback(capsys):
    error = ConfigError("two:\n  1. this\n  2. that")
    assert run_guarded(lambda: raise_(error), rank=0) == 2
    assert capsys.readouterr().err == f"ConfigError: {error}\n"
    assert run_guarded(lambda: raise_(error), rank=3) == 2
    shown = capsys.readouterr().err
    assert (
        shown.startswith("rank 3: ConfigError")
        and shown.count("\n") == 1
        and "this" in shown
        and "that" in shown
    )
    assert run_guarded(lambda: raise_(SystemExit(0)), rank=0) == 0
    assert run_guarded(lambda: raise_(KeyboardInterrupt()), rank=0) == 130
    capsys.readouterr()
    assert run_guarded(lambda: raise_(SystemExit("no data")), rank=2) == 1
    assert capsys.readouterr().err == "rank 2: no data\n"
    assert run_guarded(lambda: raise_(ZeroDivisionError("why")), rank=5) == 1
    shown = capsys.readouterr().err
    assert all(fragment in shown for fragment in ("rank 5", "Traceback", "ZeroDivisionError: why"))


def test_torchrun_gets_the_reason(tmp_path, monkeypatch):
    """Read it with torchrun's own reader."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    errors = (ConfigError("--lr is missing"), ZeroDivisionError("why"), KeyboardInterrupt())
    for error, text in zip(errors, ("--lr is missing", "why", "interrupted"), strict=True):
        code = run_guarded(partial(raise_, error), rank=1)
        shown = str(ChildFailedError("run", {1: ProcessFailure(1, 7, code, str(path))}))
        assert text in shown.split("Root Cause")[1]
