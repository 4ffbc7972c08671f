"""Run the engine's tests on the oldest DeepSpeed of pyproject.toml and on the newest of PyPI.

    make prove ONLY=deepspeed

Each version is installed by pip into a folder of its own, without dependencies and extensions, and
precedes the installed one on PYTHONPATH.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def oldest() -> str:
    """Return the lower bound of pyproject.toml."""
    found = re.search(r'"deepspeed>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found, "pyproject.toml names the oldest DeepSpeed"
    return found[1]


def install(requirement: str, folder: Path) -> str:
    """Install a version and return it; "" if pip could not install it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
    names = [path.name for path in folder.glob("deepspeed-*.dist-info")]
    return names[0].split("-")[1].removesuffix(".dist") if done.returncode == 0 and names else ""


def tests_pass(version: str, folder: Path) -> tuple[bool, str]:
    """Return whether the engine's tests pass on the version in `folder`, and pytest's last line."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    found = subprocess.run(
        [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    ).stdout.split()
    if not found or found[-1] != version:
        return False, f"PYTHONPATH gives deepspeed {' '.join(found[-1:]) or 'nothing'}"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-o",
        "timeout=3600",
        "tests/engine",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-5000:], flush=True)
    return done.returncode == 0, done.stdout.strip().rpartition("\n")[2]


def main() -> int:
    figures, failed = [], False
    for requirement in (f"deepspeed=={oldest()}", "deepspeed"):
        with tempfile.TemporaryDirectory(prefix="deepspeed-") as temporary:
            version = install(requirement, Path(temporary))
            if not version:
                figures.append(f"{requirement}: not proved, pip could not install it")
                continue
            passed, figure = tests_pass(version, Path(temporary))
            figures.append(f"deepspeed {version}: {figure}")
            failed |= not passed
            print(figures[-1], flush=True)
    print("; ".join(figures))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
