"""Options of sbatch and srun: from a command line, from SBATCH_ variables and from #SBATCH lines, and which holds.

Names, forms and precedence are those of the manual pages of Slurm 22.05: the command line wins over variables, they
over lines of the script; lines after the first command of the script are not read. Needs only the standard library, and
runs as a program too: `python slurm_options.py WORD...` is prelude.sh asking where the command of an srun begins.
"""
from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# long name -> letter; "" where there is none
_WITH_VALUE = {
    "account": "A", "array": "a", "extra-node-info": "B", "cpus-per-task": "c", "constraint": "C", "dependency": "d",
    "chdir": "D", "error": "e", "nodefile": "F", "gpus": "G", "input": "i", "job-name": "J", "licenses": "L",
    "distribution": "m", "clusters": "M", "nodes": "N", "ntasks": "n", "output": "o", "partition": "p", "qos": "q",
    "core-spec": "S", "time": "t", "nodelist": "w", "exclude": "x", "relative": "r", "threads": "T",
} | dict.fromkeys((
    "accel-bind", "acctg-freq", "batch", "bb", "bbf", "bcast-exclude", "begin", "cluster-constraint", "comment",
    "container", "container-id", "cores-per-socket", "cpu-bind", "cpu-freq", "cpus-per-gpu", "deadline", "delay-boot",
    "epilog", "export", "export-file", "extra", "gid", "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "het-group", "hint", "jobid", "kill-on-invalid-dep", "mail-type",
    "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "mpi", "msg-timeout",
    "network", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "power",
    "prefer", "priority", "profile", "prolog", "reservation", "signal", "slurmd-debug", "sockets-per-node",
    "switches", "task-epilog", "task-prolog", "thread-spec", "threads-per-core", "time-min", "tmp", "tres-bind",
    "tres-per-task", "uid", "wait-all-nodes", "wckey", "wrap",
), "")  # fmt: skip
_WITHOUT = {
    "hold": "H", "overcommit": "O", "oversubscribe": "s", "quiet": "Q", "verbose": "v", "version": "V", "help": "h",
    "preserve-env": "E", "label": "l", "unbuffered": "u", "disable-status": "X", "no-allocate": "Z", "allocate": "",
} | dict.fromkeys((
    "contiguous", "exact", "ignore-pbs", "interactive", "multi-prog", "no-requeue", "overlap", "parsable", "pty",
    "quit-on-interrupt", "reboot", "requeue", "spread-job", "test-only", "usage", "use-min-nodes", "whole", "stepmgr",
), "")  # fmt: skip
_OPTIONAL = {"immediate": "I", "kill-on-bad-exit": "K", "no-kill": "k"} | dict.fromkeys((
    "bcast", "compress", "exclusive", "get-user-env", "nice", "propagate", "resv-ports", "send-libs", "x11",
), "")  # fmt: skip
# What an option's letter or form is in one of the two programs alone.
_OWN = {"sbatch": {"W": ("wait", False)}, "srun": {"W": ("wait", True), "P": ("dependency", True)}}

VARIABLES = {
    "SBATCH_ACCOUNT": "account", "SBATCH_ARRAY_INX": "array", "SBATCH_CLUSTERS": "clusters", "SBATCH_QOS": "qos",
    "SBATCH_CONSTRAINT": "constraint", "SBATCH_CORE_SPEC": "core-spec", "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_DISTRIBUTION": "distribution", "SBATCH_ERROR": "error", "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_EXPORT": "export", "SBATCH_GPU_BIND": "gpu-bind", "SBATCH_GPUS": "gpus", "SBATCH_GRES": "gres",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node", "SBATCH_GPUS_PER_TASK": "gpus-per-task", "SBATCH_HINT": "hint",
    "SBATCH_JOB_NAME": "job-name", "SBATCH_MEM_PER_NODE": "mem", "SBATCH_NETWORK": "network",
    "SBATCH_NO_KILL": "no-kill", "SBATCH_NO_REQUEUE": "no-requeue", "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_OUTPUT": "output", "SBATCH_PARTITION": "partition", "SBATCH_REQUEUE": "requeue",
    "SBATCH_RESERVATION": "reservation", "SBATCH_SIGNAL": "signal", "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_TIMELIMIT": "time",
}  # fmt: skip
_DIRECTIVE = re.compile(r"#SBATCH(\s|$)")


