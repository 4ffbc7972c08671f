"""Follows a batch script without acting: which programs it would start, with what words, where and in what environment.

bash runs a copy of the script (shell_text.py) behind prelude.sh: nothing but a scratch folder is written to, no program
but some that only read is started, and srun, module, scontrol and the like are functions that note what they were given
and answer as in a job. What cannot be followed is in the result, too.
"""
from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.preflight.check.copies import write_copy
from megatron.preflight.check.guard import Guard
from megatron.preflight.check.slurm_options import Given, Sizes, count, step_sizes

_HERE = Path(__file__).resolve().parent
JOB_ID = "1000000"
SPOOL = f"/var/spool/slurmd/job{JOB_ID}/slurm_script"
"""What a batch script is called while it runs: slurmd runs a copy of it."""
UNGUARDED = 98
"""Exit code where this bash could not set up the guard: nothing of the script was run."""
ADDRESS = "10.128.0.1"
_STEPS = 200_000  # simple commands of a script; a loop over 9,408 nodes with some commands each is less
_OUTPUT_BYTES = 64 << 20
# Programs that only read; those of them that can do more are looked at by prelude.sh.
_TOOLS = (
    "awk", "base64", "basename", "bc", "cat", "column", "comm", "cut", "date", "diff", "dirname", "expr", "find",
    "fold", "grep", "egrep", "fgrep", "head", "id", "jq", "join", "ls", "md5sum", "nl", "od", "paste", "printenv",
    "readlink", "realpath", "rev", "sed", "seq", "sha256sum", "shuf", "sort", "stat", "tac", "tail", "tr", "uname",
    "uniq", "wc", "whoami",
)  # fmt: skip
_HIDDEN = ("env", "mkdir", "tee")  # for the prelude alone
# Variables that would change what bash does, and functions that the environment carries.
_NOT_PASSED_ON = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "CDPATH", "GLOBIGNORE", "IFS", "PS4", "POSIXLY_CORRECT")


