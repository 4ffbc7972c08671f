"""Loading of a checkpoint's model and tokenizer on all processes of a tool.

torch is imported once the command line is known to be valid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.option import integer, real
from megatron.errors import MegatronError
from megatron.parallel.launch import Launch, detect_launch
from megatron.training.run.load_model import Trained, load_model
from megatron.training.run.process import results_apart, run_guarded

if TYPE_CHECKING:
    from megatron.training.report.events import Event

__all__ = ["Trained", "add_flags", "run_with_model"]

_TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


_SIZES = {
    "tensor-model-parallel-size": "number of ranks that divide each layer",
    "pipeline-model-parallel-size": "number of stages of layers",
    "context-parallel-size": "number of ranks that divide each sequence; generation needs 1",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a checkpoint, a layout and files."""
    parser.add_argument(
        "--load",
        required=True,
        metavar="FOLDER",
        help="the --save folder of a training run, or hf:FOLDER for a model in Hugging Face format",
    )
    parser.add_argument(
        "--load-tag", metavar="NAME", help="checkpoint in that folder (default: the newest)"
    )
    parser.add_argument(
        "--allow-older",
        action="store_true",
        help="if the newest checkpoint is damaged, load the newest one that is not, with a warning "
        "(default: an error)",
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="use the averaged weights of a run trained with --ema-decay",
    )
    parser.add_argument(
        "--pieces",
        metavar="FILE",
        help="Python file that lists your own layer or model, if it was trained with one "
        "(docs/extending.md)",
    )
    for size, help_text in _SIZES.items():
        parser.add_argument(
            f"--{size}", type=integer(), default=1, metavar="N", help=f"{help_text} (default: 1)"
        )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="path of the tokenizer model, if it has moved since training",
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="path, if it has moved since training")
    parser.add_argument("--merge-file", metavar="FILE", help="path, if it has moved since training")
    parser.add_argument(
        "--distributed-timeout-minutes",
        type=real(525600),
        default=10.0,
        metavar="MINUTES",
        help="time after which a rank that waits for another one fails (default: 10)",
    )
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16 (default: fp32)"
    )
    precision.add_argument("--fp16", action="store_true", help="compute in float16 (default: fp32)")
    parser.add_argument(
        "--metrics-file",
        metavar="FILE",
        help="append a record of each result to this JSON-lines file",
    )


def run_with_model(
    args: argparse.Namespace,
    use: Callable[[Trained], None],
    files: Sequence[Path],
    changed: Mapping[str, Any] = {},
) -> int:
    """Connect all processes, load the model, call `use` with it, and return the exit code.

    `args` has the flags of add_flags. `files` are read in addition to the model and must be the
    same on all processes. `changed` are settings that replace the checkpoint's; None keeps a
    setting.
    """
    try:
        launch = detect_launch()
        problem = None
    except MegatronError as error:
        launch = Launch()
        problem = error

    @results_apart()
    def body() -> None:
        if problem is not None:
            raise problem
        from megatron.parallel.rendezvous import connect
        from megatron.training.run.identity import file_digests

        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        pieces = [] if args.pieces is None else [args.pieces]
        alike = {"flags": vars(args), "files": file_digests([*files, *map(Path, pieces)])}
        rendezvous = connect(launch, timeout, alike=alike)
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
    from megatron.parallel.layout import LayoutSizes
    from megatron.parallel.topology import Topology
    from megatron.training.report.trackers import JsonLines
    from megatron.training.run.checkpoints import report_choice
    from megatron.training.run.host import share_cores

    share_cores(device, launch.local_world_size)
    topology = Topology.create(
        sizes=LayoutSizes(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.context_parallel_size,
        ),
        device=device,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    say: Callable[[str], object] = partial(print, file=sys.stderr, flush=True)
    if launch.rank == 0:
        say(f" loading {args.load}")
    model = load_model(
        args.load,
        topology,
        tag=args.load_tag,
        allow_older=args.allow_older,
        ema=args.ema,
        pieces=args.pieces,
        **{name: getattr(args, name) or None for name in _TOKENIZER_FILES},
        **changed,
    )
    file = JsonLines(args.metrics_file) if launch.rank == 0 and args.metrics_file else None
    publish: Callable[[Event], object] = (lambda event: None) if file is None else file.on_event
    if launch.rank == 0:
        report_choice(model.loaded, say, publish)
        iteration = model.loaded.iteration
        named = "unknown" if iteration is None else iteration
        say(f" loaded {model.loaded.folder} (iteration {named})")
    return replace(model, publish=publish)
