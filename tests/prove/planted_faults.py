"""Plant each deliberate fault into a copy of the tree; the tests must find it.

    make prove ONLY=planted-faults [PROVE="--room data --room csrc"] [PROVE="--fault data-lock-kept"]

The faults are those of tests/planted_faults/*.toml. A fault is found when tests fail that pass
without it. The tests that `found_by` names run first, then all others; beforehand, all named tests
run once without any fault, and must pass. Faults with `topics` are found by the numerical tests of
these kernels on the simulator of GPU lanes: all faults of a topic are planted into one build. A
fault whose text is no longer in its file is out of date, which `make test` finds: rewrite it for
the code that replaced the text.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.kernels.build import SOURCES, compiler
from tests.helpers.kernels import (
    NUMERICS,
    PLAIN,
    ROOT,
    SANITIZED,
    run_numerics,
    simulator_library,
)

FAULTS = ROOT / "tests" / "planted_faults"
LOOKED_FOR = "tests/prove/test_planted_faults.py"  # fails wherever a fault is planted
LIMIT_S = 1800

# Exit codes of a failed test, AddressSanitizer, the simulator's abort, a crash, an endless loop.
# Anything else (no test found, the library not loaded) is an error.
_FAILED = {
    1,
    86,
    *(-sent for sent in (signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV, signal.SIGXCPU)),
}
# Is added to target.h in the copy of the sources, which every other file includes.
_CONDITION = """
#include <stdlib.h>
static const int chosen_fault = atoi(getenv("MEGATRON_PLANTED_FAULT"));
#define planted(number) (chosen_fault == (number))
"""


@dataclass(frozen=True)
class Fault:
    """Planted fault: `old`, whole lines that occur once in `file`, become `new`.

    With `topics`, `old` is instead an expression, or a statement that ends in ";": the first such
    text in the file that follows `after`.

    name       its room, "-" and some words
    what       description of the fault
    found_by   tests that find it: paths or node ids for pytest
    topics     kernels whose numerical tests find it on the simulator
    sanitized  whether these tests need sanitizers to find it
    """

    name: str
    file: str
    old: str
    new: str
    what: str = ""
    found_by: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    after: str = ""
    sanitized: bool = False

    @property
    def room(self):
        return self.name.partition("-")[0]


def faults():
    return [
        Fault(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        for file in sorted(FAULTS.glob("*.toml"))
        for entry in tomllib.loads(file.read_text())["fault"]
    ]


@dataclass(frozen=True)
class Topic:
    """Numerical tests of some kernels, which run on the simulator.

    tests    file of the tests
    sources  names of the .cpp files that they need
    wide     whether wide rows, in blocks of 512 and 1,024 lanes, are tested in
             tests/kernels/test_large.py
    """

    tests: str
    sources: list[str]
    wide: bool = False


def topics():
    tables = tomllib.loads((FAULTS / "csrc_kernels.toml").read_text())["topic"]
    return {name: Topic(f"{NUMERICS}/test_{name}.py", **table) for name, table in tables.items()}


def simulated_position(fault, root=ROOT):
    """Return the index of a simulated fault's text in its file; -1: nowhere."""
    text = (root / fault.file).read_text()
    anchor = text.find(fault.after)
    return text.find(fault.old, anchor + len(fault.after)) if anchor >= 0 else -1


def outdated(fault, root=ROOT):
    """Return why a fault cannot be planted, or which named test is missing; "" if neither."""
    if gone := [test for test in fault.found_by if not (root / test.partition("::")[0]).exists()]:
        return f"{', '.join(gone)} does not exist"
    try:
        text = "\n" + (root / fault.file).read_text()
    except FileNotFoundError:
        return f"{fault.file} is gone"
    if fault.topics:
        position = simulated_position(fault, root)
        return "" if position >= 0 else f"{fault.file} has no {fault.old!r} after {fault.after!r}"
    lines = text.count("\n" + fault.old)
    anywhere = text.count(fault.old)
    if lines != 1 or anywhere != 1:
        return f"its text is {lines} times whole lines of {fault.file}, {anywhere} times in all"
    return ""


