"""`pretrain_gpt.py ... --dry-run`: try a job's set-up and steps without its devices, and say whether it runs and fits.

Exit codes: 0 it runs and fits; 2 the configuration cannot be (as everywhere); 3 it does not fit or cannot run.
"""
from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from megatron.config import Config
from megatron.config.command_line import parse_plan
from megatron.config.pieces import PLAIN, Pieces
from megatron.data.tokenizer import with_vocabulary
from megatron.model.formulas import parameters_of
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.dryrun.rank import RankRun
from megatron.planner.dryrun.rehearsal import (
    GIB,
    RESERVE_GIB,
    Rehearsal,
    decimal,
    device_of,
    gib,
    layout_of,
    rehearse,
    settled,
)  # fmt: skip
from megatron.planner.memory import CATEGORIES
from megatron.planner.table import Table

EXIT_DOES_NOT_RUN = 3
_WIDTH = 120
_ACROSS = 8  # kinds of ranks in one table


def dry_run(arguments: Sequence[str], launched: int = 1, pieces: Pieces = PLAIN) -> int:
    """Print what a job of these flags would need, and return the exit code. `launched` processes were started, of
    which this is the first: --world-size, where it is not given. Raises ConfigError."""
    words = list(arguments)
    if launched > 1 and not any(word.split("=")[0] == "--world-size" for word in words):
        words += ["--world-size", str(launched)]
    config = parse_plan(words, pieces)
    name = config.parallel.cluster or os.environ.get("MEGATRON_CLUSTER", "").strip()
    cluster = None if name in ("", "none") else load_cluster(name)
    config, unknown = with_vocabulary(config)
    assumed = "GPT-2's vocabulary" if config.model.vocab_size is None else f"--vocab-size {config.model.vocab_size}"
    notes = [f"{unknown}: {assumed} is taken"] if unknown else []
    if config.checkpoint.use_checkpoint_args:
        notes.append("--use-checkpoint-args: the checkpoint was not read; the model's sizes are those given here")
    config = settled(config, cluster)
    print(_heading(config, cluster), flush=True)
    found = rehearse(config, cluster)
    print(render(found))
    for note in (*notes, *config.notices):
        print(f"note: {note}")
    return EXIT_DOES_NOT_RUN if found.findings else 0


def _heading(config: Config, cluster: Cluster | None) -> str:
    layout, chunks = layout_of(config), config.parallel.num_chunks
    machine = f"this machine's kind of device ({device_of(cluster)})"
    if cluster is not None:
        nodes = -(-layout.world_size // cluster.devices_per_node)
        device = f"{cluster.device}, {cluster.memory_gib:g} GiB"
        machine = f"{nodes} x {cluster.devices_per_node} devices of {cluster.name} ({device})"
    return (
        f"dry run: {layout.world_size} ranks = tensor {layout.tensor} x pipeline {layout.pipeline} x data "
        f"{layout.data} ({layout.order}) on {machine}, {config.precision.dtype_name}, "
        f"{config.schedule_name}{f' of {chunks} chunks' if chunks > 1 else ''}\n"
        f"model: {parameters_of(config):,} parameters; a step is {config.num_micro_batches()} "
        f"micro-batches of {config.batch.micro_batch_size} x {config.model.seq_length} tokens on each replica"
    )


def render(found: Rehearsal) -> str:
    """Show the memory of each kind of rank, what it rests on, what was checked and what is wrong."""
    tables = [
        _table(found, found.ranks[first : first + _ACROSS]).text(_WIDTH)
        for first in range(0, len(found.ranks), _ACROSS)
    ]
    lines = [textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in _foot(found)]
    return "\n".join([*tables, *lines])


def _table(found: Rehearsal, ranks: Sequence[RankRun]) -> Table:
    """Categories down, kinds of ranks across."""
    small = max(run.needed_bytes for run in found.ranks) < GIB / 10
    unit, size = ("MiB", 2.0**20) if small else ("GiB", GIB)

    def amounts(name: str, values: Iterable[float]) -> tuple[str, ...]:
        return (name, *(decimal(value / size) for value in values))

    rows = [
        ("rank", *(str(run.rank) for run in ranks)),
        ("stands for ranks", *(str(run.stands_for) for run in ranks)),
        ("parameters", *(f"{run.parameters:,}" for run in ranks)),
        *(amounts(name, (getattr(run.peak, name) for run in ranks)) for name in CATEGORIES),
        amounts("in all, at the fullest", (run.peak.total for run in ranks)),
        amounts("before the first step", (run.setup_bytes for run in ranks)),
    ]
    if (capacity := found.capacity_bytes) is not None:
        rows.append(amounts("left", (capacity - run.needed_bytes for run in ranks)))
    return Table("", (f"{unit} on each device", *(f"pp rank {run.pipeline_rank}" for run in ranks)), rows)


def _foot(found: Rehearsal) -> Iterator[str]:
    config, on_gpu = found.config, found.device == "gpu"
    if found.capacity_bytes is not None:
        reserve = (
            f", {RESERVE_GIB:g} GiB less than a device has: an assumption for the runtime, the communication library "
            f"and what the allocator cannot reuse" if on_gpu else ""
        )
        yield f"There are {gib(found.capacity_bytes)} GiB for each rank{reserve}."
    if copy := max((run.copy_bytes for run in found.ranks), default=0):
        yield f"--async-save keeps a copy of up to {gib(copy)} GiB in host memory, for each rank of a node."
    if found.micro_batches < config.num_micro_batches():
        yield (
            f"Each rank took {found.micro_batches} of the {config.num_micro_batches()} micro-batches: after its "
            f"warm-up it alternates between forward and backward passes, so that what it holds repeats."
        )
    if on_gpu:
        yield "assumed: fused kernels are built for the device, and attention keeps no scores where no flag says so."
    if config.data.reset_attention_mask or config.data.data_packing == "best-fit":
        yield "assumed: every sample is one document."
    for finding in found.findings:
        yield f"{_TITLES[finding.kind]}: rank {finding.rank}: {finding.text}."
    if not found.findings:
        messages = sum(len(run.messages) for run in found.ranks)
        collectives = sum(len(calls) for run in found.ranks for calls in run.collectives.values())
        yield (
            f"checked: set-up and two steps run; {messages} messages have the other side they need; {collectives} "
            f"collectives are the same on the members that were looked at."
        )
        yield "It runs, and it fits." if found.capacity_bytes is not None else (
            "It runs. Whether it fits is not known: --cluster names a machine to compare with."
        )


_TITLES = {"memory": "DOES NOT FIT", "messages": "MESSAGES DIFFER", "error": "CANNOT RUN"}
