"""Ends a job that hangs, after it has said who waits in what for whom.

A thread of each rank looks at the rank's flight record. When nothing was written there for the time limit, the first
rank to notice asks all others, over the store of the rendezvous, what they do; each answers with its record and its
Python stacks, and the first living rank of a node answers for those of its node that cannot: stopped, dead, or with an
interpreter that is held up. From the answers megatron.training.safety.hangs tells a hang from a rank that is merely
slow. If it is one, the report is printed once, every other rank prints one line, torch's flight recorders are written,
processes that cannot end themselves are killed, and all end with exit code 75. Where the store does not answer, each
node reports for itself. An error that NCCL or RCCL reports is looked into at once.

Nothing here needs the main thread, which may be in a call of C that never returns.
"""
from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.errors import LaunchError
from megatron.parallel.device_calls import DeviceCalls
from megatron.parallel.environment import TRACE_FILE, Variables
from megatron.parallel.flight import FlightState
from megatron.parallel.processes import STOPPED, kill_process
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.report import bounded, python_stacks
from megatron.parallel.topology import Topology
from megatron.training.run.process import EXIT_LOST_RANK
from megatron.training.safety.hangs import judge, report

REPORT_NAME = "hang_report.txt"
_ANSWER_S = 5.0  # how long ranks, and the store, may take to answer
_NODE_S = 1.0  # how long the first rank of a node waits for the answers of the others
_LONGEST_PAUSE_S = 1.0
_LEAST_STACK, _STACK, _ALL_STACKS = 300, 2500, 10**7  # characters of a rank's stacks, and of those of all ranks
_ALONE = -1  # the number of an inquiry within the node
# At which a rank whose interpreter is held up prints its stacks. Where it is not registered it does nothing.
_DUMP_SIGNAL = signal.SIGURG