@dataclass(frozen=True)
class Event:
    """Something the script did: `kind` is srun, python, module, sbcast, trap, or what was not done: skipped (a
    program), missing (a file), unfollowed (a command), endless. `step` numbers the srun that a program runs under."""

    kind: str
    file: str
    line: int
    folder: str
    step: str
    words: tuple[str, ...]
    environ: Mapping[str, str] = field(repr=False, default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What came of following a script. `end` is the place of the last command; `scratch` holds the files it wrote."""

    events: tuple[Event, ...]
    exit_code: int | None
    end: tuple[str, int]
    said: str
    seconds: float
    scratch: Path
    guarded: bool

    def real(self, path: str) -> str:
        """Where a file is to be read: in the scratch folder if the script wrote it."""
        written = self.scratch / "files" / os.path.abspath(path).lstrip("/")
        return str(written) if written.exists() else path

    def named(self, text: str) -> str:
        """A text with the scratch folder's names of files turned into the script's."""
        return text.replace(str(self.scratch / "files"), "")


@dataclass(frozen=True)
class Job:
    """What Slurm would tell the script: sizes, names, limits. `submitted` is the environment of sbatch."""

    options: Mapping[str, Given]
    submitted: Mapping[str, str]
    devices: int = 8
    node_name: str = "node"
    interfaces: tuple[str, ...] = ()
    cpus: int = 56

    @property
    def sizes(self) -> Sizes:
        return step_sizes(self.options, {})

    def value(self, name: str) -> str | None:
        return self.options[name].value if name in self.options else None

    def hosts(self) -> list[str]:
        return [f"{self.node_name}{i:05d}" for i in range(1, self.sizes.nodes + 1)]

    def _exported(self) -> dict[str, str]:
        """What --export leaves of the submitter's environment; what a login sets stays."""
        words = (self.value("export") or "ALL").split(",")
        given = dict(word.partition("=")[::2] for word in words if "=" in word)
        if "ALL" in words:
            return {**self.submitted, **given}
        names = {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "PATH", *words}
        return {name: value for name, value in self.submitted.items() if name in names} | given

    def environment(self) -> dict[str, str]:
        """The variables of the batch script. Those that Slurm 22.05 sets, as far as scripts look at them."""
        sizes, n = self.sizes, self.sizes.nodes
        hosts = f"{self.node_name}[00001-{n:05d}]" if n > 1 else f"{self.node_name}00001"
        found = {k: v for k, v in self._exported().items() if not k.startswith(("SLURM_", "BASH_FUNC_"))}
        for name in _NOT_PASSED_ON:
            found.pop(name, None)
        found |= {
            "SLURM_JOB_ID": JOB_ID, "SLURM_JOBID": JOB_ID, "SLURM_JOB_NUM_NODES": str(n), "SLURM_NNODES": str(n),
            "SLURM_JOB_NODELIST": hosts, "SLURM_NODELIST": hosts, "SLURMD_NODENAME": f"{self.node_name}00001",
            "SLURM_SUBMIT_DIR": os.getcwd(), "SLURM_SUBMIT_HOST": socket.gethostname(), "SLURM_NODEID": "0",
            "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": f"{sizes.per_node}(x{n})",
            "SLURM_CPUS_ON_NODE": str(self.cpus), "SLURM_JOB_CPUS_PER_NODE": f"{self.cpus}(x{n})",
            "SLURM_JOB_NAME": self.value("job-name") or "job", "SLURM_CLUSTER_NAME": self.node_name,
            "SLURM_JOB_USER": found.get("USER", "user"), "ENVIRONMENT": "BATCH", "HOSTNAME": f"{self.node_name}00001",
        }  # fmt: skip
        for variable, option in {
            "SLURM_JOB_PARTITION": "partition", "SLURM_JOB_ACCOUNT": "account", "SLURM_JOB_QOS": "qos",
            "SLURM_CPUS_PER_TASK": "cpus-per-task", "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
            "SLURM_GPUS_PER_NODE": "gpus-per-node", "SLURM_GPUS_PER_TASK": "gpus-per-task",
            "SLURM_GPU_BIND": "gpu-bind", "SLURM_GPUS": "gpus",
        }.items():  # fmt: skip
            if self.value(option):
                found[variable] = str(self.value(option))
        if {"ntasks", "ntasks-per-node"} & self.options.keys():
            found |= {"SLURM_NTASKS": str(sizes.tasks), "SLURM_NPROCS": str(sizes.tasks)}
        if any(name in self.options for name in ("gpus-per-node", "gpus-per-task", "gpus", "gres")):
            found["SLURM_GPUS_ON_NODE"] = str(self.devices)
            found["SLURM_JOB_GPUS"] = ",".join(map(str, range(self.devices)))
        if "array" in self.options:
            found |= {"SLURM_ARRAY_JOB_ID": JOB_ID, "SLURM_ARRAY_TASK_ID": str(count(self.value("array") or "") or 0)}
        return found


@contextlib.contextmanager
def following(
    text: str, name: str, arguments: Sequence[str], job: Job, limit_s: float = 60.0, *, kernel: bool = True,
) -> Iterator[Followed]:
    """Follow a script. `name` is where the text lies. What it wrote exists until the block ends.

    kernel   whether to ask for Landlock, too
    """
    scratch = Path(os.path.realpath(tempfile.mkdtemp(prefix="preflight-")))
    try:
        _furnish(scratch, job)
        yield _run(scratch, text, name, arguments, job, limit_s, kernel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _furnish(scratch: Path, job: Job) -> None:
    for name in ("bin", "copies", "files", "net", "tmp"):
        (scratch / name).mkdir()
    for tool in (*_TOOLS, *_HIDDEN):
        found = shutil.which(tool, path=os.defpath + ":/usr/bin:/bin")
        if found:
            (scratch / "bin" / (f".{tool}" if tool in _HIDDEN else tool)).symlink_to(found)
    (scratch / "hosts").write_text("\n".join(job.hosts()) + "\n")
    if job.interfaces:
        for interface in ("lo", *job.interfaces):
            (scratch / "net" / interface).mkdir()
    else:
        (scratch / "net").rmdir()


def _run(
    scratch: Path, text: str, name: str, arguments: Sequence[str], job: Job, limit_s: float, kernel: bool
) -> Followed:
    import time

    main = write_copy(scratch, text, SPOOL)
    main.with_suffix(".name").write_text(name)
    environ = job.environment() | {
        "TMPDIR": str(scratch / "tmp"), "__PF_SCRATCH": str(scratch), "__PF_PYTHON": sys.executable,
        "__PF_HERE": str(_HERE), "__PF_STEPS": str(_STEPS), "__PF_ADDRESS": ADDRESS,
        "__PF_TIME": job.value("time") or "02:00:00",
    }  # fmt: skip
    command = [
        shutil.which("bash") or "/bin/bash", "--noprofile", "--norc", "-c",
        f'__pf_main={_quoted(main)}; . {_quoted(_HERE / "prelude.sh")}; '
        f'[ "${{__pf_ready-}}" = yes ] || exit {UNGUARDED}; . "$__pf_main"', SPOOL, *arguments,
    ]  # fmt: skip
    guard, started = Guard(scratch, wanted=kernel), time.monotonic()

    def enter() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_OUTPUT_BYTES, _OUTPUT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        guard.enter()

    code: int | None
    with open(scratch / "said", "wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ, start_new_session=True,
            preexec_fn=enter,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # what the script left in the background ends, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            guard.close()
    events = tuple(_events(scratch))
    ends = [event for event in events if event.kind == "end"]
    last = (_name_of(scratch, ends[-1].words[1]), int(ends[-1].words[2] or 0)) if ends else (name, 0)
    return Followed(
        events=tuple(event for event in events if event.kind != "end"),
        exit_code=code,
        end=last,
        said=(scratch / "said").read_text(encoding="utf-8", errors="replace")[-20_000:],
        seconds=time.monotonic() - started,
        scratch=scratch,
        guarded=guard.works,
    )


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"


def _events(scratch: Path) -> Iterator[Event]:
    try:
        fields = (scratch / "records").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    except FileNotFoundError:
        return
    at = 0
    while at < len(fields) and fields[at] == "RECORD":
        kind, file, line, folder, step, number = fields[at + 1 : at + 7]
        words, at = fields[at + 7 : at + 7 + int(number)], at + 7 + int(number)
        environ = {}
        while fields[at]:
            name, _, value = fields[at].partition("=")
            if not name.startswith(("__PF_", "__pf_")):
                environ[name] = value
            at += 1
        at += 1
        own = str(scratch / "files")
        unmapped = tuple(word.replace(own, "") for word in words)
        yield Event(kind, _name_of(scratch, file), int(line or 0), folder.replace(own, ""), step, unmapped, environ)


def _name_of(scratch: Path, copy: str) -> str:
    """The script's own file behind a copy."""
    path = Path(copy)
    if path.parent == scratch / "copies":
        with contextlib.suppress(OSError):
            return path.with_suffix(".name").read_text(encoding="utf-8", errors="surrogateescape")
    return copy
