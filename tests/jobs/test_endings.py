"""Reasons for the end of runs, from exit codes and logs of programs, launchers and kernels."""

import subprocess
import sys

import pytest

from megatron.jobs.result import CRASH, HANG, LOST_RANK, OUT_OF_MEMORY, REFUSED, ending

SRUN = "srun: error: node{}: task {}: {}\n"
SERVER = """srun: error: _server_read: fd 12 error reading header: Connection reset by peer
srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 0
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
srun: error: node04: task 1: Killed
"""


@pytest.mark.parametrize(
    ("codes", "text", "kind", "words"),
    [
        (1, "x\nRuntimeError: HIP out of memory\ny", OUT_OF_MEMORY, "Error: HIP out of memory"),
        (1, "slurmstepd: error: Detected 1 oom_kill event in StepId=7.2.", OUT_OF_MEMORY, ""),
        (1, SRUN.format(1, 3, "Out Of Memory"), OUT_OF_MEMORY, ""),
        (-6, "terminate called after throwing an instance of 'std::bad_alloc'", OUT_OF_MEMORY, ""),
        (1, "  x\nMemoryError\n", OUT_OF_MEMORY, ""),
        (1, "MemoryErrors are fine", CRASH, ""),
        (1, "DefaultCPUAllocator: can't allocate memory: you tried", OUT_OF_MEMORY, ""),
        (
            1,
            "RuntimeError: CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling hipblasCreate",
            OUT_OF_MEMORY,
            "",
        ),
        (1, "hipErrorOutOfMemory", OUT_OF_MEMORY, ""),
        (
            1,
            "  metrics_file .... "
            "/runs/my_out_of_memory/oom-killed/out_of_memory/x\nValueError: bad",
            CRASH,
            "1: ValueError: bad",
        ),
        (-9, "", OUT_OF_MEMORY, "killed"),
        (137, SRUN.format(1, 3, "Killed"), OUT_OF_MEMORY, ""),
        (75, "", LOST_RANK, ""),
        (75, "rank 1: the job hangs: rank 0 is stopped", HANG, "the job hangs: rank 0 is stopped"),
        (1, "srun: error: Node failure on node02", LOST_RANK, "Node failure on node02"),
        (2, "noise\nerror: --x is wrong\nmore", REFUSED, "error: --x is wrong"),
        (2, "TrainingError: loss is nan", CRASH, "2: TrainingError: loss is nan"),
        (None, "", CRASH, ""),
        (-11, "", CRASH, "signal 11"),
        # A node that died before Slurm knew it, in srun's words; srun itself killed the task.
        (137, SERVER, LOST_RANK, "on node"),
    ],
)
def test_one_log(tmp_path, codes, text, kind, words):
    (tmp_path / "train.log").write_text(text)
    result = ending(
        None if codes is None else [codes], [tmp_path / "absent", tmp_path / "train.log"]
    )
    assert result.kind == kind and words in result.reason


def test_the_first_cause_is_told_not_what_follows_from_it(tmp_path):
    first = tmp_path / "train.log"
    second = tmp_path / "task_1.err"
    first.write_text("LostRankError: rank 1 on node02 is dead\n")
    second.write_text("rank 1 failed:\nTraceback:\n  x\nValueError: loss is 3\n")
    assert ending([75, 1], [first, second]) == ending([1, 75], [second, first])
    assert ending([75, 1], [first, second]).reason.endswith("1: ValueError: loss is 3")
    assert ending([75, 75], [first]).reason.endswith("LostRankError: rank 1 on node02 is dead")


def test_srun_gives_the_highest_code_and_its_log_those_of_the_tasks(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "DataError: no such file\n"
        + SRUN.format(1, "0-1,3", "Exited with exit code 75").replace("task ", "tasks ", 1)
        + SRUN.format(2, 2, "Exited with exit code 2")
    )
    assert ending([75], [log]).kind == REFUSED
    log.write_text(log.read_text() + SRUN.format(2, 9, "Segmentation fault (core dumped)"))
    assert ending([75], [log]).reason.endswith("signal 11: DataError: no such file")


def test_tasks_that_srun_itself_ends_after_another_one_are_no_cause(tmp_path):
    """Tasks that srun itself ends after another one are no cause.

    A rank that hangs does not end when another one has failed.
    """
    log = tmp_path / "srun.err"
    failed = SRUN.format(1, 0, "Exited with exit code 1")
    waited = "srun: First task exited 60s ago\n"
    log.write_text(
        failed + waited + "srun: StepId=7.1 task 0: exited\n" + SRUN.format(2, 1, "Killed")
    )
    assert ending([137], [log]).kind == CRASH and ending([137], [log]).reason.endswith("1")
    log.write_text(waited + SRUN.format(2, 1, "Killed"))
    assert ending([137], [log]).kind == CRASH, "and not for want of memory"


def test_a_long_log_is_read_at_its_end(tmp_path):
    log = tmp_path / "log"
    log.write_text("HIP out of memory\n" + "x" * 200_000 + "\nValueError: bad\n")
    assert ending([1], [log]).kind == CRASH and "ValueError: bad" in ending([1], [log]).reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "x = [0] * 10**9",
        "import ctypes; import mmap; [mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE) for _ in range(4)]",
    ],
)
def test_real_programs_at_a_real_limit(tmp_path, program):
    """Recognise Python's own messages when memory runs out."""
    log = tmp_path / "log"
    with open(log, "wb") as file:
        limited = ["bash", "-c", 'ulimit -d 524288; exec "$@"', "limited"]
        command = [*limited, sys.executable, "-c", program]
        code = subprocess.run(command, stdout=file, stderr=file).returncode
    assert code == 1 and ending([code], [log]).kind == OUT_OF_MEMORY, log.read_text()
