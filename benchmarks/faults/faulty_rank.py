"""pretrain_gpt.py that kills itself with SIGKILL just before it opens, renames or removes its n-th file.

    FAULT_FOLDER=/path/of/checkpoints FAULT_MOMENT=17 FAULT_RANK=1 FAULT_LOG=moments.txt python faulty_rank.py ...

Between two such moments nothing changes on disk but the content of open files, so that they together are all moments
at which a kill can matter. Only files in FAULT_FOLDER count; FAULT_EVENT=os.rename counts renames alone. FAULT_LOG.R
gets a line for each moment of rank R, the last one is where the kill came. Ranks other than FAULT_RANK only count, and
so do all without FAULT_MOMENT.

FAULT_HOLD=iter_0000015: every rank waits before it touches a file of that name, until the file FAULT_GO is there.
"""
from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")


def arm(folder: str, moment: int, events: tuple[str, ...], log: int) -> None:
    """From now on count; kill before number `moment` (0 is the next one; below 0: never)."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in events or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.abspath(arguments[0])
        if not path.startswith(folder):
            return
        os.write(log, f"{event} {os.path.relpath(path, folder)}\n".encode())
        count += 1
        if count - 1 == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def hold(name: str, go: str) -> None:
    """Wait for the file `go` before files with `name` in their path are touched."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(arguments[0], str | os.PathLike) and name in os.fspath(arguments[0]):
            while not os.path.exists(go):
                time.sleep(0.01)

    sys.addaudithook(hook)


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    rank = os.environ.get("RANK", "0")
    moment = int(os.environ.get("FAULT_MOMENT", "-1")) if rank == os.environ.get("FAULT_RANK", "0") else -1
    only = os.environ.get("FAULT_EVENT")
    handle = os.open(f"{os.environ['FAULT_LOG']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    arm(os.path.abspath(os.environ["FAULT_FOLDER"]), moment, (only,) if only else EVENTS, handle)
    if "FAULT_HOLD" in os.environ:
        hold(os.environ["FAULT_HOLD"], os.environ["FAULT_GO"])
    runpy.run_path(str(root / "pretrain_gpt.py"), run_name="__main__")
