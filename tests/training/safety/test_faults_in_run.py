"""Runs that are told to end, that cannot save, and whose job ends: what they leave behind."""

import errno
import importlib
import itertools
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest

from megatron.training.run.process import run_guarded
from tests.helpers.fault_points import strike
from tests.helpers.launching import TINY, launch
from tests.helpers.processes import run_processes, run_processes_raw
from tests.helpers.tiny import records, run, values

pytestmark = pytest.mark.slow


def iterations(folder):
    """Return the iterations of the checkpoints present."""
    return sorted(
        int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*") if not path.suffix
    )


# -- saves that fail -------------------------------------------------------------------------------


def run_on_full_disk(rank, fields, broken):
    """Make rank 0 fail to begin checkpoints of the `broken` iterations; return the run's error."""
    from megatron.checkpoint import save
    from megatron.errors import CheckpointError

    plain = save.start_folder

    def start_folder(folder):
        if int(folder.name.removeprefix("iter_")) in broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        return plain(folder)

    save.start_folder = start_folder
    try:
        run(rank, fields)
    except CheckpointError as error:
        return str(error)
    return None


def test_training_goes_on_when_a_save_fails(tmp_path):
    fields = dict(save=str(tmp_path), save_interval=2, train_iters=5, async_save=True)
    assert run_processes(2, run_on_full_disk, fields, [4]) == [None, None]
    by_event = records(tmp_path)
    assert values(by_event["checkpoint"], "iteration") == [(2,), (5,)]
    (failed,) = by_event["checkpoint_failed"]
    assert failed["iteration"] == 4 and os.strerror(errno.ENOSPC) in failed["reason"]
    assert iterations(tmp_path) == [2, 5] and not list(tmp_path.glob("*.tmp"))


def test_a_run_whose_last_save_failed_ends_with_an_error_and_keeps_the_old_checkpoint(
    tmp_path,
):
    fields = dict(save=str(tmp_path), save_interval=2, train_iters=3)
    errors = run_processes(2, run_on_full_disk, fields, [3])
    assert errors[0] == errors[1]
    assert "iteration 3" in errors[0] and "iteration 2" in errors[0]
    by_event = records(tmp_path)
    assert values(by_event["end"], "iteration", "reason") == [(3, "done")]
    assert iterations(tmp_path) == [2]
    # continues from there
    run_processes(1, run, dict(save=str(tmp_path), load=str(tmp_path), train_iters=3))
    assert iterations(tmp_path) == [2, 3]


def run_and_give_up(rank, fields):
    """Make the third step impossible on any rank."""
    from megatron.engine.engine import Engine
    from megatron.errors import TrainingError

    finish_step = Engine.finish_step
    calls = itertools.count(1)

    def third_fails(engine):
        if next(calls) == 3:
            raise TrainingError("NaN")
        return finish_step(engine)

    Engine.finish_step = third_fails
    with pytest.raises(TrainingError) as caught:
        run(rank, fields)
    return str(caught.value)


def test_a_save_under_way_is_completed_when_training_cannot_go_on(tmp_path):
    fields = dict(save=str(tmp_path), save_interval=2, train_iters=5, async_save=True)
    assert run_processes(1, run_and_give_up, fields) == ["NaN"]
    assert iterations(tmp_path) == [2]


# -- signals ---------------------------------------------------------------------------------------


def run_and_signal(rank, fields, where, nth, number):
    """Send the signal twice on the last rank and return the exit code.

    It comes in the nth call of the function `where` of a module.
    """
    module, _, name = where.rpartition(".")
    holder = importlib.import_module(module)
    plain = getattr(holder, name)
    calls = [0]

    def signalled(*args, **kwargs):
        calls[0] += 1
        if rank == int(os.environ["WORLD_SIZE"]) - 1 and calls[0] == nth:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return plain(*args, **kwargs)

    setattr(holder, name, signalled)
    return run_guarded(lambda: run(rank, fields), rank)


