"""List the lines at which the host waits for the device in a training step, with counts.

    python benchmarks/step_waits.py [--device cpu|cuda] [--output FOLDER]

pretrain_gpt.py trains as users start it, with --save. After four steps, the next four are observed,
including everything between them. On a device torch reports waiting calls
(torch.cuda.set_sync_debug_mode), except torch.cuda.synchronize and Event.synchronize, which are
counted here. Waits for other ranks do not count. On a CPU, where nothing waits, host_waits.py
counts the waits that tensors of a device would cause, in few and small steps, as a smoke test. Exit
code 1 if a training fails, if a step on a device waits more than once, apart from the report of
--log-interval (with experts, once more for each of their layers and micro-batches), or if not even
the report waits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.host_waits import HostWaits
from benchmarks.parity import LAYOUTS, NO_DROPOUT, ON_CPU, SHARED
from benchmarks.shared import ROOT, device_parser, markdown, train
from benchmarks.sides import our_arguments
from benchmarks.workloads import OURS, cuda_cases
from megatron.config import parse_args
from megatron.planner.subprocesses import gpus_here
from megatron.training.run import loop
from tests.helpers.launching import TINY

STEPS = {"cuda": 4, "cpu": 1}  # number of observed steps, and of steps before them
LOOP = str(Path(loop.__file__).resolve())
PROGRAM = (f"{ROOT / 'megatron'}/", str(ROOT / "pretrain_gpt.py"))
Line = tuple[str, str]  # file:line, and phase
ELSEWHERE: Line = ("(no line of the program)", "")
REPORT = "report"  # the phase in which the loop is meant to wait


class StepWaits(HostWaits):
    """Context manager that counts waits for the device, by line of the program and phase of a step.

    counts   {(file:line, phase): number}. The line is the innermost in files below `program`; the
             phase is the function of the training loop and its callee, or "another thread", such as
             autograd's, whose waits in C++ are reported at the line that called backward
    """

    def __init__(self, device: str, program: Sequence[str] = PROGRAM) -> None:
        super().__init__(device)
        self.program = tuple(program)
        self.counts: Counter[Line] = Counter()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> StepWaits:
        if self.device != "cuda":
            super().__enter__()
            return self
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._warned(warnings.showwarning)
        for owner in (torch.cuda, torch.cuda.Event):
            self._undo.enter_context(
                mock.patch.object(owner, "synchronize", self._counted(owner.synchronize))
            )
        torch.cuda.set_sync_debug_mode("warn")
        self._undo.callback(torch.cuda.set_sync_debug_mode, "default")
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device != "cuda":
            super().__exit__(*error)
        self._undo.close()

    def _warned(self, show: Callable[..., None]) -> Callable[..., None]:
        def look(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self.wait(str(message))
            else:
                show(message, *args, **kwargs)

        return look

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.wait(function.__name__)
            return function(*args, **kwargs)

        return call

    def wait(self, what: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        line = ""
        phase = "another thread"
        inner = ""
        while frame is not None:
            code = frame.f_code
            if not line and code.co_filename.startswith(self.program):
                line = f"{code.co_filename.removeprefix(f'{ROOT}/')}:{frame.f_lineno}"
            if code.co_filename == LOOP:
                phase = code.co_name + (f" > {inner}" if inner else "")
                break
            inner = code.co_name
            frame = frame.f_back
        self.counts[(line, phase) if line else ELSEWHERE] += 1


def watch(file: str, device: str, arguments: Sequence[str]) -> None:
    """Run a program with its arguments in this process; write the waits of its steps to a file."""
    waits = StepWaits(device)
    steps = STEPS[device]

    def look(event: str, of: tuple[Any, ...]) -> None:
        if event != "megatron.run.step":
            return
        if of[0] == steps:
            waits.__enter__()
        elif of[0] == 2 * steps:
            waits.__exit__(None, None, None)
            Path(file).write_text(json.dumps([[*key, n] for key, n in waits.counts.items()]))

    sys.addaudithook(look)
    sys.argv = list(arguments)
    runpy.run_path(sys.argv[0], run_name="__main__")


# ---- trainings -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WatchedTraining:
    """Training to observe.

    shared   its ranks share a device and use gloo (parity.py)
    allowed  waits in a step
    """

    name: str
    arguments: list[str]
    ranks: int = 1
    shared: bool = False
    allowed: int = 1


def trainings(device: str, devices: int) -> list[WatchedTraining]:
    """List the trainings that this machine can run."""
    steps = STEPS[device]
    length = ["--train-iters", str(2 * steps), "--log-interval", str(steps)]
    if device == "cpu":
        length += "--num-layers 1 --global-batch-size 4".split()
    tiny = [*TINY, *NO_DROPOUT, *length]
    zero = ["--bf16", "--zero-stage", "1", "--overlap-param-gather"]
    two = WatchedTraining(
        "tiny, 2 ranks, ZeRO-1", [*tiny, *zero], 2, device == "cuda" and devices < 2
    )
    config = parse_args(tiny, 1)
    experts = WatchedTraining(
        "tiny, experts",
        [*tiny, "--bf16", *"--num-experts 4 --moe-router-topk 2".split()],
        allowed=1 + config.model.num_layers * config.num_micro_batches(),
    )
    if device == "cpu":
        return [two]
    mid = [
        *our_arguments(cuda_cases(2**40)[0], OURS, 2 * steps),
        *length,
        "--overlap-param-gather",
    ]
    more = [
        WatchedTraining(f"tiny, {name}", [*tiny, "--bf16", *LAYOUTS[name]], 2)
        for name in ("TP 2", "PP 2")
    ]
    return [WatchedTraining("124M, bf16", mid), experts, two, *(more if devices > 1 else [])]


def look_at(training: WatchedTraining, device: str, folder: Path) -> Counter[Line]:
    """Run a training; return, for each line, the waits of the rank with the most waits there.

    Raises RuntimeError if a rank fails.
    """
    here, env = ON_CPU if device == "cpu" else ([], None)
    watched = ["--device", device, "--watch", str(folder / "waits")]
    before = [*SHARED * training.shared, str(Path(__file__).resolve()), *watched]
    arguments = [*training.arguments, "--save", str(folder / "saved"), *here]
    train(folder / "metrics.jsonl", arguments, training.ranks, env, before)
    waits: Counter[Line] = Counter()
    for rank in range(training.ranks):
        of_rank = json.loads((folder / f"waits.{rank}").read_text())
        waits |= Counter({(line, phase): n for line, phase, n in of_rank})
    return waits


def main() -> int:
    made = device_parser(__doc__, "waits")
    made.add_argument("--watch", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.watch:
        watch(f"{options.watch[0]}.{os.environ['RANK']}", options.device, options.watch[1:])
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    failed = 0
    steps = STEPS[options.device]
    totals: list[str] = []
    head = ["training", "line", "phase", "waits a step"]
    print(*markdown([head]), sep="\n")
    for training in trainings(options.device, gpus_here()):
        with tempfile.TemporaryDirectory(dir=options.output.resolve()) as folder:
            try:
                counts = look_at(training, options.device, Path(folder))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                failed += 1
                totals.append(f"{training.name}: FAILED")
                continue
        for (line, phase), number in counts.most_common():
            row = [training.name, line, phase, f"{number / steps:g}"]
            print(markdown([head, row])[-1], flush=True)
        reported = sum(n for (_, phase), n in counts.items() if phase.startswith(REPORT))
        waits = (counts.total() - reported) / steps
        failed += not reported or (options.device == "cuda" and waits > training.allowed)
        totals.append(f"{training.name}: {waits:g}" + " and NONE IN A REPORT" * (not reported))
    print(f"waits a step, beside those of a report: {'; '.join(totals)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
