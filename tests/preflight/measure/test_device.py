"""What a process measures of itself."""
from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from megatron.preflight.measure import device
from tests.helpers.launching import ROOT


@pytest.mark.parametrize(("wall", "ran", "waited", "owned", "stopped"), [
    (10, 9.9, 0, 10, 0.01),  # alone
    (10, 1, 9, 1, 0),  # with others on its core: that is not held against it
    (10, 1.5, 2.5, 7.5, 0.8),  # stopped
    (10, 1, 9.5, 1, 0),  # the wait began before
    (10, 4, None, 4, 0),  # a system that does not tell waits
])  # fmt: skip
def test_where_the_time_went(wall: float, ran: float, waited: float | None, owned: float, stopped: float) -> None:
    """Ten calls, each of a second."""
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1

    def so_far(of_all: float) -> float:
        return (calls - 1) * of_all / 10  # the first call is not counted

    count, found = device.repeated(
        work, wall, clock=lambda: so_far(wall), ran_s=lambda: so_far(ran),
        waited_s=lambda: None if waited is None else so_far(waited),
    )  # fmt: skip
    assert (count, found.owned, found.stopped) == (10, pytest.approx(owned), pytest.approx(stopped))


def test_a_core_shared_by_many_is_measured_longer() -> None:
    """Until it ran for 0.05 s, but no more than three times as long."""
    for share, seconds in ((1.0, 0.1), (0.25, 0.2), (0.01, 0.3)):
        calls = iter(range(10**6))
        now = 0.0

        def work() -> None:
            nonlocal now
            now = next(calls) * 0.001  # noqa: B023

        found = device.repeated(work, 0.1, clock=lambda: now, ran_s=lambda: now * share, waited_s=lambda: 0.0)  # noqa: B023
        assert found[1].wall == pytest.approx(seconds, abs=0.002)


@pytest.mark.slow
@pytest.mark.campaign("real-time")
def test_a_process_that_is_stopped_sees_it() -> None:
    """Runs 60 ms of every 200 ms, by the real clock and Linux's counters."""
    code = """
import os, subprocess
from megatron.preflight.measure.device import host_speed
loop = ('while kill -STOP "$1" 2>/dev/null; do echo stopped; exec >/dev/null; sleep 0.14; '
        'kill -CONT "$1" 2>/dev/null; sleep 0.06; done')
words = ["sh", "-c", loop, "throttle", str(os.getpid())]
# Without our pipes: whoever reads them would wait for the throttle, and the throttle for our end.
throttle = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
throttle.stdout.readline()
print(host_speed(1.0)["stopped"])
"""
    if device.seconds_waited() is None:
        pytest.skip("this system does not tell how long a thread waited")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert 0.4 < float(done.stdout) < 1, done.stderr


def test_a_device_that_does_not_answer_or_computes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.answers(torch.device("cpu")) == ""
    ones = torch.ones
    with monkeypatch.context() as patch:
        patch.setattr(torch, "ones", lambda *shape, **options: ones(*shape, **options).fill_(1.5))
        assert "16777216" in device.measure_device(torch.device("cpu"), 0.1, 50.0)["error"]
    monkeypatch.setattr(device, "answers", lambda device: threading.Event().wait())
    assert "0.05 s" in device.measure_device(torch.device("cpu"), 0.1, 0.05)["error"]
