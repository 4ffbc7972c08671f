"""Checkpoints written on one layout and loaded on others: every number must come back exactly."""
from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint import cases
from tests.engine import toy
from tests.helpers.processes import run_processes


def assembled(ranks: list[dict[str, Any]], what: str) -> dict[str, np.ndarray]:
    return toy.assemble([r[what] for r in ranks])


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def masters(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k: v for k, v in state.items() if k.startswith("master.")}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.tensor(values).float().to(getattr(torch, dtype)).double().numpy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def four(root: Path) -> list[dict[str, Any]]:
    return run_processes(4, cases.on_four, str(root))


@pytest.fixture(scope="module")
def others(root: Path, four: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What every loading run found, by name, in rank order."""
    out: dict[str, list[dict[str, Any]]] = {}
    for ranks in (four, run_processes(2, cases.on_two, str(root)), run_processes(1, cases.on_one, str(root))):
        out.update({name: [r[name] for r in ranks] for name in ranks[0]})
    return out


@pytest.fixture(scope="module")
def saved(four: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """The fp32 state, whole, when the checkpoint was written."""
    return assembled([r["saved"] for r in four], "state")


EXACT = ("same layout", "tensor 2 x pipeline 2", "pipeline 2, zero 0", "tensor 2, zero 1", "one process")


@pytest.mark.parametrize("name", EXACT)
def test_loads_exactly_on_any_layout(saved: dict[str, np.ndarray], others: Any, four: Any, name: str) -> None:
    ranks = others[name]
    assert_same(assembled(ranks, "state"), saved)
    assert_same({f"master.{k}": v for k, v in assembled(ranks, "weights").items()}, masters(saved))
    for r in ranks:
        assert (r["iteration"], r["client"], r["optimizer"]) == (2, {"consumed_samples": 12}, True)
        assert r["scalars"] == four[0]["saved"]["scalars"]
        assert r["padding"] == 0.0


def test_continues_as_if_nothing_had_happened(four: Any, others: Any) -> None:
    # The same layout does the same operations in the same order: equal bits.
    assert_same(assembled(others["same layout"], "end"), assembled([r["saved"] for r in four], "end"))


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_other_precision_takes_the_same_masters(saved: Any, others: Any, precision: str, dtype: str) -> None:
    ranks = others[precision]
    assert_same(assembled(ranks, "state"), saved)
    for name, values in assembled(ranks, "weights").items():
        np.testing.assert_array_equal(values, rounded(saved[f"master.{name}"], dtype), err_msg=name)


def test_stage_0_and_loss_scale(four: Any, others: Any) -> None:
    written, read = [r["saved fp16"] for r in four], others["fp16 from fp16"]
    assert written[0]["scalars"]["loss_scale"] == {"scale": 256.0, "good_steps": 2, "allowance": 1}
    assert read[0]["scalars"] == written[0]["scalars"]
    assert_same(assembled(read, "state"), assembled(written, "state"))


@pytest.mark.parametrize("written", ["fp32", "fp16"])
def test_padding_and_copies_are_not_stored(root: Path, four: Any, written: str) -> None:
    metadata = pickle.loads((root / written / "iter_0000002" / ".metadata").read_bytes())
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


def test_folder(root: Path, four: Any) -> None:
    directory = root / "fp32"
    assert sorted(p.name for p in directory.iterdir()) == ["iter_0000002", "latest_checkpointed_iteration.txt"]
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    stored = json.loads((directory / "iter_0000002" / "config.json").read_text())
    assert stored["optimizer"]["weight_decay"] == toy.DECAY
    assert stored["engine"]["extra"] == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_without_engine(saved: Any, others: Any, dtype: str) -> None:
    ranks = others[f"weights {dtype}"]
    assert [r["iteration"] for r in ranks] == [2, 2]
    for name, values in assembled(ranks, "weights").items():
        np.testing.assert_array_equal(values, rounded(saved[f"master.{name}"], dtype), err_msg=name)


def test_errors_reach_every_rank(others: Any) -> None:
    ranks = others["errors"]
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
