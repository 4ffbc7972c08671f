#!/usr/bin/env python
"""Show the contents of a checkpoint, verify it, or compare two.

    python tools/inspect_checkpoint.py runs/example/run                    # list all, show the newest valid one
    python tools/inspect_checkpoint.py runs/example/run/iter_0000100 --norms --match '*query_key_value*'
    python tools/inspect_checkpoint.py runs/example/run --verify           # check every byte of all of them
    python tools/inspect_checkpoint.py --diff runs/a/iter_0000100 runs/b/iter_0000100

Needs neither a GPU nor the layout that wrote the checkpoint. At most one tensor of a checkpoint is
in memory at a time. Nothing in the files is executed.

Exit code 0; 1 when the checkpoint to show or compare is damaged, when --verify finds a problem, or
when two checkpoints differ in tensors or state (differences in settings do not count); 2 for an
error, such as a path that does not exist. In a list, damaged checkpoints beside a valid one do not
count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.find import find, folders, open_checkpoint
from megatron.checkpoint.folder import tagged_name
from megatron.checkpoint.shards import Stored
from megatron.config.option import Parser
from megatron.errors import CheckpointError, ConfigError
from megatron.metrics_file import strict_json
from megatron.planner.table import Table, print_table
from megatron.training.run.process import as_tool
from megatron_inspection.checkpoint import (
    Contents,
    TensorNorm,
    compare,
    contents,
    is_checkpoint,
    locate,
    matching,
    norms,
    verify,
    verify_tracker,
)
from megatron_preparation.progress import ByteProgress

OK = 0
DAMAGED = 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="PATH",
        help="a checkpoint, or a folder of checkpoints",
    )
    parser.add_argument(
        "--tag", metavar="NAME", help="checkpoint in PATH, or in A and B: iteration or folder name"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every byte of PATH, or of all checkpoints in it",
    )
    parser.add_argument(
        "--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two checkpoints"
    )
    parser.add_argument(
        "--norms", action="store_true", help="read the tensors and show their norms (in float64)"
    )
    parser.add_argument(
        "--match", metavar="PATTERN", help="only tensors of matching names; wildcards: * ? []"
    )
    parser.add_argument(
        "--provenance",
        action="store_true",
        help="show the provenance: versions, layout, data, command line",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    report, code = run(args)
    if args.json:
        print(strict_json(report, str, indent=1))
    return code


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Run what the flags select; return the object for --json and the exit code."""
    if (args.path is None) == (args.diff is None):
        raise ConfigError("give PATH, or two checkpoints with --diff A B")
    for path in args.diff or [args.path]:
        if not path.is_dir():
            raise ConfigError(
                f"{path} is not a folder: give a checkpoint (iter_0000100) or a folder of "
                "checkpoints"
            )
    if args.diff is not None:
        if args.verify or args.norms or args.provenance:
            raise ConfigError("--diff can be combined with --match, --tag and --json only")
        return show_difference(args)
    if args.verify and (args.match or args.norms or args.provenance):
        raise ConfigError("--verify can be combined with --tag and --json only")
    return check(args) if args.verify else show(args)


# --- contents


