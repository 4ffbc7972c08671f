"""Check a job before submission (`tools/preflight.py check SCRIPT`), on a login node."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.settings import checkpoint_bytes, settings_to_take
from megatron.config import Config, parse_args
from megatron.config.duration import duration_s, show_duration
from megatron.config.io import is_same_folder
from megatron.config.option import MOST, Parser
from megatron.data.tokenizer import Tokenizer, with_vocabulary
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.layout import candidate_of
from megatron.planner.memory import host_bytes, memory_of_ranks, process_bytes
from megatron.planner.placement import with_shards_of_node
from megatron.planner.run_checks import examine
from megatron.planner.timing import dispatch_choice, estimate
from megatron.planner.trace import cached_sizes, sized
from megatron.training.run.process import EXIT_USER_ERROR
from megatron.training.run.schedules import (
    BatchSchedule,
    Progress,
    planned_samples,
    run_costs,
    total_iterations,
)
from megatron.untrusted import read_bytes

USAGE = """preflight.py check [--cluster NAME] [sbatch's options] SCRIPT [ARGUMENT ...]
       preflight.py check [--cluster NAME] [sbatch's options] SCRIPT -- COMMAND ...     (a script of another project)
       preflight.py check [--cluster NAME] -- COMMAND ..."""
DESCRIPTION = """\
Check a job before it is submitted. Runs on a login node, without GPUs. Type `preflight.py check` instead of `sbatch`.

  tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
  tools/preflight.py check -- srun -N 2 -n 16 python pretrain_gpt.py --preset gpt-22b ...

Job options come from the command line, the environment and #SBATCH lines; they are also checked with sbatch --test-only
if Slurm is installed. A script that sources examples/frontier/job.sh is run with DRY_RUN=1: it prints its training
command instead of starting it, but its other commands are executed. Any other script is only read: give its training
command after --. The training command is resolved as in the job, and checked against memory, limits and files on disk.

Exit codes: 0 no errors; 2 errors."""
_OURS = re.compile(
    r"^\s*(?:source|\.)\s.*examples/frontier/(job|allocation|experiment)\.sh", re.MULTILINE
)
# Share of memory above which to warn: the runtime and the communication library take a few
# gigabytes.
_TIGHT = 0.9
_LETTERS = dict(A="account", D="chdir", J="job-name", N="nodes", p="partition", q="qos", t="time")
_NO_VALUE = (
    "hold overcommit oversubscribe quiet verbose version help contiguous requeue no-requeue "
    "parsable test-only usage use-min-nodes spread-job reboot ignore-pbs no-kill exclusive "
    "get-user-env nice propagate x11 wait H O s Q v V h k I W"
).split()
# Messages from sbatch if no controller is reachable.
_NO_SLURM = re.compile(
    r"contact|connect|configuration source|resolve|munge|timed out|plugin|slurm\.conf",
    re.IGNORECASE,
)


class OptionValue(NamedTuple):
    """Value of a Slurm option ("" for an option without a value), and where it was given."""

    value: str
    where: str


Options = dict[str, OptionValue]


@dataclass
class CheckedJob:
    """A job with the findings of the check.

    options           Slurm options by name
    environ           environment variables for its training
    nodes, tasks      numbers of nodes and processes of the training
    cluster           machine to check against; None: not known
    words             flags in the training command; None: no command was found
    config            settings of the training; None: there is no command, or it is invalid
    tokenizer         tokenizer of the training, if it can be read
    vocabulary_known  whether the vocabulary's size is known
    failure           how the dry run of its script failed; "" if it did not
    known             facts to print, by name
    findings          (level, subject, text): level is error, warning or note
    unchecked         what was not checked
    """

    options: Options
    environ: Mapping[str, str]
    nodes: int = 1
    tasks: int = 1
    cluster: Cluster | None = None
    words: list[str] | None = None
    config: Config | None = None
    tokenizer: Tokenizer | None = None
    vocabulary_known: bool = True
    failure: str = ""
    known: dict[str, str] = field(default_factory=dict)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def find(self, level: str, about: str, text: str) -> None:
        """Record a finding; if `about` is a Slurm option, also record where it was given."""
        where = f" [{self.options[about].where}]" if about in self.options else ""
        self.findings.append((level, about, text + where))

    error = partialmethod(find, "error")
    warn = partialmethod(find, "warning")
    note = partialmethod(find, "note")

    def value(self, name: str) -> str | None:
        """Return the value of a Slurm option."""
        return self.options[name].value if name in self.options else None

    @property
    def asked_nodes(self) -> int:
        """Number of nodes that the job requests."""
        return count(self.value("nodes")) or 1

    def is_local(self, path: str) -> bool:
        """Return whether a path is on node-local disks, which a login node cannot see."""
        nvme = self.cluster.nvme_path.split("$")[0].rstrip("/") if self.cluster else ""
        return bool(nvme) and Path(path).is_relative_to(nvme)


def run(argv: Sequence[str]) -> int:
    """Check a job and print the report; return the exit code.

    The flags of the check itself precede the script or --. Raises ConfigError.
    """
    parser = Parser("preflight.py check", usage=USAGE, description=DESCRIPTION)
    text = "machine to check against, or none (default: MEGATRON_CLUSTER, SITE_CLUSTER, the job's)"
    parser.add_argument("--cluster", metavar="NAME|FILE", help=text)
    _, at = parse_options(argv)
    at -= at > 0 and argv[at - 1] == "--"
    args, rest = parser.parse_known_args(argv[:at])
    job = check([*rest, *argv[at:]], args.cluster)
    print(*lines(job), sep="\n")
    return EXIT_USER_ERROR if any(level == "error" for level, _, _ in job.findings) else 0


def check(words: Sequence[str], cluster: str | None = None) -> CheckedJob:
    """Check what `sbatch WORDS`, or `-- COMMAND`, would start. Raises ConfigError."""
    options, at = parse_options(words)
    if at == len(words):
        raise ConfigError("no script: give one as for sbatch, or a command after --")
    if at and words[at - 1] == "--":
        job = CheckedJob(options, os.environ)
        read_command(job, words[at:])
    else:
        job = read_script(words, options, at)
    named = job.environ.get("MEGATRON_CLUSTER")
    if job.words is not None:  # resolve as the ranks would
        try:
            flags = ["--cluster", named, *job.words] if named else job.words
            job.config = parse_args(flags, job.tasks, checkpoint=settings_to_take)
        except ConfigError as problem:
            job.error("configuration", str(problem))
    known = (cluster, os.environ.get("MEGATRON_CLUSTER"), os.environ.get("SITE_CLUSTER"), named)
    cluster = next(filter(None, known), job.config.parallel.cluster if job.config else None)
    if cluster not in (None, "none"):
        job.cluster = load_cluster(cluster)
    else:
        job.unchecked.append("limits, memory and cost: no machine is given (--cluster)")
    check_options(job)
    if job.config is not None:
        check_training(job, job.config)
        check_run(job, job.config)
    if job.failure and not any(level == "error" for level, _, _ in job.findings):
        job.error("script", job.failure)
    job.findings.sort(key=lambda finding: ("error", "warning", "note").index(finding[0]))
    return job


def lines(job: CheckedJob) -> Iterator[str]:
    """Yield the report: facts, findings, and what was not checked."""
    for name in ("account", "partition", "qos", "nodes", "time"):
        if name in job.options:
            yield f"{name:<12}{job.options[name].value}   ({job.options[name].where})"
    yield from (f"{name:<12}{text}" for name, text in job.known.items())
    yield from (f"{level}: {about}: {text}" for level, about, text in job.findings)
    yield from (f"not checked: {text}" for text in job.unchecked)
    n = Counter(level for level, _, _ in job.findings)
    unchecked = len(job.unchecked)
    yield f"{n['error']} error(s), {n['warning']} warning(s), {unchecked} item(s) not checked"


# -- options of Slurm ------------------------------------------------------------------------------


def parse_options(words: Sequence[str], where: str = "command line") -> tuple[Options, int]:
    """Return the leading options in `words` by name or letter, and the position of the next word.

    An unknown option is assumed to take a value.

    >>> parse_options(["-N2", "--time", "1:00", "--requeue", "job.sh", "-x"])[1]
    4
    """
    options: Options = {}
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        name, equals, value = (
            word.removeprefix("--").partition("=") if word[1] == "-" else (word[1], "", word[2:])
        )
        if name not in _NO_VALUE and not equals and not value and at < len(words):
            value = words[at]
            at += 1
        options[_LETTERS.get(name, name)] = OptionValue(value, where)
    return options, at


def directives(text: str) -> tuple[Options, list[str]]:
    """Return the options in a script's #SBATCH lines, and problems with these lines.

    Later lines override earlier ones. Slurm ignores lines after the first command.
    """
    merged = Options()
    problems = list[str]()
    commands = False
    for number, line in enumerate(text.splitlines(), 1):
        if not re.match(r"#SBATCH(\s|$)", line):
            commands |= bool(line.strip()) and not line.lstrip().startswith("#")
        elif commands:
            problems.append(
                f"line {number}: {line} comes after the first command, where Slurm ignores it"
            )
        else:
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError as error:
                problems.append(f"line {number}: {error}")
                continue
            options, at = parse_options(words, f"line {number}")
            merged |= options
            if at < len(words):
                problems.append(f"line {number}: '{words[at]}' does not belong to an option")
    return merged, problems


def winning(line: Options, environ: Mapping[str, str], script: Options) -> Options:
    """Merge options: the command line takes precedence, then SBATCH_ variables, then the script."""
    variables = {
        name.replace("timelimit", "time").replace("_", "-"): OptionValue(value, f"variable {key}")
        for key, value in environ.items()
        if (name := key.lower().removeprefix("sbatch_")) != key.lower() and value
    }
    return script | variables | line


def count(text: str | None) -> int | None:
    """Read a node or task count: "16", or "16-20" (the first number); None for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9})(-\d+)?\s*", text or "")
    return int(match[1]) if match else None


