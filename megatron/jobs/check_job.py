"""A job before it is submitted: `tools/preflight.py check SCRIPT`, on a login node, without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.size import checkpoint_bytes
from megatron.config import Config, parse_args
from megatron.config.duration import duration_s, show_duration
from megatron.config.option import Parser
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.jobs.check_slurm import (
    Options,
    ask,
    ask_sbatch,
    count,
    directives,
    known_accounts,
    parse_options,
    winning,
)
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.timing import estimate
from megatron.planner.trace import GPT2_VOCABULARY
from megatron.training.failures import EXIT_USER_ERROR
from megatron.training.walltime import Unwatched, WallTime
from megatron.untrusted import is_count, read_bytes

USAGE = """preflight.py check [flags of check] [sbatch's options] SCRIPT [ARGUMENT ...]
       preflight.py check [flags of check] [sbatch's options] SCRIPT -- COMMAND ...      (a script of another project)
       preflight.py check [flags of check] -- COMMAND ..."""
DESCRIPTION = """\
Check a job before it is submitted, on a login node without a GPU: everything is as sbatch would get it, in its place.

  tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
  tools/preflight.py check -- srun -N 2 -n 16 python pretrain_gpt.py --preset gpt-22b ...

The options of the job are read from the command line, variables and #SBATCH lines, and sbatch --test-only is asked
where there is one. A script that sources examples/frontier/job.sh is run here with DRY_RUN=1, so that it prints its
training command and starts nothing: what other commands it has act. Nothing of another script is run: give its training
command after --. That command is resolved as its ranks would, and held against the machine's memory and limits and the
files on disk. What the run costs, and what was not checked, is printed last.

Exit code 0 without errors, 2 with; with --strict, with warnings too."""
_OURS = re.compile(r"^\s*(?:source|\.)\s.*examples/frontier/(job|allocation|experiment)\.sh", re.MULTILINE)
_MOST_BYTES = 1 << 24  # of a script
_DRY_RUN_S = 120.0
_TIGHT = 0.9  # of the memory: the runtime and the communication library take some gigabytes
_LONG_DAYS = 30.0
_ORDER = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """level: error, warning or note; where: in which option's line, file or flag."""

    level: str
    about: str
    text: str
    where: str = ""


@dataclass(frozen=True)
class Cost:
    """A run from `start` to `end` at the planner's seconds for a step; `jobs` one after the other of the wall time."""

    start: int
    end: int
    step_s: float
    days: float
    node_hours: float
    jobs: int | None


@dataclass
class Job:
    """What is known of a job. `environ` is that of its training, `words` the training's own flags."""

    options: Options
    environ: Mapping[str, str]
    cluster: Cluster | None = None
    words: list[str] | None = None
    nodes: int = 1
    tasks: int = 1
    programs: list[str] = field(default_factory=list)
    config: Config | None = None
    memory_gib: float | None = None
    cost: Cost | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def find(self, level: str, about: str, text: str, where: str = "") -> None:
        found = Finding(level, about, text, where)
        if found not in self.findings:
            self.findings.append(found)

    def value(self, name: str) -> str | None:
        return self.options[name].value if name in self.options else None

    def where(self, name: str) -> str:
        return self.options[name].where if name in self.options else "the script's head"

    @property
    def wall_s(self) -> float | None:
        return duration_s(self.value("time") or "")

    def is_local(self, path: str) -> bool:
        """Whether a path is on the nodes' own disks, which a login node does not have."""
        nvme = self.cluster.nvme_path.split("$")[0].rstrip("/") if self.cluster else ""
        return bool(nvme) and Path(path).is_relative_to(nvme)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of check, which stand before the script or --; what sbatch would get is in `rest`."""
    parser = Parser("preflight.py check", usage=USAGE, description=DESCRIPTION)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="machine to check against (default: the script's "
        "MEGATRON_CLUSTER, or this variable, or SITE_CLUSTER; none: no machine)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors")
    _, at = parse_options(argv, program="check")
    dashes = ["--"] if at and argv[at - 1] == "--" else []
    args, rest = parser.parse_known_args(argv[: at - len(dashes)])
    args.rest = [*rest, *dashes, *argv[at:]]
    return args


def run(args: argparse.Namespace) -> int:
    """Check and print; the exit code. Raises ConfigError."""
    job = check(args.rest, args.cluster)
    if args.json:
        print(json.dumps(to_dict(job), indent=1, default=str))
    else:
        print(*lines(job), sep="\n")
    bad = _ORDER[: 2 if args.strict else 1]
    return EXIT_USER_ERROR if any(finding.level in bad for finding in job.findings) else 0


def check(words: Sequence[str], cluster: str | None = None) -> Job:
    """Everything about what `sbatch WORDS`, or `-- COMMAND`, would start. Raises ConfigError."""
    line, at = parse_options(words)
    cluster = cluster or os.environ.get("MEGATRON_CLUSTER") or os.environ.get("SITE_CLUSTER")
    if "wrap" in line:
        raise ConfigError("--wrap is no script: give the command after --, as in preflight.py check -- srun ...")
    if at > 0 and words[at - 1] == "--":
        job, command = Job(line, os.environ), list(words[at:])
        if not command:
            raise ConfigError("no command after --")
        read_command(job, command)
    elif at >= len(words):
        raise ConfigError("no script: give it as to sbatch, or a command after --")
    else:
        job = read_job(words, line, words[at], list(words[at + 1 :]))
    cluster = cluster or job.environ.get("MEGATRON_CLUSTER") or _last(job.words or [], "--cluster")
    job.cluster = load_cluster(cluster) if cluster and cluster != "none" else None
    if job.cluster is None:
        job.unchecked.append("limits, memory and cost: no machine is named (--cluster, MEGATRON_CLUSTER)")
    check_options(job)
    if job.words is not None:
        check_training(job, job.words)
    job.findings.sort(key=lambda finding: _ORDER.index(finding.level))
    return job


# -- the script --------------------------------------------------------------------------------------------------------


def read_job(words: Sequence[str], line: Options, script: str, arguments: list[str]) -> Job:
    """A script with its options; of one of ours the training command, by a dry run. Raises ConfigError."""
    text = read_bytes(script, _MOST_BYTES, error=ConfigError).decode("utf-8", "surrogateescape")
    if "\0" in text:
        raise ConfigError(f"{script} has a zero byte: it is no script")
    options, problems = directives(text)
    job = Job(winning(line, os.environ, options), os.environ)
    job.nodes = count(job.value("nodes") or "1") or 1
    for problem in problems:
        job.find("error", "options", problem, script)
    if not text.startswith("#!"):
        job.find("error", "script", "the first line is no interpreter, and sbatch refuses it: add #!/bin/bash", script)
    ask_slurm(job, words)
    ours = _OURS.search(text)
    if ours is not None and ours[1] == "job":
        dry_run(job, text, arguments)
    elif ours is not None:
        tool = "tune.py" if ours[1] == "allocation" else "run_experiment.py"
        job.unchecked.append(f"the trainings, which tools/{tool} starts: {script} --dry-run shows them and their cost")
    elif "--" in arguments:
        read_command(job, arguments[arguments.index("--") + 1 :])
    else:
        job.find(
            "warning",
            "script",
            "it does not source examples/frontier/job.sh, so nothing of it is run, and only "
            "its #SBATCH lines are checked: give its training command after --",
            script,
        )
    return job


def ask_slurm(job: Job, words: Sequence[str]) -> None:
    """What Slurm itself says: `words` are those of sbatch."""
    account = job.value("account")
    if account is None:
        job.find("warning", "account", "no -A and no SBATCH_ACCOUNT: Slurm takes your default account, or refuses")
    own = known_accounts()
    if account is not None and own and account not in own:
        job.find("error", "account", f"{account} is none of your accounts: {', '.join(own)}", job.where("account"))
    if account is not None and not own:
        job.unchecked.append(f"account {account}: whether it exists and is yours (sacctmgr tells nothing here)")
    job.unchecked.append("whether the account has node-hours left, and how long the job waits in the queue")
    takes, said = ask_sbatch(words)
    if takes is None:
        job.unchecked.append(f"partition, limits and features by Slurm itself: {said}")
    else:
        job.find("note" if takes else "error", "sbatch --test-only", said)


def dry_run(job: Job, text: str, arguments: Sequence[str]) -> None:
    """Run a script of ours with DRY_RUN=1, as Slurm would: a copy of it, from the folder of submission, with the job's
    variables."""
    with tempfile.TemporaryDirectory(prefix="megatron-check-") as folder:
        copy = Path(folder, "slurm_script")
        copy.write_text(text, encoding="utf-8", errors="surrogateescape")
        Path(folder, "hsn0").mkdir()  # so that env.sh sets what it sets on a node with Slingshot
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {
            "DRY_RUN": "1",
            "SLURM_JOB_NUM_NODES": str(job.nodes),
            "SLURM_SUBMIT_DIR": os.getcwd(),
            "SITE_NET_FOLDER": folder,
        }
        for variable, option in (("SLURM_JOB_NAME", "job-name"), ("SBATCH_ACCOUNT", "account")):
            if value := job.value(option):
                environ[variable] = value
        try:
            done = subprocess.run(
                ["bash", str(copy), *arguments],
                env=environ,
                cwd=job.value("chdir"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_DRY_RUN_S,
            )
        except subprocess.TimeoutExpired:
            job.find("error", "script", f"its dry run does not end within {_DRY_RUN_S:g} s")
            return
        except OSError as error:
            raise ConfigError(f"the script cannot be run: {error}") from error
    commands = list[list[str]]()
    for line in [*done.stdout.splitlines(), *done.stderr.splitlines()]:
        if match := re.match(r" job \S+: (ERROR|WARNING|not checked): (.*)", line):
            if match[1] == "not checked":
                job.unchecked.append(match[2])
            else:
                job.find(match[1].lower(), "script", match[2])
        elif line.startswith("+ "):
            commands.append(shlex.split(line[2:]))
    exported = [word.split("=", 1) for command in commands if command[0] == "export" for word in command[1:]]
    known = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "FI_"))}
    job.environ = known | dict(exported)
    trainings = [command for command in commands if command[0] == "srun" and _program(command) is not None]
    if trainings:
        read_command(job, trainings[-1])
    if not trainings or (done.returncode and not any(finding.level == "error" for finding in job.findings)):
        said = " / ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
        start = "" if trainings else " and starts no pretrain_gpt.py"
        job.find("error", "script", f"its dry run ends with exit code {done.returncode}{start}: {said}")


def _program(command: Sequence[str]) -> int | None:
    """The position of pretrain_gpt.py."""
    named = (at for at, word in enumerate(command) if re.fullmatch(r"pretrain_gpt\w*(\.py)?", os.path.basename(word)))
    return next(named, None)


def _last(words: Sequence[str], name: str) -> str | None:
    """The last value that is given to a flag."""
    found = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    found += [after for word, after in itertools.pairwise(words) if word == name]
    return found[-1] if found else None


def read_command(job: Job, command: Sequence[str]) -> None:
    """The flags of a training command, and how many processes it starts: by srun, torchrun or alone."""
    at = _program(command)
    if at is None:
        job.find("error", "command", f"there is no pretrain_gpt.py in it: {shlex.join(command)[:200]}")
        return
    job.words = list(command[at + 1 :])
    launcher, start = list(command[:at]), 0
    if os.path.basename(command[0]) == "srun":
        options, start = parse_options(command[1:at], program="srun")
        start += 1
        asked = {
            name: count(options[name].value) if name in options else None
            for name in ("nodes", "ntasks", "ntasks-per-node")
        }
        each = asked["ntasks-per-node"]
        job.nodes = asked["nodes"] or (math.ceil((asked["ntasks"] or 1) / each) if each else job.nodes)
        job.tasks = asked["ntasks"] or job.nodes * (each or 1)
        if each and job.tasks != job.nodes * each:
            job.find(
                "error",
                "tasks",
                f"srun is given -n {job.tasks} and {each} for each of {job.nodes} nodes: it heeds "
                f"-n alone. Give -n {job.nodes * each}",
            )
    processes = [_last(launcher, f"--nproc{dash}per{dash}node") for dash in "-_"]
    if each_starts := count(next(filter(None, processes), "")):
        hosts = count(_last(launcher, "--nnodes") or "1") or 1
        job.nodes = job.nodes if start else hosts
        job.tasks = each_starts * (job.tasks if start else hosts)
    job.programs = [word for word in (*launcher[start : start + 1], command[at]) if "/" in word]


# -- what is asked of Slurm --------------------------------------------------------------------------------------------


def check_options(job: Job) -> None:
    """Nodes and wall time against the machine's limits, and options that go with each other."""
    cluster, given = job.cluster, job.value("time")
    batch = "time" in job.options or "nodes" in job.options
    if batch and given is None:
        job.find("warning", "wall time", "no -t: the partition's default holds. Add #SBATCH -t HH:MM:SS")
    elif given is not None and job.wall_s is None and given not in ("UNLIMITED", "INFINITE", "0"):
        job.find("error", "wall time", f"{given} is no time: give minutes, HH:MM:SS or D-HH:MM:SS", job.where("time"))
    if cluster is not None and batch:
        try:
            nodes = count(job.value("nodes") or "1") or 1
            hours = cluster.wall_limit_hours(nodes, job.value("partition"), job.value("qos"))
            if job.wall_s is not None and job.wall_s > 3600 * hours:
                job.find(
                    "error",
                    "wall time",
                    f"{given}: {nodes} nodes may run for {hours:g} h on {cluster.name}: ask for "
                    f"at most {show_duration(3600 * hours)}",
                    job.where("time"),
                )
        except ConfigError as problem:
            job.find("error", "nodes", str(problem), job.where("nodes"))
    if "requeue" in job.options and (job.value("open-mode") or "t")[:1] != "a":
        job.find(
            "warning",
            "requeue",
            "--requeue without --open-mode=append: the log of the first start is lost with the second",
            job.where("requeue"),
        )


def check_network(job: Job) -> None:
    """Variables of RCCL's network plugin, of which examples/frontier/env.sh has the sources and docs/frontier.md the
    reports."""
    environ = job.environ
    slingshot = job.cluster is not None and any(nic.startswith("hsn") for nic in job.cluster.nics)
    if not slingshot or job.nodes == 1 or "gloo" in (job.words or []):
        return
    monitor, alt = environ.get("FI_MR_CACHE_MONITOR"), environ.get("FI_CXI_RDZV_PROTO") == "alt_read"
    if environ.get("NCCL_NET") in (None, "", "Socket"):
        job.find(
            "warning",
            "network",
            "NCCL_NET is not OFI: without the plugin RCCL takes TCP, and says nothing. "
            "examples/frontier/env.sh sets it",
        )
    if monitor == "memhooks":
        job.find("error", "network", "FI_MR_CACHE_MONITOR=memhooks deadlocks with RCCL: use kdreg2 or userfaultfd")
    if "network" in job.options and alt != ("disable_rdzv_get" in (job.value("network") or "")):
        job.find(
            "warning",
            "network",
            "FI_CXI_RDZV_PROTO=alt_read and --network=disable_rdzv_get go together: give both or none",
            job.where("network"),
        )


# -- the training ------------------------------------------------------------------------------------------------------


def check_training(job: Job, words: list[str]) -> None:
    """Configuration, memory, files and cost of the training command."""
    check_network(job)
    for path in job.programs:
        if not job.is_local(path) and not os.path.exists(path):
            job.find("error", "programs", f"{path} is not there")
    if job.cluster is not None and "gloo" not in words and job.tasks != job.nodes * job.cluster.devices_per_node:
        job.find(
            "warning", "tasks", f"{job.tasks} processes on {job.nodes} nodes of {job.cluster.devices_per_node} devices"
        )
    cluster = job.environ.get("MEGATRON_CLUSTER", "")
    named = ["--cluster", cluster] if cluster and _last(words, "--cluster") is None else []
    try:
        job.config = parse_args([*words, *named], job.tasks)
    except ConfigError as problem:
        for text in re.split(r"^  \d+\. ", str(problem), flags=re.MULTILINE)[1:] or [str(problem)]:
            job.find("error", "configuration", text.strip())
        return
    except SystemExit:  # --help
        return
    for notice in job.config.notices:
        job.find("note", "configuration", notice)
    job.config = config = _with_vocabulary(job, job.config)
    _tried(job, "data", lambda: _check_data(job, config))
    _tried(job, "saving", lambda: _check_saving(job, config))
    reach = _tried(job, "checkpoint", lambda: _steps(job, config))
    if job.cluster is not None:
        machine = job.cluster
        _tried(job, "memory", lambda: _check_memory(job, config, machine))
        if reach is not None:
            _tried(job, "cost", lambda: _check_cost(job, config, machine, *reach))
    job.unchecked.append(
        "that the code runs with these flags and fits (the figures above are the planner's): add "
        f"--dry-run --world-size {job.tasks} to the flags of pretrain_gpt.py"
    )
    job.unchecked.append("compute nodes and their network: PREFLIGHT=1 of job.sh tries them when the job starts")


def _tried(job: Job, about: str, body: Callable[[], Any]) -> Any:
    try:
        return body()
    except ImportError as problem:  # on a login node without torch
        job.unchecked.append(f"{about}: {problem}")
    except (MegatronError, OSError) as problem:
        job.find("error", about, str(problem))
    return None


def _with_vocabulary(job: Job, config: Config) -> Config:
    """The configuration with the size of the tokenizer's vocabulary."""
    from megatron.data.tokenizer import build_tokenizer

    t = config.tokenizer
    if t.tokenizer_type is not None:
        try:
            size = build_tokenizer(**dataclasses.asdict(t), vocab_size=config.model.vocab_size).vocab_size
            return config.replace(vocab_size=size)
        except MegatronError as problem:
            job.find("error", "tokenizer", str(problem))
    if config.model.vocab_size is None:
        job.find("note", "tokenizer", f"figures take GPT-2's vocabulary of {GPT2_VOCABULARY}")
        return config.replace(vocab_size=GPT2_VOCABULARY)
    return config


def _check_data(job: Job, config: Config) -> None:
    """Token files are there and whole; raises DataError."""
    from megatron.data.datasets import data_prefixes
    from megatron.data.indexed_dataset import IndexedDataset

    if config.data.mock_data:
        return
    for prefix in data_prefixes(config):
        if job.is_local(prefix):
            job.unchecked.append(f"data {prefix}, on the nodes' own disks")
        else:
            IndexedDataset(prefix, mmap=config.data.mmap_bin_files)
    job.unchecked.append(
        "whether the data's indices are built: else the first start does it while all ranks wait "
        "(tools/build_index.py with the same flags)"
    )


def _check_saving(job: Job, config: Config) -> None:
    """Where checkpoints go: the folder, room for them, and time to write one at the job's end."""
    save, load, keep = config.checkpoint.save, config.checkpoint.load, config.checkpoint.keep_last
    if not save:
        job.find("warning", "saving", "no --save: all is lost at the end of the job. Give --save FOLDER --load FOLDER")
        return
    if job.is_local(save):
        job.find("error", "saving", f"--save {save} is on the nodes' own disks, which are gone with the job")
        return
    if load != save:
        job.find(
            "error" if config.training.requeue else "warning",
            "saving",
            f"--load is {load or 'absent'}, --save is "
            f"{save}: a job that starts again does not go on from what it saved. Give --load {save}",
        )
    if config.checkpoint.save_interval is None and config.checkpoint.save_interval_minutes is None:
        job.find("warning", "saving", "no --save-interval: the run saves at its end alone")
    folder = Path(save).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        job.find("error", "saving", f"--save {save} cannot be written: {folder} is not yours to write")
    size, (free, limit) = checkpoint_bytes(config), free_bytes(folder)
    most = (1 if keep is None else keep) + 1  # the next one is written before the oldest goes
    if most * size > free:
        job.find(
            "error", "saving", f"{most} checkpoints of {size / 1e9:.1f} GB do not fit into {free / 1e9:.0f} GB, {limit}"
        )
    signal = re.search(r"@(\d{1,9})", job.value("signal") or "")
    save_s = WallTime(Unwatched(), size / config.parallel.world_size).guess_s
    if signal is not None and int(signal[1]) < 1.5 * save_s + 30:
        job.find(
            "warning",
            "signal",
            f"--signal leaves {signal[1]} s for a step and a save of about {save_s:.0f} s "
            "(assumed: 0.1 GB/s for each rank)",
            job.where("signal"),
        )


def free_bytes(folder: Path) -> tuple[int, str]:
    """The bytes that can still be written to a folder, and what says so: the file system, or a quota on Lustre."""
    system = os.statvfs(folder)
    free, limit = system.f_bavail * system.f_frsize, f"free on the file system of {folder}"
    if shutil.which("lfs"):
        project = re.match(r"\s*(\d+)", ask("lfs", "project", "-d", str(folder))[1])
        owners = [("-u", str(os.getuid())), *([("-p", project[1])] if project and project[1] != "0" else [])]
        for kind, name in owners:
            left = quota_left(ask("lfs", "quota", "-q", kind, name, str(folder))[1])
            if left is not None and left < free:
                free, limit = left, f"left of the quota (lfs quota {kind} {name} {folder})"
    return free, limit


def quota_left(answer: str) -> int | None:
    """Bytes left by `lfs quota -q`: file system, KiB used, quota, limit, ...; None where there is no limit.

    >>> quota_left("/lustre/orion  1000  0  5000  -  10  0  0  -")
    4096000
    """
    numbers = [word.rstrip("*") for word in answer.split()[1:4]]
    if len(numbers) < 3 or not all(number.isdigit() for number in numbers):
        return None
    used, quota, limit = map(int, numbers)
    most = limit or quota
    return max(0, most - used) * 1024 if most else None


def _steps(job: Job, config: Config) -> tuple[int, int]:
    """(iteration from which the run goes on, that of its end). Raises CheckpointError and ConfigError."""
    from megatron.checkpoint.find import find, open_checkpoint, required
    from megatron.checkpoint.settings import check_architecture
    from megatron.training.micro_batches import BatchSchedule, total_iterations

    schedule, load = BatchSchedule.from_config(config), config.checkpoint.load
    end = total_iterations(config, schedule)
    if load is None:
        return 0, end
    found = find(load, config.checkpoint.load_tag)
    for rejected in found.rejected:
        job.find("warning", "checkpoint", f"broken: {rejected}")
    if found.folder is None and not found.rejected and not config.checkpoint.exit_on_missing_checkpoint:
        return 0, end
    checkpoint = open_checkpoint(required(load, found))
    if not config.checkpoint.use_checkpoint_args:
        check_architecture(checkpoint.config, config, str(checkpoint.folder))
    if config.checkpoint.finetune or config.checkpoint.reset_iteration:
        return 0, end
    consumed = checkpoint.state["state"].get("consumed_samples", 0)
    if not is_count(consumed):
        raise CheckpointError(f"{checkpoint.folder} says {consumed!r} where it counts consumed samples")
    end = total_iterations(config, schedule, checkpoint.iteration, consumed)
    if checkpoint.iteration >= end:
        job.find(
            "warning",
            "checkpoint",
            f"{checkpoint.folder} is of iteration {checkpoint.iteration}, and the run ends at "
            f"{end}: nothing is left to train",
        )
    return checkpoint.iteration, end


def _check_memory(job: Job, config: Config, cluster: Cluster) -> None:
    fullest = max(rank.total for rank in memory_of_ranks(config, cluster.device_type)) / 2**30
    job.memory_gib = fullest
    if fullest > _TIGHT * cluster.memory_gib:
        level = "error" if fullest > cluster.memory_gib else "warning"
        job.find(
            level,
            "memory",
            f"the fullest device needs about {fullest:.1f} GiB of {cluster.memory_gib:g}, beside what "
            "the runtime takes: more tensor or pipeline parallelism, or --recompute-granularity full",
        )


def _check_cost(job: Job, config: Config, cluster: Cluster, start: int, end: int) -> None:
    """What the rest of the run costs. Raises ConfigError for a layout that the machine cannot hold."""
    step_s = estimate(config, cluster).seconds
    seconds = max(end - start, 0) * step_s
    nodes = max(job.nodes, count(job.value("nodes") or "1") or 1)  # spares are paid for
    jobs = math.ceil(seconds / job.wall_s) if job.wall_s else None
    job.cost = Cost(start, end, step_s, seconds / 86400, seconds / 3600 * nodes, jobs)
    if job.cost.days > _LONG_DAYS:
        more = f", {jobs:,} jobs of {show_duration(job.wall_s)}" if jobs and job.wall_s else ""
        job.find(
            "warning",
            "cost",
            f"the run takes {job.cost.days:,.0f} days of computing on {job.nodes} node(s){more}: "
            "shorten it (--train-tokens, --train-iters) or take more nodes",
        )


# -- what is told ------------------------------------------------------------------------------------------------------


def _rows(job: Job) -> Iterator[tuple[str, str]]:
    """What is known, for people."""
    for name in ("account", "partition", "qos", "nodes", "time", "signal"):
        if name in job.options:
            yield name, f"{job.options[name].value}   ({job.options[name].where})"
    if (config := job.config) is not None:
        parallel, batch = config.parallel, config.batch
        yield "processes", f"{job.tasks} on {job.nodes} node(s)"
        yield (
            "layout",
            (
                f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} x DP "
                f"{parallel.data_parallel_size}, {parallel.schedule}, ZeRO-{config.engine.zero_stage}"
            ),
        )
        yield (
            "batch",
            (
                f"{batch.global_batch_size} samples = {batch.micro_batch_size} x {parallel.data_parallel_size} "
                f"replicas x {config.num_micro_batches()} micro-batches, {config.precision.dtype_name}"
            ),
        )
        if config.checkpoint.save:
            yield "checkpoint", f"{checkpoint_bytes(config) / 1e9:.1f} GB in {config.checkpoint.save}"
    if job.memory_gib is not None and job.cluster is not None:
        yield "memory", f"{job.memory_gib:.1f} GiB of {job.cluster.memory_gib:g} on the fullest device, by the planner"
    if (cost := job.cost) is not None:
        jobs = f", {cost.jobs:,} job(s) of {show_duration(job.wall_s)}" if cost.jobs and job.wall_s else ""
        yield (
            "it costs",
            (
                f"{cost.days:,.2f} days and {cost.node_hours:,.0f} node-hours{jobs}: iterations {cost.start:,} to "
                f"{cost.end:,} of {cost.step_s:.3g} s by the planner, beside starts, saves and the queue"
            ),
        )


def lines(job: Job) -> Iterator[str]:
    """Everything: the findings, and what was not checked, last."""
    yield from (f"{name:<12}{text}" for name, text in _rows(job))
    for finding in job.findings:
        yield f"{finding.level}: {finding.about}: {finding.text}{f' [{finding.where}]' if finding.where else ''}"
    yield from (f"not checked: {text}" for text in job.unchecked)
    errors, warnings, _ = (sum(finding.level == level for finding in job.findings) for level in _ORDER)
    yield f"{errors} error(s), {warnings} warning(s), {len(job.unchecked)} thing(s) not checked"


def to_dict(job: Job) -> dict[str, Any]:
    """What --json prints."""
    return {
        "options": {name: given._asdict() for name, given in sorted(job.options.items())},
        "cluster": job.cluster.name if job.cluster else None,
        "arguments": job.words,
        **{name: getattr(job, name) for name in ("nodes", "tasks", "memory_gib")},
        "config": job.config.to_dict() if job.config else None,
        "cost": dataclasses.asdict(job.cost) if job.cost else None,
        "findings": [dataclasses.asdict(finding) for finding in job.findings],
        "not_checked": job.unchecked,
    }
