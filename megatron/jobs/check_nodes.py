"""Test the nodes of an allocation before a training starts: `tools/preflight.py measure` under srun.

Every process multiplies matrices and copies memory on its device. Processes of nodes whose devices are sound then
all-reduce with the other ranks of their node, and with their counterparts on the two neighbouring nodes. Each leaves
what it found in the store that rank 0 serves. Ranks are expected in blocks, one for each node. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.errors import ConfigError, LaunchError, LostRankError, MegatronError
from megatron.parallel.launch import Launch, detect_launch, expand_hosts, select_device
from megatron.parallel.placing import Placing
from megatron.parallel.processes import bounded
from megatron.parallel.store import StoreConnection, host_name_is_local, without_dns
from megatron.planner.cluster import Cluster, load_cluster

EXIT_BAD_NODES = 4
_MARGIN_S = 5.0
_FAILURES = (RuntimeError, MegatronError, OSError, ValueError)


class Figure(NamedTuple):
    """A measurement of a device: slow below `share` of the median. band: the least of a healthy node, by its name in
    the cluster file."""

    what: str
    share: float
    band: str = ""


FIGURES = {
    "product": Figure("matrix product, TFLOP/s", 0.75, "gemm_tflops"),
    "copy": Figure("copy in device memory, GB/s", 0.75, "copy_gb_per_s"),
    "drive": Figure("free on the node's drive, GiB", 0.5),
    "within": Figure("all-reduce within the node, GB/s", 0.5, "allreduce_node_gb_per_s"),
    "between": Figure("all-reduce with a neighbouring node, GB/s", 0.5, "neighbour_gb_per_s"),
}


# -- one process -------------------------------------------------------------------------------------------------------


def median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of 20 calls: the same number on each member of a group."""
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def device_speeds(device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of a square product and GB/s, read and written, of a copy.

    The product is 8192 wide in fp16 on a GPU, 384 wide in fp32 on a CPU. Raises RuntimeError for a wrong result.
    """
    size, length, dtype = (8192, 2**30, torch.float16) if device.type == "cuda" else (384, 2**24, torch.float32)
    ones = torch.ones(size, size, device=device, dtype=dtype)
    source = torch.zeros(length, device=device, dtype=torch.uint8)
    product, target = torch.empty_like(ones), torch.empty_like(source)
    product_s = median_seconds(lambda: torch.mm(ones, ones, out=product), device)
    if (product != size).any():
        raise RuntimeError(f"a product of ones has entries from {product.min():g} to {product.max():g}, not {size}")
    copy_s = median_seconds(lambda: target.copy_(source), device)
    return {"product": 2 * size**3 / product_s / 1e12, "copy": 2 * length / copy_s / 1e9}


class Stores(StoreConnection):
    """Connections to the store that rank 0, or the launcher, serves."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        super().__init__(launch, timedelta(seconds=seconds))
        bounded(lambda: self.open(seconds), seconds + _MARGIN_S)


class Process:
    """One process's measurements: figures by name (FIGURES), and errors by the step that failed."""

    def __init__(self, launch: Launch, stores: Stores, seconds: float) -> None:
        """`seconds`: of each step."""
        self.launch, self._stores, self._seconds = launch, stores, seconds
        self._store = stores.another()
        self._device = torch.device("cpu")
        self._groups: list[Any] = []  # kept to the end: closing one waits for its other members
        self.figures: dict[str, float] = {}
        self.errors: dict[str, str] = {}

    def told(self) -> str:
        """What rank 0 has to know, as JSON."""
        device = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        found = {"host": self.launch.node, "device": device, "figures": self.figures, "errors": self.errors}
        return json.dumps(found)

    def measure_device(self, backend: str | None, cluster: Cluster | None) -> None:
        """Multiply and copy on this process's device, and look at the node's drive."""

        def work() -> dict[str, float]:
            placing = Placing(local_order=cluster.local_order) if cluster else None
            device = self._device = select_device(self.launch, backend, placing)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            drive = os.path.expandvars(cluster.nvme_path) if cluster else ""
            free = {"drive": shutil.disk_usage(drive).free / 2**30} if os.path.isdir(drive) else {}
            return free | device_speeds(device)

        self._step("device", work, time.monotonic() + self._seconds)

    def meet(self, nodes: Sequence[int]) -> None:
        """All-reduce within this node, then with both neighbours in the ring of `nodes`, of which this is one.

        The better of both speeds counts, so that a bad node spoils nobody else's figure. An odd ring takes three
        rounds, in each of which one node is left out. The deadlines of all rounds are counted from the beginning: a
        process that waited in vain still has its full time in the next round.
        """
        each, rank = self.launch.local_world_size, self.launch.rank
        deadline = time.monotonic() + self._seconds
        self._all_reduce("within", f"{rank // each}", rank % each, each, deadline)
        for number in range(0 if self.errors else 2 + len(nodes) % 2):
            deadline += self._seconds
            pair, place = divmod((nodes.index(rank // each) - number) % len(nodes), 2)
            if 2 * pair + 1 < len(nodes):
                self._all_reduce("between", f"{number}/{pair}/{rank % each}", place, 2, deadline)
        if "between" in self.figures:
            self.errors.pop("between", None)

    def _all_reduce(self, figure: str, name: str, place: int, size: int, deadline: float) -> None:
        def work() -> dict[str, float]:
            speed = self._bandwidth(f"{figure}/{name}", place, size)
            return {figure: max(speed, self.figures.get(figure, 0.0))}

        if size > 1:
            self._step(figure, work, deadline)

    def _step(self, name: str, work: Callable[[], dict[str, float]], deadline: float) -> None:
        try:
            self.figures |= bounded(work, max(deadline - time.monotonic(), 0.0), "it did not end")
        except _FAILURES as error:
            self.errors[name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            with contextlib.suppress(*_FAILURES):
                bounded(self._give_up_group, _MARGIN_S)

    def _give_up_group(self) -> None:
        """Free the connection and the device, which the last group may still be using, for the next one."""
        self._store = self._stores.another()
        if self._device.type == "cuda" and self._groups:
            self._groups[-1].abort()

    def _bandwidth(self, name: str, place: int, size: int) -> float:
        """Return the GB/s of an all-reduce over a new group: in a ring each rank sends and receives 2 (n - 1) / n of
        its bytes. Raises RuntimeError."""
        device, store = self._device, dist.PrefixStore(name, self._store)
        group: Any
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(minutes=30)  # its watchdog would end the process
            group = dist.ProcessGroupNCCL(store, place, size, options)
        else:
            group = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=self._seconds))
        self._groups.append(group)
        length = 2**28 if device.type == "cuda" else 2**20
        tensor = torch.full((length // 4,), float(place + 1), device=device)
        group.allreduce([tensor]).wait()
        if (sums := {tensor[0].item(), tensor[-1].item()}) != {size * (size + 1) / 2}:
            raise RuntimeError(f"the sum of 1 to {size} is {sums}")
        tensor.zero_()
        seconds = median_seconds(lambda: group.allreduce([tensor]).wait(), device)
        return 2 * (size - 1) / size * length / seconds / 1e9


# -- all of them -------------------------------------------------------------------------------------------------------


class Verdict:
    """What the processes found, judged.

    faults   of hosts, which are to be left out; general: of the whole allocation, where no host can be blamed
    figures  name (FIGURES) -> rank -> value
    """

    def __init__(self, found: Mapping[int, Mapping[str, Any]], hosts: Sequence[str], cluster: Cluster | None) -> None:
        """`found`: what each process told, by rank; `hosts`: that of each rank, in the order of the allocation."""
        self._hosts, self._cluster = hosts, cluster
        self._device = next((told["device"] for told in found.values()), "cpu")
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.general = ""
        self.figures: dict[str, dict[int, float]] = {}
        for rank in range(len(hosts)):
            errors = found[rank]["errors"] if rank in found else {"process": "it did not come, died or hangs"}
            for step in errors.keys() - {"between"}:
                self._accuse(rank, f"{step}: {errors[step]}")
        for name in FIGURES:
            self._judge(name, {rank: told["figures"][name] for rank, told in found.items() if name in told["figures"]})
        alone = {rank: told["errors"]["between"] for rank, told in found.items() if "between" in told["errors"]}
        if "between" in self.figures:
            for rank, text in alone.items():
                self._accuse(rank, f"no all-reduce with a neighbouring node succeeds: {text}")
        elif alone and not self.faults:
            self.general = f"no node reaches another one: {next(iter(alone.values()))}"

    @property
    def good(self) -> list[str]:
        """Hosts to use; none where the fault is nobody's."""
        return [] if self.general else [host for host in dict.fromkeys(self._hosts) if host not in self.faults]

    def _accuse(self, rank: int, text: str) -> None:
        self.faults[self._hosts[rank]].append(f"rank {rank}: {text}")

    def _judge(self, name: str, values: dict[int, float]) -> None:
        """Accuse slow ranks: far below the median, or below the machine's band where most ranks are not. On a CPU
        speeds tell who got a core when, and nobody is accused."""
        if not values:
            return
        self.figures[name] = values
        figure, half = FIGURES[name], statistics.median(values.values())
        if self._device == "cpu":
            return
        least = half * figure.share
        if self._cluster and self._cluster.device.split()[0] in self._device:
            low = self._cluster.bands.get(figure.band, 0.0)
            least = max(least, low if low <= half else 0.0)
        for rank, value in values.items():
            if value < least:
                self._accuse(rank, f"{figure.what}: {value:.3g}, expected at least {least:.3g} (median {half:.3g})")

    def lines(self) -> Iterator[str]:
        """Say what was found, for people."""
        for name, values in self.figures.items():
            slowest = min(values, key=values.__getitem__)
            low, half, high = (f(values.values()) for f in (min, statistics.median, max))
            where = f"{self._hosts[slowest]}, rank {slowest}"
            yield f"{FIGURES[name].what}: {low:.3g} to {high:.3g}, median {half:.3g}; lowest on {where}"
        yield from (f"FAULT {host} {text}" for host, texts in self.faults.items() for text in texts)
        if self.general:
            yield f"FAULT {self.general}"
        yield f"{len(self.good)} of {len({*self._hosts})} nodes are good"
        if self.faults:
            yield f"--exclude={','.join(self.faults)}"


def rank_hosts(launch: Launch, found: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return each rank's host: as a process there says, else as Slurm's list of nodes has it."""
    each = launch.local_world_size
    names = dict(enumerate(expand_hosts(os.environ.get("SLURM_STEP_NODELIST") or "node")))
    names |= {rank // each: told["host"] for rank, told in found.items()}
    return [names.get(rank // each, f"node {rank // each}") for rank in range(launch.world_size)]


def run(args: argparse.Namespace) -> int:
    """Take part as one process; rank 0 prints the verdict and returns it as exit code."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a wait that is repeated is no news
    launch = detect_launch()
    cluster = None if args.cluster == "none" else load_cluster(args.cluster)
    if launch.rank == 0 and args.out is not None:
        _write_hosts(args.out, [], [])  # those of an earlier start are out of date
    if launch.on_one_node and not host_name_is_local():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog would end the process
    arrival_s, work_s = 2 * args.seconds, 4 * args.seconds + _MARGIN_S
    try:
        stores = Stores(launch, arrival_s)
        process = Process(launch, stores, args.seconds)
        process.measure_device(args.backend, cluster)
        found = _exchange(stores.store, process, arrival_s, work_s)
    except (RuntimeError, LaunchError) as error:
        if launch.rank == 0:
            raise
        raise LostRankError(f"rank 0 did not come, died or hangs: {str(error).splitlines()[0]}") from error
    if launch.rank:
        return 0
    verdict = Verdict(found, rank_hosts(launch, found), cluster)
    print(*verdict.lines(), sep="\n")
    if args.out is not None:
        _write_hosts(args.out, [*verdict.faults], verdict.good)
    return EXIT_BAD_NODES if verdict.faults or verdict.general else 0


def _exchange(store: Any, process: Process, arrival_s: float, work_s: float) -> dict[int, dict[str, Any]]:
    """Measure the network between the nodes whose devices are sound; return, on rank 0, what each process told."""
    rank, size, each = process.launch.rank, process.launch.world_size, process.launch.local_world_size
    store.set(f"device/{rank}", process.told())
    came = dict[int, dict[str, Any]]()
    if rank == 0:
        with without_dns():  # the store asks for the name of each process that connects
            came = _answers(store, "device", range(size), arrival_s)
        bad = {other // each for other in range(size) if other not in came or came[other]["errors"]}
        store.set("nodes", json.dumps([node for node in range(-(-size // each)) if node not in bad]))
    _await_key(store, "nodes", work_s)
    nodes = json.loads(store.get("nodes"))
    if rank // each in nodes:
        process.meet(nodes)
    store.set(f"told/{rank}", process.told())
    found = dict[int, dict[str, Any]]()
    if rank == 0:
        found = _answers(store, "told", came, work_s)
        store.set("end", b"")
    with contextlib.suppress(RuntimeError, LaunchError):  # rank 0 has what it needs
        _await_key(store, "end", work_s)  # a group ends with its first member
    return found


def _answers(store: Any, kind: str, ranks: Iterable[int], seconds: float) -> dict[int, dict[str, Any]]:
    """What the ranks told within so many seconds."""
    deadline = time.monotonic() + seconds
    found = {}
    for rank in ranks:
        key, left = f"{kind}/{rank}", deadline - time.monotonic()
        with contextlib.suppress(RuntimeError):
            if left > 0:
                store.wait([key], timedelta(seconds=left))
        if store.check([key]):
            found[rank] = json.loads(store.get(key))
    return found


def _await_key(store: Any, key: str, seconds: float) -> None:
    """Wait for a key; a host that lost power never answers."""
    bounded(lambda: store.wait([key], timedelta(seconds=seconds)), seconds + _MARGIN_S)


def _write_hosts(folder: Path, bad: Sequence[str], good: Sequence[str]) -> None:
    """Write the files bad_hosts and good_hosts, a host a line. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, hosts in (("bad_hosts", bad), ("good_hosts", good)):
            (folder / name).write_text("".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}: name another folder") from error
