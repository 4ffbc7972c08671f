"""A machine's description corrected by trials whose times are known multiples of its estimates."""
from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.planning.cluster import load_cluster
from megatron.planning.cluster_write import write_cluster
from megatron.planning.timing import estimate
from megatron.tuning.report.recalibrate import metrics_of, update_cluster
from megatron.tuning.types import DONE, FAILED, INVALID, Candidate, Result, Trial

FRONTIER = load_cluster("frontier")
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
    paths = [write_run(tmp_path / f"{i}", config, 1.3 * math.exp(chance.gauss(0, 0.01)))
             for i, config in enumerate(LAYOUTS)]  # fmt: skip
    out = tmp_path / "new" / "machine.toml"
    text = update_cluster("frontier", paths, out, warm_up=2)
    corrected = load_cluster(str(out))
    for config in LAYOUTS:
        assert estimate(config, corrected).seconds == pytest.approx(1.3 * estimate(config, FRONTIER).seconds, rel=0.03)
    assert corrected.name == "frontier", "the launch scripts know it by its name"
    assert "8" in corrected.compute.figures["products.float16"].source
    before, after = (line for line in text.splitlines() if line.startswith("predictions "))
    assert 22.0 < float(before.split()[2]) < 25.0 and float(after.split()[2]) < 2.0


def test_a_layout_counts_once_however_often_it_was_measured(tmp_path: Path) -> None:
    """By the median of its trials; which differ in where their files are alone."""

    def runs(folder: str, factors: list[float]) -> list[Path]:
        layouts = [*LAYOUTS, *[LAYOUTS[0]] * (len(factors) - len(LAYOUTS))]
        paths = [write_run(tmp_path / folder / f"{i}", layouts[i], factor) for i, factor in enumerate(factors)]
        for path in paths:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            lines[0]["config"]["metrics_file"] = str(path)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return paths

    factors = [1.3, 1.1, 1.15, 1.2, 1.25, 1.3, 1.2, 1.1]
    once, often = tmp_path / "once.toml", tmp_path / "often.toml"
    alone = update_cluster("frontier", runs("once", factors), once, warm_up=2)
    again = update_cluster("frontier", runs("often", [1.31, *factors[1:], 1.25, 1.3, 1.4, 1.29]), often, warm_up=2)
    assert often.read_text() == once.read_text()
    last = again.splitlines()[-1]
    assert all(word in last for word in (str(often), "frontier", "12", "8"))
    said = [[line for line in text.splitlines() if line.startswith("predictions ")] for text in (alone, again)]
    assert said[0] == said[1]


def test_what_cannot_be_used_is_named_and_left_out(tmp_path: Path) -> None:
    good = write_run(tmp_path / "good", LAYOUTS[0], 1.3)
    short = write_run(tmp_path / "short", LAYOUTS[1], 1.3, steps=2)
    bad = write_run(tmp_path / "bad", LAYOUTS[2], 1.3)
    bad.write_text("{\n")
    text = update_cluster("frontier", [short, good, bad, tmp_path / "gone.jsonl"], tmp_path / "out.toml", warm_up=2)
    assert all(name in text for name in ("short", "bad", "gone.jsonl")) and str(good) not in text
    for runs in ([short], []):
        with pytest.raises(ConfigError):
            update_cluster("frontier", runs, tmp_path / "none.toml", warm_up=2)
    assert not (tmp_path / "none.toml").exists()


def test_the_description_that_the_search_rests_on_is_not_overwritten(tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    write_cluster(FRONTIER, machine)
    text = machine.read_text()
    path = write_run(tmp_path / "run", LAYOUTS[0], 1.3)
    with pytest.raises(ConfigError, match="machine.toml"):
        update_cluster(str(machine), [path], machine, warm_up=2)
    assert machine.read_text() == text
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="x.toml"):
        update_cluster(str(machine), [path], tmp_path / "file" / "x.toml", warm_up=2)


def test_only_valid_trials_count(tmp_path: Path) -> None:
    trial = Trial(1, Candidate(0, "a", {}, (), 1, 1, 1), "chance", "trials/0001", result=Result(DONE, step_s=1.0))
    others = [dataclasses.replace(trial, number=n, result=result) for n, result in
              ((2, Result(FAILED, "crash")), (3, Result(INVALID, step_s=1.0)), (4, None))]  # fmt: skip
    assert metrics_of(tmp_path, [trial, *others]) == [tmp_path / "trials" / "0001" / "metrics.jsonl"]
