"""Contents of a checkpoint: shards of tensors in files, listed whole or in pieces.

They can be read by torch too.
"""

import dataclasses
import json
import pickle
import shutil
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron.checkpoint import save as save_module
from megatron.checkpoint import shards
from megatron.checkpoint.files import read_manifest
from megatron.checkpoint.load import load, load_weights
from megatron.engine import buckets
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from tests.checkpoint.saver_cases import loaded, message, save
from tests.engine import toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow


def train_and_save(directory, topology):
    """Take two steps, write a checkpoint, and return the state in it."""
    config = toy.config()
    engine = Engine(config, topology, toy.build(topology))
    for step in range(2):
        toy.backward(engine, topology, step)
        engine.step(toy.LR)
    save(directory, 2, engine, topology, config, {"consumed_samples": 12})
    return {"state": toy.state_pieces(engine), "scalars": engine.scalars()}


def on_four(rank, root):
    """Write on tensor 2 x data 2 with ZeRO-1, shards in one list and in pieces; load both."""
    tensor = join(2, 1)
    stages = join(1, 2)
    # With the bucket padding that DeepSpeed itself uses, as before this project padded buckets.
    padded_less = mock.patch.object(buckets, "ALIGNMENT", 2)
    out = {"saved": train_and_save(f"{root}/whole", tensor)}
    # As in a job of thousands of ranks.
    with mock.patch.object(save_module, "METADATA_MAX_RANKS", 1):
        train_and_save(f"{root}/pieces", tensor)
    out["same layout"] = loaded(f"{root}/pieces", tensor)
    out["pipeline 2"] = loaded(f"{root}/pieces", stages)
    with padded_less:
        out["padded less"] = loaded(f"{root}/pieces", tensor)
        out["saved, padded less"] = train_and_save(f"{root}/less", tensor)
    out["less, padded now"] = loaded(f"{root}/less", tensor)
    for dtype in (torch.float32, torch.bfloat16):
        out[str(dtype)] = weights_only(f"{root}/whole", stages, dtype)
    return out | {"errors": errors(Path(root, "errors"), Topology.create())}


def weights_only(directory, topology, dtype):
    """Load into parameters that no engine has touched."""
    chunks = toy.build(topology).to(dtype)
    for p in chunks.parameters():
        p.data.fill_(77.0)
    assert load_weights(directory, chunks, topology).iteration == 2
    weights = {}
    for p in chunks.parameters():
        s = sharding_of(p)
        real = tuple(slice(0, n) for n in s.extent)
        weights[s.name] = [(s.offset, p.detach()[real].float().numpy().copy())]
        p.data[real] = 0.0
        assert not p.any(), "padding keeps what was there before"
    return {"weights": weights}


def errors(root, topology):
    """Fail in several ways, one after another; return the messages by case."""
    config = toy.config()
    engine = Engine(config, topology, toy.build(topology))
    out = {}

    out["state no JSON"] = message(
        lambda: save(root / "a", 1, engine, topology, config, {"x": {1, 2}})
    )
    out["nothing saved"] = (root / "a" / "iter_0000001").exists()

    save(root / "a", 1, engine, topology, config, {})
    # The same iteration replaces itself.
    save(root / "a", 1, engine, topology, config, {"again": True})
    out["replaced"] = load(root / "a", engine, topology, config).state
    bare = dataclasses.replace(config, checkpoint=toy.ToyCheckpoint(no_save_optim=True))
    save(root / "bare", 4, engine, topology, bare, {})
    out["no optimizer"] = message(lambda: load(root / "bare", engine, topology, config))
    no_optim = dataclasses.replace(config, checkpoint=toy.ToyCheckpoint(no_load_optim=True))
    out["no-load-optim"] = load(root / "bare", engine, topology, no_optim).iteration

    chunks = toy.build(topology)["0"]
    some = chunks.up.sharding
    other = chunks.mixed.sharding
    chunks.up.sharding = dataclasses.replace(some, name="unknown")
    chunks.mixed.sharding = dataclasses.replace(other, global_shape=(4, 2, 5))
    out["other tensors"] = message(lambda: load_weights(root / "a", chunks, topology))
    return out


def assembled(ranks, what):
    return toy.assemble(r[what] for r in ranks)


