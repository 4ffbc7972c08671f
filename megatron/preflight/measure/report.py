"""What a person and a launch script get to see of a measurement."""
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron.errors import ConfigError
from megatron.model.formulas import device_unit
from megatron.preflight.measure.findings import Results

_ROWS = 40  # nodes in the table; of more, those with faults come first
_LINES = 64  # findings and warnings that are printed; the file has all

FILES = ("preflight.json", "good_hosts", "bad_hosts")


def prepare_folder(folder: Path) -> None:
    """Make the folder, without the files of an earlier measurement: a launch script must not take them for this one's.

    Raises ConfigError where it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be written: {error.strerror}: name another folder") from error


def write_files(folder: Path, content: dict[str, Any]) -> None:
    """preflight.json, good_hosts and bad_hosts, each whole or not at all; good_hosts last."""
    texts = {
        "preflight.json": json.dumps(content, indent=1 if content.get("nodes", 0) <= _ROWS else None) + "\n",
        "bad_hosts": "".join(f"{host}\n" for host in content["bad_hosts"]),
        "good_hosts": "".join(f"{host}\n" for host in content["good_hosts"]),
    }
    for name, text in texts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        os.replace(temporary, folder / name)


def write_for_rank_0(folder: Path, host: str, reason: str, wait_s: float = 2.0) -> bool:
    """What another node writes when rank 0 is lost: its host is bad. False where there are results already, and where
    the folder cannot be written: then rank 0 ended for that reason, and has said so."""
    time.sleep(wait_s)  # rank 0 may only be late
    if (folder / "preflight.json").exists():
        return False
    finding = {"kind": "missing", "host": host, "rank": 0, "local_rank": 0, "text": reason}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, {
            "exit_code": 4, "good_hosts": [], "bad_hosts": [host], "exclude": f"--exclude={host}",
            "general": [], "findings": [finding], "warnings": [],
        })  # fmt: skip
    except OSError:
        return False
    return True


_COLUMNS = (
    # heading, key, what of a node's ranks, format
    ("host GFLOP/s", "host_gflops", min, "{:.1f}"),
    ("stopped", "stopped", max, "{:.0%}"),
    ("GEMM TFLOP/s", "gemm_tflops", min, "{:.1f}"),
    ("copy GB/s", "copy_gb_per_s", min, "{:.0f}"),
    ("host copy GB/s", "host_copy_gb_per_s", min, "{:.1f}"),
    ("all-reduce GB/s", "allreduce_gb_per_s", min, "{:.3g}"),
    ("p2p GB/s", "p2p_gb_per_s", min, "{:.3g}"),
)


def node_table(results: Results) -> Table:
    """One row a node: the slowest of its ranks in each measurement. Columns without a value are left out."""
    known = results.ranks.values()
    columns = [column for column in _COLUMNS if any(column[1] in rank for rank in known)]
    bad = set(results.bad_hosts)
    hosts = list(results.hosts)
    shown = sorted(hosts, key=lambda host: host not in bad)[:_ROWS] if len(hosts) > _ROWS else hosts
    more = f", {len(shown)} of {len(hosts)} shown, those with faults first" if len(shown) < len(hosts) else ""
    folders = next((", ".join(facts["disks"]) for facts in results.nodes.values() if "disks" in facts), "none")
    table = Table(
        title=f"Nodes (the slowest rank of each{more})", title_justify="left", caption_justify="left",
        caption=f"free GiB: {folders}; clock: against rank 0's, to what the way there and back allows",
    )  # fmt: skip
    table.add_column("node", no_wrap=True)
    table.add_column("ranks", justify="right")
    device = device_unit(next((rank["device_name"] for rank in known if "device_name" in rank), ""))
    for heading, key, *_ in columns:
        table.add_column(f"{heading} per {device}" if key == "gemm_tflops" else heading, justify="right")
    for heading in ("neighbours GB/s", "clock ms", "free GiB", ""):
        table.add_column(heading, justify="right" if heading else "left")
    slowest = _slowest_pairs(results)
    missing = {finding.rank for finding in results.findings if finding.kind == "missing"}
    for host in shown:
        table.add_row(*_row(results, host, columns, slowest, missing, host in bad))
    return table


def _slowest_pairs(results: Results) -> dict[str, float]:
    """Of each host's ranks the slowest, each with its best neighbour: the other one may be at fault."""
    best: dict[int, float] = {}
    for pair, bandwidth in results.pairs.items():
        for rank in pair:
            best[rank] = max(bandwidth, best.get(rank, 0.0))
    slowest: dict[str, float] = {}
    for rank, bandwidth in best.items():
        host = results.places[rank].host
        slowest[host] = min(bandwidth, slowest.get(host, bandwidth))
    return slowest


def _row(
    results: Results, host: str, columns: Sequence[Any], slowest: dict[str, float], missing: set[int | None], bad: bool
) -> list[str]:
    ranks = results.hosts[host]
    found = [results.ranks.get(rank, {}) for rank in ranks]
    facts = results.nodes.get(host, {})
    cells = []
    for _, key, choose, form in columns:
        values = [rank[key] for rank in found if key in rank]
        cells.append(form.format(choose(values)) if values else "-")
    skew = f"{facts['skew_s'] * 1e3:+.1f}±{facts['bound_s'] * 1e3:.1f}" if "skew_s" in facts else "-"
    disks = facts.get("disks", {}).values()
    free = " ".join(f"{disk['free_gib']:.0f}" if "free_gib" in disk else "-" for disk in disks) or "-"
    present = sum(1 for rank in ranks if rank in results.ranks and rank not in missing)
    pair = f"{slowest[host]:.3g}" if host in slowest else "-"
    return [host, f"{present}/{len(ranks)}", *cells, pair, skew, free, "[red]excluded[/red]" if bad else "good"]


def print_results(results: Results, nodes_needed: int | None, console: Console) -> None:
    """The table, the faults, what is only a warning, and the line for sbatch."""
    console.print(node_table(results))
    _print_some(console, "whole allocation: ", results.general)
    _print_some(console, "FAULT ", [finding.line for finding in results.findings])
    _print_some(console, "warning ", results.warnings)
    code, use = results.verdict(nodes_needed)
    good, total = len(results.good_hosts), len(results.hosts)
    wanted = total if nodes_needed is None else nodes_needed
    lines = [f"{good} of {total} nodes are good, {wanted} needed; {results.seconds:.0f} s"]
    if results.exclude:
        lines.append(results.exclude)
    if code:
        why = "the fault is no single node's" if results.general else "too few good nodes"
        lines.append(f"preflight failed: {why}")
    elif len(use) < good:
        lines.append(f"to be used: the first {len(use)} of them")
    _print_some(console, "", lines)


def _print_some(console: Console, label: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    for line in lines[:_LINES]:
        console.print(f"{label}{line}", markup=False, highlight=False, soft_wrap=True)
    if len(lines) > _LINES:
        console.print(f"{label}... {len(lines) - _LINES} more in preflight.json", markup=False, soft_wrap=True)
