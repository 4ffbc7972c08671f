#!/usr/bin/env python
"""Predict how much of a long run's time is training, after faults, saves, restarts and the queue.

python tools/effective_time.py --cluster frontier --nodes 1024 --spare-nodes 8 --replicas 128 --parameters 175e9
python tools/effective_time.py --nodes 9216 --spare-nodes 192 --machine-nodes 9408 --step-seconds 8.5
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer, real
from megatron.planner.cluster import Cluster, known_clusters, load_cluster
from megatron.planner.effective_time import (
    EffectiveTime,
    LongRun,
    best_interval_s,
    effective_time,
    in_repair,
)
from megatron.planner.effective_time_simulation import Month, quantile, simulate_months
from megatron.planner.faults import (
    FaultRecord,
    fault_rates,
    fault_records,
    origins_of_rates,
    scaled,
)
from megatron.planner.table import Table
from megatron.training.run.process import as_tool

WIDTH = 80
_BYTES_PER_PARAMETER = 12  # fp32 weights and two moments of Adam
_LOCAL_SHARE = 0.01  # of the time that stalls by local saves may take, as with `auto`
_LOW, _HIGH = "byterobust-dense", "rsc-1"  # the lowest and the highest published rate

# Name, value, origin. Times that depend on the machine are published ones of others: nothing here
# was measured on MI250X.
DEFAULTS: Mapping[str, tuple[float, str]] = {
    "restart_seconds": (
        65.0,
        "published: new processes on the same machines, 1,024 of them [B, table 7]",
    ),
    "start_seconds": (768.0, "published: requeue of 1,024 machines [B, table 7]"),
    "step_seconds": (10.0, "assumed"),
    "disk_minutes": (20.0, "assumed"),
    "disk_lag_seconds": (120.0, "assumed: time in which an asynchronous save is written"),
    "queue_minutes": (0.0, "assumed: a reservation, or jobs queued behind each other"),
    "hang_timeout": (300.0, "default of --hang-timeout"),
    "slow_seconds": (3600.0, "assumed: time until a slow rank is replaced, or its job ends"),
    "slowdown": (1.1, "published: slow hosts take about 10 % longer [M, 6.3]"),
    "repair_hours": (24.0, "assumed"),
}
# Seconds until a fault is detected, by kind.
_DETECTION = {
    "process": (2.0, "measured on a CPU: the supervisor sees the process end at once"),
    "node": (22.0, "by design: no sign of life for 20 s, checked every 2 s"),
    "network": (60.0, "published: errors are detected in about 60 s [B, 2.2]"),
}

EPILOG = """\
Rates: a name of megatron/planner/faults.toml. The bounds have the same mix of faults, with the lowest
and the highest published rate per node-day. Single runs list no slow ranks and no faults of storage:
these are added to each rate, in the proportion that they have on ByteRobust's platform. [B] is
ByteRobust, arXiv 2509.16293; [M] MegaScale, arXiv 2402.15627. A prediction: MI250X was not measured."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__, epilog=EPILOG)
    add = parser.add_argument
    run = parser.add_argument_group("run")
    run.add_argument("--nodes", type=integer(), required=True, metavar="N", help="nodes that train")
    run.add_argument("--days", type=real(least=0.01), default=30.0, help="length (default 30)")
    run.add_argument(
        "--spare-nodes",
        type=integer(0),
        default=0,
        metavar="N",
        help="nodes whose processes wait (--spare-ranks)",
    )
    run.add_argument(
        "--replicas", type=integer(), default=1, metavar="N", help="data-parallel size"
    )
    run.add_argument(
        "--droppable",
        type=integer(0),
        default=0,
        metavar="N",
        help="replicas without which the job goes on when there is no spare (--min-ranks)",
    )
    run.add_argument(
        "--parameters",
        type=real(1e15),
        default=175e9,
        metavar="P",
        help="of the model (default 175e9)",
    )
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--cluster",
        default="frontier",
        metavar="NAME|FILE",
        help=f"{', '.join(known_clusters())} or a file (default frontier)",
    )
    machine.add_argument(
        "--machine-nodes",
        type=integer(),
        metavar="N",
        help="nodes that jobs can get, for waits for repairs (default: always enough)",
    )
    machine.add_argument(
        "--rates",
        default="llama3",
        metavar="NAME",
        help="source of the fault rates (default llama3)",
    )
    machine.add_argument(
        "--job-hours",
        type=real(least=0),
        metavar="H",
        help="time limit of a job, 0: none (default: the cluster's limit)",
    )
    saves = parser.add_argument_group("saves, recovery and faults")
    saves.add_argument(
        "--local-steps",
        type=integer(0),
        metavar="N",
        help="steps between local checkpoints, 0: none (default: as often as 1 %% of the time allows)",
    )
    saves.add_argument(
        "--local-stall-seconds",
        type=real(least=0),
        metavar="S",
        help="time for which a save stops training (default: copy of the state to host memory)",
    )
    for name, (value, _) in DEFAULTS.items():
        saves.add_argument(
            f"--{name.replace('_', '-')}",
            type=real(least=0),
            metavar="T",
            help=f"default {value:g}",
        )
    add(
        "--months",
        type=integer(0, 100_000),
        default=100,
        metavar="N",
        help="simulated runs for the spread (default 100)",
    )
    add("--seed", type=integer(0), default=0)
    return parser


