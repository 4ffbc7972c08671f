#!/usr/bin/env python
"""Show the contents of a checkpoint, verify it, or compare two.

    python tools/inspect_checkpoint.py runs/example/run                    # list all, show the newest valid one
    python tools/inspect_checkpoint.py runs/example/run/iter_0000100 --norms --match '*query_key_value*'
    python tools/inspect_checkpoint.py runs/example/run --verify           # check every byte of all of them
    python tools/inspect_checkpoint.py --diff runs/a/iter_0000100 runs/b/iter_0000100

Needs neither a GPU nor the layout that wrote the checkpoint, and reads one tensor at a time.
Nothing in the files is executed.

Exit code 0; 1 when a checkpoint is damaged, or when two differ in tensors or state (other settings
do not count); 2 for an error, such as a path that does not exist.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.files import (
    CONFIG,
    MANIFEST,
    PROVENANCE,
    SHARD_INDEX,
    STATE,
    Manifest,
    read_manifest,
)
from megatron.checkpoint.find import (
    Checkpoint,
    find,
    folders,
    iteration_of,
    open_checkpoint,
    read_tracker,
    required,
)
from megatron.checkpoint.folder import folder_name
from megatron.checkpoint.load import read_shards
from megatron.checkpoint.shards import Shard, Stored, incomplete, named, read_stored
from megatron.checkpoint.tensors import MASTER
from megatron.config.option import Parser
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run.process import as_tool

OK, DAMAGED = 0, 1
_PIPE_COLUMNS = 200  # width of the output if it is not a terminal


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
        "--tag", metavar="NAME", help="checkpoint in the folder: iteration or folder name"
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
        "--norms", action="store_true", help="read all tensors and show their norms (in float64)"
    )
    parser.add_argument(
        "--match", metavar="PATTERN", help="only tensors whose name matches; * and ? are wildcards"
    )
    parser.add_argument(
        "--provenance",
        action="store_true",
        help="show provenance: versions, layout, data, command line",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    return parser


PART = 1 << 24  # elements that are processed together, in float64
_PER_FILE = 3  # damaged shards of a file that are reported one by one

Count = Callable[[int], object]
"""Called with the number of bytes that were read since the last call."""
Change = tuple[str, Any, Any]
"""Name, value in the first checkpoint, value in the second; ABSENT if missing."""
ABSENT = "(absent)"


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint, without the values of its tensors.

    stored     the tensors' entries by name ("master.NAME", "exp_avg.NAME"), sorted
    files      bytes of all files in the folder
    provenance   provenance; empty if unknown
    """

    checkpoint: Checkpoint
    stored: dict[str, Stored] = field(repr=False)
    files: dict[str, int]
    provenance: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """Kinds of stored tensors of each parameter."""
        found: dict[str, tuple[str, ...]] = {}
        for name in self.stored:
            kind, _, parameter = name.partition(".")
            found[parameter] = (*found.get(parameter, ()), kind)
        return {
            name: tuple(sorted(kinds, key=lambda kind: (kind != MASTER, kind)))
            for name, kinds in found.items()
        }

    @property
    def weights(self) -> int:
        """Number of elements of all parameters."""
        return sum(
            math.prod(s["shape"])
            for name, s in self.stored.items()
            if name.startswith(f"{MASTER}.")
        )

    @property
    def layout(self) -> dict[str, Any]:
        """Layout of the job that wrote it, from provenance or configuration."""
        parallel = self.checkpoint.config.get("parallel", {})
        fields = {
            "tensor": "tensor_model_parallel_size",
            "pipeline": "pipeline_model_parallel_size",
            "data": "data_parallel_size",
            "sequence_parallel": "sequence_parallel",
        }
        configured = {short: parallel[name] for short, name in fields.items() if name in parallel}
        layout: dict[str, Any] = self.provenance.get("layout") or configured
        return layout


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a (possibly damaged) checkpoint, not a folder of them."""
    return iteration_of(path) is not None or any(
        (path / name).is_file() for name in (STATE, CONFIG, MANIFEST, SHARD_INDEX)
    )


def locate(path: Path, tag: str | None = None) -> Path:
    """Return the checkpoint at a path: itself, the newest valid one in it, or the one of `tag`.

    Raises CheckpointError.
    """
    return path if tag is None and is_checkpoint(path) else required(path, find(path, tag))


def contents(folder: Path) -> Contents:
    """Read the small files of a checkpoint. Raises CheckpointError, naming the file, for damage."""
    checkpoint = open_checkpoint(folder)
    manifest = checkpoint.manifest
    stored = read_stored(manifest)
    if problems := incomplete(stored):
        raise CheckpointError(f"the shard lists of {folder} are wrong: {named(problems)}")
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    provenance = manifest.read_json(PROVENANCE) if PROVENANCE in manifest.files else {}
    return Contents(checkpoint, dict(sorted(stored.items())), files, provenance)


def matching(found: Contents, pattern: str | None) -> list[str]:
    """Return the tensors whose own or parameter's name matches a shell pattern; None: all."""
    return [
        name
        for name in found.stored
        if pattern is None
        or any(fnmatch.fnmatchcase(text, pattern) for text in (name, name.partition(".")[2]))
    ]


