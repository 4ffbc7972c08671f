"""Options of sbatch and srun, as the manual pages have their forms and which of them holds."""

from __future__ import annotations

import pytest

from megatron.jobs.check_slurm import count, directives, parse_options, winning


@pytest.mark.parametrize(("words", "found", "rest"), [
    ("-N2 -t 1:00 job.sh -x", {"nodes": "2", "time": "1:00"}, "job.sh -x"),
    ("--nodes=4 --requeue --signal USR1@60 job.sh", {"nodes": "4", "requeue": "", "signal": "USR1@60"}, "job.sh"),
    ("-H -A abc --exclusive job.sh -N 3", {"H": "", "account": "abc", "exclusive": ""}, "job.sh -N 3"),
    ("-W --wait -- job.sh", {"W": "", "wait": ""}, "job.sh"),  # sbatch waits for the job's end
    ("--frobnicate 7 job.sh", {"frobnicate": "7"}, "job.sh"),  # what is not known takes a value
    ("-t", {"time": ""}, ""),
])  # fmt: skip
def test_options_end_where_the_script_begins(words: str, found: dict[str, str], rest: str) -> None:
    options, at = parse_options(words.split())
    assert {name: given.value for name, given in options.items()} == found
    assert words.split()[at:] == rest.split()


def test_the_command_line_wins_over_variables_and_they_over_the_script() -> None:
    script, problems = directives("#!/bin/bash\n#SBATCH -N 2 -t 1:00 # a comment\n#SBATCH -p batch\n")
    line, _ = parse_options(["-N", "4"])
    environ = {"SBATCH_TIMELIMIT": "2:00", "SBATCH_NETWORK": ""}
    options = winning(line, environ, script)
    assert problems == []
    assert {name: tuple(given) for name, given in options.items()} == {
        "nodes": ("4", "command line"), "time": ("2:00", "variable SBATCH_TIMELIMIT"), "partition": ("batch", "line 3"),
    }  # fmt: skip
    assert winning(line, {"SBATCH_PARTITION": "x", "SBATCH_ACCOUNT": "y"}, {})["nodes"].value == "4"
    both = winning(parse_options(["-p", "mine"])[0], {"SBATCH_PARTITION": "variable"}, script)
    assert both["partition"].value == "mine"


def test_lines_that_slurm_does_not_read_are_told() -> None:
    text = "#!/bin/bash\n#SBATCH -N 2 stray\n#SBATCH -o 'x\necho\n#SBATCH -N 3\n#SBATCHED\n"
    options, problems = directives(text)
    assert options["nodes"].value == "2"
    assert [problem.split(":")[0] for problem in problems] == ["line 2", "line 3", "line 5"]


def test_numbers() -> None:
    assert [count(text) for text in ("16", "16-20", "x", "", "9" * 5000)] == [16, 16, None, None, None]
