#!/usr/bin/env python
"""Show what is in a checkpoint, check it, or compare two.

    python tools/inspect_checkpoint.py runs/example/run                    # the newest good one, and which there are
    python tools/inspect_checkpoint.py runs/example/run/iter_0000100 --norms --match '*query_key_value*'
    python tools/inspect_checkpoint.py runs/example/run --verify           # every byte of all of them
    python tools/inspect_checkpoint.py --diff runs/a/iter_0000100 runs/b/iter_0000100

Needs neither a GPU nor the layout that wrote the checkpoint, and reads one tensor at a time. Nothing in the files is
executed.

Exit code 0; 1 where a checkpoint is damaged, or where two differ in tensors or state (settings are shown, but may
differ); 2 for an error, such as a path that does not exist.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run.process import as_tool

SOUND, DAMAGED = 0, 1
_PIPE_COLUMNS = 200  # where nobody says how wide the output may be


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="a checkpoint, or a folder of checkpoints")
    parser.add_argument("--tag", metavar="NAME", help="this checkpoint of the folder: an iteration or a name")
    parser.add_argument("--verify", action="store_true", help="check every byte; of a folder, all its checkpoints")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two checkpoints")
    parser.add_argument("--norms", action="store_true", help="read all tensors and show their norms, in float64")
    parser.add_argument("--match", metavar="PATTERN", help="only tensors of this name, * and ? for any characters")
    parser.add_argument("--passport", action="store_true", help="show all that is known of what wrote it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run; returns the exit code."""
    args = build_parser().parse_args(argv)
    report, code = run(args)
    if args.json:
        print(json.dumps(_finite(report), indent=1))
    return code


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Do what the flags ask for; what is printed with --json, and the exit code."""
    if (args.path is None) == (args.diff is None):
        raise ConfigError("give the PATH of a checkpoint, or two with --diff A B")
    for path in args.diff or [args.path]:
        if not path.is_dir():
            raise ConfigError(f"{path} is no folder: give a checkpoint (iter_0000100) or a folder of checkpoints")
    if args.diff is not None:
        if args.verify or args.norms or args.passport:
            raise ConfigError("--diff goes with --match, --tag and --json only")
        return show_difference(args)
    return check(args) if args.verify else show(args)


# --- contents


def show(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The contents of one checkpoint, and where a folder of several was named, what there is in it."""
    from megatron.checkpoint.inspect import contents, is_checkpoint, locate, matching, norms

    there = [] if is_checkpoint(args.path) else overview(args.path)
    report: dict[str, Any] = {"checkpoints": there} if there else {}
    if there and not args.json:
        rows = [(c["name"], c["problem"] or "sound as far as small files tell", c["bytes"]) for c in there]
        table(f"checkpoints in {args.path}", ("name", "state", "bytes"), rows)
    if args.tag is not None:
        tagged(args.path, args.tag)
    try:
        folder = locate(args.path, args.tag)
        found = contents(folder)
    except CheckpointError as error:
        # Where there is nothing at all, nothing is damaged.
        if not there and not is_checkpoint(args.path):
            raise
        if not args.json:
            print(f"damaged: {error}")
        return report | {"problem": str(error)}, DAMAGED
    names = matching(found, args.match)
    check_match(args.match, names)
    described = describe(found)
    if not args.json:
        shown = {k: v for k, v in described.items() if k != "passport" or args.passport}
        table(f"{folder}", ("", ""), [(name, plain_text(value)) for name, value in shown.items()])
    measured: dict[str, Any] = {}
    problem = None
    if args.norms:
        size = read_bytes(found, names)
        try:
            with Progress(f"read of {folder.name}", size) as progress:
                measured = dict(norms(found, names, progress.add))
        except CheckpointError as error:
            problem = str(error)
    if not args.json:
        show_tensors(found, names, measured)
        if problem is not None:
            print(f"damaged: {problem}")
    report["checkpoint"] = described
    report["tensors"] = {
        name: {
            "shape": list(found.stored[name]["shape"]), "dtype": found.stored[name]["dtype"],
            "boxes": len(found.stored[name]["boxes"]), "bytes": sum(box[4] for box in found.stored[name]["boxes"]),
            "files": sorted({box[2] for box in found.stored[name]["boxes"]}),
            **(vars(measured[name]) if name in measured else {}),
        }
        for name in names
    }  # fmt: skip
    return report | ({} if problem is None else {"problem": problem}), SOUND if problem is None else DAMAGED


