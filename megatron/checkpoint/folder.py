"""Names and files of a checkpoint directory."""
from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron.checkpoint.digest import digest
from megatron.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
STATE, CONFIG, METADATA, BOXES = "state.json", "config.json", ".metadata", "boxes.json"
MANIFEST, PASSPORT = "manifest.json", "passport.json"
WHOLE, PIECES, CHECKED = FORMATS = 1, 2, 3
"""Formats: the boxes are listed in METADATA; in BOXES and its pieces; in these, with digests and a manifest."""

Written = tuple[int, str]
"""Bytes and digest of a file that was written."""


def folder_name(iteration: int) -> str:
    """The folder of a checkpoint.

    >>> folder_name(100)
    'iter_0000100'
    """
    return f"iter_{iteration:07d}"


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


def write_text(path: Path, text: str) -> Written:
    """Write a file and wait until it is on the disk; bytes and digest of it. Raises OSError.

    For files of a folder, or with a name, that nobody looks for yet: a crash may leave half of one.
    """
    data = text.encode()
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    sys.audit("megatron.checkpoint.synced", str(path))
    return len(data), digest(data)


def start_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, under a temporary name, in which to write.

    No other save has that name: two runs that save to one directory, e.g. a requeued job beside one that has not ended,
    would else write into each other's folders, and give half of a checkpoint its final name.
    """
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    return temporary


def commit_folder(temporary: Path, folder: Path, iteration: int) -> None:
    """Give a complete folder its final name and write the tracker file. Raises OSError; then both are as before,
    unless it was the very last sync that failed: then a power cut could still undo the commit.

    One of that name from before is replaced. At no moment does the tracker name what is not there.
    """
    tracker = folder.parent / TRACKER
    renewed, old = tracker.with_name(TRACKER + ".tmp"), folder.with_name(folder.name + ".old")
    try:
        write_text(renewed, f"{iteration}\n")  # while nothing has been renamed: the disk may be full
        sync_directory(temporary)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        sync_directory(folder.parent)
        os.replace(renewed, tracker)
    except OSError:
        _undo(temporary, folder, old, renewed)
        raise
    sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _undo(temporary: Path, folder: Path, old: Path, renewed: Path) -> None:
    with contextlib.suppress(OSError):
        renewed.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if not temporary.exists() and folder.exists():
            folder.rename(temporary)
    with contextlib.suppress(OSError):
        if old.exists() and not folder.exists():
            old.rename(folder)


def sync_directory(path: Path) -> None:
    """Make renames in a directory last over a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    sys.audit("megatron.checkpoint.synced", str(path))