@dataclass(eq=False)
class Watchdog:
    """The thread that finds out whether this rank, and with it the job, hangs.

    timeout_s  seconds without progress; greater than 0
    folder     where hang_report.txt goes; None: it is printed only
    first_s    seconds without progress while `patient`, where that is more than `timeout_s`
    clock, sleep    seconds, and how to let them pass; by default the real ones, where `stop` ends a pause
    broken     what NCCL reports, "" for nothing; trace, the contents of torch's flight recorder, None without one. By
               default of this process's groups, where they are on a GPU
    patient    whether the ranks do something for the first time, which compiles and connects and so may take long
    before_leaving  called on the rank that reports, before any ends

    Start it on all ranks when they begin to work together, patient as it is then. Progress is whatever is written to
    the flight record: instructions, collectives, steps, phases and `flight.alive()`.
    """

    rendezvous: Rendezvous
    topology: Topology
    timeout_s: float
    folder: Path | None = None
    first_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    broken: Callable[[], str] | None = None
    trace: Callable[[], bytes] | None = None
    patient: bool = True
    before_leaving: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._recorder = self.topology.flight
        self._stopped, self._cleared, self._leaving = threading.Event(), threading.Event(), threading.Lock()
        self._pause = self._stopped.wait if self.sleep is time.sleep else self.sleep
        if self.topology.device.type == "cuda":
            self.broken = self.broken or partial(nccl_error, self.topology)
            self.trace = self.trace or getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        self._reporting = False  # this rank tells the others the verdict
        self._thread: threading.Thread | None = None

    # -- start and stop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. Harmless when called twice."""
        if self._thread is not None:
            return
        with contextlib.suppress(OSError, RuntimeError, AttributeError, ValueError):  # standard error is no file
            faulthandler.register(_DUMP_SIGNAL, all_threads=True)
        if self.topology.device.type == "cuda" and self._recorder.meter is None:
            self._recorder.meter = DeviceCalls.of(self.topology.device)
        self.rendezvous.on_inquiry = self._answer
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: at the end of the run, where ranks leave one after the other."""
        self._stopped.set()
        self.rendezvous.on_inquiry = None
        self.rendezvous.judged.set()
        faulthandler.unregister(_DUMP_SIGNAL)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LONGEST_PAUSE_S)

    # -- watching ------------------------------------------------------------------------------------------------------

    @property
    def limit_s(self) -> float:
        """Seconds without progress that it waits now."""
        return max(self.first_s, self.timeout_s) if self.patient else self.timeout_s

    def _watch(self) -> None:
        pause = min(self.timeout_s / 10, _LONGEST_PAUSE_S)
        last, quiet_s, at, error = self._recorder.progress(), 0.0, self.clock(), ""
        while True:
            self._pause(pause)
            if self._stopped.is_set():
                return
            now, progress = self.clock(), self._recorder.progress()
            # Not by the clock: a job that was suspended as a whole has not hung for as long.
            quiet_s, at = quiet_s + min(now - at, 2 * pause), now
            if progress != last:
                last, quiet_s = progress, 0.0
            if self.broken is not None and not error and (error := self.broken()):
                self._write(error)
                quiet_s = self.limit_s
            if quiet_s >= self.limit_s:
                self._investigate()
                quiet_s, at = self.limit_s / 2, self.clock()

    def _investigate(self) -> None:
        """This rank makes no progress: find out whether the job hangs, and end it if so."""
        self.rendezvous.judged.clear()
        self._cleared.clear()
        sys.audit("megatron.training.inquiry")
        several = self.topology.world.size > 1
        with contextlib.suppress(RuntimeError, LaunchError):  # the store's host is the one that hangs, perhaps
            if several and bounded(self._claim, _ANSWER_S):
                self._ask_all()
                return
            if several and self._cleared.wait(4 * _ANSWER_S + 2 * self.rendezvous.pause_s):
                return
        self._report_alone()

    def _claim(self) -> bool:
        """Whether this rank is the one that asks the others."""
        own = str(self.topology.rank)
        holder: bytes = self.rendezvous.store.compare_set("hang/claim", "", own)
        return holder.decode() == own

    def _ask_all(self) -> None:
        """Ask all ranks, judge, and tell them."""
        self._reporting = True
        store, layout = self.rendezvous.store, self.topology.layout
        number = bounded(self.rendezvous.inquire, _ANSWER_S)
        seen = bounded(lambda: self._gather(number), 4 * _ANSWER_S + self.rendezvous.pause_s)
        places = bounded(lambda: self.rendezvous.places, _ANSWER_S) if len(seen) < layout.world_size else ()
        verdict = judge(seen, layout, self.limit_s, places)
        if verdict is None:
            self._reporting = False
            bounded(lambda: store.delete_key("hang/claim"), _ANSWER_S)
            self._all_clear()
        else:
            self._print(report(verdict, seen, layout))
            self.before_leaving()
        conclusion = "" if verdict is None else verdict.conclusion
        bounded(lambda: store.set(f"hang/{number}/verdict", conclusion), _ANSWER_S)
        if verdict is not None:
            self._leave(number)

    def _gather(self, number: int) -> dict[int, FlightState]:
        """The answers that came in time, by rank."""
        rendezvous, kind, size = self.rendezvous, f"hang/{number}", self.topology.world.size
        deadline = self.clock() + _ANSWER_S + rendezvous.pause_s + 2 * _NODE_S
        while rendezvous.ranks_without(kind, 1) and self.clock() < deadline:
            self.sleep(rendezvous.pause_s / 2)
        missing = set(rendezvous.ranks_without(kind, size))
        ranks = [rank for rank in range(size) if rank not in missing]
        answers = rendezvous.values([f"{kind}/{rank}" for rank in ranks])
        return {rank: FlightState.from_json(text) for rank, text in zip(ranks, answers, strict=True)}

    # -- answering -----------------------------------------------------------------------------------------------------

    def _answer(self, number: int) -> None:
        """An inquiry came: tell what this rank does, and its neighbours that cannot; then act on the verdict."""
        store, own = self.rendezvous.store, self.topology.rank
        self.rendezvous.judged.clear()
        self._write_answer(number)
        state = FlightState.read(self._recorder.buffer)
        assert state is not None, "the rendezvous has described it"
        store.set(f"hang/{number}/{own}", state.to_json())
        states = self._neighbours(number)
        if self._speaks_for(states, number):
            for state in states:
                if state.inquiry != number:
                    store.set(f"hang/{number}/{state.rank}", state.to_json())
        # Where no verdict comes in time, whoever has no progress reports alone.
        if self.rendezvous.comes(f"hang/{number}/verdict", 6 * _ANSWER_S + self.rendezvous.pause_s):
            conclusion = store.get(f"hang/{number}/verdict").decode()
            if not conclusion:
                self._all_clear()
            elif not self._reporting:
                self._write(f"the job hangs: {conclusion}")
                self._leave(number)

    def _write_answer(self, number: int) -> None:
        """What this rank does, into its record. A device that does not even answer its host is told in the text."""
        meter, note = self._recorder.meter, ""
        if meter is not None:
            try:
                where = bounded(lambda: meter.where(self._recorder.posted), 1.0)
                self._recorder.device_is(*where)
            except (RuntimeError, LaunchError) as error:
                note = f"\nthe device does not tell where it is: {str(error).splitlines()[0]}"
        limit = max(_LEAST_STACK, min(_STACK, _ALL_STACKS // self.topology.world.size))
        self._recorder.answer(number, python_stacks(limit) + note)

    def _neighbours(self, number: int) -> list[FlightState]:
        """The records of this node, once all that can have answered."""
        sys.audit("megatron.training.answered", number)
        self.sleep(_NODE_S)
        states = self.rendezvous.flight_file.states()
        return [state if state.inquiry == number else dataclasses.replace(state, stack="") for state in states]

    def _speaks_for(self, states: list[FlightState], number: int) -> bool:
        """Whether this rank is the first of its node that has answered."""
        own = self.topology.rank
        return own == next((state.rank for state in states if state.inquiry == number), own)

    def _all_clear(self) -> None:
        """It was no hang: forget the answer."""
        self._recorder.answer(0)
        self._recorder.device_is(None, None)
        self.rendezvous.judged.set()
        self._cleared.set()
        sys.audit("megatron.training.cleared")

    # -- without the store ---------------------------------------------------------------------------------------------

    def _report_alone(self) -> None:
        """Judge by the records of this node; the first rank of the node that has no progress reports for all."""
        self._write_answer(_ALONE)
        states, layout = self._neighbours(_ALONE), self.topology.layout
        seen = {state.rank: state for state in states}
        verdict = judge(seen, layout, self.limit_s)
        if verdict is None:
            self._all_clear()
            return
        if len(seen) < layout.world_size and not set(verdict.culprits) & set(seen):
            text = f"the store, which rank {self.rendezvous.server} serves, does not answer; the ranks of this node "
            verdict = dataclasses.replace(verdict, conclusion=f"{text}wait for ranks elsewhere")
        if self._speaks_for(states, _ALONE):
            self._print(report(verdict, seen, layout))
        else:
            self._write(f"the job hangs: {verdict.conclusion}")
            self.sleep(_NODE_S)  # a launcher may end all ranks with the first one that ends
        self._leave(None)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"rank {self.topology.rank}: {text}\n")
            sys.stderr.flush()

    def _print(self, text: str) -> None:
        """The report, on standard error and in the folder."""
        self._write(text)
        if self.folder is None:
            return
        path = self.folder / REPORT_NAME

        def append() -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n\n")

        with contextlib.suppress(OSError, LaunchError):  # a file system that hangs may be the reason
            bounded(append, _ANSWER_S)

    def _leave(self, number: int | None) -> None:
        """End this process, and those of this node that cannot; the one with the store stays until the others have read
        the verdict."""
        with self._leaving:
            sys.audit("megatron.training.leaving")
            self._signal_silent(_DUMP_SIGNAL)  # not before the verdict: it may crash a process that runs
            self._write_trace()
            if number is None:
                self.sleep(_NODE_S)  # for the others to see that this rank has reported
            else:
                with contextlib.suppress(RuntimeError, LaunchError):
                    bounded(lambda: self._await_others(number), _ANSWER_S + self.rendezvous.pause_s)
            self._signal_silent(signal.SIGKILL)
            sys.audit("megatron.training.left")
            os._exit(EXIT_LOST_RANK)

    def _signal_silent(self, number: int) -> None:
        """Send a signal to those ranks of this node that have not answered."""
        for state in self.rendezvous.flight_file.states():
            if state.inquiry == 0 or state.process == STOPPED:
                kill_process(state.pid, state.process_start, number)

    def _write_trace(self) -> None:
        """Torch's flight recorder, into the file that torch itself would take for this rank."""
        prefix = os.environ.get(Variables(os.environ).first(TRACE_FILE) or "")
        if self.trace is None or prefix is None:
            return
        # torch holds the interpreter's lock while it asks the device: if that never answers, no thread of Python ends
        # this process, but the signal does.
        signal.setitimer(signal.ITIMER_REAL, 4 * _ANSWER_S)
        path, trace = Path(f"{prefix}{self.topology.rank}"), self.trace

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trace())

        with contextlib.suppress(OSError, RuntimeError, LaunchError):
            bounded(write, _ANSWER_S)

    def _await_others(self, number: int) -> None:
        store, deadline = self.rendezvous.store, self.clock() + _ANSWER_S - 1 + self.rendezvous.pause_s
        gone = store.add(f"hang/{number}/gone", 1)
        while self.rendezvous.serves_store and gone < self.topology.world.size and self.clock() < deadline:
            self.sleep(0.02)
            gone = store.add(f"hang/{number}/gone", 0)


def nccl_error(topology: Topology) -> str:
    """Which of this rank's groups NCCL or RCCL has given up, and why; "" for none, and with a torch that cannot tell.

    torch's threads notice and, under TORCH_NCCL_ASYNC_ERROR_HANDLING=0, leave it at that. Asks nobody.
    """
    groups = (topology.tensor, topology.pipeline, topology.data, topology.model, topology.embedding, topology.world)
    for group in groups:
        error = "SUCCESS"
        if group is not None and group.handle is not None:
            with contextlib.suppress(AttributeError, RuntimeError):
                error = group.handle._get_backend(topology.device).get_error().name
        if group is not None and error != "SUCCESS":
            return f"NCCL reports {error} in the {group.kind} group of {len(group.ranks)} ranks"
    return ""
