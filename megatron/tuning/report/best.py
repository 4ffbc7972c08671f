"""The best layout as one command line, and as a script: a batch job where the launch scripts know the machine."""
from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron.config import Config
from megatron.config.command_line import parse_args, parse_plan, scan
from megatron.errors import ConfigError
from megatron.planning.search.script import Origin, site_script
from megatron.tuning.layouts import Layout
from megatron.tuning.report.context import ReportContext, percent, save_text
from megatron.tuning.types import Candidate

COMMAND, SCRIPT, JOB = "best.txt", "best.sh", "best.sbatch"
_WIDTH = 110


def command_words(candidate: Candidate, context: ReportContext) -> list[str]:
    """The command that runs this layout: by torchrun, or as a step of a Slurm job, its devices bound to tasks as in
    the launch scripts."""
    program = ["pretrain_gpt.py", *candidate.flags]
    if context.launcher != "slurm":
        return ["torchrun", f"--nproc-per-node={candidate.processes}", *program]
    each = min(context.tasks_per_node, candidate.processes)
    words = ["srun", "-N", str(candidate.nodes), "-n", str(candidate.processes), f"--ntasks-per-node={each}"]
    cluster = context.cluster
    if cluster is not None:
        words += ["-c", str(cluster.cpus_per_task)]
        if cluster.device_type == "cuda":
            words += ["--gpus-per-task=1", "--gpu-bind=closest"]
    return [*words, "python", "-u", *program]


def best_command(context: ReportContext) -> str | None:
    """One line for a shell; None without a best layout."""
    best = context.best
    return None if best is None else shlex.join(command_words(best.candidate, context))


def write_best(folder: Path, context: ReportContext) -> list[Path]:
    """best.txt and best.sbatch, or best.sh where there are no launch scripts for the machine; nothing without a best
    layout. Raises ConfigError where they cannot be written."""
    best, command = context.best, best_command(context)
    if best is None or command is None:
        return []
    job = _job(best, context)
    script = save_text(folder / (SCRIPT if job is None else JOB), job or _shell_script(best, context))
    try:
        script.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{script}: {error.strerror or error}: choose another --out folder") from error
    return [save_text(folder / COMMAND, command + "\n"), script]


def _job(best: Layout, context: ReportContext) -> str | None:
    """A batch script; None for a machine without launch scripts, for parts of nodes, and for trials that were not
    under its Slurm."""
    if context.cluster is None or context.launcher != "slurm":
        return None
    flags = list(best.candidate.flags)
    config = _config(best.candidate)
    preset = scan(flags).flags.get("--preset", [None])[0]
    origin = Origin(f"the best that tools/tune.py measured in {context.name}", JOB)
    return site_script(flags, config, preset, context.cluster, None, origin, _notes(best, context))


def _config(candidate: Candidate) -> Config:
    return parse_plan([*candidate.flags, "--world-size", str(candidate.processes)])


def _notes(best: Layout, context: ReportContext) -> list[str]:
    result = best.result
    assert result.step_s is not None, "the best layout has figures"
    apart = "" if best.apart is None else f", {percent(best.apart)} apart"
    failed = [f"{len(best.failures)} more of its trials gave no valid figures: trials.md has them."]
    return [
        f"Measured in {best.numbers} over {result.steady} steps{apart}: {result.step_s:.4g} s a step, "
        f"{context.written(context.value(best))}.",
        *(failed if best.failures else ()),
        best.candidate.key,
    ]


def _shell_script(best: Layout, context: ReportContext) -> str:
    words = command_words(best.candidate, context)
    notes = [f"The best layout that tools/tune.py measured in {context.name}. From the repository, with more flags of",
             f"pretrain_gpt.py, which win over these:  FOLDER/{SCRIPT} --train-iters 1000 ...",
             *_notes(best, context)]  # fmt: skip
    if needs := lacking(best.candidate):
        notes += ["It still needs:", *(f"  {line}" for line in needs)]
    return "\n".join(["#!/bin/bash", *(f"# {note}" for note in notes), f'exec {_folded(words)} \\\n    "$@"']) + "\n"


def lacking(candidate: Candidate) -> list[str]:
    """What a run needs beside the flags of the layout."""
    try:
        parse_args(candidate.flags, candidate.processes)
    except ConfigError as error:
        problems = str(error).partition("\n")[2] or str(error).partition("problem: ")[2] or str(error)
        return [line.strip() for line in problems.splitlines()]
    return []


def _folded(words: Sequence[str]) -> str:
    """A command over lines that a shell joins."""
    lines = [""]
    for word in map(shlex.quote, words):
        if lines[-1] and (len(lines[-1]) + len(word) > _WIDTH) and word.startswith("-"):
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return " \\\n    ".join(lines)
