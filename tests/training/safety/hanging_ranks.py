"""Ranks that train a toy over each kind of group and hang in different ways, under a watchdog.

Their time stands still until each has reached the place where it will stay: the victim is stuck,
the others wait for it. Then hours pass at once, and a rank that is asked has all the time that it
needs. The results do not depend on the speed of the machine. With `real` all limits are a few
seconds of the real clock instead.
"""

import mmap
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from megatron.errors import LaunchError
from megatron.parallel import flight
from megatron.parallel.collectives import all_reduce
from megatron.parallel.flight import FlightState
from megatron.parallel.host_processes import STOPPED, process_state
from megatron.parallel.launch import detect_launch
from megatron.parallel.rendezvous import connect
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.training.safety import watchdog
from megatron.training.safety.watchdog import Watchdog

SHAPE = (2, 4)
# The step, in the first of three micro-batches: a rank stopped later may still have something to
# send.
HANGS_AT = 3
HOURS_S = 1e4
WAITS_IN = "BACKWARD of stage 0, micro-batch 0"  # for the second stage, which hangs


def endless_loop():
    while True:
        pass


def hold_interpreter():
    """Hold the interpreter's lock for days in a call of C."""
    sum(range(10**14))


FAULTS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": endless_loop,
    "hold": hold_interpreter,
}


