"""Kernels built for the simulator of GPU lanes (csrc/kernels/simulator.h), and their programs.

A simulator library replaces the host library, so the numerical tests need not know of it. They run
in processes of their own: AddressSanitizer has to be loaded before Python, and misuse found by the
simulator ends the process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.kernels.build import SOURCES, build, compiler
from megatron.kernels.library import OVERRIDE

ROOT = Path(__file__).resolve().parents[2]
NUMERICS = "tests/kernels/numerics"

# Without optimization the compilation is about twice as fast, and sanitizers find more, because no
# check is optimized away. AddressSanitizer finds null pointers, and pointers that leave their
# object, where they are used. Calls instead of inline checks let the simulator see the accesses to
# LDS.
PLAIN = ("-O0",)
ADDRESS = ("-O0", "-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0")
SANITIZED = (
    *ADDRESS,
    "-fsanitize=undefined",
    "-fno-sanitize=null,object-size,pointer-overflow",
    "-fno-sanitize-recover=undefined",
)

needs_simulator = pytest.mark.skipif(
    compiler("simulator") is None or sys.platform != "linux" or os.uname().machine != "x86_64",
    reason="the simulator needs g++ on x86-64 Linux",
)


@dataclass(frozen=True)
class Outcome:
    """Exit code of a process (negative: the signal) and its output."""

    code: int
    output: str

    @property
    def passed(self) -> bool:
        return self.code == 0

    @property
    def end(self) -> str:
        """Return the last lines, for messages."""
        return "\n".join(self.output.splitlines()[-60:])


def simulator_library(
    folder: Path, wave: int, flags: Sequence[str], only: Sequence[str] = (), sources: Path = SOURCES
) -> Path:
    """Build the library for waves of `wave` lanes with these compiler flags.

    `only` names the .cpp files to use.
    """
    return build(
        "simulator", [f"wave{wave}"], folder=folder, sources=sources, only=only, extra=flags
    )


@functools.cache
def sanitizers() -> str:
    """Return the LD_PRELOAD value for a Python that loads a sanitized library."""
    tool = compiler("simulator")
    assert tool is not None, "tests that build a simulator are marked needs_simulator"
    names = ("libasan.so", "libubsan.so")
    return " ".join(
        subprocess.run(
            [tool, f"-print-file-name={n}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for n in names
    )


def environment(library: Path | None, flags: Sequence[str]) -> dict[str, str]:
    """Return the variables of a process that uses this library.

    Random examples are the same each time.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    variables |= {"CI": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if library is not None:
        variables[OVERRIDE] = str(library)
    if any("-fsanitize" in flag for flag in flags):
        variables |= {
            "LD_PRELOAD": sanitizers(),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=86:detect_odr_violation=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
    return variables


def run_process(
    command: Sequence[str], variables: dict[str, str], timeout_s: float = 240
) -> Outcome:
    """Run a command at the root of the repository; return its output and errors in one text."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        timeout=timeout_s,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Outcome(done.returncode, done.stdout)
