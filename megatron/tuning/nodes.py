"""The nodes of an allocation that trials run on: which are free, and which have died and are left out.

Under --no-kill Slurm takes a node that died out of the job and lets the rest go on. Before it knows, which takes
SlurmdTimeout (minutes), it still offers the node to every step, so that a node in question has to answer itself.
"""
from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.parallel.environment import job_name
from megatron.parallel.slurm import ask_slurm

_ANSWER_S = 60.0  # that a node has to start a task which only says its name
_STOP_S = 10.0
_ALONE = 32  # nodes that are asked by a step of their own at the same time
# Of sinfo's %T; "draining" is none of them: a node that somebody wants back later does its work until then.
_DEAD = {
    "down", "drained", "error", "fail", "failing", "reboot", "reboot_issued",
    "power_down", "powered_down", "powering_down", "powering_up", "power_up",
}  # fmt: skip
_MARKS = "*~#!%$@^-"  # behind a state; * is a node that does not respond, as all are after the controller's restart
_FAILED_ON = re.compile(r"(?:failed on node|Node failure on) ([\w.-]+)")


def _probe(hosts: Sequence[str]) -> subprocess.Popen[bytes]:
    """A step beside all others, with a task on each node that says its name. Raises OSError."""
    count = str(len(hosts))
    command = [
        "srun", "-N", count, "-n", count, "--ntasks-per-node=1", "-c", "1", "--overlap", "--kill-on-bad-exit=0",
        "--time=3", "--job-name=nodes", "-w", ",".join(hosts), "bash", "-c", 'echo "answers $SLURMD_NODENAME"',
    ]  # fmt: skip
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


class Nodes:
    """Free ones and those that are left out; `say` gets a line for each of the latter."""

    def __init__(self, hosts: Sequence[str], say: Callable[[str], object]) -> None:
        self._hosts, self._say = tuple(hosts), say
        self._free = list(hosts)
        self._out = dict[str, str]()

    @property
    def free(self) -> int:
        """How many could be taken now."""
        return len(self._free)

    @property
    def usable(self) -> int | None:
        """How many are left, free or taken; None as long as none was left out."""
        return len(self._hosts) - len(self._out) if self._out else None

    def take(self, count: int) -> tuple[str, ...]:
        """The first free ones, which are neighbours as far as the list has it."""
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def give_back(self, hosts: Iterable[str]) -> None:
        """Free again, in the order of the list, but those that are left out."""
        free = {*self._free, *hosts} - self._out.keys()
        self._free = [host for host in self._hosts if host in free]

    def leave_out(self, dead: Mapping[str, str]) -> None:
        """For good; `dead` says of each what is wrong with it."""
        for host, why in dead.items():
            if host in self._hosts and host not in self._out:
                self._out[host] = why
                left = len(self._hosts) - len(self._out)
                self._say(f"{host} {why}: it is left out from now on; {left} of {len(self._hosts)} node(s) are left")
        self.give_back(())


