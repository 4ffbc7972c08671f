"""Contents of a checkpoint: shards of tensors in files, listed whole or in pieces.

They can be read by torch too.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.checkpoint import shards
from megatron.checkpoint.files import read_manifest
from megatron.errors import CheckpointError
from tests.checkpoint import cases
from tests.engine import toy
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow


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
    """Return the results of all loading runs, by case name and in rank order."""
    out: dict[str, list[dict[str, Any]]] = {}
    for ranks in (
        four,
        run_processes(2, cases.on_two, str(root)),
        run_processes(1, cases.on_one, str(root)),
    ):
        out.update({name: [r[name] for r in ranks] for name in ranks[0]})
    return out


@pytest.fixture(scope="module")
def saved(four: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the whole fp32 state at the time the checkpoint was written."""
    return assembled([r["saved"] for r in four], "state")


@pytest.mark.parametrize(
    "name",
    ["pieces, same layout", "pieces, pipeline 2", "pieces, one process", "pieces, padded less"],
)
def test_loads_exactly_on_any_layout(
    saved: dict[str, np.ndarray], others: Any, four: Any, name: str
) -> None:
    ranks = others[name]
    assert_same(assembled(ranks, "state"), saved)
    assert_same({f"master.{k}": v for k, v in assembled(ranks, "weights").items()}, masters(saved))
    for r in ranks:
        assert (r["iteration"], r["client"], r["optimizer"]) == (2, {"consumed_samples": 12}, True)
        assert r["scalars"] == four[0]["saved"]["scalars"]
        assert r["padding"] == 0.0


def test_the_padding_of_buckets_is_free_to_change(four: Any) -> None:
    """A checkpoint with other padding loads exactly. Ranks then own other parts of the buckets."""
    parts = [
        [r[name]["held"] for r in four] for name in ("pieces, padded less", "pieces, same layout")
    ]
    assert parts[0] != parts[1]
    saved, found = ([r[name] for r in four] for name in ("saved, padded less", "less, padded now"))
    assert_same(assembled(found, "state"), assembled(saved, "state"))
    assert all(r["scalars"] == saved[0]["scalars"] and r["padding"] == 0.0 for r in found)


def test_padding_and_copies_are_not_stored(root: Path, four: Any) -> None:
    metadata = pickle.loads((root / "whole" / "iter_0000002" / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert set(stored) == {f"{kind}.{name}" for kind in kinds for name in toy.SHAPES}
    for key, entry in stored.items():
        shape = toy.SHAPES[key.split(".", 1)[1]]
        assert tuple(entry.size) == shape
        counted = np.zeros(shape, dtype=int)
        for chunk in entry.chunks:
            counted[
                tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            ] += 1
            assert all(
                o + n <= d for o, n, d in zip(chunk.offsets, chunk.sizes, shape, strict=True)
            )
        assert (counted == 1).all(), key


def test_pieces_say_what_the_whole_says(root: Path, four: Any) -> None:
    """Both lists, in one piece and in many, name the same shards in the same places of the files.

    So do the lists of two runs that do the same.
    """
    whole, pieces = root / "whole" / "iter_0000002", root / "pieces" / "iter_0000002"
    assert not (pieces / ".metadata").exists()
    for folder in (whole, pieces):
        assert sorted(p.name for p in folder.glob("boxes_*")) == [
            "boxes_00000.json",
            "boxes_00001.json",
        ]
    torchs = pickle.loads((whole / ".metadata").read_bytes())
    expected = shards.read_stored(read_manifest(whole))
    assert shards.read_stored(read_manifest(pieces)) == expected
    assert torchs.state_dict_metadata.keys() == expected.keys()
    for name, stored in expected.items():
        assert all(len(box[5]) == 32 for box in stored["boxes"])
        tensor = torchs.state_dict_metadata[name]
        assert (tuple(tensor.size), str(tensor.properties.dtype)) == (
            stored["shape"],
            f"torch.{stored['dtype']}",
        )
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks}
        files = {tuple(i.offset): f for i, f in torchs.storage_data.items() if i.fqn == name}
        assert len(tensor.chunks) == len(stored["boxes"]) == len(files)
        found = {(o, sizes[o], f.relative_path, f.offset, f.length) for o, f in files.items()}
        assert found == {box[:5] for box in stored["boxes"]}, name


def test_only_the_pieces_of_the_wanted_tensors_are_read(
    root: Path, four: Any, tmp_path: Path
) -> None:
    """Only the pieces of the wanted tensors are read.

    A tensor that is not cut is on the first tensor rank alone, and so in one piece; the other piece
    may be missing.
    """
    folder = shutil.copytree(root / "pieces" / "iter_0000002", tmp_path / "copy")
    (folder / "boxes_00001.json").unlink()
    listed = json.loads((folder / "boxes.json").read_text())["pieces"]
    alone = [name for name, pieces in listed.items() if pieces == [0]]
    assert alone and len(alone) < len(listed)
    manifest = read_manifest(folder)
    assert shards.read_stored(manifest, alone).keys() == set(alone)
    assert shards.read_stored(manifest, ["unheard of"]) == {}
    with pytest.raises(CheckpointError, match="boxes_00001"):
        shards.read_stored(manifest, listed)


def test_torch_reads_what_we_write(root: Path, four: Any, saved: dict[str, np.ndarray]) -> None:
    tensors = {name: torch.zeros(values.shape) for name, values in saved.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(
            tensors,
            storage_reader=dcp.FileSystemReader(root / "whole" / "iter_0000002"),
            no_dist=True,
        )
    assert_same({name: tensor.double().numpy() for name, tensor in tensors.items()}, saved)


def test_what_is_missing_or_double_is_seen() -> None:
    halves = [shards.Shard((row, 0), (2, 2), "__0_0.distcp", 0, 16, "") for row in (0, 2)]
    part, rest = ({"w": {"shape": (4, 2), "dtype": "float32", "boxes": [half]}} for half in halves)
    shards.check_complete([shards.totals(part), shards.totals(rest)])
    shards.check_complete([shards.totals(shards.merged([part, rest]))])
    assert len(part["w"]["boxes"]) == 1, "merging leaves its parts as they are"
    for wrong in ([part], [part, rest, part]):
        with pytest.raises(CheckpointError, match=r"\bw\b"):
            shards.check_complete([shards.totals(p) for p in wrong])


def test_weights_without_engine(saved: Any, others: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        ranks = others[f"weights {dtype}"]
        assert [r["iteration"] for r in ranks] == [2, 2]
        for name, values in assembled(ranks, "weights").items():
            np.testing.assert_array_equal(
                values, rounded(saved[f"master.{name}"], dtype), err_msg=name
            )


def test_errors_reach_every_rank(others: Any) -> None:
    found, second = others["errors"]
    assert found == second, "the ranks tell different stories"
    assert found["nothing saved"] is False
    assert (found["replaced"], found["no-load-optim"]) == ({"again": True}, 4)
    for name, words in {
        "state no JSON": ["JSON"],
        "no optimizer": ["--no-load-optim"],
        "other tensors": ["master.unknown", "master.mixed", "(3, 2, 5)", "(4, 2, 5)"],
    }.items():
        assert all(word in found[name] for word in words), found[name]
