"""Figures of a run before it is queued: layout, memory, start-up. All from formulas and published values."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config import Config
from megatron.errors import MegatronError
from megatron.parallel.environment import whole
from megatron.planning.cluster import Cluster
from megatron.planning.memory import RankMemory, memory_of_ranks
from megatron.planning.placement import (
    Placement,
    RankRow,
    choose_placement,
    naive_placement,
    rank_table,
    render_placement,
)
from megatron.preflight.check.findings import Finding, error, note, warning
from megatron.preflight.check.subject import Subject

_TIGHT = 0.9  # of the memory: the runtime and the communication library take some gigabytes


@dataclass(frozen=True)
class Layout:
    """Where ranks are: the chosen placement as text, and the rows of some nodes."""

    placement: Placement
    text: str
    first: tuple[RankRow, ...]
    last: tuple[RankRow, ...]


def layout_of(config: Config, cluster: Cluster) -> Layout:
    """Raises ConfigError for a layout that the machine cannot hold."""
    chosen = choose_placement(config, cluster)
    text = render_placement(chosen, naive_placement(config, cluster))
    first: list[RankRow] = []
    last: list[RankRow] = []
    end = (config.parallel.world_size - 1) // cluster.devices_per_node
    for row in rank_table(config, cluster):
        if row.node == 0:
            first.append(row)
        elif row.node == end:
            last.append(row)
    return Layout(chosen, text, tuple(first), tuple(last))


def check_layout(s: Subject) -> tuple[Layout | None, list[Finding]]:
    """The layout, or why there is none."""
    if s.config is None or s.cluster is None or not s.on_gpus:
        return None, []
    try:
        return layout_of(s.config, s.cluster), []
    except MegatronError as problem:
        return None, [error("layout", str(problem), s.sources.of_flags(str(problem), s.training.place))]


def check_memory(s: Subject) -> tuple[RankMemory | None, list[Finding]]:
    """The fullest rank, and whether a device holds it."""
    if s.config is None:
        return None, []
    fullest = max(memory_of_ranks(s.config), key=lambda rank: rank.total)
    if s.cluster is None or not s.on_gpus:
        return fullest, []
    gib, have = fullest.total / 2**30, s.cluster.memory_gib
    place = s.flag("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--preset", "--micro-batch-size")
    if gib > have:
        text = (
            f"pipeline rank {fullest.rank} needs about {gib:.1f} GiB, a {s.cluster.device} has {have:g}: more "
            f"tensor or "
            f"pipeline parallelism, or --recompute-granularity full"
        )
        return fullest, [error("memory", text, place)]
    if gib > _TIGHT * have:
        text = (
            f"pipeline rank {fullest.rank} needs about {gib:.1f} GiB of {have:g}, before what the runtime takes: it "
            "may not fit"
        )
        return fullest, [warning("memory", text, place)]
    return fullest, []


# Seconds in which rank 0 reads the first words of all ranks: (ranks, seconds), benchmarks/scale.py, on a CPU, without
# what the network takes.
_MEETING = ((3072, 0.01), (75264, 0.27))


@dataclass(frozen=True)
class StartUp:
    """Seconds until Python runs on all nodes, as published for 8 nodes, and from where it is started.

    meeting_s   rank 0's own work until all ranks have met, as measured without a network
    """

    seconds: float | None
    how: str
    meeting_s: float = 0.0


def meeting_s(ranks: int) -> float:
    """Measured at two numbers of ranks; in proportion between and beyond them.

    >>> meeting_s(3072), meeting_s(75264)
    (0.01, 0.27)
    """
    (few, low), (many, high) = _MEETING
    return round(max(0.0, low + (high - low) * (ranks - few) / (many - few)), 3)


def start_up(s: Subject) -> tuple[StartUp, list[Finding]]:
    """Where the interpreter lies decides."""
    found, findings = _environment_start(s)
    return replace(found, meeting_s=meeting_s(s.training.sizes.tasks)), findings


def _environment_start(s: Subject) -> tuple[StartUp, list[Finding]]:
    if s.cluster is None or not s.cluster.startup_s:
        return StartUp(None, "no published figure"), []
    word, known = s.training.event.words[0], s.cluster.startup_s
    if "/" not in word:
        venv = s.training.environ.get("VIRTUAL_ENV")
        word = f"{venv}/bin/python" if venv else word
    path = s.training.real_path(word) if "/" in word else word
    if s.is_local(path):
        sent = any(event.kind == "sbcast" for event in s.followed.events)
        local_s = known.get("sbcast_untar" if sent else "nvme_unpacked")
        return StartUp(local_s, "broadcast to each node's own disk" if sent else "on each node's own disk"), []
    kind, where = ("lustre", "Lustre") if path.startswith("/lustre") else ("nfs", "a shared file system")
    seconds, local = known.get(kind), known.get("sbcast_untar")
    found = StartUp(seconds, f"{word}, read from {where} by every rank")
    if seconds is None or local is None or s.training.sizes.nodes <= 8 or seconds < local / 2:
        return found, []
    text = (
        f"{word} is read from {where}: {seconds:g} s on 8 nodes were published, more on more; {local:g} s for sbcast "
        "to NVMe"
    )
    return found, [(warning if kind == "nfs" else note)("start-up", text, s.training.place)]


def check_workers(s: Subject) -> Iterator[Finding]:
    """Threads that read data against the cores of a task."""
    config = s.config
    if config is None or s.training.srun is None:
        return
    given = s.option("cpus-per-task")
    cores = whole(given.value) if given else None
    if cores is not None and config.data.num_workers >= max(cores, 2):
        yield warning(
            "workers", f"--num-workers {config.data.num_workers}: threads that read data, beside the rank "
            f"itself, on {cores} "
            "cores. Use fewer", s.flag("--num-workers"),
        )  # fmt: skip
    threads = whole(s.training.environ.get("OMP_NUM_THREADS", ""))
    if cores is not None and threads is not None and threads > cores:
        yield warning("workers", f"OMP_NUM_THREADS={threads} on {cores} cores: use {cores}",
                      s.sources.find("OMP_NUM_THREADS") or s.training.place)  # fmt: skip


