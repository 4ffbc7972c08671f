"""Describe and check .bin/.idx data sets, or show what a run has read of its data.

Examples:

    python tools/inspect_dataset.py data/corpus_text_document
    python tools/inspect_dataset.py data/corpus_text_document --validate --plot lengths.png --samples 3 \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model spm.model
    python tools/inspect_dataset.py --run runs/example/run --step 1200 1201 --samples 2

Checks the whole index, and with --validate all tokens. If a data set has a loss mask, the mask is
checked as well, and samples show which tokens are in the loss.

--run shows the history of a run's data, what was read of each source, where each source stands, and
which documents a step had. Start it where the run was started if the paths of its data are relative.

Exit code 2 if a data set is damaged or cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer
from megatron.data.history import blend_text
from megatron.data.indexed_dataset import bin_bytes
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import ConfigError
from megatron.metrics_file import strict_json
from megatron.planner.table import Table, print_table
from megatron.training.run.process import as_tool
from megatron_inspection.dataset import PROBLEMS_PER_KIND, Inspection, inspect, plot_lengths
from megatron_preparation.progress import ByteProgress
from megatron_preparation.tokenizer_flags import add_tokenizer_flags, tokenizer_settings


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "prefixes", nargs="*", metavar="PREFIX", help="data sets; paths without .bin and .idx"
    )
    group = parser.add_argument_group("data of a run")
    group.add_argument(
        "--run", type=Path, metavar="FOLDER", help="a run's --save folder, or one checkpoint"
    )
    group.add_argument(
        "--tag",
        metavar="NAME",
        help="checkpoint in FOLDER: iteration or folder name (default: the newest valid one)",
    )
    group.add_argument(
        "--step",
        type=integer(1),
        nargs="+",
        default=[],
        metavar="N",
        help="show the documents of these steps",
    )
    group.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    parser.add_argument("--validate", action="store_true", help="read and check all tokens")
    parser.add_argument(
        "--plot", metavar="FILE", help="plot the lengths of documents; .png, .svg or .pdf"
    )
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--samples",
        type=integer(0),
        default=0,
        metavar="N",
        help="show the text of the first N documents, or samples of a step",
    )
    group.add_argument(
        "--documents",
        type=integer(0),
        nargs="+",
        default=[],
        metavar="I",
        help="show these documents, counted from 0",
    )
    group.add_argument(
        "--sample-tokens",
        type=integer(),
        default=128,
        metavar="N",
        help="tokens to show of each of them (default: 128)",
    )
    group = parser.add_argument_group(
        "tokenizer",
        "decodes samples (default with --run: the run's); --validate checks that ids are in its "
        "vocabulary",
    )
    add_tokenizer_flags(group)
    return parser


def make_tokenizer(args: argparse.Namespace) -> Tokenizer | None:
    """Return the tokenizer that the flags select, if any. Raises ConfigError for invalid flags."""
    settings = tokenizer_settings(args)
    if args.tokenizer_type is not None:
        return build_tokenizer(**settings)
    settings.pop("vocab_size", None)
    if settings:
        raise ConfigError(f"--{next(iter(settings)).replace('_', '-')} needs --tokenizer-type")
    return None


def rows_of(result: Inspection) -> list[tuple[str, str]]:
    """Return the rows of the report, as names and values."""
    rows = [(f"{suffix} file", f"{size:,} bytes") for suffix, size in result.file_bytes.items()]
    index = result.index
    lengths = result.lengths
    if index is not None:
        rows.append(("token type", str(index.dtype)))
        rows.append(("documents", f"{len(index.document_indices) - 1:,}"))
        rows.append(
            (
                "sequences",
                f"{len(index.sizes):,}{', with modes' if index.modes is not None else ''}",
            )
        )
    if lengths is not None:
        rows.append(("tokens", f"{lengths.tokens:,}"))
        numbers = [f"{name} {value:,.1f}" for name, value in lengths.summary().items()]
        rows.append(
            ("tokens per document", ", ".join(numbers).replace(".0,", ",").removesuffix(".0"))
        )
    if (record := result.record) is not None:
        rows.append(
            ("tokenizer", f"{record.tokenizer} of {record.vocab_size} ids, end {record.eod}")
        )
    if result.mask is not None:
        marked = result.mask.ones
        share = f", {marked:,} of them in the loss" if result.mask.tokens_scanned else ""
        total = result.mask.lengths.tokens if result.mask.lengths is not None else 0
        rows.append(("loss mask", f"{result.mask.prefix}, of {total:,} tokens{share}"))
    scope = (
        f"{result.tokens_scanned:,} tokens"
        if result.tokens_scanned
        else "no tokens (--validate checks all)"
    )
    rows.append(
        ("checked", f"the index, {scope}" if index is not None else "nothing: no usable index")
    )
    return rows


def show(result: Inspection) -> None:
    """Print an inspection."""
    print(result.prefix)
    for name, value in rows_of(result):
        print(f"  {name:<20} {value}")
    for sample in result.samples:
        shown = f", the first {len(sample.ids)}" if len(sample.ids) < sample.tokens else ""
        signs = "" if sample.runs is None else "; + in the loss, - not"
        print(f"  document {sample.document}, {sample.tokens:,} tokens{shown}{signs}:")
        content = " ".join(map(str, sample.ids)) if sample.text is None else sample.text
        show_text([("", content)] if sample.runs is None else sample.runs)
    for problem in result.problems:
        print(f"  problem: {problem}")
    for kind, count in result.counts.items():
        if count > PROBLEMS_PER_KIND:
            print(f"  problem: {count:,} of the kind {kind} in total, {PROBLEMS_PER_KIND} shown")
    if result.sound:
        print("  no problem found")


def show_text(runs: Iterable[tuple[str, str]]) -> None:
    """Print runs of tokens, each with its sign."""
    for sign, text in runs:
        print("\n".join(f"   {sign:1}| {line}" for line in text.splitlines() or [""]))


def inspect_run(args: argparse.Namespace) -> int:
    """Show what a run has read of its data, and return the exit code."""
    from megatron.data import index_cache
    from megatron_inspection.checkpoint import locate
    from megatron_inspection.run_data import RunData

    if args.prefixes or args.validate or args.plot or args.documents:
        raise ConfigError(
            "--run can be combined with neither PREFIX, --validate, --plot nor --documents"
        )
    if not args.run.is_dir():
        raise ConfigError(f"--run {args.run} is not a folder: give a run's --save folder")

    def report_wait(message: str) -> None:
        if message.startswith(("building", "waiting")):
            print(message, file=sys.stderr)

    with index_cache.forwarded_messages(report_wait):
        run = RunData(locate(args.run, args.tag))
        tokenizer = make_tokenizer(args)
        if tokenizer is None and args.step and args.samples:
            tokenizer = run.tokenizer()
        report: dict[str, Any] = {
            "checkpoint": str(run.folder),
            "iteration": run.progress.iteration,
            "consumed_samples": run.progress.consumed_samples,
            "left_out": run.progress.left_out,
            "order": run.unfiled or run.config.data.data_order,
            "history": run.history(),
            "sources": list(run.sources()),
            "steps": [
                run.step(number, args.samples, args.sample_tokens, tokenizer)
                for number in args.step
            ],
            "notes": run.notes,
        }
    if args.json:
        print(strict_json(report, str, indent=1))
    else:
        show_run(report)
    return 2 if any("problem" in row for row in report["sources"]) else 0


def show_run(report: dict[str, Any]) -> None:
    """Print the report on a run's data."""
    left_out = sum(stop - start for start, stop in report["left_out"])
    print(
        f"{report['checkpoint']}: {report['consumed_samples']:,} samples consumed in "
        f"{report['iteration']:,} steps, {left_out:,} left out after loss spikes"
    )
    orders = {
        "stream": "streams, each of which continues whatever changes",
        "megatron": "Megatron's",
    }
    print(f"order of the data: {orders.get(report['order'], report['order'])}")
    numbers = "position tokens seq_length".split()
    history = [
        (
            phase["data"],
            *(f"{phase[name]:,}" for name in numbers),
            phase["packing"],
            str(phase["seed"]),
            blend_text(phase["blend"]) + ("" if phase["begun"] else " (to come)"),
        )
        for phase in report["history"]
    ]
    head = ("data", "from sample", "token", "seq. length", "packing", "seed", "blend")
    show_table("history", head, history)
    rows = []
    for row in report["sources"]:
        counts = [f"{row[name]:,}" if name in row else "" for name in ("samples", "tokens")]
        epochs = f"{row['epochs']:.4f}" if "epochs" in row else ""
        place = [""] * 3
        if "epoch" in row:
            place = [
                f"{row['epoch']}",
                f"{row['window']:,} of {row['windows']:,}, {row['read']:,} of its "
                f"{row['samples_of_window']:,} samples read",
                f"document {row['document']:,}{sequence_text(row)}, token {row['token']:,}",
            ]
        rows.append(
            (row["data"], row["source"], *counts, epochs, f"{row.get('left_out', 0):,}", *place)
        )
    columns = ("data", "source", "samples", "tokens", "epochs", "left out", "in epoch", "in window")
    show_table("read so far", (*columns, "next sample begins at"), rows)
    for row in report["sources"]:
        if "problem" in row:
            print(f"  problem: {row['source']}: where it stands is unknown: {row['problem']}")
    for step in report["steps"]:
        show_step(step)
    for note in dict.fromkeys(report["notes"]):
        print(f"  note: {note}")


