"""tools/preflight.py check: no findings on a sound job, one for each mistake, and costs.

Unchecked parts are listed.
"""

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.checkpoint.folder import TRACKER
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.jobs.check_job import check, directives, parse_options, winning
from megatron.planner.cluster import load_cluster
from megatron.planner.timing import estimate
from tests.helpers.launching import ROOT
from tests.helpers.preflight import checked, cost, problems_of
from tools.preflight import main

EXAMPLES = ROOT / "examples" / "frontier"
HEAD = """#!/bin/bash
#SBATCH -A abc123
#SBATCH -N 2
#SBATCH -t 02:00:00
#SBATCH --network=disable_rdzv_get
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
touch ran
"""
COMMAND = f"""srun -N 2 -n 16 --ntasks-per-node=8 -c 7 {sys.executable} -u {ROOT}/pretrain_gpt.py --preset tiny
    --mock-data --train-iters 10 --bf16 --global-batch-size 16 --micro-batch-size 2 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4 --save ckpt --load ckpt/ --save-interval-minutes 20 --keep-last 1 --requeue"""
NETWORK = {"NCCL_NET": "OFI", "FI_MR_CACHE_MONITOR": "kdreg2", "FI_CXI_RDZV_PROTO": "alt_read"}


@pytest.fixture(autouse=True)
def sbatch(monkeypatch, tmp_path, tmp_path_factory):
    """Provide a folder, an environment and an sbatch without Slurm; return the sbatch's path."""
    monkeypatch.chdir(tmp_path)
    room(monkeypatch, 10**12)
    for name in [
        n
        for n in os.environ
        if n.startswith(("SBATCH_", "NCCL_", "FI_", "SITE_", "MEGATRON_", "OMP_"))
    ]:
        monkeypatch.delenv(name)
    for name, value in NETWORK.items():
        monkeypatch.setenv(name, value)
    program = tmp_path_factory.mktemp("slurm") / "sbatch"
    program.write_text(
        "#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def report(head=HEAD, command=COMMAND, *words, cluster="frontier"):
    """Return the report on a script of another project and its command."""
    Path("job.sbatch").write_text(head)
    job = check([*words, "job.sbatch", "--", *command.split()], cluster)
    assert sorted(os.listdir()) == ["job.sbatch"], "nothing of it is run"
    return job


def room(monkeypatch, free):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))


def test_a_sound_job():
    job = report()
    assert problems_of(job) == set(), job.findings
    assert (job.nodes, job.tasks) == (2, 16) and job.config is not None and "memory" in job.known
    assert job.config.parallel.data_parallel_size == 2
    assert any("account" in text and "sbatch" in text for text in job.unchecked), (
        "nobody knows whether it exists"
    )


def test_shards_of_a_node_take_the_memory_of_their_number():
    sizes = "--hidden-size 4096 --num-attention-heads 32 --zero-stage 3 --zero-shard-size"
    node, number = (
        report(HEAD, COMMAND.replace("--pipeline-model-parallel-size 4", f"{sizes} {shard}"))
        for shard in ("node", 4)
    )
    assert node.known["memory"] == number.known["memory"]


SAVE = "--save ckpt --load ckpt/"
MISTAKES = [
    # (replaced text, replacement, level, subject)
    ("#SBATCH -A abc123\n", "", "warning", "account"),
    ("-t 02:00:00", "-t 02:00:01", "error", "time"),
    ("#SBATCH -t 02:00:00\n", "", "warning", "time"),
    ("#SBATCH -N 2", "#SBATCH -N 9999", "error", "nodes"),
    ("#!/bin/bash\n", "", "error", "script"),
    ("#SBATCH --open-mode=append\n", "", "warning", "requeue"),
    ("-n 16", "-n 8", "warning", "tasks"),
    (f"{ROOT}/pretrain_gpt.py", "train.py", "error", "command"),
    ("--bf16", "--bf16 --fp16", "error", "configuration"),
    ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3", "error", "configuration"),
    (
        "--mock-data",
        "--data-path nowhere/data --tokenizer-type NullTokenizer --vocab-size 100",
        "error",
        "data",
    ),
    (SAVE, SAVE.replace("ckpt", "/mnt/bb/ada/ckpt"), "error", "saving"),
    ("--save ckpt", "--save other", "error", "configuration"),
    ("--save-interval-minutes 20", "", "warning", "saving"),
    (
        "--preset tiny",
        "--preset tiny --num-layers 2000 --hidden-size 8192 --num-attention-heads 64",
        "error",
        "memory",
    ),
    (
        "--preset tiny",
        "--preset tiny --cpu-offload --num-layers 2000 --hidden-size 8192 --num-attention-heads 64",
        "error",
        "host memory",
    ),
    ("--train-iters 10", "--train-iters 1000000000", "warning", "cost"),
]


