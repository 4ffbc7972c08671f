"""The nodes of an allocation that runs are on: which are free, and which have died and are left out.

Under --no-kill Slurm takes a node that died out of the job and lets the rest go on. Before it knows, which takes
SlurmdTimeout (minutes), it still offers the node to every step, so that a node in question has to answer itself.
"""
from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.parallel.environment import job_name
from megatron.parallel.slurm import ask_slurm

_ANSWER_S = 60.0  # that a node has to start a task which only says its name
_AT_ONCE = 32  # nodes that are asked at the same time, each by a step of its own
# Of sinfo's %T; "draining" is none of them: a node that somebody wants back later does its work until then.
_DEAD = {
    "down", "drained", "error", "fail", "failing", "reboot", "reboot_issued",
    "power_down", "powered_down", "powering_down", "powering_up", "power_up",
}  # fmt: skip
_MARKS = "*~#!%$@^-"  # behind a state; * is a node that does not respond, as all are after the controller's restart


class Nodes:
    """Free ones and those that are left out; `say` gets a line for each of the latter."""

    def __init__(self, hosts: Sequence[str], say: Callable[[str], object]) -> None:
        self._hosts, self._say = tuple(hosts), say
        self.free = list(hosts)
        self._out = dict[str, str]()

    @property
    def usable(self) -> int:
        """How many are left, free or taken."""
        return len(self._hosts) - len(self._out)

    def take(self, count: int) -> tuple[str, ...]:
        """The first free ones, which are neighbours as far as the list has it."""
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        return taken

    def give_back(self, hosts: Iterable[str]) -> None:
        """Free again, in the order of the list, but those that are left out."""
        free = {*self.free, *hosts} - self._out.keys()
        self.free = [host for host in self._hosts if host in free]

    def leave_out(self, dead: Mapping[str, str]) -> None:
        """Leave nodes out for good; `dead` says of each what is wrong with it."""
        for host, why in dead.items():
            if host in self._hosts and host not in self._out:
                self._out[host] = why
                self._say(f"{host} {why}: it is left out from now on; {self.usable} of {len(self._hosts)} node(s) are "
                          "left")  # fmt: skip
        self.give_back(())


class Inquiry:
    """Finds out, in a thread of its own, which of some nodes of this job are dead.

    dead  what is wrong with each that is ("is down"); None as long as that is not known

    Where Slurm does not answer, no node is: a failure is then held against what ran.
    """

    def __init__(self, hosts: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        self._hosts, self._job = tuple(hosts), job_name(environ) or ""
        self._here = environ.get("SLURMD_NODENAME")
        self.dead: dict[str, str] | None = None
        threading.Thread(target=self._ask, name="nodes", daemon=True).start()

    def _ask(self) -> None:
        found = dict[str, str]()
        try:
            lines = (line.split() for line in _answer("sinfo", "-a", "-h", "-N", "-n", ",".join(self._hosts), "-o",
                                                      "%N %T"))  # fmt: skip
            states = {words[0]: words[1].rstrip(_MARKS).lower() for words in lines if len(words) == 2}
            nodes = " ".join(_answer("squeue", "-h", "-j", self._job, "-o", "%N")).strip()
            members = _answer("scontrol", "show", "hostnames", nodes) if nodes else []
            for host in self._hosts:
                if states.get(host) in _DEAD:
                    found[host] = f"is {states[host]}"
                elif members and host not in members:
                    found[host] = "is no longer in the job"
            doubtful = [host for host in self._hosts if host not in found]
            # The tuner's own node answers as long as steps can be started at all.
            asked = list(dict.fromkeys([*doubtful, *([self._here] if self._here else [])]))
            answers = self.answers(asked)
            if answers:
                # Asked again: srun starts tasks by way of other nodes, and a busy one may see a credential too late.
                silent = [host for host in doubtful if host not in answers]
                answers |= self.answers(silent)
                found |= dict.fromkeys((host for host in silent if host not in answers), "does not answer")
        except OSError:  # srun cannot be started here
            pass
        finally:
            self.dead = found

    def answers(self, hosts: Sequence[str]) -> set[str]:
        """Nodes that start a task which says their name, each asked by a step beside all others. Raises OSError."""
        found = set[str]()
        for begin in range(0, len(hosts), _AT_ONCE):
            probes = [_probe(host) for host in hosts[begin : begin + _AT_ONCE]]
            deadline = time.monotonic() + _ANSWER_S
            for probe in probes:
                try:
                    said = probe.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
                except subprocess.TimeoutExpired as error:
                    said = error.output or b""
                    probe.kill()
                found.update(re.findall(r"^answers (\S+)$", said.decode(errors="replace"), re.MULTILINE))
        return found


def _probe(host: str) -> subprocess.Popen[bytes]:
    command = ["srun", "-N", "1", "-n", "1", "-c", "1", "--overlap", "--time=3", "--job-name=nodes", "-w", host,
               "bash", "-c", 'echo "answers $SLURMD_NODENAME"']  # fmt: skip
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _answer(*command: str) -> list[str]:
    """Lines of what one of Slurm's programs says; none where it fails."""
    try:
        done = ask_slurm(*command)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n") if done.returncode == 0 else []
