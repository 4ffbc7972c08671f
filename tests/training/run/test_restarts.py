"""Restarts within the job: runs that lose processes continue as if they had not."""

import errno
import json
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.faults.history import differing, newest, records, steps, tensors_that_differ
from megatron.engine.engine import Engine
from megatron.training.run.checkpoints import Saves
from tests.helpers.fault_points import strike_once
from tests.helpers.indexed import write_documents
from tests.helpers.launching import TINY, launch

pytestmark = pytest.mark.slow

STEP = "megatron.run.step"
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
LAST = 6


def arm(folder, faults, log=""):
    """Arm this rank: each fault (step, what) happens once in the job (see strike_once).

    Its processes write what they hold at each step to `log`.
    """
    if log:
        alive = weakref.WeakSet()
        engines = [0]
        begin = Engine.__init__

        def count(self, *rest):
            alive.add(self)
            engines[0] = max(engines[0], len(alive))
            begin(self, *rest)

        pytest.MonkeyPatch().setattr(Engine, "__init__", count)
        sys.addaudithook(lambda event, _: event == STEP and write_holdings(log, engines[0]))
    for step, what in faults:
        strike_once(f"{folder}/{step}-{what}", STEP, step, what)


def write_holdings(log, engines):
    """Append process, numbers of open descriptors, threads of Python and of the kernel, engines.

    engines  the most that have existed at a time: on a GPU two may not fit
    """
    held = [
        os.getpid(),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        engines,
    ]
    with open(log, "a") as file:
        file.write(json.dumps(held) + "\n")


def run(folder, n, *flags, faults=None, env=None, log=""):
    """Train to the step LAST in a new folder; `faults` has those of each rank, see arm."""
    folder.mkdir()
    arguments = [*TINY, "--train-iters", str(LAST), "--save-interval", "2", *flags]
    arguments += ["--save", str(folder), "--load", str(folder)]
    arms = {rank: (arm, str(folder), some) for rank, some in (faults or {}).items()}
    if log:
        arms[0] = (arm, str(folder), (faults or {}).get(0, ()), log)
    outcomes = launch(n, arguments, env=env, arm=arms)
    return [outcome.code for outcome in outcomes], "\n".join(one.output for one in outcomes)


def check_equal(folder, reference):
    """Assert that each loss, also of repeated steps, and the last state equal the reference's."""
    undisturbed = dict(steps(reference))
    assert len(undisturbed) == LAST
    assert differing(steps(folder), undisturbed) == []
    assert tensors_that_differ(newest(folder), newest(reference)) == []


