"""Kernels built for the simulator of GPU lanes (csrc/kernels/simulator.h), and tests run on them.

A simulator library replaces the host library, so the numerical tests need not know of it. They run
in separate processes, because AddressSanitizer has to be loaded before Python, and misuse found by
the simulator ends the process.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.kernels.build import SOURCES, build, compiler
from megatron.kernels.library import OVERRIDE

ROOT = Path(__file__).resolve().parents[2]
NUMERICS = "tests/kernels/numerics"

# Without optimization the compilation is about twice as fast, and sanitizers find more, because no
# check is optimized away. Undefined-behaviour checks of null pointers, and of pointers that leave
# their object, are off, because AddressSanitizer finds these where they are used. Calls instead of
# inline checks let the simulator see the accesses to LDS.
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
class NumericsOutcome:
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
) -> NumericsOutcome:
    """Run a command at the root of the repository; output and errors become one text."""
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
    return NumericsOutcome(done.returncode, done.stdout)


# pytest that collects once and forks for each run, because starting and collecting takes longer
# than a run. Arguments: a JSON list of [name, number of the fault, part of the tests' node ids,
# output file], then pytest's. It prints the exit status of each run as JSON. The last two modules
# imported would otherwise be imported in each run, by an operator's first call and the first random
# example. Without freeze() each run would search all of torch's objects for garbage, several times.
_DRIVER = """
import gc, json, os, resource, sys
import pytest
from hypothesis import Phase, settings
from megatron.kernels import library
import numpy.random, torch.fx.experimental.symbolic_shapes

class Runs:
    def __init__(self, runs):
        self.runs, self.status, self.forked = runs, {}, False

    def pytest_collection(self):  # conftest.py has been read, the tests not yet
        settings.register_profile("simulated", settings.get_profile("test"), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("simulated")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        sys.stdout.flush()
        gc.collect()
        gc.freeze()
        for run in self.runs:
            child = os.fork()
            if not child:
                self.forked = True
                return self.begin(session, *run)
            self.status[run[0]] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return True

    def begin(self, session, name, number, words, output):  # pytest's own loop does the rest
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (300, 310))
        os.environ["MEGATRON_PLANTED_FAULT"] = str(number)
        # Otherwise a library that cannot be loaded would let tests pass, on torch's own operators.
        library.forget()
        if library.find("cpu").target != "simulator":
            os._exit(99)
        session.items[:] = [item for item in session.items if words in item.nodeid]
        return None if session.items else os._exit(98)

runs = Runs(json.loads(sys.argv[1]))
# -s: what pytest captured would be lost when the simulator ends the process.
options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not gpu", "--tb=short"]
code = pytest.main([*options, *sys.argv[2:]], [runs])
sys.stdout.flush()
if runs.forked:
    os._exit(code)
print("STATUS " + json.dumps(runs.status))
"""


def run_numerics(
    runs: Mapping[str, tuple[int, str]],
    files: Sequence[str],
    library: Path,
    flags: Sequence[str],
    folder: Path,
) -> dict[str, NumericsOutcome]:
    """Run numerical tests on a simulator library, once for each of `runs`; return the outcomes.

    runs     {name: (number of the fault planted into the library, or 0; part of the node ids of
             the tests to run)}
    files    files of the tests
    library  library that was compiled with `flags`
    folder   for the output of each run
    """
    outputs = {name: folder / f"{i}.txt" for i, name in enumerate(runs)}
    argument = json.dumps([(name, *run, str(outputs[name])) for name, run in runs.items()])
    command = [sys.executable, "-c", _DRIVER, argument, *files]
    outcome = run_process(command, environment(library, flags), timeout_s=1700)
    assert outcome.passed and "STATUS " in outcome.output, outcome.end
    status = json.loads(outcome.output.rpartition("STATUS ")[2])
    return {
        name: NumericsOutcome(status[name], output.read_text(errors="replace"))
        for name, output in outputs.items()
    }
