"""Questions and requests to Slurm's controller."""
from __future__ import annotations

import os
import subprocess

_ANSWER_S = 60.0


def ask_slurm(*command: str, timeout_s: float = _ANSWER_S) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands. Raises OSError and SubprocessError."""
    # squeue takes formats and filters from variables too, which are not meant for our questions.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, env=environ,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
