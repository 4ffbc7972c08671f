"""Choice of the checkpoint to load: the newest good one, or the requested one.

A good checkpoint has its final name, a valid manifest, and every small file that the manifest
lists, undamaged. The bytes in data files are checked by the ranks that read them (load.py). The
tracker file names the last checkpoint of the run, but it may be lost: the folders are enough,
because a folder gets its name only when all of it is on disk. Timestamps are never used, since
clocks may be wrong.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import (
    CONFIG,
    MANIFEST,
    SHARD_INDEX,
    STATE,
    Manifest,
    StrPath,
    read_manifest,
)
from megatron.checkpoint.folder import TRACKER, folder_name, new_tracker, tagged_name
from megatron.config import Config
from megatron.config.io import hugging_face_folder, is_same_folder
from megatron.config.settings import SECTIONS
from megatron.errors import CheckpointError
from megatron.untrusted import is_count, read_bytes

_NAME = re.compile(r"iter_([0-9]{7}|[1-9][0-9]{7,17})(\.old)?")
_TRACKER_LIMIT_BYTES = 4096
_FOREIGN = re.compile(r"global_step\d+|latest|release|mp_rank_\d+.*|metadata\.json")
_CONVERT = "tools/convert_checkpoint.py converts those of Megatron and DeepSpeed"


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that was passed over, and why."""

    folder: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.reason}"


@dataclass(frozen=True)
class CheckpointChoice:
    """Result of a search.

    folder     the newest good checkpoint; None if there is none
    rejected   broken checkpoints newer than `folder`, newest first. Before them comes the
               checkpoint that the tracker names, if its folder is missing. If the directory has no
               checkpoint, a damaged tracker file is the only entry
    notes      further information for the user, one sentence each
    """

    folder: Path | None = None
    rejected: tuple[RejectedCheckpoint, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """The small files of a checkpoint, checked.

    folder     its path
    manifest   sizes and digests of its small files
    state      content of state.json: "iteration", the counters of the training loop ("state") and
               of the optimizer ("engine"), and whether the optimizer's state is there ("optimizer")
    config     the configuration, section by section
    """

    folder: Path
    manifest: Manifest
    state: dict[str, Any] = field(repr=False)
    config: dict[str, Any] = field(repr=False)

    @property
    def iteration(self) -> int:
        return int(self.state["iteration"])

    def __post_init__(self) -> None:
        types = {"iteration": int, "optimizer": bool, "state": dict, "engine": dict}
        wrong = [name for name, kind in types.items() if type(self.state.get(name)) is not kind]
        if wrong or not is_count(self.state["iteration"]):
            raise CheckpointError(
                f"{self.folder / STATE} is damaged: {', '.join(wrong or ['iteration'])} missing or "
                "of the wrong type"
            )
        wrong = [name for name in SECTIONS if not isinstance(self.config.get(name, {}), dict)]
        if wrong:
            raise CheckpointError(
                f"{self.folder / CONFIG} is damaged: {', '.join(wrong)} hold no settings"
            )


@dataclass(frozen=True)
class Tracker:
    """The tracker file of a directory.

    path        where it is, or would be
    iteration   the iteration that it names; None if it names none
    problem     what is wrong with it; None if it is valid or missing
    """

    path: Path
    iteration: int | None = None
    problem: str | None = None


def read_tracker(directory: StrPath) -> Tracker:
    """Read the tracker file. Never raises: problems are part of the result."""
    path = Path(directory) / TRACKER
    try:
        data = read_bytes(path, _TRACKER_LIMIT_BYTES, error=CheckpointError)
    except CheckpointError as error:
        missing = isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError))
        return Tracker(path, None, None if missing else f"cannot be used ({error})")
    text = data.decode(errors="replace").strip()
    if re.fullmatch("[0-9]{1,18}", text):
        return Tracker(path, int(text))
    return Tracker(path, None, f"holds {text[:40]!r} where an iteration is expected")


def iteration_of(folder: Path) -> int | None:
    """Return the iteration in a folder's name; None unless it is a finished checkpoint's name.

    >>> iteration_of(Path("run/iter_0000100")), iteration_of(Path("run/iter_0000100.tmp"))
    (100, None)
    """
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def number_of(folder: Path) -> int:
    """Return the iteration of a folder that `folders` lists."""
    iteration = iteration_of(folder)
    assert iteration is not None, f"{folder} does not have a checkpoint's name"
    return iteration