class Board:
    """Memory shared by all ranks: which of them have arrived, answered, left, and may continue."""

    MARKS = ("there", "answered", "leaving", "alive", "cleared")

    def __init__(self, folder, rank, size):
        path = folder / "board"
        self.rank = rank
        self.size = size
        with open(os.open(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate(4096)
            self._memory = mmap.mmap(file.fileno(), 4096)
        self._memory[2048 + 8 * rank : 2056 + 8 * rank] = os.getpid().to_bytes(8, "little")

    def mark(self, what):
        self._memory[256 * self.MARKS.index(what) + self.rank] = 1

    def marked(self, what, ranks):
        return all(self._memory[256 * self.MARKS.index(what) + rank] for rank in ranks)

    def pid(self, rank):
        return int.from_bytes(self._memory[2048 + 8 * rank : 2056 + 8 * rank], "little")


class Time:
    """Clock for a rank's watchdog that moves only after all events possible before."""

    def __init__(self, board, victims, fault):
        self.board = board
        self.victims = victims
        self.fault = fault
        self.now = 0.0
        self.asked = False
        self.leaving = False
        self.over = False
        everybody = list(range(board.size))
        self.speaking = (
            everybody if fault != "stop" else [rank for rank in everybody if rank not in victims]
        )
        flight._clock = lambda: time.monotonic() + HOURS_S * board.marked("there", everybody)
        sys.addaudithook(self._hear)

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        time.sleep(0.003)
        while not self._may_pass():
            time.sleep(0.003)
        self.now += max(seconds, 1.0)

    def _may_pass(self):
        board = self.board
        if self.over:
            return True
        if not board.marked("there", list(range(board.size))):
            return False
        if self.fault == "stop" and any(
            process_state(board.pid(victim)) != STOPPED for victim in self.victims
        ):
            return False
        if self.fault == "slow" and (
            board.marked("cleared", [board.rank]) or not board.marked("alive", self.victims)
        ):
            return False
        if self.leaving:
            return board.marked("leaving", self.speaking)
        return not self.asked or board.marked("answered", self.speaking)

    def _hear(self, event, _):
        room, _, what = event.rpartition(".")
        if room != "megatron.training" or self.over:
            return
        self.asked = self.asked or what in ("inquiry", "answered")
        self.leaving = self.leaving or what == "leaving"
        if what in self.board.MARKS:
            self.board.mark(what)

    def note_when_there(self, recorder, there):
        """Mark this rank as soon as it enters the call in which it will stay."""

        plain = recorder.enter

        def entering(*args, **named):
            result = plain(*args, **named)
            state = FlightState.read(recorder.buffer)
            if state is not None and there(state):
                self.board.mark("there")
            return result

        recorder.enter = entering


class Toy:
    """Toy step: forward and backward through the pipeline, and sums.

    The sums are one over the tensor group in each pass, one of the gradient over the data-parallel
    group, and one over the world.
    """

    def __init__(self, topology, hang, skips):
        self.topology = topology
        self.skips = skips
        self.step = 0
        self.weight = torch.nn.Parameter(torch.ones(SHAPE[1]))
        stage = topology.pipeline.rank
        last = topology.pipeline.size - 1

        def chunk(micro_batch, hidden):
            if hang is not None and self.step == HANGS_AT and micro_batch == 0:
                hang()
            x = torch.ones(SHAPE) if hidden is None else hidden
            all_reduce(torch.ones(8), topology.tensor)
            y = x * self.weight
            return y.mean() if stage == last else y

        self.executor = Executor(topology, {stage: chunk}, "1f1b", (SHAPE, torch.float32))

    def run(self, step):
        self.step = step
        self.topology.flight.step(step)
        self.executor.train([0, 1, 2])
        if not (self.skips and step == HANGS_AT):
            all_reduce(torch.ones(16), self.topology.data)
        all_reduce(torch.ones(4), self.topology.world)


def train(
    rank,
    size,
    tensor,
    pipeline,
    nodes,
    victims,
    fault,
    folder,
    real,
):
    """Train; return "done" only if nothing hung.

    On several nodes the ranks share no flight file.
    """
    torch.set_num_threads(1)
    with open(Path(folder) / f"output_{rank}", "wb") as output:
        os.dup2(output.fileno(), 2)
    here = size // nodes
    os.environ.update(
        SLURMD_NODENAME=f"node{rank // here}",
        LOCAL_RANK=str(rank % here),
        LOCAL_WORLD_SIZE=str(here),
    )
    # For an answer that comes, a time limit that only a hang exceeds; for one that never comes, a
    # short one.
    silent = fault == "stop" and 0 in victims
    watchdog._ANSWER_S, watchdog._NODE_S = (3.0, 0.5) if real else (0.5 if silent else 30.0, 1.0)
    with connect(detect_launch(), timedelta(seconds=180)) as meeting:
        topology = Topology.create(
            tensor, pipeline, timeout=timedelta(seconds=180), flight=meeting.flight
        )
        try:
            board = Board(Path(folder), rank, size)
            steps(topology, meeting, Path(folder), board, victims, fault, real, here)
        # Like training/run/setup.py, because the watchdog knows more.
        except (LaunchError, RuntimeError) as error:
            raise meeting.explain(error) from error
    return "done"


def steps(
    topology,
    meeting,
    folder,
    board,
    victims,
    fault,
    real,
    here,
):
    rank = board.rank
    recorder = topology.flight
    victim = rank in victims

    def hang():
        board.mark("there")
        FAULTS[fault]()

    def there(state):
        """Return whether a rank has reached the place where it will stay.

        It waits for the victims, or is the one that left out a collective.
        """
        if fault == "slow":
            return state.call is not None and (state.call.kind, state.call.sequence) == ("world", 7)
        if topology.pipeline.size > 1:
            return state.step == HANGS_AT and state.instruction == WAITS_IN
        kind = (
            "data"
            if fault != "skip" or (rank not in victims and victims[0] in topology.data.ranks)
            else "world"
        )
        return state.call is not None and (state.call.kind, state.call.sequence) == (
            kind,
            HANGS_AT + 1,
        )

    toy = Toy(topology, hang if victim and fault in FAULTS else None, victim and fault == "skip")
    toy.run(0)
    if real:
        limit_s = 3.0
        watch = Watchdog(meeting, topology, 3.0, folder)
    else:
        limit_s = 30.0
        clock = Time(board, victims, fault)
        if not victim or fault == "skip":
            clock.note_when_there(recorder, there)
        watch = Watchdog(meeting, topology, limit_s, folder, clock=clock, sleep=clock.sleep)
    end_lost_node(board, victims, here)
    watch.start()
    watch.patient = False
    for step in range(1, 6):
        toy.run(step)
    if fault == "slow" and victim:  # longer than the limit, but with signs of life
        be_slow(board, recorder, limit_s, real)
    all_reduce(torch.ones(1), topology.world)
    if not real:
        clock.over = True
    watch.stop()


def be_slow(board, recorder, limit_s, real):
    for _ in range(8 if real else 0):
        time.sleep(limit_s / 3)
        recorder.alive()
    if real:
        return
    board.mark("there")
    while not board.marked("there", list(range(board.size))):
        time.sleep(0.003)
    recorder.alive()  # the hours have passed by now
    board.mark("alive")
    while not board.marked("cleared", list(range(board.size))):
        time.sleep(0.003)


def end_lost_node(board, victims, here):
    """End the processes of a node without a living rank, which no neighbour can do.

    A rank of another node does it, at its end.
    """
    lost = [
        v
        for v in victims
        if all(rank in victims for rank in range(v // here * here, (v // here + 1) * here))
    ]

    def hear(event, _):
        if event == "megatron.training.left":
            for rank in lost:
                os.kill(board.pid(rank), signal.SIGKILL)

    if lost and board.rank == min(set(range(board.size)) - set(victims)):
        sys.addaudithook(hear)
