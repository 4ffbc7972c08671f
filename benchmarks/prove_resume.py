"""Prove that killed and resumed runs equal undisturbed ones (`make prove ONLY=kills`).

    python benchmarks/prove_resume.py [--folder DIR] [--iterations 24] [--seed N]

A small GPT learns real text with dropout, validation and asynchronous saves in between. For each
layout and precision it is trained twice: once undisturbed, and once with SIGKILL of all ranks after
a step that a seed determines. From a copy of the remaining files, the run is then resumed on the
same layout and on others. Required are:

same layout    bit-identical losses, gradient norms, validation losses, weights, master weights and
               moments
other layout   the same samples by the ledger; losses within the rounding of another order of sums;
               tensors within a multiple of what an undisturbed run on that layout differs by. The
               bounds are derived below

Prints a row for each resumption and a line of counts; the exit code is 1 if any of them fails.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.faults import history
from benchmarks.faults.corpus import make_corpus
from benchmarks.faults.job import TINY, run_job, run_well
from benchmarks.shared import markdown, parser
from tests.helpers.fault_points import strike

# Another layout sums the same terms in another order. fp32: an ulp is 6e-8, and Adam with an
# epsilon of 1e-3 passes on relative differences without magnifying them, so some dozens of steps
# stay some ulps apart; a wrong sample, mask or moment moves a loss by 1e-3 and more. bf16:
# activations and working weights are rounded to 2^-9 = 2e-3 relative; a sum in another order may
# round to the neighbouring value, in a few places of many, which average out in the loss.
LOSS = {"fp32": 2e-6, "bf16": 2e-3}
# A tensor may differ by ROUNDINGS, or by TIMES its difference in an undisturbed run on the other
# layout, but by MOST at most. How far rounding goes depends on chance and on the text, since the
# gradient of a bias can be a sum of terms that nearly cancel. A moment that was lost or counted
# twice, or that saw another sample, differs by about 1.
TIMES = 10.0
MOST = 0.5
ROUNDINGS = {"fp32": 1e-6, "bf16": 4e-3}
SAVE_INTERVAL = 4
EVAL_INTERVAL = 5


@dataclass(frozen=True)
class LayoutFlags:
    """Layout: a number of ranks, and flags of pretrain_gpt.py."""

    name: str
    ranks: int
    flags: tuple[str, ...] = ()


ONE = LayoutFlags("1 process", 1)
DATA = LayoutFlags("DP2", 2)
TENSOR2 = LayoutFlags("TP2", 2, ("--tensor-model-parallel-size", "2"))
PIPELINE = LayoutFlags("PP2", 2, ("--pipeline-model-parallel-size", "2"))
CONTEXT = LayoutFlags("CP2", 2, ("--context-parallel-size", "2"))
INTERLEAVED = LayoutFlags(
    "PP2 interleaved",
    2,
    ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
)
ZERO_BUBBLE = LayoutFlags(
    "PP2 zero-bubble", 2, ("--pipeline-model-parallel-size", "2", "--enable-zbh1-pipeline")
)


@dataclass(frozen=True)
class ResumeCase:
    """A run that is killed on one layout and resumed on each of `resumed`."""

    dtype: str
    killed: LayoutFlags
    resumed: tuple[LayoutFlags, ...]
    asynchronous: bool = False
    flags: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        flags = [*TINY, "--num-layers", "4", *self.flags]
        flags += [] if "--lr-schedule" in self.flags else ["--lr-decay-style", "cosine"]
        flags += ["--bf16"] if self.dtype == "bf16" else []
        return flags + (["--async-save"] if self.asynchronous else [])

    @property
    def name(self) -> str:
        return f"{self.dtype}, {'asynchronous' if self.asynchronous else 'synchronous'} saves"


# A mask over attention heads depends on the tensor-parallel size, so resumptions on TP keep only
# the other masks.
NO_HEAD_MASKS = ("--attention-dropout", "0")
# Schedules of everything that can change from step to step, and the average of the weights. The
# blends change within steps, before a kill and after it.
SCHEDULED = ResumeCase(
    "fp32",
    DATA,
    (DATA, PIPELINE),
    flags=(
        "--lr-schedule",
        "warmup 3, constant 25%, cosine cycles 2 factor 1.5",
        "--weight-decay-schedule",
        "linear to 0.1",
        "--adam-beta2-schedule",
        "constant 2, linear 6 to 0.9",
        "--step-batch-size-schedule",
        "0:2 256:4",
        "--blend-schedule",
        "100: 1 docs 3 code, 304: 2 docs 1 code, 800: 1 code",
        "--clip-grad-by-kind",
        "embedding=0.05",
        "vector=0.05",
        "--ema-decay",
        "0.9",
        "--ema-warmup",
        "--ema-interval",
        "2",
        "--eval-ema",
    ),
)
CASES = (
    SCHEDULED,
    ResumeCase("fp32", ONE, (ONE, DATA, PIPELINE, INTERLEAVED)),
    ResumeCase("fp32", DATA, (DATA, ONE, ZERO_BUBBLE), asynchronous=True),
    ResumeCase(
        "fp32", PIPELINE, (PIPELINE, TENSOR2, CONTEXT), asynchronous=True, flags=NO_HEAD_MASKS
    ),
    ResumeCase("bf16", ONE, (ONE, DATA), asynchronous=True),
    ResumeCase("bf16", TENSOR2, (TENSOR2, PIPELINE), flags=NO_HEAD_MASKS),
)


@dataclass(frozen=True)
class Resumption:
    """Outcome of one resumption.

    killed_in          step after which the run was killed
    resumed_from       iteration of the loaded checkpoint
    loss_difference    largest relative difference of a loss from the undisturbed run
    tensor_difference  largest relative norm of a tensor's difference from it
    """

    case: ResumeCase
    resumed: LayoutFlags
    killed_in: int
    resumed_from: int
    loss_difference: float
    tensor_difference: float
    faults: tuple[str, ...]

    def cells(self) -> list[str]:
        differences = [f"{self.loss_difference:.1e}", f"{self.tensor_difference:.1e}"]
        if self.resumed == self.case.killed and not self.faults:
            differences = ["bit-identical"] * 2
        return [
            self.case.name,
            self.case.killed.name,
            str(self.killed_in),
            self.resumed.name,
            str(self.resumed_from),
            *differences,
            "; ".join(self.faults) or "ok",
        ]


HEAD = "run; killed on; after step; resumed on; from; losses differ; tensors differ; result".split(
    "; "
)


def prove(
    case: ResumeCase, folder: Path, data: list[str], iterations: int, step: int
) -> Iterator[Resumption]:
    """Train undisturbed, kill after `step`, resume and compare."""
    undisturbed = folder / "whole"
    killed = folder / "killed"
    common = [*case.arguments, *data, "--train-iters", str(iterations), "--eval-iters", "1"]
    common += ["--min-lr", "1e-3", "--save-interval", str(SAVE_INTERVAL)]
    common += ["--eval-interval", str(EVAL_INTERVAL)]
    ranks = case.killed.ranks
    there = [*common, *case.killed.flags]
    run_well(ranks, [*there, "--save", str(undisturbed)], folder / "logs_whole")
    arms = {rank: [(strike, "megatron.run.step", step, "kill")] for rank in range(ranks)}
    run_job(ranks, [*there, "--save", str(killed)], folder / "logs_killed", arms=arms)
    done = history.steps(killed)[-1][0]
    for number, layout in enumerate(case.resumed):
        copy = folder / f"resumed_{number}"
        shutil.copytree(killed, copy)
        restart = [*common, *layout.flags, "--save", str(copy), "--load", str(copy)]
        run_well(layout.ranks, restart, folder / f"logs_{number}")
        beside = None
        if layout != case.killed:
            beside = folder / f"undisturbed_{number}"
            logs = folder / f"logs_undisturbed_{number}"
            run_well(layout.ranks, [*common, *layout.flags, "--save", str(beside)], logs)
        yield compare(case, layout, undisturbed, copy, done, iterations, beside)


def steps_to_kill(case: ResumeCase, iterations: int) -> range:
    """Return the steps after which there is a complete checkpoint, so that the run may be killed.

    An asynchronous save is complete when the next save is due.
    """
    return range(SAVE_INTERVAL * (2 if case.asynchronous else 1) + 1, iterations - 1)


def compare(
    case: ResumeCase,
    layout: LayoutFlags,
    undisturbed: Path,
    resumed: Path,
    killed_in: int,
    iterations: int,
    beside: Path | None = None,
) -> Resumption:
    """Compare the undisturbed run with the one killed after `killed_in` steps and resumed.

    beside  an undisturbed run on the layout of the resumption; None if that is the same layout
    """
    reference = dict(history.steps(undisturbed))
    steps = history.steps(resumed)
    # The last record of "start" is that of the resumption.
    resumed_from = [record["iteration"] for record in history.records(resumed, "start")][-1]
    faults: list[str] = []
    # An asynchronous save may be incomplete until the next one is due, but no longer.
    if not killed_in - SAVE_INTERVAL * (2 if case.asynchronous else 1) <= resumed_from <= killed_in:
        faults.append(f"resumed from {resumed_from}, killed after {killed_in}")
    # The steps before the kill, then all steps from the resumption on.
    expected = [*range(1, killed_in + 1), *range(resumed_from + 1, iterations + 1)]
    if [iteration for iteration, _ in steps] != expected:
        faults.append("steps are missing or were taken twice")
    if [step[2] for _, step in steps] != [reference[i][2] for i in expected]:
        faults.append("consumed samples differ")
    if history.last_sources(resumed) != history.last_sources(undisturbed):
        faults.append("the ledger differs")
    losses = history.largest_difference(steps, reference)
    evaluations = history.largest_difference(validations(resumed), dict(validations(undisturbed)))
    ends = history.newest(resumed), history.newest(undisturbed)
    tensors = history.tensor_differences(*ends)
    if layout == case.killed:
        # with norms, which on another layout are other sums
        different = history.differing(steps, reference) + history.differing(
            validations(resumed), dict(validations(undisturbed))
        )
        if different:
            faults.append(f"figures of steps {different[:5]} differ")
        names = history.tensors_that_differ(*ends)
        if names:
            faults.append(f"{len(names)} tensors differ, e.g. {names[0]}")
        if history.state(ends[0]) != history.state(ends[1]):
            faults.append("the counters differ")
    else:
        assert beside is not None, "the rounding of another layout is measured"
        rounded = history.tensor_differences(history.newest(beside), history.newest(undisturbed))
        if max(losses, evaluations) > LOSS[case.dtype]:
            faults.append(f"losses beyond rounding ({LOSS[case.dtype]:.0e})")
        for name, difference in tensors.items():
            there = rounded.get(name, 0.0)
            if difference > min(MOST, max(ROUNDINGS[case.dtype], TIMES * there)):
                faults.append(f"{name} differs by {difference:.1e}, undisturbed {there:.1e}")
    most = max(tensors.values())
    return Resumption(
        case, layout, killed_in, resumed_from, max(losses, evaluations), most, tuple(faults)
    )


def validations(folder: Path) -> list[tuple[int, history.Step]]:
    """Return the validation losses as steps, with the average's loss in place of the norm."""
    evaluations = history.records(folder, "validation")
    return [
        (r["iteration"], (r["lm_loss"], r.get("ema_loss"), r["samples"]))
        for r in evaluations
        if r["dataset"] == "valid"
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--folder", type=Path, help="folder to keep the runs in; default: temporary")
    made.add_argument("--iterations", type=int, default=24, help="steps of each run")
    made.add_argument(
        "--seed", type=int, help="random seed of the steps to kill after; printed (default: random)"
    )
    options = made.parse_args()
    least = 2 * SAVE_INTERVAL + 3
    if options.iterations < least:
        made.error(
            f"--iterations {options.iterations}: at least {least}, so that a save precedes the kill"
        )
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(
        f"seed {seed}; {options.iterations} steps, a checkpoint every {SAVE_INTERVAL}", flush=True
    )
    chance = random.Random(seed)
    rows = list[Resumption]()
    with tempfile.TemporaryDirectory(prefix="prove_resume_") as temporary:
        folder = options.folder or Path(temporary)
        data = make_corpus(folder / "data")
        for number, case in enumerate(CASES):
            case_folder = folder / f"case_{number}"
            shutil.rmtree(case_folder, ignore_errors=True)
            step = chance.choice(steps_to_kill(case, options.iterations))
            for row in prove(case, case_folder, data, options.iterations, step):
                print("  ".join(row.cells()), flush=True)
                rows.append(row)
    failed = sum(bool(row.faults) for row in rows)
    print("", *markdown([HEAD, *(row.cells() for row in rows)]), sep="\n")
    print(f"{len(rows)} resumptions, {failed} of them wrong, seed {seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
