"""Rows of `make bench` for parts of a step: optimizer, save, cross entropy and AdamW alone.

The optimizer step and saving are those of GPT-2 124M in bf16 by pretrain_gpt.py, compared with
torch's AdamW with clipping and torch.save of the same state to the same disk, in the plain loop;
the batch, which changes neither, is a single sequence. Kernels are measured by kernels.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.results import DISK_FLOOR, SHORT_FLOOR, figure
from benchmarks.shared import ROOT, Record
from benchmarks.sides import environment, run
from benchmarks.workloads import EAGER, OURS, WorkloadCase

REPEAT = 3


def row(
    name: str, side: str, values: list[float], unit: str, floor: float = SHORT_FLOOR, note: str = ""
) -> Record:
    """Return the row of a time, whose spread is at least `floor` (results.py)."""
    value = figure(values, floor)
    return {"name": name, "side": side, "value": value, "unit": unit, "note": note}


def failed(name: str, reason: str) -> Record:
    return {"name": name, "side": "", "unit": "", "note": reason}


def optimizer_and_save(case: WorkloadCase, threads: int, folder: Path) -> Iterator[Record]:
    """Yield the optimizer's time of a step and that of a checkpoint, ours and the plain loop's."""
    case = replace(case, micro_batch=1, micro_batches=1)
    for side in (OURS, EAGER):
        outcome = run(
            case, side, warm_up=1, steps=REPEAT, threads=threads, folder=folder, save=True
        )
        if outcome.reason:
            yield failed("optimizer step", f"{side.name}: {outcome.reason}")
            continue
        what = f"{case.parameters / 1e6:.0f} M parameters, with clipping"
        milliseconds = [1e3 * s for s in outcome.optimizer_s]
        yield row("optimizer step", side.name, milliseconds, "ms", note=what)
        if outcome.save:
            seconds = outcome.save["seconds"]
            size = outcome.save["files_bytes"]
            rate = f"{size / 2**30:.2f} GiB, {size / seconds / 1e9:.2f} GB/s"
            yield row("save", side.name, [seconds], "s", DISK_FLOOR, rate)


def kernels(quick: bool, threads: int, folder: Path) -> Iterator[Record]:
    """Yield the times of cross entropy and AdamW, our kernels and torch's operators."""
    names = ["cross_entropy"]
    dtypes = ["bfloat16"]
    if not quick:
        names.append("adamw")
        dtypes.append("float32")
    output = folder / "kernels"
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "--quick"]
    command += ["--op", *names, "--dtype", *dtypes, "--output", str(output)]
    env = environment(threads, folder)
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-300:])
    for record in json.loads((output / "kernels.json").read_text())["rows"]:
        shape = " x ".join(map(str, record["shape"]))
        name = f"{record['operator'].replace('_', ' ')} {record['dtype']}, {shape}"
        for side, label in (("ours", "ours"), ("torch", "torch's operators")):
            milliseconds = [1e3 * record["seconds"][side]["both"]]
            yield row(name, f"kernel alone, {label}", milliseconds, "ms", note="all passes")


def measure(case: WorkloadCase, *, quick: bool, threads: int, folder: Path) -> list[Record]:
    """Return all rows, for W1 in bf16 as `case`; the row of a part that fails has the reason."""
    makers: list[tuple[str, Callable[[], Iterator[Record]]]] = [
        ("optimizer step and save", partial(optimizer_and_save, case, threads, folder)),
        ("kernels", partial(kernels, quick, threads, folder)),
    ]
    rows: list[Record] = []
    for name, make in makers:
        try:
            rows += make()
        except Exception as error:  # whatever fails there is a row here
            rows.append(failed(name, f"failed: {error}"))
    return rows
