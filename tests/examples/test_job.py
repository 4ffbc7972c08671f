"""Calls of a job of examples/frontier, with stubs of Slurm.

The scripts run under a real Slurm in tests/slurm.
"""

import re
import shlex
import sys

import pytest

from megatron.config import parse_args
from tests.examples.stubs import FRONTIER, run_script
from tests.helpers.launching import ROOT

pytestmark = pytest.mark.slow

SCRIPTS = {path.stem.removeprefix("train_"): path for path in FRONTIER.glob("train_*.sbatch")}
TRAIN = SCRIPTS["22b"]
PROGRAM = "pretrain_gpt.py"
TINY = ("--mock-data", "--train-iters", "3")


def train(folder, *arguments, script=TRAIN, **variables):
    return run_script(folder, script, *TINY, *arguments, **variables)


def checkpoint(folder, iteration, name="gpt"):
    tracker = folder / "runs" / name / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True, exist_ok=True)
    tracker.write_text(f"{iteration}\n")


def test_headers():
    nodes_of = {"1.4b": 8, "22b": 16, "175b": 128, "1t": 384, "moe_55b": 32, "8b_1m": 32}
    assert set(SCRIPTS) == set(nodes_of)
    for name, nodes in nodes_of.items():
        head = dict(
            re.findall(
                r"^#SBATCH (--[a-z-]+|-\w)[= ]?(.*)$", SCRIPTS[name].read_text(), re.MULTILINE
            )
        )
        hours = 2 if nodes <= 91 else 6 if nodes <= 183 else 12  # OLCF's limit for that many nodes
        asked = [head[flag] for flag in ("-N", "-t", "-C", "--network", "--ntasks-per-node", "-c")]
        assert asked == [str(nodes), f"{hours:02}:00:00", "nvme", "disable_rdzv_get", "8", "7"]
        assert head["--signal"].startswith("USR1@") and {
            "--requeue",
            "--no-kill",
            "--open-mode",
        } <= set(head)


def test_srun_as_olcf_recommends(tmp_path):
    ended = train(tmp_path, DEVICE="gpu", SITE_MODULES="")
    assert ended.code == 0, ended.log
    (call,) = ended.named("srun", PROGRAM)
    asked = [call.value(flag) for flag in ("-N", "-n", "-c", "--ntasks-per-node")]
    assert asked == ["2", "16", "7", "8"]
    assert {"--gpus-per-task=1", "--gpu-bind=closest"} <= set(call.words)
    # The job goes on without tasks and nodes that are lost.
    assert (call.value("--kill-on-bad-exit"), call.value("--wait")) == ("0", "0")
    assert "--no-kill" in call.words and call.value("--max-restarts") == "100"
    assert "-w" not in call.words
    assert "--distributed-backend" not in call.words


@pytest.mark.parametrize(
    ("recipe", "flags", "name"),
    [("frontier", ("--data-path", "d"), "gpt"), ("paper", ("--mock-data",), "gpt-paper-mock")],
)
def test_no_training_goes_on_from_a_trial_or_another_recipe(tmp_path, recipe, flags, name):
    ended = run_script(tmp_path, TRAIN, "--train-iters", "3", *flags, RECIPE=recipe, RUN_NAME="")
    (call,) = ended.named("srun", PROGRAM)
    assert call.value("--save") == call.value("--load") == f"{tmp_path}/runs/{name}/checkpoints"
    assert call.value("--error").startswith(f"{tmp_path}/runs/{name}/logs/77/0/")


