"""Host memory: free pages between the phases of a run, and numbers that a device sends."""
from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch


def release_free_memory() -> None:
    """Give the free pages of glibc's heap back to the system; nothing where the C library cannot.

    Phases with tensors of other sizes leave holes that the next phase cannot use. An allocator that is told to keep
    memory would count them to the process for good. To be called between phases: pages that are used again afterwards
    cost a fault each.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(ctypes.c_size_t(0))


class HostCopy:
    """Numbers of a device on their way to the host, which goes on; `read` waits until they are there, and for nothing
    that the device was given after them."""

    def __init__(self, x: torch.Tensor) -> None:
        self._copy = x.detach().to("cpu", non_blocking=True, copy=True)  # into page-locked memory
        self._arrived: Any = None
        if x.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers of a tensor [n]."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [x.item() for x in self._copy.unbind()]
