"""What a process measures of itself."""
from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron.preflight.measure import device

ROOT = Path(__file__).resolve().parents[3]


def test_time_that_others_had_the_core_is_not_held_against_a_process() -> None:
    alone = device.Shares(wall=10, ran=9.9, waited=0)
    assert (alone.owned, alone.stopped) == (10, pytest.approx(0.01))
    shared = device.Shares(wall=10, ran=1, waited=9)
    assert (shared.owned, shared.stopped) == (1, 0)
    stopped = device.Shares(wall=10, ran=1.5, waited=2.5)
    assert (stopped.owned, stopped.stopped) == (7.5, 0.8)
    early = device.Shares(wall=10, ran=1, waited=9.5)  # the wait began before
    assert (early.owned, early.stopped) == (1, 0)


def test_a_waiting_thread_is_seen_to_wait() -> None:
    """Two threads of one core each get half of it; the other half is waiting, and none of it is being stopped."""
    found: list[device.Shares] = []

    def body() -> None:
        os.sched_setaffinity(0, {core})
        found.append(device.repeated(lambda: sum(range(1000)), 0.5)[1])

    def as_expected() -> bool:
        return found[-1].waited / found[-1].wall > 0.2 and found[-1].stopped < 0.2

    core = min(os.sched_getaffinity(0))
    other = subprocess.Popen(["sh", "-c", "while :; do :; done"], preexec_fn=lambda: os.sched_setaffinity(0, {core}))
    try:
        for _ in range(10):  # again where somebody else has stopped one of the two meanwhile
            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
            if as_expected():
                break
    finally:
        other.kill()
        other.wait()
    if device.seconds_waited() is None:
        pytest.skip("this system does not tell how long a thread waited")
    assert as_expected(), found


def test_a_process_that_is_stopped_sees_it() -> None:
    if device.seconds_waited() is None:
        pytest.skip("this system does not tell how long a thread waited")
    code = """
from megatron.preflight.measure.device import host_speed
from tests.preflight.measure.allocation import throttle
throttle()
print(host_speed(1.0)["stopped"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert 0.4 < float(done.stdout) < 1, done.stderr


def test_a_slower_process_counts_less() -> None:
    found = device.host_speed(0.2)
    assert found["host_gflops"] > 0.1
    assert found["host_copy_gb_per_s"] > 0.1
    assert found["waited"] >= 0


def test_a_device_that_does_not_answer_ends_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "answers", lambda device: time.sleep(120))
    start = time.monotonic()
    found = device.measure_device(torch.device("cpu"), 0.1, 0.3)
    assert time.monotonic() - start < 90
    assert found["error"] == "the device gave no answer within 0.3 s"


def test_a_device_that_computes_wrongly_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.answers(torch.device("cpu")) == ""
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: ones(*shape, **options).fill_(1.5))
    found = device.measure_device(torch.device("cpu"), 0.1, 200.0)
    assert "computes wrongly: the sum of a product of ones is 3.77487e+07, not 16777216" in found["error"]


def test_only_variables_that_are_set_are_told() -> None:
    assert device.shown({"ROCR_VISIBLE_DEVICES": "", "OTHER": "1"}) == {"ROCR_VISIBLE_DEVICES": ""}


def test_a_system_without_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.seconds_waited(str(tmp_path / "absent")) is None
    monkeypatch.setattr(device, "seconds_waited", lambda: None)
    _, shares = device.repeated(lambda: time.sleep(0.01), 0.1)
    assert shares.stopped == pytest.approx(0)
