"""What the words of tools/tune.py ask for: the space, the machine, where trials run, and what names the search."""
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.duration import duration_s
from megatron.errors import ConfigError
from megatron.planning.cluster import Cluster, load_cluster
from megatron.planning.experiments.cost import SLACK, START_UP_S
from megatron.planning.experiments.launch import ROOT
from megatron.planning.search.command import headroom_bytes
from megatron.planning.search.judging import GIB
from megatron.tuning.search.optimizer import make_optimizer
from megatron.tuning.space import Machine, Space
from megatron.tuning.space_file import load_space
from megatron.tuning.trial_runner import Place, TrialSettings
from megatron.tuning.types import Candidate
from megatron.untrusted import read_text

_LIMIT_S = 1800.0  # of a trial of which nobody can say how long it takes
_UNGUIDED = ("random",)  # searches that do not look at the planner's ranking


@dataclass(frozen=True)
class Setup:
    """A search and its place.

    search      its name; "auto" only before a dry run
    confirm     most trials after the search that measure leading layouts again
    flags       of pretrain_gpt.py after --; walltime_s: of this start; limit_s: of a trial, None: by its step time
    stall_s     without a new step, after which a trial hangs; None: by its step time
    """

    space: Space
    flags: tuple[str, ...]
    cluster: Cluster | None
    machine: Machine
    place: Place
    search: str
    seed: int
    prior: bool
    objective: str
    iterations: int
    warm_up: int
    max_trials: int | None
    confirm: int
    walltime_s: float | None
    limit_s: float | None
    stall_s: float | None
    out: Path

    @property
    def memory_bytes(self) -> float | None:
        """Of a device, without headroom taken away; None: not known."""
        return None if self.cluster is None else self.cluster.memory_gib * GIB

    @property
    def search_in_words(self) -> str:
        """For titles and summaries."""
        if self.search in _UNGUIDED:
            return self.search
        return f"{self.search} {'with' if self.prior else 'without'} the planner's ranking"

    def trial_settings(self) -> TrialSettings:
        """What all trials have in common."""
        return TrialSettings(self.iterations, self.warm_up, self.trial_limit_s, self.stall_s)

    def trial_limit_s(self, candidate: Candidate) -> float:
        """Longest time of a trial."""
        if self.limit_s is not None:
            return self.limit_s
        if candidate.step_s is None:
            return _LIMIT_S
        return START_UP_S + SLACK * candidate.step_s * (self.warm_up + self.iterations)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a search to go on; the rest may change between two starts."""
        return {
            "space": self.space.name, "contents_of_the_space": self.space.digest(), "flags": list(self.flags),
            "search": self.search, "seed": self.seed, "prior": self.prior,
            "iterations": self.iterations, "warm_up": self.warm_up,
            "cluster": None if self.cluster is None else self.cluster.name,
            "figures_of_the_cluster": None if self.cluster is None else digest(self.cluster),
            "launcher": self.place.launcher, "processes_of_a_node": self.machine.processes_per_node,
            "bytes_for_a_layout": self.machine.capacity_bytes,
        }  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """What may change between two starts, for the journal."""
        return {
            "objective": self.objective, "max_trials": self.max_trials, "confirm": self.confirm,
            "walltime_s": self.walltime_s, "hosts": list(self.place.hosts), "parallel": self.place.parallel,
            "memory_limit_bytes": self.place.memory_limit_bytes, "trial_limit_s": self.limit_s,
        }  # fmt: skip


def digest(cluster: Cluster) -> str:
    """The same for two descriptions that say the same of a machine, wherever they lie."""
    said = {field.name: getattr(cluster, field.name) for field in dataclasses.fields(cluster) if field.name != "path"}
    return hashlib.sha256(repr(_ordered(said)).encode()).hexdigest()[:16]


def _ordered(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [(repr(key), _ordered(value[key])) for key in sorted(value, key=repr)]
    return [_ordered(each) for each in value] if isinstance(value, list | tuple) else value


def make_setup(args: argparse.Namespace, flags: Sequence[str]) -> Setup:
    """Raises ConfigError for what contradicts itself, or cannot be had here."""
    if args.space is None:
        raise ConfigError("--space FILE|NAME: say which space is searched; --list-spaces shows the ready ones")
    space = load_space(args.space)
    launcher = args.launcher or _launcher(args)
    cluster = _cluster(args, space, launcher)
    machine, place = (_local if launcher == "local" else _slurm)(args, space, cluster)
    if cluster is not None and place.tasks_per_node > cluster.devices_per_node:
        raise ConfigError(f"{place.tasks_per_node} processes on a node, but a node of {cluster.name} has "
                          f"{cluster.devices_per_node} devices: fewer --processes or --tasks-per-node, or another "
                          "--cluster")  # fmt: skip
    # A login node shows what would be searched without the libraries that search.
    search = args.search if args.dry_run else make_optimizer(args.search, args.seed).name
    prior = not args.no_prior and search not in _UNGUIDED
    if prior and cluster is None:
        raise ConfigError(
            "the planner's ranking needs a described machine: measure this one with 'python tools/calibrate.py -o "
            "machine.toml' and give --cluster machine.toml, or search without the ranking: --no-prior"
        )
    if args.update_cluster is not None and cluster is None:
        raise ConfigError("--update-cluster corrects the description of a machine: give it with --cluster")
    iterations = space.iterations if args.iterations is None else args.iterations
    warm_up = space.warm_up if args.warm_up is None else args.warm_up
    return Setup(
        space=space, flags=tuple(flags), cluster=cluster, machine=machine, place=place, search=search,
        seed=args.seed, prior=prior, objective=args.objective, iterations=iterations, warm_up=warm_up,
        max_trials=args.max_trials, confirm=args.confirm, walltime_s=_walltime(args.walltime),
        limit_s=args.trial_limit, stall_s=args.stall, out=args.out or ROOT / "runs" / f"tune-{space.name}",
    )  # fmt: skip


def _launcher(args: argparse.Namespace) -> str:
    """slurm in an allocation, and where nodes are spoken of."""
    spoken = args.hosts_file is not None or args.nodes is not None
    return "slurm" if spoken or os.environ.get("SLURM_JOB_ID") else "local"


def _cluster(args: argparse.Namespace, space: Space, launcher: str) -> Cluster | None:
    """The machine of the command line, of the environment, or of the space, unless trials run on this one."""
    name = args.cluster
    if name is None:
        name = os.environ.get("MEGATRON_CLUSTER") or (space.cluster if launcher == "slurm" else None)
    return None if name in (None, "", "none") else load_cluster(name)


def _capacity(args: argparse.Namespace, cluster: Cluster | None) -> float | None:
    return None if cluster is None else cluster.memory_gib * GIB - headroom_bytes(args.headroom, cluster)


def _local(args: argparse.Namespace, space: Space, cluster: Cluster | None) -> tuple[Machine, Place]:
    for name in ("hosts_file", "nodes", "tasks_per_node"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} beside --launcher local, which runs trials on this machine "
                              "alone: --processes says on how many devices")  # fmt: skip
    if args.parallel is not None and args.parallel > 1:
        raise ConfigError(f"--parallel {args.parallel}: trials on one machine would slow each other down, and their "
                          "figures mean nothing then; several at once need nodes of their own: --launcher slurm")
    processes = args.processes or (_processes_here(space) if cluster is None else cluster.devices_per_node)
    return (
        Machine(cluster, processes, 1, _capacity(args, cluster)),
        Place("local", (), processes, 1, _memory_limit(args)),
    )


def _processes_here(space: Space) -> int:
    """Of this machine: its GPUs; without any its cores, or more where the space asks for more: they share the cores."""
    from megatron.calibration.processes import gpus_here

    return gpus_here() or max(len(os.sched_getaffinity(0)), _most(space, "processes") or 0)


def _slurm(args: argparse.Namespace, space: Space, cluster: Cluster | None) -> tuple[Machine, Place]:
    if args.processes is not None:
        raise ConfigError("--processes is for --launcher local; on nodes --tasks-per-node says how many each has")
    hosts = _hosts(args)
    nodes = len(hosts) or args.nodes or _most(space, "nodes")
    if nodes is None:
        what = "--dry-run" if args.dry_run else "--report-only"
        raise ConfigError(f"{what} without --hosts-file: give --nodes N, how many the allocation has")
    tasks = args.tasks_per_node or (cluster.devices_per_node if cluster is not None else 8)
    parallel = args.parallel or nodes
    return (
        Machine(cluster, tasks, nodes, _capacity(args, cluster)),
        Place("slurm", hosts, tasks, parallel, _memory_limit(args)),
    )


def _hosts(args: argparse.Namespace) -> tuple[str, ...]:
    if args.hosts_file is None:
        if args.dry_run or args.report_only:
            return ()
        raise ConfigError(
            "no nodes: inside an allocation give --hosts-file FILE, as examples/frontier/tune.sbatch does; --launcher "
            "local runs trials on this machine, --dry-run shows what would run"
        )
    hosts = tuple(read_text(args.hosts_file, 1 << 24, error=ConfigError).split())
    if not hosts:
        raise ConfigError(f"--hosts-file {args.hosts_file} names no node")
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise ConfigError(f"--hosts-file {args.hosts_file} names {twice[0]} twice: each node once, one a line")
    return hosts


def _most(space: Space, name: str) -> int | None:
    """The largest number of nodes or processes that a space speaks of by name."""
    found = [value for parameter in space.parameters if parameter.name == name for value in parameter.values]
    if name in space.derived and space.derived[name].text.strip().isdigit():
        found.append(int(space.derived[name].text))
    return max((value for value in found if isinstance(value, int)), default=None)


def _memory_limit(args: argparse.Namespace) -> int | None:
    return None if args.memory_limit is None else max(1, int(args.memory_limit * GIB))


def _walltime(text: str | None) -> float | None:
    if text is None:
        return None
    seconds = duration_s(text)
    if not seconds:
        raise ConfigError(f"--walltime {text}: a time such as 90 (minutes), 1:30:00 or 1-00:00:00")
    return seconds
