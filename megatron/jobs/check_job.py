"""A job before it is submitted: `tools/preflight.py check SCRIPT`, on a login node, without a GPU."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.checkpoint.size import checkpoint_bytes
from megatron.config import Config, parse_args
from megatron.config.duration import duration_s, show_duration
from megatron.config.option import Parser
from megatron.data.tokenizer import with_vocabulary
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.jobs.check_slurm import Options, ask_sbatch, count, directives, parse_options, winning
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.timing import estimate
from megatron.planner.trace import GPT2_VOCABULARY
from megatron.training.run.process import EXIT_USER_ERROR
from megatron.untrusted import is_count, read_bytes

USAGE = """preflight.py check [--cluster NAME] [sbatch's options] SCRIPT [ARGUMENT ...]
       preflight.py check [--cluster NAME] [sbatch's options] SCRIPT -- COMMAND ...     (a script of another project)
       preflight.py check [--cluster NAME] -- COMMAND ..."""
DESCRIPTION = """\
Check a job before it is submitted, on a login node without a GPU: everything is as sbatch would get it, in its place.

  tools/preflight.py check -N 16 examples/frontier/train_175b.sbatch --train-iters 1000
  tools/preflight.py check -- srun -N 2 -n 16 python pretrain_gpt.py --preset gpt-22b ...

The options of the job are read from the command line, variables and #SBATCH lines, and sbatch --test-only is asked
where there is one. A script that sources examples/frontier/job.sh is run here with DRY_RUN=1, so that it prints its
training command and starts nothing: what other commands it has act. Nothing of another script is run: give its training
command after --. That command is resolved as its ranks would, and held against the machine's memory and limits and the
files on disk. What the run costs, and what was not checked, is printed last.

Exit code 0 without errors, 2 with."""
_OURS = re.compile(r"^\s*(?:source|\.)\s.*examples/frontier/(job|allocation|experiment)\.sh", re.MULTILINE)
_MOST_BYTES = 1 << 24  # of a script
_DRY_RUN_S = 120.0
_TIGHT = 0.9  # of the memory: the runtime and the communication library take some gigabytes
_LONG_S = 30 * 86400
_LEVELS = ("error", "warning", "note")


@dataclass
class Job:
    """What is known of a job. `environ` is that of its training, `words` are the training's own flags.

    known     what to tell, by name
    findings  (level, subject, text): level is error, warning or note
    """

    options: Options
    environ: Mapping[str, str]
    nodes: int = 1
    tasks: int = 1
    cluster: Cluster | None = None
    words: list[str] | None = None
    config: Config | None = None
    known: dict[str, str] = field(default_factory=dict)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def find(self, level: str, about: str, text: str) -> None:
        """Note a problem; where `about` is an option of Slurm's, with the place where it is given."""
        where = f" [{self.options[about].where}]" if about in self.options else ""
        self.findings.append((level, about, text + where))

    def value(self, name: str) -> str | None:
        """The value of an option of Slurm's."""
        return self.options[name].value if name in self.options else None

    @property
    def asked_nodes(self) -> int:
        """The nodes of the allocation."""
        return count(self.value("nodes")) or 1

    def is_local(self, path: str) -> bool:
        """Whether a path is on the nodes' own disks, which a login node does not have."""
        nvme = self.cluster.nvme_path.split("$")[0].rstrip("/") if self.cluster else ""
        return bool(nvme) and Path(path).is_relative_to(nvme)


def run(argv: Sequence[str]) -> int:
    """Check and print; return the exit code. The flags of check stand before the script, or --. Raises ConfigError."""
    parser = Parser("preflight.py check", usage=USAGE, description=DESCRIPTION)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help="machine to check against (default: the script's "
        "MEGATRON_CLUSTER, or this variable, or SITE_CLUSTER; none: no machine)",
    )
    _, at = parse_options(argv)
    at -= at > 0 and argv[at - 1] == "--"
    args, rest = parser.parse_known_args(argv[:at])
    job = check([*rest, *argv[at:]], args.cluster)
    print(*lines(job), sep="\n")
    return EXIT_USER_ERROR if any(level == "error" for level, _, _ in job.findings) else 0


def check(words: Sequence[str], cluster: str | None = None) -> Job:
    """Check what `sbatch WORDS`, or `-- COMMAND`, would start. Raises ConfigError."""
    line, at = parse_options(words)
    if at == len(words):
        raise ConfigError("no script: give it as to sbatch, or a command after --")
    if at and words[at - 1] == "--":
        job = Job(line, os.environ)
        read_command(job, words[at:])
    else:
        job = read_script(words, line, at)
    if job.words is not None:
        read_config(job, job.words)
    cluster = cluster or os.environ.get("MEGATRON_CLUSTER") or os.environ.get("SITE_CLUSTER")
    cluster = cluster or job.environ.get("MEGATRON_CLUSTER")
    if not cluster and job.config is not None:
        cluster = job.config.parallel.cluster
    if cluster and cluster != "none":
        job.cluster = load_cluster(cluster)
    else:
        job.unchecked.append("limits, memory and cost: no machine is named (--cluster, MEGATRON_CLUSTER)")
    check_options(job)
    if job.config is not None:
        check_training(job, job.config)
    job.findings.sort(key=lambda finding: _LEVELS.index(finding[0]))
    return job


# -- the script --------------------------------------------------------------------------------------------------------


def read_script(words: Sequence[str], line: Options, at: int) -> Job:
    """Read the options of the script `words[at]`, and its training command, by a dry run if it is ours.

    Raises ConfigError.
    """
    script, arguments = words[at], list(words[at + 1 :])
    content = read_bytes(script, _MOST_BYTES, error=ConfigError)
    text = content.decode(errors="replace")
    options, problems = directives(text)
    job = Job(winning(line, os.environ, options), os.environ)
    job.nodes = job.asked_nodes
    for problem in problems:
        job.find("error", "options", problem)
    if not text.startswith("#!"):
        job.find("error", "script", "the first line is no interpreter, and sbatch refuses it: add #!/bin/bash")
    ask_slurm(job, words)
    ours = _OURS.search(text)
    if ours is not None and ours[1] == "job":
        dry_run(job, content, arguments)
    elif ours is not None:
        tool = "tune.py" if ours[1] == "allocation" else "run_experiment.py"
        job.unchecked.append(f"the trainings, which tools/{tool} starts: {script} --dry-run shows them and their cost")
    elif "--" in arguments:
        read_command(job, arguments[arguments.index("--") + 1 :])
    else:
        text = "it does not source examples/frontier/job.sh, so nothing of it is run, and only its #SBATCH lines are"
        job.find("warning", "script", f"{text} checked: give its training command after --")
    return job


def ask_slurm(job: Job, words: Sequence[str]) -> None:
    """Ask Slurm itself about the job; `words` are those of sbatch."""
    if "account" not in job.options:
        job.find("warning", "account", "no -A and no SBATCH_ACCOUNT: Slurm takes your default account, or refuses")
    job.unchecked.append("whether the account has node-hours left, and how long the job waits in the queue")
    takes, said = ask_sbatch(words)
    if takes is None:
        job.unchecked.append(f"account, partition, limits and features by sbatch --test-only: {said}")
    else:
        job.find("note" if takes else "error", "sbatch --test-only", said)


def dry_run(job: Job, content: bytes, arguments: Sequence[str]) -> None:
    """Run a script of ours with DRY_RUN=1, as Slurm would: a copy of it, from the folder of submission, with the job's
    variables. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="megatron-check-") as folder:
        copy = Path(folder, "slurm_script")
        copy.write_bytes(content)
        Path(folder, "hsn0").mkdir()  # so that env.sh sets what it sets on a node with Slingshot
        environ = os.environ | {
            "DRY_RUN": "1",
            "SLURM_JOB_NUM_NODES": str(job.nodes),
            "SLURM_JOB_NAME": job.value("job-name") or "",
            "SLURM_SUBMIT_DIR": os.getcwd(),
            "SBATCH_ACCOUNT": job.value("account") or "",
            "SITE_NET_FOLDER": folder,
        }
        try:
            done = subprocess.run(
                ["bash", str(copy), *arguments], env=environ, cwd=job.value("chdir"), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=_DRY_RUN_S,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"the script cannot be run: {error}") from error
    for line in done.stdout.splitlines():
        if match := re.match(r" job \S+: (ERROR|WARNING|not checked): (.*)", line):
            if match[1] == "not checked":
                job.unchecked.append(match[2])
            else:
                job.find(match[1].lower(), "script", match[2])
        elif line.startswith("+ export "):
            job.environ = os.environ | dict(word.split("=", 1) for word in split(line)[2:] if "=" in word)
        elif line.startswith("+ srun ") and "pretrain_gpt.py" in line:
            read_command(job, split(line)[1:])
    if job.words is None or (done.returncode and not any(level == "error" for level, _, _ in job.findings)):
        said = " / ".join(done.stdout.strip().splitlines()[-3:])
        job.find("error", "script", f"its dry run ends with exit code {done.returncode}: {said}")


def split(line: str) -> list[str]:
    """Return the words of a shell's command. Raises ConfigError."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"the script prints a command that cannot be read ({error}): {line[:200]}") from error


def read_command(job: Job, command: Sequence[str]) -> None:
    """Read the flags of a training command, and how many processes it starts: by srun, torchrun or alone."""
    programs = (i for i, word in enumerate(command) if re.fullmatch(r"pretrain_gpt\w*(\.py)?", os.path.basename(word)))
    at = next(programs, None)
    if at is None:
        job.find("error", "command", f"there is no pretrain_gpt.py in it: {shlex.join(command)[:200]}")
        return
    job.words = list(command[at + 1 :])
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in ("-N --nodes --nnodes", "-n --ntasks", "--ntasks-per-node", "--nproc-per-node --nproc_per_node"):
        parser.add_argument(*names.split(), dest=names, nargs="?")
    nodes, tasks, each, processes = map(count, vars(parser.parse_known_args(command[:at])[0]).values())
    if os.path.basename(command[0]) == "srun":
        job.nodes = nodes or (math.ceil((tasks or 1) / each) if each else job.nodes)
    else:
        job.nodes = nodes or 1
    job.tasks = (tasks or job.nodes * (each or 1)) * (processes or 1)


def read_config(job: Job, words: Sequence[str]) -> None:
    """Resolve the training's flags as its ranks would."""
    cluster = job.environ.get("MEGATRON_CLUSTER")
    try:
        job.config = parse_args([*(["--cluster", cluster] if cluster else []), *words], job.tasks)
    except ConfigError as problem:
        job.find("error", "configuration", str(problem))


# -- what is asked of Slurm --------------------------------------------------------------------------------------------


def check_options(job: Job) -> None:
    """Check nodes and wall time against the machine's limits, and options that go with each other."""
    cluster, given = job.cluster, job.value("time")
    wall_s = duration_s(given or "")
    if given is None and "nodes" in job.options:
        job.find("warning", "time", "no -t: the partition's default holds. Add #SBATCH -t HH:MM:SS")
    elif given is not None and wall_s is None and given not in ("UNLIMITED", "INFINITE", "0"):
        job.find("error", "time", f"{given} is no time: give minutes, HH:MM:SS or D-HH:MM:SS")
    if cluster is not None and {"time", "nodes"} & set(job.options):
        try:
            hours = cluster.wall_limit_hours(job.asked_nodes, job.value("partition"), job.value("qos"))
            if wall_s is not None and wall_s > 3600 * hours:
                text = f"{given}: {job.asked_nodes} nodes may run for {hours:g} h on {cluster.name}"
                job.find("error", "time", f"{text}: ask for at most {show_duration(3600 * hours)}")
        except ConfigError as problem:
            job.find("error", "nodes", str(problem))
    if "requeue" in job.options and not (job.value("open-mode") or "").startswith("a"):
        text = "--requeue without --open-mode=append: the log of the first start is lost with the second"
        job.find("warning", "requeue", text)


def check_network(job: Job, cluster: Cluster) -> None:
    """Check the number of processes, and variables of RCCL's network plugin on Slingshot.

    The variables' sources are in examples/frontier/env.sh and docs/frontier.md.
    """
    if job.tasks != job.nodes * cluster.devices_per_node:
        devices = f"{job.nodes} nodes of {cluster.devices_per_node} devices"
        job.find("warning", "tasks", f"{job.tasks} processes on {devices}")
    environ = job.environ
    if job.nodes == 1 or not any(nic.startswith("hsn") for nic in cluster.nics):
        return
    if environ.get("NCCL_NET", "Socket") in ("", "Socket"):
        text = "NCCL_NET is not OFI: without the plugin RCCL takes TCP, and says nothing"
        job.find("warning", "network", f"{text}. examples/frontier/env.sh sets it")
    if environ.get("FI_MR_CACHE_MONITOR") == "memhooks":
        job.find("error", "network", "FI_MR_CACHE_MONITOR=memhooks deadlocks with RCCL: use kdreg2 or userfaultfd")


# -- the training ------------------------------------------------------------------------------------------------------


def check_training(job: Job, config: Config) -> None:
    """Check tokenizer, network, files, memory and cost of the training."""
    if job.cluster is not None and "gloo" not in (job.words or ()):
        check_network(job, job.cluster)
    for notice in config.notices:
        job.find("note", "configuration", notice)
    config, unknown = with_vocabulary(config)
    if config.model.vocab_size is None:
        config = config.replace(vocab_size=GPT2_VOCABULARY)
    if unknown:
        level = "note" if config.tokenizer.tokenizer_type is None else "error"
        job.find(level, "tokenizer", f"{unknown}: figures take a vocabulary of {config.model.vocab_size}")
    parallel, batch, replicas = config.parallel, config.batch, config.parallel.data_parallel_size
    sizes = f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pipeline_model_parallel_size} x DP {replicas}"
    parts = f"{batch.micro_batch_size} x {replicas} replicas x {config.num_micro_batches()} micro-batches"
    job.known["processes"] = f"{job.tasks} on {job.nodes} node(s)"
    job.known["layout"] = f"{sizes}, {parallel.schedule}, ZeRO-{config.engine.zero_stage}"
    job.known["batch"] = f"{batch.global_batch_size} samples = {parts}, {config.precision.dtype_name}"
    checks = {"data": partial(check_data, job, config), "saving": partial(check_saving, job, config)}
    if job.cluster is not None:
        checks["memory"] = partial(check_memory, job, config, job.cluster)
        checks["cost"] = partial(check_cost, job, config, job.cluster)
    for about, body in checks.items():
        try:
            body()
        except ImportError as problem:  # on a login node without torch
            job.unchecked.append(f"{about}: {problem}")
        except CheckpointError as problem:
            job.find("error", "checkpoint", str(problem))
        except (MegatronError, OSError) as problem:
            job.find("error", about, str(problem))
    job.unchecked += (
        "quotas of the file system (lfs quota)",
        "that the code runs with these flags and fits (the figures above are the planner's): add "
        f"--dry-run --world-size {job.tasks} to the flags of pretrain_gpt.py",
        "compute nodes and their network: PREFLIGHT=1 of job.sh tries them when the job starts",
    )


