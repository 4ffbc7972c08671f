"""Tells glibc's malloc to keep the memory that a training step frees, for the next one to take.

By default malloc gives large blocks back to the system as soon as they are free, and the next tensor of that size gets
pages that are new: the kernel has to clear each of them when it is first touched. A training step frees and takes the
same sizes over and over, so on a CPU this costs between a few per cent and half of its time, with the kernel.

The settings are made in the running process by mallopt(3), and for huge pages by the variable that torch's allocator
looks at. Nothing is executed anew: files, pid, signals and the launcher's connections stay as they are. What the user
has set wins: with a variable of malloc's, or a preloaded library, malloc is left as it is.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

from megatron.parallel.memory import release_free_memory

# The parameters of mallopt(3) as malloc.h numbers them.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
# Blocks up to this size come from the heap and stay in it: activations and the logits of a chunk of tokens. Larger
# ones are flat buffers, which are made once; in the heap they would only leave holes, and holes cost memory. GPT-2 124M
# in bf16, sequence 512, has its peak at 3,067 MiB by glibc's own rules, at 3,069 with blocks up to 32 MiB kept, and at
# 3,105 with those up to 1 GiB. (With the logits of all tokens at once, in buffers of 100 and 200 MiB, it was 3,094,
# 3,209 and 3,567.) glibc before 2.35 takes no size above half of its HEAP_MAX_SIZE, which is the second one here.
KEEP_BLOCKS_BYTES = (256 << 20, 32 << 20)
# The heap's free end is never given back: blocks come and go there in every step. So a process keeps the peak of its
# blocks of this size, which it needs again in the next step; this does not add up over steps or processes of a node.
_NEVER_TRIM = -1
# While a model is set up, blocks from this size on are mapped one by one.
SET_UP_BLOCK_BYTES = 1 << 20
_DEFAULT_TOP_PAD = 128 << 10  # malloc.c, DEFAULT_TOP_PAD
# torch >= 2.2 asks for huge pages for its tensors of 2 MiB and more when this is "1".
_TORCH_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


def tune_allocator(environ: MutableMapping[str, str] | None = None) -> str:
    """Set malloc up for training on a CPU; return a line for the log that says what was done, or why nothing was.

    Works before and after torch is imported, and as often as it is called: the settings hold for blocks that are
    allocated afterwards. Huge pages come only where the process has made no tensor before: torch looks once.
    """
    environ = os.environ if environ is None else environ
    libc, reason = _malloc(environ)
    if reason:
        return f"malloc: {reason}: left as it is"
    taken = _first_taken(libc, _M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES)
    _first_taken(libc, _M_TRIM_THRESHOLD, (_NEVER_TRIM,))
    huge = environ.setdefault(_TORCH_HUGE_PAGES, "1") == "1"
    return (
        f"malloc: blocks up to {(taken or 0) >> 20} MiB are kept, the heap does not shrink, huge pages "
        f"{'are asked for' if huge else f'are not asked for ({_TORCH_HUGE_PAGES})'}"
    )


@contextlib.contextmanager
def mapped_blocks(environ: MutableMapping[str, str] | None = None) -> Iterator[None]:
    """Give blocks of a MiB and more a mapping of their own inside; around what follows tune_allocator() at set-up.

    Weights and flat buffers stay to the end of the run, and between them are made copies that live for a moment. In a
    heap that keeps its blocks those would leave holes, cut into pieces by small objects, in which the activations of a
    step do not fit as well as in one piece. A mapping goes back to the system when it is free. At the end malloc is as
    tune_allocator has set it, and free pages are given back. Nothing is done where that leaves malloc alone.
    """
    libc, reason = _malloc(os.environ if environ is None else environ)
    if reason:
        yield
        return
    _first_taken(libc, _M_MMAP_THRESHOLD, (SET_UP_BLOCK_BYTES,))
    _first_taken(libc, _M_TOP_PAD, (_DEFAULT_TOP_PAD,))
    release_free_memory()  # what is free at the heap's end is taken before anything is mapped
    try:
        yield
    finally:
        release_free_memory()
        _first_taken(libc, _M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES)


def _malloc(environ: MutableMapping[str, str]) -> tuple[Any, str]:
    """Return the C library, and why its malloc is to be left alone, "" where it is not."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return libc, "the C library is not glibc"
    if environ.get("LD_PRELOAD"):
        return libc, f"LD_PRELOAD is {environ['LD_PRELOAD']}"
    if "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return libc, f"GLIBC_TUNABLES is {environ['GLIBC_TUNABLES']}"
    sizes = ("MALLOC_MMAP_", "MALLOC_TRIM_", "MALLOC_TOP_")
    return libc, next((f"{name} is set" for name in environ if name.startswith(sizes)), "")


def _first_taken(libc: Any, parameter: int, values: tuple[int, ...]) -> int | None:
    """Set `parameter` to the first of `values` that malloc takes; return which that was."""
    return next((v for v in values if libc.mallopt(ctypes.c_int(parameter), ctypes.c_int(v)) == 1), None)
