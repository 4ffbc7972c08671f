"""This process on its node: its device, cores, malloc and fused kernels.

glibc's malloc is set to keep the memory that a training step frees. By default it returns large
blocks to the system as soon as they are free, and the next tensor of that size gets new pages, each
of which the kernel clears when it is first touched. A training step frees and allocates the same
sizes over and over: on a CPU this costs between a few per cent and half of the step's time.

Huge pages are turned off: in a heap that keeps its blocks, even the smallest block in a gap would
hold 2 MiB, and processes grew to three to five times the size of their tensors.

mallopt(3) and prctl(2) change the settings in the running process. The user's settings take
precedence: if a variable for malloc is set or a library is preloaded, malloc is left unchanged.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.kernels import choose, library, measured_times
from megatron.parallel import collectives
from megatron.parallel.host_processes import release_free_memory
from megatron.parallel.launch import Launch
from megatron.parallel.process_descriptions import compare
from megatron.parallel.topology import Topology

# The parameter numbers of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
# Blocks up to this size come from the heap and stay in it: activations and the logits of a chunk of
# tokens. Larger ones are flat buffers, allocated once; in the heap they would only leave gaps.
# GPT-2 124M in bf16 with sequence length 512 peaks at 3,067 MiB with glibc's own rules, at 3,069 if
# blocks up to 32 MiB are kept, and at 3,105 if blocks up to 1 GiB are. The second value is for
# glibc before 2.35, which accepts no size above half of its HEAP_MAX_SIZE.
KEEP_BLOCKS_BYTES = (256 << 20, 32 << 20)
# The free end of the heap is never returned: its blocks change in every step. A process keeps the
# most memory that its blocks of these sizes ever took, because the next step needs it again; this
# memory does not grow from step to step.
_NEVER_TRIM = -1
# While a model is set up, blocks of at least this size are mapped one by one.
_SET_UP_BLOCK_BYTES = 1 << 20
_DEFAULT_TOP_PAD = 128 << 10  # malloc.c, DEFAULT_TOP_PAD
_PR_SET_THP_DISABLE = 41  # linux/prctl.h
# with "1", torch requests huge pages for tensors of 2 MiB and more
_TORCH_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


# -- the device ------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """Return the name of the device; for a CPU, the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} thread(s) per process"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory held so far: by the device's allocator, or on a CPU by the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # ru_maxrss starts at the size of the parent process: used only if VmHWM is missing
    match = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(errors="replace"))
    return 1024 * (int(match[1]) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def reserved_memory_bytes(device: torch.device) -> int | None:
    """Return the most memory that the device's allocator has reserved, in use or not.

    Returns None on a CPU.
    """
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None


# -- cores -----------------------------------------------------------------------------------------


def share_cores(device: torch.device, local_world_size: int) -> str:
    """Give each process that computes on the CPU its share of the node's cores.

    Returns a line for the log. Otherwise every process would start a thread per core, and the
    threads would compete. All processes call this after they are connected. OMP_NUM_THREADS takes
    precedence, except for torchrun's 1. With a GPU, nothing changes. Processes are not bound to
    cores: srun and mpirun do that, and two runs on one node that both bind to its first cores would
    leave the other cores idle.
    """
    if device.type != "cpu":
        return (
            f"threads: {torch.get_num_threads()} per process, for the work that remains on the CPU"
        )
    allowed = os.sched_getaffinity(0)
    # On every rank, even if unused: environments may differ, and all ranks have to make the call.
    masks = (
        masks_on_this_node(allowed)
        if dist.is_initialized() and dist.get_world_size() > 1
        else [allowed] * local_world_size
    )
    # torchrun sets the variable to 1 if the user has not.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if os.environ.get("OMP_NUM_THREADS") and not by_torchrun:
        return f"threads: {torch.get_num_threads()} per process, from OMP_NUM_THREADS"
    # A process bound to separate cores uses all of them; processes with the same cores share them.
    threads = max(1, len(allowed) // masks.count(allowed))
    torch.set_num_threads(threads)
    return (
        f"threads: {threads} per process ({len(allowed)} core(s) allowed, {local_world_size} "
        "process(es) on the node)"
    )


def masks_on_this_node(allowed: set[int]) -> list[set[int]]:
    """Return the cores that each process on this node may use. All ranks call it."""
    everywhere: list[tuple[str, set[int]]] = [("", set())] * dist.get_world_size()
    dist.all_gather_object(everywhere, (socket.gethostname(), allowed))
    return [mask for host, mask in everywhere if host == socket.gethostname()]


# -- malloc ----------------------------------------------------------------------------------------


def tune_allocator() -> str:
    """Set malloc up for training on a CPU; return a line for the log.

    The line reports the changes, or why there are none. The settings apply to blocks allocated
    afterwards; repeated calls are harmless.
    """
    libc, reason = _malloc()
    if reason:
        return f"malloc: {reason}: unchanged"
    threshold = _set_first(libc, _M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES)
    _set_first(libc, _M_TRIM_THRESHOLD, (_NEVER_TRIM,))
    huge = os.environ.get(_TORCH_HUGE_PAGES) == "1"
    if not huge:
        libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    return (
        f"malloc: blocks up to {(threshold or 0) >> 20} MiB are kept, the heap does not shrink, "
        f"{f'huge pages as {_TORCH_HUGE_PAGES} says' if huge else 'no huge pages'}"
    )


@contextlib.contextmanager
def mapped_blocks() -> Iterator[None]:
    """Map blocks of 1 MiB and more individually inside the context.

    For set-up, after tune_allocator(). Weights and flat buffers stay until the end of the run, with
    short-lived copies between them. In a heap that keeps its blocks, the copies would leave gaps
    into which the activations of a step do not fit well. A mapping returns to the system when it is
    freed. At the end malloc has the settings of tune_allocator again, and free pages are returned.
    Does nothing if malloc must not be changed.
    """
    libc, reason = _malloc()
    if reason:
        yield
        return
    _set_first(libc, _M_MMAP_THRESHOLD, (_SET_UP_BLOCK_BYTES,))
    _set_first(libc, _M_TOP_PAD, (_DEFAULT_TOP_PAD,))
    release_free_memory()  # the free end of the heap is used before anything is mapped
    try:
        yield
    finally:
        release_free_memory()
        _set_first(libc, _M_MMAP_THRESHOLD, KEEP_BLOCKS_BYTES)


def _malloc() -> tuple[ctypes.CDLL, str]:
    """Return the C library, and why its malloc must not be changed; "" if it may be."""
    libc = ctypes.CDLL(None)
    environ = os.environ
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return libc, "the C library is not glibc"
    if environ.get("LD_PRELOAD"):
        return libc, f"LD_PRELOAD is {environ['LD_PRELOAD']}"
    if "glibc.malloc." in environ.get("GLIBC_TUNABLES", ""):
        return libc, f"GLIBC_TUNABLES is {environ['GLIBC_TUNABLES']}"
    sizes = ("MALLOC_MMAP_", "MALLOC_TRIM_", "MALLOC_TOP_")
    return libc, next((f"{name} is set" for name in environ if name.startswith(sizes)), "")


def _set_first(libc: ctypes.CDLL, parameter: int, values: tuple[int, ...]) -> int | None:
    """Set `parameter` to the first of `values` that malloc accepts; return that value."""
    return next(
        (v for v in values if libc.mallopt(ctypes.c_int(parameter), ctypes.c_int(v)) == 1), None
    )


# -- set-up of the process -------------------------------------------------------------------------


def set_up_host(config: Config, device: torch.device, launch: Launch) -> list[str]:
    """Set this process's threads, determinism and, on a CPU, malloc; return lines for the log."""
    lines = []
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        # filling uninitialized memory costs time and changes no result
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    if device.type == "cpu":
        tuned = config.training.allocator_tuning
        lines.append(tune_allocator() if tuned else "malloc: unchanged (--no-allocator-tuning)")
    return [share_cores(device, launch.local_world_size), *lines]


# -- fused kernels ---------------------------------------------------------------------------------


def agree_on_times(topology: Topology) -> None:
    """Let all ranks choose implementations by the times measured on rank 0's CPU."""
    if topology.world.size > 1 and topology.device.type == "cpu":
        measured_times.agree(collectives.broadcast_object(measured_times.find(), topology.world))


def check_kernels(config: Config, topology: Topology) -> None:
    """Raise ConfigError on every rank unless all ranks use the same fused kernels.

    Both the library and the choice of operators that use it are compared. Tensor-parallel ranks
    apply dropout to their copies of a tensor. The mask differs with and without kernels: if one
    rank lacked the library, the copies would drift apart unnoticed.
    """
    device = topology.device
    fusions = choose.choose_fusions(config.kernels, device, config.precision.dtype_name)
    local = {"fused kernels": library.fingerprint(device.type), **vars(fusions)}
    if problem := compare({"kernels": local}, topology.world):
        lines = collectives.gather_objects(library.find(device.type).line, topology.world)
        raise ConfigError(
            "the ranks have different fused kernels, and with them different dropout masks: "
            f"{problem}. The ranks report: {'; '.join(dict.fromkeys(lines))}. Build the library "
            "once, on a file system that all nodes share (python setup.py build_kernels), or set "
            f"{library.OVERRIDE}=none for all ranks"
        )
