"""What answers mean: pure functions from what ranks and nodes told to findings and warnings."""
from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.parallel.nodelist import compress_ranks
from megatron.parallel.placing import visible_devices
from megatron.preflight.measure.device import VISIBLE
from megatron.preflight.measure.findings import Results
from megatron.preflight.measure.rules import STOPPED, Limit, limit_of

_NO_DEVICE = ("", "-1", "NoDevFiles")  # what a variable says that shows no device; the last is Slurm's word
_UNITS = {"host_gflops": "GFLOP/s", "gemm_tflops": "TFLOP/s", "stopped": ""}
WHAT = {
    "host_gflops": "matrix product on the host", "host_copy_gb_per_s": "copy in host memory",
    "gemm_tflops": "matrix product", "copy_gb_per_s": "copy in device memory",
    "stopped": "share of its time in which a process was stopped",
    "allreduce_gb_per_s": "all-reduce within the node", "p2p_gb_per_s": "messages within the node",
    "pair_gb_per_s": "messages between nodes",
}  # fmt: skip


def unit(metric: str) -> str:
    return _UNITS.get(metric, "GB/s")


def check_visible(results: Results, shown: Mapping[int, Mapping[str, str]]) -> None:
    """A rank that is shown no device where others of its node, or of most other nodes, are; two that are shown one.

    shown  the variables of VISIBLE as each rank has them
    """
    state = {rank: _visibility(variables) for rank, variables in shown.items()}
    some = {rank for rank, (has, _) in state.items() if has}
    hosts_with = [host for host, ranks in results.hosts.items() if some.intersection(ranks)]
    for host, ranks in results.hosts.items():
        present = [rank for rank in ranks if rank in state]
        without = [rank for rank in present if rank not in some]
        if host in hosts_with:
            for rank in without:
                results.accuse("device", rank, f"{state[rank][1]}, while other ranks of the node are shown one")
        elif without and 2 * len(hosts_with) > len(results.hosts):
            results.accuse_host("device", host, f"no rank is shown a device ({state[without[0]][1]})")
        _check_shared(results, {rank: shown[rank] for rank in present if rank in some})


def _visibility(variables: Mapping[str, str]) -> tuple[bool, str]:
    """(whether a device is shown, what to say where none is)."""
    for name, value in variables.items():
        if value.strip() in _NO_DEVICE:
            return False, f"{name} is {value.strip() or 'empty'}"
    return bool(variables), f"none of {', '.join(VISIBLE)} is set"


def _check_shared(results: Results, shown: Mapping[int, Mapping[str, str]]) -> None:
    """Where a node's ranks are shown different devices, no two may have the same. (Where all are shown the same,
    devices are numbered anew for each, or each sees all: then the device's own address tells.)"""
    numbers = {rank: visible_devices(variables) for rank, variables in shown.items()}
    users: dict[tuple[int, ...], list[int]] = {}
    for rank, devices in numbers.items():
        if devices is not None and len(devices) == 1:
            users.setdefault(devices, []).append(rank)
    if len(set(numbers.values())) > 1:
        for devices, ranks in users.items():
            if len(ranks) > 1:
                _accuse_sharers(results, ranks, f"device {devices[0]}")


def _accuse_sharers(results: Results, ranks: list[int], device: str) -> None:
    locals_ = ", ".join(str(results.places[rank].local_rank) for rank in ranks)
    for rank in ranks:
        results.accuse("device", rank, f"local ranks {locals_} share {device}")


def check_kinds(results: Results, backend: str | None) -> None:
    """Ranks without a device where others have one, and those that share one, by its address."""
    kinds = {rank: answer["kind"] for rank, answer in results.ranks.items() if "kind" in answer}
    if backend is None and "cuda" in kinds.values():
        for rank, kind in kinds.items():
            if kind == "cpu" and rank not in results.bad_ranks:
                results.accuse("device", rank, "torch sees no device, while other ranks have one")
    for ranks in results.hosts.values():
        users: dict[str, list[int]] = {}
        for rank in ranks:
            if identity := results.ranks.get(rank, {}).get("identity"):
                users.setdefault(identity, []).append(rank)
        for identity, sharers in users.items():
            if len(sharers) > 1:
                _accuse_sharers(results, sharers, f"the device at {identity}")


def suspects(
    values: Mapping[str, Mapping[Any, float]], ratios: Mapping[str, float], bands: Mapping[str, tuple[float, str]]
) -> tuple[dict[str, Limit], dict[Any, list[str]]]:
    """(the limit of each measurement, which of them each suspect failed).

    values  measurement -> who -> value; bands: measurement -> (lower end, where it is from)
    """
    limits: dict[str, Limit] = {}
    failed: dict[Any, list[str]] = {}
    for metric, of in values.items():
        if metric == "stopped":
            middle = statistics.median(of.values()) if of else 0.0
            limits[metric] = Limit(middle + STOPPED, middle, "share of a busy loop's time")
            slow = [who for who, value in of.items() if value > middle + STOPPED]
        else:
            limit = limit_of(of.values(), ratios[metric], *bands.get(metric, (None, "")))
            if limit is None:
                continue
            limits[metric] = limit
            slow = [who for who, value in of.items() if value < limit.slow]
        for who in slow:
            failed.setdefault(who, []).append(metric)
    return limits, failed


