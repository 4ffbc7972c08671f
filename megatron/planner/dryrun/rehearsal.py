"""Dry run of a job: one rank of each kind runs its steps without data, and ranks are compared."""

from __future__ import annotations

import os
import shutil
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config
from megatron.config.command_line import parse_plan
from megatron.config.option import MOST
from megatron.config.pieces import PLAIN, Pieces
from megatron.config.settings import cluster_of_environment
from megatron.config.validate import DATA
from megatron.data.forecast import check_data
from megatron.data.tokenizer import Tokenizer, with_vocabulary
from megatron.errors import CheckpointError, DataError, MegatronError
from megatron.model.gpt import hidden_state, model_sizes
from megatron.parallel.host_memory import memory_limit_bytes
from megatron.pipeline.orders import ORDERS, SENDS_IN_FLIGHT, group_sizes
from megatron.pipeline.schedule import build_schedule, check_clock
from megatron.planner.cluster import GIB, Cluster, load_cluster
from megatron.planner.dryrun.rank import (
    RankProblem,
    RankRun,
    check_collectives,
    check_messages,
    run_rank,
)
from megatron.planner.memory import (
    CATEGORIES,
    HEADROOM,
    PROCESS_BYTES,
    PROCESS_SHARES,
    memory_of_ranks,
    process_bytes,
    room_bytes,
)
from megatron.planner.placement import choose_placement, layout_of, over_nodes
from megatron.planner.stage import stages_on
from megatron.planner.table import Table
from megatron.planner.timing import dispatch_choice, estimate
from megatron.planner.trace import sized
from megatron.training.run.resume_data import planned_data
from megatron.training.run.schedules import BatchSchedule, Schedules, planned_samples, run_costs

_PACKAGE = Path(__file__).resolve().parents[2]

_SMALLER_MODEL = "a larger --tensor-model-parallel-size or --pipeline-model-parallel-size"
_HELPS = {
    "weights": f"--zero-stage 3; {_SMALLER_MODEL}",
    "gradients": f"--zero-stage 2 or 3; {_SMALLER_MODEL}",
    **dict.fromkeys(
        ("master", "moments"),
        "more data-parallel ranks, over which --zero-stage 1 shards the optimizer state",
    ),
    **dict.fromkeys(
        ("activations", "temporary", "buffers"),
        "a smaller --micro-batch-size; --sequence-parallel; --recompute-granularity selective or "
        "full; --attention-backend auto, which keeps no scores",
    ),
    "logits": "a smaller --cross-entropy-chunk-tokens (0 and schedules that split backward passes "
    "compute all logits at once)",
}
"""Flags that reduce the memory of each category."""


# -- which ranks, and how many micro-batches -------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """Rank to run. stands_for: pipeline ranks that it represents; none if it is only compared."""

    rank: int
    pipeline_rank: int
    stands_for: tuple[int, ...] = ()


def members_of(config: Config, device: str = "gpu") -> list[Member]:
    """Choose one rank of every distinct kind, in pipeline order, then ranks that are only compared.

    Pipeline ranks are of the same kind if their chunks have the same layers, and both or neither
    have an embedding or a head. The first rank of a kind is run, because it has the most
    micro-batches in flight; under an order that splits backward passes, in which a rank may hold
    more tensors for deferred weight gradients instead, the one with the highest predicted peak.
    Tensor-parallel ranks hold tensors of the same shape, including padding, and data-parallel ranks
    hold equal shards of each bucket. It is therefore enough to compare a few more ranks: the last
    tensor rank of the first and of the last stage and, on the first stage, the last data rank and
    the last rank of the first context group, expert group and ZeRO group. All experts get the same
    number of rows (planner/tensors.py).
    """
    layout = layout_of(config)
    size = layout.pipeline
    pieces = config.pieces
    splits = ORDERS[config.parallel.schedule].splits
    # Every pipeline rank is of a kind of its own with a user's schedule, or if a prediction would
    # trace a user's layers, which may fail.
    distinct = pieces.schedule is not None or (splits and pieces.architecture != PLAIN)
    kinds: dict[object, list[int]] = {}
    for p in range(size):
        kinds.setdefault((stages_on(config, p), distinct and p), []).append(p)
    alike: dict[int, tuple[int, ...]] = {}
    for ranks in kinds.values():
        if splits and len(ranks) > 1:
            peaks = memory_of_ranks(config, device)
            ranks.sort(key=lambda p: -peaks[p].total)
        alike[ranks[0]] = tuple(ranks)
    run = [(0, 0, p) for p in sorted(alike)]
    compared = [(layout.tensor - 1, 0, p) for p in sorted({0, size - 1}) if layout.tensor > 1]
    span = layout.lines["expert_span"].size
    sizes = layout.context, span, layout.shard_sizes[0], layout.data
    compared += [(0, d, 0) for d in sorted({count - 1 for count in sizes} - {0})]
    return [
        Member(layout.rank(tensor=t, data=d, pipeline=p), p, alike[p] if (t, d) == (0, 0) else ())
        for t, d, p in run + compared
    ]


