"""Ctrl-C: once, twice, while a checkpoint is written, and under torchrun."""

import contextlib
import datetime
import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from megatron.metrics_file import read_records
from megatron.training.run.process import Signals
from tests.helpers.clock import VirtualClock
from tests.helpers.fault_points import strike
from tests.helpers.killing import forked, wait_for
from tests.helpers.launching import ROOT, TINY, launch
from tests.training.run.test_stopping import Rules


@pytest.mark.parametrize(
    ("saving", "at_s", "code"),
    [
        (False, (0.0,), 0),
        (False, (0.0, 0.5), 0),  # one press, which reached the process twice
        (False, (0.0, 2.0), 130),
        (True, (0.0, 2.0), 0),
        (True, (0.0, 2.0, 4.0), 130),
    ],
)
def test_a_second_press_ends_the_process_unless_it_saves(saving, at_s, code):
    clock = VirtualClock(0.0)
    signals = Signals(clock=clock)
    signals.saving = lambda: saving

    def press():
        for clock.now in at_s:
            signals.press()

    assert wait_for(forked(press)) == code


def test_a_press_is_answered_while_the_main_thread_waits_for_others():
    def wait():
        times = iter((0.0, 2.0))

        def clock():
            if (now := next(times)) == 0.0:  # while the first press is answered
                os.kill(os.getpid(), signal.SIGINT)
            return now

        with Signals(clock=clock):
            os.kill(os.getpid(), signal.SIGINT)
            dist.HashStore().wait(["never"], datetime.timedelta(seconds=60))

    assert wait_for(forked(wait)) == 130


def test_a_launchers_signal_after_ctrl_c_is_no_second_press():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        stop = Rules(signals=signals).stop(1)
    # A user wants the run to end, not to begin again.
    assert "SIGINT" in stop.reason and not stop.requeue


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_saves_nothing_at_once():
    arm = {0: (strike, "megatron.run.step", 2, "interrupt")}
    (outcome,) = launch(1, TINY, arm=arm)
    assert outcome.code == 130, outcome
    # No step after the second, and no page about where the program was.
    assert " iteration        3/" not in outcome.output and "Traceback" not in outcome.output


@contextlib.contextmanager
def torchrun(*arguments):
    """Start two processes of pretrain_gpt.py with the arguments TINY and more."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with subprocess.Popen(
        [*launcher, "pretrain_gpt.py", *TINY, *arguments],
        cwd=ROOT,
        # a loaded machine may need more than 30 s for a step and a save
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            yield run
        finally:
            run.terminate()  # torchrun ends its processes


@pytest.mark.slow
@pytest.mark.campaign("real-time")
def test_one_ctrl_c_under_torchrun_saves(tmp_path):
    with torchrun("--train-iters", "1000000", "--save", str(tmp_path)) as run:
        for line in run.stdout:
            if " iteration        2/" in line:
                os.killpg(run.pid, signal.SIGINT)  # as a terminal does
                break
        rest = run.stdout.read()
    (end,) = read_records(tmp_path / "metrics.jsonl", "end")
    (saved,) = read_records(tmp_path / "metrics.jsonl", "checkpoint")
    assert "SIGINT" in end["reason"] and saved["iteration"] == end["iteration"] >= 2, rest
    assert "SIGKILL" not in rest
