"""Energy used by this node, if the system reports it.

- Cray's pm_counters, /sys/cray/pm_counters/energy: the whole node. The file has one line,
  "123 J 456 us": the energy since the node started, and the time of the reading (docs.cscs.ch,
  "Energy and power consumption"; Slurm's plugin acct_gather_energy/pm_counters). Where it exists,
  nothing else is read.
- RAPL, /sys/class/powercap/intel-rapl:*/energy_uj: Intel and AMD processors and their memory, where
  users may read the file. The counter is in microjoules and wraps to 0 after max_energy_range_uj
  (Linux, Documentation/power/powercap/powercap.rst).
- GPUs, through AMD's amdsmi (amdsmi_get_energy_count: a count and its unit in microjoules) or
  NVIDIA's pynvml (nvmlDeviceGetTotalEnergyConsumption: millijoules), if the Python package is
  installed.

The energy of other jobs on the node is included. If a counter wraps twice between two log lines,
as a RAPL counter may within half an hour, the figure is too low.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class Counter(NamedTuple):
    """An energy counter: the function that reads it, and the joules at which it wraps to 0."""

    read_j: Callable[[], float]
    range_j: float = math.inf


class EnergyMeter:
    """Reads the counters of this node.

    reads   whether this rank reads the counters: one rank per node does; the others report 0
    root    where sysfs is mounted
    load    function that imports a module
    source  names of the counters; "" if there are none
    """

    def __init__(
        self,
        reads: bool = True,
        root: Path = Path("/sys"),
        load: Callable[[str], Any] = importlib.import_module,
    ) -> None:
        self._counters: list[Counter] = [] if reads else [Counter(float)]
        self.source = ""
        sources = (
            ("Cray pm_counters", _cray(root)),
            ("RAPL", _rapl(root)),
            ("amdsmi", _amd(load)),
            ("NVML", _nvidia(load)),
        )
        for name, counters in sources if reads else ():
            # no such file, no permission, no driver: each raises a different exception
            with suppress(Exception):
                readable = [counter for counter in counters if counter.read_j() >= 0]
                if readable:
                    self._counters += readable
                    self.source += f"{', ' if self.source else ''}{name}"
            if self.source == "Cray pm_counters":  # it includes the others
                break
        self._before = self._read()

    def _read(self) -> list[float]:
        with suppress(Exception):
            return [counter.read_j() for counter in self._counters]
        return [math.nan] * len(self._counters)

    def used_j(self) -> float:
        """Return the joules used since the last call, or since creation; NaN if unknown."""
        before = self._before
        self._before = self._read()
        used = sum(
            now - then if now >= then else now - then + counter.range_j
            for now, then, counter in zip(self._before, before, self._counters, strict=True)
        )
        return used if self._counters and math.isfinite(used) else math.nan


def _number(path: Path, unit_j: float = 1.0) -> float:
    """Return the first number in a file, converted to joules."""
    return float(path.read_text().split()[0]) * unit_j


def _cray(root: Path) -> Iterator[Counter]:
    yield Counter(partial(_number, root / "cray/pm_counters/energy"))


def _rapl(root: Path) -> Iterator[Counter]:
    """Yield the counters of processor packages and, where separate, of their memory."""
    for zone in root.glob("class/powercap/intel-rapl:*"):
        name = (zone / "name").read_text()
        if name.startswith(("package", "dram")):
            largest = _number(zone / "max_energy_range_uj", 1e-6)
            yield Counter(partial(_number, zone / "energy_uj", 1e-6), largest)


def _amd(load: Callable[[str], Any]) -> Iterator[Counter]:
    library = load("amdsmi")
    library.amdsmi_init()

    def read_j(gpu: Any) -> float:
        reading = library.amdsmi_get_energy_count(gpu)
        # the older name of the count is "power"
        count = reading.get("energy_accumulator", reading.get("power"))
        return float(count * reading["counter_resolution"] * 1e-6)

    for gpu in library.amdsmi_get_processor_handles():
        yield Counter(partial(read_j, gpu))


def _nvidia(load: Callable[[str], Any]) -> Iterator[Counter]:
    library = load("pynvml")
    library.nvmlInit()

    def read_j(gpu: Any) -> float:
        return 1e-3 * float(library.nvmlDeviceGetTotalEnergyConsumption(gpu))

    for number in range(library.nvmlDeviceGetCount()):
        yield Counter(partial(read_j, library.nvmlDeviceGetHandleByIndex(number)))
