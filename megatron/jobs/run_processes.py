"""Start and end the processes of a run, on this machine or as a step in a Slurm job.

Starting and stopping do not block: the caller that started a run polls it, and each poll sends the
signals that are due. Each process has its own session, and none outlives the process that started
it, however that process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import LaunchError
from megatron.parallel import parent_watch
from megatron.parallel.environment import job_name
from megatron.planner.subprocesses import environment, reserve_port

ROOT = Path(__file__).resolve().parents[2]
LOG = "train.log"
TASKS = "tasks"
GRACE_S = 15.0
"""Seconds between SIGTERM and SIGKILL; short, because these runs save nothing."""
_REPEAT_S = 5.0
_WAIT_S = 60  # from the end of one task in a step until srun ends the others
# from the loss of a rank until the other ranks are killed: normally these end on their own and name
# the lost rank
_PEERS_S = 20.0
_MOST_LOGS = 256
_FIRST_PORT = 3442
_PORTS = range(1024, 65536)

# Signals the step named STEP through Slurm. If srun is terminated while its tasks start, it asks
# Slurm once to kill them. If they do not exist yet, that request is lost, and srun waits for them
# and ignores further signals.
_TELL_STEP = """
for id in $(squeue -h -s -j "$JOB" -o "%i %j" | awk -v name="$STEP" '$2 == name { print $1 }'); do
    scancel -s "$1" "$id"
