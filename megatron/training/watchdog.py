"""Ends a job that hangs, after it has said who waits in what for whom.

A thread of each rank looks at the rank's flight record. When nothing was written there for the time limit, the first
rank to notice asks all others, over the store of the rendezvous, what they do; each answers with its record and its
Python stacks, and the first living rank of a node answers for those of its node that cannot: stopped, dead, or with an
interpreter that is held up. From the answers megatron.training.hangs tells a hang from a rank that is merely slow. If
it is one, the report is printed once, every other rank prints one line, torch's flight recorders are written,
processes that cannot end themselves are killed, and all end with exit code 75. Where the store does not answer, each
node reports for itself. An error that NCCL or RCCL reports is looked into at once.

Nothing here needs the main thread, which may be in a call of C that never returns.
"""
from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.errors import LaunchError
from megatron.parallel.device_calls import DeviceCalls
from megatron.parallel.environment import TRACE_FILE, Variables
from megatron.parallel.flight import FlightRecorder, FlightState
from megatron.parallel.processes import DEAD, GONE, STOPPED, kill_process, process_state
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.report import bounded, python_stacks
from megatron.parallel.topology import Topology
from megatron.training.failures import EXIT_LOST_RANK
from megatron.training.hangs import Seen, Verdict, judge, report

REPORT_NAME = "hang_report.txt"
_ANSWER_S = 5.0  # how long ranks, and the store, may take to answer
_NODE_S = 1.0  # how long the first rank of a node waits for the answers of the others
_LONGEST_PAUSE_S = 1.0
_SHORT_STACK = 300  # characters of a stack where there are more ranks than _FULL_STACKS
_FULL_STACKS = 4096
_FIRED, _REPORTED = 1, 2  # flags of an answer: no progress within the limit; the node's report is printed
_ALONE = -1  # the number of an inquiry within the node
_DUMP_SIGNAL = signal.SIGRTMIN + 5  # at which faulthandler writes the stacks of a rank whose interpreter is held up
_DUMP_NAME = "megatron-stacks"


