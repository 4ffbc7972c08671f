"""Long proofs: named campaigns that take too long for `make test`.

    make prove ONLY=list                  names and minutes of all
    make prove ONLY=kills                 one campaign; ONLY="kills parity": two
    make prove ONLY=planted-faults PROVE="--room data"

Each prints its expected duration first and ends with a line of figures. Parts that did not run, for
lack of Slurm, root or a compiler, are reported as not proved. Exit code: 0 everything proved, 1
something failed, 2 nothing failed but something was not proved.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROVED = "proved"
FAILED = "FAILED"
NOT_PROVED = "NOT PROVED"


@dataclass(frozen=True)
class Campaign:
    """Campaign of long tests and programs.

    what      what it proves
    minutes   duration on two cores, beside other work
    workers   processes that run its tests, those marked campaign(its name); 0: this one; None: it
              has no tests
    programs  its other parts: arguments of python; the last line of output has the figures
    """

    what: str
    minutes: float
    workers: int | None = 2
    programs: tuple[str, ...] = ()


CAMPAIGNS = {
    "parity": Campaign(
        "every layout, mixture, precision and rank order gives the training run of one process", 4
    ),
    "kills": Campaign(
        "runs that are killed, damaged, hung or out of disk continue bit for bit from the newest "
        "complete checkpoint, and jobs that restart within themselves from the newest state",
        26,
        programs=(
            "benchmarks/fault_campaign.py --only kills restarts damage disk hang",
            "benchmarks/prove_resume.py",
        ),
    ),
    "month": Campaign(
        "a job meets a month's faults at published rates, on this machine and under Slurm (root); its "
        "losses and weights are those of an undisturbed run to the bit",
        45,
        workers=None,
        programs=("benchmarks/fault_campaign.py --only month --seed 3",),
    ),
    "simulator": Campaign(
        "the kernels on a simulator of waves, with sanitizers, and by hipcc, nvcc and torch's "
        "compiler",
        8,
    ),
    "large": Campaign("kernels and data beyond 2^31 elements", 2, workers=0),
    "hypothesis": Campaign("every property test with 1,000 random examples", 13),
    "search": Campaign("the planner's and the tuner's searches against exhaustive ones", 2),
    "memory": Campaign(
        "memory formulas against dry runs, also of random layouts, and dry runs against real processes",
        18,
        programs=("benchmarks/memory_model.py",),
    ),
    "real-time": Campaign(
        "locks, watchdogs, wall time, stragglers and bubbles by the real clock", 2, workers=0
    ),
    "slurm": Campaign(
        "jobs, experiments, preflight and tuning on a real Slurm of virtual nodes (root)",
        17,
        workers=0,
        programs=("benchmarks/fault_campaign.py --only slurm",),
    ),
    "versions": Campaign(
        "users' command lines and the engine's tests with the oldest supported versions, with "
        "Frontier's torch and with the newest versions",
        40,
        workers=None,
        programs=("-m tests.prove.versions",),
    ),
    "mup": Campaign(
        "muP's activations change alike at widths of 64 to 1024 and at depths of 4 to 32",
        4,
        programs=(
            "benchmarks/mup.py coordinates --seeds 16",
            "benchmarks/mup.py coordinates --widths 64 --layers 4 8 16 32 --seeds 8",
        ),
    ),
    "benchmarks": Campaign(
        "make bench --quick with all peers, and make gpu-check without a GPU, run to completion", 12
    ),
    "peers": Campaign(
        "megatron-core from PyPI reads and writes the same data; tiktoken and "
        "tokenizers encode every character alike",
        1,
        workers=0,
    ),
    "hostile": Campaign(
        "no command line, environment or file, however hostile, causes a traceback, a hang or the "
        "execution of code",
        20,
        workers=None,
        programs=("-m tests.prove.hostile",),
    ),
    "planted-faults": Campaign(
        "`make test` finds each deliberate fault of tests/planted_faults, or the simulator a kernel's",
        13,
        workers=None,
        programs=("-m tests.prove.planted_faults",),
    ),
    "steady": Campaign(
        "`make test` has the same results ten times, in random order beside a busy loop per core",
        65,
        workers=None,
        programs=("-m tests.prove.steady",),
    ),
}
# This campaign runs the tests that use hypothesis, in any folder.
_SELECTED = {"hypothesis": "-m hypothesis --hypothesis-profile prove -o timeout=3600"}


def run(name, extra):
    """Run a campaign; return (verdict, figures)."""
    campaign = CAMPAIGNS[name]
    start = time.monotonic()
    results = []
    if campaign.workers is not None:
        selected = _SELECTED.get(name, f"--campaign={name}").split()
        results.append(
            run_pytest(
                [*selected, "-n", str(campaign.workers), *([] if campaign.programs else extra)]
            )
        )
    results += [run_program([*program.split(), *extra]) for program in campaign.programs]
    verdict = max((verdict for verdict, _ in results), key=[PROVED, NOT_PROVED, FAILED].index)
    return (
        verdict,
        f"{'; '.join(figures for _, figures in results)}; "
        f"{(time.monotonic() - start) / 60:.1f} min",
    )


def outcomes(report):
    """Return (test, passed, failure, error or skipped) of each test in a report of pytest."""
    results = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None)
        results.append((f"{case.get('classname')}::{case.get('name')}", next(kinds, "passed")))
    return results


def run_pytest(words):
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report.name}", *words]
        code = subprocess.run(command, cwd=ROOT).returncode
        try:
            counts = Counter(kind for _, kind in outcomes(report.name))
        except ElementTree.ParseError:
            return FAILED, f"pytest ended with exit code {code}"
    failed = counts["failure"] + counts["error"]
    figure = f"{counts['passed']} passed, {failed} failed, {counts['skipped']} not run"
    if failed or code not in (0, 5):
        return FAILED, figure
    return (NOT_PROVED if counts["skipped"] or not counts["passed"] else PROVED), figure


def run_program(words):
    """Run a program; return (verdict, its last line, which has its figures).

    The program says "not proved" there for parts that it could not run.
    """
    last = ""
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    if process.returncode:
        return FAILED, f"{last or words[0]} (exit code {process.returncode})"
    return (NOT_PROVED if "not proved" in last.lower() else PROVED), last


def main():
    parser = argparse.ArgumentParser(prog="make prove ONLY=", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help="campaigns (default: all); list: print their names"
    )
    parser.add_argument(
        "--args",
        default="",
        help="arguments of the campaigns' programs, or of pytest for campaigns without programs",
    )
    options = parser.parse_args()
    if options.names == ["list"]:
        for name, campaign in CAMPAIGNS.items():
            print(f"{name:16}{campaign.minutes:5.0f} min  {campaign.what}")
        return 0
    if unknown := set(options.names) - set(CAMPAIGNS):
        parser.error(
            f"no campaign {', '.join(sorted(unknown))}: choose from {', '.join(CAMPAIGNS)}"
        )
    names = options.names or list(CAMPAIGNS)
    minutes = sum(CAMPAIGNS[name].minutes for name in names)
    print(f"prove: {len(names)} campaign(s), about {minutes:.0f} minutes", flush=True)
    lines = []
    verdicts = set()
    for name in names:
        print(
            f"prove: {name}: {CAMPAIGNS[name].what}: about {CAMPAIGNS[name].minutes:.0f} minutes",
            flush=True,
        )
        verdict, figures = run(name, options.args.split())
        lines.append(f"prove: {name}: {verdict}: {figures}")
        verdicts.add(verdict)
        print(lines[-1], flush=True)
    if len(names) > 1:
        print("\n".join(["", *lines]))
    return 1 if FAILED in verdicts else 2 if NOT_PROVED in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
