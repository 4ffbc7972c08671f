"""The file of a node in which its ranks of one job keep their flight records, one page each.

It is in /dev/shm, which is memory, or else in the folder for temporary files. Every process holds a shared lock on it
for as long as it lives, so whoever gets an exclusive lock knows that all its processes are gone: the last one to close
removes it, and what killed jobs left behind is removed by the next job. Needs no torch.
"""
from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import tempfile
import zlib
from pathlib import Path

from megatron.parallel.flight import RECORD_BYTES, FlightRecorder, FlightState
from megatron.parallel.launch import Launch

_PAGE = max(RECORD_BYTES, mmap.ALLOCATIONGRANULARITY)
_LONGEST = 120  # characters of a name


def flight_folder() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def file_name(launch: Launch) -> str:
    """The same for all ranks of a job on a node, and for no other job of this user on this host at the same time."""
    told = f"{launch.master_port}-{launch.job}-{launch.node}"
    name = re.sub(r"[^\w.-]", "_", told)
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{zlib.crc32(os.fsencode(told)):08x}"
    return f"megatron-{os.getuid()}-{name}.flight"


class FlightFile:
    """This process's page of the node's file, and a view of all others."""

    def __init__(self, path: Path, slot: int) -> None:
        """Raises OSError when the file cannot be made."""
        self.path, self.slot = path, slot
        self._fd = _open_locked(path)
        try:
            # Memory that is promised only would end the process with a bus error when there is none.
            os.posix_fallocate(self._fd, slot * _PAGE, _PAGE)
            self._memory: mmap.mmap | None = mmap.mmap(self._fd, _PAGE, offset=slot * _PAGE)
        except BaseException:
            os.close(self._fd)
            raise
        self._memory[:] = bytes(_PAGE)
        self.recorder = FlightRecorder(self._memory)

    def states(self) -> list[FlightState]:
        """The records of all ranks of this node, in the order of their local ranks."""
        size = os.fstat(self._fd).st_size
        pages = (os.pread(self._fd, RECORD_BYTES, start) for start in range(0, size, _PAGE))
        found = (FlightState.read(page) for page in pages if len(page) == RECORD_BYTES)
        return [state for state in found if state is not None]

    def close(self) -> None:
        """Take this rank's record out; the last rank removes the file. Harmless when called twice."""
        if self._memory is None:
            return
        self.recorder.detach()
        self._memory[:8] = bytes(8)
        self._memory.close()
        self._memory = None
        with contextlib.suppress(OSError):
            _remove_if_unused(self._fd, self.path)
        os.close(self._fd)


def open_flight_file(launch: Launch, folder: Path | None = None) -> FlightFile | None:
    """This rank's page, still without its description; None where no file can be made: then no rank sees another's."""
    folder = folder or flight_folder()
    if launch.local_rank == 0:
        _remove_stale(folder, file_name(launch))
    try:
        return FlightFile(folder / file_name(launch), launch.local_rank)
    except OSError:
        return None


def _open_locked(path: Path) -> int:
    """The file with a shared lock; empty where all who wrote it are gone."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(fd, 0)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # somebody removed it before it was locked


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_if_unused(fd: int, path: Path) -> None:
    """Raises BlockingIOError where another process holds the file."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if _is_at(fd, path):
        path.unlink()


def _remove_stale(folder: Path, own: str) -> None:
    for path in folder.glob(f"megatron-{os.getuid()}-*.flight"):
        if path.name == own:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                _remove_if_unused(fd, path)
            finally:
                os.close(fd)
