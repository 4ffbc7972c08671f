"""Checkpoints written on one layout and loaded on others: every number must come back exactly."""
from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint import cases
from tests.engine import toy
from tests.helpers.processes import run_processes


def assembled(ranks: list[dict[str, Any]], what: str) -> dict[str, np.ndarray]:
    return toy.assemble([r[what] for r in ranks])


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """fp32, tensor 2 x data 2, ZeRO-1: the directory, and the state at the checkpoint and one step later."""
    directory = tmp_path_factory.mktemp("checkpoint")
    ranks = run_processes(4, cases.train_and_save, str(directory), 2, 1, {})
    return {"directory": directory, "ranks": ranks, "state": assembled(ranks, "state"), "end": assembled(ranks, "end")}


LAYOUTS = {
    "one process": (1, 1, 1, {}),
    "pipeline 2, zero 0": (2, 1, 2, {"zero_stage": 0}),
    "tensor 2, zero 1": (2, 2, 1, {}),
    "tensor 2 x pipeline 2": (4, 2, 2, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_exactly_on_another_layout(saved: dict[str, Any], layout: str) -> None:
    n, tensor, pipeline, options = LAYOUTS[layout]
    ranks = run_processes(n, cases.load_and_train, str(saved["directory"]), tensor, pipeline, options)
    assert_same(assembled(ranks, "state"), saved["state"])
    weights = assembled(ranks, "weights")
    assert_same({f"master.{k}": v for k, v in weights.items()}, masters(saved["state"]))
    for r in ranks:
        assert (r["iteration"], r["client"], r["optimizer"]) == (2, {"consumed_samples": 12}, True)
        assert r["scalars"] == saved["ranks"][0]["scalars"]
        assert r["padding"] == 0.0


def masters(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: v for k, v in state.items() if k.startswith("master.")}


def test_continues_as_if_nothing_had_happened(saved: dict[str, Any]) -> None:
    # The same layout does the same operations in the same order: equal bits.
    ranks = run_processes(4, cases.load_and_train, str(saved["directory"]), 2, 1, {}, 2, 1)
    assert_same(assembled(ranks, "end"), saved["end"])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precision_takes_the_same_masters(saved: dict[str, Any], precision: str) -> None:
    ranks = run_processes(1, cases.load_and_train, str(saved["directory"]), 1, 1, {"precision": precision})
    assert_same(assembled(ranks, "state"), saved["state"])
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[precision]
    import torch

    for name, values in assembled(ranks, "weights").items():
        rounded = torch.tensor(saved["state"][f"master.{name}"]).float().to(getattr(torch, dtype)).double().numpy()
        np.testing.assert_array_equal(values, rounded, err_msg=name)


def test_stage_0_and_16_bit_write_what_they_have(tmp_path: Path) -> None:
    """fp16 with ZeRO-0 on 2 x 2 ranks, loaded by one process: loss scale included."""
    options = {"precision": "fp16", "zero_stage": 0, "loss_scale_window": 3, "initial_loss_scale": 256.0}
    ranks = run_processes(4, cases.train_and_save, str(tmp_path), 1, 2, options)
    assert ranks[0]["scalars"]["loss_scale"] == {"scale": 256.0, "good_steps": 2, "allowance": 1}
    loaded = run_processes(1, cases.load_and_train, str(tmp_path), 1, 1, options | {"initial_loss_scale": 2.0})
    assert_same(assembled(loaded, "state"), assembled(ranks, "state"))
    assert loaded[0]["scalars"] == ranks[0]["scalars"]


def test_padding_and_copies_are_not_stored(saved: dict[str, Any]) -> None:
    folder = Path(saved["directory"]) / "iter_0000002"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert set(stored) == {f"{kind}.{name}" for kind in kinds for name in toy.SHAPES}
    for key, entry in stored.items():
        shape = toy.SHAPES[key.split(".", 1)[1]]
        assert tuple(entry.size) == shape
        counted = np.zeros(shape, dtype=int)
        for chunk in entry.chunks:
            counted[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert all(o + n <= d for o, n, d in zip(chunk.offsets, chunk.sizes, shape, strict=True))
        assert (counted == 1).all(), key


def test_folder(saved: dict[str, Any]) -> None:
    directory = Path(saved["directory"])
    assert sorted(p.name for p in directory.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    stored = json.loads((directory / "iter_0000002" / "config.json").read_text())
    assert stored["optimizer"]["weight_decay"] == toy.DECAY
    assert stored["engine"]["extra"] == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_without_engine(saved: dict[str, Any], dtype: str) -> None:
    import torch

    ranks = run_processes(2, cases.weights_only, str(saved["directory"]), 1, 2, dtype)
    assert [r["iteration"] for r in ranks] == [2, 2]
    for name, values in assembled(ranks, "weights").items():
        expected = torch.tensor(saved["state"][f"master.{name}"]).float().to(getattr(torch, dtype)).double().numpy()
        np.testing.assert_array_equal(values, expected, err_msg=name)


def test_errors_reach_every_rank(tmp_path: Path) -> None:
    ranks = run_processes(2, cases.errors, str(tmp_path))
    for name, first in ranks[0].items():
        assert ranks[1][name] == first, f"the ranks tell different stories about: {name}"
    found = ranks[0]
    assert "latest_checkpointed_iteration.txt" in found["nothing there"]
    assert "JSON" in found["state no JSON"] and found["nothing saved"] is False
    assert "rank 1" in found["disk full"] and "No space left on device" in found["disk full"]
    assert found["half a checkpoint"] == []
    assert found["replaced"] == {"again": True}
    assert "--no-load-optim" in found["no optimizer"]
    assert found["finetune"] == 0
    assert found["no-load-optim"] == 4
    assert "--num-layers is 2 there and 3 here" in found["architecture"]
    assert "--vocab-size is 10 there and 9 here" in found["architecture"]
    assert "iter_0000017" in found["tag"] and "iter_0000001" in found["tag"]
    assert "no master.unknown" in found["other tensors"]
    assert "master.mixed is (3, 2, 5) there and (4, 2, 5) in this model" in found["other tensors"]
    assert "__1_0.distcp" in found["missing file"]
    assert "metadata" in found["metadata"]
