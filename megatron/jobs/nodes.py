"""The nodes of an allocation: which are free, and which do not answer any more and are left out.

Under --no-kill Slurm takes a node that died out of the job and lets the rest go on. Until it knows, which takes
SlurmdTimeout (minutes), it offers the node to every step. So a node in question has to start a task itself.
"""
from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence

_ANSWER_S = 60.0  # for a node to start a task that only prints its name


class Nodes:
    """Free nodes and those that are left out; `say` gets a line for each of the latter."""

    def __init__(self, hosts: Sequence[str], say: Callable[[str], object]) -> None:
        self._hosts, self._say = tuple(hosts), say
        self.free = list(hosts)
        self._out = set[str]()

    @property
    def usable(self) -> int:
        """How many are left, free or taken."""
        return len(self._hosts) - len(self._out)

    def take(self, count: int) -> tuple[str, ...]:
        """The first free ones, which are neighbours as far as the list has it."""
        taken, self.free = tuple(self.free[:count]), self.free[count:]
        return taken

    def give_back(self, hosts: Iterable[str]) -> None:
        """Make nodes free again, in the order of the list, except those that are left out."""
        free = {*self.free, *hosts} - self._out
        self.free = [host for host in self._hosts if host in free]

    def leave_out(self, dead: Iterable[str]) -> None:
        """Leave nodes out for good."""
        for host in dead:
            if host in self._hosts and host not in self._out:
                self._out.add(host)
                self._say(f"{host} does not answer: it is left out from now on; {self.usable} of {len(self._hosts)} "
                          "node(s) are left")  # fmt: skip
        self.give_back(())


class Inquiry:
    """Finds out, in a thread of its own, which of some nodes of this job are dead.

    dead: those that start no task while another node does; None until that is known. Where no node starts one the
    fault is Slurm's, and none is dead: a failure is then held against what ran.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self.dead: list[str] | None = None
        threading.Thread(target=self._ask, name="nodes", daemon=True).start()

    def _ask(self) -> None:
        dead = list[str]()
        try:
            # Our own node answers as long as steps can be started at all.
            here = [host for host in [os.environ.get("SLURMD_NODENAME")] if host]
            answered = self.answers(list(dict.fromkeys([*self._hosts, *here])))
            if answered:
                # Asked again: srun starts tasks by way of other nodes, and a busy one may see a credential too late.
                silent = [host for host in self._hosts if host not in answered]
                answered |= self.answers(silent)
                dead = [host for host in silent if host not in answered]
        except OSError:  # srun cannot be started here
            pass
        finally:
            self.dead = dead

    def answers(self, hosts: Sequence[str]) -> set[str]:
        """Nodes that start a task which prints their name, each in a step of its own beside all that runs there. Raises
        OSError."""
        words = ["srun", "-N", "1", "-n", "1", "-c", "1", "--overlap", "--time=3", "--job-name=nodes", "-w"]
        probes = [
            subprocess.Popen([*words, host, "bash", "-c", 'echo "answers $SLURMD_NODENAME"'], stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            for host in hosts
        ]  # fmt: skip
        found, deadline = set[str](), time.monotonic() + _ANSWER_S
        for probe in probes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said = probe.communicate(timeout=max(0.1, deadline - time.monotonic()))[0]
                found.update(re.findall(r"^answers (\S+)$", said, re.MULTILINE))
            probe.kill()
        return found