def test_a_setting_that_cannot_be_is_refused_before_any_step(tmp_path):
    """Misunderstood ones, too many nodes, no Python, and modules without the command for them."""
    wrong = (
        "PREFLIGHT=yes DRY_RUN=y REQUEUE=true DEVICE=cuda GPU_VISIBILITY=two MAX_STARTS=many RECIPE=papper "
        "NODES_NEEDED=3 NODES_NEEDED=two MIN_NODES=3 MAX_RESTARTS=many SITE_VENV=/nowhere SITE_MODULES=rocm"
    )
    for setting in wrong.split():
        name, value = setting.split("=")
        ended = train(
            tmp_path, **{"DEVICE": "gpu" if name == "SITE_MODULES" else "cpu", name: value}
        )
        assert (ended.code, ended.named("srun"), ended.named("sbcast")) == (2, [], [])
        assert (setting if name != "SITE_MODULES" else name) in ended.log


@pytest.mark.parametrize("arguments", [(), ("--max-restarts", "0")])
def test_without_restarts_a_lost_rank_ends_the_job(tmp_path, arguments):
    ended = train(tmp_path, *arguments, **({} if arguments else {"MAX_RESTARTS": "0"}))
    (call,) = ended.named("srun", PROGRAM)
    # Ranks end by themselves and name the lost one; a rank that does not is ended after a while.
    assert (call.value("--kill-on-bad-exit"), call.value("--wait")) == ("0", "600")
    assert "--no-kill" not in call.words


def test_recipe_and_flags(tmp_path):
    (call,) = train(tmp_path, "--lr", "1e-4", "--title", "two words", "*").named("srun", PROGRAM)
    assert not [word for word in call.words if word.startswith("--gpu")]  # DEVICE=cpu
    assert call.value("--distributed-backend") == "gloo"
    program = call.words[call.words.index(f"{ROOT}/{PROGRAM}") :]
    assert call.value("--preset") == "gpt-22b-frontier"
    assert call.value("--save") == call.value("--load") == f"{tmp_path}/runs/gpt/checkpoints"
    assert "--requeue" in program
    # Last, so that they win, and unchanged.
    assert program[-8:] == [*TINY, "--lr", "1e-4", "--title", "two words", "*"]
    assert "--train-tokens" not in program  # a length was given


def test_data_of_the_site(tmp_path):
    site = {"SITE_DATA": "/data/my corpus", "SITE_VOCAB": "v.json", "SITE_MERGES": "m.txt"}
    (call,) = run_script(tmp_path, TRAIN, **site).named("srun", PROGRAM)
    assert (call.value("--data-path"), call.value("--tokenizer-type")) == (
        "/data/my corpus",
        "GPT2BPETokenizer",
    )
    (call,) = train(tmp_path, **site).named("srun", PROGRAM)
    assert "--data-path" not in call.words  # --mock-data
    ended = run_script(tmp_path, TRAIN)
    assert (ended.code, ended.named("srun")) == (2, [])
    assert "SITE_DATA" in ended.log


def test_the_configuration_is_checked_first(tmp_path):
    ended = train(tmp_path, "--lrr", "1", STUB_python="echo '--lrr' >&2; exit 2")
    assert (ended.code, ended.named("srun"), ended.named("sbcast")) == (2, [], [])
    (call,) = ended.named("python")
    assert call.words[-3:] == ["--world-size", "16", "--print-config"]


@pytest.mark.parametrize(("code", "requeued"), [(1, False), (137, True)])
def test_exit_codes(tmp_path, code, requeued):
    messages = (
        "echo 'srun: error: a2: task 9: whatever' >&2; echo why "
        f">{tmp_path}/runs/gpt/logs/77/0/task_9.err"
    )
    ended = train(tmp_path, STUB_srun=f"[[ $* != *{PROGRAM}* ]] || {{ {messages}; exit {code}; }}")
    assert ended.code == code
    assert ended.requeued == ["77"] * requeued
    if code:
        assert re.search(r"ERROR: task\(s\) 9 on a2: whatever; \S+/logs/77/0/task_9.err", ended.log)
    if requeued:
        not_requeued = train(
            tmp_path, REQUEUE="0", STUB_srun=f"[[ $* != *{PROGRAM}* ]] || exit {code}"
        )
        assert not_requeued.code == code
        assert not not_requeued.requeued
        assert "--requeue" not in not_requeued.named("srun", PROGRAM)[0].words


