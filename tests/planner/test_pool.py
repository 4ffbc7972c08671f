"""Processes that share work: order, Ctrl-C, and the end when one or the parent is killed."""

import os
import signal
import subprocess
import sys

import pytest

from megatron.errors import MegatronError
from megatron.planner.subprocesses import process_pool
from tests.helpers.launching import ROOT

_base = 0


def work(number):
    """Return the result, the process id, and whether this process now ignores Ctrl-C."""
    blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    return (
        _base + number,
        os.getpid(),
        not blocked and signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    )


def die(number):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number):
    raise ValueError(f"no {number}")


@pytest.mark.slow
def test_answers_come_in_order_from_other_processes(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "_base", 100)
    with process_pool(2, "killed") as run:
        answers = list(run(work, range(40)))
    assert [number for number, *_ in answers] == list(range(100, 140)) and all(
        quiet for *_, quiet in answers
    )
    assert os.getpid() not in {process for _, process, _ in answers}
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_errors():
    with (
        pytest.raises(MegatronError, match="no memory"),
        process_pool(2, "no memory") as run,
    ):
        list(run(die, [1, 2]))
    with pytest.raises(ValueError, match="no 1"), process_pool(2, "killed") as run:
        list(run(fail, [1, 2]))


# A Ctrl-C in the first moment of each process of the pool, before any of our code could run there.
PROGRAM = """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGINT))
from megatron.planner.subprocesses import process_pool
from tests.planner.test_pool import work
if __name__ == "__main__":
    with process_pool(2, "killed") as run:
        print([number for number, *_ in run(work, range(4))])
"""


@pytest.mark.slow
def test_ctrl_c_while_they_start_ends_none_of_them(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2, 3]\n", "")


WAITS = """
import os, time
from megatron.planner.subprocesses import process_pool
def wait(number):
    os.write(1, b"waits\\n")  # at once: print may write the end of the line by itself
    time.sleep(600)
with process_pool(2, "killed") as run:
    list(run(wait, [1, 2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_they_end_with_the_process_that_was_killed(number):
    """Workers end with a killed or interrupted parent, in the middle of a task.

    They hold its output open: it ends with the last of them.
    """
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert [first.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
        first.send_signal(number)
        assert first.stdout.read() == ""
