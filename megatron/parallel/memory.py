"""Host memory between the phases of a run."""
from __future__ import annotations

import ctypes
import sys


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