def show_step(step: dict[str, Any]) -> None:
    """Print the documents of a step."""
    start, stop = step["consumed_samples"]
    skipped = "" if step["trained"] else "; not trained on (--skip-train-iteration-range)"
    print(
        f"step {step['iteration']:,}: samples {start:,} to {stop - 1:,} of those consumed{skipped}"
    )
    for sample in step["samples"]:
        pieces = [
            f"document {piece['document']:,}{sequence_text(piece)} tokens {piece['token']:,} to "
            f"{piece['token'] + piece['tokens'] - 1:,}"
            for piece in sample["pieces"]
        ]
        place = f"sample {sample['number']:,} of {sample['source']}"
        print(f"  position {sample['position']:,}, {place}: {'; '.join(pieces)}")
        show_text(sample.get("text", ()))


def sequence_text(place: dict[str, Any]) -> str:
    """Return the number of a sequence, unless it is that of its document."""
    return "" if place["sequence"] == place["document"] else f" (sequence {place['sequence']:,})"


def show_table(title: str, columns: Iterable[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print a table without its empty columns, unless it has no rows."""
    filled = [column for column in zip(columns, *rows, strict=True) if any(column[1:])]
    if filled:
        names, *cells = zip(*filled, strict=True)
        print(title)
        print_table(Table("", names, cells))


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 if a data set is damaged or cannot be read."""
    args = build_parser().parse_args(argv)
    if args.run is not None:
        return inspect_run(args)
    if not args.prefixes:
        raise ConfigError("give a PREFIX, or a run's folder with --run")
    if args.tag or args.step or args.json:
        raise ConfigError("--tag, --step and --json need --run")
    results = []
    tokenizer = make_tokenizer(args)
    for prefix in args.prefixes:
        with ByteProgress(f"checked {prefix}", bin_bytes([prefix])) as progress:
            result = inspect(
                prefix,
                tokenizer=tokenizer,
                vocab_size=args.vocab_size,
                validate=args.validate,
                documents=args.documents,
                num_samples=args.samples,
                sample_tokens=args.sample_tokens,
                on_progress=progress.update if args.validate else lambda _: None,
            )
        results.append(result)
        show(result)
    if args.plot is not None:
        plot_lengths(results, args.plot)
        print(f"wrote {args.plot}")
    return 0 if all(result.sound for result in results) else 2


if __name__ == "__main__":
    sys.exit(main())