def fails(metric: str, value: float, limit: Limit) -> bool:
    return value > limit.slow if metric == "stopped" else value < limit.slow


def describe(metric: str, value: float, limit: Limit) -> str:
    """Measured against expected, for a person."""
    if metric == "stopped":
        return f"stopped {value:.0%} of its time (others {limit.reference:.0%}): something keeps it from running"
    return (
        f"{WHAT[metric]} {value:.3g} {unit(metric)}, expected at least {limit.slow:.3g} ({limit.basis}; others "
        f"{limit.reference:.3g})"
    )


def blame_groups(results: Results, kind: str, failed: Mapping[tuple[int, ...], str], hints: Iterable[str]) -> None:
    """Groups whose first collective failed, and how: a group within a node is its node's fault, others are nobody's."""
    for ranks, error in failed.items():
        hosts = list(dict.fromkeys(results.places[rank].host for rank in ranks))
        text = f"the first all-reduce of the {kind} group of ranks {compress_ranks(ranks)[:200]} fails: {error}"
        if len(hosts) == 1:
            results.accuse_host("network", hosts[0], text)
        else:
            named = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
            results.general.append("; ".join([f"{text} (on {named})", *hints]))


def check_facts(results: Results, nvme: str, nvme_free_gib: float | None, skew_s: float) -> None:
    """Node facts: versions and disks that differ from most nodes are faults, the rest is a warning.

    nvme           the machine's node-local disk, "" where it has none; nvme_free_gib: how much of it ought to be free
    skew_s         how far clocks may differ
    """
    nodes = {host: facts for host, facts in results.nodes.items() if "versions" in facts}
    _check_versions(results, nodes)
    _check_disks(results, nodes, nvme, nvme_free_gib)
    _check_memory(results, nodes)
    for host, facts in nodes.items():
        for where, count in facts.get("errors", {}).items():
            results.warnings.append(f"{host}: {count} uncorrected memory error(s) on {where} since its driver started")
    skews = {host: facts["skew_s"] for host, facts in nodes.items() if "skew_s" in facts}
    middle = statistics.median(skews.values()) if skews else 0.0
    for host, skew in skews.items():
        bound = nodes[host]["bound_s"]
        if abs(skew - middle) - bound > skew_s:
            results.warnings.append(
                f"{host}: its clock is {skew - middle:+.3f} s off (to {bound:.3f} s): times in logs and files differ"
            )


def _most_common(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _check_versions(results: Results, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    for name in next(iter(nodes.values()), {}).get("versions", {}):
        usual = _most_common(facts["versions"].get(name, "") for facts in nodes.values())
        for host, facts in nodes.items():
            here = facts["versions"].get(name, "")
            if here == usual:
                continue
            text = f"{name} is {here or 'unknown'}, on most nodes {usual or 'unknown'}"
            if name == "kernel":
                results.warnings.append(f"{host}: {text}")
            else:
                results.accuse_host("version", host, text)


def _check_disks(results: Results, nodes: Mapping[str, Mapping[str, Any]], nvme: str, nvme_gib: float | None) -> None:
    folders = list(dict.fromkeys(folder for facts in nodes.values() for folder in facts["disks"]))
    for folder in folders:
        disks = {host: facts["disks"][folder] for host, facts in nodes.items() if folder in facts["disks"]}
        failing = {host: disk["error"] for host, disk in disks.items() if "error" in disk}
        if len(failing) == len(disks):
            hint = ": was the job given its disks (for example sbatch -C nvme)?" if folder == nvme else ""
            results.warnings.append(f"no node can write {folder} ({_most_common(failing.values())}){hint}")
            continue
        for host, error in failing.items():
            results.accuse_host("disk", host, f"{folder} cannot be written: {error}")
        least = nvme_gib if folder == nvme and nvme_gib is not None else 1.0
        for host, disk in disks.items():
            if disk.get("free_gib", least) < least:
                results.warnings.append(f"{host}: {folder} has {disk['free_gib']:g} GiB free, {least:g} are expected")
        speeds = {host: disk["write_gb_per_s"] for host, disk in disks.items() if "write_gb_per_s" in disk}
        limit = limit_of(speeds.values(), 0.25)
        for host, speed in speeds.items():
            if limit and speed < limit.slow:
                results.warnings.append(
                    f"{host}: {folder} is written at {speed:.3g} GB/s, on other nodes {limit.reference:.3g}"
                )


def _check_memory(results: Results, nodes: Mapping[str, Mapping[str, Any]]) -> None:
    for name, share, what in (("MemTotal", 0.95, "memory"), ("MemAvailable", 0.5, "memory available")):
        known = {host: facts["memory"][name] for host, facts in nodes.items() if name in facts["memory"]}
        middle = statistics.median(known.values()) if known else 0.0
        for host, gib in known.items():
            if gib < share * middle:
                results.warnings.append(f"{host}: {gib:.0f} GiB of {what}, other nodes have {middle:.0f}")
