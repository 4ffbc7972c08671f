"""Test the nodes in an allocation before training (`tools/preflight.py measure`).

Every process multiplies matrices on its device. Processes on nodes whose devices work then
all-reduce within their node and with their counterparts on both neighbouring nodes. Each process
writes its figures and errors to rank 0's store, and rank 0 judges the nodes. Ranks must be in
contiguous blocks, one block per node. The collectives have not been run on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.errors import ConfigError, LaunchError, LostRankError
from megatron.parallel.environment import ask_slurm
from megatron.parallel.host_processes import bounded
from megatron.parallel.launch import Launch, detect_launch, select_device
from megatron.parallel.rank_mapping import RankMapping
from megatron.parallel.store import StoreConnection, host_name_is_local, without_dns
from megatron.planner.cluster import load_cluster

EXIT_BAD_NODES = 4
_MARGIN_S = 5.0

PRODUCT = "matrix product"
WITHIN = "all-reduce within the node"
BETWEEN = "all-reduce with a neighbouring node"
# For each measurement: unit, share of the median below which a rank counts as slow, and name of the
# measurement's lower bound in a cluster file.
FIGURES = {
    PRODUCT: ("TFLOP/s", 0.75, "gemm_tflops"),
    WITHIN: ("GB/s", 0.5, "allreduce_node_gb_per_s"),
    BETWEEN: ("GB/s", 0.5, "neighbour_gb_per_s"),
}


Results = Mapping[int, Mapping[str, Any]]
"""Host, device, figures and errors by rank."""


class Process:
    """A process in the test: its figures and errors, by step.

    A step may take at most `seconds`; the all-reduce between nodes has several rounds of that time.
    """

    def __init__(self, connection: StoreConnection, seconds: float) -> None:
        self.launch = connection.launch
        self._connection = connection
        self._seconds = seconds
        self._group_store = connection.another()
        self._device = torch.device("cpu")
        # kept until the end: destroying a group waits for its other members
        self._groups: list[Any] = []
        self.figures = dict[str, float]()
        self.errors = dict[str, str]()

    def multiply(self, backend: str | None, mapping: RankMapping | None) -> None:
        """Measure the TFLOP/s of a product of matrices of ones on the device; check the result."""

        def work() -> float:
            self._device = select_device(self.launch, backend, mapping)
            size, dtype = (
                (8192, torch.float16) if self._device.type == "cuda" else (384, torch.float32)
            )
            ones = torch.ones(size, size, device=self._device, dtype=dtype)
            product = torch.empty_like(ones)
            seconds = self._median_seconds(lambda: torch.mm(ones, ones, out=product))
            if (product != size).any():
                raise RuntimeError(
                    f"the result has entries from {product.min():g} to {product.max():g}, not "
                    f"{size}"
                )
            return 2 * size**3 / seconds / 1e12

        self._step(PRODUCT, work, time.monotonic() + self._seconds)

    def meet(self, nodes: Sequence[int]) -> None:
        """All-reduce within this node, then with both neighbours in the ring of `nodes`.

        Only the faster of the two results counts, so that a bad node does not affect its
        neighbours' figures. An odd ring takes three rounds, each of which leaves out one node. All
        deadlines are counted from the start, so that a process whose round timed out has its full
        time in the next round.
        """
        each = self.launch.local_world_size
        node, local = divmod(self.launch.rank, each)
        deadline = time.monotonic() + self._seconds
        if each > 1:
            self._step(WITHIN, partial(self._bandwidth, f"within/{node}", local, each), deadline)
        for number in range(0 if self.errors else 2 + len(nodes) % 2):
            deadline += self._seconds
            pair, member = divmod((nodes.index(node) - number) % len(nodes), 2)
            if 2 * pair + 1 < len(nodes):
                name = f"between/{number}/{pair}/{local}"
                self._step(BETWEEN, partial(self._bandwidth, name, member, 2), deadline)
        if BETWEEN in self.figures:
            self.errors.pop(BETWEEN, None)

    def exchange(self) -> Results:
        """Test the network between nodes whose devices work; return all figures on rank 0."""
        store = self._connection.store
        limit = timedelta(seconds=4 * self._seconds + _MARGIN_S)
        came = self.share(
            "device", range(self.launch.world_size), timedelta(seconds=2 * self._seconds)
        )
        store.wait(["device"], limit)
        nodes = json.loads(store.get("device"))
        if self.launch.rank // self.launch.local_world_size in nodes:
            self.meet(nodes)
        results = self.share("network", came, limit)
        with contextlib.suppress(RuntimeError):  # rank 0 has all results, and may have exited
            store.wait(["network"], limit)  # a group fails once a member has exited
        return results

    def share(self, phase: str, ranks: Iterable[int], limit: timedelta) -> Results:
        """Send this rank's results to rank 0.

        Rank 0 waits at most `limit` for those of `ranks`, publishes the good nodes under the key
        `phase`, and returns the results that have arrived; other ranks return none.
        """
        launch = self.launch
        store = self._connection.store
        report = {
            "host": launch.node,
            "device": self._device.type,
            "figures": self.figures,
            "errors": self.errors,
        }
        store.set(f"{phase}/{launch.rank}", json.dumps(report))
        if launch.rank:
            return {}
        keys = {rank: f"{phase}/{rank}" for rank in ranks}
        with without_dns():  # the store looks up the host name of each process that connects
            self._connection.poll([*keys.values()], time.monotonic() + limit.total_seconds())
        results = {
            rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])
        }
        each = launch.local_world_size
        good = Counter(rank // each for rank, report in results.items() if not report["errors"])
        store.set(phase, json.dumps([node for node in sorted(good) if good[node] == each]))
        return results

    def _step(self, name: str, work: Callable[[], float], deadline: float) -> None:
        """Record the best result from repeated measurements, or the error."""
        try:
            value = bounded(work, max(deadline - time.monotonic(), 0.0), "it timed out")
            self.figures[name] = max(value, self.figures.get(name, 0.0))
        except Exception as error:
            self.errors[name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            # the last group may still use the connection and the device
            with contextlib.suppress(Exception):
                self._group_store = bounded(self._connection.another, _MARGIN_S)
                if self._device.type == "cuda":
                    bounded(self._groups[-1].abort, _MARGIN_S)

    def _bandwidth(self, name: str, member: int, size: int) -> float:
        """Return the bandwidth of an all-reduce in a new group, in GB/s.

        In a ring each rank sends and receives 2 (n - 1) / n of its bytes. Raises RuntimeError for a
        wrong sum.
        """
        store = dist.PrefixStore(name, self._group_store)
        length = 2**20
        group: Any
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(minutes=30)  # after this, the watchdog kills the process
            length = 2**28
            group = dist.ProcessGroupNCCL(store, member, size, options)
        else:
            group = dist.ProcessGroupGloo(store, member, size, timedelta(seconds=self._seconds))
        self._groups.append(group)
        tensor = torch.full((length // 4,), member + 1.0, device=self._device)
        group.allreduce([tensor]).wait()
        if (tensor != size * (size + 1) / 2).any():
            raise RuntimeError(
                f"the sum of 1 to {size} has values from {tensor.min():g} to {tensor.max():g}"
            )
        seconds = self._median_seconds(lambda: group.allreduce([tensor.zero_()]).wait())
        return 2 * (size - 1) / size * length / seconds / 1e9

    def _median_seconds(self, work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(20):  # the same number on all members of a group
            begin = time.perf_counter()
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


class NodeVerdict(NamedTuple):
    """Hosts to use, hosts to leave out, and the report.

    No host counts as good if a fault cannot be attributed to a host.
    """

    good: list[str]
    bad: list[str]
    lines: list[str]


def judge(results: Results, hosts: Sequence[str], bands: Mapping[str, float]) -> NodeVerdict:
    """Judge the results of all ranks.

    hosts  the host of each rank, in allocation order
    bands  lower bounds for figures on a healthy node, by name

    A rank is slow if it is far below the median, or below the machine's band while most ranks are
    not. On a CPU no rank counts as slow: speeds depend on other programs.
    """
    faults = defaultdict[str, list[str]](list)
    lines = list[str]()
    reached = any(BETWEEN in report["figures"] for report in results.values())
    for rank, host in enumerate(hosts):
        report = results.get(rank, {"errors": {"process": "it did not start, died or hangs"}})
        for step, text in report["errors"].items():
            if step != BETWEEN or reached:
                faults[host].append(f"rank {rank}: {step}: {text}")
    for name, (unit, share, band) in FIGURES.items():
        values = {
            rank: report["figures"][name]
            for rank, report in results.items()
            if name in report["figures"]
        }
        if not values:
            continue
        slowest = min(values, key=values.__getitem__)
        median = statistics.median(values.values())
        low = bands.get(band, 0.0)
        least = max(share * median, low if low <= median else 0.0)
        span = f"{values[slowest]:.3g} to {max(values.values()):.3g}, median {median:.3g}"
        lines.append(f"{name}, {unit}: {span}; lowest on {hosts[slowest]}, rank {slowest}")
        for rank, value in values.items():
            if value < least and results[rank]["device"] != "cpu":
                text = f"{value:.3g} {unit}, expected at least {least:.3g} (median {median:.3g})"
                faults[hosts[rank]].append(f"rank {rank}: {name}: {text}")
    lines += (f"FAULT {host} {text}" for host, texts in faults.items() for text in texts)
    every = dict.fromkeys(hosts)
    good = [host for host in every if host not in faults]
    alone = [
        report["errors"][BETWEEN] for report in results.values() if BETWEEN in report["errors"]
    ]
    if alone and not faults:
        good = []
        lines.append(f"FAULT no node can reach another node: {alone[0]}")
    lines.append(f"{len(good)} of {len(every)} nodes are good")
    if faults:
        lines.append(f"--exclude={','.join(faults)}")
    return NodeVerdict(good, list(faults), lines)


def rank_hosts(launch: Launch, results: Results) -> list[str]:
    """Return each rank's host, as reported by a process on its node, or from Slurm's node list."""
    each = launch.local_world_size
    names = dict(enumerate(_slurm_hosts()))
    names |= {rank // each: report["host"] for rank, report in results.items()}
    return [names.get(rank // each, f"node {rank // each}") for rank in range(launch.world_size)]


def _slurm_hosts() -> list[str]:
    """Return the hosts of this Slurm step in order; an empty list without Slurm."""
    listed = os.environ.get("SLURM_STEP_NODELIST", "")
    try:
        return ask_slurm("scontrol", "show", "hostnames", listed).stdout.split() if listed else []
    except (OSError, subprocess.SubprocessError):
        return []


def run(args: argparse.Namespace) -> int:
    """Run one process of the test; rank 0 prints the verdict and returns it as the exit code.

    Raises LostRankError on other ranks if rank 0 does not answer.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hides a warning for each repeated wait
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # NCCL's watchdog would kill the process
    launch = detect_launch()
    cluster = None if args.cluster == "none" else load_cluster(args.cluster)
    if launch.on_one_node and not host_name_is_local():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if launch.rank == 0:
        _write_hosts(args.out, [], [])  # discard the lists of an earlier start

    def work() -> Results:
        connection = StoreConnection(launch, timedelta(seconds=2 * args.seconds))
        connection.open()
        process = Process(connection, args.seconds)
        process.multiply(
            args.backend, RankMapping(local_order=cluster.local_order) if cluster else None
        )
        return process.exchange()

    try:
        results = bounded(work, 20 * args.seconds, "the test timed out")
    except (RuntimeError, LaunchError) as error:
        if launch.rank == 0:
            raise
        raise LostRankError(
            f"rank 0 did not start, died or hangs: {str(error).splitlines()[0]}"
        ) from error
    if launch.rank:
        return 0
    verdict = judge(results, rank_hosts(launch, results), cluster.bands if cluster else {})
    print(*verdict.lines, sep="\n")
    _write_hosts(args.out, verdict.bad, verdict.good)
    return 0 if verdict.good and not verdict.bad else EXIT_BAD_NODES


def _write_hosts(folder: Path | None, bad: Sequence[str], good: Sequence[str]) -> None:
    """Write the files bad_hosts and good_hosts, one host per line. Raises ConfigError."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, hosts in (("bad_hosts", bad), ("good_hosts", good)):
            (folder / name).write_text("".join(f"{host}\n" for host in hosts))
    except OSError as error:
        raise ConfigError(
            f"--out {folder} cannot be written: {error.strerror}: name another folder"
        ) from error
