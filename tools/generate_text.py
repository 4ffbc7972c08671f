"""Continue prompts with a trained model.

Examples:

    python tools/generate_text.py --load runs/example/run --prompt "def main(" --tokens 64
    torchrun --nproc-per-node 4 tools/generate_text.py --load checkpoints --prompt "The" \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

Model and tokenizer are those of the checkpoint; the layout may differ from that of the training.
There is no key-value cache: each token costs a pass over the whole text. If the newest checkpoint
is damaged, the previous one is used, with a warning.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real, whole
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool, leave
from megatron_inference.model import Trained, add_flags, run_with_model


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="text to continue (repeatable)",
    )
    parser.add_argument(
        "--tokens",
        type=whole(),
        default=64,
        metavar="N",
        help="maximum number of new tokens (default: 64)",
    )
    parser.add_argument(
        "--temperature",
        type=real(least=0),
        default=0.8,
        help="sampling temperature; 0 always takes the most probable token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=whole(0),
        default=0,
        metavar="K",
        help="sample from the K most probable tokens only (default: 0, all)",
    )
    parser.add_argument(
        "--top-p",
        type=real(1),
        default=1.0,
        metavar="P",
        help="sample from the most probable tokens whose probabilities add up to P (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=whole(0, 2**32 - 1),
        default=1234,
        help="seed of the sampling (default: 1234)",
    )
    add_flags(parser)
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    return run_with_model(args, partial(print_samples, args))


def print_samples(args: argparse.Namespace, trained: Trained) -> None:
    """Print the prompts with their continuations."""
    from megatron.training.report.events import Generated
    from megatron.training.run.generate import Sampling, generate

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{args.load} was trained without a tokenizer, so prompts cannot be encoded"
        )
    texts = generate(
        trained.config,
        trained.topology,
        trained.chunks,
        [tokenizer.encode(prompt) for prompt in args.prompt],
        max_new_tokens=args.tokens,
        sampling=sampling,
        end_token=tokenizer.eod,
    )
    if not trained.topology.world.is_first:
        return
    for prompt, ids in zip(args.prompt, texts, strict=True):
        text = tokenizer.decode([i for i in ids if i != tokenizer.eod])
        print(f"--- {prompt!r}\n{prompt}{text}", flush=True)
        trained.publish(Generated(prompt=prompt, text=text, tokens=len(ids), seed=args.seed))


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
