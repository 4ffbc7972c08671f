"""What one process measures of its own device and its own core, without any other process.

The host's speed is counted against the time in which the process was allowed to run: Linux tells for each thread how
long it ran and how long it waited for a core (/proc/thread-self/schedstat, see sched-stats.rst of the kernel's
documentation). The rest of the time, in a loop that neither sleeps nor reads, somebody kept the thread from running: it
was stopped. So processes that share a core do not accuse each other, and one that is stopped most of the time is found.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.errors import LaunchError
from megatron.parallel.report import bounded, device_identity

VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

_HOST_SIZE = 384  # of the host's product: 113 million operations, some milliseconds of one core
_HOST_COPY = 16 * 2**20  # bytes: more than a core's caches
_GEMM_SIZE = 8192  # the product that MI250X figures were published for, in fp16
_COPY_BYTES = 2**30
_POLL_S = 0.0005
_LEAST_S = 0.05  # of a core, for a figure that does not hang on its clock
_LONGEST = 3.0


@dataclass(frozen=True)
class Shares:
    """Where a stretch of wall time went, in seconds."""

    wall: float
    ran: float
    waited: float  # for a core that others had

    @property
    def stopped(self) -> float:
        """The share of the time without waiting in which the thread did not run either."""
        return 1.0 - self.ran / self.owned

    @property
    def owned(self) -> float:
        """Wall time without the time that other processes had the core.

        A wait is counted when it ends, also the part of it before this stretch began: never less than the time it ran.
        """
        return max(self.wall - self.waited, self.ran, 1e-9)


def seconds_waited(path: str = "/proc/thread-self/schedstat") -> float | None:
    """Seconds that this thread waited for a core; None where the system does not tell."""
    try:
        return int(Path(path).read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def repeated(
    work: Callable[[], Any], seconds: float, *, clock: Callable[[], float] = time.monotonic,
    ran_s: Callable[[], float] = time.thread_time, waited_s: Callable[[], float | None] = seconds_waited,
) -> tuple[int, Shares]:
    """Do the work again and again for so long, longer where a core is shared by many; how often it was done, and where
    the time went.

    Without Linux's counters a thread is taken to have waited whenever it did not run: then sharing a core cannot be
    told from being stopped, and only slow cores are found.
    """
    work()
    before, cpu, start, count = waited_s(), ran_s(), clock(), 0
    while True:
        work()
        count += 1
        wall, ran = clock() - start, ran_s() - cpu
        if wall >= seconds and (ran >= _LEAST_S or wall >= _LONGEST * seconds):
            break
    after = waited_s()
    if before is None or after is None:
        return count, Shares(wall, ran, max(wall - ran, 0.0))
    return count, Shares(wall, ran, after - before)


def host_speed(seconds: float) -> dict[str, float]:
    """One thread's fp32 product in GFLOP/s and copy in GB/s (read and written), each per second of its own, and the
    share of that time in which the process was stopped."""
    torch.set_num_threads(1)  # holds for the thread that calls
    a, b, out = torch.ones(3, _HOST_SIZE, _HOST_SIZE).unbind()
    products, gemm = repeated(lambda: torch.mm(a, b, out=out), seconds * 0.75)
    source = torch.ones(_HOST_COPY, dtype=torch.uint8)
    target = torch.empty_like(source)
    copies, copy = repeated(lambda: target.copy_(source), seconds * 0.25)
    both = Shares(gemm.wall + copy.wall, gemm.ran + copy.ran, gemm.waited + copy.waited)
    return {
        "host_gflops": products * 2 * _HOST_SIZE**3 / gemm.owned / 1e9,
        "host_copy_gb_per_s": copies * 2 * _HOST_COPY / copy.owned / 1e9,
        "stopped": both.stopped,
        "waited": both.waited / both.wall,
    }


def finish(device: torch.device, limit_s: float) -> None:
    """Wait until the device has done all its work, but not for ever. Raises LaunchError."""
    if device.type != "cuda":
        return
    event, deadline = torch.cuda.Event(), time.monotonic() + limit_s
    event.record()
    while not event.query():
        if time.monotonic() > deadline:
            raise LaunchError(f"work on the device did not end within {limit_s:g} s")
        time.sleep(_POLL_S)


def answers(device: torch.device) -> str:
    """Let the device compute something whose result is known; what is wrong with it, or ""."""
    ones = torch.ones(256, 256, device=device)
    product = (ones @ ones).sum().item()
    return "" if product == 256.0**3 else f"the sum of a product of ones is {product:g}, not {256**3}"


def seconds_per_call(work: Callable[[], Any], device: torch.device, calls: int, limit_s: float) -> float:
    """Time of one call on a GPU: the median of five rounds."""
    work()
    finish(device, limit_s)
    rounds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        finish(device, limit_s)
        rounds.append(start.elapsed_time(end) / 1e3 / calls)
    return sorted(rounds)[2]


def device_speed(device: torch.device, limit_s: float) -> dict[str, float]:
    """fp16 product of 8192 in TFLOP/s, and copy inside the device's memory in GB/s (read and written)."""
    a = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=device, dtype=torch.float16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    gemm_s = seconds_per_call(lambda: torch.mm(a, b, out=out), device, 4, limit_s)
    source = torch.zeros(_COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = seconds_per_call(lambda: target.copy_(source), device, 8, limit_s)
    return {"gemm_tflops": 2 * _GEMM_SIZE**3 / gemm_s / 1e12, "copy_gb_per_s": 2 * _COPY_BYTES / copy_s / 1e9}


def shown(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that limit which devices this process sees, as far as they are set."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in VISIBLE if name in environ}


def measure_device(device: torch.device, host_s: float, limit_s: float) -> dict[str, Any]:
    """All of the above. "error" says what did not work; a device that hangs ends with the limit."""
    found: dict[str, Any] = {}

    def body() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            properties = torch.cuda.get_device_properties(device)
            found["device_name"] = properties.name
            found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["identity"] = device_identity(device)
        if wrong := answers(device):
            found["error"] = f"the device computes wrongly: {wrong}"
            return
        found["answers"] = True
        found.update(host_speed(host_s))
        if device.type == "cuda":
            found.update(device_speed(device, limit_s))

    try:
        bounded(body, limit_s, "the device gave no answer")
    except (RuntimeError, LaunchError) as error:
        return {**found, "error": str(error).splitlines()[0]}
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in found.items()}
