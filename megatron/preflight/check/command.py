"""`tools/preflight.py check`: its words, and the exit code."""
from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console

from megatron.config.option import Parser, real
from megatron.errors import ConfigError
from megatron.parallel.environment import whole
from megatron.preflight.check.findings import Finding, Place, error
from megatron.preflight.check.render import render, to_dict
from megatron.preflight.check.report import Submission, failed, make_report, read_script
from megatron.preflight.check.slurm_options import (
    Given,
    directives,
    from_variables,
    parse_options,
    step_sizes,
    winning,
)
from megatron.training.failures import EXIT_USER_ERROR

USAGE = """preflight.py check [flags of check] [sbatch's options] SCRIPT [ARGUMENT ...]
       preflight.py check [flags of check] -- COMMAND ..."""
DESCRIPTION = """\
Check a job before it is submitted, on a login node without a GPU: everything is as sbatch would get it, in its place.

  tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
  tools/preflight.py check -- srun -N 2 -n 16 -c 7 --gpus-per-task=1 python pretrain_gpt.py --preset gpt-22b ...

The script is followed by bash in a way in which nothing acts: it writes into a scratch folder only, programs are noted
instead of run, srun and the like answer as in a job. The training command that comes out of it is resolved as its ranks
would, and looked at with the job's options, the machine's limits and links, the data and checkpoints on disk.

Exit code 0 when nothing stands against submitting (warnings are counted), 2 with errors; with --strict, with
warnings too."""
_OWN = {"--cluster": True, "--json": False, "--strict": False, "--time-limit": True}  # whether a value follows
_PIPE_COLUMNS = 160  # where nobody says how wide the output may be


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of this program, before the script; what sbatch would get is in `rest`."""
    parser = Parser("preflight.py check", usage=USAGE, description=DESCRIPTION)
    parser.add_argument("--cluster", metavar="NAME|FILE", help="machine to check against (default: what the script "
                        "exports as MEGATRON_CLUSTER, or this variable, or SITE_CLUSTER; none: no "
                        "machine)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    parser.add_argument("--time-limit", type=real(), default=60.0, metavar="S",
                        help="seconds for following the script (default 60)")  # fmt: skip
    own, rest = split_words(argv)
    args = parser.parse_args(own)
    args.rest = rest
    return args


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(our own flags, what sbatch would get); the flags stand before the script or --, between sbatch's options."""
    own, rest, at = list[str](), list[str](), 0
    while at < len(argv):
        word = argv[at]
        if word == "--" or not word.startswith("-") or word == "-":
            return own, [*rest, *argv[at:]]
        name = word.partition("=")[0]
        taker = own if name in (*_OWN, "--help", "-h") else rest
        takes = _OWN.get(name, False) if taker is own else _takes_value(word)
        words = 2 if takes and "=" not in word else 1
        taker += argv[at : at + words]
        at += words
    return own, rest


def _takes_value(word: str) -> bool:
    """Whether an option of sbatch has its value in the next word."""
    return parse_options([word]).problems[-1:] == [f"{word} takes a value"]


def run(args: argparse.Namespace) -> int:
    """Check and print; the exit code. Raises ConfigError."""
    words = list(args.rest)
    submission = command_submission(words[1:]) if words[:1] == ["--"] else script_submission(words)
    report = make_report(submission, args.cluster, args.time_limit)
    if args.json:
        print(json.dumps(to_dict(report), indent=1, default=str))
    else:
        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_COLUMNS
        render(report, Console(width=width, highlight=False, markup=False, emoji=False))
    return EXIT_USER_ERROR if failed(report, args.strict) else 0


def script_submission(words: Sequence[str]) -> Submission:
    """What `sbatch WORDS` would submit. Raises ConfigError where there is no script, or one that cannot be read."""
    line = parse_options(words, "sbatch")
    if "wrap" in line.options:
        raise ConfigError("--wrap is not followed: give the command after --, as in preflight.py check -- srun ...")
    if line.at >= len(words):
        more = f" ({'; '.join(line.problems)})" if line.problems else ""
        raise ConfigError(f"no script: give it as to sbatch, or a command after --{more}")
    path = words[line.at]
    text = read_script(path)
    name = os.path.abspath(path)
    script, late = directives(text, name)
    options = winning(line.options, from_variables(os.environ), script.options)
    problems = [error("options", problem, Place("command line")) for problem in line.problems]
    problems += [error("options", problem, _line_of(problem, name)) for problem in script.problems]
    arguments = tuple(words[line.at + 1 :])
    return Submission(name, text, arguments, options, arguments, True, tuple(problems), tuple(late))


def _line_of(problem: str, name: str) -> Place:
    number = problem.partition(":")[0].removeprefix("line ")
    return Place(name, whole(number) or 0)


def command_submission(words: Sequence[str]) -> Submission:
    """A command that would be started inside of an allocation, whose variables count where they are."""
    if not words:
        raise ConfigError("no command after --")
    options: dict[str, Given] = {}
    problems: list[Finding] = []
    if os.path.basename(words[0]) == "srun":
        parsed = parse_options(words[1:], "srun")
        problems = [error("options", problem, Place("command line")) for problem in parsed.problems]
        sizes = step_sizes(parsed.options, os.environ)
        options["nodes"] = Given(str(sizes.nodes), f"-N {sizes.nodes}")
        options["ntasks"] = Given(str(sizes.tasks), f"-n {sizes.tasks}")
    return Submission("command line", shlex.join(words) + "\n", (), options, tuple(words), False, tuple(problems))
