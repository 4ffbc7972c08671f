"""The report of a search: its figures, its files as their users read them, and the machine corrected by it."""
from __future__ import annotations

import csv
import json
import random
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Config
from megatron.config.command_line import parse_args, parse_plan
from megatron.errors import ConfigError
from megatron.jobs.endings import Ending
from megatron.jobs.report import Report, update_cluster
from megatron.planner.cluster import load_cluster, write_cluster
from megatron.planner.timing import estimate
from tests.helpers.preflight import accepted
from tests.jobs.made import Made, no_files, search, setup, truth

FRONTIER = load_cluster("frontier")


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> None:
    no_files(monkeypatch)


def report(folder: Path, *words: str, runner: Made | None = None) -> Report:
    own = setup(folder, *words)
    found, _ = search(own, runner)
    return Report(own, found.found, found.trials)


def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "_draw", lambda *_: [])


@pytest.mark.slow
def test_everything_is_there_and_nothing_of_an_earlier_report(tmp_path: Path) -> None:
    files = report(tmp_path).write()
    wanted = {"trials.md", "trials.csv", "best.txt", "trajectory.png", "parameters.png", "importance.png"}
    assert files[0].name == "trials.md" and {path.name for path in files} == wanted
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files if path.suffix == ".png")
    assert "fANOVA" in files[0].read_text()
    # Of one that has no figures: no picture, whose files must not stay.
    (tmp_path / "out/trials").rename(tmp_path / "gone")
    crashes = Made(lambda values: Ending("crash", "exit code | 1\nand more"))
    failed = report(tmp_path, "--max-trials", "2", runner=crashes)
    assert {path.name for path in failed.write()} == {"trials.md", "trials.csv"}
    assert {path.name for path in (tmp_path / "out/report").iterdir()} == {"trials.md", "trials.csv"}
    assert "\\| 1" in (tmp_path / "out/report/trials.md").read_text(), "what would end a cell of a table"


def test_trials_csv_has_every_trial_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pictures(monkeypatch)
    found = report(tmp_path)
    found.write()
    with (tmp_path / "out/report/trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [str(n) for n in range(1, 13)]
    for row in rows:
        step_s = truth({"mbs": int(row["mbs"]), "seed": int(row["seed"])})
        assert row["state"] == ("crash" if isinstance(step_s, Ending) else "done")
        if not isinstance(step_s, Ending):
            hours = step_s * 1e9 / (8 * 64) / 3600  # one node, 8 sequences of 64 tokens
            assert float(row["step_s"]) == step_s and float(row["node_hours_per_gtoken"]) == pytest.approx(hours)


def test_the_next_one_is_said_to_be_as_good_within_the_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 % behind, and 30 %: by a scatter of 2 % until runs of one layout tell more."""
    no_pictures(monkeypatch)
    for behind, near in ((0.01, True), (0.3, False)):
        runner = Made(lambda values, behind=behind: 1.0 + behind * (values["number"] == 2))
        lines = report(tmp_path / f"{near}", "--max-trials", "2", runner=runner).summary()
        assert "mbs=1,seed=0 (trial 1)" in lines[0] and "512 tokens/s" in lines[0]
        assert "mbs=1,seed=1" in lines[1] and f"{100 * behind:.1f} %" in lines[1]
        assert ("within the noise" in lines[1]) is near


def test_a_layout_that_failed_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pictures(monkeypatch)
    runner = Made(lambda values: Ending("hang", "?") if values["number"] == 3 else 1.0 + 0.01 * values["number"])
    lines = report(tmp_path, "--max-trials", "2", "--confirm", "1", runner=runner).summary()
    assert "mbs=1,seed=1 (trial 2)" in lines[0] and any("mbs=1,seed=0" in s and "trial 3: hang" in s for s in lines)


def test_missing_libraries_and_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(tmp_path, "--max-trials", "3")
    for library in ("matplotlib", "optuna"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            files = found.write()
        assert {path.name for path in files} == {"trials.md", "trials.csv", "best.txt"}
        assert library in files[0].read_text()
    for path in (tmp_path / "out/report").iterdir():
        path.unlink()
    (tmp_path / "out/report").rmdir()
    (tmp_path / "out/report").write_text("")
    with pytest.raises(ConfigError, match="out/report"):
        found.write()


def test_the_best_command_is_the_layout_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trials.md says what is missing; with that it can be run."""
    no_pictures(monkeypatch)
    found = report(tmp_path)
    found.write()
    folder = tmp_path / "out/report"
    words, best = shlex.split((folder / "best.txt").read_text()), found.best
    assert best is not None and words[:3] == ["torchrun", "--nproc-per-node=1", "pretrain_gpt.py"]
    assert parse_plan([*words[3:], "--world-size", "1"]) == parse_plan([*best.candidate.flags, "--world-size", "1"])
    assert not {"--train-iters", "--mock-data", "--metrics-file", "--timing-log-level"} & set(words)
    assert parse_args([*words[3:], "--train-iters", "9", "--mock-data"], 1).batch.micro_batch_size == 4
    assert "--train-iters" in (folder / "trials.md").read_text()


SLURM = """
flags = ["--preset", "gpt-22b", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1",
         "--global-batch-size", "128", "--rank-order", "tp-dp-pp"]
[parameters]
tp = [2]
"""


@pytest.mark.slow
def test_under_slurm_devices_are_bound_and_the_job_script_passes_the_preflight_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_pictures(monkeypatch)
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(f"n{i}" for i in range(16)))
    own = setup(tmp_path, "--hosts-file", str(hosts), "--cluster", "frontier", space=SLURM)
    found, _ = search(own, Made(lambda values: 3.5, hosts=[f"n{i}" for i in range(16)]))
    files = {path.name: path for path in Report(own, found.found, found.trials).write()}
    assert files["best.txt"].read_text().startswith(
        "srun -N 16 -n 128 --ntasks-per-node=8 -c 7 --gpus-per-task=1 --gpu-bind=closest python -u pretrain_gpt.py "
    )
    assert "#SBATCH -N 16" in files["best.sbatch"].read_text()
    assert accepted(files["best.sbatch"], tmp_path)["tasks"] == 128


