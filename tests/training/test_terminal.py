"""A run on a terminal: a live progress line, and whole log lines above it."""
from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from tests.helpers.launching import ROOT, TINY


def test_a_terminal_shows_progress():
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *TINY], cwd=ROOT, env=env, stdout=theirs, stderr=theirs,
        stdin=subprocess.DEVNULL,
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            read = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not read:
            break
        output += read
    assert process.wait(timeout=240) == 0, output.decode(errors="replace")
    text = output.decode(errors="replace")
    assert re.search(r"training .*[0-4]/4", text), text[-2000:]
    lines = [line for line in text.replace("\r", "\n").splitlines() if " iteration " in line]
    assert len(lines) == 4
    assert all("| lm loss: " in line and "TFLOPs: " in line for line in lines)
