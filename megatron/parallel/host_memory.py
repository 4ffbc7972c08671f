"""Host memory: the limit of this machine or job, and how much of it is available."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Files of a memory controller: its folder, and its limit and use in bytes."""

    folder: str
    limit: str
    used: str
    inactive: str  # the name in memory.stat of file pages that are soon given back


_CGROUPS = {
    "": _Files("", "memory.max", "memory.current", "inactive_file"),
    "memory": _Files(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
}
"""Files of the memory controller, by its name; "" for cgroup version 2."""


def _groups(membership: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folder of each group of this process, from the innermost, and its files' names."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers in _CGROUPS:
            files = _CGROUPS[controllers]
            folder = root / files.folder / path.lstrip("/")
            for level in (folder, *folder.parents):
                yield level, files


def memory_limit_bytes(membership: Path = _MEMBERSHIP, root: Path = _ROOT) -> int:
    """Return this machine's bytes of memory, or the lower limit of a job or container.

    Source: cgroups(7).
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, files in _groups(membership, root):
        with contextlib.suppress(OSError, ValueError):  # not visible on this machine, or "max"
            limits.append(int((folder / files.limit).read_text()))
    return min(limits)


def available_bytes(
    membership: Path = _MEMBERSHIP,
    root: Path = _ROOT,
    information: Path = Path("/proc/meminfo"),
) -> int:
    """Return how much memory can still be taken on this machine, in this job or container.

    Sources: proc_meminfo(5), cgroups(7).
    """
    total = re.search(r"MemAvailable:\s+(\d+) kB", information.read_text())
    left = [memory_limit_bytes(membership, root) if total is None else int(total[1]) << 10]
    for folder, files in _groups(membership, root):
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / files.limit).read_text())
            used = int((folder / files.used).read_text())
            statistics = (folder / "memory.stat").read_text()
            inactive = re.search(rf"^{files.inactive} (\d+)$", statistics, re.MULTILINE)
            left.append(limit - used + (int(inactive[1]) if inactive else 0))
    return max(min(left), 0)


def machine_number() -> int:
    """Return a number that processes have in common if they share a machine's memory."""
    identity = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return int(identity[:15], 16)
