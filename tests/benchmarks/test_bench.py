"""Pure parts of `make bench`: equal work on every side, figures, ratios, and comparing two runs."""

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import results, shared, sides, workloads
from megatron.config import parse_args

# ---- the same work -------------------------------------------------------------------------------


def test_flops_are_six_per_matrix_weight_and_token_and_twelve_per_layer_width_and_pair():
    """FLOPs by size alone equal the count of nanoGPT and PaLM (appendix B).

    Biases, norms and positions are left out.
    """
    case = workloads.cpu_cases()[0]
    matrices = 12 * 12 * 768**2 + 50304 * 768
    assert case.tokens == 2 * 2 * 512
    assert case.flops == pytest.approx(
        (6 * matrices + 12 * 12 * 768 * 512) * case.tokens, rel=1e-12
    )


@pytest.fixture
def plain(monkeypatch):
    """Return the module of the plain loop, which finds its neighbours as a peer does."""
    monkeypatch.syspath_prepend(str(shared.ROOT / "benchmarks" / "peers"))
    return importlib.import_module("plain")


def test_the_plain_loop_trains_the_model_of_the_case(plain):
    """It has as many weights as our closed form says; a state does not depend on later tokens.

    The initial loss is ln V, since small initial weights make every token about equally likely: it
    is off by the variance of the logits, whose standard deviation is about 0.02 sqrt(64) = 0.16, and
    half its square is 0.013.
    """
    case = replace(workloads.quick(workloads.cpu_cases()[0]), layers=6)
    task = plain.Task(**sides.peer_task(case, workloads.EAGER, 3, Path("out")))
    torch.manual_seed(0)
    model = plain.GPT(task)
    assert sum(p.numel() for p in model.parameters()) == case.parameters
    loss = model(*plain.micro_batch(task)).item()
    assert loss == pytest.approx(torch.tensor(512.0).log().item(), abs=0.05)
    x = torch.randn(1, 8, 64)
    changed = torch.cat([x[:, :5], torch.randn(1, 3, 64)], 1)
    before, after = (model.layers[0](states) for states in (x, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_every_side_takes_the_case_s_tokens_a_step():
    """Every flag of our spaces exists and the layouts divide, as the parser checks."""
    for case in workloads.cpu_cases():
        for side in case.sides:
            if side.program == "pretrain_gpt.py":
                config = parse_args(sides.our_arguments(case, side, 3), case.processes)
                samples = config.batch.global_batch_size
                sequence = config.model.seq_length
                assert (
                    config.precision.bf16 == (case.dtype == "bf16") and samples == case.global_batch
                )
            else:
                task = sides.peer_task(case, side, 3, Path("out"))
                samples = task["micro_batch"] * task["accumulation"] * case.data
                sequence = task["sequence"]
                assert task["dtype"] == case.dtype
            assert samples * sequence == case.tokens, (case.workload, side.name)


# ---- processes -----------------------------------------------------------------------------------


def test_a_side_sees_no_launcher_and_the_same_settings(monkeypatch):
    settings = {"OMP_NUM_THREADS", "GLIBC_TUNABLES"}
    for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", *settings):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("PYTHONPATH", str(shared.ROOT))
    env = sides.environment(1, Path("cache"), peers=True)
    assert not {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK"} & set(env)
    assert (env["OMP_NUM_THREADS"], env["GLIBC_TUNABLES"]) == ("1", sides.ALLOCATOR)
    assert str(shared.ROOT) not in env["PYTHONPATH"].split(os.pathsep)
    assert not settings & set(sides.environment(1, Path("cache"), untouched=True))


def test_ranks_that_wait_for_a_failed_one_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(shared, "AFTER_FAILURE_S", 0.0)
    code = "import os, signal; os.environ['RANK'] == '1' or signal.pause(); os._exit(3)"
    logs = [tmp_path / "0", tmp_path / "1"]
    command = [sys.executable, "-c", code]
    codes, peaks = shared.launch(command, logs, {}, 60.0, look=sides.peak_bytes)
    assert codes == [-signal.SIGKILL, 3] and peaks[0] > 0
    assert shared.launch(command, logs, {}, 60.0, awaited=[1])[0] == codes


def test_warm_up_steps_do_not_count(tmp_path):
    file = tmp_path / "metrics.jsonl"
    records = [
        {"event": "iteration", "time": 105.0 + i, "step_time_s": s, "lm_loss": 9.0 - i}
        for i, s in enumerate((4.0, 1.0, 2.0))
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in [{"event": "start"}, *records]))
    outcome = sides.read(file, ours=True, warm_up=1, began_at=100.0)
    assert (outcome.step_s, outcome.start_s, outcome.first_loss) == ([1.0, 2.0], 5.0, 9.0)
    assert sides.read(file, ours=True, warm_up=3, began_at=100.0).reason
    assert sides.read(tmp_path / "none", ours=True, warm_up=1, began_at=100.0).reason


# ---- figures -------------------------------------------------------------------------------------


def outcomes(*rounds):
    return [sides.SideOutcome(step_s=steps, memory_bytes=2**30, start_s=3.0) for steps in rounds]


def test_ratios_are_taken_within_a_round():
    """A machine half as fast in the second round changes both sides and therefore no ratio."""
    case = workloads.cpu_cases()[0]
    ours = outcomes([1.0, 1.0], [2.0, 2.0])
    peer = outcomes([1.5, 1.5], [3.0, 3.0])
    row = results.row_of(case, case.sides[2], peer, ours, 1e12)
    assert row["ratio"] == results.figure([1.5, 1.5])
    assert row["tokens_per_s"] == pytest.approx(case.tokens / 2.25)
    assert row["share_of_ceiling"] == pytest.approx(case.flops / 2.25 / 1e12)


def run_record(step, values, **more):
    case = workloads.cpu_cases()[0]
    row = results.row_of(
        case, case.sides[0], outcomes([step * v for v in values]), outcomes([step]), 1e12
    )
    record = {"date": "2026-01-02T00:00:00", "quick": False, "machine": {"processor": "p"}}
    return {**record, "rows": [row], **more}


def test_changes_within_the_larger_spread_are_no_changes():
    for step, values, verdict in (
        (1.09, [1.0] * 3, "within spread"),  # the floor of 10 %
        (1.11, [1.0] * 3, "worse"),
        (0.89, [1.0] * 3, "better"),
        (1.11, [0.85, 1.0, 1.15], "within spread"),  # half of its own range is 15 %
    ):
        compared = results.compare(run_record(step, values), run_record(1.0, [1.0] * 3))
        lines = {name: figures for name, *figures in compared}
        assert lines["W1 bf16 s=512, ours, s/step"][2:] == [pytest.approx(step - 1), verdict]


# ---- the program ---------------------------------------------------------------------------------


@pytest.mark.campaign("benchmarks")
def test_it_runs_whole_and_no_row_of_ours_fails(tmp_path):
    command = [sys.executable, "benchmarks/bench.py", "--quick", "--output", str(tmp_path)]
    subprocess.run(command, cwd=shared.ROOT, check=True)
    (record,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert {row["workload"] for row in record["rows"]} == {"W0", "W1", "W2", "W3", "W4", "W5"}
    assert all("step_s" in row for row in record["rows"] if not row["reason"])
    assert all("value" in section for section in record["parts"])
