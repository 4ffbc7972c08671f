"""Write a text corpus, as JSON lines, from the Python standard library of this machine.

Example:

    python tools/build_corpus.py --output runs/corpus.jsonl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real, whole
from megatron.data.prepare.corpus import build_corpus
from megatron.training.failures import as_tool


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines with the keys name and text")
    parser.add_argument(
        "--max-megabytes", type=real(), default=20.0, metavar="MB", help="stop before this size (default: 20)"
    )
    parser.add_argument("--seed", type=whole(0), default=1234, help="decides the order of the modules (default: 1234)")
    parser.add_argument("--docstrings-only", action="store_true", help="documentation strings instead of whole sources")
    parser.add_argument(
        "--stdlib", metavar="FOLDER", help="read this folder of sources instead of this Python's library"
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code: 0, or 2 after an error."""
    args = build_parser().parse_args(argv)
    totals = build_corpus(
        args.output,
        max_bytes=int(args.max_megabytes * 1e6),
        seed=args.seed,
        docstrings_only=args.docstrings_only,
        stdlib=args.stdlib,
    )
    print(f"wrote {args.output}: {totals.documents} documents, {totals.text_bytes / 1e6:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
