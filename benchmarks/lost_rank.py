"""Kill or stop one of two training ranks, and check how soon the other rank reports it and exits.

    python benchmarks/lost_rank.py [--device cpu|cuda] [--output FOLDER]

Rank 1 is hit after its third step; rank 0 then waits in a collective of RCCL or NCCL (gloo on a
CPU). It has to end with the exit code of a lost rank, naming rank 1, within --hang-timeout plus
LEEWAY_S; the communication library must not end it earlier. Needs two devices. Exit code 1 if any
of these checks fails.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parity import LAYOUTS, NO_DROPOUT, ON_CPU
from benchmarks.shared import device_parser, markdown, pretrain
from megatron.errors import EXIT_LOST_RANK
from megatron.metrics_file import read_records
from tests.helpers.launching import TINY

STEP = 3
HANG_TIMEOUT_S = {"cuda": 10, "cpu": 3}
LEEWAY_S = 60  # for the ranks to query each other, and for a loaded machine
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

    Seconds count from its last step.
    """
    here, env = ON_CPU if device == "cpu" else (["--bf16"], None)
    endless = ["--train-iters", "1000000", "--lr-decay-style", "constant"]
    endless += ["--hang-timeout", str(HANG_TIMEOUT_S[device])]
    metrics = folder / "metrics.jsonl"
    arguments = [*TINY, *NO_DROPOUT, *flags, *here, *endless]
    strike = ("-c", STRIKE, what, str(STEP))
    codes, logs = pretrain(metrics, arguments, 2, env, strike, awaited=(0,))
    ended = time.time()
    steps = [record["time"] for record in read_records(metrics, "iteration")]
    lines = logs[0].read_text(errors="replace").splitlines()
    about = re.compile(r"\brank 1\b.*(died|lost|stopped|gone|left)")
    line = next((line.strip() for line in lines if about.search(line)), "")
    return ended - max(steps, default=ended), codes[0], line


def main() -> int:
    options = device_parser(__doc__, "lost-rank").parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    cases = [("TP 2", "kill"), ("PP 2", "kill"), ("ZeRO-1", "kill"), ("ZeRO-1", "stop")]
    if options.device == "cpu":
        cases = cases[2:3]
    timeout_s = HANG_TIMEOUT_S[options.device]
    head = ["layout", "rank 1", "rank 0 ended after, s", "exit code", "it says", ""]
    print(*markdown([head]), sep="\n")
    named = 0
    for layout, what in cases:
        folder = Path(tempfile.mkdtemp(dir=options.output, prefix="lost-"))
        seconds, code, line = lose(what, LAYOUTS[layout], options.device, folder)
        well = code == EXIT_LOST_RANK and bool(line) and seconds <= timeout_s + LEEWAY_S
        named += well
        says = line[:200] or "nothing about rank 1"
        row = [layout, what, f"{seconds:.1f}", str(code), says, "named" if well else "WRONG"]
        print(markdown([head, row])[-1], flush=True)
    print(
        f"{named} of {len(cases)} lost ranks are named by the other, within {timeout_s} s and the "
        "leeway"
    )
    return 0 if named == len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
