"""Rows of `make bench` for parts: start-up, optimizer step, cross entropy, save, data loading.

Start-up, kernels and data loading use the separate benchmarks in this folder, with fewer repeats.
The optimizer step and saving are those of GPT-2 124M in bf16 by pretrain_gpt.py, compared with
torch's AdamW with clipping and torch.save of the same state to the same disk, in the plain loop;
the batch, which changes neither, is a single sequence.

    python benchmarks/parts.py loading [--quick]     prints tokens/s of the loader as JSON, for a process of its own
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import DISK_FLOOR, FLOOR, SHORT_FLOOR, START_FLOOR, figure
from sides import environment, run
from workloads import EAGER, OURS, ROOT, Case

Record = dict[str, Any]
REPEAT = 3


def part(
    name: str,
    side: str,
    values: list[float],
    unit: str,
    *,
    floor: float = FLOOR,
    less: bool = True,
    note: str = "",
) -> Record:
    """One row; `less`: whether less is better; `floor` of its spread, see results.py."""
    value = figure(values, floor)
    return {
        "name": name,
        "side": side,
        "value": value,
        "unit": unit,
        "less_is_better": less,
        "note": note,
    }


def failed(name: str, reason: str) -> Record:
    return {"name": name, "side": "", "unit": "", "less_is_better": True, "note": reason}


def start_up(repeat: int) -> Iterator[Record]:
    """Measure the start-up of a small model on 2 processes, and of `import torch` in 2 processes."""
    from startup import MODEL, pair

    python = [sys.executable, "-c", "import torch"]
    seconds = [pair(python) for _ in range(repeat)]
    yield part(
        "start-up", "import torch, 2 processes", seconds, "s", floor=START_FLOOR, note="no less"
    )
    ours = [sys.executable, "pretrain_gpt.py", *MODEL]
    seconds = [pair(ours, " iteration ") for _ in range(repeat)]
    yield part("start-up", "ours, to the first step", seconds, "s", floor=START_FLOOR)


def optimizer_and_save(case: Case, threads: int, folder: Path) -> Iterator[Record]:
    """The optimizer's part of a step and a checkpoint, ours and the plain loop's."""
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
        yield part("optimizer step", side.name, milliseconds, "ms", floor=SHORT_FLOOR, note=what)
        if outcome.save:
            size = outcome.save["files_bytes"]
            rate = f"{size / 2**30:.2f} GiB, {size / outcome.save['seconds'] / 1e9:.2f} GB/s"
            yield part(
                "save", side.name, [outcome.save["seconds"]], "s", floor=DISK_FLOOR, note=rate
            )


def kernels(quick: bool, threads: int, folder: Path) -> Iterator[Record]:
    """Cross entropy and AdamW, our kernels and torch's operators, by benchmarks/kernels.py."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "kernels.py"),
        "--quick",
        "--op",
        "cross_entropy",
        *([] if quick else ["adamw"]),
        "--dtype",
        *([] if quick else ["float32"]),
        "bfloat16",
        "--output",
        str(folder / "kernels"),
    ]
    answer(command, environment(threads, folder), folder)
    for row in json.loads((folder / "kernels" / "kernels.json").read_text())["rows"]:
        name = (
            f"{row['operator'].replace('_', ' ')} {row['dtype']}, "
            f"{' x '.join(map(str, row['shape']))}"
        )
        for side, label in (("ours", "ours"), ("torch", "torch's operators")):
            milliseconds = [1e3 * sum(row["seconds"][side].values())]
            yield part(
                name,
                f"kernel alone, {label}",
                milliseconds,
                "ms",
                floor=SHORT_FLOOR,
                note="all passes",
            )


def data_loading(quick: bool, threads: int, folder: Path) -> Iterator[Record]:
    """Tokens per second of the loader alone, on short documents, the worst case."""
    command = [sys.executable, __file__, "loading", *(["--quick"] if quick else [])]
    for name, rates in json.loads(answer(command, environment(threads, folder), folder)).items():
        what = "documents of 20 tokens on average"
        yield part(
            "data loading", name, rates, "tokens/s", floor=START_FLOOR, less=False, note=what
        )


def answer(command: list[str], env: dict[str, str], folder: Path) -> str:
    """Standard output of a command; RuntimeError with its last line when it fails."""
    result = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    if result.returncode:
        raise RuntimeError(
            (result.stderr or result.stdout).strip().splitlines()[-1:]
            or f"code {result.returncode}"
        )
    return result.stdout


def measure(case: Case, *, quick: bool, threads: int, folder: Path) -> list[Record]:
    """Return all rows; a failed one has the reason, and the others continue. `case`: W1 in bf16."""
    makers: list[tuple[str, Callable[[], Iterator[Record]]]] = [
        ("start-up", lambda: start_up(1 if quick else REPEAT)),
        ("optimizer step and save", lambda: optimizer_and_save(case, threads, folder)),
        ("kernels", lambda: kernels(quick, threads, folder)),
        ("data loading", lambda: data_loading(quick, threads, folder)),
    ]
    rows: list[Record] = []
    for name, make in makers:
        try:
            rows += make()
        # another benchmark's failure of any kind is a row here
        except (Exception, SystemExit) as error:
            rows.append(failed(name, f"failed: {error}"))
    return rows


def loading(quick: bool) -> dict[str, list[float]]:
    """{way of reading: tokens/s of several readings}."""
    from data_loading import loader_rate, write

    tokens, samples, rates = (200_000 if quick else 5_000_000), (50 if quick else 2000), {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = write(Path(folder), "short", tokens)
        for name, workers in (("when asked", 0), ("2 threads ahead", 2)):
            rates[name] = [
                loader_rate(prefix, True, workers, samples, False) for _ in range(REPEAT)
            ]
    return rates


if __name__ == "__main__":
    print(json.dumps(loading("--quick" in sys.argv)))