def test_a_job_that_somebody_ended_stays_out_of_the_queue(tmp_path):
    ended = train(
        tmp_path,
        STUB_srun=f"[[ $* != *{PROGRAM}* ]] || exit 143",
        STUB_squeue="echo COMPLETING None",
    )
    assert ended.code == 143
    assert not ended.requeued


@pytest.mark.parametrize(("signal", "trap"), [("USR1", "trap 'exit 0' USR1"), ("TERM", "")])
def test_a_job_that_saved_after_a_signal_has_ended_well(tmp_path, signal, trap):
    """A job that saved after a signal has ended well.

    The signal may come before the script waits for the tasks. The script forwards USR1.
    """
    then = "while :; do :; done" if trap else "exit 0"
    tasks = f"{trap or ':'}; kill -{signal} $$; {then}"
    ended = train(tmp_path, STUB_srun=f"[[ $* != *{PROGRAM}* ]] || {{ {tasks}; }}")
    assert ended.code == 0, ended.log
    assert not ended.requeued


def test_tasks_that_hang_when_the_job_has_ended_do_not_hold_the_nodes(tmp_path):
    tasks = 'echo 0 >"$MEGATRON_JOB_END"; while :; do :; done'
    ended = train(tmp_path, SRUN_WAIT="1", STUB_srun=f"[[ $* != *{PROGRAM}* ]] || {{ {tasks}; }}")
    assert ended.code == 0, ended.log
    assert not ended.requeued


@pytest.mark.parametrize(
    ("written", "of_srun", "code"),
    [
        # A spare took the place of a task whose supervisor was killed, or that left the job.
        ("echo 0", 137, 0),
        ("echo 0", 75, 0),
        ("echo 2", 137, 2),
        ("echo", 75, 75),  # the disk was full
        (":", 75, 75),
    ],
)
def test_the_exit_code_that_the_job_has_written_counts(tmp_path, written, of_srun, code):
    tasks = f'{written} >"$MEGATRON_JOB_END"; exit {of_srun}'
    ended = train(tmp_path, STUB_srun=f"[[ $* != *{PROGRAM}* ]] || {{ {tasks}; }}")
    assert ended.code == code, ended.log
    assert bool(ended.requeued) == (code == 75)


@pytest.mark.parametrize(
    ("ends", "code", "requeued"),
    [
        # A bug, or out of memory, on one rank.
        (("Exited with exit code 1", "Exited with exit code 75"), 1, False),
        (("Exited with exit code 75", "Exited with exit code 75"), 75, True),
        # The error followed from the loss.
        (("Killed", "Exited with exit code 75", "Exited with exit code 1"), 75, True),
    ],
)
def test_an_error_of_the_program_is_no_lost_rank(tmp_path, ends, code, requeued):
    messages = "; ".join(
        f"echo 'srun: error: a1: task {task}: {end}' >&2" for task, end in enumerate(ends)
    )
    ended = train(tmp_path, STUB_srun=f"[[ $* != *{PROGRAM}* ]] || {{ {messages}; exit 75; }}")
    assert ended.code == code
    assert ended.requeued == ["77"] * requeued


