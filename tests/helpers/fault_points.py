"""Named fault points: what a process does when it comes to a certain point of the code, chosen by the test.

The points are audit events (PEP 578). Python raises its own ("open", "os.rename", ...), and the library raises
"megatron.<room>.<point>" by sys.audit at the seams that have no such event: after a sync, between two phases of a
meeting, after a step. Nobody listens unless a test does, so that they cost nothing and need no switch.

    launch(2, arguments, arm={1: (strike, "megatron.run.step", 3, "kill")})    # rank 1 dies after its third step
"""
from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def on(event: str, act: Callable[..., object], nth: int = 1, containing: str = "") -> None:
    """Call act(*arguments of the event) when `event` comes for the nth time in this process, counted from 1.

    containing: only events count whose arguments, as text, contain this.
    """
    left = nth

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if name == event and left and (not containing or containing in " ".join(map(str, arguments))):
            left -= 1
            if not left:
                act(*arguments)

    sys.addaudithook(hook)


def strike(event: str, nth: int, what: str, containing: str = "") -> None:
    """Arm this process: "kill", "stop" or "terminate" it (a signal), let it "fail" (RuntimeError), make the system
    refuse ("full": OSError ENOSPC), or hold it until somebody writes to a FIFO ("hold:PATH")."""

    def act(*_: object) -> None:
        if what == "fail":
            raise RuntimeError(f"planted at {event}")
        if what == "full":
            raise OSError(28, "No space left on device")
        if what.startswith("hold:"):
            with open(what.removeprefix("hold:"), "rb") as gate:
                gate.read(1)
            return
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[what])

    on(event, act, nth, containing)
