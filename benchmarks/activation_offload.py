"""Cost the offloading of activations to host memory, which the engine does not have, by the planner.

    python benchmarks/activation_offload.py [--markdown]              # the recipes in docs/planning.md
    python benchmarks/activation_offload.py --preset gpt-22b-frontier --nodes 1,8 [--cluster C]
        [--global-batch B] [--fix NAME=VALUE ...] [--speed S] [--markdown] [-- FLAGS of pretrain_gpt.py]

After a layer's forward pass a share of its kept activations would be copied to the host beside
computation, and back before its backward pass. For each recipe the program finds

- the best layout today, as tools/plan.py does, with the optimizer's state on device or host;
- the best layout with offloading. States must fit on the device. The share that a pipeline rank
  moves is the least that makes it fit: what its peak exceeds the room on a device, divided by the
  activations at the peak without the part of two layers, which stays as buffers. All kinds of
  recomputation are tried with it;
- the same with copies that take no time, an upper bound in the searched space ("at most").

Bytes leave beside forward and return beside backward passes, at the lower of the link's bandwidth
and a device's part of the bandwidth of host memory, where each byte is written once and read once,
by all devices of a node at a time. A pass takes at least as long as its copy, and while a copy runs
it keeps a share of its speed (speed_beside_messages, or --speed). The clock of the schedule then
runs with these passes. A node's host must hold the bytes, next to the optimizer's state with
offload=on, and keeps the same share of its memory free as a device. Other peaks of a rank than its
highest are not checked, so the gains are optimistic.

The best layout of a device whose memory is also the host's is that of today: there, bytes that are
moved are still in the same memory.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

import plan
from benchmarks.shared import Table, markdown, parser, print_table
from megatron.config import Config
from megatron.config.command_line import split_at_dashes
from megatron.engine.buckets import bucket_rule
from megatron.engine.zero_plan import zero_of
from megatron.errors import ConfigError
from megatron.model.stages import stages_of_rank
from megatron.pipeline.clock import StageTimes, run_pipeline
from megatron.planner.channels import Channels
from megatron.planner.cluster import Cluster, Host, load_cluster
from megatron.planner.layout import CandidateLayout, kind_of_recompute
from megatron.planner.memory import (
    CATEGORIES,
    CPU_BLOCK,
    GPU_BLOCK,
    RankMemory,
    chunk_memory,
    host_bytes,
    peak_rank,
)
from megatron.planner.progress import SearchProgress
from megatron.planner.rates import rates_of
from megatron.planner.search.find import LayoutSearch, Ranked, RejectedLayout, search
from megatron.planner.stage import stages_on
from megatron.planner.timing import estimate
from megatron.planner.timing.estimate import Estimate
from megatron.planner.timing.passes import stage_seconds
from megatron.planner.trace import trace

SMALL = "schedule=1f1b,interleaved zero=1 sp=on overlap=off mbs=1,2,4 offload=off,on"
"""Restrictions of all searches, unless a recipe or --fix gives other values of a name."""
RECIPES = (
    ("gpt-22b-frontier", "1,8", "tp=1,2,4,8"),
    ("gpt-175b-frontier", "16,128", "tp=2,4,8 pp=4,8,16"),
    ("gpt-1t-frontier", "128,384", "tp=8 pp=16,32 mbs=1,2 zero=1,2"),
    ("llama-8b", "1", "tp=1,2,4,8 zero=1,2,3"),
    ("llama-8b", "8", "tp=1,2,4 pp=1,2,4"),
    ("llama-8b-1m-frontier", "8,32", "tp=8 pp=1 mbs=1 zero=1,2,3 overlap=on,off sp=on,off"),
    ("moe-55b-frontier", "32", "tp=1 pp=2,4,7 ep=8 etp=1"),
)
"""(preset, numbers of nodes, further restrictions); batches are those of the presets."""
ENOUGH = 0.05
"""Gain from which offloading would be built."""
_LAYERS = 2
_ACTIVATIONS = CATEGORIES.index("activations")


# -- arithmetic ------------------------------------------------------------------------------------


def copy_bytes_per_s(host: Host, devices: int) -> float:
    """Return the rate of a device's copies while all `devices` of a node copy in one direction."""
    return 1e9 * min(host.link_gb_per_s, host.memory_gb_per_s / devices)


