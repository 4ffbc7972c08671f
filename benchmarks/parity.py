"""Compare a tiny training on this machine's devices with fp32 on the CPU: losses, gradient norms.

    python benchmarks/parity.py [--device cpu|cuda] [--ranks 1|2] [--output FOLDER]

Runs on one process use fp32, bf16, and bf16 with captured passes. Runs on two processes use tensor
parallelism, a pipeline or ZeRO-1, over RCCL or NCCL if there are two devices. RCCL and NCCL do not
allow two ranks on a single device, where tensor parallelism and ZeRO-1 use gloo; the pipeline is
left out, because gloo cannot send its messages from a device. One training with
--deterministic-mode is resumed, and must give the same bits as without the interruption. On a CPU
only a part is run, as a smoke test. Exit code 1 if a run fails or deviates.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import Record, device_parser, markdown, train
from megatron.planner.subprocesses import gpus_here
from tests.helpers.launching import TINY

PRECISION = {
    "fp32": [],
    "bf16": ["--bf16"],
    "fp16": ["--fp16", "--initial-loss-scale", "16384", "--hysteresis", "1"],
}
LOSS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
NORM = {"fp32": 1e-3, "bf16": 4e-2, "fp16": 1e-2}
REASON = """\
allowed is relative, in each step. fp32: sums in another order differ in their last bits, and Adam's first steps are as
long for a gradient near zero as for any other. 16 bits: each result of a layer is rounded by up to 2^-8 (bf16) or 2^-11
(fp16); a loss is a mean over tokens, in which most of that cancels, in a norm less does. A pass or a message that is
wrong moves the norm by tens of per cent."""
ON_CPU = (["--distributed-backend", "gloo"], {"DS_ACCELERATOR": "cpu"})
CAPTURED = ("--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2")
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]
LAYOUTS = {
    "TP 2": ["--tensor-model-parallel-size", "2"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
    "ZeRO-1": ["--zero-stage", "1"],
}
# Sends a device's tensors through gloo, which copies every byte by way of the host, and lets ranks
# share a device. It is for this comparison only.
GLOO = """
import runpy, sys
import torch.distributed as dist
from megatron.parallel import process_descriptions
process_descriptions.device_identity = lambda device: ""
start = dist.init_process_group
dist.init_process_group = lambda backend, **more: start("gloo", **more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHARED = ("-c", GLOO)


@dataclass(frozen=True)
class ParityCase:
    """Training that must follow the reference.

    name       as printed
    precision  key of PRECISION, LOSS and NORM
    ranks      number of processes
    flags      further flags of pretrain_gpt.py
    shared     whether its ranks are on one device
    """

    name: str
    precision: str = "fp32"
    ranks: int = 1
    flags: tuple[str, ...] = ()
    shared: bool = False


def cases(device: str, devices: int) -> list[ParityCase]:
    """List the trainings that this machine can run."""
    if device == "cpu":
        return [
            ParityCase("one process", "bf16"),
            ParityCase("TP 2, gloo", "fp32", 2, (*LAYOUTS["TP 2"],)),
        ]
    shared = devices < 2
    through = "gloo, one device" if shared else "RCCL/NCCL"
    two = [
        ParityCase(f"{name}, {through}", precision, 2, (*flags,), shared)
        for name, flags in LAYOUTS.items()
        if not (shared and name == "PP 2")
        for precision in ("fp32", "bf16")
    ]
    one = [ParityCase("one process", precision) for precision in ("fp32", "bf16")]
    return [*one, ParityCase("captured passes", "bf16", flags=CAPTURED), *two]


def furthest(records: dict[int, Record], expected: dict[int, Record], key: str) -> float:
    """Return the largest relative difference of a step.

    It is infinite if steps are missing or skipped, or if a value is not finite, which is None.
    """
    every = [*records.values(), *expected.values()]
    if records.keys() != expected.keys() or any(
        record["skipped"] or record[key] is None for record in every
    ):
        return float("inf")
    return max(abs(float(record[key] / expected[i][key]) - 1) for i, record in records.items())


def resumed(folder: Path, device: str, here: Sequence[str], env: Mapping[str, str] | None) -> float:
    """Return how far losses and gradient norms differ after a resume with --deterministic-mode.

    On a GPU the model is large enough for several blocks of an attention kernel to add to one sum.
    """
    large = "--hidden-size 256 --seq-length 1024 --max-position-embeddings 1024".split()
    saved = ["--save", str(folder / "saved"), "--save-interval", "2"]
    common = [*TINY, *large * (device == "cuda"), "--bf16", "--deterministic-mode", *saved, *here]
    expected = train(folder / "whole.jsonl", common, 1, env)
    more = ["--load", str(folder / "saved"), "--load-tag", "2"]
    records = train(folder / "resumed.jsonl", [*common, *more], 1, env)
    after = {iteration: record for iteration, record in expected.items() if iteration > 2}
    return max(furthest(records, after, key) for key in ("lm_loss", "grad_norm"))


def main() -> int:
    made = device_parser(__doc__, "parity")
    ranks = "run only trainings with this many processes"
    made.add_argument("--ranks", type=int, choices=(1, 2), help=ranks)
    options = made.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.output, prefix="parity-"))
    on_cpu, variables = ON_CPU
    expected = train(folder / "cpu.jsonl", [*TINY, *NO_DROPOUT, *on_cpu], 1, variables)
    here, env = (on_cpu, variables) if options.device == "cpu" else ([], None)
    head = ["run", "type", "loss, off by", "allowed", "gradient norm, off by", "allowed", ""]
    print(*markdown([head]), sep="\n")
    listed = cases(options.device, gpus_here())
    listed = [case for case in listed if options.ranks in (None, case.ranks)]
    failed = 0
    for number, case in enumerate(listed):
        kind = case.precision
        arguments = [*TINY, *NO_DROPOUT, *PRECISION[kind], *case.flags, *here]
        before = SHARED if case.shared else ()
        loss = norm = float("inf")
        why = ""
        try:
            records = train(folder / f"{number}.jsonl", arguments, case.ranks, env, before)
            loss = furthest(records, expected, "lm_loss")
            norm = furthest(records, expected, "grad_norm")
        except RuntimeError as error:
            why = str(error).splitlines()[-1][:200]
        good = loss <= LOSS[kind] and norm <= NORM[kind]
        failed += not good
        cells = [f"{loss:.1e}", f"{LOSS[kind]:.0e}", f"{norm:.1e}", f"{NORM[kind]:.0e}"]
        row = [case.name, kind, *cells, "follows" if good else f"DIFFERS {why}"]
        print(markdown([head, row])[-1], flush=True)
    print(f"{REASON}\n{len(listed) - failed} of {len(listed)} trainings follow the CPU's in fp32")
    if options.ranks != 2:
        off = resumed(folder, options.device, here, env)
        failed += off > 0
        print(f"resumed with --deterministic-mode: off by {off:.1e}, allowed 0")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
