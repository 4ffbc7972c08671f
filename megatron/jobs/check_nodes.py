"""The nodes of an allocation, tried before a training starts on them: `tools/preflight.py measure` under srun.

Every process multiplies matrices and copies memory on its own device; the ranks of each node reduce over a group of
their own; then every node reduces with both of its neighbours, rank by rank. Rank 0 gives orders and reads answers over
a store with keys for each rank, so that nobody waits for anybody else, and asks in each step only the nodes that were
good in the steps before, since a collective hangs with one member that does not come. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import ConfigError, LaunchError, LostRankError, MegatronError, print_error
from megatron.parallel.launch import Launch, detect_launch, select_device
from megatron.parallel.meeting import Meeting, batches
from megatron.parallel.nodelist import expand_counts, expand_hosts
from megatron.parallel.placing import VISIBLE, Placing
from megatron.parallel.report import bounded, host_name_is_local, without_dns
from megatron.planner.calibration.tasks import Partners, finish, seconds_per_call
from megatron.planner.cluster import Cluster, load_cluster

TOO_FEW = 4
_NOTHING = b"-"  # where an answer will be
_END_S, _ABORT_S = 5.0, 3.0
_LINES = 40  # of faults that are printed; the file has all
Place = tuple[str, int]
"""A node, as the launcher calls it, and the number of a process there."""


@dataclass(frozen=True)
class Figure:
    """A measurement. ratio, cpu_ratio: shares of the median below which a value is slow; band: its name in a machine's
    description. On a CPU messages between processes only have to arrive: their speed tells who got a core when."""

    what: str
    unit: str
    band: str
    ratio: float
    cpu_ratio: float


FIGURES = {
    "product": Figure("matrix product", "TFLOP/s", "gemm_tflops", 0.75, 0.6),
    "copy": Figure("copy in device memory", "GB/s", "copy_gb_per_s", 0.75, 0.4),
    "within": Figure("all-reduce within the node", "GB/s", "allreduce_node_gb_per_s", 0.5, 0.0),
    "between": Figure("all-reduce with a rank of a neighbouring node", "GB/s", "neighbour_gb_per_s", 0.5, 0.0),
}


# -- one process -------------------------------------------------------------------------------------------------------


def speeds(device: torch.device) -> dict[str, float]:
    """TFLOP/s of a square product (fp16 of 8192 on a GPU, fp32 of 384 on one core); GB/s, read and written, of a copy.

    Raises RuntimeError where the device computes wrongly.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # holds for the thread that calls
    ones = torch.ones(256, 256, device=device)
    if (total := (ones @ ones).sum().item()) != 256.0**3:
        raise RuntimeError(f"the sum of a product of ones is {total:g}, not {256**3}")
    size, dtype = (8192, torch.float16) if on_gpu else (384, torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    out, source = torch.empty_like(a), torch.zeros(2**30 if on_gpu else 2**24, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def best(work: Callable[[], Any]) -> float:
        return min(seconds_per_call(work, device, 0.6, Partners(), False))

    return {
        "product": 2 * size**3 / best(lambda: torch.mm(a, b, out=out)) / 1e12,
        "copy": 2 * source.numel() / best(lambda: target.copy_(source)) / 1e9,
    }


class Stores(Meeting):
    """Connections to the store that rank 0, or the launcher, serves."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        super().__init__(launch, torch.device("cpu"), timedelta(seconds=seconds))
        # Stays open with rank 0.
        self._store = bounded(lambda: self._open_store(seconds), seconds + _END_S)

    def another(self) -> Any:
        """A connection that may wait for long, or for ever, while others go on."""
        if isinstance(self._store, dist.HashStore):
            return self._store
        return dist.PrefixStore(self._prefix, self._client(self.timeout.total_seconds()))


@dataclass
class Tasks:
    """What a process can be asked for. Each answer is a dictionary for JSON; its "error" says what did not work.

    device  from the first task on; kept: RCCL's groups end with the process, which asks nothing of the other members
    """

    launch: Launch
    stores: Stores
    backend: str | None
    placing: Placing | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kept: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._store = self.stores.another()

    def alone(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Where this process is, and what its device does."""
        launch = self.launch
        shown = any(name in os.environ for name in VISIBLE)
        found: dict[str, Any] = {"host": launch.node, "local_rank": launch.local_rank, "shown": shown}

        def body() -> dict[str, Any]:
            device = self.device = select_device(launch, self.backend, self.placing)
            kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            return {"device": kind, **speeds(device)}

        return {**found, **_tried(body, order["limit_s"], "the device gave no answer")}

    def group(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Bus bandwidth of an all-reduce over a group of `members`: in a ring each rank sends and receives
        2 (n - 1) / n of its bytes."""
        device, members, limit_s = self.device, order["members"], order["limit_s"]
        place, size = members.index(self.launch.rank), len(members)

        def body() -> dict[str, Any]:
            store = dist.PrefixStore(order["name"], self._store)
            group: Any
            if device.type == "cuda":
                torch.cuda.set_device(device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(minutes=30)  # its watchdog would end the process
                group = dist.ProcessGroupNCCL(store, place, size, options)
            else:
                group = dist.ProcessGroupGloo(store, place, size, timedelta(seconds=limit_s))
            self.kept.append(group)
            length = 2**28 if device.type == "cuda" else 2**20
            tensor = torch.full((length // 4,), float(place + 1), device=device)
            group.allreduce([tensor]).wait()
            finish(device)
            if (sums := {tensor[0].item(), tensor[-1].item()}) != {size * (size + 1) / 2}:
                raise RuntimeError(f"all-reduce of 1 to {size} gave {sums}")
            tensor.zero_()
            seconds = []
            for _ in range(5):
                begin = time.perf_counter()
                for _ in range(4):  # as often on each member
                    group.allreduce([tensor]).wait()
                finish(device)
                seconds.append((time.perf_counter() - begin) / 4)
            return {"gb_per_s": 2 * (size - 1) / size * length / statistics.median(seconds) / 1e9}

        found = _tried(body, limit_s, "the all-reduce did not end")
        if "error" in found and self.kept:
            with contextlib.suppress(RuntimeError, LaunchError, AttributeError):
                self._store = self.stores.another()  # the group may still wait in the other one
                if device.type == "cuda":
                    bounded(self.kept[-1].abort, _ABORT_S)  # so that the device is free for the next group
        return found

    def end(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing more."""
        return {}


def _tried(body: Callable[[], dict[str, Any]], limit_s: float, failure: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = bounded(body, limit_s, failure)
        return found
    except (RuntimeError, MegatronError, OSError, ValueError) as error:
        return {"error": (str(error).splitlines() or [type(error).__name__])[0][:200]}


def work(store: Any, rank: int, tasks: Tasks, limit_s: float) -> None:
    """Do what rank 0 asks for until it is over. Raises LostRankError when rank 0 is gone, or asks nothing in time."""
    for number in itertools.count():
        key = f"order/{rank}/{number}"

        def next_order(key: str = key) -> Any:
            store.wait([key], timedelta(seconds=limit_s))
            return json.loads(store.get(key))

        try:
            order = bounded(next_order, limit_s + _END_S)
            answer = getattr(tasks, order["task"])(order)
            store.set(f"answer/{rank}/{number}", json.dumps(answer))
            store.add(f"came/{order['step']}", 1)
        except (RuntimeError, LaunchError) as error:
            raise LostRankError(f"rank 0 did not come, died or hangs: {str(error).splitlines()[0]}") from error
        if order["task"] == "end":
            return


# -- rank 0 ------------------------------------------------------------------------------------------------------------


@dataclass
class Desk:
    """Rank 0's side of the store. asked: how often each rank was."""

    store: Any
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    asked: Counter[int] = field(default_factory=Counter)
    step: int = 0

    def ask(
        self, orders: Mapping[int, Mapping[str, Any]], limit_s: float, most_s: float = 0.0
    ) -> dict[int, dict[str, Any]]:
        """Give each rank its order; the answers that came within limit_s, or within most_s while others still came."""
        self.step += 1
        keys = {rank: f"{rank}/{self.asked[rank]}" for rank in orders}
        self.asked.update(list(orders))
        for ranks in batches(list(orders)):
            self.store.multi_set([f"answer/{keys[rank]}" for rank in ranks], [_NOTHING] * len(ranks))
            told = [json.dumps({**orders[rank], "step": self.step}) for rank in ranks]
            self.store.multi_set([f"order/{keys[rank]}" for rank in ranks], told)
        start = last = self.clock()
        came, pause = 0, 0.005
        while came < len(orders):
            count, now = self.store.add(f"came/{self.step}", 0), self.clock()
            if count != came:
                came, last = count, now
            deadline = start + max(limit_s, min(last - start + limit_s / 4, most_s))
            if now >= deadline:
                break
            self.sleep(min(pause, max(deadline - now, 0.0)))
            pause = min(pause * 1.5, 0.1)
        answers: dict[int, dict[str, Any]] = {}
        for ranks in batches(list(orders)):
            values = self.store.multi_get([f"answer/{keys[rank]}" for rank in ranks])
            answers |= {rank: json.loads(v) for rank, v in zip(ranks, values, strict=True) if v != _NOTHING}
        return answers


@dataclass
class Found:
    """What is known of an allocation.

    places    of all ranks; hosts: the ranks of each, in the order of the allocation
    faults    of hosts, which are then left out; general: of the whole allocation, for which no host can be blamed
    figures   name (FIGURES) -> rank -> value; devices: rank -> what torch calls it
    """

    places: list[Place]
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    general: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    figures: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    devices: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def hosts(self) -> dict[str, list[int]]:
        hosts: dict[str, list[int]] = {}
        for rank, (host, _) in enumerate(self.places):
            hosts.setdefault(host, []).append(rank)
        return hosts

    @property
    def good(self) -> list[str]:
        return [host for host in self.hosts if host not in self.faults]

    def accuse(self, rank: int, text: str) -> None:
        host, local = self.places[rank]
        self.faults[host].append(f"local rank {local}: {text}")

    def verdict(self, needed: int | None) -> tuple[int, list[str]]:
        """(exit code, the hosts to use): 0 and the first good ones where there are enough."""
        most = len(self.hosts) if needed is None else needed
        return (TOO_FEW, []) if self.general or len(self.good) < most else (0, self.good[:most])


def slurm_places(environ: Mapping[str, str], launch: Launch) -> list[Place]:
    """The places of all ranks in blocks, by Slurm's variables, or by numbers where they do not tell.

    Raises LaunchError for lists that cannot be read.
    """
    world, each = launch.world_size, launch.local_world_size
    nodes = environ.get("SLURM_STEP_NODELIST", "").strip()
    hosts = expand_hosts(nodes) if nodes else []
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "").strip()
    counts = expand_counts(text) if text else [each] * len(hosts)
    if len(counts) != len(hosts) or sum(counts) != world:
        return [(f"node {rank // each}", rank % each) for rank in range(world)]
    return [(host, local) for host, count in zip(hosts, counts, strict=True) for local in range(count)]


def places_of(planned: Sequence[Place], present: Mapping[int, Place], each: int) -> list[Place]:
    """Where every rank is: those who came say it, the others are in the places that are left."""
    names = {rank // each: host for rank, (host, _) in present.items()}
    known = set(planned) >= set(present.values())
    blocks = planned if known else [(names.get(r // each, f"node {r // each}"), r % each) for r in range(len(planned))]
    taken = set(present.values())
    free = iter([place for place in blocks if place not in taken])
    return [present[rank] if rank in present else next(free, ("node ?", 0)) for rank in range(len(planned))]


def ring_pairs(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Rounds in which each host meets its neighbours in the ring of hosts, at most one of them in each.

    An odd ring needs three rounds; two hosts meet once.
    """
    if len(hosts) < 3:
        return [[(hosts[0], hosts[1])]] if len(hosts) == 2 else []
    edges = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))
    return [edges[::2], edges[1::2]] if len(hosts) % 2 == 0 else [edges[:-1:2], edges[1:-1:2], edges[-1:]]


@dataclass
class Measurement:
    """One look at an allocation. planned: the places of all ranks, as the launcher has them; alive: who answers."""

    desk: Desk
    launch: Launch
    cluster: Cluster | None
    seconds: float
    planned: list[Place]
    say: Callable[[str], None]
    alive: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.found = Found(self.planned)

    def run(self) -> Found:
        """All steps."""
        start = time.monotonic()
        with without_dns():  # the store asks for the name of each that connects
            self._devices()
        self._within()
        self._between()
        self.desk.ask({rank: {"task": "end"} for rank in self.alive}, _END_S)
        self.found.seconds = time.monotonic() - start
        return self.found

    def _ask(self, name: str, orders: Mapping[int, Mapping[str, Any]], limit_s: float) -> dict[int, dict[str, Any]]:
        """Answers; who gives none is at fault and asked nothing more. The first question waits for late ranks."""
        begin, first = time.monotonic(), not self.alive
        orders = {rank: {**order, "limit_s": 0.8 * limit_s if first else limit_s} for rank, order in orders.items()}
        answers = self.desk.ask(orders, limit_s + (0.0 if first else _END_S + _ABORT_S), 2 * limit_s if first else 0.0)
        waited = time.monotonic() - begin
        self.say(f"{name}: {len(answers)} of {len(orders)} ranks answered in {waited:.1f} s")
        if first:
            self.alive = set(answers)
            present = {rank: (said["host"], said["local_rank"]) for rank, said in answers.items()}
            self.found.places = places_of(self.planned, present, self.launch.local_world_size)
        for rank in sorted(set(orders) - set(answers)):
            self.alive.discard(rank)
            self.found.accuse(rank, f"gave no answer within {waited:.0f} s when asked for its {name}")
        return answers

    def _devices(self) -> None:
        orders = {rank: {"task": "alone"} for rank in range(self.launch.world_size)}
        answers = self._ask("device", orders, self.seconds)
        shown = {rank for rank, said in answers.items() if said["shown"]}
        hosts = {answers[rank]["host"] for rank in shown}
        for rank, said in answers.items():
            self.found.devices[rank] = said.get("device", "")
            if "error" in said:
                self.found.accuse(rank, said["error"])
            elif rank not in shown and (said["host"] in hosts or 2 * len(shown) > len(answers)):
                self.found.accuse(rank, f"none of {', '.join(VISIBLE)} is set, while others are shown a device")
        for name in ("product", "copy"):
            self._compare(name, {rank: said[name] for rank, said in answers.items() if name in said})

    @property
    def _group_s(self) -> float:
        """How long a group may take to connect: a sound start on two nodes of LUMI took 35 s (docs/frontier.md)."""
        return 60.0 + self.launch.world_size / 1000

    def _groups(self, name: str, groups: Iterable[Sequence[int]]) -> dict[tuple[int, ...], dict[int, dict[str, Any]]]:
        """The answers of the members of each group."""
        orders = dict[int, dict[str, Any]]()
        for members in groups:
            order = {"task": "group", "name": f"{self.desk.step}/{members[0]}", "members": list(members)}
            orders |= dict.fromkeys(members, order)
        answers = self._ask(name, orders, self._group_s) if orders else {}
        grouped: dict[tuple[int, ...], dict[int, dict[str, Any]]] = defaultdict(dict)
        for rank, answer in answers.items():
            grouped[tuple(orders[rank]["members"])][rank] = answer
        return grouped

    def _within(self) -> None:
        hosts = self.found.hosts
        groups = self._groups("node's all-reduce", [hosts[host] for host in self.found.good if len(hosts[host]) > 1])
        values = {}
        for members, said in groups.items():
            failed = {rank: answer["error"] for rank, answer in said.items() if "error" in answer}
            if not failed and len(said) == len(members):
                values[members[0]] = min(answer["gb_per_s"] for answer in said.values())
            elif len(said) == len(members):  # else who died or hangs is named already
                rank, text = next(iter(failed.items()))
                self.found.accuse(rank, f"the node's all-reduce fails: {text}")
        self._compare("within", values)

    def _between(self) -> None:
        """A rank is judged by the better of its two neighbours, so that the other one may be at fault."""
        hosts, good = self.found.hosts, self.found.good
        best: dict[int, float] = {}
        errors: dict[int, str] = {}
        for number, pairs in enumerate(ring_pairs(good)):
            groups = [
                pair for a, b in pairs for pair in zip(hosts[a], hosts[b], strict=False) if self.alive.issuperset(pair)
            ]
            for members, said in self._groups(f"all-reduce with neighbours, round {number + 1}", groups).items():
                sound = len(said) == len(members) and not any("error" in answer for answer in said.values())
                value = min(answer["gb_per_s"] for answer in said.values()) if sound else 0.0
                for rank, answer in said.items():
                    best[rank] = max(value, best.get(rank, 0.0))
                    errors[rank] = answer.get("error", "the other node gave no answer")
        if best and not any(best.values()):
            self.found.general.append(f"no node reaches another one: {next(iter(errors.values()))}")
            return
        for rank, value in best.items():
            if not value:
                self.found.accuse(rank, f"no all-reduce with a neighbouring node succeeds: {errors[rank]}")
        slow = self._compare("between", {rank: value for rank, value in best.items() if value})
        if len(good) == 2 and slow:
            self.found.warnings.append(f"{good[0]} and {good[1]} met each other alone: either may be the slow one")

    def _compare(self, name: str, values: Mapping[int, float]) -> Collection[int]:
        """Accuse the slow: below the machine's band, where most values are in it, or a share of the median."""
        if not values:
            return ()
        figure, half = FIGURES[name], statistics.median(values.values())
        self.found.figures[name] = dict(values)
        on_cpu = all(self.found.devices.get(rank) == "cpu" for rank in values)
        least, of = half * (figure.cpu_ratio if on_cpu else figure.ratio), f"others have {half:.3g}"
        if low := self._band(figure.band):
            if half < low:
                self.found.warnings.append(
                    f"all ranks: {figure.what}: half have at most {half:.3g} {figure.unit}, below "
                    f"the {low:g} of a sound {self.cluster and self.cluster.name}"
                )
            elif low > least:
                least, of = low, "the machine's own figure"
        slow = [rank for rank, value in values.items() if value < least]
        for rank in slow:
            self.found.accuse(
                rank, f"{figure.what} {values[rank]:.3g} {figure.unit}, expected at least {least:.3g} ({of})"
            )
        return slow

    def _band(self, name: str) -> float | None:
        """The lower end of the machine's band, where the devices are the machine's own."""
        cluster = self.cluster
        if cluster is None or not any(cluster.device.split()[0] in kind for kind in self.found.devices.values()):
            return None
        return cluster.bands.get(name)


def measure(
    launch: Launch, cluster: Cluster | None, seconds: float, backend: str | None, say: Callable[[str], None]
) -> Found | None:
    """Take part. Rank 0 gets what was found, the others None.

    Raises LaunchError when rank 0 cannot be reached or its port is taken, LostRankError when it stops.
    """
    if launch.on_one_node and not host_name_is_local():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # its watchdog would end the process
    stores = Stores(launch, 2 * seconds)
    placing = Placing(local_order=cluster.local_order) if cluster else None
    tasks = Tasks(launch, stores, backend, placing)
    limit_s = 4 * seconds + 5 * (90.0 + launch.world_size / 1000)
    if launch.rank:
        work(stores.store, launch.rank, tasks, limit_s)
        return None

    def body() -> None:
        with contextlib.suppress(LostRankError):
            work(stores.another(), 0, tasks, limit_s)

    threading.Thread(target=body, name="rank 0's own part", daemon=True).start()
    return Measurement(Desk(stores.store), launch, cluster, seconds, slurm_places(os.environ, launch), say).run()


# -- what is told ------------------------------------------------------------------------------------------------------


def told(found: Found, needed: int | None) -> Iterator[str]:
    """Lines for people."""
    for name, values in found.figures.items():
        figure, slowest = FIGURES[name], min(values, key=values.__getitem__)
        low, half, high = (f(values.values()) for f in (min, statistics.median, max))
        host, local = found.places[slowest]
        span = f"{low:.3g} to {high:.3g} {figure.unit}, median {half:.3g}"
        yield f"{figure.what}: {span}; slowest {host} local rank {local}"
    faults = [f"FAULT {host} {text}" for host, texts in found.faults.items() for text in texts]
    yield from (f"whole allocation: {text}" for text in found.general)
    yield from faults[:_LINES]
    if len(faults) > _LINES:
        yield f"FAULT ... {len(faults) - _LINES} more in preflight.json"
    yield from (f"warning {text}" for text in found.warnings)
    total, good = len(found.hosts), len(found.good)
    yield f"{good} of {total} nodes are good, {total if needed is None else needed} needed; {found.seconds:.0f} s"
    if found.faults:
        yield f"--exclude={','.join(bad_hosts(found))}"
    if found.verdict(needed)[0]:
        yield f"preflight failed: {'the fault is no single node' if found.general else 'too few good nodes'}"


def bad_hosts(found: Found) -> list[str]:
    """Those whose name is known."""
    return [host for host in found.hosts if host in found.faults and not host.startswith("node ")]


def write_files(folder: Path, content: Mapping[str, Any], good: Iterable[str], bad: Iterable[str]) -> None:
    """preflight.json, good_hosts and bad_hosts, each whole or not at all; good_hosts last."""
    texts = {
        "preflight.json": json.dumps(content, indent=1),
        "bad_hosts": "\n".join(bad),
        "good_hosts": "\n".join(good),
    }
    for name, text in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(text + "\n" if text else "")
        os.replace(temporary, folder / name)


def _rank_0_lost(launch: Launch, out: Path | None, error: MegatronError) -> int:
    """The first process of the second node speaks for all, unless rank 0 has spoken after all."""
    if launch.rank != min(launch.local_world_size, launch.world_size - 1):
        return 0
    host = slurm_places(os.environ, launch)[0][0]
    host = launch.master_addr if host.startswith("node ") else host
    if out is not None:
        if (out / "good_hosts").exists():
            return 0
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_files(out, {"exit_code": TOO_FEW, "faults": {host: [str(error)]}}, [], [host])
        except OSError:
            return 0  # as rank 0 has found, and said
    print_error(f"{host}: {error}\n--exclude={host}")
    return TOO_FEW


def run(args: argparse.Namespace) -> int:
    """One process's part; the verdict is rank 0's exit code. Where there are several processes this does not return: a
    driver that hangs must not keep a process from ending."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a wait that is repeated is no news
    launch = detect_launch()
    code = 0
    try:
        code = _run(launch, args)
    except MegatronError as error:
        code = 2
        if launch.rank and isinstance(error, LaunchError):
            code = _rank_0_lost(launch, args.out, error)
        elif not launch.rank:
            print_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if launch.world_size > 1:
        os._exit(code)
    return code


def _run(launch: Launch, args: argparse.Namespace) -> int:
    cluster = None if args.cluster == "none" else load_cluster(args.cluster)
    nodes = math.ceil(launch.world_size / launch.local_world_size)
    if args.nodes_needed is not None and args.nodes_needed > nodes:
        raise ConfigError(f"--nodes-needed {args.nodes_needed} is more than the {nodes} node(s) of this step")
    if launch.rank == 0 and args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            for name in ("preflight.json", "good_hosts", "bad_hosts"):  # of an earlier start
                (args.out / name).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {args.out} cannot be written: {error.strerror}: name another folder") from error
    found = measure(launch, cluster, args.seconds, args.backend, lambda line: print(f"preflight: {line}", flush=True))
    if found is None:
        return 0
    for line in told(found, args.nodes_needed):
        print(line)
    code, use = found.verdict(args.nodes_needed)
    if args.out is not None:
        content = {"exit_code": code, "good_hosts": use, "bad_hosts": bad_hosts(found), **vars(found)}
        write_files(args.out, content, use, bad_hosts(found))
    return code
