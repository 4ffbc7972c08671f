#!/usr/bin/env python
"""Measure this machine and write a cluster file, which plan.py and other tools take as --cluster.

    python tools/calibrate.py -o this.toml                                   # a minute; one process per GPU or core
    python tools/calibrate.py -o this.toml --processes 4 --preset gpt2-124m
    srun -N 2 -n 16 ... python tools/calibrate.py -o nodes.toml              # the processes and nodes of a launcher
    python tools/calibrate.py --refine runs/x/metrics.jsonl --cluster this.toml -o refined.toml

Accepts all flags of pretrain_gpt.py: matrix products and kernels are measured with the shapes and
the precision of the model that they describe (without any: gpt2-124m). On a CPU, where processes
share the cores, a file is valid only for the number of processes per node that it was measured
with. --refine corrects a file by the step times of runs of about 20 steps.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.settings import settings_to_take
from megatron.config.command_line import add_preset, with_preset
from megatron.config.option import Parser, integer, real
from megatron.errors import ConfigError, LaunchError
from megatron.training.run.process import as_tool, leave, run_guarded

DEFAULT_MODEL = ["--preset", "gpt2-124m"]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the tool's own flags; all others are those of pretrain_gpt.py."""
    parser = Parser(
        description=__doc__,
        usage="%(prog)s -o FILE.toml [--processes N] [--minutes M] [--name NAME] [--refine METRICS "
        "... --cluster FILE] [flags of pretrain_gpt.py]",
    )
    add_preset(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE.toml",
        help="cluster file to write",
    )
    parser.add_argument(
        "--processes",
        type=integer(1, 64),
        metavar="N",
        help="processes to start on this node (default: one per GPU, or without GPUs per core)",
    )
    parser.add_argument(
        "--minutes",
        type=real(60),
        default=1.0,
        metavar="M",
        help="approximate measuring time in minutes (default 1)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name of the machine (default: that of the file)"
    )
    parser.add_argument(
        "--refine",
        nargs="+",
        type=Path,
        metavar="METRICS",
        help="metrics files of runs on this machine, or folders of these runs, such as the "
        "trials of tune.py",
    )
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", help="with --refine: the cluster file to correct"
    )
    return parser


def calibrate(args: argparse.Namespace, flags: list[str], argv: Sequence[str]) -> None:
    """Measure the machine and write the cluster file. Raises MegatronError."""
    from megatron.config.command_line import parse_plan
    from megatron.parallel.launch import detect_launch
    from megatron.planner.subprocesses import gpus_here

    flags = flags or DEFAULT_MODEL
    config = parse_plan(flags, checkpoint=settings_to_take)
    launch = detect_launch()
    if launch.rank == 0 and "RANK" not in os.environ:
        print(f"measuring for about {args.minutes:g} minute(s): {' '.join(flags)}", flush=True)
    launched = launch.world_size > 1
    if launched and args.processes not in (None, launch.world_size):
        raise ConfigError(
            f"--processes {args.processes} contradicts the launcher's {launch.world_size}: remove "
            "--processes"
        )
    count = args.processes or (
        0 if launched else gpus_here() or min(64, len(os.sched_getaffinity(0)))
    )
    if not launched and count > 1:
        start(count, argv)
        return
    from megatron.planner.calibration.machine import machine, run
    from megatron.planner.cluster import write_cluster

    measurement = run(config, launch, 60 * args.minutes)
    if measurement is None:
        return
    cluster = machine(measurement, args.name or args.output.stem, flags)
    write_cluster(cluster, args.output, _HEADING)
    for figure in cluster.compute.values():
        print(
            f"  {figure.name:34} {figure.used.value:>22} {_unit(figure.name, measurement.device):8} "
            f"{figure.basis}"
        )
    print(
        f"{args.output}: {measurement.nodes} node(s) of {measurement.per_node} x {measurement.device}, "
        f"{sum(len(rows) for rows in measurement.points.values())} points of {len(measurement.points)} figures"
    )


def start(count: int, argv: Sequence[str]) -> None:
    """Start `count` processes of this program as a launcher would; print the first one's output.

    Raises LaunchError if one fails.
    """
    from megatron.jobs.result import ending
    from megatron.jobs.run_processes import logs_of, start_here

    with tempfile.TemporaryDirectory(prefix="megatron-calibration-") as name:
        folder = Path(name)
        job = start_here([sys.executable, "-u", os.path.abspath(__file__), *argv], count, folder)
        try:
            while not job.poll():
                time.sleep(0.1)
        finally:
            job.kill()
        if any(job.exit_codes or []):
            raise LaunchError(f"measuring failed: {ending(job.exit_codes, logs_of(folder)).reason}")
        print(logs_of(folder)[0].read_text(errors="replace"), end="")


def _unit(name: str, device: str) -> str:
    """Return the unit of a figure's values (planner/compute.py)."""
    if name.startswith(("products", "attention")):
        from megatron.model.formulas import device_unit

        return f"TFLOP/s per {device_unit(device)}"
    return "GB/s" if name.startswith("memory") or name == "update_gb_per_s" else "s"


_HEADING = """Measured by tools/calibrate.py; planner/compute.py has the names of the figures, their columns and units.
GB are 10^9 bytes, GiB 2^30; bandwidths are for each direction."""


def refine(args: argparse.Namespace, flags: list[str]) -> None:
    """Correct a cluster file by the step times of runs. Raises MegatronError."""
    from megatron.jobs.refine import refined
    from megatron.planner.cluster import load_cluster, write_cluster
    from megatron.planner.table import print_table

    if args.cluster is None:
        raise ConfigError("--refine needs --cluster, the cluster file to correct")
    if flags:
        raise ConfigError(
            f"{flags[0]} has no effect with --refine, which reads the settings from the metrics "
            "files: remove it"
        )
    cluster = load_cluster(args.cluster)
    if args.output.exists() and args.output.samefile(cluster.path):
        raise ConfigError(f"-o {args.output} is the cluster file to correct: choose another file")
    corrected, factors, errors, left_out = refined(cluster, args.refine)
    write_cluster(corrected, args.output, _HEADING)
    print_table(errors)
    for why in left_out:
        print(f"left out: {why}")
    print("times multiplied by {:.3f} for computations, {:.3f} for messages".format(*factors))
    print(f"{args.output}: {args.cluster}, corrected")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run the tool; return the exit code."""
    args, flags = build_parser().parse_known_args(argv)
    flags = with_preset(args.preset, flags[1:] if flags[:1] == ["--"] else flags)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    def body() -> None:
        if args.refine:
            refine(args, flags)
        else:
            calibrate(args, flags, argv)

    return run_guarded(body, int(os.environ.get("RANK", "0") or 0), "error")


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
