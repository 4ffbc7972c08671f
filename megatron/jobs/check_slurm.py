"""What a job asks Slurm for, by sbatch's command line, SBATCH_ variables and #SBATCH lines, and what it says."""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LETTERS = {
    "A": "account", "C": "constraint", "D": "chdir", "J": "job-name", "N": "nodes", "c": "cpus-per-task", "n": "ntasks",
    "p": "partition", "q": "qos", "t": "time",
}  # fmt: skip
"""Letters of the options that are read here."""
_NO_VALUE = frozenset((
    "hold", "overcommit", "oversubscribe", "quiet", "verbose", "version", "help", "contiguous", "requeue", "no-requeue",
    "parsable", "test-only", "usage", "use-min-nodes", "spread-job", "reboot", "ignore-pbs", "no-kill", "exclusive",
    "get-user-env", "nice", "propagate", "x11", "immediate", "kill-on-bad-exit", "overlap", "exact", "label", "pty",
    "unbuffered", "disable-status", "multi-prog", "compress", "bcast", *"HOsQvVhkIKluEX",
))  # fmt: skip
_OWN_NO_VALUE = {"sbatch": {"wait", "W"}, "srun": set[str](), "check": {"wait", "W", "json", "strict"}}
_VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_CONSTRAINT": "constraint", "SBATCH_JOB_NAME": "job-name",
    "SBATCH_NETWORK": "network", "SBATCH_OPEN_MODE": "open-mode", "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos",
    "SBATCH_REQUEUE": "requeue", "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
_ANSWER_S = 60.0
# sbatch says so where there is no controller, or none that answers.
_NO_SLURM = re.compile(
    r"contact|connect|configuration source|resolve|munge|timed out|plugin|slurm\.conf", re.IGNORECASE
)


class Given(NamedTuple):
    """The value of an option ("" for one without), and where it is given."""

    value: str
    where: str


Options = dict[str, Given]


def parse_options(words: Sequence[str], where: str = "command line", program: str = "sbatch") -> tuple[Options, int]:
    """(the options at the beginning of `words` by long name, or letter, and the position of the first other word). An
    option that is not known takes a value.

    >>> parse_options(["-N2", "--time", "1:00", "--requeue", "job.sh", "-x"])[1]
    4
    """
    found: Options = {}
    bare = _NO_VALUE | _OWN_NO_VALUE[program]
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word, at = words[at], at + 1
        if word == "--":
            break
        name, equals, value = word.removeprefix("--").partition("=") if word[1] == "-" else (word[1], "", word[2:])
        while word[1] != "-" and name in bare and value:  # -Hv
            found[name] = Given("", where)
            name, value = value[0], value[1:]
        if name not in bare and not equals and not value and at < len(words):
            value, at = words[at], at + 1
        found[LETTERS.get(name, name)] = Given(value, where)
    return found, at


def directives(text: str) -> tuple[Options, list[str]]:
    """The #SBATCH lines of a script, later ones over earlier ones, and what is wrong with some. Slurm reads none after
    the first command."""
    found, problems, commands = Options(), list[str](), False
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"#SBATCH(\s|$)", line):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                problems.append(f"line {number}: {error}")
                continue
            if commands:
                problems.append(f"line {number}: {line} stands after the first command, where Slurm does not read it")
                continue
            options, at = parse_options(words, f"line {number}")
            found |= options
            if at < len(words):
                problems.append(f"line {number}: '{words[at]}' belongs to no option")
        elif line.strip() and not line.lstrip().startswith("#"):
            commands = True
    return found, problems


def winning(line: Options, environ: Mapping[str, str], script: Options) -> Options:
    """The options that hold: those of the command line win over variables, and they over the script's lines. --requeue
    and --no-requeue are one setting."""
    variables = {name: Given(environ[key], f"variable {key}") for key, name in _VARIABLES.items() if environ.get(key)}
    options = dict(script)
    for layer in (variables, line):
        if {"requeue", "no-requeue"} & set(layer):
            options.pop("requeue", None)
            options.pop("no-requeue", None)
        options |= layer
    return options


def count(text: str) -> int | None:
    """A number of nodes or tasks: "16", "16-20" (the first), "2k"; None for anything else."""
    match = re.fullmatch(r"(\d{1,9})([km])?(?:-\d+[km]?)?", text.strip(), re.IGNORECASE)
    return None if match is None else int(match[1]) * {"k": 1024, "m": 1024**2}.get((match[2] or "").lower(), 1)


class Verdict(NamedTuple):
    """What Slurm says: whether it would take the job (None: it was not asked), and its words."""

    takes: bool | None
    said: str


def ask_sbatch(words: Sequence[str]) -> Verdict:
    """`sbatch --test-only`: it submits nothing, and knows the machine's partitions, limits and, where Slurm keeps
    accounts, the user's."""
    if shutil.which("sbatch") is None:
        return Verdict(None, "there is no sbatch here")
    code, said = ask("sbatch", "--test-only", *words)
    said = " / ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.splitlines()[-3:])
    return Verdict(None if code and _NO_SLURM.search(said) else code == 0, said)


def known_accounts() -> list[str]:
    """The user's accounts; none where Slurm keeps no accounts, or does not answer."""
    if shutil.which("sacctmgr") is None:
        return []
    code, said = ask("sacctmgr", "-nP", "show", "associations", f"user={getpass.getuser()}", "format=account")
    return [] if code else sorted(set(said.split()))


def ask(*command: str) -> tuple[int, str]:
    """(exit code, output) of a program that asks Slurm or a file system, which may not answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_ANSWER_S,
            text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return 1, f"cannot contact: {error}"
    return done.returncode, done.stdout.strip()