def added_seconds(pass_s: float, copy_s: float, speed: float) -> float:
    """Return by how much a copy lengthens a pass, which keeps `speed` of its speed beside it."""
    return max(copy_s - pass_s, (1.0 - speed) * min(pass_s / speed, copy_s))


def share_to_move(excess: float, activations: float, buffers: float) -> float | None:
    """Return the share of all activations to move, so that a rank needs `excess` bytes less.

    buffers  bytes of the layers whose moved part is on the device, too

    None if all of them are not enough.
    """
    if excess <= 0.0:
        return 0.0
    if excess > activations - buffers:
        return None
    return excess / (activations - buffers)


def kept_bytes(config: Config, rank: int, device: str) -> list[float]:
    """Return the activations in bytes that a micro-batch keeps in each stage of a pipeline rank."""
    zero = zero_of(config)
    shared = (zero, bucket_rule(config, zero.gradient_ranks)) if zero.divides_gradients else None
    block = CPU_BLOCK if device == "cpu" else GPU_BLOCK
    traced = trace(config, device)
    return [
        float(chunk_memory(traced, stage, block, shared).retained[_ACTIVATIONS])
        for stage in stages_on(config, rank)
    ]


class RankOffload(NamedTuple):
    """Bytes that a pipeline rank moves.

    share    of its activations
    copied   bytes of a micro-batch, each way, by stage of the rank
    on_host  bytes in host memory at the peak
    """

    share: float
    copied: tuple[float, ...]
    on_host: float


def offload_of_rank(
    config: Config, memory: RankMemory, capacity: float, device: str
) -> RankOffload | None:
    """Return what a rank moves to fit into `capacity` bytes; None if nothing helps."""
    kept = kept_bytes(config, memory.rank, device)
    layers = [max(1, stage.layers) for stage in stages_on(config, memory.rank)]
    buffers = _LAYERS * max(of / n for of, n in zip(kept, layers, strict=True))
    share = share_to_move(memory.total - capacity, memory.activations, buffers)
    if share is None:
        return None
    return RankOffload(share, tuple(share * of for of in kept), share * memory.activations)


# -- search ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffloadSearch(LayoutSearch):
    """Search in which activations may be moved to the host.

    speed  share of its speed that a pass keeps beside copies; None: that beside messages
    free   whether copies take no time
    """

    speed: float | None = None
    free: bool = False

    def fit(self, ranked: Ranked) -> Ranked | RejectedLayout:
        """Find and score the layout with the best --recompute-num-layers, by the busiest copies."""
        space = self.space
        layout = ranked.layout
        layouts = list[Ranked]()
        misfits = list[RejectedLayout]()
        device = space.cluster.device_type
        try:
            for recompute in space.recomputations(layout):
                if kind_of_recompute(recompute) != kind_of_recompute(layout.recompute):
                    continue
                option = layout._replace(recompute=recompute)
                config = space.config(option)
                peak = peak_rank(config, device, self.capacity)
                moved = offload_of_rank(config, peak, self.capacity, device)
                if moved is None or moved.on_host > self.host_room(config, peak.rank):
                    misfits.append(self._misfit(option, peak.total, peak.rank))
                    continue
                added = config.num_micro_batches() * self._alone(config, peak.rank, moved)
                score = self._folded(option, config) + added / layout.batch
                layouts.append(Ranked(score, option, peak.total))
                if not moved.share:  # more recomputation only takes longer
                    break
        except ConfigError as error:
            return RejectedLayout("refused by the configuration", str(error))
        return min(layouts) if layouts else min(misfits, key=lambda one: one.miss)

    def judge(self, alike: Sequence[Ranked]) -> list[Ranked]:
        """Estimate layouts with their copies."""
        judged = []
        for one in super().judge(alike):
            offload = self.offload(one.layout)
            if offload is not None:
                judged.append(one._replace(score=offload.seconds / one.layout.batch))
        return judged

    def offload(self, layout: CandidateLayout) -> Offload | None:
        """Estimate a layout with its copies; None if it does not fit."""
        cluster = self.space.cluster
        predicted = estimate(self.space.config(layout), cluster)
        config = predicted.config
        ranks = list[RankOffload]()
        for memory in predicted.memory:
            moved = offload_of_rank(config, memory, self.capacity, cluster.device_type)
            if moved is None or moved.on_host > self.host_room(config, memory.rank):
                return None
            ranks.append(moved)
        forward, backward = ([0.0] * len(predicted.stage_seconds) for _ in range(2))
        for rank, moved in enumerate(ranks):
            for stage, n_bytes in zip(stages_of_rank(config, rank), moved.copied, strict=True):
                of = predicted.stage_seconds[stage]
                forward[stage], backward[stage] = (
                    self._added(config, pass_s, n_bytes) for pass_s in (of.forward_s, of.backward_s)
                )
        return Offload(predicted, tuple(ranks), tuple(forward), tuple(backward))

    def host_room(self, config: Config, rank: int) -> float:
        """Return the bytes of host memory for activations of one device of a pipeline rank."""
        cluster = self.space.cluster
        on_node = min(config.parallel.world_size, cluster.devices_per_node)
        state = host_bytes(config, rank, cluster.device_type)
        return self._room_on_host / on_node - state

    def _added(self, config: Config, pass_s: float, n_bytes: float) -> float:
        """Return by how many seconds a copy lengthens a pass."""
        if self.free or not n_bytes:
            return 0.0
        cluster = self.space.cluster
        on_node = min(config.parallel.world_size, cluster.devices_per_node)
        speed = self.speed
        if speed is None:
            speed = rates_of(cluster, config.precision.dtype_name).speed_beside_messages
        return added_seconds(pass_s, n_bytes / copy_bytes_per_s(cluster.host, on_node), speed)

    def _alone(self, config: Config, rank: int, moved: RankOffload) -> float:
        """Return the seconds that copies add to a micro-batch's passes without messages."""
        if self.free or not moved.share:
            return 0.0
        cluster = self.space.cluster
        traced = trace(config, cluster.device_type)
        rates = rates_of(cluster, config.precision.dtype_name)
        added = 0.0
        for stage, n_bytes in zip(stages_on(config, rank), moved.copied, strict=True):
            of = stage_seconds(traced, stage, rates, None)
            added += self._added(config, of.forward_s, n_bytes)
            added += self._added(config, of.backward_s, n_bytes)
        return added

    def _has_room(self, config: Config, channels: Channels) -> bool:
        return True

    def _too_big(self, sizes: Sequence[CandidateLayout]) -> RejectedLayout | None:
        return None


