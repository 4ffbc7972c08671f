"""Tells glibc's malloc to keep the memory that a training step frees, for the next one to take.

By default malloc gives large blocks back to the system as soon as they are free, and the next tensor of that size gets
pages that are new: the kernel has to clear each of them when it is first touched. A training step frees and takes the
same sizes over and over, so on a CPU this costs between a few per cent and half of its time, with the kernel.

The settings are made in the running process by mallopt(3), and for huge pages by the variable that torch's allocator
looks at. Nothing is executed anew: files, pid, signals and the launcher's connections stay as they are, it works in a
notebook as in a job, and with a glibc that knows no glibc.malloc.hugetlb (before 2.35). What the user has set wins.
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
_INT_MAX = 2**31 - 1  # mallopt takes an int, the environment more
# torch >= 2.2 asks for huge pages for its tensors of 2 MiB and more when this is "1".
_TORCH_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# What malloc reads from the environment, by parameter: (tunable, older variable).
_USER_SETTINGS = {
    _M_MMAP_THRESHOLD: (
        ("glibc.malloc.mmap_threshold", "MALLOC_MMAP_THRESHOLD_"), ("glibc.malloc.mmap_max", "MALLOC_MMAP_MAX_"),
    ),
    _M_TRIM_THRESHOLD: (("glibc.malloc.trim_threshold", "MALLOC_TRIM_THRESHOLD_"),),
    _M_TOP_PAD: (("glibc.malloc.top_pad", "MALLOC_TOP_PAD_"),),
}  # fmt: skip


def tune_allocator(environ: MutableMapping[str, str] | None = None, libc: Any = None) -> str:
    """Set malloc up for training on a CPU; returns a line for the log that says what was done, or why nothing was.

    Works before and after torch is imported, and as often as it is called: the settings hold for blocks that are
    allocated afterwards. Huge pages come only where the process has made no tensor before: torch looks once. Does
    nothing where malloc is not glibc's, as with a preloaded jemalloc. `environ` is os.environ and `libc` the C library
    of the process; tests give others.
    """
    environ = os.environ if environ is None else environ
    libc = ctypes.CDLL(None) if libc is None else libc
    reason = _not_ours(libc)
    if reason is not None:
        return f"{reason}: left as it is"
    kept, done = [], []
    for parameter, values in ((_M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES), (_M_TRIM_THRESHOLD, (_NEVER_TRIM,))):
        by_user = _set_by_user(parameter, environ)
        if by_user is not None:
            kept.append(by_user)
            continue
        taken = _first_taken(libc, parameter, values)
        if taken is not None:
            block = f"blocks up to {taken >> 20} MiB are kept"
            done.append(block if parameter == _M_MMAP_THRESHOLD else "the heap does not shrink")
    if "glibc.malloc.hugetlb" in _tunables(environ):
        kept.append("glibc.malloc.hugetlb")
    elif environ.get(_TORCH_HUGE_PAGES, "1") != "1":
        kept.append(_TORCH_HUGE_PAGES)
    else:
        environ[_TORCH_HUGE_PAGES] = "1"
        done.append(f"huge pages {_system_huge_pages()}")
    line = f"{_glibc_version()} malloc: {', '.join(done) or 'left as it is'}"
    return line + (f"; as the environment says: {', '.join(kept)}" if kept else "")


@contextlib.contextmanager
def mapped_blocks(environ: MutableMapping[str, str] | None = None, libc: Any = None) -> Iterator[None]:
    """Within, blocks of a MiB and more come each from a mapping of its own; around tune_allocator()'s set-up of malloc.

    Weights and flat buffers stay to the end of the run, and between them are made copies that live for a moment. In a
    heap that keeps its blocks those would leave holes, cut into pieces by small objects, in which the activations of a
    step do not fit as well as in one piece. A mapping goes back to the system when it is free. At the end malloc is as
    tune_allocator or the user's environment has set it, up to 2 GiB, and free pages are given back.

    Nothing is done where malloc is not glibc's, or where a setting cannot be read and so could not be set back.
    """
    environ = os.environ if environ is None else environ
    libc = ctypes.CDLL(None) if libc is None else libc
    if _not_ours(libc) is not None:
        yield
        return
    try:
        before = {
            _M_MMAP_THRESHOLD: _value_of(_M_MMAP_THRESHOLD, environ, KEEP_BLOCKS_BYTES),
            _M_TOP_PAD: _value_of(_M_TOP_PAD, environ, (_DEFAULT_TOP_PAD,)),
        }
    except ValueError:
        yield
        return
    for parameter, value in ((_M_MMAP_THRESHOLD, SET_UP_BLOCK_BYTES), (_M_TOP_PAD, _DEFAULT_TOP_PAD)):
        libc.mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
    release_free_memory()  # what is free at the heap's end is taken before anything is mapped
    try:
        yield
    finally:
        release_free_memory()
        for parameter, values in before.items():
            _first_taken(libc, parameter, values)


def _first_taken(libc: Any, parameter: int, values: tuple[int, ...]) -> int | None:
    """Set `parameter` to the first of `values` that malloc takes; which that was."""
    return next((v for v in values if libc.mallopt(ctypes.c_int(parameter), ctypes.c_int(v)) == 1), None)


def _value_of(parameter: int, environ: MutableMapping[str, str], default: tuple[int, ...]) -> tuple[int, ...]:
    """What the environment sets `parameter` to, as an int of C; without that the default. ValueError: not a number."""
    tunable, variable = _USER_SETTINGS[parameter][0]
    tunables = dict(part.split("=", 1) for part in environ.get("GLIBC_TUNABLES", "").split(":") if "=" in part)
    given = tunables.get(tunable, environ.get(variable))
    return default if given is None else (min(int(given, 0), _INT_MAX),)


def _not_ours(libc: Any) -> str | None:
    """Why these settings would not reach the malloc of this process; None when they do."""
    version = _glibc_version()
    if version is None:
        return "the C library is not glibc"
    if not hasattr(libc, "mallopt"):
        return f"{version} without mallopt"
    owner = _file_of(libc, "malloc")
    # Both: a library that has a malloc of its own need not have a mallopt.
    if owner is not None and owner != _file_of(libc, "gnu_get_libc_version"):
        return f"malloc is that of {owner}"
    return None


def _glibc_version() -> str | None:
    """"glibc 2.36"; None for another C library."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or None
    except (ValueError, OSError, AttributeError):  # musl knows no such name, some systems no confstr
        return None


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("address", ctypes.c_void_p),
    )  # fmt: skip


def _file_of(libc: Any, name: str) -> str | None:
    """The file whose function this process calls by that name; None when it cannot be told."""
    if not hasattr(libc, "dladdr"):
        return None
    info = _SymbolInfo()
    found = libc.dladdr(ctypes.cast(getattr(libc, name), ctypes.c_void_p), ctypes.byref(info))
    return os.path.realpath(os.fsdecode(info.file)) if found and info.file else None


def _tunables(environ: MutableMapping[str, str]) -> list[str]:
    """The names that GLIBC_TUNABLES gives a value."""
    return [part.partition("=")[0] for part in environ.get("GLIBC_TUNABLES", "").split(":")]


def _set_by_user(parameter: int, environ: MutableMapping[str, str]) -> str | None:
    """The name under which the environment sets what `parameter` is about; None when it does not."""
    given = _tunables(environ)
    for tunable, variable in _USER_SETTINGS[parameter]:
        if tunable in given or variable in environ:
            return tunable if tunable in given else variable
    return None


def _system_huge_pages() -> str:
    """What the kernel makes of a wish for huge pages."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return "are off in the kernel" if "[never]" in file.read() else "on"
    except OSError:
        return "are unknown to the kernel"