class RunInputs:
    """The run's inputs, each with where it comes from."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.rows: list[tuple[str, str, str]] = []

    def add(self, name: str, value: float, unit: str, origin: str) -> float:
        """Note an input, and return it."""
        self.rows.append((name.replace("_", " "), f"{value:,.6g} {unit}".strip(), origin))
        return value

    def default(self, name: str, unit: str) -> float:
        """Return what the command line has for an entry of DEFAULTS, or its value there."""
        given = getattr(self._options, name)
        value, origin = DEFAULTS[name]
        return (
            self.add(name, value, unit, origin)
            if given is None
            else self.add(name, given, unit, "given")
        )


def describe(options: argparse.Namespace, cluster: Cluster) -> tuple[LongRun, RunInputs]:
    """Return the run of the command line, and its inputs."""
    inputs = RunInputs(options)
    get = inputs.default
    step_s = max(get("step_seconds", "s"), 1e-6)
    stall_s = options.local_stall_seconds
    if stall_s is None:
        link = cluster.host_link_gb_per_s or 25.0
        devices = options.nodes * cluster.devices_per_node
        state = _BYTES_PER_PARAMETER * options.parameters / devices
        origin = f"calculated: {state / 1e6:,.0f} MB of a device at {link:g} GB/s"
        stall_s = inputs.add("local stall", state / (link * 1e9), "s", origin)
    else:
        inputs.add("local stall", stall_s, "s", "given")
    local = options.local_steps
    if local is None:
        local = max(1, math.ceil(stall_s / (_LOCAL_SHARE * step_s)))
        inputs.add(
            "local checkpoint every",
            local,
            "steps",
            "as --non-persistent-save-interval auto: at most 1 %",
        )
    else:
        inputs.add("local checkpoint every", local, "steps", "given")
    disk = max(round(get("disk_minutes", "min") * 60 / step_s / max(local, 1)), 1) * max(local, 1)
    hours = options.job_hours
    if hours is None:
        limits = [
            w.hours for w in cluster.wall_limits if w.nodes_from <= options.nodes <= w.nodes_to
        ]
        hours = inputs.add(
            "job limit", limits[0] if limits else 0.0, "h", f"cluster file of {cluster.name}"
        )
    else:
        inputs.add("job limit", hours, "h", "given")
    detection = {
        kind: inputs.add(f"detection, {kind}", *_with_unit(entry))
        for kind, entry in _DETECTION.items()
    }
    detection |= {
        "device": detection["process"],
        "storage": detection["process"],
        "hang": get("hang_timeout", "s"),
        "slow": get("slow_seconds", "s"),
    }
    run = LongRun(
        nodes=options.nodes,
        rates=fault_rates(options.rates),
        days=options.days,
        spare_nodes=options.spare_nodes,
        replicas=options.replicas,
        droppable=options.droppable,
        step_s=step_s,
        local_steps=local,
        local_stall_s=stall_s,
        local_lag_s=step_s,
        disk_steps=disk,
        disk_stall_s=stall_s,
        disk_lag_s=get("disk_lag_seconds", "s"),
        detection_s=detection,
        slowdown=max(get("slowdown", "times"), 1.0),
        restart_s=get("restart_seconds", "s"),
        start_s=get("start_seconds", "s"),
        queue_s=60 * get("queue_minutes", "min"),
        job_s=3600 * hours,
        machine_nodes=options.machine_nodes,
        repair_s=3600 * get("repair_hours", "h"),
    )
    return run, inputs


def _with_unit(entry: tuple[float, str]) -> tuple[float, str, str]:
    return entry[0], "s", entry[1]


def with_rate(run: LongRun, name: str) -> LongRun:
    """Return the run with the total rate of another source, and the same mix of faults."""
    total = sum(fault_rates(name).values())
    return replace(run, rates=scaled(run.rates, total))


def shares_table(run: LongRun, shares: Sequence[EffectiveTime]) -> Table:
    """Return the shares of the time with the low, the given and the high rate."""
    rows = []
    for name, _ in shares[0].items():
        values = [getattr(share, name) for share in shares]
        hours = f"{values[1] * run.days * 24:,.1f}"
        rows.append((name.replace("_", " "), *(f"{100 * value:.2f} %" for value in values), hours))
    allocated = [f"{100 * share.of_allocation:.2f} %" for share in shares]
    rows.append(("effective, without the queue", *allocated, ""))
    title = f"{run.nodes:,} nodes and {run.spare_nodes:,} spare ones, {run.days:g} days"
    return Table(
        title, ("share of the time", "few faults", "expected", "many faults", "hours"), rows
    )


def rates_table(run: LongRun, record: FaultRecord) -> Table:
    """Return the faults of each kind, with the record of faults.toml that the rate is from."""
    origins = origins_of_rates(record.name)
    rates = {**run.rates, "all": sum(run.rates.values())}
    rows = [
        (kind, f"{1000 * rate:.3f}", f"{run.nodes * rate * run.days:,.1f}", origins.get(kind, ""))
        for kind, rate in rates.items()
    ]
    return Table(
        f"faults: {record.title} ({record.basis})",
        ("kind", "per 1,000 node-days", "expected", "rate of"),
        rows,
    )


def simulated(months: Sequence[Month]) -> list[str]:
    """Return the spread of the effective share, and the jobs that the simulated runs took."""
    effective = [100 * month.shares.effective for month in months]
    low, high = quantile(effective, 0.05), quantile(effective, 0.95)
    return [
        f"effective: {statistics.fmean(effective):.2f} % on average, {low:.2f} to {high:.2f} % is the "
        f"90 % interval of {len(months)} simulations",
        f"jobs: {statistics.fmean(month.jobs for month in months):.1f} on average, at most "
        f"{max(month.restarts for month in months)} restarts in one",
    ]


def advice(run: LongRun, months: Sequence[Month] = ()) -> list[str]:
    """Return recommended intervals and limits, which suffice for the simulated months, too."""
    within = run.rate(*(kind for kind in run.rates if kind != "maintenance"))
    job_s = run.job_s or run.days * 86400
    restarts = sum(run.rate(kind) * run.restarts_of(kind) for kind in run.rates) * job_s
    # Of independent Poisson processes, each of whose events counts this often.
    variance = sum(run.rate(kind) * run.restarts_of(kind) ** 2 for kind in run.rates) * job_s
    most = max((month.restarts for month in months), default=0)
    enough = max(math.ceil(restarts + 4 * math.sqrt(variance)), most)
    lost = run.rate(*run.take_nodes) * job_s
    lines = [
        f"mean time between failures (MTBF), without maintenance: {1 / within / 3600:.2f} h",
        f"best time between saves (Young, Daly): local {best_interval_s(run.local_stall_s, within):.0f} s"
        f" of training at {run.local_stall_s:.3g} s each, now {run.save_s:.0f} s",
        f"--max-restarts: at least {enough} for a job of {job_s / 3600:.0f} h ({restarts:.0f} "
        "expected)",
        f"spare nodes: {lost:.1f} nodes are lost in such a job on average, "
        f"{_enough(lost)} are enough in 99 of 100 jobs",
    ]
    if run.machine_nodes is not None:
        lines.append(f"nodes in repair: {in_repair(run):.1f} on average")
    return lines


def _enough(mean: float) -> int:
    """Return the number of events that a Poisson distribution exceeds in 1 of 100 cases."""
    number, log_term, total = 0, -mean, math.exp(-mean)
    while total < 0.99:
        number += 1
        log_term += math.log(mean / number)
        total += math.exp(log_term)
    return number


@as_tool
def main(argv: Sequence[str]) -> int:
    options = build_parser().parse_args(argv)
    run, inputs = describe(options, load_cluster(options.cluster))
    few, many = with_rate(run, _LOW), with_rate(run, _HIGH)
    shares = [effective_time(few), effective_time(run), effective_time(many)]
    print(shares_table(run, shares).text(WIDTH))
    months = simulate_months(run, options.months, options.seed)
    if months:
        for line in simulated(months):
            print(textwrap.fill(line, WIDTH, initial_indent=" ", subsequent_indent="   "))
    print()
    print(rates_table(run, fault_records()[options.rates]).text(WIDTH))
    per_1000 = [1000 * sum(each.rates.values()) for each in (few, many)]
    print(
        f" few faults: {per_1000[0]:.2f} per 1,000 node-days ({_LOW}), many: {per_1000[1]:.2f} ({_HIGH}),"
        "\n in the same proportions. Kinds that a source lacks are added to its rate."
    )
    print()
    print(Table("inputs", ("input", "value", "origin"), inputs.rows).text(WIDTH))
    print()
    for line in advice(run, months):
        print(textwrap.fill(line, WIDTH, initial_indent=" ", subsequent_indent="   "))
    print(" A prediction: nothing of it was measured on MI250X.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