def copy_tree(folder):
    """Copy all files that git does not ignore, in their present state, and what was built."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for built in [
        *(ROOT / "megatron").rglob("*.so"),
        *(ROOT / "megatron").rglob("*.pyc"),
        *(ROOT / "tests").rglob("*.pyc"),
    ]:
        target = folder / built.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)


@contextmanager
def copied_tree():
    """Yield a copy of the tree and the variables of the processes that run in it."""
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        os.chmod(temporary, 0o755)  # for tests that read as another user
        folder = Path(temporary, "tree")
        copy_tree(folder)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environ |= {"PYTHONPATH": str(folder), "TMPDIR": temporary}
        # For build_ext; the host library is built separately.
        environ["MEGATRON_KERNELS_TARGETS"] = "none"
        yield folder, environ


def build(fault, folder, environ):
    """Compile the part of csrc/ that contains the fault; return the error, "" if there is none."""
    command = (
        "build_kernels --target host"
        if fault.file.startswith("csrc/kernels/")
        else "build_ext --inplace --force"
    )
    words = [sys.executable, "setup.py", "-q", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True)
    return f"does not compile: {done.stderr[-500:]}" if done.returncode else ""


def run_tests(paths, folder, environ, *options):
    """Run tests in a copy of the tree; return (those that failed, why pytest could not run)."""
    words = ["-q", "--tb=no", "-p", "no:cacheprovider", f"--ignore={LOOKED_FOR}", *options, *paths]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    ended = [line.split() for line in done.stdout.splitlines()]
    failed = [words[1] for words in ended if words[:1] in (["FAILED"], ["ERROR"])]
    if done.returncode in (0, 5) or (done.returncode == 1 and failed):
        return failed, ""
    return [], f"pytest could not run {list(paths)}: {(done.stdout + done.stderr)[-500:]}"


def failing_without(chosen, workers):
    """Return which of the tests that `found_by` names fail without any fault; "" if none does."""
    named = sorted({test for fault in chosen if not outdated(fault) for test in fault.found_by})
    if not named:
        return ""
    with copied_tree() as (folder, environ):
        parallel = ("-n", str(workers), "--dist", "loadfile") if workers > 1 else ()
        failed, reason = run_tests(named, folder, environ, *parallel)
    return reason or ", ".join(failed)


def plant(fault, suite):
    """Plant a fault into a copy of the tree; run the tests that find it, then `suite`."""
    return [(fault.name, *_plant(fault, suite))]


def _plant(fault, suite):
    if reason := outdated(fault):
        return "OUT OF DATE", reason
    with copied_tree() as (folder, environ):
        target = folder / fault.file
        target.write_text(target.read_text().replace(fault.old, fault.new))
        if fault.file.startswith("csrc/") and (reason := build(fault, folder, environ)):
            return "OUT OF DATE", reason
        for paths in filter(None, [fault.found_by, [suite]]):
            failed, reason = run_tests(paths, folder, environ, "-x")
            if failed:
                return "found", failed[0]
            if reason:
                return "MISSED", reason
    return "MISSED", fault.what


def plant_simulated(faults, folder):
    """Copy the kernels' sources to `folder`, with `faults`, {number: fault}, chosen by number."""
    shutil.copytree(
        SOURCES,
        folder,
        ignore=lambda _, names: [n for n in names if not n.endswith((".h", ".cpp"))],
    )
    choices = {}
    for number, fault in faults.items():
        assert not outdated(fault), outdated(fault)
        text = (fault.file, simulated_position(fault), fault.old)
        choices.setdefault(text, []).append((number, fault.new))
    # From the end of each file, so that earlier positions stay valid.
    for (file, position, old), alternatives in sorted(choices.items(), reverse=True):
        if old.endswith(";"):
            tests = [f"if (planted({number})) {{ {new} }} else " for number, new in alternatives]
            chosen = "".join(tests) + f"{{ {old} }}"
        else:
            tests = [f"planted({number}) ? ({new}) : " for number, new in alternatives]
            chosen = f"({''.join(tests)}({old}))"
        copy = folder / Path(file).name
        text = copy.read_text()
        copy.write_text(text[:position] + chosen + text[position + len(old) :])
    with open(folder / "target.h", "a") as target:
        target.write(_CONDITION)


def plant_topic(name, sanitized, faults):
    """Plant these faults into one simulator library; run the topic's tests with each."""
    labels = [f"{fault.name} ({name})" for fault in faults]
    if compiler("simulator") is None:
        return [(label, "NOT PROVED", "the simulator needs g++") for label in labels]
    topic = topics()[name]
    wave, flags = (64, SANITIZED) if sanitized else (32, PLAIN)
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        folder = Path(temporary)
        plant_simulated(dict(enumerate(faults, 1)), folder / "sources")
        library = simulator_library(folder, wave, flags, topic.sources, folder / "sources")
        runs = {label: (number, topic.tests) for number, label in enumerate(labels, 1)}
        outcomes = run_numerics(
            {"none": (0, topic.tests), **runs}, [topic.tests], library, flags, folder
        )
    if not outcomes.pop("none").passed:
        return [
            (label, "OUT OF DATE", f"{topic.tests} fails without any fault") for label in labels
        ]
    return [
        (label, "found" if outcome.code in _FAILED else "MISSED", reason(outcome))
        for label, outcome in outcomes.items()
    ]


def reason(outcome):
    """Return the line of the output that says what was wrong."""
    marks = ("simulator: ", "ERROR: AddressSanitizer", "E   ", "FAILED")
    lines = outcome.output.splitlines()
    named = (line.strip() for mark in marks for line in lines if mark in line[:40])
    return next(named, f"exit code {outcome.code}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", action="append", help="only faults of this room; repeatable")
    parser.add_argument("--fault", action="append", help="only this fault; repeatable")
    parser.add_argument(
        "--suite", default="tests", help="tests to run if those of `found_by` do not find a fault"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    chosen = [
        fault
        for fault in faults()
        if (not options.room or fault.room in options.room)
        and (not options.fault or fault.name in options.fault)
    ]
    if failed := failing_without(chosen, options.jobs):
        sys.exit(f"planted faults: these tests fail without any fault, so they find none: {failed}")
    groups = sorted({(topic, fault.sanitized) for fault in chosen for topic in fault.topics})
    jobs = [partial(plant, fault, options.suite) for fault in chosen if not fault.topics]
    for topic, sanitized in groups:
        of_topic = [f for f in chosen if topic in f.topics and f.sanitized == sanitized]
        jobs.append(partial(plant_topic, topic, sanitized, of_topic))
    counts = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdicts in pool.map(lambda job: job(), jobs):
            for label, verdict, note in verdicts:
                counts[verdict] += 1
                print(f"{verdict:12}{label}: {note}", flush=True)
    unproved = f", {counts['NOT PROVED']} not proved" if counts["NOT PROVED"] else ""
    print(f"{counts['found']} of {counts.total()} planted faults found{unproved}")
    return 1 if counts["MISSED"] or counts["OUT OF DATE"] or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
