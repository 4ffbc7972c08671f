"""The description of a machine out of what was measured on it."""
from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence

import torch

from megatron.model.formulas import peak_tflops
from megatron.planner.calibration.session import Found
from megatron.planner.cluster import Cluster, Queue
from megatron.planner.compute import ASSUMED, DTYPES, MEASURED, Compute, Figure

KERNEL_S = {"cpu": 1e-6, "cuda": 4e-6}
_KERNEL = (
    "assumed: least time of an operator on a CPU, or of a small kernel on a GPU; measured overheads of layers hold the "
    "operators' own, so that it only keeps tiny work from taking no time"
)


def machine(found: Found, name: str, argv: Sequence[str]) -> Cluster:
    text = (
        f"measured on {platform.node()} on {datetime.date.today().isoformat()} by tools/calibrate.py, "
        f"{found.nodes * found.per_node} process(es) of {found.threads} thread(s), torch {torch.__version__}, "
        f"over the shapes of: {' '.join(argv)}"
    )
    figures = [
        Figure(name, tuple(tuple(float(v) for v in row) for row in rows), MEASURED, text)
        for name, rows in found.points.items()
    ]
    figures += [Figure(name, ((value,),), MEASURED, text) for name, value in _scalars(found).items()]
    figures.append(Figure("kernel_s", ((KERNEL_S[found.device_type],),), ASSUMED, _KERNEL, 0.5, 3.0))
    devices = range(found.per_node)
    link, network = _gb_per_s(found, 1), _gb_per_s(found, 2)
    core = max(1, found.cores // found.per_node)
    return Cluster(
        name=name, title=f"{platform.node()}: {found.nodes} node(s) of {found.per_node} x {found.device}",
        nodes=found.nodes, device=found.device, devices_per_node=found.per_node,
        memory_gib=round(found.memory_gib / (found.per_node if found.device_type == "cpu" else 1), 2),
        peak_tflops=_peaks(found), links={(a, b): link for a in devices for b in devices if a < b},
        nics=("network",), nic_gb_per_s=network, nic_on_device=(0,), nic_of_device=(0,) * found.per_node,
        cores_of_device=tuple((min(i * core, found.cores - 1), min(i * core, found.cores - 1)) for i in devices),
        cpus_per_task=core, local_order=tuple(devices), device_orders=(tuple(devices),), partitions=(Queue("none"),),
        sources=_sources(found, text), device_type="cpu" if found.device_type == "cpu" else "cuda",
        compute=Compute({f.name: f for f in figures}),
        shared_cores=found.cores if found.device_type == "cpu" else None,
    )  # fmt: skip


def _scalars(found: Found) -> dict[str, float]:
    host = found.host
    scalars = {"step_overhead_s": host.step, "update_gb_per_s": found.points["update_gb_per_s"][0][-1]}
    if found.device_type == "cpu":  # on a GPU the host runs ahead of the device, and nothing of this is seen
        scalars |= {
            "layer_overhead_s": host.forward, "layer_forward_overhead_s": host.forward,
            "layer_backward_overhead_s": host.backward, "instruction_overhead_s": host.micro_batch / 2,
        }
    return {name: float(f"{value:.4g}") for name, value in scalars.items()}


def _peaks(found: Found) -> dict[str, float]:
    """Of a GPU what is published; of a CPU the fastest product that was measured, which utilisation then refers to."""
    best = {
        dtype: max(row[-1] for row in found.points[f"products.{dtype}"])
        for dtype in DTYPES if f"products.{dtype}" in found.points
    }  # fmt: skip
    if found.device_type == "cpu":
        return best
    known = {dtype: peak_tflops(found.device, dtype) for dtype in DTYPES}
    return {**best, **{dtype: peak for dtype, peak in known.items() if peak is not None}}


def _gb_per_s(found: Found, nodes: int) -> float:
    """Of the largest messages within a node (1) or between nodes (2); 1 where there were none."""
    rows = [row for row in found.points.get("messages", ()) if row[0] == nodes]
    return float(f"{rows[-1][1] / rows[-1][2] / 1e9:.4g}") if rows else 1.0


def _sources(found: Found, text: str) -> dict[str, str]:
    one = "no message crossed it: there was one node, or one process"
    memory = "all of the node's, in equal parts" if found.device_type == "cpu" else "the device's"
    return {
        "device": f"memory: {memory}. Peak: of a CPU the fastest product measured, of a known GPU what is published",
        "links": f"{text}: largest message between neighbours" if found.per_node > 1 else one,
        "nics": f"{text}: largest message between nodes, all at once" if found.nodes > 1 else one,
        "cores": "assumed: cores in the order of processes", "compute": text, "compute_kernel_s": _KERNEL,
    }