@dataclass(frozen=True)
class Given:
    """One option: its value ("" for a flag), the words as written, and where (a file and a line, or neither)."""

    value: str
    written: str
    where: str = "command line"
    file: str = ""
    line: int = 0


@dataclass
class Parsed:
    """The options of a command line by long name; `at` is the position of the first word that belongs to none."""

    options: dict[str, Given] = field(default_factory=dict)
    at: int = 0
    problems: list[str] = field(default_factory=list)


def _letters(program: str) -> dict[str, tuple[str, str]]:
    """letter -> (long name, 'value', 'flag' or 'optional')."""
    kinds = ((_WITH_VALUE, "value"), (_WITHOUT, "flag"), (_OPTIONAL, "optional"))
    table = {letter: (name, kind) for names, kind in kinds for name, letter in names.items() if letter}
    for letter, (name, takes) in _OWN[program].items():
        table[letter] = (name, "value" if takes else "flag")
    return table


def _long(name: str, program: str) -> tuple[str, str] | None:
    """(full name, kind) of a long option or of an unambiguous beginning of one; None where there is none."""
    known = dict.fromkeys(_WITH_VALUE, "value") | dict.fromkeys(_WITHOUT, "flag") | dict.fromkeys(_OPTIONAL, "optional")
    for own, takes in _OWN[program].values():
        known[own] = "value" if takes else "flag"
    if name in known:
        return name, known[name]
    longer = [n for n in known if n.startswith(name)]
    return (longer[0], known[longer[0]]) if len(longer) == 1 else None


def parse_options(
    words: Sequence[str], program: str = "sbatch", where: str = "command line", file: str = "", line: int = 0
) -> Parsed:
    """The options at the beginning of `words`. What is wrong is a problem, and reading goes on behind it.

    >>> parse_options(["-N2", "--time", "1:00", "job.sh", "-x"]).at
    3
    """
    found = Parsed()
    letters, i = _letters(program), 0

    def give(name: str, value: str, written: str) -> None:
        found.options[name] = Given(value, written, where, file, line)

    while i < len(words):
        word = words[i]
        if word == "--":
            i += 1
            break
        if not word.startswith("-") or word == "-":
            break
        i += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            known = _long(name, program)
            if known is None:
                found.problems.append(f"{program} has no option --{name}")
                continue
            if known[1] == "value" and not equals:
                if i == len(words):
                    found.problems.append(f"{word} takes a value")
                    continue
                value, word, i = words[i], f"{word} {words[i]}", i + 1
            give(known[0], value, word)
            continue
        rest = word[1:]
        while rest:
            letter, rest = rest[0], rest[1:]
            if letter not in letters:
                found.problems.append(f"{program} has no option -{letter} (in {word})")
                break
            name, kind = letters[letter]
            if kind == "flag":
                give(name, "", f"-{letter}")
                continue
            value, rest = rest, ""
            written = f"-{letter}{value}"
            if kind == "value" and not value:
                if i == len(words):
                    found.problems.append(f"-{letter} takes a value")
                    break
                value, written, i = words[i], f"-{letter} {words[i]}", i + 1
            give(name, value, written)
    found.at = i
    return found