@pytest.fixture
def launcher_store():
    """Serve a store as torchrun does; yields the variables with which ranks find it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def test_lost_processes_are_replaced_among_four_ranks(tmp_path, launcher_store):
    """Processes die after a step and before its save; the launcher serves the store."""
    flags = ("--tensor-model-parallel-size", "2")
    reference = tmp_path / "undisturbed"
    assert run(reference, 4, *flags)[0] == [0] * 4
    folder = tmp_path / "run"
    faults = {1: [(3, "kill")], 2: [(4, "kill")], 0: [(5, "kill")]}
    codes, output = run(folder, 4, *flags, "--max-restarts", "3", faults=faults, env=launcher_store)
    assert codes == [0] * 4, output
    check_equal(folder, reference)
    restarts = records(folder, "restart")
    assert [(r["restart"], r["iteration"], r["ranks"]) for r in restarts] == [
        (1, 2, 4),
        (2, 2, 4),
        (3, 4, 4),
    ]
    assert restarts[-1]["ways"] == {"forked": 3, "in-process": 9}
    for rank, restart in zip((1, 2, 0), restarts, strict=True):
        assert f"rank {rank} " in restart["cause"] and "SIGKILL" in restart["cause"]


def test_pipeline_ranks_that_die_or_hang_are_replaced(tmp_path):
    flags = ("--pipeline-model-parallel-size", "2", "--async-save")
    reference = tmp_path / "undisturbed"
    assert run(reference, 2, *flags)[0] == [0, 0]
    folder = tmp_path / "run"
    faults = {1: [(3, "kill")], 0: [(5, "stop")]}
    more = ("--max-restarts", "2", "--hang-timeout", "2")
    more += ("--straggler-report", "--replace-slow-ranks", "9")
    codes, output = run(folder, 2, *flags, *more, faults=faults)
    assert codes == [0, 0], output
    assert "--replace-slow-ranks 9: there is no spare node" in " ".join(output.split())
    check_equal(folder, reference)
    hang = records(folder, "restart")[1]
    assert "hangs" in hang["cause"] and "rank 0 " in hang["cause"], hang


def test_a_spare_rank_takes_the_place_of_a_lost_one(tmp_path):
    """Supervisor and process of a rank are lost, with a partition of ZeRO-3."""
    flags = ("--zero-stage", "3")
    reference = tmp_path / "undisturbed"
    assert run(reference, 2, *flags)[0] == [0, 0]
    folder = tmp_path / "run"
    more = ("--max-restarts", "1", "--spare-ranks", "1")
    codes, output = run(folder, 3, *flags, *more, faults={1: [(3, "supervisor")]})
    assert codes == [0, -9, 0], output
    check_equal(folder, reference)
    (restart,) = records(folder, "restart")
    assert (restart["ranks"], restart["ways"]) == (2, {"in-process": 1, "spare": 1})


def test_restarts_continue_from_memory(tmp_path):
    """A process dies, then a whole node, whose shards are in the memory of the other one.

    Nothing is on disk. What a step saves is sent after the next step, and complete before the save
    that follows.
    """
    reference = tmp_path / "undisturbed"
    assert run(reference, 2)[0] == [0, 0]
    folder = tmp_path / "run"
    flags = ("--max-restarts", "2", "--spare-ranks", "1", "--save-interval", "100")
    flags += ("--non-persistent-save-interval", "1", "--replication-jump", "1")
    faults = {0: [(3, "kill")], 1: [(5, "supervisor")]}
    codes, output = run(folder, 3, *flags, faults=faults)
    assert codes == [0, -9, 0], output
    check_equal(folder, reference)
    loaded = records(folder, "local_checkpoint_loaded")
    assert [one["iteration"] for one in loaded] == [2, 3]
    assert [bool(one["received_bytes"]) for one in loaded] == [False, True]
    assert output.count(" layout: ") == 2  # once for each process of rank 0


def arm_with_hours(folder, faults):
    """Let each step of this rank take an hour on the clock of saves, and arm it."""
    log = Path(folder) / "hours"
    log.touch()

    def note(event, _):
        if event == STEP:
            with open(log, "a") as file:
                file.write("\n")

    sys.addaudithook(note)
    began_s = time.monotonic()
    begin = Saves.__init__
    clock = lambda: began_s + 3600 * log.stat().st_size  # noqa: E731
    pytest.MonkeyPatch().setattr(Saves, "__init__", lambda *rest: begin(*rest, clock=clock))
    arm(folder, faults)


def test_minutes_between_saves_count_over_restarts(tmp_path):
    """Rank 0 dies after hours 2 and 5; nothing is in memory."""
    folder = tmp_path / "run"
    folder.mkdir()
    arguments = [*TINY, "--train-iters", str(LAST), "--save-interval-minutes", "150"]
    arguments += ["--max-restarts", "2", "--save", str(folder), "--load", str(folder)]
    arms = {0: (arm_with_hours, str(folder), [(2, "kill"), (3, "kill")])}
    outcomes = launch(2, arguments, arm=arms)
    assert [one.code for one in outcomes] == [0, 0], outcomes[0].output
    # Steps 1 and 2 again: due in hour 3, saved in hour 4. Steps 3 to 5: due in hour 7, saved in 8.
    assert [one["iteration"] for one in records(folder, "restart")] == [0, 2]
    assert [one["iteration"] for one in records(folder, "checkpoint")] == [2, 5, LAST]


def test_a_replica_without_a_spare_is_dropped(tmp_path):
    """One rank goes on with the samples of both, and the losses differ by rounding only."""
    reference = tmp_path / "undisturbed"
    assert run(reference, 1, *NO_DROPOUT)[0] == [0]
    folder = tmp_path / "run"
    more = ("--max-restarts", "1", "--min-ranks", "1")
    codes, output = run(folder, 2, *NO_DROPOUT, *more, faults={0: [], 1: [(3, "supervisor")]})
    assert codes == [0, -9], output
    assert [restart["ranks"] for restart in records(folder, "restart")] == [1]
    undisturbed = dict(steps(reference))
    for iteration, (loss, norm, samples) in steps(folder):
        assert samples == undisturbed[iteration][2]
        assert (loss, norm) == pytest.approx(undisturbed[iteration][:2], rel=1e-5)
    assert steps(folder)[-1][0] == LAST


def fail_reading(marker, step):
    """Let a read of this rank's data fail after a step, once in the job."""
    read = os.pread
    armed = []

    def fails(*of_call):
        if armed and not os.path.exists(marker):
            Path(marker).touch()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*of_call)

    os.pread = fails
    sys.addaudithook(lambda event, of: armed.append(1) if (event, *of) == (STEP, step) else None)


