"""Reasons to stop, and that all ranks take the same decision."""
from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.parallel.topology import Layout, Topology
from megatron.training.stopping import StopRules
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

SINGLE = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))


def settings(**changes: Any) -> Any:
    values = dict(exit_interval=None, exit_duration_in_mins=None, exit_signal_handler=False, kill_switch_file=None)
    return SimpleNamespace(training=SimpleNamespace(**{**values, **changes}))


def test_no_rule_never_stops() -> None:
    assert all(StopRules(settings(), SINGLE).check(i) is None for i in range(1, 20))


def test_exit_interval() -> None:
    rules = StopRules(settings(exit_interval=5), SINGLE)
    assert [i for i in range(1, 12) if rules.check(i)] == [5, 10]


def test_duration_is_counted_from_the_beginning() -> None:
    now = [100.0]
    rules = StopRules(settings(exit_duration_in_mins=2), SINGLE, clock=lambda: now[0])
    now[0] += 119
    assert rules.check(1) is None
    now[0] += 2
    assert rules.check(2) == "exiting program after 2.02 minutes"


def test_kill_switch(tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    rules = StopRules(settings(kill_switch_file=str(switch)), SINGLE)
    assert rules.check(1) is None
    switch.touch()
    assert str(switch) in str(rules.check(2))


def test_signals_are_caught_only_inside_the_block_and_only_when_asked() -> None:
    before = signal.getsignal(signal.SIGTERM)
    rules = StopRules(settings(exit_signal_handler=True), SINGLE)
    with rules:
        os.kill(os.getpid(), signal.SIGTERM)
        assert rules.check(3) == "exiting program after receiving SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before
    with StopRules(settings(), SINGLE):
        assert signal.getsignal(signal.SIGTERM) is before


def stop_together(rank: int, switch: str) -> list[Any]:
    """A signal on rank 1 alone, then a file that only rank 0 may decide on."""
    topology = join()
    signalled = StopRules(settings(exit_signal_handler=True), topology)
    with signalled:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        seen = [signalled.check(1)]
    # Ranks look for different files: rank 0's answer must win over rank 1's own view.
    killed = StopRules(settings(kill_switch_file=switch if rank == 0 else os.devnull), topology)
    seen.append(killed.check(2))
    if rank == 0:
        Path(switch).touch()
    seen.append(killed.check(3) is not None)
    return seen


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    results = run_processes(2, stop_together, str(tmp_path / "stop"))
    assert results[0] == results[1] == ["exiting program after receiving SIGUSR1", None, True]