def check_data(job: Job, config: Config) -> None:
    """Open the token files. Raises DataError."""
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


def check_saving(job: Job, config: Config) -> None:
    """Check the folder of the checkpoints, and the room there."""
    save, load, keep = config.checkpoint.save, config.checkpoint.load, config.checkpoint.keep_last
    if not save:
        job.find("warning", "saving", "no --save: all is lost at the end of the job. Give --save FOLDER --load FOLDER")
        return
    if job.is_local(save):
        job.find("error", "saving", f"--save {save} is on the nodes' own disks, which are gone with the job")
        return
    if load != save:
        text = f"--load is {load or 'absent'}, --save is {save}: a job that starts again does not go on from what it"
        level = "error" if config.training.requeue else "warning"
        job.find(level, "saving", f"{text} saved. Give --load {save}")
    if config.checkpoint.save_interval is None and config.checkpoint.save_interval_minutes is None:
        job.find("warning", "saving", "no --save-interval: the run saves at its end alone")
    folder = Path(save).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        job.find("error", "saving", f"--save {save} cannot be written: {folder} is not yours to write")
    size, free = checkpoint_bytes(config), shutil.disk_usage(folder).free
    job.known["checkpoint"] = f"{size / 1e9:.1f} GB in {save}"
    most = (1 if keep is None else keep) + 1  # the next one is written before the oldest goes
    if most * size > free:
        text = f"{most} checkpoints of {size / 1e9:.1f} GB do not fit into the {free / 1e9:.0f} GB that are free on"
        job.find("error", "saving", f"{text} the file system of {folder}")