def test_what_failing_tasks_wrote_is_shown(tmp_path):
    fail = """[[ $* != *pretrain_gpt.py* ]] || {
        for word; do [[ $word != --error=* ]] || name=${word#--error=}; done
        for task in 0 1 9 12; do : >"${name/\\%t/$task}"; done
        echo 'rank 0: LostRankError: rank 9 was killed' >"${name/\\%t/0}"; echo 'rank 9: Bus error' >"${name/\\%t/9}"
        echo 'srun: error: a1: tasks 0-7: Exited with exit code 75' >&2
        echo 'srun: error: a2: tasks 12,14: Exited with exit code 2' >&2
        echo 'srun: error: a2: task 9: Killed' >&2; exit 137; }"""
    ended = train(tmp_path, STUB_srun=fail)
    assert ended.code == 137
    last = ended.log[ended.log.index("ERROR: ") :]
    messages = [
        "task(s) 9 on a2: Killed",
        "rank 9: Bus error",
        "task(s) 12,14 on a2",
        "task(s) 0-7 on a1",
        "rank 9 was killed",
    ]
    # The culprit comes first.
    assert [last.index(text) for text in messages] == sorted(last.index(text) for text in messages)
    logs = tmp_path / "runs" / "gpt" / "logs" / "77" / "0"
    # Empty entries are removed.
    assert sorted(path.name for path in logs.glob("task_*")) == ["task_0.err", "task_9.err"]


def test_a_job_that_never_gets_on_is_stopped(tmp_path):
    lost = f"[[ $* != *{PROGRAM}* ]] || exit 75"
    checkpoint(tmp_path, 10)
    requeued = []
    for restart in range(3):
        ended = train(tmp_path, SLURM_RESTART_COUNT=str(restart), STUB_srun=lost)
        requeued.append(ended.requeued)
    assert requeued == [["77"], ["77"], []]
    ended = train(tmp_path, SLURM_RESTART_COUNT="3")
    assert (ended.code, ended.named("srun")) == (3, [])
    assert "iteration 10 " in ended.log
    checkpoint(tmp_path, 20)
    assert train(tmp_path, SLURM_RESTART_COUNT="4").code == 0
    assert train(tmp_path, SLURM_JOB_ID="78").code == 0  # another job may try


def test_a_task_of_an_array_is_a_job_of_its_own(tmp_path):
    """Slurm's commands get ARRAY_TASK: the array's number, here also the task's, names all tasks."""
    array = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3", "RUN_NAME": ""}
    lost = f"[[ $* != *{PROGRAM}* ]] || exit 75"
    ended = train(tmp_path, **array, STUB_srun=lost)
    assert ended.requeued == ["77_3"]
    assert {call.value("-j") for call in ended.named("squeue")} == {"77_3"}
    (call,) = ended.named("srun", PROGRAM)
    assert call.value("--save") == f"{tmp_path}/runs/gpt-mock-3/checkpoints"


def test_requeued_jobs_go_on_from_their_own_checkpoint(tmp_path):
    for load in ([], ["--load", "/mine/"]):
        (call,) = train(tmp_path, "--save", "/mine", *load).named("srun", PROGRAM)
        assert call.value("--load").rstrip("/") == "/mine"
    for flags in (["--load", "/other"], ["--finetune"], ["--load-tag=iter_1"]):
        ended = train(tmp_path, *flags)
        assert (ended.code, ended.named("srun")) == (2, []), flags
    ended = train(tmp_path, *flags, REQUEUE="0")
    assert ended.code == 0
    assert "--max-restarts" not in ended.named("srun", PROGRAM)[0].words  # it would load them again


def test_dry_run_starts_nothing(tmp_path):
    packed = {"SITE_ENV": str(TRAIN), "SITE_NVME": "/nvme"}  # any file
    (tmp_path / "net" / "hsn0").mkdir(parents=True)
    net = {"SITE_NET_FOLDER": str(tmp_path / "net")}
    ended = train(
        tmp_path, "--title", "two words", DRY_RUN="1", PREFLIGHT="1", DEVICE="gpu", **packed, **net
    )
    # the check of the flags
    assert (ended.code, [call.words[-1] for call in ended.calls]) == (0, ["--print-config"])
    assert not (tmp_path / "runs").exists()
    lines = [line for line in ended.log.splitlines() if line.startswith("+ ")]
    assert lines[-1].startswith("+ srun -N 2 -n 16 ")
    assert lines[-1].endswith("--title 'two words'")
    assert "preflight.py measure" in lines[-2]
    assert f"+ sbcast -pf {TRAIN} /nvme/environment.tar" in lines
    assert any(line.startswith("+ module load ") for line in lines)
    assert any(line.startswith("+ export ") and " NCCL_NET=OFI" in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "code"), [("--train-iters 3 --lr 1e-3", 0), ("--lr 1e-3", 2), ("--save /proc/x", 2)]
)
def test_the_check_of_the_flags_is_that_of_the_run(tmp_path, flags, code):
    """Without a length or a learning rate all ranks would refuse the run."""
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data"
    words = [*model.split(), "--vocab-size", "64", "--micro-batch-size", "1", *flags.split()]
    settings = {"SITE_VENV": sys.prefix, "PRESET": ""}
    assert run_script(tmp_path, TRAIN, *words, DRY_RUN="1", **settings).code == code