def folders(directory: StrPath) -> list[Path]:
    """List the folders with the name of a finished checkpoint, newest first.

    A checkpoint that was about to be replaced when its run was killed may exist only under a name
    that ends in ".old" (folder.commit_folder). It is listed, too. A missing directory has no
    folders. Raises CheckpointError if the directory cannot be listed.
    """
    names = set(_names(Path(directory)))
    candidates = [
        Path(directory) / name for name in names if name.removesuffix(".old") not in names - {name}
    ]
    return sorted(
        (f for f in candidates if iteration_of(f) is not None and f.is_dir()),
        key=number_of,
        reverse=True,
    )


def generations(numbered: Iterable[Path]) -> dict[Path, int]:
    """Return the generation of each checkpoint whose manifest is valid.

    Generations number the saves in a folder in their order (files.py). A damaged manifest is
    reported when its checkpoint is opened.
    """
    by_folder = {}
    for folder in numbered:
        with contextlib.suppress(CheckpointError):
            by_folder[folder] = read_manifest(folder).generation
    return by_folder


def next_generation(directory: StrPath, source: StrPath | None = None) -> int:
    """Return a generation later than that of any checkpoint in a directory.

    Also later than those in `source`, unless that cannot be read: a save does not need it. Raises
    CheckpointError if the directory cannot be listed.
    """
    existing = folders(directory)
    if source is not None:
        with contextlib.suppress(CheckpointError, OSError):
            existing += folders(source)
    return 1 + max(generations(existing).values(), default=0)


def overtaken(known: Mapping[Path, int]) -> list[Path]:
    """Return each checkpoint that was saved before another one of an earlier iteration.

    `known` is {folder: generation}. The run rolled back past the checkpoints that are returned.
    They are not loaded in place of a broken one, since they contain the cause of the rollback.
    """
    passed: list[Path] = []
    latest = 0
    for folder in sorted(known, key=number_of):
        if known[folder] < latest:
            passed.append(folder)
        latest = max(latest, known[folder])
    return passed


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and check the small files of a checkpoint.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    names = _names(folder)
    if MANIFEST not in names:
        foreign = any(map(_FOREIGN.fullmatch, names))
        raise CheckpointError(
            f"{folder / MANIFEST} is missing: not a checkpoint of this program, or incomplete"
            + (f". It seems to be another program's: {_CONVERT}" if foreign else "")
        )
    manifest = read_manifest(folder)
    lacking = {STATE, CONFIG, SHARD_INDEX} - manifest.files.keys()
    if lacking:
        raise CheckpointError(
            f"the manifest of {folder} does not list {', '.join(sorted(lacking))}"
        )
    for name in manifest.files:
        manifest.read_bytes(name)
    return Checkpoint(folder, manifest, manifest.read_json(STATE), manifest.read_json(CONFIG))


def find(
    directory: StrPath, tag: str | int | None = None, before: int | None = None
) -> CheckpointChoice:
    """Find the newest good checkpoint in a directory, or the one that `tag` names.

    tag      an iteration or a folder's name
    before   consider only checkpoints of iterations before this one, and return no notes

    Raises CheckpointError if the checkpoint that `tag` names does not exist or is broken, and if
    the directory cannot be listed, is itself a checkpoint, or holds only checkpoints of other
    programs.
    """
    root = Path(directory)
    if tag is not None:
        folder = root / tagged_name(str(tag))
        if not os.path.isdir(folder):
            listed = ", ".join(sorted(f.name for f in folders(root)))
            raise CheckpointError(f"no checkpoint {folder}; {root} has: {listed or 'none'}")
        try:
            open_checkpoint(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"checkpoint {folder}, which --load-tag names, is broken: {error}"
            ) from error
        return CheckpointChoice(folder)
    candidates = folders(root)
    tracker = read_tracker(root)
    newest = tracker.iteration
    skipped = _skipped(candidates, tracker)
    rejected: list[RejectedCheckpoint] = []
    if before is None and newest is not None and newest not in map(number_of, candidates):
        reason = f"the folder is missing, though {tracker.path} names it"
        rejected.append(RejectedCheckpoint(root / folder_name(newest), reason))
    good = None
    for folder in candidates:
        if folder in skipped or (before is not None and number_of(folder) >= before):
            continue
        try:
            open_checkpoint(folder)
            good = folder
            break
        except CheckpointError as error:
            rejected.append(RejectedCheckpoint(folder, str(error)))
    if before is not None:
        return CheckpointChoice(good, tuple(rejected))
    if not candidates and not rejected:
        names = _names(root)
        if MANIFEST in names:
            raise CheckpointError(
                f"{root} is a checkpoint, not a folder of checkpoints: give --load {root.parent} "
                f"--load-tag {root.name}"
            )
        foreign = [name for name in sorted(names) if _FOREIGN.fullmatch(name)]
        if foreign:
            raise CheckpointError(
                f"{root} has no checkpoint of this program, but {', '.join(foreign[:4])}, which "
                f"seem to be another program's: {_CONVERT}; name an empty folder to start from "
                "scratch"
            )
        if tracker.problem is not None:  # a checkpoint must have existed
            rejected.append(RejectedCheckpoint(tracker.path, tracker.problem))
    return CheckpointChoice(good, tuple(rejected), tuple(_notes(tracker, good, skipped)))


