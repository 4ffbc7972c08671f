"""Describe and check .bin/.idx data sets.

Examples:

    python tools/inspect_dataset.py data/corpus_text_document
    python tools/inspect_dataset.py data/corpus_text_document --validate --plot lengths.png --samples 3 \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model spm.model

Checks the whole index, and with --validate all tokens. If a data set has a loss mask, the mask is
checked as well, and samples show which tokens are in the loss. Exit code 2 if a data set is damaged
or cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer
from megatron.data.indexed_dataset import bin_bytes
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool
from megatron_inspection.dataset import PROBLEMS_PER_KIND, Inspection, inspect, plot_lengths
from megatron_preparation.progress import ByteProgress
from megatron_preparation.tokenizer_flags import add_tokenizer_flags, tokenizer_settings


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="data sets; paths without .bin and .idx"
    )
    parser.add_argument("--validate", action="store_true", help="read and check all tokens")
    parser.add_argument(
        "--plot", metavar="FILE", help="plot the lengths of documents; .png, .svg or .pdf"
    )
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--samples", type=integer(0), default=0, metavar="N", help="show the first N documents"
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
        help="tokens to show of each document (default: 128)",
    )
    group = parser.add_argument_group(
        "tokenizer", "decodes samples; --validate checks that ids are in its vocabulary"
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
        for sign, text in [("", content)] if sample.runs is None else sample.runs:
            print("\n".join(f"   {sign:1}| {line}" for line in text.splitlines() or [""]))
    for problem in result.problems:
        print(f"  problem: {problem}")
    for kind, count in result.counts.items():
        if count > PROBLEMS_PER_KIND:
            print(f"  problem: {count:,} of the kind {kind} in total, {PROBLEMS_PER_KIND} shown")
    if result.sound:
        print("  no problem found")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 if a data set is damaged or cannot be read."""
    args = build_parser().parse_args(argv)
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
