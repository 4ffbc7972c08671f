"""Code that runs in a fresh process of Python, from the root of the repository."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.helpers.launching import ROOT


def run_python(code: str, timeout_s: float = 300) -> str:
    """What `code` prints; the test fails with what it said where it does not end with exit code 0."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=timeout_s,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_tool_loads_none(tool: str, words: Sequence[str], modules: Sequence[str] = ("torch", "deepspeed")) -> None:
    """tools/<tool>.py does what `words` say without loading one of these modules: login nodes may lack them."""
    run_python(
        f"import sys\nfrom tools.{tool} import main\ncode = main({list(words)!r})\nassert code == 0, code\n"
        f"assert not set({list(modules)!r}) & set(sys.modules)"
    )