def enough_micro_batches(config: Config) -> int:
    """Count the micro-batches beyond which the memory and messages of a step only repeat.

    After its warm-up a rank alternates between one forward and one backward pass: its memory
    repeats from round to round. A round is one micro-batch; with several chunks it is a group of at
    least as many micro-batches as there are ranks. The first rank has the longest warm-up: p passes
    with one chunk, 2 (p - 1) + (v - 1) g + 1 passes with v chunks and g micro-batches in the step's
    first group (pipeline/orders.py). The result includes at least one more round. With several
    chunks it consists of the first groups of the real step, since another number of micro-batches
    may be grouped differently. For a user's schedule on several ranks, all are counted. Under
    zb-h1, weight gradients are deferred by up to p more passes; where stages form a V, a rank holds
    at most 2 p + 1 micro-batches of a chunk. A rank also keeps the last few
    messages that it has sent.
    """
    m = config.num_micro_batches()
    p = config.parallel.pipeline_model_parallel_size
    v = config.parallel.num_chunks
    if p == 1:
        return min(m, 3)
    if config.pieces.schedule is not None:
        return m
    if config.parallel.schedule == "interleaved":
        warm_up = -(-((v + 1) * p - 1) // (v * p))  # number of groups; fewer suffice if larger
        return sum(group_sizes(p, m)[: warm_up + 1])
    splits = ORDERS[config.parallel.schedule].splits
    return min(m, (2 * p if splits else p) + 2 + SENDS_IN_FLIGHT)


# -- the rehearsal ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rehearsal:
    """Results for all kinds of ranks.

    device          "gpu" or "cpu"
    ranks           one run for each kind of rank
    findings        problems; none if the job runs and fits
    micro_batches   number in the second step; the run may have more without needing more memory
    capacity_bytes  bytes available for a rank's tensors, excluding HEADROOM; None if unknown
    """

    config: Config
    device: str
    ranks: tuple[RankRun, ...]
    findings: tuple[RankProblem, ...]
    micro_batches: int
    capacity_bytes: float | None


def rehearse(
    config: Config,
    cluster: Cluster | None = None,
    device: str | None = None,
) -> Rehearsal:
    """Run training steps of every kind of rank of the job, without data.

    cluster  machine that the ranks run on; None: this machine
    device   "gpu" or "cpu"; None: the cluster's device or, without a cluster, this machine's

    A model without a vocabulary size gets GPT-2's. Raises ConfigError for a job without a valid
    layout. Exceptions in the ranks' code become findings, including the ConfigError that is raised
    if this process already has a process group.
    """
    config = settled(config, cluster)
    device = device or device_of(cluster)
    count = enough_micro_batches(config)
    runs = dict[Member, RankRun]()
    failed = list[RankProblem]()
    for m in members_of(config, device):
        try:
            runs[m] = run_rank(config, m.rank, "cpu" if device == "cpu" else "meta", count)
        except Exception as error:  # the run would fail in the same way
            failed.append(RankProblem("error", m.rank, _describe(error)))
    layout = layout_of(config)
    capacity = capacity_of(config, cluster, device)
    ranks = [
        replace(run, stands_for=layout.tensor * layout.data * len(m.stands_for))
        for m, run in runs.items()
        if m.stands_for
    ]
    findings = failed or _compare(config, count, runs)
    for run in ranks:
        if capacity is None or run.needed_bytes <= capacity:
            continue
        # its largest tensors, and flags that reduce them
        by_size = sorted(((getattr(run.peak, name), name) for name in CATEGORIES), reverse=True)
        large = (name for size, name in by_size if size >= run.peak.total / 10)
        helps = dict.fromkeys(flag for name in large for flag in _HELPS[name].split("; "))
        largest = ", ".join(
            f"{gib(size)} GiB {category} {what}" for size, category, what in run.largest
        )
        text = (
            f"needs {gib(run.needed_bytes)} GiB for tensors, but has {gib(capacity)} GiB. Largest "
            f"tensors at the peak: {largest}. To reduce them: {'; '.join(helps)}"
        )
        findings.append(RankProblem("memory", run.rank, text))
    return Rehearsal(config, device, tuple(ranks), tuple(findings), count, capacity)


def settled(config: Config, cluster: Cluster | None) -> Config:
    """Fill in the vocabulary size (GPT-2's if it depends on tokenizer files) and the placement.

    Raises ConfigError for ranks that do not fit on the cluster's nodes.
    """
    config = sized(config)
    if cluster is None:  # one node is assumed
        return over_nodes(config, layout_of(config, devices=config.parallel.world_size))
    if config.parallel.world_size == 1:
        return config
    layout = choose_placement(config, cluster).layout
    return over_nodes(config.replace(rank_order=layout.order), layout)


def device_of(cluster: Cluster | None) -> str:
    """Return the kind of device that the ranks run on, "gpu" or "cpu"."""
    on_cpu = not torch.cuda.is_available() if cluster is None else cluster.device_type == "cpu"
    return "cpu" if on_cpu else "gpu"


def capacity_of(config: Config, cluster: Cluster | None, device: str) -> float | None:
    """Return the bytes that one rank's tensors may use; None if unknown."""
    ranks = config.parallel.world_size
    if cluster is not None:
        memory = GIB * cluster.memory_gib
    elif device == "gpu":
        if not torch.cuda.is_available():
            return None
        memory = torch.cuda.get_device_properties(0).total_memory
    elif ranks > (os.cpu_count() or 1):
        return None
    else:
        memory = memory_limit_bytes() / ranks
    return room_bytes((1.0 - HEADROOM) * memory, device)


def _compare(
    config: Config, micro_batches: int, runs: Mapping[Member, RankRun]
) -> list[RankProblem]:
    """Find mismatches between the ranks."""
    parallel = config.parallel
    plan = build_schedule(
        config.schedule, parallel.pipeline_model_parallel_size, parallel.num_chunks, micro_batches
    )
    shape, element = hidden_state(config)
    dtype = str(element).removeprefix("torch.")
    findings = []
    for m, run in runs.items():
        findings += check_messages(m.rank, run.messages, plan[m.pipeline_rank], shape, dtype)
    return findings + check_collectives({m.rank: run.collectives for m, run in runs.items()})


def gib(n_bytes: float) -> str:
    """Format bytes in GiB.

    >>> gib(3 * 2**30), gib(5 * 2**20), gib(0)
    ('3.00', '0.00488', '0')
    """
    return decimal(n_bytes / GIB)


def decimal(value: float) -> str:
    """Format a number with two decimals or, below 0.1, with three significant digits."""
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def _describe(error: BaseException) -> str:
    """Describe an exception, including the line in the run's code that raised it."""
    text = (
        str(error)
        if isinstance(error, MegatronError)
        else f"{type(error).__name__}: {error}".rstrip(": ")
    )
    frames = [
        f"{path.relative_to(_PACKAGE.parent)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if (path := Path(frame.filename)).is_relative_to(_PACKAGE)
        and not path.is_relative_to(_PACKAGE / "planner")
    ]
    return f"{text} ({frames[-1]})" if frames else text


# -- what is printed -------------------------------------------------------------------------------


EXIT_DOES_NOT_RUN = 3
_LENGTHS = {"train_iters", "train_samples", "train_tokens"}
_WIDTH = 120  # columns, if the terminal has as many
_ACROSS = 8  # kinds of ranks in one table


def dry_run(arguments: Sequence[str], launched: int = 1, pieces: Pieces = PLAIN) -> int:
    """Print the memory that a job with these flags needs, and return the exit code.

    The caller is the first of `launched` processes; this number is the default of --world-size.
    Raises ConfigError for invalid flags, and for ranks that do not fit on the machine's nodes, and
    MegatronError if the extension that simulates schedules is needed and missing.
    """
    words = list(arguments)
    if launched > 1 and not any(word.split("=")[0] == "--world-size" for word in words):
        words += ["--world-size", str(launched)]
    config = parse_plan(words, pieces, settings_to_take)
    name = config.parallel.cluster or cluster_of_environment()
    cluster = None if name in (None, "none") else load_cluster(name)
    if cluster is not None or config.parallel.pipeline_model_parallel_size > 1:
        check_clock()
    config, tokenizer, unknown = with_vocabulary(config)
    epochs = [*_epochs(config, tokenizer, not unknown)]
    assumed = (
        "GPT-2's vocabulary"
        if config.model.vocab_size is None
        else f"--vocab-size {config.model.vocab_size}"
    )
    notes = [f"{unknown}: {assumed} is assumed"] if unknown else []
    config = settled(config, cluster)
    print(_heading(config, cluster), flush=True)
    rehearsal = rehearse(config, cluster)
    print(render(rehearsal))
    if not rehearsal.findings:
        for line in (*_time_and_cost(config, cluster), *epochs):
            print(line)
    for note in (*notes, *config.notices):
        print(f"note: {note}")
    return EXIT_DOES_NOT_RUN if rehearsal.findings else 0


def _time_and_cost(config: Config, cluster: Cluster | None) -> Iterator[str]:
    """Describe a step on a known machine, and a run of known length with its costs and schedules."""
    step = None
    nodes = 1
    if cluster is not None:
        nodes = -(-config.parallel.world_size // cluster.devices_per_node)
        try:
            step = estimate(config, cluster)
            yield f"a step: {step.words}"
            if (choice := dispatch_choice(step)) is not None:
                yield choice.words
        except MegatronError as problem:
            yield f"the time of a step is not predicted: {problem}"
    if _LENGTHS & config.explicit.keys():
        costs = run_costs(config, model_sizes(config), nodes)
        time = ""
        if step is not None:
            costs = costs.at(step.tokens_per_s)
            time = f"; {costs.time} (predicted), without starts, evaluations and saves"
        yield f"the whole run: {costs.size}{time}"
        yield f"schedule: {Schedules.from_config(config)}"


def _epochs(config: Config, tokenizer: Tokenizer | None, knows_vocabulary: bool) -> Iterator[str]:
    """Describe how often a run of known length reads its data.

    Raises ConfigError for too many epochs (--max-epochs), and for changes of a resumed run's data
    that are not allowed (--allow-data-changes).
    """
    if not (_LENGTHS & config.explicit.keys() and {*DATA} & config.explicit.keys()):
        return
    try:
        config, continued = planned_data(config)
    except CheckpointError as problem:
        yield f"the epochs of the data are not known: {problem}"
        return
    samples = planned_samples(config, BatchSchedule.from_config(config))[0]
    if not knows_vocabulary:  # so that no id counts as out of range
        config = config.replace(vocab_size=MOST)
    try:
        foreseen, notices = check_data(config, tokenizer, samples, continued=continued)
    except DataError as problem:
        yield f"the epochs of the data are not known: {problem}"
        return
    if foreseen.sources:
        yield "\n  ".join([f"the run reads {foreseen.summary}", *foreseen.table])
    for note in (*notices, *filter(None, [foreseen.warning])):
        yield f"note: {note}"


def _heading(config: Config, cluster: Cluster | None) -> str:
    layout = layout_of(config)
    chunks = config.parallel.num_chunks
    machine = f"this machine's kind of device ({device_of(cluster)})"
    if cluster is not None:
        nodes = -(-layout.world_size // cluster.devices_per_node)
        device = f"{cluster.device}, {cluster.memory_gib:g} GiB"
        machine = f"{nodes} x {cluster.devices_per_node} devices of {cluster.name} ({device})"
    return (
        f"dry run: {layout.world_size} ranks = {layout} ({layout.order}) on {machine}, "
        f"{config.precision.dtype_name}, "
        f"{config.schedule_name}{f' of {chunks} chunks' if chunks > 1 else ''}\nmodel: "
        f"{model_sizes(config).parameters():,} parameters; a step is {config.num_micro_batches()} "
        f"micro-batches of {config.batch.micro_batch_size} x {config.model.seq_length} tokens on "
        "each replica"
    )


def render(rehearsal: Rehearsal) -> str:
    """Render the memory of each kind of rank, assumptions, checks and problems."""
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    tables = [
        _table(rehearsal, rehearsal.ranks[first : first + _ACROSS]).text(width)
        for first in range(0, len(rehearsal.ranks), _ACROSS)
    ]
    lines = [
        textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False)
        for line in _foot(rehearsal)
    ]
    return "\n".join([*tables, *lines])


def _table(rehearsal: Rehearsal, ranks: Sequence[RankRun]) -> Table:
    """Tabulate memory, with one row per category and one column per kind of rank."""
    small = max(run.needed_bytes for run in rehearsal.ranks) < GIB / 10
    unit, size = ("MiB", 2.0**20) if small else ("GiB", GIB)

    def amounts(name: str, values: Iterable[float]) -> tuple[str, ...]:
        return (name, *(decimal(value / size) for value in values))

    rows = [
        ("rank", *(str(run.rank) for run in ranks)),
        ("stands for ranks", *(str(run.stands_for) for run in ranks)),
        ("parameters", *(f"{run.parameters:,}" for run in ranks)),
        *(amounts(name, (getattr(run.peak, name) for run in ranks)) for name in CATEGORIES),
        amounts("in all, at the peak", (run.peak.total for run in ranks)),
        amounts("before the first step", (run.setup_bytes for run in ranks)),
    ]
    if (capacity := rehearsal.capacity_bytes) is not None:
        rows.append(amounts("left", (capacity - run.needed_bytes for run in ranks)))
    return Table(
        "", (f"{unit} on each device", *(f"pp rank {run.pipeline_rank}" for run in ranks)), rows
    )


def _foot(rehearsal: Rehearsal) -> Iterator[str]:
    config = rehearsal.config
    on_gpu = rehearsal.device == "gpu"
    if rehearsal.capacity_bytes is not None:
        memory = process_bytes(rehearsal.capacity_bytes, rehearsal.device) / (1.0 - HEADROOM)
        yield (
            f"Tensors of a rank may use {gib(rehearsal.capacity_bytes)} of {gib(memory)} GiB: "
            f"{HEADROOM:.0%} is left for "
            + (
                "the runtime, the communication library and fragmentation (assumed)."
                if on_gpu
                else "other processes (assumed), and the rest for what a process holds besides "
                "tensors. Ranks on this machine share its memory, or the job's limit."
            )
        )
    if not on_gpu and rehearsal.ranks:
        needed = max(run.needed_bytes for run in rehearsal.ranks)
        least, median, most = (
            gib(process_bytes(needed, rehearsal.device, share)) for share in PROCESS_SHARES
        )
        yield (
            f"A process holds about {median} GiB, which a job's memory limit counts: tensors, gaps "
            f"that malloc keeps between them (measured runs range from {least} to {most} GiB in "
            f"total), and {gib(PROCESS_BYTES)} GiB of program and libraries. Only a rank that does "
            "not fit even with the smallest gaps counts as too large."
        )
    if copy := max((run.copy_bytes for run in rehearsal.ranks), default=0):
        yield (f"--async-save keeps a copy of up to {gib(copy)} GiB per rank in host memory.")
    if rehearsal.micro_batches < config.num_micro_batches():
        yield (
            f"Each rank ran {rehearsal.micro_batches} of the {config.num_micro_batches()} "
            "micro-batches: after its warm-up it alternates between forward and backward passes, "
            "and its memory repeats."
        )
    if on_gpu:
        yield (
            "assumed: fused kernels are built for the device, torch is 2.9 or newer (2.10 with "
            "ROCm), and attention keeps no scores unless a flag says so."
        )
    if config.data.reset_attention_mask or config.data.data_packing == "best-fit":
        yield "assumed: every sample is one document."
    if config.model.num_experts is not None and not config.model.moe_router_force_load_balancing:
        yield "assumed: every expert gets the same number of tokens."
    for finding in rehearsal.findings:
        yield f"{_TITLES[finding.kind]}: rank {finding.rank}: {finding.text}."
    if not rehearsal.findings:
        messages = sum(len(run.messages) for run in rehearsal.ranks)
        collectives = sum(
            len(calls) for run in rehearsal.ranks for calls in run.collectives.values()
        )
        yield (
            f"checked: set-up and two steps run; {messages} messages match the schedule; "
            f"{collectives} collectives are the same on all compared members."
        )
        yield (
            "It runs, and it fits."
            if rehearsal.capacity_bytes is not None
            else ("It runs. To check whether it fits, name the machine with --cluster.")
        )


_TITLES = {"memory": "DOES NOT FIT", "messages": "MESSAGES DIFFER", "error": "CANNOT RUN"}