def directives(text: str, file: str) -> tuple[Parsed, list[int]]:
    """The #SBATCH lines of a script, later ones over earlier ones, and the lines that sbatch does not read because a
    command comes before them."""
    found, late, commands = Parsed(), list[int](), False
    for number, line in enumerate(text.splitlines(), 1):
        if _DIRECTIVE.match(line):
            if commands:
                late.append(number)
                continue
            try:
                words = shlex.split(line[len("#SBATCH"):], comments=True)
            except ValueError as error:
                found.problems.append(f"line {number}: {error}")
                continue
            parsed = parse_options(words, "sbatch", f"line {number}", file, number)
            found.options |= parsed.options
            found.problems += [f"line {number}: {problem}" for problem in parsed.problems]
            if parsed.at < len(words):
                found.problems.append(f"line {number}: '{words[parsed.at]}' belongs to no option")
        elif line.strip() and not line.lstrip().startswith("#"):
            commands = True
    return found, late


def from_variables(environ: Mapping[str, str]) -> dict[str, Given]:
    """What SBATCH_ variables give. A flag's variable counts where it is empty, yes or a number other than 0; an empty
    constraint or network takes back what the script asks for."""
    options = {}
    for variable, name in VARIABLES.items():
        value = environ.get(variable)
        if value is None:
            continue
        if name in _WITHOUT:
            if not (value in ("", "yes") or (value.isdecimal() and int(value[:18]))):
                continue
            value = ""
        elif not value and name not in ("constraint", "network"):
            continue
        options[name] = Given(value, f"{variable}={value}", f"variable {variable}")
    return options


def winning(line: Mapping[str, Given], variables: Mapping[str, Given], script: Mapping[str, Given]) -> dict[str, Given]:
    """The options that hold. --requeue and --no-requeue are one setting."""
    options = dict(script)
    for layer in (variables, line):
        for name, given in layer.items():
            for other in ({"requeue": ["no-requeue"], "no-requeue": ["requeue"]}).get(name, []):
                options.pop(other, None)
            options[name] = given
    return options


def count(text: str) -> int | None:
    """A number of nodes, tasks or devices: "16", "16-20" (the first), "mi250x:8"; None for anything else.

    >>> count("16-20"), count("gpu:mi250x:8"), count("8k"), count("x")
    (16, 8, 8192, None)
    """
    match = re.fullmatch(r"(?:[A-Za-z_][\w.]*:)*(\d+)(k|m)?(?:-\d+(?:k|m)?)?", text.strip(), re.IGNORECASE)
    return None if match is None else int(match[1]) * {"k": 1024, "m": 1024**2}.get((match[2] or "").lower(), 1)


@dataclass(frozen=True)
class Sizes:
    """Processes of a job or step: nodes, tasks in all, and tasks of a node."""

    nodes: int
    tasks: int
    per_node: int


def step_sizes(options: Mapping[str, Given], environ: Mapping[str, str]) -> Sizes:
    """What an srun with these options starts inside of the job whose variables `environ` has.

    The number of tasks is that of -n or, whatever else is given, that of the job (sbatch sets SLURM_NTASKS also where
    it has only --ntasks-per-node); srun ignores an --ntasks-per-node that does not agree. Found with Slurm 22.05.
    """

    def number(name: str, *variables: str) -> int | None:
        if name in options:
            return count(options[name].value)
        return next((n for v in variables if (n := count(environ.get(v, ""))) is not None), None)

    per_node = number("ntasks-per-node", "SLURM_NTASKS_PER_NODE")
    tasks = number("ntasks", "SLURM_NTASKS")
    nodes = number("nodes", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if nodes is None:
        nodes = -(-tasks // per_node) if tasks and per_node else 1
    if tasks is None:
        tasks = nodes * (per_node or 1)
    return Sizes(nodes, tasks, -(-tasks // nodes) if nodes else 0)


def main(words: list[str]) -> None:
    """Print, for prelude.sh, where the command of an srun begins (-1: nowhere), and what sizes it has."""
    parsed = parse_options(words, "srun")
    sizes = step_sizes(parsed.options, os.environ)
    print(parsed.at if parsed.at < len(words) else -1, sizes.nodes, sizes.tasks, sizes.per_node)


if __name__ == "__main__":
    main(sys.argv[1:])
