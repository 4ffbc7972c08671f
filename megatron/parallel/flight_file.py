"""The file of a node in which its ranks of one job keep their flight records, one page each.

It is in /dev/shm, which is memory, or else in the folder for temporary files. Once all ranks have met it needs no name
any more: every process keeps it open, and it is gone with the last of them, however that ends. Needs no torch.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import mmap
import os
import tempfile
from pathlib import Path

from megatron.parallel.flight import RECORD_BYTES, FlightRecorder, FlightState
from megatron.parallel.launch import Launch
from megatron.parallel.processes import process_state

_PAGE = max(RECORD_BYTES, mmap.ALLOCATIONGRANULARITY)


def file_name(launch: Launch) -> str:
    """The same for all ranks of a job on a node, and for no other job of this user on this host at the same time."""
    told = hashlib.sha256(os.fsencode(f"{launch.master_port}-{launch.job}-{launch.node}"))
    return f"megatron-{os.getuid()}-{told.hexdigest()[:32]}.flight"


class FlightFile:
    """This process's page of the node's file, still without its description, and a view of all others. Where no file
    can be made, no rank sees another's page."""

    def __init__(self, launch: Launch, folder: Path | None = None) -> None:
        if folder is None:
            shared = Path("/dev/shm")
            folder = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        self._path, start = folder / file_name(launch), launch.local_rank * _PAGE
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            # Memory that is promised only would end the process with a bus error when there is none.
            os.posix_fallocate(self._fd, start, _PAGE)
        except OSError:
            self._fd = os.memfd_create(self._path.name)
            os.posix_fallocate(self._fd, start, _PAGE)
        self._memory = mmap.mmap(self._fd, _PAGE, offset=start)
        self._memory[:] = bytes(_PAGE)  # a job that was killed while its ranks met may have left the file
        self.recorder = FlightRecorder(self._memory)
        self._named = True

    def unlink(self) -> None:
        """Remove the file's name, when all ranks of the node have it open. Harmless when called twice."""
        if self._named:
            self._named = False
            self._path.unlink(missing_ok=True)

    def states(self) -> list[FlightState]:
        """The records of all ranks of this node, in the order of their local ranks."""
        size = os.fstat(self._fd).st_size
        pages = (os.pread(self._fd, RECORD_BYTES, start) for start in range(0, size, _PAGE))
        found = (FlightState.read(page) for page in pages if len(page) == RECORD_BYTES)
        return [dataclasses.replace(s, process=process_state(s.pid, s.process_start)) for s in found if s is not None]

    def close(self) -> None:
        """Take this rank's record out. Harmless when called twice."""
        if self._memory.closed:
            return
        self.unlink()
        self.recorder.detach()
        self._memory[:] = bytes(_PAGE)
        with contextlib.suppress(BufferError):  # another thread writes into it at this moment
            self._memory.close()
        os.close(self._fd)
