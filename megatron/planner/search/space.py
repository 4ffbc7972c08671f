"""Search space: the sizes and switches that the model, the devices and the batch allow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config
from megatron.config.command_line import read_settings, with_preset
from megatron.config.config import finish
from megatron.config.parallel import V_SHAPED
from megatron.config.settings import all_options
from megatron.errors import ConfigError
from megatron.model.stages import assign_layers
from megatron.planner.cluster import GIB, Cluster
from megatron.planner.layout import MODULES, CandidateLayout, Restrictions, allowed
from megatron.planner.memory import room_bytes

LONG = 32768
"""Sequence length from which a search also tries context parallelism."""

# Only unfused attention stores scores: with other backends recomputing them saves no memory.
_STORES_SCORES = ("unfused", "local")


def make_config(preset: str | None, flags: Sequence[str], batch: int) -> Config:
    """Configure a model from a preset and flags of pretrain_gpt.py, on one device.

    With --pipeline-layout it is on one device per stage.

    Raises ConfigError for invalid flags and for flags whose values the search chooses.
    """
    settings = read_settings(with_preset(preset, flags), checkpoint=settings_to_take)
    stages = 1 + settings.explicit.get("pipeline_layout", "").count(",")
    neutral = CandidateLayout(stages, batch, pp=stages).settings(1)
    for name in (*neutral, "cluster", "deepspeed_config"):
        if settings.origins.get(name) == "command line":
            settings.problems.append(
                f"{all_options()[name].flag} is not allowed after --: use --nodes, --devices, "
                "--global-batch, --cluster or --fix instead (see --help)"
            )
        settings.give(name, neutral.get(name), "search")
    return finish(settings)


def usable_bytes(headroom: str, cluster: Cluster) -> float:
    """Return the bytes for tensors that --headroom (GiB or a percentage) leaves on a device.

    Raises ConfigError if it is invalid or leaves nothing.
    """
    total = cluster.memory_gib * GIB
    unit = total / 100 if headroom.endswith("%") else GIB
    try:
        reserved = float(headroom.removesuffix("%")) * unit
    except ValueError:
        reserved = -1.0
    if not 0 <= reserved < total:
        raise ConfigError(
            f"--headroom {headroom}: give GiB or a share such as 10%, less than the "
            f"{cluster.memory_gib:g} GiB of a {cluster.device}"
        )
    return room_bytes(total - reserved, cluster.device_type)


@dataclass
class Rejections:
    """Reasons for rejecting layouts or sizes.

    counts   number of rejections for each reason
    nearest  for each reason (miss, example) of the smallest miss: the bytes that a layout needs, if
             it does not fit; otherwise 0
    """

    counts: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, tuple[float, str]] = field(default_factory=dict)

    def add(self, reason: str, example: str, miss: float = 0.0, times: int = 1) -> None:
        self.counts[reason] += times
        if miss < self.nearest.get(reason, (float("inf"), ""))[0]:
            self.nearest[reason] = miss, example


@dataclass(frozen=True)
class LayoutSpace:
    """All layouts that a search considers.

    base          configuration without a layout; name: name of its model; cluster: machine
    worlds        numbers of devices to consider
    restrictions  allowed values by dimension, including global batches
    more          values to try in addition to the default ones
    """

    base: Config
    name: str
    cluster: Cluster
    worlds: tuple[int, ...]
    restrictions: Restrictions
    more: Restrictions = field(default_factory=dict)

    def write(self, layout: CandidateLayout) -> str:
        """Format a layout for --layout."""
        return layout.write(self.cluster.devices_per_node)

    def config(self, layout: CandidateLayout) -> Config:
        """Configure a layout, validated as for a run. Raises ConfigError if it is invalid."""
        layout = self.with_numbers(layout)
        return self.base.replace(
            **layout.settings(self.base.model.num_layers, self.base.parallel.pipeline_layout)
        )

    def with_numbers(self, layout: CandidateLayout) -> CandidateLayout:
        """Return a layout with numbers for shards over the ranks of a node (-1).

        These are the data-parallel ranks on a node whose only other ranks are tensor-parallel ones.
        """
        on_node = max(1, min(self.cluster.devices_per_node // layout.tp, layout.gradient_ranks))
        shard, states = (on_node if n == -1 else n for n in (layout.shard, layout.states))
        return layout._replace(shard=shard, states=states)

    def _values(self, name: str, default: Iterable[Any]) -> list[Any]:
        return sorted({*self.restrictions.get(name, default), *self.more.get(name, ())})

    # -- sizes -------------------------------------------------------------------------------------

    def sizes(self, rejections: Rejections) -> Iterator[CandidateLayout]:
        """Yield all sizes that fit the devices, layers and batch; add others to `rejections`."""
        layers = self.base.model.num_layers
        for world in self.worlds:
            for tp in self._values("tp", range(1, min(self.cluster.devices_per_node, world) + 1)):
                problem = f"tp={tp}, {world} devices" if tp > world else self._problem(tp)
                if problem is not None:
                    rejections.add(
                        "tensor-parallel size that the model or the devices do not allow", problem
                    )
                    continue
                for pp in self._values("pp", range(1, min(layers, world // tp) + 1)):
                    if pp > layers or world % (tp * pp):
                        rejections.add(
                            "TP x PP does not divide the devices, or more stages than layers",
                            f"tp={tp},pp={pp}: {tp * pp} into {world}, {layers} layers",
                        )
                        continue
                    divisions = self._context_and_expert_sizes(tp, world // (tp * pp))
                    if not divisions:
                        rejections.add(
                            "context- or expert-parallel sizes do not divide the ranks of a stage",
                            f"tp={tp},pp={pp}: {world // pp} ranks",
                        )
                    for cp, ep, etp in divisions:
                        yield from self._sizes(
                            CandidateLayout(world, 0, tp, pp, cp=cp, ep=ep, etp=etp), rejections
                        )

    def _context_and_expert_sizes(self, tp: int, ranks: int) -> list[tuple[int, int, int]]:
        """List context-, expert- and expert-tensor-parallel sizes for `ranks` data-parallel ranks.

        By default context parallelism uses powers of two, for long sequences only, and expert
        parallelism every size that divides the number of experts. Experts are undivided, and spread
        over all ranks of a tensor-parallel group or over none. They are also divided like attention
        without expert parallelism, and over more ranks than undivided experts could use: on equally
        many ranks, these need no gathered tokens, and one tensor rank instead of all sends a token.
        For expert-parallel sizes that are asked for, both are tried.
        """
        model = self.base.model
        long = model.seq_length >= LONG
        experts = model.num_experts or 1
        powers = [1 << k for k in range(ranks.bit_length())] if long else [1]
        stage = tp * ranks
        divisors = [ep for ep in range(1, min(stage, experts) + 1) if experts % ep == 0]
        tensor = self._values("etp", {1, tp}) if model.num_experts else [tp]
        asked = bool({"ep", "etp"} & {*self.restrictions, *self.more})
        return [
            (cp, ep, 0 if etp == tp else etp)
            for cp, ep, etp in itertools.product(
                self._values("cp", powers), self._values("ep", divisors), tensor
            )
            if ranks % cp == stage % (ep * etp) == max(tp, etp) % min(tp, etp) == 0
            and (asked or ep == 1 or (ep >= tp if etp == 1 else experts % (ep * etp)))
        ]

    def _sizes(self, shape: CandidateLayout, rejections: Rejections) -> Iterator[CandidateLayout]:
        """Yield all sizes of this shape: batches, micro-batches, chunks and schedules.

        By default micro-batch sizes are powers of two.
        """
        schedules = self._schedules(shape.pp)
        if not schedules:
            asked = (
                f", {name}={'|'.join(map(str, self.restrictions[name]))}"
                for name in ("chunks", "schedule")
                if name in self.restrictions
            )
            rejections.add(
                "layers do not divide into chunks of an allowed number and schedule",
                f"pp={shape.pp}: {self.base.model.num_layers} layers{''.join(asked)}",
            )
        for batch in self.restrictions["gbs"]:
            each, rest = divmod(batch, shape.replicas)
            powers = [1 << k for k in range(each.bit_length())]
            micros = [m for m in self._values("mbs", powers) if each % m == 0]
            if rest or not micros:
                example = (
                    f"tp={shape.tp},pp={shape.pp}: {batch} samples on {shape.replicas} replicas"
                )
                rejections.add("replicas and micro-batches do not divide the global batch", example)
                continue
            for micro in micros:
                for count, schedule in schedules:
                    size = shape._replace(batch=batch, micro=micro, chunks=count, schedule=schedule)
                    if any(True for _ in self.variants(size)):
                        yield size
                    else:
                        rejections.add("no variant of these sizes is allowed", self.write(size))

    def _problem(self, tp: int) -> str | None:
        """Return the validation error for a tensor-parallel size by itself; None if it is valid."""
        try:
            settings = CandidateLayout(tp, tp, tp).settings(self.base.model.num_layers)
            free = "global_batch_size pipeline_layout rampup_batch_size step_batch_size_schedule"
            self.base.replace(**settings | dict.fromkeys(free.split()))
        except ConfigError as error:
            return str(error)
        return None

    def _chunks(self, pp: int) -> list[int]:
        layers = self.base.model.num_layers
        layout = self.base.parallel.pipeline_layout
        counts = [1]
        if layout is not None:
            stages = layout.count(",") + 1
            counts = [stages // pp] if stages % pp == 0 else []
        elif pp > 1 and layers % pp == 0:
            counts = [v for v in range(1, layers // pp + 1) if layers // pp % v == 0]
        return [chunks for chunks in counts if chunks in self._values("chunks", counts)]

    def _schedules(self, pp: int) -> list[tuple[int, str]]:
        """List (chunks, schedule). DualPipeV, for layers that overlap, only on request."""
        if pp == 1:  # no choice of schedule
            return [(count, "1f1b") for count in self._chunks(1)]
        pairs = [
            (count, name)
            for count in self._chunks(pp)
            for name in (("interleaved",) if count > 1 else ("1f1b", "zb-h1"))
        ]
        layout = self.base.parallel.pipeline_layout
        fits = (
            self.base.model.num_layers >= 2 * pp
            if layout is None
            else (layout.count(",") + 1 == 2 * pp)
        )
        if fits and 2 in self._values("chunks", [2]):
            asked = self.restrictions.get("schedule", ())
            pairs += [(2, name) for name in V_SHAPED if name != "dualpipev" or name in asked]
        return [pair for pair in pairs if allowed(pair[1], "schedule", self.restrictions)]

    # -- variants ----------------------------------------------------------------------------------

    def variants(self, size: CandidateLayout) -> Iterator[CandidateLayout]:
        """Yield layouts of these sizes, over SP, overlap, ZeRO stage and shards, and recomputation.

        The optimizer's state is on the host only if requested.
        """
        # If the sizes leave no choice, --fix is ignored.
        switches = [
            [value for value in (True, False) if allowed(value, name, self.restrictions)]
            if size.has_choice(name)
            else [getattr(size, name)]
            for name in ("sp", "overlap")
        ]
        switches.append(self._values("offload", (False,)))
        for sp, overlap, offload, (zero, shard, states), recompute in itertools.product(
            *switches, self._zeros(size), self.recomputations(size)
        ):
            yield size._replace(
                sp=sp,
                overlap=overlap,
                offload=offload,
                recompute=recompute,
                zero=zero,
                shard=shard,
                states=states,
            )

    def _zeros(self, size: CandidateLayout) -> list[tuple[int, int, int]]:
        """List (ZeRO stage, ranks that shard gradients, ranks that shard optimizer state).

        0 ranks means all. In stage 3 the ranks that shard gradients also shard weights. By default
        gradients are sharded over all ranks or, in stages 2 and 3, over the ranks of a node, and
        optimizer state over all ranks.
        """
        if not size.has_choice("zero"):
            return [(size.zero, size.shard, size.states)]
        ranks = size.gradient_ranks
        stages = (1, 0, 2) if size.pp > 1 else (1, 0, 2, 3)
        # data-parallel neighbours on a node: each comes with its tensor-parallel ranks
        node = self.cluster.devices_per_node // size.tp
        names = "zero", "shard", "states"
        triples = [(stage, 0, 0) for stage in stages]
        triples += [(stage, node, 0) for stage in stages if stage > 1 and 1 < node < ranks]
        asked = [
            (0, *self.restrictions.get(name, ()), *self.more.get(name, ())) for name in names[1:]
        ]
        triples += [
            (stage, *pair) for stage in stages if stage for pair in itertools.product(*asked)
        ]

        def fits(zero: tuple[int, int, int]) -> bool:
            _, shard, states = (n or ranks for n in zero)
            held = shard * size.tp
            rest = min(held % size.expert_ranks, size.expert_ranks % held)
            return ranks % states == states % shard == rest == 0 and all(
                allowed(value, name, self.restrictions)
                for name, value in zip(names, zero, strict=True)
            )

        return list(filter(fits, dict.fromkeys(triples)))

    def recomputations(self, size: CandidateLayout) -> Iterator[str]:
        """Yield values of `recompute`: none, sets of modules, groups of layers, first layers."""
        stages = assign_layers(
            self.base.model.num_layers, size.pp * size.chunks, self.base.parallel.pipeline_layout
        )
        most = max(map(len, stages))
        stores_scores = self.base.kernels.attention_backend in _STORES_SCORES
        modules = MODULES if stores_scores else MODULES[1:]
        choices = ["none"]
        for count in range(1, len(modules) + 1):
            sets = itertools.combinations(modules, count)
            choices += [f"selective:{'+'.join(chosen)}" for chosen in sets]
        choices += [f"full:uniform:{n}" for n in range(1, most + 1) if most % n == 0]
        choices += [f"full:block:{n}" for n in range(1, most)]
        # A requested value with all its fields, such as full:block:3, may be one that the search
        # would not try.
        asked = (*self.restrictions.get("recompute", ()), *self.more.get("recompute", ()))
        choices += [p for p in asked if p.count(":") == (2 if p.startswith("full") else 1)]
        yield from dict.fromkeys(t for t in choices if allowed(t, "recompute", self.restrictions))
