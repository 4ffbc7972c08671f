"""Measured times of implementations on this kind of CPU, used to choose the fastest.

`tools/check_kernels.py --measure` measures them once and stores them next to the kernels' library,
in one file per kind of CPU, so that different nodes can share a folder. A file has one measurement
per number of threads; measurements with another torch or other kernels do not count. Without a
measurement, the defaults in choose.py apply. Nothing is measured during a run: with the same file,
every run makes the same choices.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron.config.parallel import TILE
from megatron.errors import KernelError
from megatron.kernels.build import LIBRARIES, written_atomically
from megatron.untrusted import read_json

OVERRIDE = "MEGATRON_KERNELS_MEASURED"
"""Environment variable: a different measurement file; "none": use the defaults."""

COMMAND = "python tools/check_kernels.py --measure"
"""The command that takes a measurement."""

_LIMIT_BYTES = 1 << 20
_NOISE = 1.03  # a default that takes at most this multiple of the fastest time is kept
_FLAGS = "amx asimd avx bf16 f16c fma i8mm sve".split()


@dataclass(frozen=True)
class MeasuredTimes:
    """A measurement, or its absence.

    seconds  time by case and implementation; empty: not measured
    threads  number of threads in use
    date     YYYY-MM-DD
    torch    version of torch
    kernels  target, architecture and source hash of the kernels' library
    reason   why there is no measurement; "" if there is one
    """

    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    threads: int = 0
    date: str = ""
    torch: str = ""
    kernels: str = ""
    reason: str = ""

    @property
    def line(self) -> str:
        """Return a line for the log."""
        if not self.seconds:
            return f"implementations on a CPU: defaults, {self.reason}"
        return (
            f"implementations on a CPU: the fastest of a measurement on {self.date} with "
            f"{self.threads} thread(s)"
        )

    def fastest(self, case: str, default: str, without: str = "") -> str:
        """Return a case's fastest implementation, not counting `without`.

        Return `default` if it is about as fast, or if the case was not measured.
        """
        times = {
            implementation: s
            for implementation, s in self.seconds.get(case, {}).items()
            if implementation != without
        }
        if not times:
            return default
        best = min(times, key=times.__getitem__)
        return default if times.get(default, math.inf) <= _NOISE * times[best] else best

    @functools.cached_property
    def _lengths(self) -> dict[str, list[int]]:
        """Return the lengths that were measured, by prefix."""
        by_prefix: dict[str, list[int]] = {}
        for case in self.seconds:
            prefix, _, length = case.rpartition(" ")
            if re.fullmatch("[1-9][0-9]{0,8}", length):
                by_prefix.setdefault(f"{prefix} ", []).append(int(length))
        return by_prefix

    def nearest(self, prefix: str, length: int) -> str:
        """Return the case with this prefix whose length is nearest to `length` by ratio.

        A case is named by prefix and length; "" if none was measured.
        """
        lengths = self._lengths.get(prefix)
        if not lengths:
            return ""
        near = min(lengths, key=lambda n: abs(math.log(max(length, 1) / n)))
        return f"{prefix}{near}"


def cpu() -> str:
    """Return the kind of this CPU: its name, model, and instruction sets that affect its speed."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    fields = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    lines = {name.strip(): value.strip() for name, _, value in fields}
    names = ("model name", "cpu family", "model", "CPU implementer", "CPU part")
    flags = sorted(
        flag
        for flag in lines.get("flags", lines.get("Features", "")).split()
        if any(word in flag for word in _FLAGS)
    )
    return ", ".join([*(lines[name] for name in names if lines.get(name)), " ".join(flags)])


def path() -> Path | None:
    """Return the file of this CPU's measurements, which need not exist; None for the defaults."""
    override = os.environ.get(OVERRIDE, "")
    if override:
        return None if override == "none" else Path(override)
    return LIBRARIES / f"measured-{hashlib.sha256(cpu().encode()).hexdigest()[:12]}.json"


_agreed: list[MeasuredTimes] = []


def find() -> MeasuredTimes:
    """Return the measurement for this process: the one set with `agree`, or else the file's."""
    return _agreed[0] if _agreed else _from_file()