def output_of(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: str | None = None
) -> tuple[int, list[str]]:
    """Run a command; return its exit code and output lines. Raises OSError and SubprocessError."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=120.0,
        env=env,
        cwd=cwd,
    )
    return done.returncode, done.stdout.strip().splitlines()


def ask_slurm(job: CheckedJob, words: Sequence[str]) -> None:
    """Check with `sbatch --test-only WORDS`, which submits nothing.

    sbatch takes the machine's partitions and limits into account and, with Slurm accounting, the
    limits of the user's account.
    """
    if "account" not in job.options:
        job.warn("account", "no -A or SBATCH_ACCOUNT: Slurm uses your default account or refuses")
    job.unchecked.append("the account's remaining node-hours, and the wait in the queue")
    try:
        code, output = output_of(["sbatch", "--test-only", *words])
        message = " / ".join(output[-3:]).replace("sbatch: ", "").replace("error: ", "")
    except (OSError, subprocess.SubprocessError) as error:
        code = 1
        message = f"sbatch cannot be run to contact Slurm: {error}"
    if code and _NO_SLURM.search(message):
        job.unchecked.append(f"account, partition and limits by sbatch --test-only: {message}")
    else:
        job.find("error" if code else "note", "sbatch --test-only", message)


def check_options(job: CheckedJob) -> None:
    """Check nodes and wall time against the machine's limits, and options that depend on others."""
    cluster = job.cluster
    limit = job.value("time")
    wall_s = duration_s(limit or "")
    if limit is None:
        if "nodes" in job.options:
            job.warn("time", "no -t: the partition's default applies. Add #SBATCH -t HH:MM:SS")
    elif wall_s is None and limit not in ("UNLIMITED", "INFINITE", "0"):
        job.error("time", f"{limit} is not a time: give minutes, HH:MM:SS or D-HH:MM:SS")
    if cluster is not None and {"time", "nodes"} & set(job.options):
        nodes = job.asked_nodes
        try:
            most_s = 3600 * cluster.wall_limit_hours(
                nodes, job.value("partition"), job.value("qos")
            )
            if wall_s is not None and wall_s > most_s:
                text = f"more than the limit for {nodes} nodes on {cluster.name}"
                job.error("time", f"{limit} is {text}: request at most {show_duration(most_s)}")
        except ConfigError as problem:
            job.error("nodes", str(problem))
    if "requeue" in job.options and not (job.value("open-mode") or "").startswith("a"):
        job.warn("requeue", "no --open-mode=append: a requeued job overwrites its first log")


