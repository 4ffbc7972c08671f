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
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import Config
from megatron.config.option import Parser, real, whole
from megatron.errors import ConfigError, MegatronError
from megatron.parallel.launch import Launch, detect_launch
from megatron.training.run.process import as_tool, leave, run_guarded


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--load", required=True, metavar="FOLDER", help="the --save folder of a training run"
    )
    parser.add_argument(
        "--load-tag", metavar="NAME", help="another checkpoint in that folder (default: the newest)"
    )
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
    parser.add_argument("--tensor-model-parallel-size", type=whole(), default=1, metavar="N")
    parser.add_argument("--pipeline-model-parallel-size", type=whole(), default=1, metavar="N")
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="path, if moved since training",
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="path, if moved since training")
    parser.add_argument("--merge-file", metavar="FILE", help="path, if moved since training")
    parser.add_argument(
        "--distributed-timeout-minutes", type=real(525600), default=10.0, metavar="MINUTES"
    )
    parser.add_argument(
        "--metrics-file",
        metavar="FILE",
        help="append a record of each text to this JSON-lines file",
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        launch, problem = detect_launch(), None
    except MegatronError as error:
        launch, problem = Launch(), error

    def body() -> None:
        if problem is not None:
            raise problem
        from megatron.parallel.rendezvous import connect

        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        rendezvous = connect(launch, timeout, alike={"flags": vars(args)})
        try:
            print_samples(args, launch, rendezvous.device)
        except BaseException as error:
            rendezvous.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            rendezvous.close()

    return run_guarded(body, launch.rank, "error")


def print_samples(args: argparse.Namespace, launch: Launch, device: Any) -> None:
    """Load the model onto all processes and print the prompts with their continuations."""
    from megatron.checkpoint.load import load_weights
    from megatron.model.gpt import build_chunks
    from megatron.parallel.topology import Topology
    from megatron.training.report.metrics import MetricsFile
    from megatron.training.run.checkpoints import say_found
    from megatron.training.run.generate import Sampling, generate
    from megatron.training.run.host import share_cores
    from megatron.training.run.setup import load_tokenizer

    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    share_cores(device, launch.local_world_size)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    topology = Topology.create(tensor, pipeline, device=device, timeout=timeout)
    files = {name: getattr(args, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    config = model_config(args, launch.world_size).replace(
        **{name: path for name, path in files.items() if path}
    )
    if config.tokenizer.tokenizer_type is None:
        raise ConfigError(
            f"{args.load} was trained without a tokenizer, so prompts cannot be encoded"
        )
    vocab_size = config.model.vocab_size
    if config.tokenizer.tokenizer_type == "NullTokenizer" and vocab_size is not None:
        # the model's vocabulary counts the end token that this tokenizer adds to the given size
        vocab_size -= 1
    tokenizer = load_tokenizer(config.replace(vocab_size=vocab_size))
    assert tokenizer is not None, "its type is known"
    chunks = build_chunks(config, topology)
    loaded = load_weights(args.load, chunks, topology, args.load_tag)
    metrics = MetricsFile(args.metrics_file if launch.rank == 0 else None)
    if launch.rank == 0:
        say_found(loaded, partial(print, file=sys.stderr, flush=True), metrics)
    texts = generate(
        config,
        topology,
        chunks,
        [tokenizer.encode(prompt) for prompt in args.prompt],
        max_new_tokens=args.tokens,
        sampling=sampling,
        end_token=tokenizer.eod,
    )
    if launch.rank != 0:
        return
    for prompt, ids in zip(args.prompt, texts, strict=True):
        text = tokenizer.decode([i for i in ids if i != tokenizer.eod])
        print(f"--- {prompt!r}\n{prompt}{text}", flush=True)
        metrics.write("generate", prompt=prompt, text=text, tokens=len(ids), seed=args.seed)
    metrics.close()


def model_config(args: argparse.Namespace, world_size: int) -> Config:
    """Return the checkpoint's model and tokenizer, in fp32, on the requested layout."""
    from megatron.checkpoint.find import find_folder, open_checkpoint

    stored = open_checkpoint(find_folder(args.load, args.load_tag)).config
    wanted = {
        **stored.get("model", {}),
        **stored.get("tokenizer", {}),
        "bf16": False,
        "fp16": False,
        "preset": None,
        "world_size": world_size,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
    }
    return Config.create(**{name: value for name, value in wanted.items() if value is not None})


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
