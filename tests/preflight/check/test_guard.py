"""The kernel's part of the guard, alone."""
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megatron.preflight.check.guard import Guard


def test_only_one_folder_can_be_changed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "kept").write_text("1")
    guard = Guard(inside)
    if not guard.works:
        pytest.skip("this kernel has no Landlock")
    script = "cd $0 && (echo > kept; rm kept; echo > new; mkdir folder; mv kept other; ln -s x y; chmod +x .)"
    for folder in (inside, outside):
        subprocess.run(["bash", "-c", script, folder], preexec_fn=guard.enter, capture_output=True, timeout=120)
    done = subprocess.run(["bash", "-c", "echo > /dev/null && cat /etc/hostname"], preexec_fn=guard.enter, timeout=120)
    guard.close()
    assert done.returncode == 0
    assert sorted(path.name for path in inside.iterdir()) == ["folder", "new", "y"]
    assert [path.name for path in outside.iterdir()] == ["kept"] and (outside / "kept").read_text() == "1"