# -- the script ------------------------------------------------------------------------------------


def read_script(words: Sequence[str], line: Options, at: int) -> CheckedJob:
    """Read a script's options and training command (by a dry run if it uses job.sh).

    The script is `words[at]`. Raises ConfigError.
    """
    script = words[at]
    arguments = list(words[at + 1 :])
    content = read_bytes(script, 1 << 24, error=ConfigError)
    text = content.decode(errors="replace")
    options, problems = directives(text)
    job = CheckedJob(winning(line, os.environ, options), os.environ)
    job.nodes = job.asked_nodes
    for problem in problems:
        job.error("options", problem)
    if not text.startswith("#!"):
        job.error(
            "script", "the first line names no interpreter, which sbatch requires: add #!/bin/bash"
        )
    ask_slurm(job, words)
    checks = _OURS.search(text)
    if checks and checks[1] == "job":
        dry_run(job, content, arguments)
    elif checks:
        tool = "tune.py" if checks[1] == "allocation" else "run_experiment.py"
        job.unchecked.append(
            f"the runs that tools/{tool} starts: {script} --dry-run shows them and their cost"
        )
    elif "--" in arguments:
        read_command(job, arguments[arguments.index("--") + 1 :])
    else:
        text = "only its #SBATCH lines are checked: give its training command after --"
        job.warn("script", f"it does not source examples/frontier/job.sh, so {text}")
    return job