class Watchdog:
    """The thread that finds out whether this rank, and with it the job, hangs.

    timeout_s  seconds without progress; greater than 0
    folder     where hang_report.txt goes; None: it is printed only
    first_s    seconds without progress while `patient`, where that is more than `timeout_s`
    before_leaving  called on the rank that reports, before any ends
    patient    whether the ranks do something for the first time, which compiles and connects and so may take long
    broken     what NCCL reports, "" for nothing; trace, the contents of torch's flight recorder, None without one. By
               default of this process's groups, where they are on a GPU
    clock, sleep    seconds, and how to let them pass; by default the real ones, where `stop` ends a pause

    Start it on all ranks when they begin to work together, patient as it is then. Progress is whatever is written to
    the flight record: instructions, collectives, steps, phases and `flight.alive()`.
    """

    def __init__(
        self, recorder: FlightRecorder, rendezvous: Rendezvous, topology: Topology, timeout_s: float,
        folder: Path | None = None, first_s: float = 0.0, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None, broken: Callable[[], str] | None = None,
        trace: Callable[[], bytes] | None = None,
    ) -> None:
        assert recorder is topology.flight, "the record that the groups write to"
        self._recorder, self._rendezvous, self._topology = recorder, rendezvous, topology
        self._shortest_s, self._first_s, self._folder = timeout_s, max(first_s, timeout_s), folder
        self.patient = True
        self.before_leaving: Callable[[], object] = lambda: None
        self._stopped, self._cleared, self._leaving = threading.Event(), threading.Event(), threading.Lock()
        self._clock, self._sleep, self._pause = clock, sleep or time.sleep, sleep or self._stopped.wait
        on_gpu = topology.device.type == "cuda"
        self._broken = broken or (partial(nccl_error, topology) if on_gpu else str)
        self._trace = trace or (getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None) if on_gpu else None)
        self._collecting, self._fired = False, False
        self._inquiry = _ALONE  # the one that is being answered
        self._thread: threading.Thread | None = None
        self._dump: int | None = None

    # -- start and stop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. Harmless when called twice."""
        if self._thread is not None:
            return
        with contextlib.suppress(OSError, RuntimeError, AttributeError):
            self._dump = os.memfd_create(_DUMP_NAME)
            faulthandler.register(_DUMP_SIGNAL, file=self._dump, all_threads=True)
        if self._topology.device.type == "cuda" and self._recorder.meter is None:
            self._recorder.meter = DeviceCalls.on_cuda()
        self._rendezvous.on_inquiry = self._answer
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch: at the end of the run, where ranks leave one after the other."""
        self._stopped.set()
        self._rendezvous.on_inquiry = None
        self._rendezvous.judged.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LONGEST_PAUSE_S)
        if self._dump is not None:
            faulthandler.unregister(_DUMP_SIGNAL)
            os.close(self._dump)
            self._dump = None

    # -- watching ------------------------------------------------------------------------------------------------------

    @property
    def limit_s(self) -> float:
        """Seconds without progress that it waits now."""
        return self._first_s if self.patient else self._shortest_s

    def _watch(self) -> None:
        pause = min(self._shortest_s / 10, _LONGEST_PAUSE_S)
        last, quiet_s, at, error = self._recorder.progress(), 0.0, self._clock(), ""
        while True:
            self._pause(pause)
            if self._stopped.is_set():
                return
            now, progress = self._clock(), self._recorder.progress()
            # Not by the clock: a job that was suspended as a whole has not hung for as long.
            quiet_s, at = quiet_s + min(now - at, 2 * pause), now
            if progress != last:
                last, quiet_s = progress, 0.0
            if not error and (error := self._broken()):
                _write(f"rank {self._topology.rank}: {error}\n")
                quiet_s = self.limit_s
            if quiet_s >= self.limit_s:
                quiet_s = self.limit_s - max(self._investigate(), pause)
                at = self._clock()

    def _investigate(self) -> float:
        """This rank makes no progress: find out whether the job hangs, and end it if so. Otherwise the seconds after
        which to ask again."""
        self._rendezvous.judged.clear()
        self._cleared.clear()
        self._fired = True
        sys.audit("megatron.training.inquiry")
        self._write_answer(self._inquiry)
        try:
            collector = self._topology.world.size > 1 and bounded(self._claim, _ANSWER_S)
            if collector:
                return self._collect()
            if self._topology.world.size > 1 and self._cleared.wait(4 * _ANSWER_S + 2 * self._rendezvous.pause_s):
                return self.limit_s / 2
        except (RuntimeError, LaunchError):
            pass  # the store's host is the one that hangs, perhaps
        return self._report_alone()

    def _claim(self) -> bool:
        """Whether this rank is the one that asks the others."""
        own = str(self._topology.rank)
        holder: bytes = self._rendezvous.store.compare_set("hang/claim", "", own)
        return holder.decode() == own

    def _collect(self) -> float:
        """Ask all ranks, judge, and tell them."""
        self._collecting = True
        store, ranks = self._rendezvous.store, range(self._topology.world.size)
        number = bounded(self._rendezvous.inquire, _ANSWER_S)
        answers = bounded(lambda: self._gather(store, number), 4 * _ANSWER_S + self._rendezvous.pause_s)
        seen = {rank: Seen.from_json(text) for rank, text in answers.items()}
        missing = [rank for rank in ranks if rank not in seen]
        places = dict(enumerate(bounded(lambda: self._rendezvous.places, _ANSWER_S))) if missing else {}
        verdict = judge(seen, self._topology.layout, self.limit_s, places)
        self._collecting = verdict.hang
        if not verdict.hang:
            bounded(lambda: store.delete_key("hang/claim"), _ANSWER_S)
            self._all_clear()
        told = json.dumps({"hang": verdict.hang, "line": verdict.conclusion})
        if verdict.hang:
            self._print(report(verdict, seen, self._topology.layout, missing))
            self.before_leaving()
        bounded(lambda: store.set(f"hang/{number}/verdict", told), _ANSWER_S)
        if verdict.hang:
            self._leave(number, len(missing) + sum(of.lost or not of.answered for of in seen.values()))
        return verdict.retry_s

    def _gather(self, store: Any, number: int) -> dict[int, bytes]:
        """The answers that came in time, by rank."""
        ranks = list(range(self._topology.world.size))
        deadline, found = self._clock() + _ANSWER_S + self._rendezvous.pause_s + 2 * _NODE_S, dict[int, bytes]()
        while ranks and self._clock() < deadline:
            late = []
            for first in range(0, len(ranks), 64):
                batch = ranks[first : first + 64]
                keys = [f"hang/{number}/{rank}" for rank in batch]
                if store.check(keys):
                    found.update(zip(batch, store.multi_get(keys), strict=True))
                elif len(batch) > 1 and self._clock() > deadline - 2 * _NODE_S:
                    there = [rank for rank, key in zip(batch, keys, strict=True) if store.check([key])]
                    found.update((rank, store.get(f"hang/{number}/{rank}")) for rank in there)
                    late += [rank for rank in batch if rank not in found]
                else:
                    late += batch
            ranks = late
            self._sleep(max(0.05, len(ranks) / 10000))
        return found

    # -- answering -----------------------------------------------------------------------------------------------------

    def _answer(self, number: int) -> None:
        """An inquiry came: tell what this rank does, and its neighbours that cannot; then act on the verdict."""
        store = self._rendezvous.store
        self._rendezvous.judged.clear()
        self._inquiry = number
        self._write_answer(number)
        self._publish(store, number, [seen for seen in self._states() if seen.state.rank == self._topology.rank])
        sys.audit("megatron.training.answered", number)
        self._sleep(_NODE_S)
        states = self._states()
        answered = [seen.state.rank for seen in states if seen.state.inquiry == number]
        if answered and answered[0] == self._topology.rank:
            silent = [seen.state for seen in states if seen.state.inquiry != number]
            self._publish(store, number, [self._unanswered(state) for state in silent])
        # Where none comes in time, whoever has no progress reports alone.
        if self._rendezvous.comes(f"hang/{number}/verdict", 6 * _ANSWER_S + self._rendezvous.pause_s):
            verdict = json.loads(store.get(f"hang/{number}/verdict"))
            if verdict["hang"] and not self._collecting:
                self._print_line(verdict["line"])
                self._leave(number)
            if not verdict["hang"]:
                self._all_clear()

    def _write_answer(self, number: int) -> None:
        """What this rank does, into its record. A device that does not even answer its host is told in the text."""
        meter, note = self._recorder.meter, ""
        if isinstance(meter, DeviceCalls):
            try:
                where = bounded(lambda: meter.where(self._recorder.posted), 1.0)
                self._recorder.device_is(*where)
            except (RuntimeError, LaunchError) as error:
                note = f"\nthe device does not tell where it is: {str(error).splitlines()[0]}"
        self._recorder.answer(number, _FIRED if self._fired else 0, python_stacks() + note)

    def _publish(self, store: Any, number: int, found: list[Seen]) -> None:
        if self._topology.world.size > _FULL_STACKS:
            found = [Seen(seen.state, seen.process, seen.answered, _innermost(seen.stack)) for seen in found]
        for seen in found:
            store.set(f"hang/{number}/{seen.state.rank}", seen.to_json())

    def _states(self) -> list[Seen]:
        """The records of this node's ranks, or at least of this one."""
        file = self._rendezvous.flight_file
        states = [FlightState.read(bytes(self._recorder.buffer))] if file is None else file.states()
        return [_seen(state) for state in states if state is not None]

    def _unanswered(self, state: FlightState) -> Seen:
        """A rank of this node that did not answer; its stacks as far as they can be had without its help."""
        process = process_state(state.pid, state.process_start)
        stack = "" if process in (STOPPED, DEAD, GONE) else _dumped_stacks(state)
        return Seen(_without_text(state), process, False, stack)

    def _all_clear(self) -> None:
        """It was no hang: forget the answer."""
        self._fired, self._inquiry = False, _ALONE
        self._recorder.answer(0, 0, "")
        self._recorder.device_is(None, None)
        self._rendezvous.judged.set()
        self._cleared.set()
        sys.audit("megatron.training.cleared")

    # -- without the store ---------------------------------------------------------------------------------------------

    def _report_alone(self) -> float:
        """Judge by the records of this node; the first rank of the node that has no progress reports for all."""
        self._write_answer(_ALONE)
        sys.audit("megatron.training.answered", _ALONE)
        self._sleep(_NODE_S)
        states = self._states()
        fired = [seen.state for seen in states if seen.state.flags & (_FIRED | _REPORTED)]
        found = {
            seen.state.rank: seen if seen.answered else self._unanswered(seen.state) for seen in states
        }
        verdict = judge(found, self._topology.layout, self.limit_s, {})
        verdict = _about_this_node(verdict, found, self._topology, self._rendezvous.server)
        if not verdict.hang:
            self._all_clear()
            return verdict.retry_s
        if not fired or fired[0].rank == self._topology.rank:
            self._print(report(verdict, found, self._topology.layout))
            self._recorder.answer(_ALONE, _FIRED | _REPORTED, "")
        else:
            deadline = self._clock() + 2 * _ANSWER_S
            while self._clock() < deadline and not any(s.state.flags & _REPORTED for s in self._states()):
                self._sleep(0.05)
            self._print_line(verdict.conclusion)
        self._leave(None)
        return 0.0

    # -- the end -------------------------------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        """The report, on standard error and in the folder."""
        _write(f"rank {self._topology.rank}: {text}\n")
        if self._folder is None:
            return

        def append() -> None:
            assert self._folder is not None
            with open(self._folder / REPORT_NAME, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n\n")

        with contextlib.suppress(OSError, LaunchError):  # a file system that hangs may be the reason
            bounded(append, _ANSWER_S)

    def _print_line(self, conclusion: str) -> None:
        _write(f"rank {self._topology.rank}: the job hangs: {conclusion}\n")

    def _leave(self, number: int | None, lost: int = 0) -> None:
        """End this process, and those of this node that cannot; the one with the store stays until the others, without
        those that are `lost`, have read the verdict."""
        with self._leaving:
            sys.audit("megatron.training.leaving")
            self._write_trace()
            if number is None:
                self._sleep(_NODE_S)  # for the others to see that this rank has reported
            else:
                with contextlib.suppress(RuntimeError, LaunchError):
                    bounded(lambda: self._await_others(number, lost), _ANSWER_S + self._rendezvous.pause_s)
            _kill(seen.state for seen in self._states() if seen.state.inquiry == 0 or seen.process == STOPPED)
            sys.audit("megatron.training.left")
            os._exit(EXIT_LOST_RANK)

    def _write_trace(self) -> None:
        """Torch's flight recorder, into the file that torch itself would take for this rank."""
        prefix = os.environ.get(Variables(os.environ).first(TRACE_FILE) or "")
        if self._trace is None or prefix is None:
            return
        # torch holds the interpreter's lock while it asks the device: if that never answers, no thread of Python ends
        # this process, but the signal does.
        signal.setitimer(signal.ITIMER_REAL, 4 * _ANSWER_S)
        path, trace = Path(f"{prefix}{self._topology.rank}"), self._trace

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trace())

        with contextlib.suppress(OSError, RuntimeError, LaunchError):
            bounded(write, _ANSWER_S)

    def _await_others(self, number: int, lost: int) -> None:
        store, deadline = self._rendezvous.store, self._clock() + _ANSWER_S - 1 + self._rendezvous.pause_s
        gone = store.add(f"hang/{number}/gone", 1)
        while self._rendezvous.serves_store and gone < self._topology.world.size - lost:
            if self._clock() > deadline:
                return
            self._sleep(0.02)
            gone = store.add(f"hang/{number}/gone", 0)