def test_a_job_survives_an_error_of_a_file_system(tmp_path):
    prefix = write_documents(tmp_path / "x", [[i % 97 for i in range(2000)]])
    folder = tmp_path / "run"
    arguments = [word for word in TINY if word != "--mock-data"]
    arguments += ["--data-path", str(prefix), "--split", "1", "--no-mmap-bin-files"]
    arguments += ["--train-iters", str(LAST), "--save-interval", "2", "--max-restarts", "2"]
    arguments += ["--save", str(folder), "--load", str(folder)]
    outcomes = launch(2, arguments, arm={1: (fail_reading, str(tmp_path / "failed"), 3)})
    assert [one.code for one in outcomes] == [0, 0], outcomes[0].output
    (restart,) = records(folder, "restart")
    assert f"{prefix}.bin" in restart["cause"] and os.strerror(errno.EIO) in restart["cause"]


LOG = """
import megatron

class Log(megatron.Callback):
    def __init__(self):
        self.file = open({log!r}, "a")

    def on_step(self, run, step):
        self.file.write(f"{{run.topology.rank}} {{step.iteration}}\\n")

    def close(self):
        self.file.close()

PIECES = {{"callbacks": [Log()]}}
"""
LAZY = """
import sys
import megatron

class Lazy(megatron.Callback):
    def after_step(self, run):
        sys.path.append({folder!r})
        import helper_of_lazy

PIECES = {{"callbacks": [Lazy()]}}
"""


@pytest.mark.parametrize(
    ("code", "ways"), [(LOG, {"forked": 2}), (LAZY, {"forked": 1, "in-process": 1})]
)
def test_callbacks_begin_anew_after_a_restart(tmp_path, code, ways):
    """One holds an open file, the other imports a module that a new process has not imported."""
    (tmp_path / "helper_of_lazy.py").touch()
    log = tmp_path / "log"
    pieces = tmp_path / "pieces.py"
    pieces.write_text(code.format(log=str(log), folder=str(tmp_path)))
    flags = ("--max-restarts", "3", "--pieces", str(pieces))
    codes, output = run(tmp_path / "run", 2, *flags, faults={1: [(3, "kill")]})
    assert codes == [0, 0], output
    (restart,) = records(tmp_path / "run", "restart")
    assert restart["ways"] == ways
    if code is LOG:
        steps_of_first = [line for line in log.read_text().splitlines() if line[0] == "0"]
        repeated = range(restart["iteration"] + 1, LAST + 1)
        assert steps_of_first[-len(repeated) :] == [f"0 {step}" for step in repeated]
        assert steps_of_first[: restart["iteration"]] == ["0 1", "0 2"]


def test_restarts_leave_nothing_behind(tmp_path):
    """A process that survives five restarts holds no more descriptors, threads or engines."""
    log = tmp_path / "held"
    faults = {1: [(step, "kill") for step in range(2, LAST + 1)]}
    flags = ("--max-restarts", "5", "--save-interval", "1")
    codes, output = run(tmp_path / "run", 2, *flags, faults=faults, log=str(log))
    assert codes == [0, 0], output
    assert records(tmp_path / "run", "restart")[-1]["ways"] == {"forked": 5, "in-process": 5}
    held = [json.loads(line) for line in Path(log).read_text().splitlines()]
    assert len({process for process, *_ in held}) == 1  # rank 0's first process is its last
    most = [max(some) for some in zip(*held[:4], strict=True)]  # before and after the first restart
    for later in held[4:]:
        assert all(one <= limit for one, limit in zip(later, most, strict=True)), held
    assert most[-1] == 1