def dry_run(job: CheckedJob, content: bytes, arguments: Sequence[str]) -> None:
    """Run a copy of a script that uses job.sh, with DRY_RUN=1 and the job's Slurm variables.

    Like Slurm, this runs it in the folder of submission or of --chdir. Raises ConfigError if the
    script cannot be run or its output cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-check-") as folder:
        copy = Path(folder, "slurm_script")
        copy.write_bytes(content)
        Path(folder, "hsn0").mkdir()  # makes env.sh behave as on a node with Slingshot
        environ = os.environ | {
            "DRY_RUN": "1",
            "SLURM_JOB_NUM_NODES": str(job.nodes),
            "SLURM_JOB_NAME": job.value("job-name") or "",
            "SLURM_SUBMIT_DIR": os.getcwd(),
            "SBATCH_ACCOUNT": job.value("account") or "",
            "SITE_NET_FOLDER": folder,
        }
        command = ["bash", str(copy), *arguments]
        try:
            code, output = output_of(command, environ, job.value("chdir"))
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"the script cannot be run: {error}") from error
    for line in output:
        if match := re.match(r" job \S+: (ERROR|WARNING|not checked): (.*)", line):
            if match[1] == "not checked":
                job.unchecked.append(match[2])
            else:
                job.find(match[1].lower(), "script", match[2])
        elif line.startswith(("+ export ", "+ srun ")):
            try:
                words = shlex.split(line)[1:]
            except ValueError as error:
                raise ConfigError(f"{line[:200]} cannot be read: {error}") from error
            if words[0] == "export":
                pairs = (word.split("=", 1) for word in words[1:] if "=" in word)
                job.environ = os.environ | dict(pairs)
            elif "pretrain_gpt.py" in line:
                read_command(job, words)
    if code or job.words is None:
        what = f"ends with exit code {code}" if code else "starts no pretrain_gpt.py"
        said = [line for line in output if re.match(r"\w+Error: ", line)] or output[-3:]
        job.failure = f"its dry run {what}: {' / '.join(said)}"


def read_command(job: CheckedJob, command: Sequence[str]) -> None:
    """Read the flags in a training command, and its numbers of nodes and processes.

    These come from the flags of srun or torchrun; without a launcher, there is one process.
    """
    runs = [bool(re.fullmatch(r"(.*/)?pretrain_gpt\w*(\.py)?", word)) for word in command]
    if not any(runs):
        job.error("command", f"it does not run pretrain_gpt.py: {shlex.join(command)[:200]}")
        return
    at = runs.index(True)
    job.words = list(command[at + 1 :])
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags = "-N --nodes --nnodes, -n --ntasks, --ntasks-per-node, --nproc-per-node --nproc_per_node"
    for names in flags.split(", "):
        parser.add_argument(*names.split(), dest=names, nargs="?", type=count)
    nodes, tasks, each, processes = vars(parser.parse_known_args(command[:at])[0]).values()
    if os.path.basename(command[0]) == "srun":
        job.nodes = nodes or (math.ceil((tasks or 1) / each) if each else job.nodes)
    else:
        job.nodes = nodes or 1
    job.tasks = (tasks or job.nodes * (each or 1)) * (processes or 1)


# -- the training ----------------------------------------------------------------------------------


def check_network(job: CheckedJob, cluster: Cluster) -> None:
    """Check the number of processes, and variables of RCCL's network plugin on Slingshot.

    The variables' sources are in examples/frontier/env.sh and docs/frontier-environment.md.
    """
    if job.tasks != job.nodes * cluster.devices_per_node:
        where = f"{job.nodes} nodes of {cluster.devices_per_node} devices"
        job.warn("tasks", f"{job.tasks} processes on {where}")
    if job.nodes == 1 or not any(nic.startswith("hsn") for nic in cluster.nics):
        return
    if job.environ.get("NCCL_NET", "Socket") in ("", "Socket"):
        text = "without the plugin RCCL falls back to TCP. examples/frontier/env.sh sets NCCL_NET"
        job.warn("network", f"NCCL_NET is not OFI: {text}")
    if job.environ.get("FI_MR_CACHE_MONITOR") == "memhooks":
        job.error("network", "FI_MR_CACHE_MONITOR=memhooks deadlocks with RCCL: use kdreg2")


def check_training(job: CheckedJob, config: Config) -> None:
    """Check the training's tokenizer, network, files, memory and cost."""
    if job.cluster is not None and "gloo" not in (job.words or ()):
        check_network(job, job.cluster)
    for notice in config.notices:
        job.note("configuration", notice)
    config, tokenizer, unknown = with_vocabulary(config)
    config = sized(config)
    if unknown:
        level = "note" if config.tokenizer.tokenizer_type is None else "error"
        job.find(level, "tokenizer", f"{unknown}: assuming {config.model.vocab_size} entries")
    job.known["processes"] = f"{job.tasks} on {job.nodes} node(s)"
    if spares := config.training.spare_ranks:
        job.known["processes"] += f", of which {spares} wait to replace lost ones"
    ends_with_node = "nodes" in job.options and not {"no-kill", "k"} & set(job.options)
    if config.training.max_restarts and job.nodes > 1 and ends_with_node:
        text = "Slurm ends the job when a node is lost, instead of a restart within it"
        job.warn("no-kill", f"no --no-kill: {text}")
    job.known["layout"] = candidate_of(config).write(math.ceil(job.tasks / job.nodes))
    job.tokenizer = tokenizer
    job.vocabulary_known = not unknown
    for check_it in (check_data, check_saving, check_memory, check_cost):
        about = check_it.__name__.removeprefix("check_")
        try:
            check_it(job, config)
        except ImportError as problem:  # on a login node without torch
            job.unchecked.append(f"{about}: {problem}")
        except (MegatronError, OSError) as problem:
            checkpoint = isinstance(problem, CheckpointError)
            job.error("checkpoint" if checkpoint else about, str(problem))
    job.unchecked += (
        "quotas of the file system (lfs quota)",
        "whether the code runs with these flags and fits (the figures above are predictions): add "
        f"--dry-run --world-size {config.parallel.world_size} --cluster NAME to the flags of pretrain_gpt.py",
        "compute nodes and their network: PREFLIGHT=1 of job.sh tests them when the job starts",
    )


