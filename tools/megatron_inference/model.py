"""Loading of a checkpoint's model and tokenizer onto all processes of a tool.

torch is imported once the command line is known to be valid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.config.option import real, whole
from megatron.errors import MegatronError
from megatron.parallel.launch import Launch, detect_launch
from megatron.training.run.process import run_guarded

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.load import LoadedState
    from megatron.data.tokenizer import Tokenizer
    from megatron.parallel.topology import Topology
    from megatron.training.report.events import Event

_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
_AS_TRAINED = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "data_packing")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a checkpoint, a layout and files."""
    parser.add_argument(
        "--load", required=True, metavar="FOLDER", help="the --save folder of a training run"
    )
    parser.add_argument(
        "--load-tag", metavar="NAME", help="another checkpoint in that folder (default: the newest)"
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
        help="append a record of the result to this JSON-lines file",
    )


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model on this rank.

    config     of the model, its tokenizer and the separation of documents
    tokenizer  None if the model was trained without one
    chunks     this rank's stages, without dropout
    publish    adds an event to --metrics-file, on rank 0
    """

    config: Config
    topology: Topology
    tokenizer: Tokenizer | None
    chunks: torch.nn.ModuleDict
    loaded: LoadedState
    publish: Callable[[Event], object]


def run_with_model(
    args: argparse.Namespace,
    use: Callable[[Trained], None],
    changed: Mapping[str, Any] = {},
) -> int:
    """Connect all processes, load the model, call `use`, and return the exit code.

    `args` has the flags of add_flags, `changed` settings other than the checkpoint's, None for
    those that stay. If the newest checkpoint is damaged, the previous one is used, with a warning.
    """
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
            trained = _load(args, launch, rendezvous.device, changed)
            use(trained)
        except BaseException as error:
            rendezvous.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            rendezvous.close()

    return run_guarded(body, launch.rank, "error")


def _load(
    args: argparse.Namespace, launch: Launch, device: Any, changed: Mapping[str, Any]
) -> Trained:
    import torch

    from megatron.checkpoint.load import load_weights
    from megatron.model.gpt import build_chunks
    from megatron.parallel.topology import Topology
    from megatron.training.report.trackers import JsonLines
    from megatron.training.run.checkpoints import say_found
    from megatron.training.run.host import share_cores
    from megatron.training.run.setup import load_tokenizer

    share_cores(device, launch.local_world_size)
    topology = Topology.create(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        device=device,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    config = _config(args, launch.world_size, changed)
    vocab_size = config.model.vocab_size
    if config.tokenizer.tokenizer_type == "NullTokenizer" and vocab_size is not None:
        # the model's vocabulary counts the end token that this tokenizer adds to the given size
        vocab_size -= 1
    tokenizer = load_tokenizer(config.replace(vocab_size=vocab_size))
    say: Callable[[str], object] = partial(print, file=sys.stderr, flush=True)
    if launch.rank == 0:
        say(f" loading {args.load}")
    chunks = build_chunks(config, topology)
    chunks.to(getattr(torch, config.precision.dtype_name)).eval()
    loaded = load_weights(args.load, chunks, topology, args.load_tag)
    file = JsonLines(args.metrics_file) if launch.rank == 0 and args.metrics_file else None
    publish: Callable[[Event], object] = (lambda event: None) if file is None else file.on_event
    if launch.rank == 0:
        say_found(loaded, say, publish)
    return Trained(config, topology, tokenizer, chunks, loaded, publish)


def _config(args: argparse.Namespace, world_size: int, changed: Mapping[str, Any]) -> Config:
    """Return the checkpoint's settings on the requested layout, in fp32 unless `changed`."""
    from megatron.checkpoint.find import find_folder, open_checkpoint

    stored = open_checkpoint(find_folder(args.load, args.load_tag)).config
    data = stored.get("data", {})
    wanted = {
        **stored.get("model", {}),
        **stored.get("tokenizer", {}),
        **{name: data[name] for name in _AS_TRAINED if name in data},
        **{name: path for name in _TOKENIZER_FILES if (path := getattr(args, name))},
        "bf16": False,
        "fp16": False,
        "preset": None,
        "world_size": world_size,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        **{name: value for name, value in changed.items() if value is not None},
    }
    return Config.create(**{name: value for name, value in wanted.items() if value is not None})
