"""Local checkpoints of a run: when it saves to memory, and what it continues from.

See megatron/checkpoint/local.py. Between two steps the loop's own thread sends and receives.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megatron.checkpoint.local import FLAG, LocalSaver, Replication, neighbour_jump
from megatron.checkpoint.local_load import LocalCheckpoint, find_local, load_local
from megatron.checkpoint.memory_file import MemoryFile
from megatron.checkpoint.settings import plain
from megatron.checkpoint.shared_errors import decided_by_first
from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.parallel.collectives import all_reduce
from megatron.parallel.membership import Generation
from megatron.parallel.topology import Topology
from megatron.training.report.events import LocalCheckpointLoaded, LocalCheckpointSaved, Record
from megatron.training.report.reporter import Reporter
from megatron.training.run.stopping import Agreement

_WRITING = "local save"
_COMPLETE, _FAILED, _INCOMPLETE = range(3)  # a rank's part of a save; the largest is agreed on
_COST, _STEP, _TOOK = "local cost", "local step", "local time"  # in microseconds
MOST_COST = 0.01
"""Share of the training time that `auto` lets saves take."""
_MARGIN = 1.5
"""Factor on the measured cost, for what the first saves do not show: later steps that scatter more,
and what a save leaves behind after its end.
"""
_UNMEASURED = 2  # saves, which touch the new pages of two slots
_MEASURED = 16
"""Saves whose cost is measured. Steps that scatter by a tenth make that of one uncertain by 0.14
steps (docs/measured/local_saves.md), where it may be 0.3.
"""
_STEPS_BEFORE_CHOICE = 5  # steps after the end of each, which no save slows
_MOST_US = 2**31 - 1


@dataclass(frozen=True)
class LocalMemory:
    """Memory and neighbours of a training process, for local checkpoints.

    memory       its memory file, with what earlier processes saved
    replication  where its neighbours are
    compared     whether only states may be loaded whose copies of weights were compared
    restarted    whether earlier processes of the job may have saved
    """

    memory: MemoryFile
    replication: Replication
    compared: bool = False
    restarted: bool = False

    @classmethod
    def of(
        cls,
        config: Config,
        generation: Generation,
        memory: MemoryFile,
        topology: Topology,
        locations: Sequence[str],
        timeout: timedelta,
    ) -> LocalMemory | None:
        """Connect this rank with its neighbours; None without --non-persistent-save-interval.

        `locations`, "node:device" of every rank, are needed on rank 0 only. All ranks call this.
        """
        settings = config.checkpoint
        if settings.non_persistent_save_interval is None:
            return None
        nodes = [location.partition(":")[0] for location in locations]
        jump = 0
        if settings.replication and settings.replication_factor > 1:
            preferred = settings.replication_jump
            jump = decided_by_first(topology, lambda: neighbour_jump(nodes, preferred))
        if topology.world.is_first:
            print(describe_replication(nodes, jump), flush=True)
        replication = Replication.between(topology, jump, timeout)
        return cls(memory, replication, generation.compared, generation.number > 0)

    def find(self, topology: Topology, at_least: int, reporter: Reporter) -> LocalCheckpoint | None:
        """Return the local checkpoint to continue from, if it is newer than that on disk."""
        if not self.restarted:
            return None
        return find_local(
            self.memory,
            topology,
            at_least=at_least,
            compared=self.compared,
            alive=topology.flight.alive,
            say=lambda text: reporter.say(f" note: {text}"),
        )

    def chosen_interval(self, topology: Topology) -> int:
        """Return the interval that `auto` has chosen before a restart; 0 if it has not.

        All ranks call this: new processes, and those of spares, may not know it.
        """
        size = topology.world.size
        known = self.memory.interval if self.memory.world == size else 0
        agreed = torch.tensor([known], dtype=torch.int64, device=topology.device)
        return int(all_reduce(agreed, topology.world, dist.ReduceOp.MAX))

    def load(
        self,
        checkpoint: LocalCheckpoint,
        engine: Engine,
        topology: Topology,
        config: Config,
        reporter: Reporter,
    ) -> None:
        """Load what `find` returned, and report it. Raises CheckpointError."""
        start = time.perf_counter()
        received = load_local(
            checkpoint, self.memory, engine, topology, config, topology.flight.alive
        )
        seconds = time.perf_counter() - start
        reporter.say(
            f" loaded {checkpoint.where} in {seconds:.2f} s: {checkpoint.size_bytes / 1e9:.3f} GB, of which "
            f"{received / 1e9:.3f} GB from other ranks"
        )
        reporter.publish(
            LocalCheckpointLoaded(
                iteration=checkpoint.iteration,
                size_bytes=checkpoint.size_bytes,
                received_bytes=received,
                elapsed_s=seconds,
            )
        )


def describe_replication(nodes: Sequence[str], jump: int) -> str:
    """Return a line about copies in other nodes' memory."""
    ranks = range(len(nodes))
    beside = [rank for rank in ranks if nodes[rank] == nodes[(rank + jump) % len(nodes)]]
    if not jump or len(beside) == len(nodes):
        return (
            " local checkpoints: each rank has its shards in its node's memory, without a copy in "
            "another node"
        )
    lacking = f"; {len(beside)} of them have it in their own node" if beside else ""
    return f" local checkpoints: rank r + {jump} keeps a copy of the shards of rank r{lacking}"


