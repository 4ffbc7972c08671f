#!/usr/bin/env python
"""Convert checkpoints from Megatron, Megatron-DeepSpeed and Hugging Face, or to Hugging Face.

    python tools/convert_checkpoint.py old/checkpoints new/checkpoints --vocab-size 50257
    python tools/convert_checkpoint.py old/checkpoints/global_step1000 --dry-run
    python tools/convert_checkpoint.py --from hf --to megatron models/llama runs/llama
    python tools/convert_checkpoint.py --from megatron --to hf runs/llama models/trained

With --from megatron, SOURCE is global_stepN/ of DeepSpeed's engine (with or without pipeline, up to
ZeRO stage 2) or iter_NNNNNNN/ of Megatron (torch or torch_dist), of any tensor- and
pipeline-parallel size, or a folder of these. Adam's state is converted; a note says if it is
missing or cannot be used. The result loads on any layout: pretrain_gpt.py --load new/checkpoints
--use-checkpoint-args.

Flags of pretrain_gpt.py, such as --vocab-size 50257 or --num-attention-heads 16, add settings that
the checkpoint's own arguments lack, or override these arguments. Nothing in the checkpoint's files
is executed.

Hugging Face folders (docs/huggingface.md) are converted to this program's checkpoints. With --to
hf, SOURCE may also be a checkpoint of this program. If the tool is started on several processes
(torchrun, srun), they divide the tensors of such a conversion. --bf16, --fp16 or --no-bf16 choose
the type of the tensors written for Hugging Face, by default that of the training.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.huggingface_config import is_huggingface
from megatron.config.command_line import read_settings
from megatron.config.option import Parser, real
from megatron.config.settings import raise_problems
from megatron.engine.optimizer_state import AVERAGE
from megatron.errors import ConfigError
from megatron.parallel.launch import detect_launch
from megatron.training.run.process import as_tool, run_guarded

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.topology import Topology


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, or a folder of checkpoints")
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="folder for the result: a folder of checkpoints, or with --to hf of the model",
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=("megatron", "hf"),
        help="format of SOURCE (default: hf if SOURCE is a Hugging Face folder, else megatron)",
    )
    parser.add_argument(
        "--to",
        dest="target_format",
        choices=("megatron", "hf"),
        default="megatron",
        help="format of TARGET (default: megatron, that of this program)",
    )
    parser.add_argument(
        "--load-tag",
        metavar="NAME",
        help="iteration or name of a folder in SOURCE (default: SOURCE itself, or the latest)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="read, check and describe SOURCE, but write nothing"
    )
    parser.add_argument(
        "--ema",
        action="store_true",
        help="with --to hf: write the average of the weights (--ema-decay) instead of the weights",
    )
    parser.add_argument(
        "--pieces",
        metavar="FILE",
        help="with --to hf: file that lists the layer or model of your own with which SOURCE was "
        "trained; it must have the parameters of the built-in layers",
    )
    parser.add_argument("--no-optim", action="store_true", help="convert the weights only")
    parser.add_argument(
        "--checkpoint-version",
        type=real(least=0),
        metavar="V",
        help="row order of query_key_value, instead of the version in the files: 0, 1.0, or 2.0 "
        "and above",
    )
    parser.add_argument(
        "--plain-class",
        action="append",
        default=[],
        metavar="MODULE.NAME",
        help="class in the files that only holds settings; it is read as plain values, never "
        "imported (repeatable)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a checkpoint of the same iteration in TARGET; with --to hf, replace TARGET",
    )
    return parser


def model_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings that flags of pretrain_gpt.py choose; print notices about them.

    Raises ConfigError, listing all problems.
    """
    chosen = read_settings(argv)
    raise_problems(chosen.problems)
    for notice in chosen.notices:
        print(f"note: {notice}", file=sys.stderr)
    return dict(chosen.explicit)