def read_bytes(found: Any, names: Iterable[str]) -> int:
    """Bytes that reading some tensors takes."""
    return sum(box[4] for name in names for box in found.stored[name]["boxes"])


def check_match(pattern: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError where a pattern means nothing: that two checkpoints are equal in no tensor says nothing."""
    if pattern is not None and not names:
        raise ConfigError(f"--match {pattern} fits no tensor: give the whole name or * for the rest of it")


def overview(directory: Path) -> list[dict[str, Any]]:
    """Every checkpoint of a folder with its size and, where its small files are damaged, what is wrong."""
    from megatron.checkpoint.find import folders, open_checkpoint

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


def describe(found: Any) -> dict[str, Any]:
    """What is known of a checkpoint without its tensors."""
    state = found.checkpoint.state
    model = found.checkpoint.config.get("model", {})
    return {
        "folder": str(found.folder),
        "format": state["format"],
        "generation": found.checkpoint.manifest.generation,
        "iteration": found.checkpoint.iteration,
        "parameters": found.weights,
        "tensors": len(found.stored),
        "optimizer": state["optimizer"],
        "bytes": sum(found.files.values()),
        "files": len(found.files),
        "layout": found.layout,
        "model": {name: value for name, value in model.items() if value is not None},
        "state": state["state"],
        "engine": state["engine"],
        "passport": found.passport,
    }


def show_tensors(found: Any, names: Iterable[str], measured: dict[str, Any]) -> None:
    """A row for each parameter; with norms, one for each tensor."""
    chosen = set(names)
    rows: list[tuple[Any, ...]] = []
    if measured:
        for name, norm in measured.items():
            entry = found.stored[name]
            rows.append((name, shape_text(entry), entry["dtype"], f"{norm.norm:.9g}", f"{norm.largest:.6g}",
                         norm.not_finite))  # fmt: skip
        table("tensors", ("name", "shape", "dtype", "norm", "largest", "not finite"), rows)
        return
    for parameter, kinds in found.parameters.items():
        shown = [kind for kind in kinds if f"{kind}.{parameter}" in chosen]
        if not shown:
            continue
        entries = [found.stored[f"{kind}.{parameter}"] for kind in shown]
        boxes = [box for entry in entries for box in entry["boxes"]]
        files = sorted({box[2] for box in boxes})
        listed = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        dtypes = ", ".join(dict.fromkeys(entry["dtype"] for entry in entries))
        rows.append((parameter, shape_text(entries[0]), dtypes, ", ".join(shown), len(boxes), listed))
    table("parameters", ("name", "shape", "dtype", "kinds", "boxes", "files"), rows)


# --- verification


def check(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Verify one checkpoint, or all of a folder and its tracker."""
    from megatron.checkpoint.find import find, folders
    from megatron.checkpoint.inspect import is_checkpoint
    from megatron.checkpoint.verify import verify, verify_tracker

    if args.tag is not None or is_checkpoint(args.path):
        chosen, problems = [args.path if args.tag is None else tagged(args.path, args.tag)], {}
    else:
        chosen = folders(args.path)
        if not chosen:
            find(args.path)  # says what else may be there
            raise CheckpointError(f"no checkpoint in {args.path}")
        problems = {"tracker": verify_tracker(args.path)}
    for folder in chosen:
        size = sum(path.stat().st_size for path in folder.glob("*.distcp") if path.is_file())
        with Progress(f"checked of {folder.name}", size) as progress:
            problems[folder.name] = verify(folder, progress.add)
    if not args.json:
        for name, listed in problems.items():
            for problem in listed:
                print(f"{name}: {problem}")
            if not listed and name != "tracker":
                print(f"{name}: sound")
    return {"problems": problems}, DAMAGED if any(problems.values()) else SOUND


def tagged(directory: Path, tag: str) -> Path:
    """A checkpoint of a folder, be it damaged. Raises CheckpointError where it does not exist."""
    from megatron.checkpoint.folder import tagged_name

    folder = directory / tagged_name(tag)
    if not os.path.isdir(folder):
        raise CheckpointError(f"no checkpoint {folder}")
    return folder


# --- comparison


def show_difference(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """In what two checkpoints differ."""
    from megatron.checkpoint.compare import compare
    from megatron.checkpoint.inspect import contents, locate, matching

    for path in args.diff if args.tag is not None else ():
        tagged(path, args.tag)
    try:
        first, second = (contents(locate(path, args.tag)) for path in args.diff)
        check_match(args.match, [*matching(first, args.match), *matching(second, args.match)])
        size = sum(read_bytes(each, matching(each, args.match)) for each in (first, second))
        with Progress("read of both", size) as progress:
            found = compare(first, second, args.match, progress.add)
    except CheckpointError as error:
        if not args.json:
            print(f"damaged: {error}")
        return {"problem": str(error)}, DAMAGED
    report = {**vars(found), "tensors": {name: vars(d) for name, d in found.tensors.items()}, "same": found.same}
    report |= {"first": str(first.folder), "second": str(second.folder)}
    if not args.json:
        print(f"A: {first.folder}\nB: {second.folder}")
        rows = [
            (name, f"{d.elements} of {d.of}", f"{d.largest:.6g}", f"{d.relative:.6g}")
            for name, d in found.tensors.items()
        ]
        table("tensors that differ", ("name", "elements", "largest difference", "relative"), rows)
        for title, names in (("only in A", found.only_first), ("only in B", found.only_second)):
            table(title, ("name",), [(name,) for name in names])
        for title, changed in (("of another shape or dtype", found.kinds), ("state that differs", found.state),
                               ("settings that differ", found.settings)):  # fmt: skip
            table(title, ("name", "A", "B"), [tuple(map(plain_text, change)) for change in changed])
        print(f"{found.equal} tensors are equal to the bit, {len(found.tensors)} are not")
    return report, SOUND if found.same else DAMAGED


# --- output


class Progress:
    """How far reading has come, on standard error; see ByteProgress."""

    def __init__(self, what: str, size_bytes: int) -> None:
        from megatron.data.prepare.progress import ByteProgress

        self._progress, self._done = ByteProgress(what, size_bytes), 0

    def __enter__(self) -> Progress:
        self._progress.__enter__()
        return self

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        self._progress.update(self._done)

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; nothing where there are no rows."""
    if not rows:
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else _PIPE_COLUMNS)
    made = Table(box=SIMPLE_HEAD, show_header=any(columns))
    numbers: Callable[[Any], bool] = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
    for number, name in enumerate(columns):
        right = all(numbers(row[number]) for row in rows)
        made.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(f"{value:,}" if numbers(value) else str(value)) for value in row))
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(made)


def shape_text(entry: Any) -> str:
    return " x ".join(map(str, entry["shape"]))


def plain_text(value: Any) -> str:
    """A value in a cell: numbers with separators, dicts as lines of their entries."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "\n".join(f"{name} {json.dumps(inner) if isinstance(inner, (dict, list)) else inner}"
                         for name, inner in value.items()) or "none"  # fmt: skip
    return str(value)


def _finite(value: Any) -> Any:
    """The same with what JSON has no numbers for as text."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
