"""Which old checkpoints are removed, and how: renamed first, so that no half of one has a checkpoint's name."""
from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron.checkpoint.folder import folder_name

_LEFT_OVER = re.compile(r"iter_\d{7,}(\.[0-9a-f]{8})?\.(tmp|old|removed)")


def to_remove(
    iterations: Iterable[int],
    newest_good: int,
    keep_last: int | None,
    keep_every: int | None = None,
    keep: Collection[int] = (),
    left_behind: Collection[int] = (),
) -> list[int]:
    """Iterations whose checkpoints go, oldest first.

    iterations    good checkpoints that are there: a damaged one does not count as kept, and nobody removes it unasked
    newest_good   the newest of this run: it stays, and so does what is newer, which this run did not write
    keep_last     so many stay, `newest_good` included; None: all do
    keep_every    multiples of it stay, beside the last ones
    keep          these stay whatever else is said
    left_behind   these do not count as the last ones: the run went back before them and has written others since

    >>> to_remove([100, 150, 200, 250, 300], newest_good=300, keep_last=2, keep_every=200)
    [100, 150]
    """
    if keep_last is None:
        return []
    assert keep_last >= 1, "a run keeps at least its last checkpoint"
    older = sorted({i for i in iterations if i <= newest_good})
    kept = {newest_good, *[i for i in older if i not in left_behind][-keep_last:], *keep}
    return [i for i in older if i not in kept and not (keep_every and i % keep_every == 0)]


def retire(directory: Path, iterations: Iterable[int]) -> list[Path]:
    """Take checkpoints out of the list: they are renamed, oldest first, for `clear` to delete."""
    renamed = []
    for iteration in iterations:
        folder = directory / folder_name(iteration)
        target = folder.with_name(f"{folder.name}.removed")
        shutil.rmtree(target, ignore_errors=True)
        try:
            folder.rename(target)
        except OSError:  # as long as it cannot be removed it stays a checkpoint
            continue
        renamed.append(target)
    return renamed


def left_over(directory: Path, current: Path | None = None) -> list[Path]:
    """Folders under temporary names of saves and removals that were killed; `current` is being written and is none.

    A checkpoint that was to be replaced by one of the same iteration, which then did not come, gets its name back. What
    another run may still be writing loses its name before anything in it is deleted: it can no longer become half of
    a checkpoint, that run's save fails instead.
    """
    found = []
    for path in sorted(directory.iterdir()):
        if not _LEFT_OVER.fullmatch(path.name) or path == current:
            continue
        final = path.with_suffix("")
        if path.suffix == ".old" and not final.exists():
            os.rename(path, final)
        elif path.suffix == ".tmp":
            with contextlib.suppress(OSError):  # it has got its final name meanwhile, or goes the next time
                found.append(path.rename(path.with_suffix(".removed")))
        else:
            found.append(path)
    return found


def clear(folders: Iterable[Path]) -> None:
    """Delete folders. What cannot be deleted stays for the next time."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
