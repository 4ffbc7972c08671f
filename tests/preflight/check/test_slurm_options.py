"""Options as sbatch and srun read them; what is expected is from their manual pages (22.05)."""
from __future__ import annotations

import pytest

from megatron.preflight.check.slurm_options import (
    Sizes,
    directives,
    from_variables,
    parse_options,
    step_sizes,
    winning,
)


def values(words: str, program: str = "sbatch") -> tuple[dict[str, str], int]:
    parsed = parse_options(words.split(), program)
    assert parsed.problems == []
    return {name: given.value for name, given in parsed.options.items()}, parsed.at


@pytest.mark.parametrize(
    ("words", "expected", "at"),
    [
        ("-N 2 job.sh -n 3", {"nodes": "2"}, 2),
        ("-N2 -n=4 job.sh", {"nodes": "2", "ntasks": "=4"}, 2),
        ("-HQv -t1 job.sh", {"hold": "", "quiet": "", "verbose": "", "time": "1"}, 2),
        ("--exclusive=user job.sh", {"exclusive": "user"}, 1),
        ("-W job.sh", {"wait": ""}, 1),
        ("--ntasks-per-n 8 job.sh", {"ntasks-per-node": "8"}, 2),
    ],
)
def test_command_lines(words: str, expected: dict[str, str], at: int) -> None:
    assert values(words) == (expected, at)


def test_options_of_srun() -> None:
    words = "-u -l -n16 -c 7 -W 60 -K --kill-on-bad-exit=0 --gpu-bind=closest -w a[1-2] --pty python -u x"
    found, at = values(words, "srun")
    assert words.split()[at:] == ["python", "-u", "x"]
    assert found == {
        "unbuffered": "", "label": "", "ntasks": "16", "cpus-per-task": "7", "wait": "60", "kill-on-bad-exit": "0",
        "gpu-bind": "closest", "nodelist": "a[1-2]", "pty": "",
    }  # fmt: skip


def test_problems_are_named() -> None:
    for words, named in ((["--nodess", "2"], "--nodess"), (["-N"], "-N"), (["--ntasks-per"], "--ntasks-per")):
        (problem,) = parse_options(words, "sbatch").problems  # of the last there are four
        assert named in problem


SCRIPT = """#!/bin/bash
#SBATCH -N 4   # a comment
#SBATCH -N 8 --time=01:00:00
##SBATCH -p never

# text
#SBATCH --job-name="a b" -q debug
#SBATCHED
module load x
#SBATCH -A late
"""


def test_lines_of_a_script() -> None:
    parsed, late = directives(SCRIPT, "/job.sh")
    assert {name: (given.value, given.line) for name, given in parsed.options.items()} == {
        "nodes": ("8", 3), "time": ("01:00:00", 3), "job-name": ("a b", 7), "qos": ("debug", 7)
    }  # fmt: skip
    assert late == [10] and parsed.problems == []


def test_the_command_line_wins_over_variables_and_they_over_the_script() -> None:
    script, _ = directives("#SBATCH -p script -t 1 -q script --requeue\n", "/job.sh")
    variables = from_variables({"SBATCH_PARTITION": "env", "SBATCH_TIMELIMIT": "2", "SBATCH_NO_REQUEUE": "", "X": "y"})
    line = parse_options(["-p", "line", "job.sh"]).options
    found = winning(line, variables, script.options)
    assert {name: given.value for name, given in found.items()} == {
        "partition": "line", "time": "2", "qos": "script", "no-requeue": ""
    }  # fmt: skip
    assert from_variables({"SBATCH_NO_REQUEUE": "²"}) == from_variables({"SBATCH_NO_REQUEUE": "0"}) == {}
    taken_back = from_variables({"SBATCH_NETWORK": "", "SBATCH_TIMELIMIT": ""})
    assert {name: given.value for name, given in taken_back.items()} == {"network": ""}


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        # All but the first and the last two were seen with Slurm 22.05 in a job of 2 nodes x 4 tasks.
        ("-N 2 -n 16", {}, Sizes(2, 16, 8)),
        ("", {"SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, Sizes(2, 8, 4)),
        ("-N 2 --ntasks-per-node=1", {"SLURM_NNODES": "2", "SLURM_NTASKS": "8"}, Sizes(2, 8, 4)),
        ("-N 1", {"SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, Sizes(1, 8, 8)),
        ("-n 2", {"SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, Sizes(2, 2, 1)),
        ("-n 16", {"SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, Sizes(2, 16, 8)),
        ("-n 16 --ntasks-per-node=8", {}, Sizes(2, 16, 8)),
        ("-N 3", {}, Sizes(3, 3, 1)),
    ],
)
def test_sizes_of_a_step(words: str, environ: dict[str, str], expected: Sizes) -> None:
    assert step_sizes(parse_options(words.split(), "srun").options, environ) == expected