def nccl_error(topology: Topology) -> str:
    """Which of this rank's groups NCCL or RCCL has given up, and why; "" for none, and with a torch that cannot tell.

    torch's threads notice and, under TORCH_NCCL_ASYNC_ERROR_HANDLING=0, leave it at that. Asks nobody.
    """
    groups = (topology.tensor, topology.pipeline, topology.data, topology.model, topology.embedding, topology.world)
    for group in groups:
        if group is None or group.handle is None:
            continue
        error = "SUCCESS"
        with contextlib.suppress(AttributeError, RuntimeError):
            error = group.handle._get_backend(topology.device).get_error().name
        if error != "SUCCESS":
            return f"NCCL reports {error} in the {group.kind} group of {len(group.ranks)} ranks"
    return ""


def _seen(state: FlightState) -> Seen:
    process = process_state(state.pid, state.process_start)
    return Seen(_without_text(state), process, state.inquiry != 0 and bool(state.text), state.text)


def _without_text(state: FlightState) -> FlightState:
    return dataclasses.replace(state, text="")


def _innermost(stack: str) -> str:
    """The last frames of the main thread."""
    return stack.split("\n\n")[0][-_SHORT_STACK:]


def _about_this_node(verdict: Verdict, found: dict[int, Seen], topology: Topology, server: int) -> Verdict:
    """A verdict from the records of one node, which knows nothing of the others: that the store is silent is told."""
    if len(found) == topology.world.size:
        return verdict
    here = [seen for seen in found.values() if not seen.lost and seen.answered]
    if not verdict.hang or any(rank in found for rank in verdict.culprits) or not here:
        return verdict
    text = f"the store, which rank {server} serves, does not answer; the ranks of this node wait for ranks elsewhere"
    return Verdict(True, text, verdict.culprits)


def _dumped_stacks(state: FlightState, wait_s: float = 0.3) -> str:
    """The stacks that faulthandler writes in the signal handler of a process whose interpreter does not run."""
    folder = Path(f"/proc/{state.pid}/fd")
    try:
        dump = next(path for path in folder.iterdir() if _DUMP_NAME in os.readlink(path))
        os.kill(state.pid, _DUMP_SIGNAL)
        time.sleep(wait_s)
        text = dump.read_text(errors="replace")
    except (OSError, StopIteration):
        return ""
    return _as_stacks(text)


def _as_stacks(text: str) -> str:
    """What faulthandler writes, with the current thread's frames first and the innermost last."""
    parts = [part.strip().splitlines() for part in text.split("\n\n") if part.strip()]
    frames = [[line.strip().removeprefix("File ") for line in part[1:]][::-1] for part in parts]
    current = next((i for i, part in enumerate(parts) if part[0].startswith("Current thread")), len(parts) - 1)
    return "\n".join(frames[current][-20:]) if frames else ""


def _kill(states: Iterable[FlightState]) -> None:
    for state in states:
        kill_process(state.pid, state.process_start)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
