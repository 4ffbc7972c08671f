"""Kill or stop one of two training ranks, and check how fast the other one reports it and ends.

    python benchmarks/lost_rank.py [--device cpu|cuda] [--output FOLDER]

Rank 1 is hit after its third step; rank 0 then waits in a collective of RCCL or NCCL (gloo on a
CPU). It has to end with the exit code of a lost rank, naming rank 1, within --hang-timeout plus
LEEWAY_S; the communication library must not end it earlier. Needs two devices. Exit code 1 if any
of these checks fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from parity import LAYOUTS, NO_DROPOUT, ON_CPU, launch

from megatron.metrics_file import read_records
from megatron.training.run.process import EXIT_LOST_RANK
from tests.helpers.launching import TINY

STEP, HANG_TIMEOUT_S = 3, {"cuda": 10, "cpu": 3}
LEEWAY_S = 60  # for questions among the ranks, and for a loaded machine
STRIKE = """
import os, runpy, sys
from tests.helpers.fault_points import strike
what, step = sys.argv[1:3]
sys.argv = sys.argv[3:]
if os.environ["RANK"] == "1":
    strike("megatron.run.step", int(step), what)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def lose(what: str, flags: list[str], device: str, folder: Path) -> tuple[float, int, str]:
    """Kill or stop rank 1; return rank 0's seconds to its end, exit code, and line about rank 1.

    Seconds count from its last step. Raises subprocess.TimeoutExpired if it does not end.
    """
    here, env = ON_CPU if device == "cpu" else (["--bf16"], None)
    arguments = [
        *TINY,
        *NO_DROPOUT,
        *flags,
        *here,
        "--train-iters",
        "1000000",
        "--lr-decay-style",
        "constant",
        "--hang-timeout",
        str(HANG_TIMEOUT_S[device]),
    ]
    metrics = folder / "metrics.jsonl"
    codes, logs = launch(
        metrics, arguments, 2, env, ("-c", STRIKE, what, str(STEP)), waits_for=(0,)
    )
    ended = time.time()
    steps = [record["time"] for record in read_records(metrics) if record["event"] == "iteration"]
    lines = [line.strip() for line in logs[0].read_text(errors="replace").splitlines()]
    said = next(
        (line for line in lines if re.search(r"\brank 1\b.*(died|lost|stopped|gone|left)", line)),
        "",
    )
    return ended - max(steps, default=ended), codes[0], said


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cuda (CUDA or ROCm) by default"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for metrics and logs")
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    cases = [("TP 2", "kill"), ("PP 2", "kill"), ("ZeRO-1", "kill"), ("ZeRO-1", "stop")]
    if options.device == "cpu":
        cases = cases[-1:]
    good, timeout_s = 0, HANG_TIMEOUT_S[options.device]
    print(
        "| layout | rank 1 | rank 0 ended after, s | exit code | it says | |\n" + "|---" * 6 + "|"
    )
    for layout, what in cases:
        folder = Path(tempfile.mkdtemp(dir=options.output, prefix="lost-"))
        try:
            seconds, code, said = lose(what, LAYOUTS[layout], options.device, folder)
            well = code == EXIT_LOST_RANK and bool(said) and seconds <= timeout_s + LEEWAY_S
            cells = (
                f"{seconds:.1f} | {code} | {said[:200].replace('|', '/') or 'nothing about rank 1'}"
            )
        except subprocess.TimeoutExpired:
            well, cells = False, "not at all | | nothing"
        good += well
        print(f"| {layout} | {what} | {cells} | {'named' if well else 'WRONG'} |", flush=True)
    print(
        f"{good} of {len(cases)} lost ranks are named by the other, within {timeout_s} s and "
        "what asking takes"
    )
    return 0 if good == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
