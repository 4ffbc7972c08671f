"""SIGTERM, SIGUSR1 and SIGHUP as a wish to end, from the moment on that the program knows its settings.

Imports no torch: a signal may come while torch is imported.
"""
from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Signals:
    """Notes the signals of SIGNALS while it is entered, when `enabled`; without, they do what they did before.

    Only the first one counts: Slurm and people send several. SIGHUP, which a terminal or a connection sends when it
    closes, stays ignored where it was, as under nohup. Outside of the main thread, where Python lets nobody
    handle signals, nothing is noted.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.received = 0  # number of the signal, 0 for none
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Signals:
        if self.enabled and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