def agree(one: MeasuredTimes) -> None:
    """Use another process's measurement from now on, so that all ranks of a job choose the same."""
    _agreed[:] = [one]


def forget() -> None:
    """Read the file again on next use."""
    _agreed.clear()
    _from_file.cache_clear()


@functools.cache
def _from_file() -> MeasuredTimes:
    """Return the measurement whose number of threads is nearest to this process's."""
    import torch

    from megatron.kernels import library

    file = path()
    if file is None:
        return MeasuredTimes(reason=f"{OVERRIDE} is none")
    if library.find("cpu").handle is None:
        return MeasuredTimes(reason="there are no kernels")
    if not os.path.exists(file):  # also if the path is too long for the system
        return MeasuredTimes(reason=f"not measured on this CPU ({file}): {COMMAND}")
    try:
        stored = read(file)
    except KernelError as error:
        return MeasuredTimes(reason=f"{error}: {COMMAND}")
    here = str(torch.__version__), library.find("cpu").build
    usable = [one for one in stored if (one.torch, one.kernels) == here]
    if not usable:
        return MeasuredTimes(reason=f"{file} is for another torch or other kernels: {COMMAND}")
    threads = torch.get_num_threads()
    return min(usable, key=lambda one: abs(math.log(one.threads / threads)))


def read(file: Path) -> list[MeasuredTimes]:
    """Return the measurements in a file. Raises KernelError if it is damaged."""
    entries = read_json(file, _LIMIT_BYTES, error=KernelError).get("measurements")
    if not isinstance(entries, list):
        raise KernelError(
            f"{file} has no list of measurements: it is damaged, or not the right file"
        )
    return [_checked(entry, file) for entry in entries]


def _checked(entry: object, file: Path) -> MeasuredTimes:
    """Return a measurement from a file after checking the type of each field."""
    problem = KernelError(f"{file} has a damaged measurement")
    if not isinstance(entry, dict):
        raise problem
    seconds = entry.get("seconds")
    threads = entry.get("threads")
    texts = [entry.get(name) for name in ("date", "torch", "kernels")]
    if not isinstance(seconds, dict) or type(threads) is not int or not 0 < threads < 1 << 16:
        raise problem
    if not all(isinstance(text, str) and re.fullmatch(r"[\w.+-]{0,64}", text) for text in texts):
        raise problem
    for case, times in seconds.items():
        if not isinstance(times, dict) or not all(
            _is_implementation(case, implementation) for implementation in times
        ):
            raise problem
        if not all(type(s) is float and 0.0 < s < math.inf for s in times.values()):
            raise problem
    return MeasuredTimes(seconds, threads, *map(str, texts))


def _is_implementation(case: str, implementation: str) -> bool:
    """Return whether a case may have this implementation: a name or a block length."""
    if "attention " not in case:
        return implementation in ("fused", "torch", "copied", "in place")
    return implementation == "torch" or (
        bool(re.fullmatch("[1-9][0-9]{1,3}", implementation)) and int(implementation) % TILE == 0
    )


def write(file: Path, one: MeasuredTimes) -> None:
    """Write a measurement to a file, which is replaced atomically.

    The measurement replaces one with the same number of threads; measurements for another torch or
    other kernels are dropped, and a damaged file is replaced. Raises KernelError if the file cannot
    be written.
    """
    try:
        earlier = read(file)
    except KernelError:
        earlier = []
    same = one.torch, one.kernels
    current = [
        other
        for other in earlier
        if (other.torch, other.kernels) == same and other.threads != one.threads
    ]
    entries = [dataclasses.asdict(each) for each in (*current, one)]
    for entry in entries:
        del entry["reason"]
    text = json.dumps({"cpu": cpu(), "measurements": entries}, indent=1) + "\n"
    try:
        with written_atomically(file) as partial:
            partial.write_text(text)
    except OSError as error:
        raise KernelError(
            f"cannot write {file}: {error.strerror}. Set {OVERRIDE} to another file for these "
            "times, now and in the environment of runs"
        ) from error
