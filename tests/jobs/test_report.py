"""Report of a search: its figures, and its files as their users read them."""

import shlex

import pytest

from megatron.config.command_line import parse_plan
from megatron.jobs import tune
from megatron.jobs.tune import command, write_report
from tests.jobs.fake_runner import FakeRunner, no_files, search, setup, truth


@pytest.fixture(autouse=True)
def made(monkeypatch):
    no_files(monkeypatch)


def report(folder):
    return search(setup(folder))[0]


def no_pictures(monkeypatch):
    monkeypatch.setattr(tune, "_picture", lambda _, path: path)


@pytest.mark.slow
def test_everything_is_there(tmp_path):
    files = write_report(report(tmp_path))
    assert [path.name for path in files] == ["trials.md", "best.txt", "trajectory.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_the_table_has_every_trial_with_its_figures(tmp_path, monkeypatch):
    no_pictures(monkeypatch)
    tuner = report(tmp_path)
    write_report(tuner)
    lines = (tmp_path / "out/report/trials.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    assert sorted(row[0] for row in rows) == sorted(str(n) for n in range(1, 13))
    assert [row[1] for row in rows[:11]] == [one.candidate.key for one in tuner.ranked]
    for one, (_, _, value, _, shown, *_) in zip(tuner.ranked, rows[:11], strict=True):
        step_s = truth(one.candidate.values)
        assert float(shown) == pytest.approx(step_s, rel=1e-3)
        assert value == f"{8 * 64 / step_s:.4g} tokens/s"
    assert rows[11][2] == "crash"


def test_the_best_command_is_the_layout_that_was_tried(tmp_path, monkeypatch):
    no_pictures(monkeypatch)
    tuner = report(tmp_path)
    write_report(tuner)
    words = shlex.split((tmp_path / "out/report/best.txt").read_text())
    best = tuner.ranked[0]
    assert words[:3] == ["torchrun", "--nproc-per-node=1", "pretrain_gpt.py"]
    assert parse_plan([*words[3:], "--world-size", "1"]) == parse_plan(
        [*best.candidate.flags, "--world-size", "1"]
    )
    assert not {"--train-iters", "--mock-data", "--metrics-file", "--timing-log-level"} & set(words)


SLURM = """
flags = ["--preset", "gpt-22b", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1",
         "--global-batch-size", "128", "--rank-order", "tp-dp-pp"]
[parameters]
tp = [2]
"""


def test_under_slurm_devices_are_bound(tmp_path, monkeypatch):
    no_pictures(monkeypatch)
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(f"n{i}" for i in range(16)))
    tuning = setup(tmp_path, "--hosts-file", str(hosts), "--cluster", "frontier", space=SLURM)
    tuner, _ = search(tuning, FakeRunner(lambda values: 3.5, hosts=[f"n{i}" for i in range(16)]))
    assert command(tuner).startswith(
        "srun -N 16 -n 128 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest python -u "
        "pretrain_gpt.py "
    )