@pytest.mark.parametrize(
    ("old", "new", "level", "about"), MISTAKES, ids=[f"{m[3]}-{m[1][:30]}" for m in MISTAKES]
)
def test_a_mistake_is_found(old, new, level, about):
    assert (old in HEAD) != (old in COMMAND)
    job = report(HEAD.replace(old, new), COMMAND.replace(old, new))
    assert (level, about) in problems_of(job), job.findings


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("NCCL_NET", "Socket", "warning"),
        ("NCCL_NET", "", "warning"),
        ("FI_MR_CACHE_MONITOR", "memhooks", "error"),
    ],
)
def test_variables_of_the_network(monkeypatch, name, value, level):
    monkeypatch.setenv(name, value)
    assert problems_of(report()) == {(level, "network")}
    gloo = COMMAND.replace("--bf16", "--bf16 --distributed-backend gloo")
    assert problems_of(report(command=gloo)) == set()


def test_room_for_checkpoints_is_one_more_than_are_kept(monkeypatch):
    # 4 bytes for the weight and for each of Adam's moments; checkpoints contain no padding.
    size = 12 * (512 * 64 + 64 * 64 + 2 * 64 + 4 * (12 * 64 * 64 + 13 * 64))
    for free, expected in ((2 * size, set()), (2 * size - 1, {("error", "saving")})):
        room(monkeypatch, free)
        assert problems_of(report()) == expected


def test_what_slurm_says(sbatch, monkeypatch):
    """A refusal by sbatch is an error that quotes its message."""

    def answers(text):
        sbatch.write_text(f"#!/bin/sh\n{text}\n")

    assert problems_of(report()) == set() and any(
        "Unable to contact" in text for text in report().unchecked
    )
    answers('echo "sbatch: error: Invalid account $*" >&2; exit 1')
    (text,) = [
        text for level, _, text in report(HEAD, COMMAND, "-q", "debug").findings if level == "error"
    ]
    assert "Invalid account --test-only -q debug job.sbatch" in text
    answers("echo 'sbatch: Job 7 to start at 12:00'")
    assert problems_of(report()) == set()


def test_what_it_costs():
    """The cost is the planner's step times the remaining iterations, on all nodes.

    Jobs have the length of the wall time.
    """
    long = COMMAND.replace("--train-iters 10", "--train-iters 5000000")
    job = report(command=long)
    assert job.config is not None
    seconds = 5_000_000 * estimate(job.config, load_cluster("frontier")).seconds
    days, node_hours = cost(job)
    assert days == pytest.approx(seconds / 86400, abs=0.01)
    assert node_hours == pytest.approx(2 * seconds / 3600, abs=1)
    assert f" {math.ceil(seconds / 7200):,} job(s) of 02:00:00" in job.known["it costs"]


def test_without_a_machine_there_are_no_limits_and_that_is_said():
    job = report(HEAD.replace("-t 02:00:00", "-t 90-00"), cluster="none")
    assert problems_of(job) == set() and not {"memory", "it costs"} & set(job.known)
    assert any("no machine" in text for text in job.unchecked)


@pytest.mark.parametrize(("qos", "refused"), [("normal", True), ("boost_qos_lprod", False)])
def test_a_qos_may_allow_more_than_the_partition(qos, refused):
    """Leonardo's partition ends jobs after a day, those of one qos after four."""
    job = report(HEAD.replace("-t 02:00:00", f"-t 4-00 -q {qos}"), cluster="leonardo")
    assert (("error", "time") in problems_of(job)) == refused, job.findings


def test_of_a_foreign_script_nothing_is_run(tmp_path):
    Path("job.sbatch").write_text(HEAD + COMMAND)
    job = check(["job.sbatch", "--train-iters", "3"], "frontier")
    assert (
        problems_of(job) == {("warning", "script")}
        and not Path("ran").exists()
        and job.words is None
    )


