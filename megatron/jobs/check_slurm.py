"""What a job asks Slurm for, by sbatch's command line, SBATCH_ variables and #SBATCH lines, and what Slurm says."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LETTERS = {
    "A": "account", "D": "chdir", "J": "job-name", "N": "nodes", "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip
_NO_VALUE = frozenset((
    "hold", "overcommit", "oversubscribe", "quiet", "verbose", "version", "help", "contiguous", "requeue", "no-requeue",
    "parsable", "test-only", "usage", "use-min-nodes", "spread-job", "reboot", "ignore-pbs", "no-kill", "exclusive",
    "get-user-env", "nice", "propagate", "x11", "wait", *"HOsQvVhkIW",
))  # fmt: skip
_VARIABLES = {
    f"SBATCH_{name.upper().replace('-', '_')}": name
    for name in ("account", "job-name", "network", "open-mode", "partition", "qos")
} | {"SBATCH_TIMELIMIT": "time"}
_ANSWER_S = 60.0
# What sbatch says where no controller answers.
_NO_SLURM = re.compile(
    r"contact|connect|configuration source|resolve|munge|timed out|plugin|slurm\.conf", re.IGNORECASE
)


class Given(NamedTuple):
    """The value of an option ("" for one without), and where it is given."""

    value: str
    where: str


Options = dict[str, Given]


def parse_options(words: Sequence[str], where: str = "command line") -> tuple[Options, int]:
    """Return the options at the beginning of `words`, by long name or letter, and the position of the first other word.

    An unknown option takes a value.

    >>> parse_options(["-N2", "--time", "1:00", "--requeue", "job.sh", "-x"])[1]
    4
    """
    found: Options = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, at = words[at], at + 1
        if word == "--":
            break
        name, equals, value = word.removeprefix("--").partition("=") if word[1] == "-" else (word[1], "", word[2:])
        if name not in _NO_VALUE and not equals and not value and at < len(words):
            value, at = words[at], at + 1
        found[_LETTERS.get(name, name)] = Given(value, where)
    return found, at


def directives(text: str) -> tuple[Options, list[str]]:
    """Return the options of a script's #SBATCH lines, later ones over earlier ones, and what is wrong with some lines.

    Slurm reads none after the first command.
    """
    found, problems, commands = Options(), list[str](), False
    for number, line in enumerate(text.splitlines(), 1):
        if not re.match(r"#SBATCH(\s|$)", line):
            commands |= bool(line.strip()) and not line.lstrip().startswith("#")
        elif commands:
            problems.append(f"line {number}: {line} stands after the first command, where Slurm does not read it")
        else:
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                problems.append(f"line {number}: {error}")
                continue
            options, at = parse_options(words, f"line {number}")
            found |= options
            if at < len(words):
                problems.append(f"line {number}: '{words[at]}' belongs to no option")
    return found, problems


def winning(line: Options, environ: Mapping[str, str], script: Options) -> Options:
    """Return the options that hold: the command line wins over variables, and they over the script's lines."""
    variables = {name: Given(environ[key], f"variable {key}") for key, name in _VARIABLES.items() if environ.get(key)}
    return script | variables | line


def count(text: str | None) -> int | None:
    """Read a number of nodes or tasks, "16" or "16-20" (the first); None for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9})(-\d+)?\s*", text or "")
    return int(match[1]) if match else None


def ask_sbatch(words: Sequence[str]) -> tuple[bool | None, str]:
    """Return whether Slurm would take the job (None: it cannot be asked), and its words: `sbatch --test-only` submits
    nothing, and knows the machine's partitions and limits and, where Slurm keeps accounts, the user's."""
    try:
        done = subprocess.run(
            ["sbatch", "--test-only", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_ANSWER_S, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"it cannot be asked here: {error}"
    said = " / ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stdout.splitlines()[-3:])
    return (None if done.returncode and _NO_SLURM.search(said) else done.returncode == 0), said
