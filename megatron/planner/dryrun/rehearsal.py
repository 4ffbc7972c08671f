"""A rehearsal of a job: one rank of each kind takes its training steps without data, and what they do is compared."""
from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.errors import MegatronError
from megatron.model.gpt import hidden_dtype, hidden_shape
from megatron.model.stages import assign_layers
from megatron.parallel.topology import DEFAULT_ORDER, Layout
from megatron.pipeline.instructions import SENDS_IN_FLIGHT
from megatron.pipeline.orders import group_sizes
from megatron.pipeline.schedule import build_schedule
from megatron.planner.cluster import Cluster
from megatron.planner.dryrun.checks import Finding, check_collectives, check_messages
from megatron.planner.dryrun.rank import RankRun, run_rank
from megatron.planner.memory import CATEGORIES, sized_model
from megatron.planner.placement import choose_placement

GIB = 2.0**30
RESERVE_GIB = 2.0
"""Of a GPU's memory, for what no tensor shows: the runtime's context and code, the communication library's buffers, the
workspaces of matrix products, and what the allocator cannot reuse. Assumed; it was measured nowhere."""
_PACKAGE = Path(__file__).resolve().parents[2]

_SMALLER_MODEL = "a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"
_LESS_AT_A_TIME = (
    "a smaller --micro-batch-size, --sequence-parallel, --recompute-granularity selective or full, "
    "--attention-backend auto, which keeps no scores"
)
_HELPS = {
    "weights": _SMALLER_MODEL, "gradients": _SMALLER_MODEL,
    "master": "more data-parallel ranks, over which --zero-stage 1 divides the optimizer",
    "moments": "more data-parallel ranks, over which --zero-stage 1 divides the optimizer",
    "activations": _LESS_AT_A_TIME, "temporary": _LESS_AT_A_TIME, "buffers": _LESS_AT_A_TIME,
    "logits": "a smaller --cross-entropy-chunk-tokens (0 and --enable-zbh1-pipeline make all logits at once)",
}  # fmt: skip
"""What makes each category smaller."""


# -- which ranks, and how long -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A rank that is run. stands_for: pipeline ranks whose figures it gives; none where it is only compared."""

    rank: int
    pipeline_rank: int
    stands_for: tuple[int, ...] = ()


def layout_of(config: Config) -> Layout:
    """The sizes of the job's directions, in the order of its ranks."""
    parallel = config.parallel
    return Layout(
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size,
        parallel.rank_order or DEFAULT_ORDER,
    )  # fmt: skip


def members_of(config: Config) -> list[Member]:
    """One rank of every distinct kind, in pipeline order, then those that are only compared.

    Of a kind are pipeline ranks with as many layers in each chunk, with and without embedding and head alike. The first
    one is run, which has the most micro-batches in flight; under zb-h1, where later ranks keep more of what waits for
    weight gradients, also the last. Tensor-parallel ranks hold tensors of one shape, padding included, and
    data-parallel ranks equal parts of each bucket: of the first and the last stage the last tensor rank is compared, of
    the first stage the last data rank.
    """
    parallel, layout = config.parallel, layout_of(config)
    size, stages = layout.pipeline, parallel.num_stages
    layers = [len(r) for r in assign_layers(config.model.num_layers, stages, parallel.pipeline_layout)]
    kinds: dict[object, list[int]] = {}
    for p in range(size):
        own = p if config.pieces.schedule is not None else None  # of which nothing is known
        kinds.setdefault((tuple(layers[p::size]), p == 0, p == size - 1, own), []).append(p)
    found: list[tuple[int, tuple[int, ...]]] = []
    for ranks in kinds.values():
        if parallel.schedule == "zb-h1" and len(ranks) > 1:
            found.append((ranks[-1], (ranks.pop(),)))
        found.append((ranks[0], tuple(ranks)))
    last_t, last_d = layout.tensor - 1, layout.data - 1
    members = [Member(layout.rank(tensor=0, data=0, pipeline=p), p, alike) for p, alike in sorted(found)]
    compared = [(last_t, 0, p) for p in sorted({0, size - 1}) if last_t] + [(0, last_d, 0)] * bool(last_d)
    return members + [Member(layout.rank(tensor=t, data=d, pipeline=p), p) for t, d, p in compared]


