"""Tokenize JSON lines or plain text into the .bin/.idx files that training reads.

Example:

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model spm.model --append-eod --workers 8

writes data/corpus_text_document.bin and .idx; give training --data-path data/corpus_text_document.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.prepare.preprocess import PreprocessOptions, Totals, preprocess
from megatron.data.tokenizer import TOKENIZER_TYPES
from megatron.errors import MegatronError


def build_parser() -> argparse.ArgumentParser:
    """The command line: Megatron's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, or plain text with one document per file (.txt); .gz is unpacked",
    )
    group.add_argument(
        "--input-format", choices=("auto", "jsonl", "text"), default="auto", help="auto: by the file name (default)"
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys of a line to tokenize, each into its own files (default: text)",
    )
    group.add_argument(
        "--split-sentences", action="store_true", help="one sequence per sentence, cut after . ! ? and at line ends"
    )
    group.add_argument("--keep-newlines", action="store_true", help="keep white space between sentences")
    group.add_argument("--lang", default="english", help="no effect: the rule for sentences knows no languages")
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", required=True, metavar="TYPE", help=f"one of {', '.join(TOKENIZER_TYPES)}")
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument(
        "--tokenizer-model", metavar="FILE", help="SentencePiece model; tokenizer.json or its folder for HFTokenizer"
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary of NullTokenizer")
    group.add_argument(
        "--vocab-extra-ids", type=int, default=0, metavar="N", help="extra ids of SentencePieceTokenizer"
    )
    group.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    group.add_argument("--seq-length", type=int, metavar="N", help="no effect: documents are written whole")
    group.add_argument("--trust-remote-code", action="store_true", help="no effect: no code comes with a tokenizer")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="files are PREFIX_KEY_LEVEL.bin and .idx, level document or sentence",
    )
    group.add_argument(
        "--dataset-impl", choices=("mmap",), default="mmap", help="the format written; mmap is the only one"
    )
    group = parser.add_argument_group("work")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    group.add_argument("--partitions", type=int, default=1, metavar="N", help="no effect: --workers is enough")
    group.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="documents between two progress lines in a log file (default: 1000)",
    )
    return parser


class Progress:
    """A bar on a terminal, lines elsewhere: MB/s of text, documents, tokens."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        self._started = time.monotonic()
        self._log_interval, self._next_line = max(log_interval, 1), max(log_interval, 1)
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total_bytes)
            self._bar.start()

    def describe(self, totals: Totals) -> str:
        rate = totals.input_bytes / 1e6 / max(time.monotonic() - self._started, 1e-9)
        return (
            f"{totals.documents} documents, {totals.tokens} tokens, {totals.input_bytes / 1e6:.1f} MB, {rate:.2f} MB/s"
        )

    def update(self, totals: Totals) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=totals.file_bytes, description=self.describe(totals))
        elif totals.documents >= self._next_line:
            print(f" preprocessed {self.describe(totals)}", file=sys.stderr, flush=True)
            self._next_line = (totals.documents // self._log_interval + 1) * self._log_interval

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0, or 2 after an error in the input."""
    args = build_parser().parse_args(argv)
    options = PreprocessOptions(
        tokenizer={
            "tokenizer_type": args.tokenizer_type,
            "vocab_file": args.vocab_file,
            "merge_file": args.merge_file,
            "tokenizer_model": args.tokenizer_model,
            "vocab_size": args.vocab_size,
            "vocab_extra_ids": args.vocab_extra_ids,
        },
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        split_sentences=args.split_sentences,
        keep_newlines=args.keep_newlines,
        input_format=args.input_format,
    )
    progress = Progress(sum(p.stat().st_size for p in map(Path, args.input) if p.is_file()), args.log_interval)
    try:
        totals = preprocess(args.input, args.output_prefix, options, workers=args.workers, on_progress=progress.update)
    except MegatronError as error:
        progress.close()
        print(f"error: {error}", file=sys.stderr)
        return 2
    progress.close()
    skipped = f" ({totals.empty_documents} empty ones left out)" if totals.empty_documents else ""
    print(f"wrote {progress.describe(totals)}{skipped}")
    for output in totals.outputs:
        print(f"  {output}.bin, {output}.idx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
