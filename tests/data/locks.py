"""Owners of locks as tests need them: a process of another machine, and one that has ended."""
from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from megatron.data.file_lock import Owner
from tests.helpers.killing import forked, wait_for

REMOTE = replace(Owner.this_process(), host="another-node", machine="00000000")


def write_lock(path: Path, owner: Owner) -> Path:
    """The lock file of `owner`, which nobody touches."""
    path.write_text(json.dumps(asdict(owner)))
    return path


def ended_process() -> Owner:
    """A process of this machine that has ended."""
    reader, writer = os.pipe()
    pid = forked(lambda: os.write(writer, json.dumps(asdict(Owner.this_process())).encode()))
    wait_for(pid)
    owner = Owner.read(os.read(reader, 4096).decode())
    os.close(reader)
    os.close(writer)
    assert owner is not None
    return owner
