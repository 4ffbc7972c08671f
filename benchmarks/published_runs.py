"""Published training runs of other codes: their layout, speed and source, from `published_rows/`.

No figure of a machine's file was fitted to them. A row has its complete layout as flags of
pretrain_gpt.py, so that the time model treats it like any other run. Its kernels and its attention
become flags here, in one place for all rows. `caveat` lists differences that neither expresses.

Many rows are set aside: the time model was developed without looking at predictions for them. There
are three collections, in `published_rows/`, `second/` and `third/`. Before the first prediction for a
collection, its rows and the rule by which they are set aside (`PublishedRun.drawn`) were committed.
Once judged, its rows serve for development.
"""

from __future__ import annotations

import functools
import hashlib
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.config.command_line import parse_plan
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.evidence import CURRENT, SMALL
from megatron.planner.trace import cached_sizes

_ROWS = Path(__file__).with_name("published_rows")

_FOLDERS = _ROWS, _ROWS / "second", _ROWS / "third"
"""Rows of each collection."""

KERNELS = {
    "apex": "--no-cross-entropy-loss-fusion --no-rope-fusion",
    "te": "",
    "megatron": "--no-cross-entropy-loss-fusion",
    "compiled": "--no-cross-entropy-loss-fusion --no-gradient-accumulation-fusion",
    "eager": (
        "--no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion "
        "--no-cross-entropy-loss-fusion --no-gradient-accumulation-fusion"
    ),
}
"""Flags for kernels that are fused by apex and Megatron-LM; all fused, as with Transformer Engine;
those of Megatron-LM's default with it; compiled by torch.compile; or torch's own."""


SHARED_CLOUDS = {"aws-p5"}
"""Machines whose bandwidth between nodes depends on other customers."""