class LocalSaves:
    """Implements --non-persistent-save-interval with this rank's LocalSaver.

    All ranks call every method but `leave`. Their agreement says when all have a save. With the
    interval `auto` they also agree on what the first saves cost and on the step time of rank 0, from
    which the interval follows. A save costs the time for which it stops training and, as hashing and
    sending may take cores from it, the time by which the steps until its end are longer than others.

    about     returns settings and provenance of the run after an iteration, see LocalSaver.start
    clock     in seconds
    interval  steps between saves; None until `auto` has chosen
    chosen    called with the interval that `auto` has chosen
    """

    def __init__(
        self,
        config: Config,
        saver: LocalSaver,
        agreement: Agreement,
        reporter: Reporter,
        topology: Topology,
        about: Callable[[int], Mapping[str, object]] = lambda iteration: {},
        clock: Callable[[], float] = time.perf_counter,
        chosen: Callable[[int], object] = lambda interval: None,
    ) -> None:
        self._saver = saver
        self._reporter = reporter
        self._topology = topology
        self._about = about
        self._clock = clock
        self._chosen = chosen
        self.interval: int | None = config.checkpoint.non_persistent_save_interval or None
        self._next = _STEPS_BEFORE_CHOICE  # steps until the next save before the choice
        self._stall_s = 0.0  # of the last save
        self._stalls_s: list[float] = []  # of the saves before the choice
        self._costs_s: list[float] = []
        self._took_s = 0.0
        self._lap: float | None = None  # when the last step began
        self._undisturbed_s: deque[float] = deque(maxlen=4 * _STEPS_BEFORE_CHOICE)
        self._during_save_s: list[float] = []  # since a save began that is not complete
        self._saved: int | None = None  # the iteration of the last save
        first = topology.world.is_first
        agreement.add(_WRITING, self._outcome, lambda: saver.pending)
        for name, seconds in (
            (_COST, lambda: self._cost_s),
            (_TOOK, lambda: self._took_s),
            (_STEP, lambda: self._step_s if first else 0.0),
        ):
            agreement.add(name, partial(_microseconds, seconds), self._choosing)

    def _outcome(self) -> int:
        """Return how this rank's part of the save in progress stands."""
        if not self._saver.done:
            return _INCOMPLETE
        return _FAILED if self._saver.failed else _COMPLETE

    @property
    def _step_s(self) -> float:
        """Return the time of a step without a save in progress."""
        return statistics.median(self._undisturbed_s)

    @property
    def _cost_s(self) -> float:
        """Return what a save costs at most: two standard errors above the mean, or the stall."""
        stalls = self._stalls_s[_UNMEASURED:]
        costs = self._costs_s[_UNMEASURED:]
        error = statistics.stdev(costs) / math.sqrt(len(costs))
        return max(statistics.mean(stalls), statistics.mean(costs) + 2 * error)

    def _choosing(self) -> bool:
        """Return whether enough has been measured to choose the interval, as on every rank."""
        return self.interval is None and len(self._costs_s) >= _UNMEASURED + _MEASURED

    def is_due(self, iteration: int) -> bool:
        """Return whether to save after `iteration`."""
        if iteration == self._saved:
            return False
        if self.interval is not None:
            return iteration % self.interval == 0
        return self._next <= 0 and not self._saver.pending and not self._choosing()

    def save(self, iteration: int, state: Record) -> None:
        """Copy the state after `iteration`; the rest of the save follows between later steps."""
        begun = self._clock()
        self._saver.start(iteration, state, lambda: self._about(iteration))
        self._lap = self._clock()
        self._stall_s = self._lap - begun
        self._during_save_s = []
        self._saved = iteration

    def complete(self, agreed: Mapping[str, int]) -> None:
        """Continue a save in progress; complete it if all ranks have it. Called once per step."""
        pending = self._saver.pending
        if self._lap is not None:
            (self._during_save_s if pending else self._undisturbed_s).append(
                self._clock() - self._lap
            )
        self._next -= 1
        if _COST in agreed and self.interval is None:
            self._choose(*(agreed[name] / 1e6 for name in (_COST, _STEP, _TOOK)))
        if pending:
            self._saver.advance()
            outcome = agreed.get(_WRITING, _INCOMPLETE)
            if outcome == _FAILED:
                self._saver.commit(failed=True)
                self._next = _STEPS_BEFORE_CHOICE
            elif outcome == _COMPLETE:
                self._took_s = self._saver.commit()
                self._committed()
        self._lap = self._clock()

    def _committed(self) -> None:
        """Report a save that has just become complete, and note what it cost."""
        last = self._saver.last
        assert last is not None, "a save is complete"
        self._next = _STEPS_BEFORE_CHOICE
        if self.interval is None:
            slower_s = sum(self._during_save_s) - len(self._during_save_s) * self._step_s
            self._stalls_s.append(self._stall_s)
            self._costs_s.append(self._stall_s + slower_s)
        self._reporter.publish(
            LocalCheckpointSaved(
                iteration=last.iteration,
                size_bytes=self._saver.copied,
                stall_s=self._stall_s,
                elapsed_s=self._took_s,
            )
        )

    def _choose(self, cost_s: float, step_s: float, took_s: float) -> None:
        """Choose the interval at which saves take at most MOST_COST of the time."""
        step_s = max(step_s, 1e-6)
        # a save that begins before the last one is complete would wait for it
        by_cost = math.ceil(_MARGIN * cost_s / (MOST_COST * step_s))
        self.interval = max(1, by_cost, math.ceil(took_s / step_s))
        self._chosen(self.interval)
        self._reporter.say(
            f" local checkpoints: every {self.interval} steps ({FLAG} auto): a save costs at most "
            f"{1e3 * cost_s:.1f} ms (rank 0 stops for {1e3 * self._stall_s:.1f} ms of it) and is "
            f"complete after {took_s:.2f} s, and a step takes {1e3 * step_s:.1f} ms"
        )

    def copies_compared(self, iteration: int) -> None:
        """Note that the copies of the weights were equal after `iteration`."""
        self._saver.copies_compared(iteration)

    def clear(self) -> None:
        """Forget all saves: the run has gone back to a checkpoint."""
        self._saver.clear()
        self._saved = None

    def close(self) -> None:
        """Complete a save in progress, at the end of the run."""
        self._saver.finish()

    def leave(self) -> None:
        """End the work of this rank's threads; there is no communication."""
        self._saver.close()