def check_run(job: CheckedJob, config: Config) -> None:
    """Add what would end the run before its first step, unless the other checks have found it."""
    run = examine(config)
    for about, problem in run.problems:
        if not any(str(problem) in text for _, _, text in job.findings):
            job.error(about, str(problem))
    job.unchecked += run.unchecked


def check_data(job: CheckedJob, config: Config) -> None:
    """Open the token files, compare them with the tokenizer, and foresee the epochs of each.

    Raises the errors of `forecast.check_data`, and CheckpointError.
    """
    from megatron.data import datasets, forecast
    from megatron.training.run.resume_data import planned_data

    if not (prefixes := datasets.data_prefixes(config)):
        return
    job.unchecked.append(
        "whether the data's indices are built (tools/build_index.py with the same flags builds "
        "them)"
    )
    if local := [prefix for prefix in prefixes if job.is_local(prefix)]:
        job.unchecked.append(f"data {', '.join(local)}, on node-local disks")
        return
    config, continued = planned_data(config)
    samples = planned_samples(config, BatchSchedule.from_config(config))[0]
    if not job.vocabulary_known:  # so that no id counts as out of range
        config = config.replace(vocab_size=MOST)
    foreseen, notices = forecast.check_data(config, job.tokenizer, samples, continued=continued)
    for notice in notices:
        job.note("data", notice)
    if foreseen.sources:
        indent = "\n" + " " * 12
        job.known["data"] = indent.join([foreseen.summary, *foreseen.table])
    if foreseen.warning:
        job.warn("data", foreseen.warning)