def masters(state, dtype=torch.float32):
    """Return the rounded weights of a state by name."""
    return {
        name.removeprefix("master."): torch.tensor(values).float().to(dtype).double().numpy()
        for name, values in state.items()
        if name.startswith("master.")
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def four(root):
    """Return the results by case, of all ranks."""
    ranks = run_processes(4, on_four, str(root))
    return {name: [r[name] for r in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def saved(four):
    """Return the whole fp32 state at the time the checkpoint was written."""
    return assembled(four["saved"], "state")


def test_loads_exactly_on_any_layout(saved, four):
    """Also with other padding, with which ranks own other parts of the buckets."""
    for written, case in (
        ("saved", "same layout"),
        ("saved", "pipeline 2"),
        ("saved", "padded less"),
        ("saved, padded less", "less, padded now"),
    ):
        ranks = four[case]
        toy.assert_same(assembled(ranks, "state"), assembled(four[written], "state"))
        toy.assert_same(assembled(ranks, "weights"), masters(saved))
        for r in ranks:
            assert r["taken"] == (2, {"consumed_samples": 12}, True)
            assert (r["scalars"], r["padding"]) == (four[written][0]["scalars"], 0.0)
    elements = [[r["elements"] for r in four[name]] for name in ("padded less", "same layout")]
    assert elements[0] != elements[1]


def test_lists_name_each_element_once_whole_and_in_pieces(root, four):
    """Both lists name the same shards in the same places of the files, without padding and copies.

    So do the lists of two runs that do the same.
    """
    one_list = root / "whole" / "iter_0000002"
    split_lists = root / "pieces" / "iter_0000002"
    assert not (split_lists / ".metadata").exists()
    for folder in (one_list, split_lists):
        names = sorted(p.name for p in folder.glob("boxes_*"))
        assert names == ["boxes_00000.json", "boxes_00001.json"]
    torch_metadata = pickle.loads((one_list / ".metadata").read_bytes())
    expected = shards.read_stored(read_manifest(one_list))
    assert shards.read_stored(read_manifest(split_lists)) == expected
    kinds = ("master", "exp_avg", "exp_avg_sq")
    assert set(expected) == {f"{kind}.{name}" for kind in kinds for name in toy.SHAPES}
    assert torch_metadata.state_dict_metadata.keys() == expected.keys()
    for name, stored in expected.items():
        tensor = torch_metadata.state_dict_metadata[name]
        shape = toy.SHAPES[name.split(".", 1)[1]]
        assert tuple(tensor.size) == stored["shape"] == shape
        assert str(tensor.properties.dtype) == f"torch.{stored['dtype']}"
        counted = np.zeros(shape, dtype=int)
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in tensor.chunks}
        for offset, size in sizes.items():
            assert all(o + n <= d for o, n, d in zip(offset, size, shape, strict=True))
            counted[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
        assert (counted == 1).all(), name
        files = {
            tuple(i.offset): f for i, f in torch_metadata.storage_data.items() if i.fqn == name
        }
        assert len(tensor.chunks) == len(stored["boxes"]) == len(files)
        boxes = {(o, sizes[o], f.relative_path, f.offset, f.length) for o, f in files.items()}
        assert boxes == {box[:5] for box in stored["boxes"]}, name
        assert all(len(box[5]) == 32 for box in stored["boxes"])


def test_only_the_pieces_of_the_wanted_tensors_are_read(root, four, tmp_path):
    """Only the pieces of the wanted tensors are read.

    A tensor that is not cut is on the first tensor rank alone, and so in one piece; the other piece
    may be missing.
    """
    folder = shutil.copytree(root / "pieces" / "iter_0000002", tmp_path / "copy")
    (folder / "boxes_00001.json").unlink()
    listed = json.loads((folder / "boxes.json").read_text())["pieces"]
    alone = [name for name, numbers in listed.items() if numbers == [0]]
    assert alone and len(alone) < len(listed)
    manifest = read_manifest(folder)
    assert shards.read_stored(manifest, alone).keys() == set(alone)
    assert shards.read_stored(manifest, ["unheard of"]) == {}
    with pytest.raises(CheckpointError, match="boxes_00001"):
        shards.read_stored(manifest, listed)


def test_torch_reads_what_we_write(root, four, saved):
    tensors = {name: torch.zeros(values.shape) for name, values in saved.items()}
    reader = dcp.FileSystemReader(root / "whole" / "iter_0000002")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    toy.assert_same({name: tensor.double().numpy() for name, tensor in tensors.items()}, saved)


def test_what_is_missing_or_double_is_seen():
    halves = [shards.Shard((row, 0), (2, 2), "__0_0.distcp", 0, 16, "") for row in (0, 2)]
    first, second = (
        {"w": {"shape": (4, 2), "dtype": "float32", "boxes": [half]}} for half in halves
    )
    shards.check_complete([shards.totals(first), shards.totals(second)])
    shards.check_complete([shards.totals(shards.merged([first, second]))])
    assert len(first["w"]["boxes"]) == 1, "merging leaves its parts as they are"
    for wrong in ([first], [first, second, first]):
        with pytest.raises(CheckpointError, match=r"\bw\b"):
            shards.check_complete([shards.totals(p) for p in wrong])


def test_weights_without_engine(saved, four):
    for dtype in (torch.float32, torch.bfloat16):
        toy.assert_same(assembled(four[str(dtype)], "weights"), masters(saved, dtype))


def test_errors_reach_every_rank(four):
    errors = four["errors"][0]
    assert four["errors"] == [errors] * 4, "the ranks tell different stories"
    assert errors["nothing saved"] is False
    assert (errors["replaced"], errors["no-load-optim"]) == ({"again": True}, 4)
    for name, words in {
        "state no JSON": ["JSON"],
        "no optimizer": ["--no-load-optim"],
        "other tensors": ["master.unknown", "master.mixed", "(3, 2, 5)", "(4, 2, 5)"],
    }.items():
        assert all(word in errors[name] for word in words), errors[name]
