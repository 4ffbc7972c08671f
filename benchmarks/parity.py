"""Compare a tiny training on this machine's devices with fp32 on the CPU: losses, gradient norms.

    python benchmarks/parity.py [--device cpu|cuda] [--ranks 1|2] [--output FOLDER]

Runs have one process in fp32 and bf16, the latter also with captured passes, and two processes:
tensor parallel, a pipeline and ZeRO-1 over RCCL or NCCL, if there are two devices. On a single
device, which RCCL and NCCL do not allow for two ranks, tensor parallelism and ZeRO-1 use gloo; a
pipeline is left out, because gloo cannot send its messages from a device. One training with
--deterministic-mode is resumed, to the same bits as without the interruption. On a CPU only a part
is run, as a smoke test. Exit code 1 if a run fails or deviates.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.metrics_file import read_records  # noqa: E402
from megatron.planner.processes import environment, gpus_here, reserve_port  # noqa: E402
from tests.helpers.launching import TINY  # noqa: E402

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
START_S = 400  # the first import of torch on a cold file system takes minutes
LAYOUTS = {
    "TP 2": ["--tensor-model-parallel-size", "2"],
    "PP 2": ["--pipeline-model-parallel-size", "2"],
    "ZeRO-1": ["--zero-stage", "1"],
}
Record = dict[str, Any]
# A device's tensors through gloo: for this comparison alone, every byte goes by way of the host, and
# ranks may share a device.
GLOO = """
import runpy, sys
import torch.distributed as dist
from megatron.parallel import participants
participants.device_identity = lambda device: ""
start = dist.init_process_group
dist.init_process_group = lambda backend, **more: start("gloo", **more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHARED = ("-c", GLOO)


@dataclass(frozen=True)
class Case:
    """A training that must follow the reference; `shared`: its ranks are on one device."""

    name: str
    precision: str = "fp32"
    ranks: int = 1
    flags: tuple[str, ...] = ()
    shared: bool = False


def cases(device: str, devices: int) -> list[Case]:
    """List what this machine can run."""
    if device == "cpu":
        return [Case("one process", "bf16"), Case("TP 2, gloo", "fp32", 2, (*LAYOUTS["TP 2"],))]
    shared = devices < 2
    through = "gloo, one device" if shared else "RCCL/NCCL"
    two = [
        Case(f"{name}, {through}", precision, 2, (*flags,), shared)
        for name, flags in LAYOUTS.items()
        if not (shared and name == "PP 2")
        for precision in ("fp32", "bf16")
    ]
    one = [Case("one process", precision) for precision in ("fp32", "bf16")]
    return [*one, Case("captured passes", "bf16", flags=CAPTURED), *two]


def launch(
    metrics: Path,
    arguments: Sequence[str],
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    limit_s: float = START_S,
    waits_for: Sequence[int] | None = None,
) -> tuple[list[int], list[Path]]:
    """Run pretrain_gpt.py in separate processes; return exit codes, logs and metrics.

    before     arguments of python before the script, such as `-c` and a program that runs it
    waits_for  ranks whose exit codes are returned; all by default

    Raises subprocess.TimeoutExpired.
    """
    logs = [metrics.with_suffix(f".{rank}.log") for rank in range(ranks)]
    command = [
        sys.executable,
        *before,
        str(ROOT / "pretrain_gpt.py"),
        *arguments,
        "--metrics-file",
        str(metrics),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    metrics.unlink(missing_ok=True)
    with reserve_port() as held:
        try:
            for rank, log in enumerate(logs):
                variables = environment(os.environ, rank, ranks, held.getsockname()[1]) | dict(
                    env or {}
                )
                with log.open("wb") as out:
                    processes.append(
                        subprocess.Popen(
                            command,
                            cwd=ROOT,
                            env=variables,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                        )
                    )
            end, listed = (
                time.monotonic() + limit_s,
                range(ranks) if waits_for is None else waits_for,
            )
            return [processes[rank].wait(max(1.0, end - time.monotonic())) for rank in listed], logs
        finally:
            for process in processes:
                process.kill()


def train(
    metrics: Path,
    arguments: Sequence[str],
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    limit_s: float = START_S,
) -> dict[int, Record]:
    """Launch a training; return its iteration records by number.

    Raises RuntimeError with the last lines of a rank that fails.
    """
    codes, logs = launch(metrics, arguments, ranks, env, before, limit_s)
    if any(codes):
        log = next(log for log, code in zip(logs, codes, strict=True) if code)
        raise RuntimeError(
            f"exit codes {codes}, {log}: {log.read_text(errors='replace').strip()[-3000:]}"
        )
    return {
        record["iteration"]: record
        for record in read_records(metrics)
        if record["event"] == "iteration"
    }


def furthest(found: dict[int, Record], expected: dict[int, Record], key: str) -> float:
    """Return the largest relative difference of a step; infinite if steps are missing or skipped."""
    if found.keys() != expected.keys() or any(record["skipped"] for record in found.values()):
        return float("inf")
    return max(abs(record[key] / expected[i][key] - 1) for i, record in found.items())


def resumed(folder: Path, device: str, here: Sequence[str], env: Mapping[str, str] | None) -> float:
    """Return by how much losses and gradient norms after a resume are off, with deterministic sums.

    On a GPU the model is large enough for several blocks of an attention kernel to add to one sum.
    """
    large = "--hidden-size 256 --seq-length 1024 --max-position-embeddings 1024".split()
    saved = ["--save", str(folder / "saved"), "--save-interval", "2"]
    common = [*TINY, *large * (device == "cuda"), "--bf16", "--deterministic-mode", *saved, *here]
    expected = train(folder / "whole.jsonl", common, env=env)
    more = ["--load", str(folder / "saved"), "--load-tag", "2"]
    found = train(folder / "resumed.jsonl", [*common, *more], env=env)
    after = {iteration: record for iteration, record in expected.items() if iteration > 2}
    return max(furthest(found, after, key) for key in ("lm_loss", "grad_norm"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cuda (CUDA or ROCm) by default"
    )
    parser.add_argument(
        "--ranks", type=int, choices=(1, 2), help="run only trainings with this many processes"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder for metrics and logs")
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=options.output, prefix="parity-"))
    on_cpu, variables = ON_CPU
    expected = train(folder / "cpu.jsonl", [*TINY, *NO_DROPOUT, *on_cpu], env=variables)
    here, env = (on_cpu, variables) if options.device == "cpu" else ([], None)
    print(
        "| run | type | loss, off by | allowed | gradient norm, off by | allowed | |\n"
        + "|---" * 7
        + "|"
    )
    failed, listed = 0, cases(options.device, gpus_here())
    listed = [case for case in listed if options.ranks in (None, case.ranks)]
    for number, case in enumerate(listed):
        arguments, kind = (
            [*TINY, *NO_DROPOUT, *PRECISION[case.precision], *case.flags, *here],
            case.precision,
        )
        try:
            found = train(
                folder / f"{number}.jsonl",
                arguments,
                case.ranks,
                env,
                SHARED if case.shared else (),
            )
            off = furthest(found, expected, "lm_loss"), furthest(found, expected, "grad_norm")
            good, why = off[0] <= LOSS[kind] and off[1] <= NORM[kind], ""
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            off, good, why = (
                (float("inf"), float("inf")),
                False,
                str(error).splitlines()[-1].replace("|", "/")[:200],
            )
        failed += not good
        cells = f"{off[0]:.1e} | {LOSS[kind]:.0e} | {off[1]:.1e} | {NORM[kind]:.0e}"
        print(
            f"| {case.name} | {kind} | {cells} | {'follows' if good else f'DIFFERS {why}'} |",
            flush=True,
        )
    print(f"{REASON}\n{len(listed) - failed} of {len(listed)} trainings follow the CPU's in fp32")
    if options.ranks != 2:
        off = resumed(folder, options.device, here, env)
        failed += off > 0
        print(f"resumed with --deterministic-mode: off by {off:.1e}, allowed 0")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
