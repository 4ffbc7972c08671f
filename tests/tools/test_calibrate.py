"""tools/calibrate.py: a small real calibration, and its refusals."""

import os
import shutil

import pytest

from megatron.config.command_line import parse_plan
from megatron.planner.cluster import read_cluster
from megatron.planner.timing import estimate
from tests.helpers.launching import ROOT, launch
from tests.helpers.processes import LIMIT_S
from tools import plan
from tools.calibrate import main

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500 "
    "--global-batch-size 2 --attention-dropout 0 --hidden-dropout 0"
).split()


CORES = sorted(os.sched_getaffinity(0))


def measure_little(rank=None):
    """Arm a process: small messages, products and sets of tensors, which tell as little.

    With a rank it is bound to a core of its own, as by srun.
    """
    if rank is not None:
        os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    from megatron.planner.calibration import compute, tasks

    tasks.SIZES["cpu"] = (1 << 10, 1 << 16)
    tasks._SIDE, tasks._BYTES, compute._CACHE = 64, 1 << 16, 1 << 20
    compute.MICRO_BATCHES = (1,)


@pytest.mark.slow
@pytest.mark.timeout(300)  # above the limit of the calibration itself, two plans follow
@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (2, []),
        pytest.param(1, ["--processes", "2"], marks=pytest.mark.campaign("benchmarks")),
    ],
    ids=["under a launcher", "that it starts itself"],
)
def test_a_calibration_of_seconds_plans(processes, words, tmp_path, monkeypatch, capsys):
    """A calibration of seconds is good enough to plan.

    Two processes measure together; the file loads, all figures but one are measured, and a step can
    be estimated. The planner searches on this node or says how to measure the format that it lacks.
    """
    path = tmp_path / "here.toml"
    done = launch(
        processes,
        ["-o", str(path), *words, "--minutes", "0.002", *MODEL],
        script="tools/calibrate.py",
        timeout_s=LIMIT_S * 4,
        arm={r: (measure_little, *[r] * (processes > 1)) for r in range(processes)},
    )
    assert all(each is not None and each.code == 0 for each in done), done
    cluster = read_cluster(path)
    assert cluster.devices_per_node == 2 and cluster.device_type == "cpu" and cluster.name == "here"
    assert cluster.shared_cores == min(2, len(CORES))
    figures = cluster.compute
    assert {f.name for f in figures.values() if f.basis != "measured"} == {"kernel_s"}
    expected = "products.float32 collectives.all_reduce collectives.reduce messages step_overhead_s"
    assert {*expected.split()} <= {*figures}
    measured = [figure for name, figure in figures.items() if "overhead" not in name]
    assert all(point[-1] > 0 for figure in measured for point in figure.points)
    prediction = estimate(
        parse_plan([*MODEL, "--world-size", "2", "--tensor-model-parallel-size", "2"]), cluster
    )
    assert prediction.seconds > 0 and prediction.confidence.worst == "assumed"
    monkeypatch.chdir(tmp_path)
    at = MODEL.index("--global-batch-size")
    words = ["--cluster", path.name, "--processes", "1", "--top", "1", "--fix", "mbs=1", "tp=2"]
    words += ["--global-batch", MODEL[at + 1], "--", *MODEL[:at], *MODEL[at + 2 :]]
    assert plan.main(words) == 0
    assert plan.main([*words, "--bf16"]) == 2
    errors = capsys.readouterr().err
    assert "here.toml" in errors and "bfloat16" in errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--processes", "2", "--num-layers", "2"), "--hidden-size"),
        (("--refine", "x.jsonl"), "--cluster"),
        (("--refine", "x.jsonl", "--cluster", "frontier", "--bf16"), "--bf16"),
    ],
)
def test_what_is_refused(words, says, tmp_path, capsys):
    assert main(["-o", str(tmp_path / "x.toml"), *words]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert not (tmp_path / "x.toml").exists()


def test_the_description_that_is_corrected_is_not_overwritten(tmp_path, capsys):
    machine = tmp_path / "machine.toml"
    shutil.copy(ROOT / "examples/local/two-cores.toml", machine)
    text = machine.read_text()
    assert (
        main(["--refine", str(tmp_path / "run"), "--cluster", str(machine), "-o", str(machine)])
        == 2
    )
    assert str(machine) in capsys.readouterr().err and machine.read_text() == text


@pytest.mark.slow
@pytest.mark.timeout(300)  # above the limit of the calibration itself, two plans follow
def test_processes_that_fail_are_an_error(tmp_path, capsys):
    """Failing processes are an error: they find no GPU for the requested backend."""
    words = f"-o {tmp_path}/x.toml --processes 2 --distributed-backend nccl".split()
    assert main([*words, *MODEL]) != 0
    assert "nccl" in capsys.readouterr().err and not (tmp_path / "x.toml").exists()