# -- the machine corrected ---------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(
    num_layers=8, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50257, global_batch_size=16,
    fp16=True, world_size=8,
)
LAYOUTS = [
    Config.create(**SIZES, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, micro_batch_size=mbs)
    for tp, pp, mbs in ((1, 1, 1), (2, 1, 1), (4, 1, 2), (8, 1, 2), (2, 2, 1), (2, 4, 1), (4, 2, 2), (1, 2, 1))
]


def write_run(folder: Path, config: Config, factor: float, steps: int = 4, warm_up: int = 2) -> Path:
    """A short trial whose steps take `factor` times the estimate's, the first ones much longer."""
    found, records = estimate(config, FRONTIER), list[dict[str, Any]]()
    records.append({"event": "start", "iteration": 0, "config": config.to_dict()})
    for i in range(1, warm_up + steps + 1):
        slow = factor * (9.0 if i <= warm_up else 1.0)
        records.append({
            "event": "iteration", "iteration": i, "step_time_s": slow * found.seconds, "skipped": 0,
            "global_batch_size": config.batch.global_batch_size,
            "times_ms": {"forward-backward": {"max": 1e3 * slow * found.run.makespan}},
        })  # fmt: skip
    folder.mkdir(parents=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_predictions_with_the_new_description_are_what_was_measured(tmp_path: Path) -> None:
    chance = random.Random(3)
    paths = [write_run(tmp_path / f"{i}", config, 1.3 * chance.uniform(0.99, 1.01)) for i, config in enumerate(LAYOUTS)]
    short = write_run(tmp_path / "short", LAYOUTS[1], 1.3, steps=2)
    out = tmp_path / "new" / "machine.toml"
    text = update_cluster(FRONTIER, [*paths, short, tmp_path / "gone.jsonl"], out, warm_up=2)
    corrected = load_cluster(str(out))
    for config in LAYOUTS:
        assert estimate(config, corrected).seconds == pytest.approx(1.3 * estimate(config, FRONTIER).seconds, rel=0.03)
    assert corrected.name == "frontier", "the launch scripts know it by its name"
    assert all(name in text for name in ("short", "gone.jsonl", "8 layout"))
    assert "not written" in update_cluster(FRONTIER, [short], tmp_path / "none.toml", warm_up=2)
    assert not (tmp_path / "none.toml").exists()


def test_the_description_that_the_search_rests_on_is_not_overwritten(tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    write_cluster(FRONTIER, machine)
    text, path = machine.read_text(), write_run(tmp_path / "run", LAYOUTS[0], 1.3)
    with pytest.raises(ConfigError, match="machine.toml"):
        update_cluster(load_cluster(str(machine)), [path], machine, warm_up=2)
    assert machine.read_text() == text