def show(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Show one checkpoint and, for a folder of checkpoints, a list of all."""
    checkpoints = [] if is_checkpoint(args.path) else overview(args.path)
    report: dict[str, Any] = {"checkpoints": checkpoints} if checkpoints else {}
    if checkpoints and not args.json:
        good = "OK (only small files checked; --verify checks every byte)"
        rows = [(c["name"], c["problem"] or good, c["bytes"]) for c in checkpoints]
        table(f"checkpoints in {args.path}", ("name", "state", "bytes"), rows)
    if args.tag is not None:
        tagged(args.path, args.tag)
    try:
        folder = locate(args.path, args.tag)
        checkpoint = contents(folder)
    except CheckpointError as error:
        # An empty folder is an error, not a damaged checkpoint.
        if not checkpoints and not is_checkpoint(args.path):
            raise
        if not args.json:
            print(f"damaged: {error}")
        return report | {"problem": str(error)}, DAMAGED
    names = matching(checkpoint, args.match)
    check_match(args.match, names)
    described = describe(checkpoint)
    if not args.json:
        shown = {k: v for k, v in described.items() if k != "provenance" or args.provenance}
        if history := shown["state"].get("history"):
            phases = ", ".join(f"{len(history[split])} of {split} data" for split in history)
            text = f"phases: {phases}; tools/inspect_dataset.py --run shows them"
            shown["state"] = {**shown["state"], "history": text}
        table(f"{folder}", ("", ""), [*shown.items()])
    measured: dict[str, TensorNorm] = {}
    problem = None
    if args.norms:
        size = read_bytes(checkpoint, names)
        try:
            with ByteProgress(f"reading {folder.name}", size) as progress:
                measured = dict(norms(checkpoint, names, progress.add))
        except CheckpointError as error:
            problem = str(error)
    if not args.json:
        show_tensors(checkpoint, names, measured)
        if problem is not None:
            print(f"damaged: {problem}")
    report["checkpoint"] = described
    report["tensors"] = {
        name: {
            "shape": list(checkpoint.stored[name]["shape"]),
            "dtype": checkpoint.stored[name]["dtype"],
            "shards": len(checkpoint.stored[name]["boxes"]),
            "bytes": read_bytes(checkpoint, [name]),
            "files": sorted({shard.file for shard in checkpoint.stored[name]["boxes"]}),
            **(vars(measured[name]) if name in measured else {}),
        }
        for name in names
    }
    return report | (
        {} if problem is None else {"problem": problem}
    ), OK if problem is None else DAMAGED


def read_bytes(contents: Contents, names: Iterable[str]) -> int:
    """Return the number of bytes that these tensors take in the data files."""
    return sum(shard.length for name in names for shard in contents.stored[name]["boxes"])


def check_match(pattern: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError if a pattern matches no tensor: checkpoints would seem to be equal."""
    if pattern is not None and not names:
        raise ConfigError(
            f"--match {pattern} matches no tensor: give a full name, or use the wildcard *"
        )


def overview(directory: Path) -> list[dict[str, Any]]:
    """List a folder's checkpoints, each with its size and the first problem of its small files."""
    out = []
    for folder in folders(directory):
        problem = None
        try:
            open_checkpoint(folder)
        except CheckpointError as error:
            problem = str(error)
        size = 0
        try:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        except OSError as error:
            problem = problem or f"{folder} cannot be read: {error.strerror or error}"
        out.append({"name": folder.name, "bytes": size, "problem": problem})
    return out


def describe(contents: Contents) -> dict[str, Any]:
    """Return the description of a checkpoint without its tensors."""
    state = contents.checkpoint.state
    model = contents.checkpoint.config.get("model", {})
    return {
        "folder": str(contents.folder),
        "format": state["format"],
        "generation": contents.checkpoint.manifest.generation,
        "iteration": contents.checkpoint.iteration,
        "parameters": contents.weights,
        "tensors": len(contents.stored),
        "optimizer": state["optimizer"],
        "bytes": sum(contents.files.values()),
        "files": len(contents.files),
        "layout": contents.layout,
        "model": {name: value for name, value in model.items() if value is not None},
        "state": state["state"],
        "engine": state["engine"],
        "provenance": contents.provenance,
    }


def show_tensors(contents: Contents, names: Iterable[str], measured: dict[str, TensorNorm]) -> None:
    """Print a row for each parameter; with norms, one for each tensor."""
    chosen = set(names)
    rows: list[tuple[Any, ...]] = []
    if measured:
        for name, norm in measured.items():
            entry = contents.stored[name]
            rows.append(
                (
                    name,
                    shape_text(entry),
                    entry["dtype"],
                    f"{norm.norm:.9g}",
                    f"{norm.largest:.6g}",
                    norm.not_finite,
                )
            )
        table("tensors", ("name", "shape", "dtype", "norm", "largest", "not finite"), rows)
        return
    for parameter, kinds in contents.parameters.items():
        shown = [kind for kind in kinds if f"{kind}.{parameter}" in chosen]
        if not shown:
            continue
        entries = [contents.stored[f"{kind}.{parameter}"] for kind in shown]
        shards = [shard for entry in entries for shard in entry["boxes"]]
        files = sorted({shard.file for shard in shards})
        listed = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        dtypes = ", ".join(dict.fromkeys(entry["dtype"] for entry in entries))
        rows.append(
            (parameter, shape_text(entries[0]), dtypes, ", ".join(shown), len(shards), listed)
        )
    table("parameters", ("name", "shape", "dtype", "kinds", "shards", "files"), rows)


# --- verification


def check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Verify one checkpoint, or all checkpoints of a folder and its tracker file."""
    if args.tag is not None or is_checkpoint(args.path):
        chosen = [args.path if args.tag is None else tagged(args.path, args.tag)]
        problems = {}
    else:
        chosen = folders(args.path)
        if not chosen:
            find(args.path)  # may raise a more specific error
            raise CheckpointError(f"no checkpoint in {args.path}")
        problems = {"tracker": verify_tracker(args.path)}
    for folder in chosen:
        size = sum(path.stat().st_size for path in folder.glob("*.distcp") if path.is_file())
        with ByteProgress(f"checking {folder.name}", size) as progress:
            problems[folder.name] = verify(folder, progress.add)
    if not args.json:
        for name, listed in problems.items():
            for problem in listed:
                print(f"{name}: {problem}")
            if not listed and name != "tracker":
                print(f"{name}: OK")
    return {"problems": problems}, DAMAGED if any(problems.values()) else OK


def tagged(directory: Path, tag: str) -> Path:
    """Return the folder of a checkpoint, valid or not. Raises CheckpointError if it is missing."""
    folder = directory / tagged_name(tag)
    if not os.path.isdir(folder):
        raise CheckpointError(f"no checkpoint {folder}")
    return folder


# --- comparison


def show_difference(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Show how two checkpoints differ; return the object for --json and the exit code."""
    for path in args.diff if args.tag is not None else ():
        tagged(path, args.tag)
    try:
        first, second = (contents(locate(path, args.tag)) for path in args.diff)
        check_match(args.match, [*matching(first, args.match), *matching(second, args.match)])
        size = sum(read_bytes(each, matching(each, args.match)) for each in (first, second))
        with ByteProgress("reading both", size) as progress:
            difference = compare(first, second, args.match, progress.add)
    except CheckpointError as error:
        if not args.json:
            print(f"damaged: {error}")
        return {"problem": str(error)}, DAMAGED
    report = {
        **vars(difference),
        "tensors": {name: vars(d) for name, d in difference.tensors.items()},
        "same": difference.same,
    }
    report |= {"first": str(first.folder), "second": str(second.folder)}
    if not args.json:
        print(f"A: {first.folder}\nB: {second.folder}")
        rows = [
            (name, f"{d.elements} of {d.of}", f"{d.largest:.6g}", f"{d.relative:.6g}")
            for name, d in difference.tensors.items()
        ]
        table("tensors that differ", ("name", "elements", "largest difference", "relative"), rows)
        for title, names in (
            ("only in A", difference.only_first),
            ("only in B", difference.only_second),
        ):
            table(title, ("name",), [(name,) for name in names])
        for title, changed in (
            ("tensors that differ in shape or dtype", difference.kinds),
            ("state that differs", difference.state),
            ("settings that differ", difference.settings),
        ):
            table(title, ("name", "A", "B"), changed)
        print(f"{difference.equal} tensors are bitwise equal, {len(difference.tensors)} differ")
    return report, OK if difference.same else DAMAGED


# --- output


def table(title: str, columns: tuple[str, ...], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, unless it has no rows."""
    if rows:
        print(title)
        print_table(Table("", columns, [tuple(map(plain_text, row)) for row in rows]))


def shape_text(entry: Stored) -> str:
    return " x ".join(map(str, entry["shape"]))


def plain_text(value: Any) -> str:
    """Return the text of a value: numbers with separators, dicts with a line for each entry."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return (
            "\n".join(
                f"{name} {json.dumps(inner) if isinstance(inner, (dict, list)) else inner}"
                for name, inner in value.items()
            )
            or "none"
        )
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
