"""One run at a time writes to a --save folder; rank 0 holds the claim for all."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron.data.file_lock import FolderClaim
from megatron.parallel.topology import Topology


class SaveClaim:
    """This run's claim on its --save folder, from `take` to `release`; none without a folder."""

    def __init__(self, folder: str | None) -> None:
        self._claim = FolderClaim(Path(folder), f"--save {folder}") if folder else None

    def take(self, topology: Topology, say: Callable[[str], object]) -> None:
        """Claim the folder; all ranks call it. Raises CheckpointError on all of them while another run has it."""
        if self._claim is None:
            return
        from megatron.checkpoint.together import decided_by_first  # with torch's checkpoints, which import slowly

        decided_by_first(topology, partial(self._claim.take, say))

    def release(self) -> None:
        """Leave the folder to the next run. Harmless when called twice, and where nothing was claimed."""
        if self._claim is not None:
            self._claim.release()
