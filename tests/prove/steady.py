"""Repeat `make test` in random order beside busy loops.

Outcomes must be the same each time.

    make prove ONLY=steady [PROVE="--runs 3 --seed 7"]
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

from tests.prove.__main__ import ROOT, outcomes


def answers(seed):
    """Return {test: passed, failure, error or skipped} of one run in the order of a seed."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        words = f"-q --tb=short -n 3 --dist loadfile --randomly-seed={seed}".split()
        words += ["-o", "addopts=--strict-markers", f"--junitxml={report.name}"]
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT)
        return dict(outcomes(report.name))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the first run's order; default: random, and printed",
    )
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())
    ]
    seen = defaultdict(list)
    try:
        for run in range(options.runs):
            start = time.monotonic()
            for test, answer in answers(seed + run).items():
                seen[test].append(answer)
            seconds = time.monotonic() - start
            print(
                f"run {run + 1} of {options.runs}, seed {seed + run}: {seconds:.0f} s", flush=True
            )
    finally:
        for process in busy:
            process.kill()
    good = [["passed"] * options.runs, ["skipped"] * options.runs]
    odd = {test: each for test, each in seen.items() if each not in good}
    for test, results in sorted(odd.items()):
        print(f"unsteady: {test}: {', '.join(results)}")
    print(
        f"{len(seen)} tests, {options.runs} runs beside {len(busy)} busy loops: {len(odd)} had "
        "different results"
    )
    return 1 if odd or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
