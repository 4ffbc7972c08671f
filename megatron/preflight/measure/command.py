"""`tools/preflight.py measure`: what is asked on the command line, and how a process ends."""
from __future__ import annotations

import argparse
import getpass
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.option import real, whole
from megatron.errors import ConfigError, LaunchError, MegatronError, print_error

if TYPE_CHECKING:
    from megatron.parallel.launch import Launch
    from megatron.preflight.measure.conduct import Settings

DESCRIPTION = """\
Measure every device and node of an allocation, the links between neighbours, and whether groups of
ranks as a training has them come together, with one process for each device as the training has it:

    srun -N $N -n $((8 * N)) -c 7 --gpus-per-task=1 --gpu-bind=closest --kill-on-bad-exit=0 --wait=30 \\
        python tools/preflight.py measure --out logs/preflight

Slow, dead and missing hosts and GCDs are named, and a line --exclude=... is printed. Exit code of
rank 0: 0 enough good nodes, 4 too few, 2 a wrong setting. srun's own code may differ when another
process died or was ended after --wait: good_hosts, which is written last and is empty when there
are too few good nodes, is what a script should look at."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `measure`."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--cluster", metavar="NAME|FILE", default=os.environ.get("MEGATRON_CLUSTER") or None,
        help="machine whose bands a measurement has to lie in; default: MEGATRON_CLUSTER. Without one, and on a CPU, "
             "ranks are compared with each other",
    )  # fmt: skip
    parser.add_argument("--nodes-needed", type=whole(), metavar="N", help="good nodes that are enough (default: all)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write preflight.json, good_hosts and bad_hosts here"
    )
    parser.add_argument(
        "--seconds", type=real(least=5), default=60.0, metavar="S",
        help="about how long it may take (default 60); the missing are given up after a third of it, unless others "
             "still arrive. A group that hangs takes a minute more",
    )  # fmt: skip
    parser.add_argument("--backend", choices=("gloo", "nccl"), help="default: nccl (RCCL) where there are devices")
    parser.add_argument(
        "--disk", action="append", default=[], metavar="FOLDER",
        help="one more node-local folder to test, beside /tmp, /dev/shm and the cluster's own disk; may be repeated",
    )  # fmt: skip


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises ConfigError for values that cannot be."""
    from megatron.planning.cluster import load_cluster
    from megatron.preflight.measure.conduct import Settings

    known = args.cluster and args.cluster.lower() != "none"
    cluster = load_cluster(args.cluster) if known else None
    nvme = cluster.nvme_path.replace("$USER", getpass.getuser()) if cluster else ""
    disks = tuple(dict.fromkeys([*([nvme] if nvme else []), *args.disk, "/tmp", "/dev/shm"]))
    return Settings(cluster, args.nodes_needed, args.seconds, args.backend, disks, nvme)


def run(args: argparse.Namespace) -> int:
    """One process's part. The exit code of the measurement comes from rank 0; the others end with 0, so that the step's
    code is rank 0's, unless rank 0 is lost.

    Where there are several processes this does not return: a driver that hangs must not keep a process from ending.
    """
    # A wait that is repeated, and a process that dies, are no news here; torch would print lines about each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron.parallel.launch import detect_launch

    try:
        launch = detect_launch()
    except MegatronError as error:
        print_error(error)
        return 2
    try:
        settings = settings_of(args)
        _check_needed(settings, launch)
        code = _measure(launch, settings, args.out)
    except MegatronError as error:
        if launch.rank == 0 or isinstance(error, LaunchError):
            print_error(error)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    if launch.world_size > 1:
        os._exit(code)
    return code


def _check_needed(settings: Settings, launch: Launch) -> None:
    nodes = -(-launch.world_size // launch.local_world_size)
    if settings.nodes_needed is not None and settings.nodes_needed > nodes:
        raise ConfigError(f"--nodes-needed {settings.nodes_needed} is more than the {nodes} node(s) of this step")


def _measure(launch: Launch, settings: Settings, out: Path | None) -> int:
    from rich.console import Console

    from megatron.preflight.measure import report
    from megatron.preflight.measure.board import StoreLostError
    from megatron.preflight.measure.session import measure

    if launch.rank == 0 and out is not None:
        report.prepare_folder(out)
    try:
        results = measure(launch, settings, lambda line: print(f"preflight: {line}", flush=True))
    except StoreLostError as error:
        return _rank_0_lost(launch, out, str(error))
    if results is None:
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)
    report.print_results(results, settings.nodes_needed, console)
    if out is not None:
        report.write_files(out, results.as_json(settings.nodes_needed))
    return results.verdict(settings.nodes_needed)[0]


def _rank_0_lost(launch: Launch, out: Path | None, reason: str) -> int:
    """The first process of the second node speaks for all; where rank 0 has spoken after all, nothing is to be said."""
    from megatron.preflight.measure.expected import slurm_places
    from megatron.preflight.measure.report import write_for_rank_0

    if launch.rank != min(launch.local_world_size, launch.world_size - 1):
        return 0
    places = slurm_places(os.environ, launch.world_size)
    host = places[0][0].host if places else launch.master_addr
    text = f"rank 0 did not come, died or hangs: {reason}"
    if out is not None and not write_for_rank_0(out, host, text):
        return 0
    print_error(f"{host}: {text}\n--exclude={host}")
    return 4