def check_memory(job: Job, config: Config, cluster: Cluster) -> None:
    """Compare the planner's memory of the fullest device with what the machine has."""
    fullest = max(rank.total for rank in memory_of_ranks(config, cluster.device_type)) / 2**30
    job.known["memory"] = text = f"{fullest:.1f} GiB of {cluster.memory_gib:g} on the fullest device, by the planner"
    if fullest > _TIGHT * cluster.memory_gib:
        level = "error" if fullest > cluster.memory_gib else "warning"
        more = "beside the runtime: more tensor or pipeline parallelism, or --recompute-granularity full"
        job.find(level, "memory", f"{text}, {more}")


def check_cost(job: Job, config: Config, cluster: Cluster) -> None:
    """Say what the rest of the run costs. Raises ConfigError for a layout that the machine cannot hold, and
    CheckpointError."""
    start, end = remaining_steps(config)
    step_s, wall_s = estimate(config, cluster).seconds, duration_s(job.value("time") or "")
    seconds = max(end - start, 0) * step_s
    hours = seconds / 3600 * max(job.nodes, job.asked_nodes)  # spares are paid for
    jobs = f", {math.ceil(seconds / wall_s):,} job(s) of {job.value('time')}" if wall_s else ""
    steps = f"iterations {start:,} to {end:,} of {step_s:.3g} s by the planner, beside starts, saves and the queue"
    job.known["it costs"] = f"{seconds / 86400:,.2f} days and {hours:,.0f} node-hours{jobs}: {steps}"
    if seconds > _LONG_S:
        text = f"the run takes {seconds / 86400:,.0f} days of computing on {job.nodes} node(s)"
        job.find("warning", "cost", f"{text}: shorten it (--train-tokens, --train-iters) or take more nodes")


