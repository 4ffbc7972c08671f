"""Each benchmark runs to its end at its smallest size, with training processes that are forked."""

import importlib
import json
import math
import shlex
import shutil
import sys
from contextlib import ExitStack

import pytest

from benchmarks import bench, gpu_kit, scale, shared
from megatron.planner.cluster import CLUSTERS
from tests.helpers.launching import Script
from tests.helpers.processes import free_port, rank_environment


def forked(command, logs, env, limit_s, *, awaited=(), **_):
    """Stand in for benchmarks.shared.launch: the ranks need not import torch."""
    script, *words = command[1:]
    if script == "-c":
        program, *words = words
        script = logs[0].with_suffix(".py")
        script.write_text(program)
    port = free_port()
    count = len(logs)
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(Script(script, words, log, env | rank_environment(i, count, port)))
            for i, log in enumerate(logs)
        ]
        codes = [scripts[i].wait().code for i in awaited or range(count)]
        return codes, [2**20] * count


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a benchmark in this process, and returns what it prints."""
    monkeypatch.setattr(shared, "launch", forked)

    def call(name, *arguments, code=0):
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *arguments])
        status = importlib.import_module(f"benchmarks.{name}").main()
        output = capsys.readouterr().out
        assert (status or 0) == code, output
        return output

    return call


SCRIPTS = {
    "parity": ("--device cpu --ranks 2 --output OUT", "1 of 1 trainings follow"),
    "lost_rank": ("--device cpu --output OUT", "1 of 1 lost ranks"),
    "restarts": ("--ranks 2 --ways memory --rounds 1", "all losses equal"),
    "step_waits": ("--device cpu --output OUT", "beside those of a report: tiny"),
    "idle_gaps": ("--device cpu --output OUT", "ms a step beside"),
    "memory_model": ("--part formulas --only '1 rank' --markdown", "the limits hold"),
    "mup": ("coordinates --widths 64 --steps 2 --seeds 1", "largest ratio 1.000"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name, run, tmp_path):
    arguments, figures = SCRIPTS[name]
    words = shlex.split(arguments.replace("OUT", str(tmp_path)))
    assert figures in run(name, *words)


def test_no_comparison_is_no_success(run):
    with pytest.raises(SystemExit) as ended:
        run("memory_model", "--part", "formulas", "--only", "nowhere")
    assert ended.value.code == 2


@pytest.mark.slow
def test_bench_has_a_row_of_ours_and_all_parts(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure_ceilings", lambda *_: {"bf16, 1 x 1 thread(s)": 1.0})
    run("bench", *"--quick --threads 1 --only W0 parts --output".split(), str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    (row,) = record["rows"]
    assert row["side"] == "ours" and row["step_s"]
    assert len({section["name"] for section in record["parts"] if "value" in section}) == 3
    assert "| W0 one process | ours |" in run("bench", "--markdown", str(path))


@pytest.mark.slow
def test_gpu_check_measures_kernels_and_their_calls(run, tmp_path):
    run("gpu_check", "--only", "bandwidth", "--output", str(tmp_path))
    assert "a C function through ctypes alone" in (tmp_path / "bandwidth.log").read_text()
    table = shared.tables_of((tmp_path / "REPORT.md").read_text())[0]
    assert [row[:2] for row in table[1:]] == [["device", "passed"], ["bandwidth", "passed"]]


@pytest.mark.slow
def test_a_prediction_is_compared_with_a_run(run, tmp_path):
    shutil.copy(CLUSTERS / "frontier.toml", tmp_path / "cpu1.toml")
    (tmp_path / "cpu1.speed").write_text("1.0")
    words = "--set tiny --keep calibration --folder".split()
    assert "1 layouts" in run("predict", *words, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("item", scale.ITEMS)
def test_an_item_of_a_large_job(item, tmp_path):
    words = ["--item", item, "--data", "1", "--repeat", "1"]
    with Script("benchmarks/scale.py", words, tmp_path / "log") as script:
        outcome = script.wait()
    assert outcome.code == 0 and json.loads(outcome.output.splitlines()[-1]), outcome.output


@pytest.mark.slow
def test_a_fault_is_found_to_lose_nothing(run, tmp_path):
    words = "--only kills --kills 1 --seed 1 --folder".split()
    assert "1 cases of faults, 0 things wrong" in run("fault_campaign", *words, str(tmp_path))


def test_the_large_model_has_a_trillion_parameters():
    """12 h^2 per layer and h per word, the rest below a thousandth (arXiv 2104.04473, section 5.1)."""
    ranks = (scale.stage_parameters(0, stage) for stage in range(scale.PIPELINE))
    parameters = sum(math.prod(record.global_shape) for rank in ranks for record in rank)
    expected = 12 * 128 * 25600**2 + scale.VOCABULARY * 25600
    assert expected == pytest.approx(parameters, rel=1e-3) and parameters > 1e12


def test_gpu_kit_names_an_interpreter_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        gpu_kit.main(["--python", "/nowhere", "--output", "/nowhere"])
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_published_results_fit_the_terminal(run, monkeypatch):
    """The width is that of COLUMNS, in a pipe, too."""
    monkeypatch.setenv("COLUMNS", "72")
    lines = run("published", "--machine", "mi325x").splitlines()
    assert 40 < max(map(len, lines)) <= 72