done
"""

# The functions of job.sh start the tasks; sourcing it sets PYTHON and CODE. ALIVE is a pipe whose
# other end belongs to this process: it closes when this process ends, which srun would not notice.
_SLURM_LAUNCH = """
source "$MEGATRON_ROOT/examples/frontier/job.sh" || exit 2
PYTHON=${POINT_PYTHON:-$PYTHON}; CODE=${POINT_CODE:-$CODE}
{
    trap '' TERM USR1 INT
    read -r -u "$ALIVE" _
    kill -TERM -- -$$
    sleep 10
    timeout 30 bash -c "$TELL_STEP" tell KILL
    sleep 20
    kill -KILL -- -$$
} >/dev/null 2>&1 &
watch=$!
disown "$watch"
code=0
launch_training "$@" || code=$?
kill -KILL "$watch" 2>/dev/null
exit "$code"
"""


@dataclass(frozen=True)
class SlurmStep:
    """The job step that executes a run under Slurm.

    name            name in squeue; unique among the running steps
    hosts           nodes on which it runs `tasks_per_node` processes each
    turn            number of runs that this process has started so far, which selects the port
    limit_s         time after which Slurm ends the step if this process has not
    """

    name: str
    hosts: Sequence[str]
    tasks_per_node: int
    turn: int
    limit_s: float


class RunProcesses:
    """Processes of a run.

    processes   all ranks, or one launcher
    step        name of the run's step under Slurm; None without Slurm
    resources   closed when the run ends: the reserved port, and the pipe by which the launcher
                monitors this process
    exit_codes  None until the run has ended; then the exit codes of its processes. If the others
                were killed after the loss of a rank, only of those that ended before
    """

    def __init__(
        self, step: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.processes = list[subprocess.Popen[bytes]]()
        self._step = step
        self._clock = clock
        self.resources = contextlib.ExitStack()
        self.exit_codes: list[int] | None = None
        self._first_codes: list[int] = []
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._asked_at: float | None = None
        self._helpers: list[subprocess.Popen[bytes]] = []

    def poll(self) -> bool:
        """Return whether the run has ended; send signals due after `stop` or a rank's loss."""
        codes = [process.poll() for process in self.processes]
        now = self._clock()
        ended = [code for code in codes if code is not None]
        if self.exit_codes is None and None not in codes:
            self.exit_codes = self._first_codes or ended
            self._signal(signal.SIGKILL)  # their child processes
            self.resources.close()
        if self.exit_codes is not None:
            return True
        if self._failed_at is None and any(ended):
            self._failed_at = now
        if (
            self._stopped_at is None
            and self._failed_at is not None
            and now > self._failed_at + _PEERS_S
        ):
            self._first_codes = ended
            self._stopped_at = now - 2 * GRACE_S
            self._press(now)
        elif self._asked_at is not None and now > self._asked_at + _REPEAT_S:
            self._press(now)
        return False

    def stop(self) -> None:
        """Terminate the run; later polls kill it if necessary. A second call has no effect."""
        if self._stopped_at is None and self.exit_codes is None:
            self._stopped_at = self._clock()
            self._press(self._stopped_at)

    def kill(self) -> None:
        """Kill the run and wait for its processes, at most 10 s for each."""
        if self.exit_codes is None:
            self._tell(signal.SIGKILL)
            self._signal(signal.SIGKILL)
            for process in self.processes:
                # a process that is stuck in the kernel cannot be killed
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
            self.resources.close()

    def _press(self, now: float) -> None:
        """Send SIGTERM, and SIGKILL after the grace period.

        The tasks of a step are killed first, and srun one grace period later: without srun they
        would continue to run.
        """
        assert self._stopped_at is not None, "no signal is due before the run is stopped"
        waited = now - self._stopped_at
        first = self._asked_at is None
        self._asked_at = now
        force = waited >= GRACE_S
        number = signal.SIGKILL if force else signal.SIGTERM
        if not first or force:
            self._tell(number)
        if self._step is None or not force or waited >= 2 * GRACE_S:
            self._signal(number)

    def _tell(self, number: signal.Signals) -> None:
        if self._step is not None:
            self._helpers.append(_tell_step(self._step, number.name[3:]))

    def _signal(self, number: int) -> None:
        """Send a signal to the session of every process."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def training_command(flags: Sequence[str]) -> list[str]:
    """Return the command line for each rank on this machine."""
    return [sys.executable, "-u", "-m", "megatron", *flags]


def slurm_command(flags: Sequence[str]) -> list[str]:
    """Return the command line for the launcher of a step."""
    return ["bash", "-c", _SLURM_LAUNCH, "launch", *flags]


def start_here(
    command: Sequence[str], count: int, folder: Path, clock: Callable[[], float] = time.monotonic
) -> RunProcesses:
    """Start `count` ranks on this machine.

    Rank 0 writes to LOG in the folder, rank N to TASKS/task_N.err. The ranks are killed when the
    calling thread ends, so call this from the main thread.
    """
    run = RunProcesses(clock=clock)
    port = run.resources.enter_context(reserve_port()).getsockname()[1]
    watch = [sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid())]
    if count > 1:
        (folder / TASKS).mkdir(exist_ok=True)
    try:
        for rank in range(count):
            env = environment(os.environ, rank, count, port)
            log = f"{TASKS}/task_{rank}.err" if rank else LOG
            run.processes.append(_spawn([*watch, *command], env, folder / log))
    except BaseException:
        run.kill()
        raise
    return run


def start_step(
    command: Sequence[str],
    step: SlurmStep,
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
) -> RunProcesses:
    """Start a job step on its hosts.

    Output goes to LOG in the folder, the errors of task N to TASKS/task_N.err. Raises LaunchError
    without a clone of the repository.
    """
    run = RunProcesses(step.name, clock)
    listening, alive = os.pipe()
    run.resources.callback(os.close, alive)
    variables = {"ALIVE": str(listening), "TELL_STEP": _TELL_STEP, **_names(step.name)}
    try:
        env = {**step_environment(os.environ, step, folder / TASKS), **variables}
        run.processes.append(_spawn(command, env, folder / LOG, (listening,)))
    except BaseException:
        run.resources.close()
        raise
    finally:
        os.close(listening)
    return run


def step_environment(environ: Mapping[str, str], step: SlurmStep, tasks: Path) -> dict[str, str]:
    """Return the environment in which job.sh starts a step.

    Raises LaunchError without a clone of the repository, whose scripts are needed.
    """
    root = Path(environ.get("MEGATRON_ROOT") or ROOT)
    if not (root / "examples" / "frontier" / "job.sh").is_file():
        raise LaunchError(
            f"{root} has no examples/frontier/job.sh, which starts runs under Slurm: set "
            "MEGATRON_ROOT to a clone of the repository"
        )
    inherited = {name: value for name, value in environ.items() if name != "MASTER_ADDR"}
    minutes = -(-int(step.limit_s + GRACE_S) // 60)
    first = int(inherited.get("MASTER_PORT") or _FIRST_PORT) - _PORTS.start
    return inherited | {
        "SRUN_WAIT": str(_WAIT_S),
        "SRUN_FLAGS": f"{inherited.get('SRUN_FLAGS', '')} --time={minutes} "
        f"--job-name={step.name}".strip(),
        "MEGATRON_ROOT": str(root),
        "NODES": str(len(step.hosts)),
        "HOSTS": ",".join(step.hosts),
        "TASKS_PER_NODE": str(step.tasks_per_node),
        "LOGS": str(tasks),
        "REQUEUE": "0",
        # A port that earlier steps have not used.
        "MASTER_PORT": str(_PORTS[(first + step.turn) % len(_PORTS)]),
    }


def logs_of(folder: Path) -> list[Path]:
    """Return the logs that may contain the reason for a run's end, the most informative first."""
    return [folder / LOG, *sorted((folder / TASKS).glob("*.err"))[:_MOST_LOGS]]


def _tell_step(name: str, number: str) -> subprocess.Popen[bytes]:
    """Send a signal to a step of this job through Slurm, without waiting."""
    command = ["timeout", "30", "bash", "-c", _TELL_STEP, "tell", number]
    return _spawn(command, {**os.environ, **_names(name)}, Path(os.devnull))


def _names(step: str) -> dict[str, str]:
    """Return the variables of _TELL_STEP."""
    return {"STEP": step, "JOB": job_name(os.environ) or ""}


def _spawn(
    command: Sequence[str], env: Mapping[str, str], log: Path, keep: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a process in a new session that writes to a log and inherits the descriptors `keep`."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=keep,
        )
