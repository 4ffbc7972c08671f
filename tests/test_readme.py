"""What README says can be run, runs."""
from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from megatron.config import PRESETS, parse_args
from tests.helpers.launching import ROOT

README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_library_example(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "3"]  # a file per rank: their lines would mix
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *logs, str(script)]
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                            capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr
    first, last = (
        [line for line in file.read_text().splitlines() if re.match(r"[01] [0-9.]+ \[", line)]
        for file in sorted((tmp_path / "logs").rglob("stdout.log"))
    )
    assert len(first) == len(last) == 2  # two steps
    assert [line.count(",") for line in first] == [0, 0]
    assert [line.count(",") for line in last] == [3, 3]  # four losses on the last stage


def test_command_lines_parse():
    text = README.replace("\\\n", " ")
    commands = re.findall(r"pretrain_gpt\.py (--preset[^\n]*)", text)
    assert len(commands) == 2
    for command in commands:
        arguments = [word for word in shlex.split(command) if word != "--print-config"]
        world_size = 4 if "--tensor" in command else 1
        assert parse_args(arguments, world_size).batch.train_iters == 1000


def test_files_that_commands_name_are_there():
    named = re.findall(r"(?<![/\w])(?:examples|tools|docs)/[\w./]+\.(?:sh|sbatch|env|py|md)", README)
    assert "examples/frontier/train_175b.sbatch" in named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_presets_are_listed():
    for preset in PRESETS:
        assert f"`{preset}`" in README
