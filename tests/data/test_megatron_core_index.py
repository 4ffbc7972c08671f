"""The order of samples and of blends against megatron-core's own index building, which test_megatron_core finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron.data.gpt_index import IndexRequest, build_index
from megatron.data.index_helpers import build_blend_index
from tests.data.test_megatron_core import find_core

Arrays = Mapping[str, npt.NDArray[Any]]


def draw_order(random: np.random.RandomState) -> dict[str, Any]:
    """A split of some documents, some of them empty or of one token, and up to 6 epochs of samples."""
    count = int(random.randint(1, 60))
    sizes = np.where(random.rand(count) < 0.2, random.randint(0, 2, count), random.randint(0, 300, count))
    start = int(random.randint(count))
    stop = int(random.randint(start + 1, count + 1))
    sizes[start] += 2
    seq_length = int(random.randint(1, 40) if random.rand() < 0.8 else random.randint(1, 2000))
    per_epoch = int(sizes[start:stop].sum()) / seq_length
    return {
        "sizes": sizes.tolist(), "start": start, "stop": stop, "seq_length": seq_length,
        "num_samples": max(1, int(per_epoch * random.rand() * random.choice([1, 2.5, 6]))),
        "seed": int(random.randint(2**32, dtype=np.uint32)),
    }  # fmt: skip


RANDOM = np.random.RandomState(7)
ORDERS = [draw_order(RANDOM) for _ in range(150)]
WEIGHTS = [np.ones(1), np.ones(3), np.ones(200), *(RANDOM.gamma(0.7, size=n) + 1e-3 for n in range(2, 40))]
BLENDS = [{"weights": (weights / weights.sum()).tolist(), "size": 2000} for weights in WEIGHTS]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    core, folder = find_core().resolve(), tmp_path_factory.mktemp("core")
    (folder / "cases.json").write_text(json.dumps({"orders": ORDERS, "blends": BLENDS}))
    peer = str(Path(__file__).with_name("core_index_peer.py"))
    done = subprocess.run(
        [sys.executable, peer, str(core), str(folder / "cases.json"), str(folder / "out.npz")],
        capture_output=True, text=True, timeout=200, cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    if done.returncode and "ImportError" in done.stderr.strip().splitlines()[-1]:
        pytest.skip(f"megatron-core does not import here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "out.npz"))


@pytest.mark.slow
def test_orders(theirs: Arrays) -> None:
    ways = set()
    for i, case in enumerate(ORDERS):
        sizes = np.array(case["sizes"], np.int32)
        split = case["start"], case["stop"], int(sizes[case["start"] : case["stop"]].sum())
        request = IndexRequest("p", "train", "1", *split, case["num_samples"], case["seq_length"], case["seed"])
        found = build_index(request, sizes)
        for ours, name in (("doc_idx", "doc"), ("sample_idx", "sample"), ("shuffle_idx", "shuffle")):
            expected = theirs[f"{name}_{i}"]
            assert found[ours].dtype == expected.dtype and found[ours].tolist() == expected.tolist(), (i, ours)
        ways.add((min(request.num_epochs, 2), request.separate_last_epoch))
    assert ways == {(1, False), (2, False), (2, True)}


@pytest.mark.slow
def test_blends(theirs: Arrays) -> None:
    for i, case in enumerate(BLENDS):
        which, number = build_blend_index(np.array(case["weights"]), case["size"])
        assert which.tolist() == theirs[f"which_{i}"].tolist() and number.tolist() == theirs[f"number_{i}"].tolist()
