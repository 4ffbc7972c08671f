"""A rehearsal of a job: one rank of each kind takes its training steps without data, and what they do is compared."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config import Config
from megatron.model.size import total_parameters
from megatron.planner.dryrun.advice import memory_findings
from megatron.planner.dryrun.checks import (
    Finding,
    check_alike,
    check_collectives,
    check_messages,
    check_parameters,
    expected_messages,
)
from megatron.planner.dryrun.kinds import Kind, enough_micro_batches, kinds_of, layout_of
from megatron.planner.dryrun.members import Alter, Member, members_of, run_members
from megatron.planner.memory import sized_model
from megatron.planner.placement import choose_placement

if TYPE_CHECKING:
    from megatron.planner.cluster import Cluster
    from megatron.planner.dryrun.memory_kinds import Held
    from megatron.planner.dryrun.rank import RankRun

RESERVE_GIB = 2.0
"""Of a GPU's memory, for what no tensor shows: the runtime's context and code, the communication library's buffers, the
workspaces of matrix products, and what the allocator cannot reuse. Assumed; it was measured nowhere."""


@dataclass(frozen=True)
class RankRehearsal:
    """One kind of rank.

    rank                a global rank of this kind: the one that was looked at; its pipeline rank
    stands_for          ranks of the job that are of this kind, and need as much or less
    parameters          elements on the device, padding included
    peak                bytes by category at the moment at which all together are the most, in a training step
    total_peak_bytes    their sum
    peak_of             the most of each category at any moment of a training step
    setup_peak_bytes    the most before the first step
    host_bytes          the most that set-up keeps in host memory, where the device is a GPU
    copy_bytes          of host memory that --async-save keeps beside, for the copy that is written; 0 without it
    largest_tensors     at the moment of the peak
    broken_by           the first tensor that does not fit; None where all do
    """

    rank: int
    pipeline_rank: int
    stages: tuple[int, ...]
    stands_for: int
    parameters: int
    peak: Mapping[str, int]
    total_peak_bytes: int
    peak_of: Mapping[str, int]
    setup_peak_bytes: int
    host_bytes: int
    copy_bytes: int
    largest_tensors: tuple[Held, ...]
    broken_by: Held | None

    @property
    def needed_bytes(self) -> int:
        """The most at any time."""
        return max(self.total_peak_bytes, self.setup_peak_bytes)


@dataclass(frozen=True)
class Rehearsal:
    """All kinds of ranks.

    device          "gpu" or "cpu"
    micro_batches   of the steps that were taken; a step of the run may have more, and needs no more memory
    capacity_bytes  of a device, RESERVE_GIB less on a GPU; None where it is not known
    assumptions     what the figures rest on, a sentence each
    checked         what was found to go together, a sentence each
    """

    config: Config
    device: str
    ranks: tuple[RankRehearsal, ...]
    findings: tuple[Finding, ...]
    micro_batches: int
    capacity_bytes: float | None
    assumptions: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not any(finding.kind == "memory" for finding in self.findings)


def rehearse(
    config: Config, cluster: Cluster | None = None, device: str | None = None, *, processes: int = 1,
    rank: int | None = None, alter: Alter | None = None,
) -> Rehearsal:
    """Take training steps of every kind of rank of the job, without data.

    cluster    whose devices the ranks run on; None: this machine's
    device     "gpu" or "cpu"; None: what the cluster has, without one what this machine has
    processes  that share the work; more than 1 are forked from this one
    rank       this one alone, which is compared with no other
    alter      called with each pipeline rank and its executor before its first step, for tests; with one process

    A model without a vocabulary gets GPT-2's. Raises ConfigError for a job that cannot be laid out, and where this
    process is part of another one. What the ranks' own code raises is a finding.
    """
    config, device = settled(config, cluster), device or device_of(cluster)
    capacity = capacity_bytes(config, cluster, device)
    count, kinds = enough_micro_batches(config), kinds_of(config)
    members = members_of(config, kinds)
    if rank is not None:
        place = layout_of(config).coordinates(rank)[2]
        members = [Member(rank, place, Kind(place, (place,)))]
    limit = float("inf") if capacity is None else capacity
    on = "cpu" if device == "cpu" else "meta"
    runs = dict(zip(members, run_members(config, members, on, count, limit, processes, alter), strict=True))
    failed = [Finding("error", m.rank, run) for m, run in runs.items() if isinstance(run, str)]
    good = {m: run for m, run in runs.items() if not isinstance(run, str)}
    each = config.parallel.tensor_model_parallel_size * config.parallel.data_parallel_size if rank is None else 1
    ranks = tuple(_rehearsal(m.stands_for, run, each) for m, run in good.items() if m.stands_for is not None)
    findings = failed or (_compare(config, count, good) if rank is None else [])
    findings += [finding for found in ranks for finding in memory_findings(config, found, capacity)]
    return Rehearsal(
        config=config, device=device, ranks=ranks, findings=tuple(findings), micro_batches=count,
        capacity_bytes=capacity, assumptions=assumptions(config, device),
        checked=() if failed else _what_was_checked(config, good)[: None if rank is None else 1],
    )  # fmt: skip


def settled(config: Config, cluster: Cluster | None) -> Config:
    """With GPT-2's vocabulary where only the tokenizer's files would tell, and the order of ranks that a run takes.

    Raises ConfigError for a job that the cluster cannot hold.
    """
    if config.model.vocab_size is None:
        config = config.replace(vocab_size=sized_model(config).vocab_size)
    if cluster is None or config.parallel.world_size == 1:
        return config
    return config.replace(rank_order=choose_placement(config, cluster).layout.order)


def assumptions(config: Config, device: str) -> tuple[str, ...]:
    """What decides about memory and was not seen here."""
    documents = config.data.reset_attention_mask or config.data.data_packing == "best-fit"
    found = ["every sample is one document"] if documents else []
    if device == "gpu":
        found.append("the fused kernels are built for the device, and all that no flag turns off go through them")
        attention = config.kernels.attention_backend
        if attention in ("unfused", "local", "blocked"):
            found.append(f"attention is computed as --attention-backend {attention} says")
        else:
            found.append("attention is one kernel that keeps no scores (flash-attn, or torch's)")
            if config.model.position_embedding_type == "alibi":
                found.append("it is torch's, which keeps ALiBi as one mask for all layers; flash-attn needs none")
        found.append("torch adds products of 16-bit matrices to fp32 sums in place")
        return tuple(found)
    import torch

    from megatron.training.kernels import describe_kernels

    return (*found, *(f"as on this machine, {line}" for line in describe_kernels(config, torch.device("cpu"))))


def _what_was_checked(config: Config, runs: Mapping[Member, RankRun]) -> tuple[str, ...]:
    messages = sum(len(run.log.messages) for run in runs.values())
    collectives = sum(len(run.log.collectives) for run in runs.values())
    ranks = ", ".join(map(str, sorted(member.rank for member in runs)))
    found = [f"stages, engine and two steps of {'ranks' if len(runs) > 1 else 'rank'} {ranks} run"]
    if messages:
        found.append(f"{messages} messages have the other side they need")
    if collectives:
        found.append(f"{collectives} collectives are the same on the members that were looked at")
    parameters = total_parameters(config)
    return (*found, f"the parameters of all pipeline ranks add up to the model's {parameters:,}")


def _compare(config: Config, micro_batches: int, runs: Mapping[Member, RankRun]) -> list[Finding]:
    """What does not go together between the ranks."""
    layout = layout_of(config)
    first = {m.pipeline_rank: m.rank for m in runs if m.stands_for is not None}
    like = {p: m.rank for m in runs if m.stands_for is not None for p in m.stands_for.pipeline_ranks}
    stand_ins = {m.rank: run for m, run in runs.items() if m.stands_for is not None}
    seen = {rank: run.log.messages for rank, run in stand_ins.items()}
    findings = check_messages(expected_messages(config, layout, micro_batches, seen, like))
    calls = {rank: [*run.setup_log.collectives, *run.log.collectives] for rank, run in stand_ins.items()}
    findings += check_collectives(calls)
    for m, run in runs.items():
        if m.stands_for is None:
            same = first[m.pipeline_rank]
            findings += check_alike(layout, same, m.rank, stand_ins[same].log, run.log)
    findings += check_parameters(config, layout, {rank: run.parameters for rank, run in stand_ins.items()}, like)
    return findings


def device_of(cluster: Cluster | None) -> str:
    """"gpu" or "cpu": what the ranks run on."""
    if cluster is not None:
        return "cpu" if cluster.device_type == "cpu" else "gpu"
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def capacity_bytes(config: Config, cluster: Cluster | None, device: str) -> float | None:
    """What one rank may use; None where nobody says what it has."""
    if cluster is not None:
        return 2**30 * (cluster.memory_gib - (RESERVE_GIB if device == "gpu" else 0.0))
    if device == "gpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_properties(0).total_memory - RESERVE_GIB * 2**30
        return None
    ranks = config.parallel.world_size
    if ranks > (os.cpu_count() or 1):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def _rehearsal(kind: Kind, run: RankRun, each: int) -> RankRehearsal:
    return RankRehearsal(
        rank=run.rank, pipeline_rank=run.pipeline_rank, stages=run.stages,
        stands_for=len(kind.pipeline_ranks) * each, parameters=sum(_elements(shape) for _, shape in run.parameters),
        peak=run.peak, total_peak_bytes=run.total_peak, peak_of=run.peak_of,
        setup_peak_bytes=run.setup_peak, host_bytes=run.host_bytes, copy_bytes=run.copy_bytes,
        largest_tensors=run.largest, broken_by=run.broken_by,
    )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count
