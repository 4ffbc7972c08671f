"""How an error of a rank reads on all ranks."""
from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from megatron.checkpoint.together import describe


def test_a_full_disk_is_called_so() -> None:
    """torch's zip writer hides the system's error behind a position in its own source."""
    hidden = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    plain = OSError(28, "No space left on device")
    text = describe(CheckpointException("write", {0: (hidden, None), 1: (plain, None)}))  # type: ignore[arg-type, dict-item]
    assert "disk or quota" in text and "rank 1: OSError: [Errno 28] No space left on device" in text
    assert "inline_container" not in text