def rows_of(plan: Any) -> list[tuple[str, str]]:
    """Return a description of the source and of the converted model, as names and values."""
    source = plan.source
    step = "none" if source.optimizer_step is None else f"Adam, step {source.optimizer_step}"
    if source.data_size is not None:
        step += f", {source.data_size} data-parallel shards"
    rows = [
        ("source", f"{source.kind}, {source.folder}"),
        (
            "files",
            f"{len(source.files):,}, {sum(path.stat().st_size for path in source.files):,} bytes",
        ),
        (
            "iteration",
            f"{source.iteration:,}, {source.counters.get('consumed_samples', 0):,} samples",
        ),
        ("layout", f"tensor {source.tensor_size} x pipeline {source.pipeline_size}"),
        ("checkpoint version", f"{source.version:g}"),
        ("optimizer", step),
    ]
    rows += rows_of_model(plan.config, plan.shapes)
    return rows + [("note", note) for note in plan.notes]


def rows_of_model(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    """Return a description of a model and its parameters, as names and values."""
    model = config.model
    tied = "untied" if model.untie_embeddings_and_output_weights else "tied"
    elements = sum(math.prod(shape) for shape in shapes.values())
    return [
        ("parameters", f"{len(shapes):,} tensors, {elements:,} elements"),
        (
            "model",
            f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} "
            f"heads in {model.num_key_value_heads} groups, vocabulary {model.vocab_size}, "
            f"{model.position_embedding_type}, {model.normalization}, {model.activation}, output "
            f"{tied}",
        ),
    ]


