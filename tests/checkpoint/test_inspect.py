"""Inspection of a checkpoint's contents and damage, and of differences between two."""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.files import write_manifest
from megatron.errors import CheckpointError
from megatron_inspection.checkpoint import (
    TensorDifference,
    compare,
    contents,
    norms,
    tensor_difference,
    verify,
)
from tests.checkpoint.written import make, tensors

VALUES = tensors()


# --- verification


def test_every_bit_is_looked_at(tmp_path):
    """Verification covers every bit, and every file.

    The test flips one in every byte of the manifest, which covers the rest, and in some bytes of
    each other file; then it removes the file, and adds one.
    """
    folder = make(tmp_path, 1, {"master.w": VALUES["master.layers.0.norm.weight"]}, files=1)
    tried = 0
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for at in range(0, len(content), 1 if path.name == "manifest.json" else 31):
            path.write_bytes(
                content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :]
            )
            problems = verify(folder)
            assert problems and path.name in problems[0], (path.name, at)
            tried += 1
        path.unlink()
        assert path.name in verify(folder)[0]
        path.write_bytes(content)
    assert tried > 500 and verify(folder) == []
    (folder / "__7_0.distcp").write_bytes(b"")
    (problem,) = verify(folder)
    assert "__7_0.distcp" in problem


def test_boxes_that_do_not_make_a_tensor(tmp_path):
    """Shards that do not form a tensor are reported.

    Manifest and digests may be valid around lists by a faulty writer.
    """
    folder = make(tmp_path, 1, VALUES)
    path = folder / "boxes_00000.json"
    listed = json.loads(path.read_text())
    del listed["master.layers.0.norm.weight"]["boxes"][0]
    listed["exp_avg.layers.0.norm.weight"]["boxes"][1][0] = [1]
    listed["exp_avg_sq.layers.0.norm.weight"]["boxes"][1][0] = [5]
    path.write_text(json.dumps(listed))
    names = [p.name for p in folder.iterdir() if p.suffix == ".json" and p.name != "manifest.json"]
    write_manifest(folder, names)
    unused, missing, double, outside = sorted(
        verify(folder), key=lambda text: ("/" not in text, "exp" in text, text)
    )
    assert "__0_0.distcp" in unused, "the box that was taken out"
    assert re.search(r"master\.layers\.0\.norm\.weight.* 4 .*7", missing)
    assert "exp_avg.layers.0.norm.weight" in double
    assert "exp_avg_sq.layers.0.norm.weight" in outside and "(7,)" in outside


# Path in the list of a tensor's shards => what stands there instead, as JSON, or nothing.
FORGED = """
shape =>
shape => "7"
shape => [7.0]
shape => [4611686018427387904]
dtype => "qint8"
dtype => []
boxes => 3
boxes.0.5 =>
boxes.0.0 => [5]
boxes.0.0 => [0, 0]
boxes.0.0.0 => -1
boxes.0.2 => "/dev/zero"
boxes.0.4 => 1125899906842624
boxes.0.5 => null
"""


def forge(entry, line):
    path, _, value = line.partition(" =>")
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in keys:
        entry = entry[key]
    if value:
        entry[last] = json.loads(value)
    else:
        del entry[last]


@pytest.mark.parametrize("line", FORGED.strip().splitlines())
def test_lists_that_were_forged_are_damage(tmp_path, line):
    """Forged lists with valid digests count as damage.

    Verifying or reading reports them and allocates nothing for them.
    """
    folder = make(tmp_path / "a", 1, VALUES)
    other = make(tmp_path / "b", 1, VALUES)
    listed = json.loads((folder / "boxes_00000.json").read_text())
    forge(listed["master.layers.0.norm.weight"], line)
    (folder / "boxes_00000.json").write_text(json.dumps(listed))
    write_manifest(folder, [p.name for p in folder.glob("*.json") if p.name != "manifest.json"])
    assert verify(folder)
    with pytest.raises(CheckpointError, match=str(folder)):
        compare(contents(folder), contents(other))


def test_data_that_is_no_regular_file(tmp_path):
    folder = make(tmp_path, 1, VALUES)
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        path = folder / "__0_0.distcp"
        path.unlink()
        put(path)
        assert verify(folder)
        with pytest.raises(CheckpointError, match="__0_0.distcp"):
            dict(norms(contents(folder), list(VALUES)))
        if path.is_dir():
            path.rmdir()


# --- comparison


def test_differences_are_measured(tmp_path):
    changed = dict(VALUES)
    changed["master.embedding.weight"] = VALUES["master.embedding.weight"].clone()
    changed["master.embedding.weight"][3, 1] += 0.5
    changed["master.new"] = torch.zeros(2)
    del changed["exp_avg.embedding.weight"]
    changed["exp_avg.layers.0.norm.weight"] = torch.zeros(8)
    changed["exp_avg_sq.layers.0.norm.weight"] = VALUES["exp_avg_sq.layers.0.norm.weight"].double()
    settings = [{"model": {"swiglu": True}, "training": {"seed": seed}} for seed in (1, 2)]
    first = contents(make(tmp_path / "a", 1, VALUES, config=settings[0]))
    second = contents(make(tmp_path / "b", 2, changed, config=settings[1], files=3))
    comparison = compare(first, second)
    assert not comparison.same
    assert (comparison.only_first, comparison.only_second) == (
        ["exp_avg.embedding.weight"],
        ["master.new"],
    )
    assert [name for name, _, _ in comparison.kinds] == [
        "exp_avg.layers.0.norm.weight",
        "exp_avg_sq.layers.0.norm.weight",
    ]
    assert list(comparison.tensors) == ["master.embedding.weight"]
    difference = comparison.tensors["master.embedding.weight"]
    exact = [v["master.embedding.weight"].double().numpy() for v in (VALUES, changed)]
    assert (difference.elements, difference.of) == (1, 30)
    assert difference.largest == abs(exact[0] - exact[1]).max()
    expected = np.linalg.norm(exact[0] - exact[1]) / np.linalg.norm(exact[0])
    assert difference.relative == pytest.approx(expected, rel=1e-12)  # float64 on both sides
    assert comparison.settings == [("training.seed", 1, 2)]
    assert comparison.state == [("iteration", 1, 2), ("state.iteration", 1, 2)]
    assert compare(first, second, "layers.0.mlp*").tensors == {}


def test_bits_are_compared():
    nan = math.nan
    inf = math.inf
    a = torch.tensor([0.0, 1.0, nan, inf, 5.0])
    assert tensor_difference(a, a.clone()) is None
    for values, expected in (
        ([-0.0, 1.0, nan, inf, 5.0], (1, 5, 0.0, inf)),
        ([0.0, 1.0, 2.0, inf, 5.0], (1, 5, inf, inf)),
    ):
        assert tensor_difference(a, torch.tensor(values)) == TensorDifference(*expected)
    b, c = (torch.tensor([3.0, last], dtype=torch.bfloat16) for last in (4.0, 4.5))
    assert tensor_difference(b, c) == TensorDifference(1, 2, 0.5, 0.1)
