"""What is checked: a job, and the training command line in it."""
from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.planning.cluster import Cluster
from megatron.preflight.check.findings import Place, Sources
from megatron.preflight.check.follow import Event, Followed, Job
from megatron.preflight.check.slurm_options import Given, Sizes, count, parse_options, step_sizes

PROGRAM = re.compile(r"pretrain_gpt\w*(\.py)?")
_LOOKING = ("--help", "-h", "--print-config")
_LAUNCHERS = ("torchrun", "deepspeed", "mpirun", "mpiexec")


@dataclass(frozen=True)
class Training:
    """A pretrain_gpt.py that the script would start: `program` with `arguments`, by `srun` where there is one."""

    event: Event
    srun: Event | None
    options: Mapping[str, Given]
    sizes: Sizes
    program: str
    arguments: tuple[str, ...]

    @property
    def launcher(self) -> str:
        """The program that starts it: python, or torchrun and the like."""
        name = os.path.basename(self.event.words[0])
        module = " ".join(self.event.words[1:4])
        return "torchrun" if "torch.distributed" in module else name

    @property
    def place(self) -> Place:
        at = self.srun or self.event
        return Place(at.file, at.line)

    @property
    def environ(self) -> Mapping[str, str]:
        return self.event.environ

    def real_path(self, path: str) -> str:
        return os.path.normpath(os.path.join(self.event.folder, path))


def trainings(followed: Followed) -> list[Training]:
    """Every different training command line, those under srun first."""
    sruns = {event.step: event for event in followed.events if event.kind == "srun"}
    found: list[Training] = []
    for event in followed.events:
        at = _program_at(event)
        if at is None or set(_LOOKING) & set(event.words[at + 1 :]):
            continue
        srun = sruns.get(event.step)
        options = parse_options(srun.words, "srun").options if srun else {}
        sizes = _sizes(event, srun, options)
        found.append(Training(event, srun, options, sizes, event.words[at], event.words[at + 1 :]))
    unique = {(t.arguments, t.sizes, t.srun is None): t for t in reversed(found)}
    return sorted(unique.values(), key=lambda t: t.srun is None)


def _program_at(event: Event) -> int | None:
    if event.kind != "python":
        return None
    for at, word in enumerate(event.words):
        if PROGRAM.fullmatch(os.path.basename(word)):
            return at
    return None


def _sizes(event: Event, srun: Event | None, options: Mapping[str, Given]) -> Sizes:
    """Processes of the training: torchrun and the like start several for each task."""
    sizes = step_sizes(options, srun.environ) if srun else Sizes(1, 1, 1)
    words = list(event.words)
    each = nodes = None
    for at, word in enumerate(words[:-1]):
        name, _, value = word.partition("=")
        value = value or words[at + 1]
        if name in ("--nproc_per_node", "--nproc-per-node", "--num_gpus"):
            each = count(value)
        elif name in ("--nnodes", "--num_nodes"):
            nodes = count(value)
    if each is None:
        return sizes
    many = sizes.tasks if srun else nodes or 1
    return Sizes(many, many * each, each)


@dataclass
class Subject:
    """Everything that checks look at. `config` is None where it has errors; `whole` is then what could be resolved."""

    job: Job
    followed: Followed
    training: Training
    sources: Sources
    script: str
    is_batch: bool
    cluster: Cluster | None = None
    config: Config | None = None

    @property
    def nodes(self) -> int:
        return self.job.sizes.nodes

    def option(self, name: str) -> Given | None:
        """What srun is given, or else the job (srun takes most of them over)."""
        return self.training.options.get(name) or self.job.options.get(name)

    def place_of(self, *names: str) -> Place:
        """Where the first of these options is given, or else the srun, or the script's head."""
        for name in names:
            if name in self.training.options:
                return self.training.place
            if name in self.job.options:
                return self.place_in_job(name)
        return self.head

    def place_in_job(self, name: str) -> Place:
        """Where the job is given this option, whatever srun is given."""
        given = self.job.options.get(name)
        if given is None:
            return self.head
        return Place(given.file, given.line) if given.file else Place(given.where)

    @property
    def head(self) -> Place:
        """Where a missing #SBATCH line would go: behind the last one, or the first line."""
        lines = [given.line for given in self.job.options.values() if given.file == self.script]
        return Place(self.script, max(lines, default=1)) if self.is_batch else self.training.place

    def flag(self, *flags: str) -> Place:
        """Where a flag of the training is given, or else the training command."""
        return self.sources.first(flags, self.training.place)

    @property
    def on_gpus(self) -> bool:
        """Whether the training wants GPUs: not with gloo."""
        return "gloo" not in self.training.arguments and "--distributed-backend=gloo" not in self.training.arguments

    @property
    def slingshot(self) -> bool:
        return self.cluster is not None and any(nic.startswith("hsn") for nic in self.cluster.nics)

    def is_local(self, path: str) -> bool:
        """Whether a path is on the nodes' own disks, which the login node does not have."""
        if self.cluster is None or not self.cluster.nvme_path:
            return False
        return Path(path).is_relative_to(os.path.expandvars(self.cluster.nvme_path).split("$")[0].rstrip("/"))


def sources_of(followed: Followed, script: str, words: Sequence[str]) -> Sources:
    """The command line and all files that the script was made of."""
    sources = Sources(tuple(words))
    sources.add(script)
    for name in sorted(followed.scratch.glob("copies/*.name")):
        sources.add(name.read_text(encoding="utf-8", errors="surrogateescape"))
    return sources
