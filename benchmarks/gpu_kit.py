"""Pack what `make gpu-check` needs on a GPU machine without a network into the folder .gpu-kit.

    make gpu-kit [THERE=/path/to/python3.12] [ARCH=sm_90]
    python benchmarks/gpu_kit.py [--python /path/to/python3.12] [--arch sm_90] [--output .gpu-kit]

Copy the checkout to that machine, with this folder in its root: `make gpu-check` uses it. That
machine needs Python and torch; this one needs PyPI and compilers. Both need the same commit.

    site/   packages that installations of torch lack, of the versions in constraints.txt, for the
            Python of --python (headers included, for the C++ extensions)
    built/  C++ extensions for that Python, and kernels for --arch and for x86-64
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_check import KIT, LABEL
from benchmarks.shared import ROOT, parser

HOST_ARCHS = ("x86-64-v3", "x86-64-v4")
PACKAGES = "deepspeed hjson pydantic pydantic_core annotated-types typing-inspection".split()
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
ABOUT = """
import json, os, platform, sysconfig
headers = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
print(json.dumps([platform.python_version(), platform.machine(), headers]))
"""


def run(command: Sequence[str], **variables: str) -> None:
    """Run a command. Raises SystemExit, with its last lines, if it fails."""
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if ran.returncode:
        raise SystemExit(f"error: {' '.join(command)}\n{(ran.stdout + ran.stderr)[-2000:]}")


def pinned() -> dict[str, str]:
    """Return the tested versions by name, as constraints.txt spells it."""
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def fetch(site: Path, version: str, machine: str, wheels: Path) -> None:
    """Fetch the packages for a version of Python into `wheels`, and unpack them into `site`."""
    pip = [sys.executable, "-m", "pip", "-q"]
    pins = pinned()
    minor = ".".join(version.split(".")[:2])
    tags = ["--python-version", minor, "--implementation", "cp", "--only-binary=:all:"]
    tags += [word for name in PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    for name in PACKAGES:
        what = f"{name}=={pins[name]}"
        if name == "deepspeed":  # has no wheel; no op is compiled
            command = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), what]
            run(command, DS_BUILD_OPS="0")
        else:
            run([*pip, "download", "--no-deps", *tags, "-d", str(wheels), what])
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(site)


def build(built: Path, python: str, headers: bool, archs: Sequence[str], scratch: Path) -> None:
    """Build the extensions for an interpreter, and the kernels whose compilers are installed."""
    if headers:
        tools = [f"{name}=={pinned()[name]}" for name in ("setuptools", "pybind11")]
        install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--target"]
        run([*install, str(scratch), *tools])
        command = [python, "setup.py", "-q", "build_ext", "--build-lib", str(built)]
        command += ["--build-temp", str(scratch / "temp")]
        run(command, PYTHONPATH=str(scratch), MEGATRON_KERNELS_TARGETS="none")
    else:
        print(f"gpu-kit: {python} has no Python.h: the check builds the extensions there")
    folder = str(built / "megatron" / "kernels" / "lib")
    for arch in archs:  # after the extensions, which remove others
        words = ["build_kernels", "--arch", arch, "--output-dir", folder]
        run([sys.executable, "setup.py", "-q", *words])


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    python = "an interpreter of the GPU machine's Python version"
    made.add_argument("--python", default=sys.executable, help=python)
    gpus = "GPUs to build kernels for; several with commas"
    made.add_argument("--arch", default="sm_90", help=gpus)
    made.add_argument("--output", type=Path, default=KIT, metavar="FOLDER")
    options = made.parse_args(arguments)
    folder: Path = options.output.resolve()
    if folder.exists() and not (folder / LABEL).exists() and any(folder.iterdir()):
        made.error(f"--output {folder}: it has other files, which would be removed")
    kernels = runpy.run_path(str(ROOT / "megatron" / "kernels" / "build.py"))
    archs = [*options.arch.split(","), *HOST_ARCHS]
    try:
        kernels["plan"]((), archs)
        asked = subprocess.run(
            [options.python, "-c", ABOUT], capture_output=True, text=True, check=True
        ).stdout
        version, machine, headers = json.loads(asked)
    except (kernels["BuildError"], OSError, subprocess.CalledProcessError, ValueError) as error:
        made.error(f"--python {options.python} --arch {options.arch}: {error}")
    minor = ".".join(version.split(".")[:2])
    if tuple(map(int, minor.split("."))) < (3, 11):
        made.error(f"--python {options.python}: Python {version}; 3.11 or newer is needed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as scratch:
        (wheels := Path(scratch, "wheels")).mkdir()
        packed = Path(scratch, "packed")
        print(f"gpu-kit: fetching {', '.join(PACKAGES)} for Python {minor}", flush=True)
        fetch(packed / "site", version, machine, wheels)
        print(f"gpu-kit: building extensions, and kernels for {', '.join(archs)}", flush=True)
        build(packed / "built", options.python, headers, archs, Path(scratch, "tools"))
        label = {"python": minor, "machine": machine, "kernels": kernels["source_hash"]()}
        (packed / LABEL).write_text(json.dumps(label) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        packed.rename(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"gpu-kit: {size / 2**20:.0f} MiB in {folder}, for Python {minor} and {options.arch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
