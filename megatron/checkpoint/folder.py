"""Names and files of a checkpoint directory."""
from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from megatron.checkpoint.digest import digest
from megatron.errors import CheckpointError
from megatron.untrusted import parse_json

TRACKER = "latest_checkpointed_iteration.txt"
STATE, CONFIG, METADATA, BOXES = "state.json", "config.json", ".metadata", "boxes.json"
MANIFEST, PASSPORT = "manifest.json", "passport.json"
FORMAT = 3

Written = tuple[int, str]
"""Bytes and digest of a file that was written."""


def folder_name(iteration: int) -> str:
    """The folder of a checkpoint.

    >>> folder_name(100)
    'iter_0000100'
    """
    return f"iter_{iteration:07d}"


def tagged_name(tag: str) -> str:
    """The folder that a user means by an iteration or a name.

    >>> tagged_name("100"), tagged_name("best")
    ('iter_0000100', 'best')
    """
    return folder_name(int(tag)) if re.fullmatch("[0-9]{1,18}", tag) else tag


def to_json(value: Any, what: str) -> str:
    """JSON text; raises CheckpointError naming `what` when something in it is no plain value, or could not be read."""
    try:
        text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} cannot be saved as JSON ({error}): use numbers, strings, lists and dicts"
        ) from error
    parse_json(text, what, error=CheckpointError)
    return text


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


def new_tracker(folder: Path, generation: int) -> Path:
    """The tracker file of a save before it has its name: it lies there from before its folder has one."""
    return folder.with_name(f"{TRACKER}.{generation}.tmp")


def commit_folder(temporary: Path, folder: Path, iteration: int, generation: int) -> None:
    """Give a complete folder its final name and write the tracker file. Raises OSError; then both are as before,
    unless it was the very last sync that failed: then a power cut could still undo the commit.

    One of that name from before is replaced. At no moment does the tracker name what is not there.
    """
    tracker = folder.parent / TRACKER
    renewed, old = new_tracker(folder, generation), folder.with_name(folder.name + ".old")
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
    for other in folder.parent.glob(f"{TRACKER}.*.tmp"):  # of saves that died
        with contextlib.suppress(OSError):
            other.unlink()


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
