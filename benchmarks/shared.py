"""Command lines, tables and training processes of the benchmarks. Only print_table needs rich."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.metrics_file import read_records
from megatron.parallel.launch import Launch
from megatron.planner.subprocesses import environment, reserve_port

ROOT = Path(__file__).resolve().parents[1]
START_S = 400.0  # the first import of torch on a cold file system takes minutes
AFTER_FAILURE_S = 10.0
Table = list[list[str]]
Record = dict[str, Any]


# ---- command lines -------------------------------------------------------------------------------


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=text, formatter_class=formatter, allow_abbrev=False)


def device_parser(text: str | None, folder: str) -> argparse.ArgumentParser:
    """Return a parser with --device and --output, which is runs/FOLDER by default."""
    made = parser(text)
    devices = ("cpu", "cuda")
    made.add_argument("--device", choices=devices, default="cuda", help="default: cuda, also ROCm")
    made.add_argument("--output", type=Path, default=ROOT / "runs" / folder, metavar="FOLDER")
    return made


# ---- tables --------------------------------------------------------------------------------------


def markdown(table: Table) -> list[str]:
    """Return the lines of a table; columns after the second are numbers, aligned right."""
    rule = ["---" if index < 2 else "---:" for index in range(len(table[0]))]
    rows = [table[0], rule, *table[1:]]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows]


def tables_of(text: str) -> list[Table]:
    """Return the Markdown tables in a text, without their rules."""
    tables: list[Table] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not all(re.fullmatch(":?-+:?", cell) for cell in cells):
                tables[-1].append(cells)
        elif tables[-1]:
            tables.append([])
    return [table for table in tables if len(table) > 1]


def print_table(title: str, table: Table) -> None:
    """Print a table as for a terminal, even into a pipe."""
    from rich.console import Console
    from rich.table import Table as RichTable

    shown = RichTable(title=title, title_justify="left")
    for index, column in enumerate(table[0]):
        shown.add_column(column, justify="left" if index < 2 else "right", overflow="fold")
    for cells in table[1:]:
        shown.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


# ---- processes -----------------------------------------------------------------------------------


def launch(
    command: Sequence[str],
    logs: Sequence[Path],
    env: Mapping[str, str],
    limit_s: float,
    *,
    look: Callable[[int], int] = lambda pid: 0,
    every_s: float = 0.05,
    awaited: Sequence[int] = (),
) -> tuple[list[int], list[int]]:
    """Run copies of a command as the ranks of one job; return their exit codes and peaks.

    logs     one file per rank, to which its output is appended
    look     returns a number for a process ID; a process's peak is the largest one
    every_s  seconds between two calls of `look`
    awaited  the job ends when these ranks have ended; by default, all ranks

    The job also ends after `limit_s` seconds, and AFTER_FAILURE_S after an awaited rank has failed.
    Processes that still run then are killed: their exit code is -9.
    """
    count = len(logs)
    peaks = [0] * count
    started: list[subprocess.Popen[bytes]] = []
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        try:
            for rank, log in enumerate(logs):
                variables = Launch(rank, rank, count, count, master_port=port).environment()
                with log.open("ab") as out:
                    process = subprocess.Popen(
                        command,
                        cwd=log.parent,
                        env={**env, **variables},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                started.append(process)
            end = time.monotonic() + limit_s
            waited = [started[rank] for rank in awaited] or started
            while None in (codes := [p.poll() for p in waited]) and time.monotonic() < end:
                peaks = [max(peak, look(p.pid)) for peak, p in zip(peaks, started, strict=True)]
                if any(codes):
                    end = min(end, time.monotonic() + AFTER_FAILURE_S)
                time.sleep(every_s)
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [process.returncode for process in started], peaks


def pretrain(
    metrics: Path,
    arguments: Sequence[str],
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    limit_s: float = START_S,
    **more: Any,
) -> tuple[list[int], list[Path]]:
    """Run pretrain_gpt.py, which writes a new metrics file; return exit codes and logs.

    before  arguments of python before the script, such as `-c` and a program that runs it
    more    further arguments of launch
    """
    logs = [metrics.with_suffix(f".{rank}.log").resolve() for rank in range(ranks)]
    for path in (metrics, *logs):
        path.unlink(missing_ok=True)
    script = str(ROOT / "pretrain_gpt.py")
    flags = ["--metrics-file", str(metrics.resolve())]
    command = [sys.executable, *before, script, *arguments, *flags]
    variables = {**environment(os.environ, 0, 1, 0), **(env or {})}
    codes, _ = launch(command, logs, variables, limit_s, **more)
    return codes, logs


def train(metrics: Path, arguments: Sequence[str], ranks: int = 1, *more: Any) -> dict[int, Record]:
    """Run pretrain_gpt.py, and return its iteration records by number.

    Further arguments are those of pretrain. Raises RuntimeError with the end of the log of a rank
    that fails.
    """
    codes, logs = pretrain(metrics, arguments, ranks, *more)
    if any(codes):
        log = next(log for log, code in zip(logs, codes, strict=True) if code)
        lines = log.read_text(errors="replace").strip()[-3000:]
        raise RuntimeError(f"exit codes {codes}, {log}: {lines}")
    return {record["iteration"]: record for record in read_records(metrics, "iteration")}
