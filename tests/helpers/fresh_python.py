"""Code run in a new Python process, from the root of the repository."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.launching import ROOT


def run_python(code: str, timeout_s: float = 300) -> str:
    """Run `code` in a new Python and return its output; fail the test if the exit code is not 0."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
