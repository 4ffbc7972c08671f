"""Continue prompts with a trained model.

Examples:

    python tools/generate_text.py --load runs/example/run --prompt "def main(" --tokens 64
    torchrun --nproc-per-node 4 tools/generate_text.py --load checkpoints --prompt "The" \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    python tools/generate_text.py --load checkpoints --prompts prompts.jsonl --output texts.jsonl \\
        --bf16 --temperature 0 --stop "\\n\\n"

Model and tokenizer are those of the checkpoint; the layout may differ from that of the training,
and its replicas divide the batches among themselves. Texts of --prompt are shown as they are
generated, those of replicas other than the first when they are complete. With --prompts each text
is a line of JSON with the keys line (in the file), prompt, cut_tokens, text, tokens (number of new
ones), finish (end_token, stop_string, max_new_tokens or context) and seed.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TextIO

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import MOST_POSITIONS, MOST_WIDTH, Parser, integer, real
from megatron.errors import ConfigError, DataError
from megatron.training.run.process import as_tool, leave
from megatron.untrusted import is_count, open_regular, parse_json
from megatron_inference.model import Trained, add_flags, run_with_model

if TYPE_CHECKING:
    from megatron.training.run.generate import Continuation

_ROWS = (".jsonl", ".ndjson")
_MOST_SEED = 2**32 - 1


class SeededPrompt(NamedTuple):
    """A prompt, its number in the file or on the command line, and its seed."""

    line: int
    text: str
    seed: int


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to continue (repeatable)"
    )
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="file of prompts, one per line; in a .jsonl file, a line has the prompt under "
        '--json-key, and optionally a "seed"',
    )
    parser.add_argument(
        "--json-key",
        default="prompt",
        metavar="KEY",
        help="key of the prompts in a .jsonl file (default: prompt)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file for the texts of --prompts, which must not exist; it is FILE.part until it is "
        "complete (default: standard output)",
    )
    parser.add_argument(
        "--batch-size",
        type=integer(1, MOST_WIDTH),
        default=8,
        metavar="N",
        help="prompts that are continued together (default: 8)",
    )
    parser.add_argument(
        "--tokens",
        type=integer(1, MOST_POSITIONS),
        default=64,
        metavar="N",
        help="maximum number of new tokens of each text (default: 64)",
    )
    parser.add_argument(
        "--context",
        type=integer(2, MOST_POSITIONS),
        metavar="N",
        help="maximum number of tokens of prompt and text; only a model without learned position "
        "embeddings can exceed the length in training (default: the model's positions)",
    )
    parser.add_argument(
        "--cut-prompts",
        action="store_true",
        help="truncate prompts on the left so that --tokens fit into the context (default: a "
        "prompt that leaves no room for a new token is an error)",
    )
    _add_sampling(parser)
    add_flags(parser)
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=real(least=0),
        default=0.8,
        help="sampling temperature; 0 always takes the most probable token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k",
        type=integer(0),
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
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this string (repeatable)",
    )
    parser.add_argument(
        "--seed",
        type=integer(0, _MOST_SEED),
        default=1234,
        help="sampling seed for the first prompt; it is one higher for each further prompt, or "
        "line of a file, blank ones included (default: 1234)",
    )


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    if args.output is not None and args.prompts is None:
        raise ConfigError("--output is for the texts of --prompts: leave it out with --prompt")
    if args.output is not None and os.path.exists(args.output):
        raise ConfigError(f"--output {args.output} exists: remove it, or choose another name")
    if args.output is not None and not os.path.isdir(os.path.dirname(args.output) or "."):
        raise ConfigError(f"--output {args.output}: its folder does not exist: create it")
    files = [Path(args.prompts)] if args.prompts is not None else []
    changed = {"bf16": args.bf16, "fp16": args.fp16}
    return run_with_model(args, partial(continue_prompts, args), files, changed)


def continue_prompts(args: argparse.Namespace, trained: Trained) -> None:
    """Generate and print all texts."""
    from megatron.parallel.collectives import gather_objects
    from megatron.training.report.events import Generated
    from megatron.training.run.generate import Limits, Sampling, generate, prepare

    if trained.tokenizer is None:
        raise ConfigError(
            f"{args.load} has no tokenizer, so prompts cannot be encoded: convert or train it with "
            "one, or give token ids to megatron.generate"
        )
    if args.prompts is None:
        prompts = [
            SeededPrompt(i, text, args.seed + i - 1) for i, text in enumerate(args.prompt, 1)
        ]
    else:
        prompts = read_prompts(args.prompts, args.json_key, args.seed)
    limits = Limits(args.stop, context=args.context, cut=args.cut_prompts)
    # an unusable prompt ends the job before any text is generated
    prepare(trained, [p.text for p in prompts], args.tokens, limits)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    data = trained.topology.data
    first = trained.topology.world.is_first
    start = time.perf_counter()
    new_tokens = 0
    cut = 0
    short = 0
    batches = [prompts[at : at + args.batch_size] for at in range(0, len(prompts), args.batch_size)]
    with ExitStack() as stack:
        out: TextIO = sys.stdout
        if args.output is not None and first:
            out = stack.enter_context(open(args.output + ".part", "w", encoding="utf-8"))
        for at in range(0, len(batches), data.size):
            local = batches[at + data.rank] if at + data.rank < len(batches) else []
            live = LiveText(local) if first and args.prompts is None else None
            made = generate(
                trained,
                [prompt.text for prompt in local],
                max_new_tokens=args.tokens,
                sampling=sampling,
                seeds=[prompt.seed for prompt in local],
                limits=limits,
                on_text=None if live is None else live.add,
            )
            every = gather_objects(list(zip(local, made, strict=True)), data)
            for replica, results in enumerate(every if first else ()):
                for prompt, result in results:
                    new_tokens += len(result.ids)
                    cut = cut + (result.cut > 0)
                    short = short + (result.finish == "context")
                    if args.prompts is not None:
                        print(as_json(prompt, result), file=out, flush=True)
                    elif replica:
                        print(f"--- {prompt.text!r}\n{prompt.text}{result.text}", flush=True)
                    trained.publish(
                        Generated(
                            prompt=prompt.text,
                            text=result.text,
                            tokens=len(result.ids),
                            seed=prompt.seed,
                        )
                    )
    if not first:
        return
    if args.output is not None:
        os.replace(args.output + ".part", args.output)
    seconds = time.perf_counter() - start
    if cut:
        print(f" {cut} prompts were truncated on the left", file=sys.stderr)
    if short:
        print(f" {short} texts end where the context ends (finish: context)", file=sys.stderr)
    print(
        f" {new_tokens} tokens for {len(prompts)} prompts in {seconds:.2f} s: "
        f"{new_tokens / seconds:.1f} tokens/s",
        file=sys.stderr,
        flush=True,
    )


def read_prompts(path: str, json_key: str, seed: int) -> list[SeededPrompt]:
    """Return the prompts of a file. Raises DataError, with the line, for an invalid prompt."""
    rows = path.endswith(_ROWS)
    prompts = []
    with open_regular(path, error=DataError) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            prompt_seed = (seed + number - 1) % (_MOST_SEED + 1)
            if rows and not line.strip():
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: not UTF-8: {error.reason}") from None
            if rows:
                row = parse_json(line, where, error=DataError)
                text = row.get(json_key)
                prompt_seed = row.get("seed", prompt_seed)
                if not isinstance(text, str):
                    raise DataError(f"{where}: {json_key!r} is {text!r:.60}, expected a string")
                if not is_count(prompt_seed) or prompt_seed > _MOST_SEED:
                    raise DataError(
                        f"{where}: the seed is {prompt_seed!r:.60}, expected a whole number from 0 "
                        f"to {_MOST_SEED}"
                    )
            if not text:
                raise DataError(f"{where}: an empty prompt: each needs at least one character")
            prompts.append(SeededPrompt(number, text, prompt_seed))
    if not prompts:
        raise DataError(f"{path}: no prompt")
    return prompts


def as_json(prompt: SeededPrompt, result: Continuation) -> str:
    """Return a result of --prompts as a line of JSON."""
    return json.dumps(
        {
            "line": prompt.line,
            "prompt": prompt.text,
            "cut_tokens": result.cut,
            "text": result.text,
            "tokens": len(result.ids),
            "finish": result.finish,
            "seed": prompt.seed,
        }
    )


class LiveText:
    """Prints the growing texts of a batch one below the other: each waits for those before it."""

    def __init__(self, prompts: Sequence[SeededPrompt]) -> None:
        self._waiting = [f"--- {prompt.text!r}\n{prompt.text}" for prompt in prompts]
        self._ended = [False] * len(prompts)
        self._at = 0

    def add(self, number: int, text: str, ended: bool) -> None:
        """Append text to the continuation of a prompt."""
        self._waiting[number] += text + "\n" * ended
        self._ended[number] = ended
        while self._at < len(self._waiting):
            print(self._waiting[self._at], end="", flush=True)
            self._waiting[self._at] = ""
            if not self._ended[self._at]:
                return
            self._at += 1


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