def read_whole(found: Contents, name: str) -> torch.Tensor:
    """Return a whole tensor. Raises CheckpointError where a part of it is damaged."""
    entry = found.stored[name]
    whole = torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    wanted = [(name, shard) for shard in entry["boxes"]]
    for _, shard, values in read_shards(found.folder, wanted, found.stored):
        part = whole
        for dim, (start, size) in enumerate(zip(shard.offset, shard.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(values)
    return whole


# --- norms


@dataclass(frozen=True)
class Norm:
    """Norm and largest absolute value of a tensor's finite elements in float64; count of others."""

    norm: float
    largest: float
    not_finite: int


def norms(found: Contents, names: list[str], count: Count = bool) -> Iterator[tuple[str, Norm]]:
    """Yield the norm of each tensor. Raises CheckpointError that names a damaged file."""
    for name in names:
        squares, largest, bad = 0.0, 0.0, 0
        wanted = [(name, shard) for shard in found.stored[name]["boxes"]]
        for _, shard, values in read_shards(found.folder, wanted, found.stored):
            for part in values.reshape(-1).split(PART):
                exact = part.double()
                finite = exact[exact.isfinite()]
                bad += exact.numel() - finite.numel()
                if finite.numel():
                    squares += float(torch.dot(finite, finite))
                    largest = max(largest, float(finite.abs().max()))
            count(shard.length)
        yield name, Norm(math.sqrt(squares), largest, bad)


# --- verification


def verify(folder: Path, count: Count = bool) -> list[str]:
    """List the problems of a checkpoint, each with its file or tensor.

    Everything is checked, even after a problem was found: the manifest, the small files, every
    shard of the data files, stray bytes and files, and that the shards cover each tensor exactly
    once.
    """
    problems: list[str] = []
    try:
        manifest = read_manifest(folder)
        for name in manifest.files:
            try:
                manifest.read_bytes(name)
            except CheckpointError as error:
                problems.append(str(error))
        if not problems:
            open_checkpoint(folder)
        stored = read_stored(manifest)
    except (CheckpointError, OSError) as error:
        return list(dict.fromkeys([*problems, str(error)]))
    problems += _data_files(folder, stored, manifest, count)
    return problems + incomplete(stored)


def _data_files(
    folder: Path, stored: Mapping[str, Stored], manifest: Manifest, count: Count
) -> Iterator[str]:
    """Yield damaged shards, stray bytes in data files, and stray files."""
    files: dict[str, list[tuple[int, str, Shard]]] = {}
    for name, entry in stored.items():
        for shard in entry["boxes"]:
            files.setdefault(shard.file, []).append((shard.start, name, shard))
    for file in sorted(files):
        path, at, damaged = folder / file, 0, 0
        if not path.is_file():
            yield f"{path} is missing"
            continue
        for start, name, shard in sorted(files[file]):
            if start > at:
                yield f"{path} has bytes {at} to {start} that belong to no tensor"
            elif start < at:
                yield f"{path} has {name} at byte {start}, before the end of another tensor"
            at = max(at, start + shard.length)
            try:
                for _ in read_shards(folder, [(name, shard)], stored):
                    pass
            except CheckpointError as error:
                damaged += 1
                if damaged <= _PER_FILE:
                    yield str(error)
            count(shard.length)
        if damaged > _PER_FILE:
            yield f"{path} has {damaged} damaged shards of {len(files[file])}"
        size = path.stat().st_size
        if size > at:
            yield f"{path} has bytes {at} to {size} that belong to no tensor"
    known = {MANIFEST} | files.keys() | manifest.files.keys()
    if extra := sorted(path.name for path in folder.iterdir() if path.name not in known):
        yield f"{folder} has files that do not belong to the checkpoint: {named(extra)}"


def verify_tracker(directory: Path) -> list[str]:
    """List the problems of the tracker file in a folder of checkpoints."""
    tracker, there = read_tracker(directory), [folder.name for folder in folders(directory)]
    if tracker.problem is not None:
        return [f"{tracker.path} {tracker.problem}"]
    if tracker.iteration is None:
        return [f"{tracker.path} is missing"] if there else []
    if folder_name(tracker.iteration) not in there:
        return [f"{tracker.path} names iteration {tracker.iteration}, whose folder is missing"]
    return []


# --- comparison


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor between two checkpoints.

    elements     number of elements whose bits differ
    of           elements of the tensor
    largest      largest absolute difference; inf if one is not finite
    relative     Euclidean norm of the difference over that of the first; inf if that is 0 or not
                 finite
    """

    elements: int
    of: int
    largest: float
    relative: float


@dataclass(frozen=True)
class Difference:
    """Differences between two checkpoints.

    only_first, only_second    tensors that only one of them has
    kinds                      tensors that differ in shape or dtype
    tensors                    tensors that differ in values
    equal                      number of bitwise equal tensors
    settings, state            differences in the configuration, and in the other state of a run
    """

    only_first: list[str]
    only_second: list[str]
    kinds: list[Change]
    tensors: dict[str, TensorDifference]
    equal: int
    settings: list[Change]
    state: list[Change]

    @property
    def same(self) -> bool:
        """Return whether tensors and state are the same; settings may differ."""
        return not (self.only_first or self.only_second or self.kinds or self.tensors or self.state)


def compare(
    first: Contents, second: Contents, pattern: str | None = None, count: Count = bool
) -> Difference:
    """Compare two checkpoints of any layouts, and the tensors that `pattern` matches.

    Raises CheckpointError that names a damaged file.
    """
    names, others = matching(first, pattern), set(matching(second, pattern))
    kinds: list[Change] = []
    tensors: dict[str, TensorDifference] = {}
    equal = 0
    for name in names:
        if name not in others:
            continue
        ours, theirs = first.stored[name], second.stored[name]
        if (ours["shape"], ours["dtype"]) != (theirs["shape"], theirs["dtype"]):
            kinds.append(
                (name, f"{ours['shape']} {ours['dtype']}", f"{theirs['shape']} {theirs['dtype']}")
            )
            continue
        a, b = read_whole(first, name), read_whole(second, name)
        count(sum(shard.length for entry in (ours, theirs) for shard in entry["boxes"]))
        difference = tensor_difference(a, b)
        if difference is None:
            equal += 1
        else:
            tensors[name] = difference
    return Difference(
        [name for name in names if name not in others],
        sorted(others - set(names)),
        kinds,
        tensors,
        equal,
        _changes(first.checkpoint.config, second.checkpoint.config),
        # Older versions stored the time of the save in the state.
        _changes(*({**c.checkpoint.state, "saved_at_s": None} for c in (first, second))),
    )


def tensor_difference(a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    """Compare two tensors of one shape and dtype, in float64; None if bitwise equal."""
    elements, largest, squares, norm = 0, 0.0, 0.0, 0.0
    for x, y in zip(a.reshape(-1).split(PART), b.reshape(-1).split(PART), strict=True):
        bytes_of = (x.numel(), x.element_size())
        different = (x.view(torch.uint8).view(bytes_of) != y.view(torch.uint8).view(bytes_of)).any(
            dim=1
        )
        elements += int(different.sum())
        exact, other = x.double(), y.double()
        norm += float(torch.dot(exact, exact))
        apart = torch.where(different, (exact - other).abs(), 0.0).nan_to_num(nan=math.inf)
        largest = max(largest, float(apart.max())) if apart.numel() else largest
        squares += float(torch.dot(apart, apart))
    if not elements:
        return None
    relative = math.sqrt(squares) / math.sqrt(norm) if norm and math.isfinite(norm) else math.inf
    return TensorDifference(elements, a.numel(), largest, relative)


def _changes(first: Any, second: Any) -> list[Change]:
    """Return the values in which two nested dicts differ, under names joined by dots.

    >>> _changes({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "b": 4})
    [('a.y', 2, 3), ('b', '(absent)', 4)]
    """
    ours, theirs = dict(_flat(first)), dict(_flat(second))
    return [
        (name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    args = build_parser().parse_args(argv)
    report, code = run(args)
    if args.json:
        print(json.dumps(_finite(report), indent=1))
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
    return check(args) if args.verify else show(args)


# --- contents


def show(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Show one checkpoint and, for a folder of checkpoints, a list of all."""

    there = [] if is_checkpoint(args.path) else overview(args.path)
    report: dict[str, Any] = {"checkpoints": there} if there else {}
    if there and not args.json:
        good = "OK (metadata only; --verify checks every byte)"
        rows = [(c["name"], c["problem"] or good, c["bytes"]) for c in there]
        table(f"checkpoints in {args.path}", ("name", "state", "bytes"), rows)
    if args.tag is not None:
        tagged(args.path, args.tag)
    try:
        folder = locate(args.path, args.tag)
        found = contents(folder)
    except CheckpointError as error:
        # An empty folder is an error, not a damaged checkpoint.
        if not there and not is_checkpoint(args.path):
            raise
        if not args.json:
            print(f"damaged: {error}")
        return report | {"problem": str(error)}, DAMAGED
    names = matching(found, args.match)
    check_match(args.match, names)
    described = describe(found)
    if not args.json:
        shown = {k: v for k, v in described.items() if k != "provenance" or args.provenance}
        table(f"{folder}", ("", ""), [(name, plain_text(value)) for name, value in shown.items()])
    measured: dict[str, Any] = {}
    problem = None
    if args.norms:
        size = read_bytes(found, names)
        try:
            with Progress(f"reading {folder.name}", size) as progress:
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
            "shape": list(found.stored[name]["shape"]),
            "dtype": found.stored[name]["dtype"],
            "shards": len(found.stored[name]["boxes"]),
            "bytes": read_bytes(found, [name]),
            "files": sorted({shard.file for shard in found.stored[name]["boxes"]}),
            **(vars(measured[name]) if name in measured else {}),
        }
        for name in names
    }
    return report | (
        {} if problem is None else {"problem": problem}
    ), OK if problem is None else DAMAGED


