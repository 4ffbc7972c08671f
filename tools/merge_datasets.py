"""Join several .bin/.idx data sets into one, in order.

Examples:

    python tools/merge_datasets.py --inputs data/part-0 data/part-1 --output-prefix data/all
    python tools/merge_datasets.py --input data/parts --output-prefix data/all

The second form merges all data sets of a folder, sorted by name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser
from megatron.data.prepare.merge import merge, prefixes_in, total_bytes
from megatron.data.prepare.progress import ByteProgress
from megatron.training.run.process import as_tool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: Megatron's flags, and --inputs."""
    parser = Parser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--input", metavar="FOLDER", help="merge all data sets in this folder, sorted by name"
    )
    source.add_argument(
        "--inputs",
        nargs="+",
        metavar="PREFIX",
        help="merge these, in this order; paths without .bin and .idx",
    )
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx"
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error in the input."""
    args = build_parser().parse_args(argv)
    inputs = args.inputs if args.input is None else prefixes_in(args.input)
    with ByteProgress("merged", total_bytes(inputs)) as progress:
        written = merge(
            inputs,
            args.output_prefix,
            on_progress=progress.update,
            say=lambda text: progress.say(f"notice: {text}"),
        )
    print(
        f"wrote {args.output_prefix}.bin and .idx from {len(inputs)} data sets: "
        f"{written.num_documents:,} documents, "
        f"{written.num_sequences:,} sequences, {written.num_tokens:,} tokens of type "
        f"{written.dtype}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
