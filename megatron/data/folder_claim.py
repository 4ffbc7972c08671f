"""One program at a time writes to a folder.

The same script submitted twice would otherwise have two runs that overwrite and remove each other's files.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.data.file_lock import WAIT_S, FileLock
from megatron.errors import ConfigError

LOCK_NAME = ".in_use"


class FolderClaim:
    """This process's claim on a folder, from `take` to `release`.

    Where no lock is possible the claim is only a note.

    folder  is made where it is not there
    what    how messages call it, such as "--save FOLDER"
    wait_s  seconds to wait for a program on another host, whose node may have died unnoticed
    """

    def __init__(self, folder: Path, what: str, wait_s: float = WAIT_S) -> None:
        self._folder, self._what, self._wait_s = folder, what, wait_s
        self._lock = FileLock(folder / LOCK_NAME)

    def take(self, say: Callable[[str], object]) -> None:
        """Claim the folder. Raises ConfigError while another program has it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._lock.acquire_from_the_dead(lambda text: say(f" {text}"), self._wait_s):
                return
        except OSError as error:
            say(f" note: {self._what} cannot be locked ({error.strerror}): see that nothing else writes there")
            return
        raise ConfigError(
            f"{self._what} is in use by another run: {self._lock.describe()}. Wait for its end or stop it, or give "
            f"this run another folder"
        )

    def release(self) -> None:
        """Leave the folder to the next one. Harmless when called twice, and where nothing was claimed."""
        self._lock.release()