def remaining_steps(config: Config) -> tuple[int, int]:
    """Return the iterations from which the run goes on, and of its end. Raises CheckpointError and ConfigError."""
    from megatron.checkpoint.find import find, open_checkpoint, required
    from megatron.checkpoint.settings import check_architecture
    from megatron.training.run.batches import BatchSchedule, total_iterations

    schedule, load = BatchSchedule.from_config(config), config.checkpoint.load
    anew = 0, total_iterations(config, schedule)
    if load is None:
        return anew
    found = find(load, config.checkpoint.load_tag)
    if found.folder is None and not found.rejected and not config.checkpoint.exit_on_missing_checkpoint:
        return anew
    checkpoint = open_checkpoint(required(load, found))
    if not config.checkpoint.use_checkpoint_args:
        check_architecture(checkpoint.config, config, str(checkpoint.folder))
    if config.checkpoint.finetune or config.checkpoint.reset_iteration:
        return anew
    consumed = checkpoint.state["state"].get("consumed_samples", 0)
    if not is_count(consumed):
        raise CheckpointError(f"{checkpoint.folder} says {consumed!r} where it counts consumed samples")
    return checkpoint.iteration, total_iterations(config, schedule, checkpoint.iteration, consumed)


# -- what is told ------------------------------------------------------------------------------------------------------


def lines(job: Job) -> Iterator[str]:
    """Say what is known, the findings, and what was not checked, last."""
    for name in ("account", "partition", "qos", "nodes", "time"):
        if name in job.options:
            yield f"{name:<12}{job.options[name].value}   ({job.options[name].where})"
    yield from (f"{name:<12}{text}" for name, text in job.known.items())
    yield from (f"{level}: {about}: {text}" for level, about, text in job.findings)
    yield from (f"not checked: {text}" for text in job.unchecked)
    errors, warnings = (sum(level == finding[0] for finding in job.findings) for level in _LEVELS[:2])
    yield f"{errors} error(s), {warnings} warning(s), {len(job.unchecked)} thing(s) not checked"