def check_saving(job: CheckedJob, config: Config) -> None:
    """Check the checkpoint folder, its free space, and the flags for saving and resuming."""
    save = config.checkpoint.save
    load = config.checkpoint.load
    keep = config.checkpoint.keep_last
    if not save:
        job.warn("saving", "no --save: the model is lost. Give --save FOLDER --load FOLDER")
        return
    if job.is_local(save):
        job.error("saving", f"--save {save} is on node-local disks, which are erased after the job")
        return
    if not is_same_folder(load, save):
        text = f"--load is {load or 'absent'}, --save is {save}: a restarted job does not resume"
        job.warn("saving", f"{text}. Give --load {save}")
    if config.checkpoint.save_interval is None and config.checkpoint.save_interval_minutes is None:
        job.warn("saving", "no --save-interval: the run saves only at its end")
    folder = Path(save).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        job.error("saving", f"--save {save} cannot be written: no write permission in {folder}")
    size = checkpoint_bytes(config, cached_sizes(config))
    free = shutil.disk_usage(folder).free
    job.known["checkpoint"] = f"{size / 1e9:.1f} GB in {save}"
    most = (1 if keep is None else keep) + 1  # the next one is written before the oldest is deleted
    if most * size > free:
        text = f"{most} checkpoints of {size / 1e9:.1f} GB do not fit into the {free / 1e9:.0f} GB"
        job.error("saving", f"{text} that are free on the file system of {folder}")


