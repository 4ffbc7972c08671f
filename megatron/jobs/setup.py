"""Settings for a search by tools/tune.py: the space, the machine, and where trials run."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.config.command_line import read_settings
from megatron.config.duration import duration_s
from megatron.errors import ConfigError
from megatron.jobs.candidate_layouts import DATA, LOSS, Candidate, Machine, trial_flags
from megatron.jobs.runner import SLACK, START_UP_S, LaunchTarget, read_hosts
from megatron.jobs.search import find_search
from megatron.jobs.space import SearchSpace, load_space
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.search.space import usable_bytes
from megatron.planner.subprocesses import gpus_here

_LIMIT_S = 1800.0  # time limit for a trial whose time cannot be predicted


@dataclass(frozen=True)
class Setup:
    """Settings for a search.

    args     parsed arguments of tools/tune.py
    flags    flags for pretrain_gpt.py, given after --
    target   where trials run
    search   key in search.SEARCHES
    prior    whether the planner's ranking guides the search
    out      folder of the search
    """

    args: argparse.Namespace
    space: SearchSpace
    flags: tuple[str, ...]
    machine: Machine
    target: LaunchTarget
    search: str
    prior: bool
    out: Path

    def steps(self, candidate: Candidate) -> int:
        """Return a trial's number of steps, including the warm-up.

        With [trial] tokens, it is a multiple of the number of evaluations.
        """
        if not self.space.tokens:
            return self.space.warm_up + self.space.iterations
        evaluations = self.space.evaluations
        return evaluations * -(-self.space.tokens // (candidate.tokens * evaluations))

    def trial(self, candidate: Candidate) -> list[str]:
        """Return the flags for a trial."""
        space = self.space
        steps = self.steps(candidate)
        if not space.tokens:
            return trial_flags(candidate.flags, steps)
        batches = -(-space.valid_samples // candidate.batch)
        evaluation = f"--eval-iters {batches} --eval-interval {steps // space.evaluations}"
        return trial_flags(candidate.flags, steps, evaluation)

    @property
    def searched_by(self) -> str:
        """Return the name of the search, for titles and summaries."""
        return self.search + (" with the planner's ranking" if self.prior else "")

    def limit_s(self, candidate: Candidate) -> float:
        """Return the time limit for a trial, in seconds."""
        if self.args.trial_limit is not None or candidate.step_s is None:
            return float(self.args.trial_limit or _LIMIT_S)
        return START_UP_S + SLACK * candidate.step_s * self.steps(candidate)

    def identity(self) -> dict[str, object]:
        """Return the settings that must not change when a search resumes."""
        names = ["iterations", "warm_up"]
        if self.space.tokens:
            names += ["tokens", "evaluations", "valid_samples", "halving"]
        cluster = self.machine.cluster
        return {
            **{name: getattr(self.space, name) for name in names},
            "space": self.space.name,
            "contents of the space": self.space.digest(),
            "flags": shlex.join(self.flags),
            "search": self.search,
            "seed": self.args.seed,
            "prior": self.prior,
            "cluster": cluster.name if cluster else None,
            "launcher": self.target.launcher,
            "processes of a node": self.machine.processes_per_node,
            "bytes for a layout": self.machine.capacity_bytes,
        }


def make_setup(args: argparse.Namespace, flags: Sequence[str]) -> Setup:
    """Build the settings from the command line. Raises ConfigError."""
    if args.dry_run and args.report_only:
        raise ConfigError("--dry-run and --report-only: give only one of them")
    if args.space is None:
        raise ConfigError(
            "--space FILE|NAME is required: name the space to search; --list-spaces shows those of "
            "this package"
        )
    trial_settings = {name: getattr(args, name) for name in ("tokens", "iterations", "warm_up")}
    space = replace(
        load_space(args.space), **{n: v for n, v in trial_settings.items() if v is not None}
    )
    in_job = args.hosts_file is not None or args.nodes is not None or os.environ.get("SLURM_JOB_ID")
    launcher = args.launcher or ("slurm" if in_job else "local")
    usual = os.environ.get("MEGATRON_CLUSTER") or (space.cluster if launcher == "slurm" else "")
    name = usual if args.cluster is None else args.cluster
    cluster = None if name in ("", "none") else load_cluster(name)
    # --dry-run and --report-only work on a login node without the search libraries.
    shows = args.dry_run or args.report_only
    search = args.search if shows else find_search(args.search)
    if (args.objective == LOSS) != bool(space.tokens):
        raise ConfigError(
            f"--objective {args.objective}: {LOSS} is for spaces with tokens in their [trial], and "
            f"these allow no other objective; tokens of {space.name}: {space.tokens or 'none'}"
        )
    if space.tokens:
        if not DATA & read_settings((*space.flags, *flags)).explicit.keys():
            raise ConfigError(
                f"--objective {LOSS} needs data to learn from: give -- --data-path PREFIX"
            )
        if (args.iterations, args.warm_up) != (None, None):
            raise ConfigError("--iterations and --warm-up are for spaces without tokens in [trial]")
        args.confirm = 0  # the same seed gives the same loss
        if space.halving and not shows:
            find_search("optuna")  # Optuna's rule stops trials
    prior = not args.no_prior and not space.tokens  # the planner ranks only by time
    if prior and cluster is None:
        raise ConfigError(
            "the planner's ranking needs a machine description: measure this machine with 'python "
            "tools/calibrate.py -o machine.toml' and give --cluster machine.toml, or search "
            "without the ranking: --no-prior"
        )
    capacity = None if cluster is None else usable_bytes(args.headroom, cluster)
    if launcher == "local":
        each = _processes(args, space, cluster)
        nodes = 1
        target = LaunchTarget(launcher)
    elif args.processes is not None:
        raise ConfigError(
            "--processes is for --launcher local; use --tasks-per-node for the processes of a node"
        )
    else:
        hosts = () if args.hosts_file is None and shows else read_hosts(args.hosts_file)
        each = args.tasks_per_node or (cluster.devices_per_node if cluster else 8)
        nodes = len(hosts) or args.nodes or _most(space, "nodes")
        target = LaunchTarget(launcher, hosts, args.parallel or nodes)
        if not nodes:
            raise ConfigError("without --hosts-file: give --nodes N, the size of the allocation")
    if args.walltime is not None and not duration_s(args.walltime):
        raise ConfigError(
            f"--walltime {args.walltime}: give a time such as 90 (minutes), 1:30:00 or 1-00:00:00"
        )
    return Setup(
        args,
        space,
        tuple(flags),
        Machine(cluster, each, nodes, capacity),
        target,
        search,
        prior,
        args.out or Path("runs", f"tune-{space.name}").absolute(),
    )


def _processes(args: argparse.Namespace, space: SearchSpace, cluster: Cluster | None) -> int:
    """Return the number of local processes.

    This is --processes, or else the number of devices of a node of the described machine, or else
    the number of GPUs here. Without GPUs, it is the number of cores, or the largest number of
    processes in the space if that is larger. Raises ConfigError for flags of --launcher slurm.
    """
    for name in ("nodes", "tasks_per_node", "parallel"):
        if getattr(args, name) not in (None, 1):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for --launcher slurm: on this machine trials run "
                "one after another; use --processes for the number of devices"
            )
    if args.processes or cluster is not None:
        return int(args.processes or (cluster.devices_per_node if cluster else 1))
    return gpus_here() or max(len(os.sched_getaffinity(0)), _most(space, "processes"))


def _most(space: SearchSpace, name: str) -> int:
    """Return the largest number of nodes or processes in a space; 0 if the space has none."""
    values = {parameter.name: parameter.values for parameter in space.parameters}.get(name, ())
    text = space.derived[name].text if name in space.derived else ""
    fixed = int(text) if text.isdigit() else 0
    return max(n for n in (*values, fixed) if isinstance(n, int))