def show(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values."""
    for name, value in rows:
        print(f"{name:<20} {value}")


def show_progress(done: int, total: int) -> None:
    """Show on a terminal how many parameters are done."""
    if sys.stdout.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done:,} of {total:,} parameters", end=end, flush=True)


def provenance() -> dict[str, Any]:
    """Return the provenance that the checkpoint records."""
    return {"command_line": [Path(__file__).name, *sys.argv[1:]]}


def run(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Convert a checkpoint of Megatron or DeepSpeed. Raises MegatronError."""
    from megatron.checkpoint.folder import folder_name
    from megatron_conversion.convert import (
        convert,
        find_source,
        plan_conversion,
        read_source,
    )

    folder = find_source(args.source, args.load_tag)
    source = read_source(
        folder, optimizer=not args.no_optim, version=args.checkpoint_version, plain=args.plain_class
    )
    plan = plan_conversion(source, settings)
    known = len(plan.notes)
    show(rows_of(plan))
    if args.dry_run:
        return
    target = Path(args.target) / folder_name(source.iteration)
    if target.exists() and not args.overwrite:
        raise ConfigError(f"{target} exists: choose another TARGET, or replace it with --overwrite")

    written = convert(plan, args.target, provenance(), show_progress)
    show([("note", note) for note in plan.notes[known:]])
    print(f"written: {written}")


def run_huggingface(args: argparse.Namespace, settings: dict[str, Any], incoming: bool) -> int:
    """Convert from or to Hugging Face on all processes; return the exit code."""
    launch = detect_launch()

    def body() -> None:
        from megatron.parallel.rendezvous import connect
        from megatron.parallel.topology import Topology
        from megatron.training.run.identity import file_digests, model_files

        read = file_digests(model_files(Path(args.source))) if incoming else {}
        alike = {"flags": {**vars(args), **settings}, "files": read}
        with connect(launch, alike=alike) as rendezvous:
            try:
                topology = Topology.create(device="cpu")
                (from_huggingface if incoming else to_huggingface)(args, settings, topology)
            except BaseException as error:
                rendezvous.fail(f"{type(error).__name__}: {error}")
                raise

    return run_guarded(body, launch.rank, "error")


def from_huggingface(
    args: argparse.Namespace, settings: dict[str, Any], topology: Topology
) -> None:
    """Convert a Hugging Face folder to a checkpoint. Raises MegatronError."""
    from megatron.checkpoint.shared_errors import decided_by_first
    from megatron_conversion.huggingface import read_folder, to_checkpoint

    incoming = decided_by_first(topology, lambda: read_folder(Path(args.source), settings))
    rows = [("source", f"{incoming.kind}, {incoming.folder}"), ("type", str(incoming.dtype))]
    rows += [("note", note) for note in incoming.notes]
    _show_model(topology, rows, incoming.config, incoming.shapes)
    if not args.dry_run:
        progress = show_progress if topology.world.is_first else lambda done, total: None
        written = to_checkpoint(
            incoming, Path(args.target), topology, provenance(), args.overwrite, progress
        )
        if topology.world.is_first:
            print(f"written: {written}")


def to_huggingface(args: argparse.Namespace, settings: dict[str, Any], topology: Topology) -> None:
    """Convert a checkpoint to a Hugging Face folder. Raises MegatronError."""
    from megatron.checkpoint.huggingface_save import companions_of, config_fields
    from megatron.checkpoint.shared_errors import decided_by_first, errors_on_all_ranks
    from megatron.checkpoint.tensors import MASTER
    from megatron_conversion.huggingface import (
        foreign_folder,
        read_checkpoint,
        read_foreign,
        to_huggingface,
    )

    source = Path(args.source)
    tag = args.load_tag
    weights = AVERAGE if args.ema else MASTER
    foreign = decided_by_first(topology, lambda: foreign_folder(source, tag))
    if foreign is None:
        outgoing = decided_by_first(
            topology, lambda: read_checkpoint(source, tag, settings, weights, args.pieces)
        )
    else:
        if args.ema or args.pieces:
            flag = "--ema" if args.ema else "--pieces"
            raise ConfigError(f"{flag}: {foreign} comes from another program, which has none")
        with errors_on_all_ranks(topology, f"reading {foreign}"):  # each process maps the files
            outgoing = read_foreign(foreign, settings, args.checkpoint_version, args.plain_class)

    def prepare() -> Any:
        companions = companions_of(outgoing.config)
        return companions, config_fields(outgoing.config, companions)

    companions, fields = decided_by_first(topology, prepare)
    rows = [("source", str(outgoing.folder)), ("family", fields["model_type"])]
    rows.append(("type", f"torch.{fields['torch_dtype']}"))
    rows += [("note", note) for note in (*outgoing.notes, companions.note) if note]
    _show_model(topology, rows, outgoing.config, outgoing.shapes)
    if not args.dry_run:
        target = Path(args.target)
        progress = show_progress if topology.world.is_first else lambda done, total: None
        to_huggingface(outgoing, target, topology, companions, args.overwrite, progress)
        if topology.world.is_first:
            print(f"written: {target}")


def _show_model(
    topology: Topology, rows: list[tuple[str, str]], config: Config, shapes: Any
) -> None:
    if topology.world.is_first:
        show([*rows, *rows_of_model(config, shapes)])


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 when the checkpoint cannot be converted."""
    args, rest = build_parser().parse_known_args(argv)
    settings = model_settings(rest)
    if args.target is None and not args.dry_run:
        raise ConfigError("give TARGET, the folder for the result, or --dry-run")
    source = args.source_format
    if source is None:
        source = "hf" if is_huggingface(Path(args.source)) else "megatron"
    if (args.ema or args.pieces) and (source, args.target_format) != ("megatron", "hf"):
        flag = "--ema" if args.ema else "--pieces"
        raise ConfigError(f"{flag} is only for --to hf, from checkpoints of this program")
    if source == args.target_format == "hf":
        raise ConfigError(
            f"{args.source} is already in Hugging Face format: give --to megatron to convert it"
        )
    if "hf" in (source, args.target_format):
        unused = {
            "--no-optim": args.no_optim,
            "--checkpoint-version": args.checkpoint_version is not None and source == "hf",
            "--plain-class": bool(args.plain_class) and source == "hf",
            "--load-tag": args.load_tag is not None and source == "hf",
        }
        for flag, is_given in unused.items():
            if is_given:
                raise ConfigError(f"{flag} has no effect in this conversion: remove it")
        return run_huggingface(args, settings, source == "hf")
    run(args, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
