"""Peak memory of training, also of a model that is a fifth larger, compared with a torch loop.

    python benchmarks/memory.py [--only bf16-512 ...] [--steps 3] [--eager-only]

The model is GPT-2 124M (bench.py's W1) in one process. Every row is a separate process with the
same allocator and threads; memory is the peak resident size of the process, including libraries and
start-up. The larger model has 20 % more parameters: more layers, with a smaller inner width. It
runs plainly, and with cheap recomputation (--recompute-modules) and smaller chunks of logits. The
table also has the prediction of megatron/planner/memory.py; the difference to the measured peak is
the interpreter, libraries and fragmentation.

Exit code 1 if the larger model needs more memory than the eager loop with the smaller one, or with
recomputation more than the compiled one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sides import run
from workloads import Case, Side

from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.model import formulas
from megatron.planner.memory import memory_of_ranks

MIB = 2**20
CHUNK_TOKENS = 512  # the default on a CPU
OURS = Side("ours")
CHEAP = Side(
    "ours, recomputing",
    flags=(
        "--recompute-granularity",
        "selective",
        "--recompute-modules",
        "mlp_act",
        "layernorm",
        "--cross-entropy-chunk-tokens",
        str(CHUNK_TOKENS // 2),
    ),
)
PLAIN = (
    Side("plain torch, eager", "plain.py"),
    Side("plain torch, compiled", "plain.py", compiled=True),
)


@dataclass(frozen=True)
class Row:
    """One process. `needed_bytes` None: not known for a peer."""

    name: str
    parameters: int
    peak_bytes: int | None
    needed_bytes: float | None
    reason: str = ""


def case(dtype: str, sequence: int) -> Case:
    """GPT-2 124M, micro-batches of 1024 tokens, two of them."""
    return Case(
        workload="memory",
        name=f"{dtype}-{sequence}",
        layers=12,
        hidden=768,
        heads=12,
        vocabulary=50304,
        sequence=sequence,
        micro_batch=1024 // sequence,
        micro_batches=2,
        dtype=dtype,
        sides=(OURS, *PLAIN),
    )


def model_of(case: Case, inner: int | None = None) -> ModelConfig:
    """`inner`: --ffn-hidden-size, 4 h unless given."""
    return ModelConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=inner or 4 * case.hidden,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads,
        kv_channels=case.hidden // case.heads,
        seq_length=case.sequence,
        max_position_embeddings=case.sequence,
        vocab_size=case.vocabulary,
    )


def larger(case: Case, share: float = 0.2) -> tuple[Case, int]:
    """Return the smallest case with at least `share` more parameters.

    It has the fewest layers, and then the smallest inner width that is a multiple of 64.
    """
    wanted = (1 + share) * formulas.total_parameters(model_of(case))
    while formulas.total_parameters(model_of(case)) < wanted:
        case = replace(case, layers=case.layers + 1)
    inner = 4 * case.hidden
    while formulas.total_parameters(model_of(case, inner - 64)) >= wanted:
        inner -= 64
    return case, inner


def needed_bytes(case: Case, side: Side, inner: int | None) -> float:
    """Bytes held at the peak of a step."""
    recompute = dict(
        recompute_granularity="selective",
        recompute_modules=("mlp_act", "layernorm"),
        cross_entropy_chunk_tokens=CHUNK_TOKENS // 2,
    )
    config = Config.create(
        num_layers=case.layers,
        hidden_size=case.hidden,
        ffn_hidden_size=inner or 4 * case.hidden,
        num_attention_heads=case.heads,
        seq_length=case.sequence,
        vocab_size=case.vocabulary,
        micro_batch_size=case.micro_batch,
        global_batch_size=case.micro_batch * case.micro_batches,
        bf16=case.dtype == "bf16",
        **(recompute if side.flags else {}),
    )
    return memory_of_ranks(config, "cpu")[0].total


def measure(case: Case, side: Side, steps: int, folder: Path, inner: int | None = None) -> Row:
    """One process. The first step is a warm-up."""
    wide = replace(side, flags=(*side.flags, "--ffn-hidden-size", str(inner))) if inner else side
    outcome = run(
        case, wide, warm_up=1, steps=steps - 1, threads=len(os.sched_getaffinity(0)), folder=folder
    )
    parameters = formulas.total_parameters(model_of(case, inner))
    needed = needed_bytes(case, side, inner) if side in (OURS, CHEAP) else None
    return Row(
        f"{side.name}, {case.layers} layers",
        parameters,
        outcome.memory_bytes,
        needed,
        outcome.reason,
    )


def table_of(case: Case, rows: list[Row]) -> Table:
    table = Table(
        title=f"{case.dtype}, sequence {case.sequence}, micro-batch {case.micro_batch}",
        title_justify="left",
    )
    for column in ("", "parameters", "peak MiB", "must be held MiB", "rest MiB"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        if row.peak_bytes is None:
            table.add_row(row.name, f"{row.parameters / 1e6:.1f} M", row.reason or "not measured")
            continue
        cells = [row.name, f"{row.parameters / 1e6:.1f} M", f"{row.peak_bytes / MIB:.0f}"]
        if row.needed_bytes is not None:
            cells += [
                f"{row.needed_bytes / MIB:.0f}",
                f"{(row.peak_bytes - row.needed_bytes) / MIB:.0f}",
            ]
        table.add_row(*cells)
    return table


def verdicts(rows: list[Row]) -> list[tuple[bool, str]]:
    """Check that the larger model fits in the eager loop's memory and, recomputing, the compiled's.

    rows  ours with the smaller model, ours with the larger, recomputing, eager, and compiled if it
          was run
    """
    larger, recomputing, *peers = rows[1:]
    return [_compare(mine, peer) for mine, peer in zip((larger, recomputing), peers, strict=False)]


def _compare(mine: Row, peer: Row) -> tuple[bool, str]:
    if mine.peak_bytes is None or peer.peak_bytes is None:
        return False, f"no comparison of {mine.name} with {peer.name}: a side gave no figure"
    more = 100 * (mine.parameters / peer.parameters - 1)
    ratio = mine.peak_bytes / peer.peak_bytes
    return (
        ratio <= 1,
        f"{mine.name}: {more:.0f} % more parameters in {ratio:.2f} of the memory of {peer.name}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [f"{dtype}-{sequence}" for dtype in ("bf16", "fp32") for sequence in (512, 1024)]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=3, help="at least 2")
    parser.add_argument(
        "--eager-only",
        action="store_true",
        help="leave out torch.compile, which takes another minute",
    )
    chosen = parser.parse_args()
    if chosen.steps < 2:
        parser.error(f"--steps {chosen.steps}: at least 2, the first is a warm-up")
    console, passed = Console(), True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "logs"
        folder.mkdir()
        for key in chosen.only:
            dtype, sequence = key.split("-")
            small = case(dtype, int(sequence))
            sides = PLAIN[:1] if chosen.eager_only else PLAIN
            large, inner = larger(small)
            rows = [measure(small, OURS, chosen.steps, folder)]
            rows += [measure(large, side, chosen.steps, folder, inner) for side in (OURS, CHEAP)]
            rows += [measure(small, side, chosen.steps, folder) for side in sides]
            console.print(table_of(small, rows))
            for good, line in verdicts(rows):
                console.print(line)
                passed = passed and good
            console.print()
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