@dataclass(frozen=True)
class PublishedRun:
    """Published run.

    name       identifies the row; it never changes, because it decides the half
    machine    name of the description of the machine
    devices    number of devices
    flags      its model and layout, as flags of pretrain_gpt.py
    value      the published speed, in `unit`
    unit       "s" of a step, "tokens/s", "samples/s" and "TFLOP/s", also per device, or "MFU %"
    kernels    one of KERNELS
    attention  implementation of attention; "unfused" stores the scores
    software   name and version of the code
    source     where it is published
    caveat     differences that the flags do not express
    flops      how the source counts FLOPs, for TFLOP/s and MFU: "6N" (without attention), "palm"
               (6 N + 12 L H Q T for a token), "megatron" (all matrix products and attention, with
               recomputation if all layers are recomputed) or "stated" (flops_per_step)
    parameters number of parameters N by which the source counts; None: all of the model
    spread     standard deviation over runs, as a share, if published
    memory_gib peak memory of a device, if published; memory_kind: as "allocated" or "reserved" by
               torch, or as "smi" shows it
    node_gbit  Gb/s of a node's network cards together, if they differ from the machine's
    irregular  why the speed says little about the layout: it is left out of summaries of errors
    inferred   parts of the model or of the layout that the source does not state
    known      whether its prediction was known before the rule for the halves was fixed
    collection the collection that it belongs to, from 1
    """

    name: str
    machine: str
    devices: int
    flags: str
    value: float
    unit: str
    kernels: str
    attention: str
    software: str
    source: str
    caveat: str
    date: str = ""
    flops: str = ""
    parameters: float | None = None
    flops_per_step: float | None = None
    peak_tflops: float | None = None
    spread: float | None = None
    memory_gib: float | None = None
    memory_kind: str = ""
    node_gbit: float | None = None
    irregular: str = ""
    inferred: str = ""
    known: bool = False
    collection: int = 1

    @property
    def drawn(self) -> bool:
        """Membership in the part of its collection on which the time model was judged.

        Of the first two collections, two thirds of the rows whose predictions were not known before
        do, by the hash of the name; of the third, whose rows are all within the scope, all do.
        """
        digest = hashlib.sha256(self.name.encode()).digest()
        chosen = self.collection == 3 or int.from_bytes(digest[:8]) % 3 > 0
        return chosen and not self.known

    @property
    def set_aside(self) -> bool:
        """Membership in the part of the last collection on which the time model is judged."""
        return self.drawn and self.collection == len(_FOLDERS)

    @property
    def outside(self) -> str:
        """Return why the accuracy that the guides state does not hold for this run; "" if it does.

        Fixed after the first collection was judged, and before the second one was.
        """
        if self.inferred:
            return "a part of the layout is inferred"
        if self.config.model.num_experts:
            return "experts"
        if cached_sizes(self.config).parameters() < SMALL:
            return "less than a billion parameters"
        if self.machine in SHARED_CLOUDS:
            return "shared cloud"
        return f"software before {CURRENT}" if self.date < CURRENT else ""

    @property
    def origin(self) -> str:
        """The source without the place in it."""
        return self.source.partition(",")[0].partition(" (")[0]

    def argv(self) -> list[str]:
        """Return the arguments for `parse_plan`."""
        kernels = KERNELS[self.kernels]
        if self.attention == "unfused":
            kernels += " --attention-backend unfused"
        return [*self.flags.split(), *kernels.split(), "--world-size", str(self.devices)]

    @functools.cached_property
    def config(self) -> Config:
        return parse_plan(self.argv())

    @functools.cached_property
    def cluster(self) -> Cluster:
        """Return the machine, with this run's attention and network."""
        of_rows = _ROWS / "machines" / f"{self.machine}.toml"
        cluster = load_cluster(of_rows if of_rows.exists() else self.machine)
        if self.node_gbit:
            cluster = _with_network(cluster, self.node_gbit / 8)
        attention = self.attention
        if attention == "unknown" and self.kernels in ("te", "megatron"):
            # Transformer Engine prefers it on Hopper, the only devices that have its rates
            # (github.com/NVIDIA/NeMo, pull request 9188)
            attention = "cudnn"
        prefix = f"attention_{attention}."
        name = f"attention.{self.config.precision.dtype_name}."
        return cluster.with_figures(
            replace(figure, name=figure.name.replace(prefix, name))
            for figure in cluster.compute.values()
            if figure.name.startswith(prefix)
        )

    @functools.cached_property
    def seconds(self) -> float:
        """Return the published seconds of a step."""
        quantity, _, per = self.unit.partition("/device")
        value = self.value * (self.devices if "/device" in self.unit else 1)
        samples = self.config.batch.global_batch_size
        if quantity == "s":
            return value
        if quantity == "samples/s":
            return samples / value
        if quantity == "tokens/s":
            return samples * self.config.model.seq_length / value
        if quantity == "TFLOP/s":
            return self._step_flops() / (value * 1e12)
        assert self.unit == "MFU %" and self.peak_tflops and not per, self.unit
        return self._step_flops() / (value / 100 * self.peak_tflops * 1e12 * self.devices)

    def _step_flops(self) -> float:
        """Return the FLOPs of a step as the source counts them."""
        if self.flops == "stated":
            assert self.flops_per_step
            return self.flops_per_step
        model = self.config.model
        tokens = self.config.batch.global_batch_size * model.seq_length
        sizes = cached_sizes(self.config)
        if self.flops == "megatron":
            recompute = self.config.recompute.recompute_granularity == "full"
            return tokens * sizes.flops_per_token() * (4 / 3 if recompute else 1)
        parameters = self.parameters or sizes.parameters(active=True)
        scores = 12 * model.num_layers * model.hidden_size * model.seq_length
        return tokens * (6 * parameters + scores * (self.flops == "palm"))


def _with_network(cluster: Cluster, gb_per_s: float) -> Cluster:
    """Return the machine with network cards of this many GB/s for a node."""
    factor = gb_per_s / (len(cluster.nics) * cluster.nic_gb_per_s)
    return replace(
        cluster,
        nic_gb_per_s=factor * cluster.nic_gb_per_s,
        collective_gb_per_s={
            (stride, size): rate * (1 if size else factor)
            for (stride, size), rate in cluster.collective_gb_per_s.items()
        },
    )


def _runs(path: Path, collection: int) -> list[PublishedRun]:
    """Read a file: its models' flags, and series of runs with what they have in common."""
    tables: dict[str, Any] = tomllib.loads(path.read_text())
    runs = []
    for series in tables["series"]:
        for row in series.pop("runs"):
            fields = {**series, **row}
            flags = tables.get("models", {}).get(fields.pop("model", ""), "")
            flags = " ".join([flags, series.get("flags", ""), row.get("flags", "")])
            runs.append(PublishedRun(**{**fields, "flags": flags, "collection": collection}))
    return runs


RUNS: tuple[PublishedRun, ...] = tuple(
    run
    for collection, folder in enumerate(_FOLDERS, 1)
    for path in sorted(folder.glob("*.toml"))
    for run in _runs(path, collection)
)
