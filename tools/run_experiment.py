#!/usr/bin/env python
"""Run a scaling experiment: short trainings of one model on several node counts, layouts or batches.

    python tools/run_experiment.py weak --preset 175b --dry-run
    python tools/run_experiment.py strong --preset 1t --dry-run --nodes 384
    python tools/run_experiment.py tp --preset tiny --values 1,2 --launcher local --out runs/tp-tiny

Inside an allocation it is called by weak_scaling.sh, strong_scaling.sh and sweep_tp_pp_mbs.sh in
examples/frontier. Flags of pretrain_gpt.py for all points follow --. Each point gets a folder with
its description (point.json), metrics.jsonl, log and result (result.json). tools/report.py turns
these folders into tables and plots.

Exit codes: 0 all points done; 1 a point failed or does not fit; 2 error in the input; 3 out of
time or interrupted: the same command resumes; 4 the same, but no point was completed this time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.command_line import add_preset, split_at_dashes
from megatron.config.option import MOST_PROCESSES, Parser, integer, real
from megatron.errors import ConfigError
from megatron.jobs import experiment
from megatron.jobs.experiment import (
    KINDS,
    Experiment,
    ExperimentRequest,
    Point,
    plan,
    priced,
    state_of,
)
from megatron.jobs.result import DONE, FAILED
from megatron.jobs.runner import (
    LaunchTarget,
    Runner,
    add_launch_flags,
    read_hosts,
    slurm_time_left_s,
    time_left,
)
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.table import print_table
from megatron.training.run.process import as_tool

_COUNT = integer(1, MOST_PROCESSES)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    usage = "%(prog)s KIND [options] [-- flags of pretrain_gpt.py for every point]"
    parser = Parser(description=__doc__, usage=usage)
    parser.add_argument(
        "kind", choices=tuple(KINDS), help="experiment: what varies between its points"
    )
    add_preset(parser, more=", or 22b, 175b, 1t with --recipe (default 175b)")
    parser.set_defaults(preset="175b")
    parser.add_argument(
        "--recipe",
        choices=("paper", "frontier"),
        default="paper",
        help="the paper's settings, or ours for Frontier (default paper)",
    )
    parser.add_argument(
        "--values",
        type=_numbers,
        default=(),
        metavar="N,N",
        help="values of the size that varies (default: depends on the experiment and the model)",
    )
    parser.add_argument(
        "--batch",
        type=_COUNT,
        metavar="N",
        help="samples per replica (weak), micro-batches per pipeline stage (pp-bubble), or samples "
        "per step; not for the experiment batch, which varies them (default: as published, else "
        "that of the experiment or the preset)",
    )
    parser.add_argument(
        "--iterations", type=_COUNT, default=3, metavar="N", help="measured steps (default 3)"
    )
    parser.add_argument(
        "--warm-up",
        type=integer(0),
        default=2,
        metavar="N",
        help="steps before the measured ones (default 2)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the results (default: runs/<experiment>)",
    )
    parser.add_argument(
        "--points",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME,NAME",
        help="run only these points",
    )
    parser.add_argument("--retry-failed", action="store_true", help="run failed points again")
    _add_node_arguments(parser.add_argument_group("nodes and limits"))
    return parser


def _add_node_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dry-run", action="store_true", help="show the points and their cost; run nothing"
    )
    group.add_argument(
        "--print-nodes",
        action="store_true",
        help="print the number of nodes of the largest point; run nothing",
    )
    group.add_argument(
        "--list",
        action="store_true",
        help="print a job for each point that was not started or was interrupted (with "
        "--retry-failed, also if it failed): name, nodes, time, partition",
    )
    group.add_argument(
        "--print-limit",
        type=_COUNT,
        metavar="NODES",
        help="print the cluster's time limit for a job on NODES nodes",
    )
    add_launch_flags(group, "slurm")
    group.add_argument(
        "--one-at-a-time",
        action="store_true",
        help="do not run points side by side on disjoint nodes",
    )
    group.add_argument(
        "--limit",
        type=real(),
        metavar="SECONDS",
        help="time limit of a point (default: from its estimated cost)",
    )
    group.add_argument(
        "--cluster",
        default=os.environ.get("MEGATRON_CLUSTER", "frontier"),
        metavar="NAME|FILE",
        help="machine whose limits apply; none: no limits (default: MEGATRON_CLUSTER, else "
        "frontier)",
    )
    group.add_argument(
        "--partition",
        metavar="NAME",
        help="partition whose limits apply (default: the cluster's first)",
    )
    group.add_argument(
        "--tflops",
        type=real(),
        metavar="T",
        help="hardware TFLOP/s per device (MI250X: per GCD), for estimated times (default: as "
        "published)",
    )


def _numbers(text: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r}: give a list of whole numbers such as 1,2,4")
    return tuple(_COUNT(word) for word in words)


def requested(
    args: argparse.Namespace, flags: Sequence[str], cluster: Cluster | None
) -> ExperimentRequest:
    """Return the request of the command line; `flags` are those of pretrain_gpt.py."""
    tasks = args.tasks_per_node or (cluster.devices_per_node if cluster is not None else 8)
    if args.kind == "batch" and args.batch is not None:
        raise ConfigError("--batch: experiment batch varies the batch size: give --values instead")
    return ExperimentRequest(
        args.kind,
        args.preset.lower(),
        args.recipe,
        args.values,
        args.batch,
        args.iterations,
        args.warm_up,
        10**6 if args.launcher == "local" else tasks,
        tuple(flags),
    )


def longest_job(cluster: Cluster | None, nodes: int, partition: str | None) -> str:
    """Return the longest time of a job, for sbatch -t. Raises ConfigError without a cluster."""
    if cluster is None:
        raise ConfigError("the longest time of a job is that of a machine: name it with --cluster")
    minutes = round(60 * cluster.wall_limit_hours(nodes, partition))
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def list_jobs(
    args: argparse.Namespace, points: list[Point], cluster: Cluster | None, root: Path
) -> None:
    """Print the resources of a separate job for each point not yet started, or interrupted.

    With --retry-failed, also for those that failed. A dash stands for the default partition.
    """
    wanted = ["", "interrupted", *[FAILED] * args.retry_failed]
    for point in points:
        if state_of(root / point.name, point)[0] in wanted:
            partition = args.partition if point.fits_alone else point.queue or args.partition
            print(
                point.name,
                point.nodes,
                longest_job(cluster, point.nodes, partition),
                partition or "-",
            )


def chosen(points: list[Point], names: Sequence[str] | None) -> list[Point]:
    """Return the points of these names; None: all. Raises ConfigError for an unknown name."""
    known = {point.name: point for point in points}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ConfigError(f"--points {unknown[0]}: this experiment has {', '.join(known)}")
    return [known[name] for name in names] if names else points


def dry_run(
    args: argparse.Namespace, points: list[Point], cluster: Cluster | None, root: Path
) -> None:
    """Print the table of points, and remarks on them."""
    print_table(experiment.table(points, root))
    nodes = args.nodes or max(p.nodes for p in points)
    for line in experiment.remarks(points, nodes, cluster, not args.one_at_a_time, args.partition):
        print(f"- {line}")


def run(args: argparse.Namespace, points: list[Point], root: Path) -> int:
    """Run the points; return the exit code."""
    hosts: tuple[str, ...] = ()
    if args.launcher == "slurm":
        hosts = read_hosts(args.hosts_file)
    scaling_experiment = Experiment(root, points, args.limit, args.retry_failed, _say)
    target = LaunchTarget(args.launcher, hosts, 1 if args.one_at_a_time else len(hosts))
    scaling_experiment.run(Runner(target, _say, left_s=time_left(None, slurm_time_left_s)))
    summary(scaling_experiment, root)
    if scaling_experiment.out_of_time:
        return 3 if scaling_experiment.resumable else 4
    return 1 if scaling_experiment.reasons(FAILED) or scaling_experiment.waiting else 0


def _say(line: str) -> None:
    print(f" experiment: {line}", flush=True)


def summary(outcome: Experiment, root: Path) -> None:
    """Print the outcome of the points, and the command that writes the report."""
    failed = outcome.reasons(FAILED)
    waiting = outcome.waiting
    _say(
        f"{len(outcome.reasons(DONE))} point(s) done, {len(failed)} failed, {len(waiting)} not "
        f"run; {root}"
    )
    for name, why in {**failed, **waiting}.items():
        _say(f"  {name}: {why}")
    folder = shlex.quote(str(root))
    _say(f"report: python tools/report.py {folder} --output {folder}/report.html")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    words, flags = split_at_dashes(argv)
    args = build_parser().parse_args(words)
    cluster = None if args.cluster in ("none", "") else load_cluster(args.cluster)
    if args.print_limit is not None:
        print(longest_job(cluster, args.print_limit, args.partition))
        return 0
    request = requested(args, flags, cluster)
    points = chosen(plan(request), args.points)
    if args.print_nodes:
        print(max((p.nodes for p in points if p.problem is None), default=0))
        return 0
    root = args.out or Path("runs", request.experiment).absolute()
    limits = None if args.launcher == "local" else cluster
    points = [priced(point, limits, args.tflops, args.partition) for point in points]
    if args.list:
        list_jobs(args, points, cluster, root)
        return 0
    if args.dry_run:
        dry_run(args, points, limits, root)
        return 0
    return run(args, points, root)


if __name__ == "__main__":
    sys.exit(main())
