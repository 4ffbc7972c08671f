#!/usr/bin/env python
"""Convert a checkpoint of Megatron or Megatron-DeepSpeed to this program's format.

    python tools/convert_checkpoint.py old/checkpoints new/checkpoints --vocab-size 50257
    python tools/convert_checkpoint.py old/checkpoints/global_step1000 --dry-run

Reads global_stepN/ of DeepSpeed's engine (with or without pipeline, ZeRO stages 1 and 2) and
iter_NNNNNNN/ of Megatron, of any tensor- and pipeline-parallel size, with the optimizer's state if
they have it. The result loads on any layout: pretrain_gpt.py --load new/checkpoints
--use-checkpoint-args.

Flags of the model (pretrain_gpt.py --help), such as --vocab-size 50257 or --num-attention-heads 16,
add settings that the checkpoint's own arguments lack, or override them. Nothing in the checkpoint's
files is executed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.command_line import flag_table, scan
from megatron.config.option import Parser, real
from megatron.config.settings import raise_problems
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, or a folder of checkpoints")
    parser.add_argument(
        "target", metavar="TARGET", nargs="?", help="folder for the result, for --load"
    )
    parser.add_argument(
        "--load-tag", metavar="NAME", help="folder in SOURCE or iteration (default: the last)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show what was found and check it, but write nothing"
    )
    parser.add_argument("--no-optim", action="store_true", help="convert the weights only")
    parser.add_argument(
        "--checkpoint-version",
        type=real(least=0),
        metavar="V",
        help="0, 1.0, or 2.0 and above: order of the rows of query_key_value, if the files do not "
        "contain it",
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
        help="replace a checkpoint of the same iteration in TARGET",
    )
    return parser


def model_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Return settings from flags of pretrain_gpt.py. Raises ConfigError with all problems."""
    scanned = scan(argv)
    problems, found = list(scanned.problems), dict[str, Any]()
    for spelling, words in scanned.flags.items():
        flag = flag_table()[spelling]
        if flag.option is None:
            problems.append(f"{spelling} is not a setting of a model")
        elif flag.kind == "value":
            try:
                found[flag.option.name] = flag.option.parse(words)
            except ValueError as error:
                problems.append(f"{spelling} {error}")
        elif words:
            problems.append(f"{spelling} takes no value, got {' '.join(words)}")
        else:
            found[flag.option.name] = flag.value
    raise_problems(problems)
    return found


def rows_of(plan: Any) -> list[tuple[str, str]]:
    """Return a description of what was found, as names and values."""
    source, model = plan.source, plan.config.model
    tied = "untied" if model.untie_embeddings_and_output_weights else "tied"
    step = "none" if source.optimizer_step is None else f"Adam, step {source.optimizer_step}"
    if source.data_size is not None:
        step += f", {source.data_size} data-parallel shards"
    elements = sum(math.prod(shape) for shape in plan.shapes.values())
    rows = [
        ("found", f"{source.kind}, {source.folder}"),
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
        ("parameters", f"{len(plan.shapes):,} tensors, {elements:,} elements"),
        (
            "model",
            f"{model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} "
            f"heads in {model.num_key_value_heads} groups, vocabulary {model.vocab_size}, "
            f"{model.position_embedding_type}, {model.normalization}, {model.activation}, output "
            f"{tied}",
        ),
    ]
    return rows + [("note", note) for note in plan.notes]


def show(rows: Sequence[tuple[str, str]]) -> None:
    """Print a table on a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        for name, value in rows:
            table.add_row(name, Text(value))
        Console().print(table)
    else:
        for name, value in rows:
            print(f"{name:<20} {value}")


def run(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Read, check, write. Raises MegatronError."""
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
    place = Path(args.target) / folder_name(source.iteration)
    if place.exists() and not args.overwrite:
        raise ConfigError(f"{place} exists: choose another TARGET, or replace it with --overwrite")

    def progress(done: int, total: int) -> None:
        if sys.stdout.isatty():
            print(
                f"\r{done:,} of {total:,} parameters", end="\n" if done == total else "", flush=True
            )

    written = convert(
        plan, args.target, {"command_line": [Path(__file__).name, *sys.argv[1:]]}, progress
    )
    show([("note", note) for note in plan.notes[known:]])
    print(f"written: {written}")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 when the checkpoint cannot be converted."""
    args, rest = build_parser().parse_known_args(argv)
    settings = model_settings(rest)
    if args.target is None and not args.dry_run:
        raise ConfigError("give TARGET, the folder for the new checkpoint, or --dry-run")
    run(args, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
