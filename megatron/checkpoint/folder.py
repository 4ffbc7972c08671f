"""Names and files of a checkpoint directory."""
from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
STATE, CONFIG, METADATA, BOXES = "state.json", "config.json", ".metadata", "boxes.json"
WHOLE, PIECES = 1, 2
"""Formats: where the boxes are listed, METADATA or BOXES (boxes.py)."""


def folder_name(iteration: int) -> str:
    """The folder of a checkpoint.

    >>> folder_name(100)
    'iter_0000100'
    """
    return f"iter_{iteration:07d}"


def latest_iteration(directory: str | os.PathLike[str]) -> int | None:
    """The iteration of the last complete checkpoint; None where there is none. Raises CheckpointError."""
    tracker = Path(directory) / TRACKER
    try:
        text = tracker.read_text().strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {tracker}: {error}") from error
    if not text.isdigit():
        raise CheckpointError(
            f"{tracker} holds {text[:40]!r} where an iteration is expected: write the number of one of the iter_ "
            f"folders into it, or name a folder with --load-tag"
        )
    return int(text)


def find_folder(directory: str | os.PathLike[str], tag: str | int | None = None) -> Path:
    """The checkpoint to load: `tag` (an iteration or a folder's name), or the last one. Raises CheckpointError."""
    root = Path(directory)
    if tag is None:
        iteration = latest_iteration(root)
        if iteration is None:
            raise CheckpointError(
                f"no checkpoint in {root}: it has no {TRACKER}. Check --load, or name a folder with --load-tag"
            )
        folder = root / folder_name(iteration)
    else:
        folder = root / (folder_name(int(tag)) if str(tag).isdigit() else str(tag))
    if not folder.is_dir():
        there = sorted(p.name for p in root.glob("iter_*") if p.is_dir() and p.suffix == "")
        raise CheckpointError(f"no checkpoint {folder}; in {root} there is: {', '.join(there) or 'none'}")
    missing = [name for name in (METADATA, STATE, CONFIG) if not (folder / name).is_file()]
    if METADATA in missing and (folder / BOXES).is_file():
        missing.remove(METADATA)
    if missing:
        raise CheckpointError(
            f"{folder} is not a checkpoint of this program, or not all of one: {', '.join(missing)} missing"
        )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object: the file is damaged, load another checkpoint")
    return found


def to_json(value: Any, what: str) -> str:
    """JSON text; raises CheckpointError naming `what` when something in it is no plain value."""
    try:
        return json.dumps(value, indent=1, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{what} cannot be saved as JSON ({error}): use numbers, strings, lists and dicts"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a file so that at any moment it is absent, old or complete."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def start_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, under a temporary name, in which to write."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def finish_folder(temporary: Path, folder: Path) -> None:
    """Give a complete folder its final name; one of that name from before is replaced."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync_directory(path: Path) -> None:
    """Make renames in a directory last over a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