def build_local_saves(
    config: Config,
    engine: Engine,
    agreement: Agreement,
    reporter: Reporter,
    local: LocalMemory,
    checkpoint: LocalCheckpoint | None,
    provenance: Callable[[int], Record],
) -> LocalSaves:
    """Return the local saves of a run; `checkpoint`: what it has loaded. Raises CheckpointError."""
    topology = engine.topology
    saver = LocalSaver(
        local.memory,
        engine,
        topology,
        local.replication,
        keep=None if checkpoint is None else checkpoint.key,
        alive=topology.flight.alive,
    )
    if saver.note:
        print(f"note: rank {topology.rank}: {saver.note}", file=sys.stderr, flush=True)
    reporter.say(
        f" local checkpoints take {saver.bytes / 2**30:.2f} GiB of host memory of rank 0, and "
        f"{saver.copied / 2**30:.2f} GiB are copied by a save"
    )

    def about(iteration: int) -> Record:
        return {"config": plain(config), "provenance": provenance(iteration)}

    chosen = partial(local.memory.chosen, world=topology.world.size)
    saves = LocalSaves(config, saver, agreement, reporter, topology, about, chosen=chosen)
    if saves.interval is None and (interval := local.chosen_interval(topology)):
        saves.interval = interval
        local.memory.chosen(interval, topology.world.size)
        reporter.say(f" local checkpoints: every {interval} steps, as chosen before the restart")
    return saves


def _microseconds(seconds: Callable[[], float]) -> int:
    return min(_MOST_US, round(1e6 * seconds()))
