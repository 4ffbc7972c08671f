"""The directory of checkpoints: folder names, committing a new checkpoint, and removing old ones.

A folder has a temporary name until all of it is on disk, and loses its final name before anything
in it is deleted. Thus a folder with a checkpoint's name is always complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron.checkpoint.files import write_text

TRACKER = "latest_checkpointed_iteration.txt"
_LEFT_OVER = re.compile(r"iter_\d{7,}(\.[0-9a-f]{8})?\.(tmp|old|removed)")


def folder_name(iteration: int) -> str:
    """Return the name of a checkpoint's folder.

    >>> folder_name(100)
    'iter_0000100'
    """
    return f"iter_{iteration:07d}"


def tagged_name(tag: str) -> str:
    """Return the name of a folder that the user specifies by its iteration or by its name.

    >>> tagged_name("100"), tagged_name("best")
    ('iter_0000100', 'best')
    """
    return folder_name(int(tag)) if re.fullmatch("[0-9]{1,18}", tag) else tag


def start_folder(folder: Path) -> Path:
    """Create an empty folder next to `folder`, under a temporary name, to write to.

    The name is unique to the save: two runs that save to the same directory, such as a requeued job
    and its predecessor that has not ended yet, cannot write to each other's folders.
    """
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir(parents=True)
    return temporary


def new_tracker(folder: Path, generation: int) -> Path:
    """Return the temporary path of a save's tracker file.

    The file is written before the checkpoint gets its final name.
    """
    return folder.with_name(f"{TRACKER}.{generation}.tmp")


def commit_folder(temporary: Path, folder: Path, iteration: int, generation: int) -> None:
    """Give a complete folder its final name and write the tracker file.

    An older checkpoint of the same name is replaced. The tracker never names a checkpoint that does
    not exist. After an OSError the folders and the tracker file are as before, unless only the very
    last sync failed: then the commit is done, but a power failure could still undo it.
    """
    tracker = folder.parent / TRACKER
    renewed = new_tracker(folder, generation)
    old = folder.with_name(folder.name + ".old")
    try:
        write_text(renewed, f"{iteration}\n")  # before any rename, as the disk may be full
        sync_directory(temporary)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        sync_directory(folder.parent)
        os.replace(renewed, tracker)
    except OSError:
        with contextlib.suppress(OSError):
            renewed.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if not temporary.exists() and folder.exists():
                folder.rename(temporary)
        with contextlib.suppress(OSError):
            if old.exists() and not folder.exists():
                old.rename(folder)
        raise
    sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    for other in folder.parent.glob(f"{TRACKER}.*.tmp"):  # left by saves that were killed
        with contextlib.suppress(OSError):
            other.unlink()


def name_folder(temporary: Path, folder: Path, overwrite: bool) -> None:
    """Give a complete folder its final name, and sync it; replace a folder if `overwrite`.

    Raises OSError; a folder that was there is then there again.
    """
    sync_directory(temporary)
    old = folder.with_name(f".{folder.name}.old")
    if overwrite and folder.exists():
        shutil.rmtree(old, ignore_errors=True)  # left over, and older than `folder`
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    sync_directory(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    sys.audit("megatron.checkpoint.synced", str(path))


def to_remove(
    iterations: Iterable[int],
    newest_good: int,
    keep_last: int | None,
    keep_every: int | None = None,
    keep: Collection[int | None] = (),
    left_behind: Collection[int] = (),
) -> list[int]:
    """Return the iterations whose checkpoints are to be removed, oldest first.

    iterations    of good checkpoints. Damaged ones are neither counted nor removed
    newest_good   iteration that this run has just saved. It is kept, and so are later iterations,
                  which another run wrote, or this run before it rolled back
    keep_last     number of checkpoints to keep, including `newest_good`; None keeps all
    keep_every    multiples of this number are also kept
    keep          iterations that are kept in any case
    left_behind   iterations that do not count towards `keep_last`: the run rolled back past them
                  and has saved earlier iterations since

    >>> to_remove([100, 150, 200, 250, 300], newest_good=300, keep_last=2, keep_every=200)
    [100, 150]
    """
    if keep_last is None:
        return []
    older = sorted({i for i in iterations if i <= newest_good})
    retained = {newest_good, *[i for i in older if i not in left_behind][-keep_last:], *keep}
    return [i for i in older if i not in retained and not (keep_every and i % keep_every == 0)]


def retire(directory: Path, iterations: Iterable[int]) -> list[Path]:
    """Rename checkpoints, in the order given, so that they no longer count.

    Return the renamed folders, which the caller deletes.
    """
    renamed = []
    for iteration in iterations:
        folder = directory / folder_name(iteration)
        target = folder.with_name(f"{folder.name}.removed")
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):  # a checkpoint that cannot be renamed is kept
            renamed.append(folder.rename(target))
    return renamed


def left_over(directory: Path, current: Path | None = None) -> list[Path]:
    """Return the leftover folders of killed saves and removals.

    `current`, which is being written, is excluded. A checkpoint that was set aside gets its name
    back if its replacement was never completed. A temporary folder, which another run may still be
    writing, is renamed before anything in it is deleted: that run's save then fails and leaves no
    partial checkpoint. Raises OSError.
    """
    leftovers = []
    for path in sorted(directory.iterdir()):
        if not _LEFT_OVER.fullmatch(path.name) or path == current:
            continue
        final = path.with_suffix("")
        if path.suffix == ".old" and not final.exists():
            os.rename(path, final)
        elif path.suffix == ".tmp":
            # If this fails, the folder has just got its final name, or the next save tries again.
            with contextlib.suppress(OSError):
                leftovers.append(path.rename(path.with_suffix(".removed")))
        else:
            leftovers.append(path)
    return leftovers


def clear(folders: Iterable[Path]) -> None:
    """Delete folders. Those that cannot be deleted are left for the next attempt."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