@pytest.mark.parametrize(
    ("ranks", "where", "nth", "stopped", "evaluations"),
    [
        (2, "megatron.training.run.setup.identity", 1, 0, 0),  # before all else
        # The evaluation before the first step.
        (1, "megatron.training.run.evaluation.open_stream", 1, 0, 0),
        # The ranks tell each other while step 3 runs.
        (2, "megatron.training.run.loop.train_step", 2, 3, 1),
        # of iteration 2, noticed after step 3
        (1, "megatron.checkpoint.save.check_complete", 1, 3, 1),
    ],
)
def test_a_signal_at_any_time_saves_and_ends_with_exit_code_0(
    tmp_path, ranks, where, nth, stopped, evaluations
):
    fields = dict(
        save=str(tmp_path),
        save_interval=2,
        train_iters=50,
        eval_iters=2,
        eval_interval=99,
        eval_at_start=True,
    )
    number = signal.SIGUSR1 if stopped else signal.SIGTERM
    assert run_processes(ranks, run_and_signal, fields, where, nth, int(number)) == [0] * ranks
    by_event = records(tmp_path)
    (end,) = by_event["end"]
    assert end["iteration"] == stopped and number.name in end["reason"]
    assert (
        iterations(tmp_path)[-1] == stopped and len(by_event.get("validation", ())) == evaluations
    )


def test_a_signal_in_the_last_evaluation_costs_nothing_but_evaluations(tmp_path):
    fields = dict(
        save=str(tmp_path), train_iters=2, eval_iters=1, eval_interval=99, eval_at_start=True
    )
    where = "megatron.training.run.loop.evaluate"
    assert run_processes(1, run_and_signal, fields, where, 2, int(signal.SIGTERM)) == [0]
    by_event = records(tmp_path)
    assert values(by_event["end"], "iteration", "reason") == [(2, "done")] and iterations(
        tmp_path
    ) == [2]
    assert values(by_event["validation"], "iteration") == [(0,)]


# -- the end of the job ----------------------------------------------------------------------------


def slurm(folder, left):
    """Provide an environment in which squeue reports `left`, and scontrol notes its arguments."""
    answers = {
        "squeue": f'case "$*" in *%L*) echo {left};; *) echo RUNNING None;; esac',
        "scontrol": "",
    }
    for name, body in answers.items():
        script = folder / name
        script.write_text(f"#!/bin/sh\necho {name} $@ >> {folder}/asked\n{body}\n")
        script.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}


def asked_back(folder):
    """Return the calls of scontrol."""
    asked = folder / "asked"  # absent if the run was over before squeue had begun
    return (
        [line for line in asked.read_text().splitlines() if line.startswith("scontrol")]
        if asked.exists()
        else []
    )


def run_until_late(rank, fields):
    """Run until 20 s of squeue's two hours are left after the third step, less than the margin."""
    from megatron.training.run import loop
    from megatron.training.run.stopping import SlurmEnd

    between_steps = loop.between_steps
    left_s = SlurmEnd.left_s
    late = [False]

    def after_three(run):
        late[0] = run.progress.iteration >= 3
        return between_steps(run)

    def less(self):
        left = left_s(self)
        return left if left is None or not late[0] else left - 7180

    loop.between_steps = after_three
    SlurmEnd.left_s = less
    run(rank, fields)


def test_a_job_that_ends_saves_and_goes_back_into_the_queue(tmp_path):
    save = tmp_path / "run"
    environment = slurm(tmp_path, "2:00:00")
    fields = dict(save=str(save), train_iters=10**6, log_interval=1000, requeue=True)
    run_processes(2, run_until_late, fields, env=environment)
    (end,) = records(save)["end"]
    assert end["reason"] != "done" and 3 <= end["iteration"] < 10**6
    assert iterations(save) == [end["iteration"]]
    assert asked_back(tmp_path) == ["scontrol requeue 4711"]


def test_a_job_with_time_left_goes_on_and_is_not_put_back_when_it_is_done(tmp_path):
    save = tmp_path / "run"
    environment = slurm(tmp_path, "2:00:00")
    run_processes(1, run, dict(save=str(save), train_iters=3, requeue=True), env=environment)
    assert values(records(save)["end"], "iteration", "reason") == [(3, "done")]
    assert asked_back(tmp_path) == []