def check_memory(job: CheckedJob, config: Config) -> None:
    """Compare the predicted device and host memory with the machine's, if the machine is known.

    Raises ConfigError for ZeRO shards per node in a layout that does not fit on the machine.
    """
    if (cluster := job.cluster) is None:
        return
    config = with_shards_of_node(config, cluster)
    peak = max(rank.total for rank in memory_of_ranks(config, cluster.device_type))
    peak_gib = process_bytes(peak, cluster.device_type) / 2**30
    text = f"{peak_gib:.1f} of {cluster.memory_gib:g} GiB on the device with the highest peak"
    job.known["memory"] = f"{text}, predicted"
    if peak_gib > _TIGHT * cluster.memory_gib:
        job.find(
            "error" if peak_gib > cluster.memory_gib else "warning",
            "memory",
            f"{text}, predicted, without the runtime: use more tensor or pipeline parallelism, or "
            "--recompute-granularity full",
        )
    ranks = range(config.parallel.pipeline_model_parallel_size)
    on_host = max(host_bytes(config, rank, cluster.device_type) for rank in ranks)
    on_host_gib = on_host * min(config.parallel.world_size, cluster.devices_per_node) / 2**30
    if cluster.host_memory_gib is not None and on_host_gib > cluster.host_memory_gib:
        text = f"{on_host_gib:.1f} GiB on a node, which has {cluster.host_memory_gib:g}"
        job.error("host memory", f"--cpu-offload keeps {text}: use more nodes")


def check_cost(job: CheckedJob, config: Config) -> None:
    """Estimate the cost of the remaining run, if the machine is known.

    Raises ConfigError for a layout that does not fit on the machine, and CheckpointError.
    """
    if (cluster := job.cluster) is None:
        return
    from megatron.checkpoint.find import CheckpointChoice, find, open_checkpoint, required
    from megatron.checkpoint.settings import check_architecture
    from megatron.training.run.checkpoints import progress_from

    settings = config.checkpoint
    progress = Progress()
    choice = find(settings.load, settings.load_tag) if settings.load else CheckpointChoice(None)
    if choice.folder or choice.rejected or (settings.load and settings.exit_on_missing_checkpoint):
        checkpoint = open_checkpoint(required(settings.load or "", choice))
        check_architecture(checkpoint.config, config, str(checkpoint.folder))
        if not settings.finetune and not settings.reset_iteration:
            progress = progress_from(checkpoint.state["state"], checkpoint.folder)
    end = total_iterations(config, BatchSchedule.from_config(config), progress)
    step = estimate(config, cluster)
    wall_s = duration_s(job.value("time") or "")
    nodes = max(job.nodes, job.asked_nodes)  # spare nodes are charged, too
    costs = run_costs(config, cached_sizes(config), nodes, progress)
    costs = costs.at(step.tokens_per_s, progress.consumed_tokens)
    seconds = costs.seconds or 0.0
    hours = costs.node_hours or 0.0
    job.known["a step"] = step.words
    job.known["the run"] = costs.size
    jobs = f", {math.ceil(seconds / wall_s):,} job(s) of {job.value('time')}" if wall_s else ""
    job.known["it costs"] = (
        f"{seconds / 86400:,.2f} days and {hours:,.0f} node-hours{jobs}: iterations {progress.iteration:,} to "
        f"{end:,} (predicted), without starts, saves and the queue"
    )
    if (dispatch := dispatch_choice(step)) is not None:
        job.known["dispatch"] = dispatch.words
        if dispatch.other_s < dispatch.seconds:
            job.warn("dispatch", dispatch.words)
    if seconds > 30 * 86400:
        text = f"the run takes {seconds / 86400:,.0f} days on {job.nodes} node(s)"
        job.warn("cost", f"{text}: shorten it (--train-tokens, --train-iters), or use more nodes")