def required(directory: StrPath, choice: CheckpointChoice) -> Path:
    """Return the folder that a search found.

    Raises CheckpointError, naming the broken checkpoints, if the search found no good one.
    """
    if choice.folder is not None:
        return choice.folder
    if choice.rejected:
        listed = "; ".join(map(str, choice.rejected))
        raise CheckpointError(
            f"no good checkpoint in {directory}: {listed}. A run does not start from scratch "
            "alongside broken checkpoints: restore or remove them, or name another folder"
        )
    raise CheckpointError(
        f"no checkpoint in {directory}: neither {TRACKER} nor iter_NNNNNNN is there. Check --load"
    )


def chosen_checkpoint(config: Config) -> CheckpointChoice:
    """Return the checkpoint from which a run starts; none without --load, and with hf:FOLDER.

    Raises CheckpointError if all checkpoints are broken, if the one that --load-tag names is
    missing or broken, or if there is none although --use-checkpoint-args or
    --exit-on-missing-checkpoint needs one.
    """
    settings = config.checkpoint
    if not settings.load or hugging_face_folder(settings.load) is not None:
        return CheckpointChoice(None)
    choice = find(settings.load, settings.load_tag)
    if choice.rejected or settings.exit_on_missing_checkpoint or settings.use_checkpoint_args:
        required(settings.load, choice)
    return choice


def left_behind(config: Config) -> int | None:
    """Return the newest iteration in the --save folder if a run does not start from there.

    Raises CheckpointError if only a settings file names the folder: the user probably means to
    continue, or to use another folder.
    """
    save = config.checkpoint.save
    if not save or is_same_folder(config.checkpoint.load, save):
        return None
    newest = read_tracker(save).iteration
    origin = config.origin("save")
    if newest is not None and origin not in ("command line", "argument"):
        raise CheckpointError(
            f"--save {save} ({origin}) has checkpoints up to iteration {newest}, which this "
            f"start would not continue: give --load {save} to continue, or --save with another "
            "folder"
        )
    return newest


def find_folder(directory: StrPath, tag: str | int | None = None) -> Path:
    """Return the newest good checkpoint, or the one that `tag` names.

    Raises the errors of `find`, and CheckpointError if there is no good checkpoint.
    """
    return required(directory, find(directory, tag))


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot list {root}: {error.strerror or error}. Check this path and its permissions"
        ) from error


def _skipped(candidates: list[Path], tracker: Tracker) -> list[Path]:
    """Return the checkpoints to ignore.

    These are checkpoints that the run rolled back past, except the one that the tracker names, and
    checkpoints later than the tracker's iteration. The latter belong to another run, or were saved
    before a user edited the tracker. If a save was killed just before it renamed the tracker file,
    the temporary tracker file still exists and the checkpoint counts. A tracker that names a
    missing folder is no reason to ignore later checkpoints: the tracker may be damaged, e.g. cut to
    fewer digits.
    """
    newest = tracker.iteration
    known = generations(candidates)
    skipped = [folder for folder in overtaken(known) if number_of(folder) != newest]
    if newest is not None and newest in map(number_of, candidates):
        for folder in candidates:
            killed = folder in known and new_tracker(folder, known[folder]).exists()
            if number_of(folder) > newest and not killed and folder not in skipped:
                skipped.append(folder)
    return skipped


def _notes(tracker: Tracker, good: Path | None, skipped: list[Path]) -> Iterator[str]:
    if skipped:
        earlier = ""
        if tracker.iteration is not None:
            earlier = f", or {tracker.path} names iteration {tracker.iteration}, an earlier one"
        yield (
            f"{', '.join(folder.name for folder in skipped)} not considered: the run rolled back "
            f"past them{earlier}; load one of them with --load-tag"
        )
    if good is None:
        return
    if tracker.iteration is None:
        yield (
            f"{tracker.path} {tracker.problem or 'is missing'}: the newest good checkpoint was "
            "found without it"
        )
    elif number_of(good) > tracker.iteration:
        yield (
            f"{tracker.path} names iteration {tracker.iteration}, but {good} is complete and of a "
            "later iteration"
        )