def wait_for_nobody():
    """Ask the others once what became of them: the only one is dead, and no answer can come."""
    from megatron.parallel import rendezvous

    rendezvous.ANSWER_S = rendezvous._LINGER_S = 0.2


@pytest.mark.parametrize(("died_at", "victim", "put_back"), [(3, 1, True), (1, 0, False)])
def test_a_lost_rank_is_named_and_the_job_goes_back_once_it_has_saved(
    tmp_path, died_at, victim, put_back
):
    """A lost rank is named and the job is requeued once it has saved. Rank 0 serves the store."""
    folder = tmp_path / "run"
    flags = f"--train-iters 5 --save {folder} --load {folder} --save-interval 2 --requeue"
    arm = {victim: (strike, "megatron.run.step", died_at, "kill"), 1 - victim: (wait_for_nobody,)}
    outcomes = launch(2, [*TINY, *flags.split()], env=slurm(tmp_path, "2:00:00"), arm=arm)
    other = outcomes[1 - victim]
    assert other.code == 75, other
    (message,) = [line for line in other.output.splitlines() if "LostRankError" in line]
    assert f"rank {victim}" in message and "Traceback" not in other.output
    assert asked_back(tmp_path) == ["scontrol requeue 4711"] * put_back


def run_set_up_in_an_hour(rank, fields):
    """Run with a clock of set-up that is an hour after the program's start."""
    from megatron.training.run import setup

    setup.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    run(rank, fields)


def test_a_given_wall_time_counts_from_the_start(tmp_path):
    """A given wall time counts from the start.

    Of it 29 s are left after set-up, less than the margin: not even the first evaluation begins,
    and Slurm is not asked.
    """
    save = tmp_path / "run"
    environment = slurm(tmp_path, "2:00:00")
    run_processes(
        1,
        run_set_up_in_an_hour,
        dict(save=str(save), walltime="1:00:29", eval_iters=1, eval_at_start=True),
        env=environment,
    )
    (end,) = records(save)["end"]
    assert "validation" not in records(save)
    assert (
        end["iteration"] == 0
        and re.search(r"\b0:[0-2]\d left", end["reason"])
        and not (tmp_path / "asked").exists()
    )


def test_a_failed_last_save_keeps_the_job_out_of_the_queue(tmp_path):
    """A failed last save keeps the job out of the queue.

    It would lose the same steps again and again.
    """
    save = tmp_path / "run"
    environment = slurm(tmp_path, "0:25")
    fields = dict(save=str(save), train_iters=3000, requeue=True)
    outcomes = run_processes_raw(1, run_on_full_disk, fields, list(range(3000)), env=environment)
    assert outcomes[0][0] and outcomes[0][1]
    assert asked_back(tmp_path) == []


def run_and_note_the_watchdog(rank, fields):
    """Return each operation of a run and the watchdog's limit for it."""
    from megatron.pipeline.executor import Executor
    from megatron.training.safety.watchdog import Watchdog

    noted = []
    watching = []

    def note(what, plain):
        def noting(self, *args, **kwargs):
            noted.append((what, watching[0].limit_s))
            return plain(self, *args, **kwargs)

        return noting

    Executor.train = note("step", Executor.train)
    Executor.evaluate = note("evaluation", Executor.evaluate)
    Watchdog.start = lambda self: watching.append(self)
    run(rank, fields)
    return noted


def test_the_watchdog_is_patient_with_what_is_done_for_the_first_time(tmp_path):
    """A first step or evaluation may take nine tenths of --distributed-timeout-minutes."""
    limits = dict(
        hang_timeout=100.0,
        distributed_timeout_minutes=10.0,
        train_iters=2,
        eval_iters=2,
        eval_interval=2,
    )
    first = 540.0
    later = 100.0
    steps, evaluations = ([(what, first), (what, later)] for what in ("step", "evaluation"))
    (noted,) = run_processes(1, run_and_note_the_watchdog, limits)
    assert noted[:4] == steps + evaluations and set(noted[4:]) == {("evaluation", later)}
