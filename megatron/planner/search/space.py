"""Which layouts there are: every combination of sizes that the model, the devices and the batch allow."""
from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config import Config
from megatron.config.layout import Layout, allowed
from megatron.errors import ConfigError
from megatron.model.stages import assign_layers
from megatron.planner.cluster import Cluster
from megatron.planner.search.base import Base

# No scores of attention are kept, so that making them again saves nothing, unless attention is the plain one.
_KEEPS_SCORES = ("unfused", "local")


@dataclass
class Rejections:
    """How many of what were rejected for which reason, and one example of each."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    misses: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, unit: str, reason: str, example: str = "", times: int = 1, miss: float = 0.0) -> None:
        """`miss`: by how much; the example that missed by least is kept, of equal ones the first."""
        self.counts[unit, reason] += times
        if miss < self.misses.get((unit, reason), float("inf")):
            self.misses[unit, reason], self.examples[unit, reason] = miss, example


@dataclass(frozen=True)
class Space:
    """All layouts of a search.

    worlds   numbers of devices
    batches  global batches
    wanted   values that are allowed, by dimension; the largest tensor-parallel size is else a node's devices
    more     values that are tried beside those that are by default
    """

    base: Base
    cluster: Cluster
    worlds: tuple[int, ...]
    batches: tuple[int, ...]
    wanted: Mapping[str, tuple[Any, ...]]
    more: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def values(self, name: str, default: Iterable[Any]) -> list[Any]:
        """The values of a dimension that are tried, in order."""
        return sorted({*self.wanted.get(name, default), *self.more.get(name, ())})

    def config(self, layout: Layout) -> Config:
        """The whole configuration, validated as that of a run is. Raises ConfigError."""
        given = self.base.config
        return given.replace(**layout.settings(given.model.num_layers, given.parallel.pipeline_layout))

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def sizes(self, rejections: Rejections) -> Iterator[Layout]:
        """Every size that devices, layers and batch divide into; why others do not goes to `rejections`."""
        for devices in self.worlds:
            nodes = -(-devices // self.cluster.devices_per_node)
            if nodes > self.cluster.nodes:
                rejections.add("sizes of the job", f"{self.cluster.name} has {self.cluster.nodes} node(s)", f"{nodes}")
                continue
            if nodes > (most := _most_nodes(self.cluster)):
                rejections.add("sizes of the job", f"{self.cluster.name} gives a job no more than {most} nodes",
                               f"{nodes}")  # fmt: skip
                continue
            if devices > self.cluster.devices_per_node and devices % self.cluster.devices_per_node:
                each = self.cluster.devices_per_node
                rejections.add("sizes of the job", f"neither whole nodes of {each} devices nor a part of one",
                               f"{devices} devices")  # fmt: skip
                continue
            for tp in self._tensor_sizes(devices, rejections):
                for pp in self._pipeline_sizes(devices, tp, rejections):
                    yield from self._batched(devices, tp, pp, rejections)

    def _tensor_sizes(self, devices: int, rejections: Rejections) -> Iterator[int]:
        default = range(1, min(self.cluster.devices_per_node, devices) + 1)
        for tp in self.values("tp", default):
            if tp > devices:
                rejections.add("tensor sizes", "more than there are devices", f"tp={tp}, {devices} devices")
            elif (problem := self._problem(tp)) is not None:
                rejections.add("tensor sizes", "heads, MLP or vocabulary of the model do not divide so", problem)
            else:
                yield tp

    def _problem(self, tp: int) -> str | None:
        """What validation says against a tensor-parallel size alone."""
        try:
            settings = Layout(tp, tp, tp).settings(self.base.config.model.num_layers) | {"global_batch_size": None}
            self.base.config.replace(pipeline_layout=None, rampup_batch_size=None, **settings)
        except ConfigError as error:
            return str(error)
        return None

    def _pipeline_sizes(self, devices: int, tp: int, rejections: Rejections) -> Iterator[int]:
        layers = self.base.config.model.num_layers
        for pp in self.values("pp", range(1, min(layers, devices // tp) + 1)):
            if devices % (tp * pp):
                rejections.add("TP x PP", "does not divide the devices", f"tp={tp},pp={pp}: {tp * pp} into {devices}")
            if pp > layers:
                rejections.add("TP x PP", "more stages than layers", f"pp={pp}: {layers} layers")
            elif devices % (tp * pp) == 0:
                yield pp

    def _batched(self, devices: int, tp: int, pp: int, rejections: Rejections) -> Iterator[Layout]:
        replicas = devices // (tp * pp)
        scheduled = list(self._scheduled(pp, rejections))
        for batch in self.batches:
            if batch % replicas:
                rejections.add("TP x PP x batch", "replicas do not divide the global batch",
                               f"tp={tp},pp={pp}: {batch} samples on {replicas} replicas")  # fmt: skip
                continue
            for micro in self._micro_batches(batch // replicas, rejections):
                for chunks, schedule in scheduled:
                    size = Layout(devices, batch, tp, pp, chunks, schedule, micro)
                    if next(self.variants(size), None) is not None:
                        yield size
                    else:
                        rejections.add("sizes", "none of their variants is allowed")

    def _micro_batches(self, each: int, rejections: Rejections) -> Iterator[int]:
        """Powers of two that divide a replica's samples, or what is wanted."""
        default = [1 << k for k in range(each.bit_length())]
        for micro in self.values("mbs", default):
            if each % micro == 0:
                yield micro
            elif "mbs" in self.wanted or micro <= each:
                rejections.add("TP x PP x batch x micro-batch", "micro-batches do not divide a replica's samples",
                               f"mbs={micro}: {each} samples")  # fmt: skip

    def _scheduled(self, pp: int, rejections: Rejections) -> Iterator[tuple[int, str]]:
        """(chunks, schedule) of a pipeline of this size."""
        for chunks in self._chunks(pp, rejections):
            names = ("interleaved",) if chunks > 1 else ("1f1b", "zb-h1") if pp > 1 else ("1f1b",)
            for schedule in names:
                # A single stage has no schedule that could be asked for.
                if pp == 1 or allowed(schedule, "schedule", self.wanted):
                    yield chunks, schedule

    def _chunks(self, pp: int, rejections: Rejections) -> Iterator[int]:
        layers, layout = self.base.config.model.num_layers, self.base.config.parallel.pipeline_layout
        if layout is not None:
            count = layout.count(",") + 1
            default = [count // pp] if count % pp == 0 else []
        elif self.base.per_chunk is not None:
            count, rest = divmod(layers, pp * self.base.per_chunk)
            default = [count] if rest == 0 and count > 1 and pp > 1 else []
        elif pp == 1 or layers % pp:
            default = [1]
        else:
            default = [v for v in range(1, layers // pp + 1) if layers // pp % v == 0]
        if not default:
            rejections.add("pipeline sizes", "the layers of chunks that were asked for do not fit", f"pp={pp}")
        for chunks in self.values("chunks", default):
            if chunks in default:
                yield chunks
            else:
                rejections.add("PP x chunks", "layers do not divide into so many chunks",
                               f"pp={pp},chunks={chunks}: {layers} layers")  # fmt: skip

    # -- variants ------------------------------------------------------------------------------------------------------

    def variants(self, size: Layout) -> Iterator[Layout]:
        """Every layout of these sizes: sequence parallelism, overlap, ZeRO stage, recomputation."""
        switches = [self._switch(name, values, size) for name, values in (
            ("sp", (True, False)), ("overlap", (True, False)), ("zero", (1, 0)),
        )]  # fmt: skip
        for sp, overlap, zero, recompute in itertools.product(*switches, self.recomputations(size)):
            yield size._replace(sp=sp, overlap=overlap, zero=zero, recompute=recompute)

    def _switch(self, name: str, values: Sequence[Any], size: Layout) -> list[Any]:
        """The allowed ones; where the sizes leave no choice, what was asked for does not matter."""
        if not size.has_choice(name):
            return [getattr(size, name)]
        return [value for value in values if allowed(value, name, self.wanted)]

    def recomputations(self, size: Layout) -> Iterator[str]:
        """none, selective by each set of modules, whole layers in groups that divide a stage, or its first ones."""
        config = self.base.config
        stages = assign_layers(config.model.num_layers, size.pp * size.chunks, config.parallel.pipeline_layout)
        most, least = max(map(len, stages)), min(map(len, stages))
        modules: tuple[str, ...] = ("core_attn",) if config.kernels.attention_backend in _KEEPS_SCORES else ()
        modules += ("mlp_act", "layernorm")
        found = ["none"]
        for count in range(1, len(modules) + 1):
            found += [f"selective:{'+'.join(chosen)}" for chosen in itertools.combinations(modules, count)]
        found += [f"full:uniform:{n}" for n in range(1, most + 1) if most % n == 0]
        found += [f"full:block:{n}" for n in range(1, least if most == least else most)]
        for pattern in (*self.wanted.get("recompute", ()), *self.more.get("recompute", ())):
            # Asked for by its full name: it may be one that the search leaves out.
            if pattern not in found and pattern.count(":") == (2 if pattern.startswith("full") else 1):
                found.append(pattern)
        yield from (text for text in found if allowed(text, "recompute", self.wanted))


def _most_nodes(cluster: Cluster) -> int:
    """Of a job in the default queue."""
    known = [limit.nodes_to for limit in cluster.wall_limits]
    queue = cluster.partitions[0].max_nodes if cluster.partitions else None
    return min([max(known, default=cluster.nodes), *([] if queue is None else [queue])])

