"""Remaining time of a job: Slurm's answer, and how much is enough."""

import time

import pytest

from megatron.data.datasets import Datasets
from megatron.data.gpt_dataset import MockDataset
from megatron.training.run.evaluation import evaluation_iterations
from megatron.training.run.schedules import BatchSchedule
from megatron.training.run.stopping import SlurmEnd, WallTime, requeue
from tests.helpers.tiny import tiny


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that puts a shell script of a name before all others on the path.

    It returns the file that records the script's arguments.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(name, body):
        script = tmp_path / name
        called = tmp_path / f"{name}.called"
        script.write_text(f'#!/bin/sh\necho "$@" >> {called}\n{body}\n')
        script.chmod(0o755)
        return called

    return write


def asked_once(clock=lambda: 1000.0, **environ):
    """Return the inquiry and its messages after the first answer; no second question follows."""
    messages = []
    end = SlurmEnd({"SLURM_JOB_ID": "4711", **environ}, messages.append, clock=clock, every_s=3600)
    end.close()
    end.thread.join()
    return end, messages


def test_squeue_says_what_is_left_of_this_job(command):
    called = command("squeue", "echo 1-02:00:30")
    end, messages = asked_once()
    assert called.read_text() == "-h -j 4711 -o %L\n"
    assert end.left_s() == 93630
    assert len(messages) == 1 and "4711" in messages[0] and "1-02:00:30" in messages[0]


def test_the_last_answer_counts_down_and_a_new_one_counts_more(command):
    command("squeue", "echo 10:00")
    now = [0.0]
    end, messages = asked_once(lambda: now[0], SLURM_JOB_ID="1")
    now[0] = 100.0
    assert end.left_s() == 500
    command("squeue", "echo 30:00")  # the job was extended
    end.ask()
    assert end.left_s() == 1800
    command("squeue", "echo slurm_load_jobs >&2; exit 1")
    for _ in range(3):
        now[0] += 100
        end.ask()
    assert end.left_s() == 1500
    (warning,) = messages[1:]  # once
    assert "slurm_load_jobs" in warning and "job 1 " in warning and "28:20" in warning


@pytest.mark.parametrize("answer", ["UNLIMITED", "INVALID", "", r"\377\376 10:00"])
def test_an_answer_that_says_nothing_is_told_but_not_that_there_is_no_limit(command, answer):
    command("squeue", f"printf '{answer}'")
    end, messages = asked_once()
    assert end.left_s() is None and len(messages) == (answer != "UNLIMITED")


def test_of_a_job_array_its_own_task_is_asked_for(command):
    """The task of a job array asks for itself.

    One task has the array's number, for which squeue lists all tasks, and scontrol requeues all.
    """
    task = {"SLURM_JOB_ID": "4711", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    called = command("squeue", '[ "$3" = 4711 ] && echo 2:00:00; echo 1:00')
    end, _ = asked_once(**task)
    assert called.read_text() == "-h -j 4711_3 -o %L\n" and end.left_s() == 60
    command("squeue", "echo RUNNING None")
    called = command("scontrol", "exit 0")
    assert requeue(task, [].append) and called.read_text() == "requeue 4711_3\n"


def test_without_squeue_slurms_promise_is_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for promised in ("", "²", "9" * 5000):
        end, messages = asked_once(SLURM_JOB_END_TIME=promised)
        assert end.left_s() is None and "--walltime" in messages[0]
    monkeypatch.setattr(time, "time", lambda: 5e8)
    end, messages = asked_once(SLURM_JOB_END_TIME=str(int(5e8) + 600))
    assert end.left_s() == 600 and len(messages) == 1


def test_what_must_be_left():
    now = [0.0]
    wall_time = WallTime(lambda: 1100.0 - now[0], checkpoint_bytes=2e9, eval_iters=10)
    # Only the size is known: 2 GB at 100 MB/s are 20 s, 1.5 times that, and 30 s of margin.
    assert wall_time.needed_s == 60.0
    wall_time.after_step(4.0)
    wall_time.after_step(2.0)
    assert wall_time.needed_s == 64.0  # the longest step lately
    wall_time.after_step(2.0, evaluations=1)
    assert wall_time.needed_s == 104.0  # ten iterations, as long as steps
    wall_time.after_evaluation(7.0)
    assert wall_time.needed_s == 71.0
    wall_time.after_save(10.0)
    wall_time.after_save(8.0)
    wall_time.after_step(2.0, saves_ahead=2)
    # 4 + 2 * 15 + 30: a save is due, or in progress, and then comes the last one.
    assert wall_time.needed_s == 64.0
    now[0] = 1036.0
    assert not wall_time.is_ending()
    now[0] = 1036.5
    assert wall_time.is_ending()
    for _ in range(100):
        wall_time.after_step(1.0)
    assert wall_time.needed_s == 46.0  # old steps are forgotten
    wall_time.steps_ahead = 2
    wall_time.after_step(1.0, evaluations=2, saves_ahead=2)
    assert wall_time.needed_s == 2 * 1 + 2 * 7 + 2 * 15 + 30


def test_an_evaluation_is_foreseen_with_all_corpora():
    """Three batches of the large corpus and the two that the small one has, twice with an average."""
    config = tiny(eval_iters=3, ema_decay=0.9, eval_ema=True)
    corpora = {str(n): MockDataset("valid", n, 8, 9, 1) for n in (100, 5)}
    batches = BatchSchedule.from_config(config)
    assert evaluation_iterations(config, batches, Datasets(corpora=corpora)) == 2 * (3 + 2)
    assert evaluation_iterations(config, batches, Datasets()) == 2 * 3


def test_a_job_goes_back_into_the_queue(command):
    command("squeue", "echo RUNNING None")
    called = command("scontrol", "exit 0")
    messages = []
    assert requeue({"SLURM_JOB_ID": "4711"}, messages.append)
    assert called.read_text() == "requeue 4711\n" and len(messages) == 1 and "4711" in messages[0]
    # Slurm ends all processes of the job then, sometimes also the scontrol that asked for it.
    command("scontrol", "kill -TERM $$")
    assert requeue({"SLURM_JOB_ID": "4711"}, messages.append) and messages[1:] == messages[:1]


@pytest.mark.parametrize(
    ("state", "goes"), [("COMPLETING None", False), ("COMPLETING TimeLimit", True)]
)
def test_a_job_that_somebody_cancelled_stays_cancelled(command, state, goes):
    command("squeue", f"echo {state}")
    called = command("scontrol", "exit 0")
    messages = []
    assert requeue({"SLURM_JOB_ID": "4711"}, messages.append) == goes == called.exists()


def test_what_keeps_a_job_out_of_the_queue_is_told(command):
    messages = []
    assert not requeue({}, messages.append)
    assert len(messages) == 1 and "--requeue" in messages[0]
    command("squeue", r"printf '\377 None'; exit 1")
    command("scontrol", r"printf '\377 disabled' >&2; exit 1")  # which is not text
    assert not requeue({"SLURM_JOB_ID": "4711"}, messages.append)
    assert "ERROR" in messages[1] and "4711" in messages[1] and "disabled" in messages[1]