@dataclass(frozen=True)
class Offload:
    """Layout with copies.

    predicted          without copies
    ranks              what each pipeline rank moves
    forward, backward  seconds that copies add to the passes of each stage
    """

    predicted: Estimate
    ranks: tuple[RankOffload, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        pipeline = self.predicted.run.pipeline
        times = pipeline.times
        if not any((*self.forward, *self.backward)):
            return self.predicted.seconds
        longer = StageTimes(
            tuple(map(sum, zip(times.forward, self.forward, strict=True))),
            tuple(map(sum, zip(times.backward, self.backward, strict=True))),
            times.weight,
            times.first,
        )
        run = run_pipeline(dataclasses.replace(pipeline, times=longer))
        return self.predicted.seconds + run.makespan - self.predicted.run.makespan

    @property
    def most(self) -> RankOffload:
        """The rank that moves the largest share."""
        return max(self.ranks, key=lambda rank: rank.share)


# -- recipes ---------------------------------------------------------------------------------------


HEADER = [
    "recipe",
    "best today",
    "s/step",
    "best with offloading",
    "share",
    "GB",
    "s/step",
    "gain",
    "at most",
    "limit",
]


def row_of(args: Sequence[str], flags: Sequence[str], name: str, speed: float | None) -> list[str]:
    """Return the row of one recipe, given the arguments of tools/plan.py, and those after "--"."""
    today = plan.make_search(plan.build_parser().parse_args(args), flags)
    cluster = today.space.cluster
    best = _best(today)
    if best is None:
        return [name, "nothing fits", *[""] * (len(HEADER) - 2)]
    before = best.seconds
    known = [name, written(best.layout), f"{before:.4g}"]
    if cluster.host_memory_gib is None:
        return [*known, "the same", "0 %", "0", f"{before:.4g}", "0 %", "0 %", "one memory"]
    fields = today.space, today.capacity, today._known
    at_most = _best(OffloadSearch(*fields, free=True)) or best
    costed = OffloadSearch(*fields, speed=speed)
    chosen = _best(costed) or best
    offload = costed.offload(chosen.layout)
    if offload is None or chosen.seconds >= before:
        offload = costed.offload(best.layout)
        assert offload is not None, "it fits without offloading"
        chosen = best
    gains = [before / one.seconds - 1.0 for one in (chosen, at_most)]
    most = offload.most
    return [
        *known,
        "the same" if chosen.layout == best.layout else written(chosen.layout),
        f"{100 * most.share:.0f} %",
        f"{sum(most.copied) / 1e9:.2f}",
        f"{chosen.seconds:.4g}",
        *(f"{100 * gain:.1f} %" for gain in gains),
        limit_of(offload, gains, cluster),
    ]


def _best(layout_search: LayoutSearch) -> Ranked | None:
    with SearchProgress() as progress:
        result = search(layout_search, 10, 1, progress)
    return result.best[0] if result.best else None


def limit_of(offload: Offload, gains: Sequence[float], cluster: Cluster) -> str:
    """Name what keeps a gain from being larger."""
    gain, at_most = gains
    if at_most < ENOUGH:
        return "memory costs little today"
    config = offload.predicted.config
    on_node = min(config.parallel.world_size, cluster.devices_per_node)
    slow = copy_bytes_per_s(cluster.host, on_node) < 1e9 * cluster.host.link_gb_per_s
    if gain < at_most - 0.005:
        return "host bandwidth" if slow else "link"
    return "device and host memory"


def written(layout: CandidateLayout) -> str:
    """Return the main choices of a layout, in the planner's notation."""
    text = f"tp={layout.tp},pp={layout.pp}"
    text += f",chunks={layout.chunks}" if layout.chunks > 1 else ""
    text += f",cp={layout.cp}" if layout.cp > 1 else ""
    text += f",ep={layout.ep}" if layout.ep > 1 else ""
    text += f",mbs={layout.micro},recompute={layout.recompute.removeprefix('selective:')}"
    text += f",zero={layout.zero}" if layout.zero > 1 else ""
    return text + (",offload=on" if layout.offload else "")


def arithmetic(cluster: Cluster) -> str:
    """Say what copies can do on a machine."""
    each = cluster.memory_gib
    if cluster.host_memory_gib is None:
        return (
            f"{cluster.name}: the {each:g} GiB of a device are also the memory of its host. Of n GiB moved from one to "
            f"the other, the device has {each:g} - used + n - n left: nothing is gained, and copies take time."
        )
    devices = cluster.devices_per_node
    host = cluster.host
    return (
        f"{cluster.name}: {each:g} GiB on a device and {host.memory_gib / devices:.1f} GiB for it on the host; "
        f"copies at {copy_bytes_per_s(host, devices) / 1e9:.1f} GB/s, the lower of the link's {host.link_gb_per_s:g} "
        f"and {host.memory_gb_per_s:g} / {devices}."
    )


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--preset", help="default: the recipes in docs/planning.md")
    made.add_argument("--cluster", default="frontier", help="default: frontier")
    made.add_argument("--nodes", default="1", help="numbers of nodes, such as 1,8")
    made.add_argument("--global-batch", metavar="B", help="default: that of the preset")
    made.add_argument("--fix", nargs="+", default=[], help=f"in addition to {SMALL}")
    made.add_argument(
        "--speed", type=float, help="share of its speed that a pass keeps beside copies"
    )
    made.add_argument("--markdown", action="store_true")
    words, flags = split_at_dashes(sys.argv[1:] if argv is None else argv)
    options = made.parse_args(words)
    asked = (options.preset, options.nodes, " ".join(options.fix))
    recipes = [asked] if options.preset else list(RECIPES)
    cluster = load_cluster(options.cluster)
    print(arithmetic(cluster))
    table: Table = [HEADER]
    for preset, numbers, more in recipes:
        fixed = dict(word.split("=") for word in f"{SMALL} {more}".split())
        for nodes in numbers.split(","):
            args = ["--preset", preset, "--cluster", options.cluster, "--nodes", nodes, "--fix"]
            args += [f"{name}={value}" for name, value in fixed.items()]
            if options.global_batch:
                args += ["--global-batch", options.global_batch]
            name = " ".join([preset, *flags, f"on {nodes}"])
            table.append(row_of(args, flags, name, options.speed))
            print(" ".join(table[-1]), file=sys.stderr, flush=True)
    if options.markdown:
        print("\n".join(markdown(table)))
    else:
        print_table("Offloading activations", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
