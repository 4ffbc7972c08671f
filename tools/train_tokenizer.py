"""Train a lossless SentencePiece vocabulary on JSON lines or text.

Example:

    python tools/train_tokenizer.py --input runs/corpus.jsonl --output runs/spm.model --vocab-size 4096

Use the model with --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model runs/spm.model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import MOST_WIDTH, Parser, real, whole
from megatron.data.prepare.vocabulary import train_vocabulary
from megatron.training.run.process import as_tool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, .parquet or .txt; also as .gz or .zst",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the model file to write")
    parser.add_argument(
        "--vocab-size",
        type=whole(1, MOST_WIDTH),
        default=4096,
        metavar="N",
        help="size (default: 4096)",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="the key of the text (default: text)"
    )
    parser.add_argument(
        "--sample-megabytes",
        type=real(),
        default=4.0,
        metavar="MB",
        help="amount of text to train on, documents drawn at random (default: 4)",
    )
    parser.add_argument(
        "--num-threads", type=whole(1, 1024), default=2, metavar="N", help="threads (default: 2)"
    )
    parser.add_argument(
        "--seed", type=whole(0), default=1234, help="seed for drawing documents (default: 1234)"
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error."""
    args = build_parser().parse_args(argv)
    size = train_vocabulary(
        args.input,
        args.output,
        vocab_size=args.vocab_size,
        json_key=args.json_key,
        sample_bytes=int(args.sample_megabytes * 1e6),
        num_threads=args.num_threads,
        seed=args.seed,
    )
    print(f"wrote {args.output}: {size} pieces")
    return 0


if __name__ == "__main__":
    sys.exit(main())