@pytest.mark.parametrize("wrong", [(), ("--lrr", "1")])
def test_flags_are_checked_by_the_packed_python_if_there_is_no_other(tmp_path, wrong):
    python = tmp_path / "nvme" / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\nexec {sys.executable} {ROOT}/{PROGRAM} "${{@:2}}"\n')
    python.chmod(0o755)
    packed = {"SITE_ENV": str(TRAIN), "SITE_NVME": str(tmp_path / "nvme")}  # any file
    ended = train(tmp_path, *wrong, SITE_VENV="/nowhere", **packed)
    assert ended.code == (2 if wrong else 0), ended.log
    assert bool(ended.named("srun", PROGRAM)) == (not wrong)


def test_a_dry_run_ends_with_what_would_end_the_job(tmp_path):
    """A dry run fails on whatever would end the job, but still shows the commands.

    Causes are flags that do not resolve, modules that do not load, and no Python.
    """
    module = {"BASH_FUNC_module%%": "() { [[ $2 != gone ]]; }", "DEVICE": "gpu", "DRY_RUN": "1"}
    for code, broken in (
        (2, {"STUB_python": "exit 2"}),
        (2, {"SITE_MODULES": "rocm gone"}),
        (2, {"SITE_VENV": "/nowhere"}),
        (0, {}),
    ):
        ended = train(tmp_path, **{**module, "SITE_MODULES": "rocm", **broken})
        last = ended.log.splitlines()[-1]
        assert ended.code == code and last.startswith("+ srun -N 2 -n 16 "), ended.log


# Numbers of nodes in the heads of the scripts and in the README.
NODES = {
    "1.4b": (1, 2, 4, 8, 16),
    "22b": (2, 4, 8, 10, 16, 20, 32, 40, 64, 80, 128, 160),
    "175b": (16, 32, 40, 64, 80, 128, 160, 256),
    "1t": (192, 256, 320, 384, 480, 512),
    "moe_55b": (4, 8, 16, 32, 64, 128),
    "8b_1m": (32, 64, 128),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_configurations_resolve(tmp_path, name):
    """They do with the flags of docs/long_runs.md, too: a job without spare nodes takes them."""
    slow = ("--straggler-report", "--replace-slow-ranks", "1.2")
    of_a_paper = [] if name == "8b_1m" else [("paper", NODES[name][-1:])]
    for recipe, numbers in (("frontier", NODES[name]), *of_a_paper):
        settings = dict(DRY_RUN="1", RECIPE=recipe, SLURM_JOB_NUM_NODES=str(numbers[-1]))
        ended = run_script(tmp_path, SCRIPTS[name], "--mock-data", *slow, **settings)
        words = shlex.split(ended.log.splitlines()[-1])
        for nodes in numbers:
            config = parse_args(words[words.index(f"{ROOT}/{PROGRAM}") + 1 :], 8 * nodes)
            assert config.parallel.world_size == 8 * nodes
            assert config.training.replace_slow_ranks == 1.2
            assert (config.precision.bf16, config.precision.fp16) == (
                recipe == "frontier",
                recipe == "paper",
            )