def read_bytes(found: Any, names: Iterable[str]) -> int:
    """Return the bytes of some tensors in the data files."""
    return sum(shard.length for name in names for shard in found.stored[name]["boxes"])


def check_match(pattern: str | None, names: Sequence[str]) -> None:
    """Raise ConfigError if a pattern matches nothing: an empty comparison must not look equal."""
    if pattern is not None and not names:
        raise ConfigError(
            f"--match {pattern} matches no tensor: give a whole name, or use the wildcard *"
        )


def overview(directory: Path) -> list[dict[str, Any]]:
    """List a folder's checkpoints with sizes, and problems of their small files."""
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
    """Return the description of a checkpoint without its tensors."""
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
        "provenance": found.provenance,
    }


def show_tensors(found: Any, names: Iterable[str], measured: dict[str, Any]) -> None:
    """Print a row for each parameter; with norms, one for each tensor."""
    chosen = set(names)
    rows: list[tuple[Any, ...]] = []
    if measured:
        for name, norm in measured.items():
            entry = found.stored[name]
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
    for parameter, kinds in found.parameters.items():
        shown = [kind for kind in kinds if f"{kind}.{parameter}" in chosen]
        if not shown:
            continue
        entries = [found.stored[f"{kind}.{parameter}"] for kind in shown]
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
    """Verify one checkpoint, or all of a folder and its tracker file."""
    from megatron.checkpoint.find import find, folders

    if args.tag is not None or is_checkpoint(args.path):
        chosen, problems = [args.path if args.tag is None else tagged(args.path, args.tag)], {}
    else:
        chosen = folders(args.path)
        if not chosen:
            find(args.path)  # may raise a more specific error
            raise CheckpointError(f"no checkpoint in {args.path}")
        problems = {"tracker": verify_tracker(args.path)}
    for folder in chosen:
        size = sum(path.stat().st_size for path in folder.glob("*.distcp") if path.is_file())
        with Progress(f"checking {folder.name}", size) as progress:
            problems[folder.name] = verify(folder, progress.add)
    if not args.json:
        for name, listed in problems.items():
            for problem in listed:
                print(f"{name}: {problem}")
            if not listed and name != "tracker":
                print(f"{name}: OK")
    return {"problems": problems}, DAMAGED if any(problems.values()) else OK