class Inquiry:
    """Finds out, in a thread of its own, which of some nodes of this job are dead. `probe` starts a step on nodes.

    Where Slurm does not answer, no node is: a trial's failure is then held against its layout.
    """

    def __init__(
        self, hosts: Sequence[str], environ: Mapping[str, str] = os.environ,
        probe: Callable[[Sequence[str]], subprocess.Popen[bytes]] = _probe,
    ) -> None:
        self._hosts, self._job = tuple(hosts), job_name(environ) or ""
        self._here, self._probe = environ.get("SLURMD_NODENAME"), probe
        self._lock, self._stopped = threading.Lock(), False
        self._probes: list[subprocess.Popen[bytes]] = []
        self._dead = dict[str, str]()
        self._thread = threading.Thread(target=self._ask, name="nodes", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> Mapping[str, str] | None:
        """What is wrong with each that is dead ("is down"); None as long as that is not known."""
        return None if self._thread.is_alive() else self._dead

    def stop(self) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._stopped = True
            for probe in self._probes:
                probe.terminate()

    def _ask(self) -> None:
        states, members = _states(self._hosts), _members(self._job)
        left, doubts = list[str](), dict[str, str]()
        for host in self._hosts:
            state = states.get(host, "")
            if is_dead(state):
                self._dead[host] = f"is {_base(state)}"
            elif members and host not in members:
                self._dead[host] = "is no longer in the job"
            elif responds(state):
                left.append(host)
            else:
                doubts[host] = "does not respond"
        if left or doubts:
            with contextlib.suppress(OSError):  # srun cannot be started here
                works, silent = self._silent(left)
                doubts = (doubts if works else {}) | dict.fromkeys(silent, "does not answer")
                answers = self._alone(list(doubts))
                self._dead |= {host: why for host, why in doubts.items() if host not in answers}

    def _silent(self, hosts: Sequence[str]) -> tuple[bool, list[str]]:
        """Whether a task can be started on some node, if only on that of the tuner; and nodes on which none could."""
        asked = [*hosts, *([self._here] if self._here and self._here not in hosts else [])]
        said, late = self._start_tasks([asked] if asked else [])
        answers, named = _answers(said), set(_FAILED_ON.findall(said))
        silent = [host for host in hosts if host not in answers and (host in named or (late and answers))]
        return bool(answers), silent

    def _alone(self, hosts: Sequence[str]) -> set[str]:
        """Those that answer when nothing else is asked: srun starts tasks by way of other nodes, so that a dead one can
        keep those behind it waiting, and a launch may fail for a credential that a busy node saw too late."""
        answers = set[str]()
        for begin in range(0, len(hosts), _ALONE):
            answers |= _answers(self._start_tasks([[host] for host in hosts[begin : begin + _ALONE]])[0])
        return answers

    def _start_tasks(self, groups: Iterable[Sequence[str]]) -> tuple[str, bool]:
        """What srun and a task on each node of a group say, all groups at the same time, and whether time ran out. srun
        itself ends all tasks when one node fails, by then the others have long answered; those that have not are not
        held for dead. Raises OSError."""
        with self._lock:
            self._probes = []
            for hosts in () if self._stopped else groups:
                self._probes.append(self._probe(hosts))
        said, running, late = dict[subprocess.Popen[bytes], bytes](), list(self._probes), False
        for limit_s, number in ((_ANSWER_S, signal.SIGTERM), (_STOP_S, signal.SIGKILL), (_STOP_S, signal.SIGKILL)):
            deadline = time.monotonic() + limit_s
            for probe in list(running):
                try:
                    said[probe] = probe.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
                    running.remove(probe)
                except subprocess.TimeoutExpired as error:  # in the end a child of srun still has the pipe
                    said[probe], late = error.output or b"", True
                    probe.send_signal(number)
        return b"\n".join(said.values()).decode(errors="replace"), late


def _answers(said: str) -> set[str]:
    return set(re.findall(r"^answers (\S+)$", said, re.MULTILINE))


def is_dead(state: str) -> bool:
    """Whether a node in this state, as sinfo's %T has it, can run no task: "down*", not "allocated*", "draining"."""
    return _base(state) in _DEAD


def responds(state: str) -> bool:
    """Whether Slurm's controller has heard of a node: not "allocated*". It may live all the same."""
    return _base(state) != "unknown" and "*" not in state


def _base(state: str) -> str:
    return state.rstrip(_MARKS).lower()


def _states(hosts: Sequence[str]) -> dict[str, str]:
    """Of nodes, as sinfo has them; {} where it does not answer."""
    lines = (line.split() for line in _answer("sinfo", "-a", "-h", "-N", "-n", ",".join(hosts), "-o", "%N %T"))
    return {words[0]: words[1] for words in lines if len(words) == 2}


def _members(job: str) -> set[str]:
    """Nodes that a job has now; none where nobody says."""
    nodes = " ".join(_answer("squeue", "-h", "-j", job, "-o", "%N")).strip()
    return set(_answer("scontrol", "show", "hostnames", nodes)) if nodes else set()


def _answer(*command: str) -> list[str]:
    """Lines of what one of Slurm's programs says; none where it fails."""
    try:
        done = ask_slurm(*command)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n") if done.returncode == 0 else []
