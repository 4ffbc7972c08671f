"""Detection of hangs, with a report on which rank waits in which call for which other ranks.

A thread on each rank checks the rank's flight record. If nothing has been written to it for the
time limit, the first rank to notice asks all others for their state, through the store of the
rendezvous. Each answers with its record and its Python stacks. The first rank on a node that can
answer does so for the ranks that cannot: those that are stopped or dead, or whose interpreter is
blocked. From the answers, `judge` tells a hang from a slow rank. If the job hangs, one rank prints
the report and every other rank one line, torch's flight recorders are written, processes that
cannot end themselves are killed, and all end with exit code 75. If the store does not answer, each
node reports for itself. An error that NCCL or RCCL reports is investigated immediately.

This module does not need the main thread, which may be in a C call that never returns.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.errors import EXIT_LOST_RANK, LaunchError
from megatron.parallel.environment import TRACE_FILE, Variables
from megatron.parallel.flight import DeviceCalls, FlightState, PendingCall
from megatron.parallel.host_processes import (
    DEAD,
    GONE,
    STOPPED,
    bounded,
    kill_process,
    python_stacks,
)
from megatron.parallel.layout import Layout
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.topology import Topology, compress_ranks

REPORT_NAME = "hang_report.txt"
_ANSWER_S = 5.0  # time for ranks, and for the store, to answer
_NODE_S = 1.0  # how long the first rank on a node waits for the answers of the others
_LONGEST_PAUSE_S = 1.0
# characters of one rank's stacks, at least and at most, and of all ranks' stacks together
_LEAST_STACK = 300
_STACK = 2500
_ALL_STACKS = 10**7
_SHOWN = 64  # largest number of ranks in a report, with half as many stacks
_NAMED = 8  # largest number of places or calls in a conclusion
_ALONE = -1  # the number of an inquiry within the node
# A rank with a blocked interpreter prints its stacks on this signal. Without a handler the signal
# is ignored.
_DUMP_SIGNAL = signal.SIGURG


@dataclass(eq=False)
class Watchdog:
    """A thread that detects when this rank, and with it the job, hangs.

    timeout_s  seconds without progress; greater than 0
    folder     where to write hang_report.txt; None: the report is only printed
    first_s    replaces `timeout_s` while `patient`, if it is longer
    clock, sleep    return the time, and pause, in seconds; by default in real time, with pauses
                    that `stop` ends
    broken     returns the error that NCCL reports, "" for none; default on a GPU: nccl_error
    trace      returns the contents of torch's flight recorder; None without a recorder
    patient    whether the ranks do something for the first time, which may compile or connect and
               therefore take long
    before_leaving  called on the rank that reports for all nodes, before any rank ends
    announce   called instead of ending the processes, on the ranks that report, with the
               conclusion and the ranks that hold up the job: the job will restart

    Start it on all ranks when they begin to work together, with `patient` set. Every write to the
    flight record is progress: instructions, collectives, steps, phases and `flight.alive()`.
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
    announce: Callable[[str, tuple[int, ...]], object] | None = None

    def __post_init__(self) -> None:
        self._recorder = self.topology.flight
        self._stopped = threading.Event()
        self._cleared = threading.Event()
        self._leaving = threading.Lock()
        self._pause = self._stopped.wait if self.sleep is time.sleep else self.sleep
        if self.topology.device.type == "cuda":
            self.broken = self.broken or partial(nccl_error, self.topology)
            self.trace = self.trace or getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        self._begun = set[str]()
        self._reporting = False  # whether this rank announces the verdict
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching."""
        # standard error may not be a file
        with suppress(OSError, RuntimeError, AttributeError, ValueError):
            faulthandler.register(_DUMP_SIGNAL, all_threads=True)
        if self.topology.device.type == "cuda" and self._recorder.meter is None:
            self._recorder.meter = DeviceCalls.of(self.topology.device)
        self.rendezvous.on_inquiry = self._answer
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. Call this at the end of a run, where ranks leave one after another."""
        self._stopped.set()
        self._cleared.set()
        self.rendezvous.on_inquiry = None
        self.rendezvous.judged.set()
        faulthandler.unregister(_DUMP_SIGNAL)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_LONGEST_PAUSE_S)

    def first_time(self, work: str) -> None:
        """Be patient if this `work` begins for the first time."""
        self.patient |= work not in self._begun
        self._begun.add(work)

    @property
    def limit_s(self) -> float:
        """Return the current limit on seconds without progress."""
        return max(self.first_s, self.timeout_s) if self.patient else self.timeout_s

    def _watch(self) -> None:
        pause = min(self.timeout_s / 10, _LONGEST_PAUSE_S)
        last = self._recorder.progress()
        quiet_s = 0.0
        at = self.clock()
        error = ""
        while True:
            self._pause(pause)
            if self._stopped.is_set():
                return
            now = self.clock()
            progress = self._recorder.progress()
            # Count at most two pauses at a time: a job that was suspended does not hang.
            quiet_s = quiet_s + min(now - at, 2 * pause)
            at = now
            if progress != last:
                last = progress
                quiet_s = 0.0
            if self.broken is not None and not error and (error := self.broken()):
                self._write(error)
                quiet_s = self.limit_s
            if quiet_s >= self.limit_s:
                self._investigate()
                quiet_s = self.limit_s / 2
                at = self.clock()

    def _investigate(self) -> None:
        """Find out whether the job hangs, and if so end it. This rank makes no progress."""
        self.rendezvous.judged.clear()
        self._cleared.clear()
        sys.audit("megatron.training.inquiry")
        claimant = str(self.topology.rank)
        store = self.rendezvous.store if self.topology.world.size > 1 else None
        if store is not None:
            # the rank with the store may hang, too
            with suppress(RuntimeError, LaunchError):
                if (
                    bounded(
                        lambda: store.compare_set("hang/claim", "", claimant), _ANSWER_S
                    ).decode()
                    == claimant
                ):
                    self._ask_all(store)
                    return
                if self._cleared.wait(4 * _ANSWER_S + 2 * self.rendezvous.pause_s):
                    return
        if not self._stopped.is_set():
            self._report_alone()

    def _ask_all(self, store: dist.Store) -> None:
        """Ask all ranks for their state, judge, and announce the verdict."""
        self._reporting = True
        rendezvous = self.rendezvous
        layout = self.topology.layout
        size = self.topology.world.size
        number = bounded(rendezvous.inquire, _ANSWER_S)

        def gather() -> dict[int, FlightState]:
            """Return the answers that arrive in time, by rank."""
            kind = f"hang/{number}"
            deadline = self.clock() + _ANSWER_S + rendezvous.pause_s + 2 * _NODE_S
            while rendezvous.ranks_without(kind, 1) and self.clock() < deadline:
                self.sleep(rendezvous.pause_s / 2)
            missing = set(rendezvous.ranks_without(kind, size))
            ranks = [rank for rank in range(size) if rank not in missing]
            answers = rendezvous.values([f"{kind}/{rank}" for rank in ranks])
            return {
                rank: FlightState.from_json(text) for rank, text in zip(ranks, answers, strict=True)
            }

        seen = bounded(gather, 4 * _ANSWER_S + rendezvous.pause_s)
        if self._stopped.is_set():
            return
        locations = bounded(lambda: rendezvous.locations, _ANSWER_S) if len(seen) < size else ()
        verdict = judge(seen, layout, self.limit_s, locations)
        if verdict is None:
            self._reporting = False
            bounded(lambda: store.delete_key("hang/claim"), _ANSWER_S)
            self._all_clear()
        else:
            self._report(report(verdict, seen, layout))
            if self.announce is None:
                self.before_leaving()
        conclusion = "" if verdict is None else verdict.conclusion
        bounded(lambda: store.set(f"hang/{number}/verdict", conclusion), _ANSWER_S)
        if verdict is not None:
            self._leave(number, verdict)

    def _answer(self, number: int) -> None:
        """Answer an inquiry, also for ranks of this node that cannot; then follow the verdict."""
        store = self.rendezvous.store
        rank = self.topology.rank
        self.rendezvous.judged.clear()
        self._record_state(number)
        state = FlightState.read(self._recorder.buffer)
        assert state is not None, "the rendezvous has described it"
        store.set(f"hang/{number}/{rank}", state.to_json())
        states, is_first = self._neighbours(number)
        if self._stopped.is_set():
            return
        for state in states:
            if is_first and state.inquiry != number:
                store.set(f"hang/{number}/{state.rank}", state.to_json())
        # If no verdict arrives in time, each rank without progress reports alone.
        if self.rendezvous.comes(f"hang/{number}/verdict", 6 * _ANSWER_S + self.rendezvous.pause_s):
            conclusion = store.get(f"hang/{number}/verdict").decode()
            if not conclusion:
                self._all_clear()
            elif not self._reporting:
                self._write(f"the job hangs: {conclusion}")
                self._leave(number)

    def _record_state(self, number: int) -> None:
        """Write the state of this rank into its record.

        Adds a note if the device does not answer its host.
        """
        meter = self._recorder.meter
        note = ""
        if meter is not None:
            try:
                self._recorder.device_is(*bounded(lambda: meter.where(self._recorder.posted), 1.0))
            except (RuntimeError, LaunchError) as error:
                note = f"\nthe device does not answer: {str(error).splitlines()[0]}"
        limit = max(_LEAST_STACK, min(_STACK, _ALL_STACKS // self.topology.world.size))
        self._recorder.answer(number, python_stacks(limit) + note)

    def _neighbours(self, number: int) -> tuple[list[FlightState], bool]:
        """Return the states of this node's ranks, and whether this rank is the first that answered.

        Waits beforehand, so that every rank that can answer has the time to do so.
        """
        sys.audit("megatron.training.answered", number)
        self.sleep(_NODE_S)
        states = [
            state if state.inquiry == number else dataclasses.replace(state, stack="")
            for state in self.rendezvous.flight_file.states()
        ]
        rank = self.topology.rank
        return states, rank == next(
            (state.rank for state in states if state.inquiry == number), rank
        )

    def _all_clear(self) -> None:
        """Withdraw the answer: the job does not hang."""
        self._recorder.answer(0)
        self._recorder.device_is(None, None)
        self.rendezvous.judged.set()
        self._cleared.set()
        sys.audit("megatron.training.cleared")

    def _report_alone(self) -> None:
        """Judge by the records of this node, without the store.

        The node's first rank without progress reports for the node.
        """
        self._record_state(_ALONE)
        states, is_first = self._neighbours(_ALONE)
        if self._stopped.is_set():  # meanwhile this rank has left the job, or its generation
            return
        layout = self.topology.layout
        seen = {state.rank: state for state in states}
        verdict = judge(seen, layout, self.limit_s)
        if verdict is None:
            self._all_clear()
            return
        if len(seen) < layout.world_size and not set(verdict.culprits) & set(seen):
            text = (
                f"the store ({self.rendezvous.store_name}) does not answer; the ranks of this node "
            )
            verdict = dataclasses.replace(
                verdict, conclusion=f"{text}wait for ranks of other nodes"
            )
        if is_first:
            self._report(report(verdict, seen, layout))
        else:
            self._write(f"the job hangs: {verdict.conclusion}")
            self.sleep(_NODE_S)  # a launcher may end all ranks as soon as one ends
        self._leave(None, verdict if is_first else None)

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(f"rank {self.topology.rank}: {text}\n")
            sys.stderr.flush()

    def _report(self, text: str) -> None:
        """Write the report to standard error and into the folder."""
        self._write(text)
        if self.folder is None:
            return
        path = self.folder / REPORT_NAME

        def append() -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n\n")

        with suppress(OSError, LaunchError):  # the file system may be what hangs
            bounded(append, _ANSWER_S)

    def _leave(self, number: int | None, verdict: HangVerdict | None = None) -> None:
        """End this process, and those on this node that cannot end themselves.

        The process with the store stays until the others have read the verdict. If the job will
        restart, only announce the `verdict`, which the ranks that report have.
        """
        if self.announce is not None:
            self._stopped.set()
            self._write_trace()
            if verdict is not None:
                self.announce(f"the job hangs: {verdict.conclusion}", tuple(verdict.culprits))
            return

        def signal_silent(what: int) -> None:
            for state in self.rendezvous.flight_file.states():
                if state.inquiry == 0 or state.process == STOPPED:
                    kill_process(state.pid, state.process_start, what)

        def await_other_ranks() -> None:
            rendezvous = self.rendezvous
            key = f"hang/{number}/gone"
            deadline = self.clock() + _ANSWER_S - 1 + rendezvous.pause_s
            gone = rendezvous.store.add(key, 1)
            while (
                rendezvous.serves_store
                and gone < self.topology.world.size
                and self.clock() < deadline
            ):
                self.sleep(0.02)
                gone = rendezvous.store.add(key, 0)

        with self._leaving:
            sys.audit("megatron.training.leaving")
            signal_silent(_DUMP_SIGNAL)  # only after the verdict: this may crash a healthy process
            self._write_trace()
            if number is None:
                self.sleep(_NODE_S)  # so that the others see that this rank has reported
            else:
                with suppress(RuntimeError, LaunchError):
                    bounded(await_other_ranks, _ANSWER_S + self.rendezvous.pause_s)
            signal_silent(signal.SIGKILL)
            sys.audit("megatron.training.left")
            os._exit(EXIT_LOST_RANK)

    def _write_trace(self) -> None:
        """Write torch's flight recorder into the file that torch itself would use for this rank."""
        prefix = os.environ.get(Variables(os.environ).first(TRACE_FILE) or "")
        if self.trace is None or prefix is None:
            return
        # torch holds the GIL while it queries the device: if the device never answers, no Python
        # thread can end this process, but SIGALRM can.
        signal.setitimer(signal.ITIMER_REAL, 4 * _ANSWER_S)
        path = Path(f"{prefix}{self.topology.rank}")
        trace = self.trace

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trace())

        with suppress(OSError, RuntimeError, LaunchError):
            bounded(write, _ANSWER_S)


def nccl_error(topology: Topology) -> str:
    """Return a description of an error of NCCL or RCCL in one of this rank's groups.

    Returns "" if there is no error, or if torch cannot report it.

    torch's threads notice an error, but with TORCH_NCCL_ASYNC_ERROR_HANDLING=0 they do not act on
    it. This function does not communicate.
    """
    for group in (*topology.groups, *topology.pipeline.pairs.values()):
        error = "SUCCESS"
        with suppress(AttributeError, RuntimeError):
            if group.handle is not None:
                error = group.handle._get_backend(topology.device).get_error().name
        if error != "SUCCESS":
            return f"NCCL reports {error} in the {group.kind} group of {len(group.ranks)} ranks"
    return ""


# -- which ranks wait for which --------------------------------------------------------------------
#
# A rank in a collective waits for the members of the group that have posted fewer collectives in it
# than the rank itself; a rank that sends or receives waits for its peer. A rank that others wait
# for and that waits for none holds up the rest: it is stopped, dead, stuck, or still busy. Without
# such a rank, ranks wait for each other in a cycle, or are in different calls with the same number:
# one of them has left out a collective.


@dataclass(frozen=True)
class HangVerdict:
    """A verdict that the job hangs.

    `conclusion`, one line, names the `culprits`: the ranks that hold up the rest. `awaited` has,
    for each rank in a call, the ranks that it waits for.
    """

    conclusion: str
    culprits: Sequence[int]
    awaited: Mapping[int, Sequence[int]]


def awaited_ranks(seen: Mapping[int, FlightState], layout: Layout) -> dict[int, list[int]]:
    """Return, for each rank in a call, the ranks that it waits for.

    `seen` has the known states by rank.
    """
    late = dict[tuple[str, int, int], list[int]]()

    def awaited(rank: int, call: PendingCall) -> list[int]:
        if call.peer >= 0:
            return [call.peer]
        if call.kind == "other":
            return []
        ranks = layout.ranks(call.kind, rank)
        key = (call.kind, call.sequence, ranks[0])
        if key not in late:  # once for all members
            states = ((r, seen.get(r)) for r in ranks)
            late[key] = [
                r
                for r, of in states
                if of is None or of.lost or of.posted_in(call.kind) < call.sequence
            ]
        return [r for r in late[key] if r != rank]

    return {rank: awaited(rank, of.call) for rank, of in seen.items() if of.call and not of.lost}


def judge(
    seen: Mapping[int, FlightState], layout: Layout, timeout_s: float, locations: Sequence[str] = ()
) -> HangVerdict | None:
    """Return which ranks hold up the job; None if it does not hang.

    A rank is stuck after `timeout_s` without progress. `locations` has "node:device" of every rank,
    to describe those that are not in `seen`.
    """
    awaited = awaited_ranks(seen, layout)
    roots = {r for ranks in awaited.values() for r in ranks if r not in awaited}
    dead = {r for r, of in seen.items() if of.process in (DEAD, GONE)}
    # A rank that computes forever holds up others only when they reach a collective.
    idle = {r for r, of in seen.items() if r not in awaited and of.quiet_s >= timeout_s}
    candidates = sorted(roots | dead | idle)
    stuck = [r for r in candidates if r not in seen or r in dead or seen[r].quiet_s >= timeout_s]
    if stuck:
        # A lost process is the reason why others are stuck.
        culprits = [r for r in stuck if r not in seen or seen[r].lost] or stuck
        behind = [r for r, of in awaited.items() if of]
        return HangVerdict(_describe(culprits, behind, seen, locations), culprits, awaited)
    if candidates or any(of.quiet_s < timeout_s for of in seen.values()):
        return None
    return _without_root(seen, awaited)


def _describe(
    ranks: Sequence[int],
    behind: Sequence[int],
    seen: Mapping[int, FlightState],
    locations: Sequence[str],
) -> str:
    """Return a text with the state of the culprits `ranks`, for which the ranks `behind` wait."""
    of_trouble = dict[str, list[int]]()
    texts = list[str]()
    for rank in ranks[:_SHOWN]:
        of_trouble.setdefault(_trouble(seen.get(rank)), []).append(rank)
    for trouble, those in of_trouble.items():
        where = (
            seen[r].location
            if r in seen
            else locations[r]
            if r < len(locations)
            else "an unknown node"
            for r in those
        )
        named = list(dict.fromkeys(where))
        more = ", ..." if len(named) > _NAMED else ""
        texts.append(f"{_ranks(those)} ({', '.join(named[:_NAMED])}{more}) {trouble}")
    if behind:
        verb = "waits" if len(behind) == 1 else "wait"
        texts.append(f"{_ranks(behind)} {verb} for {'it' if len(ranks) == 1 else 'them'}")
    return "; ".join(texts)


def _trouble(of: FlightState | None) -> str:
    if of is None:
        return "does not answer, nor does any rank of its node: the node is lost or cut off"
    what = "is in no collective and makes no progress"
    location = ""
    if of.process == STOPPED:
        what = "is stopped (SIGSTOP)"
    elif of.lost:
        what = "has died"
    elif not of.stack:
        what = f"does not answer (its process is {of.process}, its Python interpreter is blocked)"
    else:
        main, _, _ = of.stack.partition("\n\n")
        location = f", now at {main.splitlines()[-1]}"
    return f"{what}, last progress: {of.where}, {of.quiet_s:.0f} s ago{location}"


def _without_root(
    seen: Mapping[int, FlightState], awaited: Mapping[int, Sequence[int]]
) -> HangVerdict:
    """Return the verdict if every rank is in a call, and none waits for a rank outside one."""
    if circle := _circle(awaited):
        listed = "; ".join(
            f"rank {rank} waits in {seen[rank].call} for rank {other}"
            for rank, other in zip(circle, circle[1:] + circle[:1], strict=True)
        )
        return HangVerdict(
            f"ranks wait for each other: {listed}: one of them has left out a collective "
            "or a message",
            circle,
            awaited,
        )
    calls: dict[str, list[int]] = {}
    for rank in sorted(awaited):
        if not awaited[rank]:
            calls.setdefault(str(seen[rank].call), []).append(rank)
    listed = "; ".join(f"{_ranks(ranks)} in {call}" for call, ranks in list(calls.items())[:_NAMED])
    return HangVerdict(
        f"no rank is late, and no call ends: {listed}: if calls of a group differ but have the "
        "same number, a rank has left out a collective or made an extra one; otherwise check "
        "the network and the devices",
        [rank for ranks in calls.values() for rank in ranks],
        awaited,
    )


def _circle(awaited: Mapping[int, Sequence[int]]) -> list[int]:
    """Return ranks each of which waits for the next, and the last for the first.

    Returns an empty list if there is no such cycle.
    """
    for start in sorted(awaited):
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next(iter(awaited.get(rank, ())), None)
        if rank is not None:
            return path[path.index(rank) :]
    return []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {compress_ranks(ranks)}"


def report(verdict: HangVerdict, seen: Mapping[int, FlightState], layout: Layout) -> str:
    """Return the report: the conclusion, a line for each rank, and the stacks.

    Each distinct stack appears once, with its ranks.
    """
    lines = [f"the job hangs: {verdict.conclusion}"]
    culprits = set(verdict.culprits)
    shown = sorted(sorted(seen, key=lambda rank: (rank not in culprits, rank))[:_SHOWN])
    stacks: dict[str, list[int]] = {}
    for rank in shown:
        of = seen[rank]
        late = verdict.awaited.get(rank)
        waited = f"; waits for {_ranks(late)}" if late else ""
        silent = "" if of.stack else f"; no answer, its process is {of.process}"
        lines.append(
            f"  rank {rank}: {of.where}{waited}; no progress for {of.quiet_s:.0f} s{silent}"
        )
        stacks.setdefault(of.stack, []).append(rank)
    if len(seen) > _SHOWN:
        lines.append(f"  and {len(seen) - _SHOWN} more ranks")
    if unanswered := [rank for rank in range(layout.world_size) if rank not in seen]:
        lines.append(f"  no answer from {_ranks(unanswered)}")
    for stack, ranks in list(stacks.items())[: _SHOWN // 2]:
        if stack:
            lines.append(f"Python stacks of {_ranks(ranks)}, innermost call last:")
            lines += [f"    {line}" for line in stack.splitlines()]
    return "\n".join(lines)
