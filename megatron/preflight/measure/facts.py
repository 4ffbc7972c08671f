"""What one process finds out about its node: disks, memory, versions, error counters, its clock. Reads; writes only a
file of its own on each node-local disk, which it removes."""
from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

_CHUNK = 8 * 2**20
_REQUESTS = 8
_LOOKS = 20
_ROOT = Path(__file__).resolve().parents[3]


def disk_facts(folder: str, file_bytes: int = 64 * 2**20, seconds: float = 1.0) -> dict[str, Any]:
    """Free space in GiB and write speed in GB/s, to the disk and not to the page cache, of at most `file_bytes` within
    about `seconds`. Where the folder cannot be written, "error" says why."""
    found: dict[str, Any] = {}
    try:
        found["free_gib"] = round(shutil.disk_usage(folder).free / 2**30, 2)
        chunk, written = os.urandom(2**20) * (_CHUNK // 2**20), 0
        with tempfile.NamedTemporaryFile(dir=folder, prefix="megatron-preflight-") as file:
            start = time.monotonic()
            while written < file_bytes and time.monotonic() - start < seconds:
                written += file.write(chunk)
                file.flush()
                os.fdatasync(file.fileno())
            found["write_gb_per_s"] = round(written / (time.monotonic() - start) / 1e9, 4)
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error.strerror or error}"
    return found


def memory_facts(path: str = "/proc/meminfo") -> dict[str, float]:
    """Memory of the node in GiB; {} where the system does not tell."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = round(int(rest.split()[0]) / 2**20, 2)
    return found


def error_counters(root: str = "/sys") -> dict[str, int]:
    """Uncorrected memory errors since the drivers were loaded: of GPUs (amdgpu's RAS counter, a line "ue: N") and of
    the host (EDAC). Only files that are harmless to read, and only counts above 0."""
    found: dict[str, int] = {}
    for path in sorted(Path(root).glob("class/drm/card*/device/ras/umc_err_count")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(":")
                if name.strip() == "ue" and int(count):
                    found[path.parents[2].name] = int(count)
    for path in sorted(Path(root).glob("devices/system/edac/mc/mc*/ue_count")):
        with contextlib.suppress(OSError, ValueError):
            if count_ue := int(path.read_text()):
                found[path.parent.name] = count_ue
    return found


def git_revision(root: Path = _ROOT) -> str:
    """The commit that is checked out, read without git; "" where there is none."""
    try:
        head = (root / ".git" / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head[5:]
        loose = root / ".git" / name
        if loose.exists():
            return loose.read_text().strip()
        for line in (root / ".git" / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line.split()[0]
    except OSError:
        pass
    return ""


def code_version(root: Path = _ROOT) -> str:
    """The commit of a clone; of a copy without one, as jobs have on their nodes, a digest of our sources."""
    if revision := git_revision(root):
        return revision
    digest = hashlib.sha256()
    for path in sorted((root / "megatron").rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"sources {digest.hexdigest()[:16]}"


def library_digests(folder: Path = _ROOT / "megatron" / "kernels" / "lib") -> str:
    """One digest of our compiled kernels, or "none"."""
    files = sorted(path for path in folder.glob("*.so*") if path.is_file()) if folder.is_dir() else []
    if not files:
        return "none"
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """What has to be the same on all nodes, and "kernel", which only ought to be."""
    driver = ""
    with contextlib.suppress(OSError):
        driver = Path("/sys/module/amdgpu/version").read_text().strip()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rocm or cuda": str(torch.version.hip or torch.version.cuda or "none"),
        "GPU driver": driver or "unknown",
        "fused kernels": library_digests(),
        "megatron": code_version(),
        "kernel": platform.release(),
    }


class ClockServer:
    """Tells the time over UDP: one small thread of rank 0 answers all nodes."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="clock", daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                request, sender = self._socket.recvfrom(64)
                with contextlib.suppress(OSError):
                    self._socket.sendto(request + b" " + str(time.time_ns()).encode(), sender)

    def close(self) -> None:
        self._socket.close()


def clock_skew(host: str, port: int, seconds: float = 1.0) -> dict[str, float]:
    """{"skew_s": this clock minus the server's, "bound_s": how far that may be wrong}, or {} where no answer comes.

    The server's clock was read between our sending and receiving, hence at their midpoint to within half of the round
    trip (as in NTP, RFC 5905, section 8); the shortest of some round trips counts.
    """
    best: tuple[float, float] | None = None
    deadline = time.monotonic() + seconds
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            server = (socket.gethostbyname(host), port)
            for number in range(_REQUESTS):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                client.settimeout(min(left, 0.3))
                sent, start = time.time_ns(), time.perf_counter_ns()
                with contextlib.suppress(TimeoutError):
                    # A host with several addresses may answer from another one: what was asked tells an answer.
                    client.sendto(f"{os.getpid()}.{number}".encode(), server)
                    reply = client.recv(64).split()
                    trip = time.perf_counter_ns() - start
                    if reply[0] == f"{os.getpid()}.{number}".encode():
                        skew = sent + trip / 2 - int(reply[1])
                        best = min(best or (float("inf"), 0.0), (trip / 2e9, skew / 1e9))
    except OSError:
        return {}
    return {} if best is None else {"skew_s": round(best[1], 6), "bound_s": round(best[0], 6)}


_STEP_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_PORT")  # the same in all processes of a run
_RANK_VARIABLES = ("SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def find_process(rank: int, environ: Mapping[str, str] = os.environ, proc: str = "/proc") -> int | None:
    """The process on this node that the launcher started as this rank of our own run, or None: by the variables that it
    was given, which its owner may read."""
    name = next((name for name in _RANK_VARIABLES if name in environ), None)
    if name is None:
        return None
    wanted = {f"{name}={rank}"} | {f"{step}={environ[step]}" for step in _STEP_VARIABLES if step in environ}
    found = []
    for path in Path(proc).glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(path.read_bytes().decode(errors="replace").split("\0")):
                found.append(int(path.parent.name))
    return max(found, default=None)  # a shell that started it has a lower number


def process_state(
    process: int | None, seconds: float = 1.0, proc: str = "/proc", sleep: Callable[[float], None] = time.sleep
) -> tuple[str, float]:
    """(what has become of a process on this node, the share of looks at which it was stopped)."""
    words = {"D": "is blocked inside the system, as a hung driver or file system does it", "Z": "has ended"}
    if process is None:
        return "it has no process on its node", 0.0
    looks: list[str] = []
    for number in range(_LOOKS):
        try:
            looks.append(Path(proc, str(process), "stat").read_text().rpartition(")")[2].split()[0])
        except (OSError, IndexError):
            return f"process {process} {'has ended' if sys.platform == 'linux' else 'is in an unknown state'}", 0.0
        # Multiples of the golden ratio: what stops it at regular intervals must not meet with ours.
        sleep(2 * seconds / _LOOKS * (number * 0.6180339887 % 1))
    stopped = sum(look in "tT" for look in looks) / _LOOKS
    if stopped:
        return f"process {process} is stopped {stopped:.0%} of the time", stopped
    return f"process {process} {words.get(looks[-1], 'runs, but does not answer')}", 0.0


def node_facts(folders: Iterable[str], clock: tuple[str, int] | None) -> dict[str, Any]:
    """Everything about a node; one of its processes asks."""
    skew = clock_skew(*clock) if clock else {}
    return {
        **skew,
        "disks": {folder: disk_facts(folder) for folder in folders},
        "memory": memory_facts(),
        "errors": error_counters(),
        "versions": versions(),
    }