@pytest.mark.parametrize(
    ("command", "nodes", "tasks"),
    [
        ("srun -n 16 --ntasks-per-node 8 python", 2, 16),
        ("torchrun --nproc-per-node=4 --nnodes 2", 2, 8),
        ("srun -N 3 --ntasks-per-node=1 torchrun --nproc_per_node 8", 3, 24),
        ("python", 1, 1),
    ],
)
def test_processes_of_a_command(command, nodes, tasks):
    flags = (
        "--preset tiny --mock-data --train-iters 3 --global-batch-size 192 "
        "--distributed-backend gloo"
    )
    words = f"{command} pretrain_gpt.py {flags}"
    job = check(["--", *words.split()], "none")
    assert (job.nodes, job.tasks) == (nodes, tasks) and problems_of(job) <= {("warning", "saving")}
    assert job.config is not None and job.config.parallel.world_size == tasks


def test_data_that_are_there(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    with IndexedDatasetWriter(prefix, dtype=np.uint16) as writer:
        writer.add_document(np.arange(5000) % 90)
    flags = f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 100"
    assert problems_of(report(command=COMMAND.replace("--mock-data", flags))) == set()
    prefix.with_suffix(".bin").write_bytes(b"short")
    assert problems_of(report(command=COMMAND.replace("--mock-data", flags))) == {("error", "data")}


def test_a_checkpoint_that_is_broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ckpt")
    (folder / TRACKER).write_text("7\n")
    job = report(command=COMMAND.replace("ckpt", str(folder)))
    assert {about for _, about in problems_of(job)} == {"checkpoint"}


def test_exit_codes_and_output(capsys):
    Path("job.sbatch").write_text(HEAD.replace("#SBATCH --open-mode=append\n", ""))
    words = ["--cluster", "frontier", "-N", "2", "job.sbatch", "--", *COMMAND.split()]
    assert main(["check", *words]) == 0
    text = capsys.readouterr().out
    assert "not checked: " in text and "node-hours" in text and "warning: requeue: " in text
    assert main(["check", "-t2:30:00", *words]) == 2
    text = capsys.readouterr().out
    assert "error: time: 2:30:00" in text and "time        2:30:00   (command line)" in text


# -- options of sbatch and srun, as the manual pages have their forms and which of them holds
# ----------


def test_the_command_line_wins_over_variables_and_they_over_the_script():
    script, problems = directives(
        "#!/bin/bash\n#SBATCH -N 2 -t 1:00 # a comment\n#SBATCH -p batch\n"
    )
    line, _ = parse_options(["-N", "4"])
    environ = {"SBATCH_TIMELIMIT": "2:00", "SBATCH_NETWORK": ""}
    options = winning(line, environ, script)
    assert problems == []
    assert {name: tuple(option) for name, option in options.items()} == {
        "nodes": ("4", "command line"),
        "time": ("2:00", "variable SBATCH_TIMELIMIT"),
        "partition": ("batch", "line 3"),
    }
    both = winning(parse_options(["-p", "mine"])[0], {"SBATCH_PARTITION": "variable"}, script)
    assert both["partition"].value == "mine"


def test_lines_that_slurm_does_not_read_are_told():
    text = "#!/bin/bash\n#SBATCH -N 2 stray\n#SBATCH -o 'x\necho\n#SBATCH -N 3\n#SBATCHED\n"
    options, problems = directives(text)
    assert options["nodes"].value == "2"
    assert [problem.split(":")[0] for problem in problems] == ["line 2", "line 3", "line 5"]


# -- a script of ours --------------------------------------------------------------------------------


@pytest.mark.slow
def test_our_own_script(tmp_path):
    """A script of ours has no findings here but the room for checkpoints.

    Nothing is started, and nothing is left behind.
    """
    words = ["-N", "9408", "-t", "12:00:00", EXAMPLES / "train_22b.sbatch"]
    flags = ["--mock-data", "--train-iters", "1000", "--global-batch-size", "75264"]
    job = checked([*words, *flags], tmp_path)
    assert problems_of(job) <= {("error", "saving"), ("warning", "script")}, job.findings
    assert job.tasks == 8 * job.nodes and job.nodes == job.asked_nodes
    assert 0 < cost(job)[0] < 30 and "iterations 0 to 1,000 " in job.known["it costs"]
    assert list(tmp_path.iterdir()) == []
