"""Write the description of a machine as cluster_file.py reads it."""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron.planner.cluster import Band, Cluster, Queue
from megatron.planner.cluster_file import source_of
from megatron.planner.compute import SCALARS, Figure
from megatron.untrusted import write_text


def write_cluster(cluster: Cluster, path: Path, heading: str = "") -> None:
    """Write the file; `heading` becomes comments at its top. Raises ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: choose a file that can be written") from error
    write_text(path, render_cluster(cluster, heading), choose="a file that can be written")


def render_cluster(cluster: Cluster, heading: str = "") -> str:
    """The text of a file that read_cluster makes the same machine of."""
    c = cluster
    lines = [*(f"# {line}".rstrip() for line in heading.splitlines()), ""] if heading else []
    top: dict[str, Any] = {"name": c.name, "title": c.title, "nodes": c.nodes, "group_nodes": c.group_nodes}
    if c.shared_cores is not None:
        top["shared_cores"] = c.shared_cores
    lines += _items(top)
    tables: dict[str, dict[str, Any]] = {
        "device": {
            "name": c.device, "type": c.device_type, "per_node": c.devices_per_node, "memory_gib": c.memory_gib,
            "peak_tflops": c.peak_tflops,
        },
        "links": {"gb_per_s": [[a, b, w] for (a, b), w in c.links.items()]},
        "nics": {
            "names": c.nics, "gb_per_s": c.nic_gb_per_s, "on_device": c.nic_on_device, "of_device": c.nic_of_device,
        },
        "cores": {
            "of_device": c.cores_of_device, "numa_of_device": c.numa_of_device, "reserved": c.reserved_cores,
            "per_task": c.cpus_per_task, "local_order": c.local_order,
        },
        "placement": {"device_orders": c.device_orders},
        "collectives": {"gb_per_s": [[inner, size, w] for (inner, size), w in c.collective_gb_per_s.items()]},
        "bands": {name: _band(band) for name, band in c.bands.items()},
        "slurm": {
            "wall_limits": c.wall_limits, "partitions": [_queue(q) for q in c.partitions],
            "qos": [_queue(q) for q in c.qos],
        },
        "nvme": {"path": c.nvme_path, "constraint": c.nvme_constraint},
        "startup_s": dict(c.startup_s),
    }  # fmt: skip
    for name, values in tables.items():
        lines += ["", f"[{name}]", *_items(values)]
    for figure in c.compute.figures.values():
        lines += ["", f"[compute.{figure.name}]", *_figure(figure)]
    return "\n".join([*lines, "", "[sources]", *_items(_sources(c)), ""])


def _sources(cluster: Cluster) -> dict[str, str]:
    """Those of the machine, and of each figure that the machine's do not name already."""
    found = dict(cluster.sources)
    for figure in cluster.compute.figures.values():
        if source_of(found, figure.name) != figure.source:
            found[f"compute_{figure.name.replace('.', '_')}"] = figure.source
    return found


def _figure(figure: Figure) -> list[str]:
    number = figure.name in SCALARS or (len(figure.points) == 1 and set(figure.points[0][:-1]) <= {1.0})
    values: dict[str, Any] = {"value": figure.value} if number else {"points": figure.points}
    values["basis"] = figure.basis
    if (figure.low, figure.high) != (1.0, 1.0):
        values["range"] = [figure.low, figure.high]
    return _items(values)


def _band(band: Band) -> list[Any]:
    return ["-" if side is None else side for side in band]


def _queue(queue: Queue) -> dict[str, Any]:
    return {name: value for name, value in queue._asdict().items() if value is not None}


def _items(values: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in values.items()]


def _key(name: str) -> str:
    plain = name.replace("_", "").replace("-", "")
    return name if plain.isascii() and plain.isalnum() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        # A basic string of TOML is one of JSON, where characters beyond 16 bits are not escaped in halves, and DEL is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_items(value)) + " }"
    if isinstance(value, Iterable):
        found = [_value(item) for item in value]
        text = "[" + ", ".join(found) + "]"
        return text if len(text) < 100 else "[\n" + "".join(f"    {item},\n" for item in found) + "]"
    return repr(value)