def tagged(directory: Path, tag: str) -> Path:
    """Return a checkpoint of a folder, valid or not. Raises CheckpointError if it is missing."""
    from megatron.checkpoint.folder import tagged_name

    folder = directory / tagged_name(tag)
    if not os.path.isdir(folder):
        raise CheckpointError(f"no checkpoint {folder}")
    return folder


# --- comparison


def show_difference(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Show how two checkpoints differ."""

    for path in args.diff if args.tag is not None else ():
        tagged(path, args.tag)
    try:
        first, second = (contents(locate(path, args.tag)) for path in args.diff)
        check_match(args.match, [*matching(first, args.match), *matching(second, args.match)])
        size = sum(read_bytes(each, matching(each, args.match)) for each in (first, second))
        with Progress("reading both", size) as progress:
            found = compare(first, second, args.match, progress.add)
    except CheckpointError as error:
        if not args.json:
            print(f"damaged: {error}")
        return {"problem": str(error)}, DAMAGED
    report = {
        **vars(found),
        "tensors": {name: vars(d) for name, d in found.tensors.items()},
        "same": found.same,
    }
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
        for title, changed in (
            ("tensors that differ in shape or dtype", found.kinds),
            ("state that differs", found.state),
            ("settings that differ", found.settings),
        ):
            table(title, ("name", "A", "B"), [tuple(map(plain_text, change)) for change in changed])
        print(f"{found.equal} tensors are bitwise equal, {len(found.tensors)} differ")
    return report, OK if found.same else DAMAGED


# --- output


class Progress:
    """Progress of reading, on standard error; see ByteProgress."""

    def __init__(self, what: str, size_bytes: int) -> None:
        from megatron_preparation.progress import ByteProgress

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
    """Print a table, unless it has no rows."""
    if not rows:
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else _PIPE_COLUMNS)
    made = Table(box=SIMPLE_HEAD, show_header=any(columns))

    def numbers(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

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


def _finite(value: Any) -> Any:
    """Return the value with infinities and NaN as text, since JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
