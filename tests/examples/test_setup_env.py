"""examples/frontier/setup_env.sh: its commands, its refusals, and where it resumes."""

import os
import tarfile
from pathlib import Path

import pytest

from tests.examples.stubs import FRONTIER, shell
from tests.helpers.launching import ROOT

pytestmark = pytest.mark.slow

SCRIPT = FRONTIER / "setup_env.sh"
# Stub of Python: makes an "environment" with itself in it, and fails where told to.
_PYTHON = """#!/bin/bash
echo "$*" >>"$CALLS"
[[ "$1 $2" != "-m venv" ]] || { mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }
[[ "$*" != "-m pip list"* ]] || printf '%s\\n' $INSTALLED
[[ -z $FAIL_ON || "$*" != *"$FAIL_ON"* ]] || { echo "$FAIL_ON: no such thing" >&2; exit 3; }
"""


def setup_env(folder, *arguments, modules=False, **variables):
    """Run the script on a machine with or without a module command.

    The command sets what a rocm module sets.
    """
    python = folder / "python3"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    define = (
        "module() { export ROCM_PATH=/opt/rocm$NOT_SET; }; export -f module; " if modules else ""
    )
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "SITE_VENV": str(folder / "venv"),
        "SITE_ENV": str(folder / "env.tar.gz"),
        "PYTHON": str(python),
        "CALLS": str(folder / "calls"),
        "FAIL_ON": "",
        "INSTALLED": "",
        **variables,
    }
    words = "bash", "-c", f'{define}exec bash "$0" "$@"', str(SCRIPT), *arguments
    return shell(*words, env=environ, timeout=200)


def test_refuses_where_it_cannot_run(tmp_path):
    done = setup_env(tmp_path, MEGATRON_ROOT="/nowhere", DEEPSPEED_VERSION="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nowhere" in done.stderr
    assert not (tmp_path / "calls").exists()


def test_all_steps(tmp_path):
    done = setup_env(tmp_path, modules=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    constraints = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    assert next(line for line in constraints if line.startswith("deepspeed==")) in calls
    assert "flash-attention" not in calls
    assert next(line for line in constraints if line.startswith("deephyper==")) in calls
    assert "uninstall" not in calls and "WARNING" not in done.stdout
    with tarfile.open(tmp_path / "env.tar.gz") as packed:
        assert "./bin/python" in packed.getnames()
    assert f"ready: {tmp_path}/venv/bin/python" in done.stdout


def test_a_step_that_fails_is_named_and_nothing_is_packed(tmp_path):
    done = setup_env(tmp_path, modules=True, FAIL_ON="torch==")
    assert done.returncode == 2
    assert "torch" in done.stderr
    assert "deepspeed==" not in (tmp_path / "calls").read_text()
    assert not (tmp_path / "env.tar.gz").exists()
    (tmp_path / "calls").unlink()
    assert setup_env(tmp_path, modules=True).returncode == 0  # resumes
    assert "-m venv" not in (tmp_path / "calls").read_text()


def test_deephyper_changes_no_version_that_is_installed(tmp_path):
    """DeepHyper changes no installed version, even one that differs from those tested together.

    A wheel of torch may bring such a version.
    """
    installed = "torch==2.10.0+rocm7.1 NumPy==1.26.4 typing-extensions==4.12.0 ruamel.yaml==0.18"
    assert setup_env(tmp_path, modules=True, INSTALLED=installed).returncode == 0
    (call,) = (
        line for line in (tmp_path / "calls").read_text().splitlines() if "deephyper==" in line
    )
    words = call.split()
    assert words[words.index("--only-binary") + 1] == ":all:"
    limits = Path(words[words.index("-c") + 1]).read_text().splitlines()
    assert limits[:4] == installed.split()


@pytest.mark.parametrize(
    ("fails", "uninstalled"), [("deephyper==", False), ("pip list", False), ("find_search", True)]
)
def test_without_deephyper_the_environment_is_ready_all_the_same(tmp_path, fails, uninstalled):
    done = setup_env(tmp_path, modules=True, FAIL_ON=fails)
    assert done.returncode == 0, done.stderr
    assert "WARNING: DeepHyper" in done.stdout
    calls = (tmp_path / "calls").read_text()
    assert ("uninstall" in calls) == uninstalled
    assert "check_kernels.py --list" in calls and (tmp_path / "env.tar.gz").exists()