def enough_micro_batches(config: Config) -> int:
    """So many micro-batches that a step with more of them needs no more memory, nor other messages between passes.

    After its warm-up a rank alternates between one forward and one backward pass, so that what it holds repeats from
    round to round (a round is one micro-batch, with several chunks a group of at least as many as there are ranks). The
    warm-up of the first rank is the longest: p passes with one chunk, 2 (p - 1) + (v - 1) g + 1 with v of them and g
    micro-batches in the step's first group (pipeline/orders.py). A round and more follow it here: with several chunks
    the first groups of the step itself, since another number of micro-batches may be grouped otherwise. Under zb-h1
    weight gradients wait for up to p passes more. A rank also keeps the last few messages that it has sent.
    """
    m, p, v = config.num_micro_batches(), config.parallel.pipeline_model_parallel_size, config.parallel.num_chunks
    if p == 1:
        return min(m, 3)
    if config.pieces.schedule is not None:
        return m
    if config.parallel.schedule == "interleaved":
        warm_up = -(-((v + 1) * p - 1) // (v * p))  # groups; larger ones are fewer
        return sum(group_sizes(p, m)[: warm_up + 1])
    return min(m, (2 * p if config.parallel.schedule == "zb-h1" else p) + 2 + SENDS_IN_FLIGHT)


# -- the rehearsal -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsal:
    """All kinds of ranks.

    device          "gpu" or "cpu"
    micro_batches   of the steps that were taken; a step of the run may have more, and needs no more memory
    capacity_bytes  of a device, RESERVE_GIB less on a GPU; None where it is not known
    """

    config: Config
    device: str
    ranks: tuple[RankRun, ...]
    findings: tuple[Finding, ...]
    micro_batches: int
    capacity_bytes: float | None


def rehearse(
    config: Config, cluster: Cluster | None = None, device: str | None = None, *,
    alter: Callable[[int, Any], object] | None = None,
) -> Rehearsal:
    """Take training steps of every kind of rank of the job, without data.

    cluster  whose devices the ranks run on; None: this machine's
    device   "gpu" or "cpu"; None: what the cluster has, without one what this machine has
    alter    called with each pipeline rank and its executor before its first step, for tests

    A model without a vocabulary gets GPT-2's. Raises ConfigError for a job that cannot be laid out, and where this
    process is part of another one. What the ranks' own code raises is a finding.
    """
    config, device = settled(config, cluster), device or device_of(cluster)
    count, runs, failed = enough_micro_batches(config), dict[Member, RankRun](), list[Finding]()
    for m in members_of(config):
        change = None if alter is None else (lambda executor, p=m.pipeline_rank: alter(p, executor))
        try:
            runs[m] = run_rank(config, m.rank, "cpu" if device == "cpu" else "meta", count, change)
        except Exception as error:  # whatever the run's own code raises, the run would have raised
            failed.append(Finding("error", m.rank, _describe(error)))
    each, capacity = layout_of(config).tensor * layout_of(config).data, capacity_of(config, cluster, device)
    ranks = [dataclasses.replace(run, stands_for=each * len(m.stands_for)) for m, run in runs.items() if m.stands_for]
    findings = failed or _compare(config, count, runs)
    findings += [_too_much(run, capacity) for run in ranks if capacity is not None and run.needed_bytes > capacity]
    return Rehearsal(config, device, tuple(ranks), tuple(findings), count, capacity)


def settled(config: Config, cluster: Cluster | None) -> Config:
    """With GPT-2's vocabulary where only the tokenizer's files would tell, and the order of ranks that a run takes.

    Raises ConfigError for a job that the cluster cannot hold.
    """
    config = config.replace(vocab_size=sized_model(config).vocab_size)
    if cluster is None or config.parallel.world_size == 1:
        return config
    return config.replace(rank_order=choose_placement(config, cluster).layout.order)


def device_of(cluster: Cluster | None) -> str:
    """"gpu" or "cpu": what the ranks run on."""
    on_cpu = not torch.cuda.is_available() if cluster is None else cluster.device_type == "cpu"
    return "cpu" if on_cpu else "gpu"


def capacity_of(config: Config, cluster: Cluster | None, device: str) -> float | None:
    """Bytes that one rank may use; None where nobody says what it has."""
    reserve = RESERVE_GIB * GIB if device == "gpu" else 0.0
    if cluster is not None:
        return GIB * cluster.memory_gib - reserve
    if device == "gpu":
        there = torch.cuda.is_available()
        return torch.cuda.get_device_properties(0).total_memory - reserve if there else None
    ranks = config.parallel.world_size
    if ranks > (os.cpu_count() or 1):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def _compare(config: Config, micro_batches: int, runs: Mapping[Member, RankRun]) -> list[Finding]:
    """Find what does not go together between the ranks."""
    parallel = config.parallel
    plan = build_schedule(
        config.schedule, parallel.pipeline_model_parallel_size, parallel.num_chunks, micro_batches
    )
    shape, dtype = hidden_shape(config), str(hidden_dtype(config)).removeprefix("torch.")
    findings = []
    for m, run in runs.items():
        findings += check_messages(m.rank, run.messages, plan[m.pipeline_rank], shape, dtype)
    return findings + check_collectives({m.rank: run.collectives for m, run in runs.items()})


def _too_much(run: RankRun, capacity: float) -> Finding:
    """Name the largest tensors of a rank that needs more than there is, and what makes its large parts smaller."""
    held = sorted(((getattr(run.peak, name), name) for name in CATEGORIES), reverse=True)
    helps = dict.fromkeys(_HELPS[name] for size, name in held if size >= run.peak.total / 10)
    largest = ", ".join(f"{gib(size)} GiB {category} {what}" for size, category, what in run.largest)
    return Finding("memory", run.rank, (
        f"needs {gib(run.needed_bytes)} GiB of {gib(capacity)}. The largest tensors at the peak: {largest}. "
        f"What helps: {'; '.join(helps)}"
    ))  # fmt: skip


def gib(n_bytes: float) -> str:
    """Bytes in GiB.

    >>> gib(3 * 2**30), gib(5 * 2**20), gib(0)
    ('3.00', '0.00488', '0')
    """
    return decimal(n_bytes / GIB)


def decimal(value: float) -> str:
    """A number in few digits."""
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def _describe(error: BaseException) -> str:
    """What an exception says, and the line of the run's code that it came from."""
    text = str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}".rstrip(": ")
    frames = [
        f"{path.relative_to(_PACKAGE.parent)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if (path := Path(frame.filename)).is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "planner")
    ]
    return f"{text} ({frames[-1]})" if frames else text
