"""Checkpoints damaged in every way and place are not used; the one before is loaded."""

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron.checkpoint.load import load, load_weights
from megatron.engine.engine import Engine
from tests.checkpoint.saver_cases import message, save, spoil
from tests.engine import toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow


def flip(at):
    """Flip one bit at the fraction `at` of the file."""

    def damage(path):
        data = bytearray(path.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1 << (len(data) % 8)
        path.write_bytes(data)

    return damage


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path):
    os.truncate(path, 0)


def swap(path):
    """Replace the file by that of the checkpoint before: valid in itself, but of another state."""
    shutil.copyfile(path.parent.parent / "iter_0000001" / path.name, path)


DAMAGES = {
    "a bit": flip(0.67),
    "cut": cut,
    "empty": empty,
    "gone": Path.unlink,
    "swapped": swap,
}


def on_two_stages(rank, directory):
    """Write two checkpoints; damage each file of the newer one in each way, load, and mend it."""
    topology = join(1, 2)
    root = Path(directory)
    config = toy.config()
    engine = Engine(config, topology, toy.build(topology))
    states = {}
    for iteration in (1, 2):
        toy.backward(engine, topology, iteration)
        engine.step(toy.LR)
        save(root, iteration, engine, topology, config, {"at": iteration})
        states[iteration] = toy.state_by_place(engine)
    newest = root / "iter_0000002"
    backup = root.parent / "kept"
    if rank == 0:
        shutil.copytree(newest, backup)
    dist.barrier()
    out = {"files": sorted(os.listdir(newest)), "found": {}}
    other = spoil(Engine(config, topology, toy.build(topology)))
    for name in out["files"]:
        for how, damage in DAMAGES.items():
            if rank == 0:
                damage(newest / name)
            dist.barrier()
            result = load(root, other, topology, config)
            state = same(toy.state_by_place(other), states[result.iteration])
            rejected = [(r.folder.name, r.reason) for r in result.rejected]
            out["found"][name, how] = (result.iteration, result.state, state, rejected)
            dist.barrier()
            if rank == 0:
                shutil.copyfile(backup / name, newest / name)
    dist.barrier()
    result = load(root, other, topology, config)
    out["mended"] = (
        result.iteration,
        len(result.rejected),
        same(toy.state_by_place(other), states[2]),
    )
    return out | hopeless(root, topology, config, other)


def same(actual, expected):
    return actual.keys() == expected.keys() and all(
        np.array_equal(values, expected[key]) for key, values in actual.items()
    )


def hopeless(root, topology, config, engine):
    """Load a damaged checkpoint by name, weights only, and from a run without a valid one."""

    out = {}
    fewer = toy.build(topology)
    for chunk in fewer.values():
        chunk._parameters.pop("mixed", None)  # of the second stage
    out["superfluous"] = message(lambda: load_weights(root, fewer, topology))
    dist.barrier()
    if topology.rank == 0:
        flip(0.5)(root / "iter_0000002" / "__1_0.distcp")
    dist.barrier()
    tagged = dataclasses.replace(config, checkpoint=toy.ToyCheckpoint(load_tag="2"))
    out["tag"] = message(lambda: load(root, engine, topology, tagged))
    chunks = toy.build(topology)
    weights = []
    for damage in (None, empty):
        if damage is not None and topology.rank == 0:
            damage(root / "iter_0000002" / "__1_0.distcp")
        dist.barrier()
        result = load_weights(root, chunks, topology)
        weights.append((result.iteration, [r.folder.name for r in result.rejected]))
        dist.barrier()
    out["weights"] = weights
    if topology.rank == 0:
        (root / "iter_0000001" / "boxes.json").unlink()
    dist.barrier()
    out["nothing left"] = message(lambda: load(root, engine, topology, config))
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_processes(2, on_two_stages, str(tmp_path_factory.mktemp("damage") / "run"))


def test_damage_is_named_and_the_checkpoint_before_is_loaded(ranks):
    json_files = "boxes boxes_00000 boxes_00001 config manifest state".split()
    assert set(ranks[0]["files"]) - {"passport.json"} == {
        *(".metadata", "__0_0.distcp", "__1_0.distcp"),
        *(f"{name}.json" for name in json_files),
    }
    assert ranks[0]["found"] == ranks[1]["found"], "the ranks tell different stories"
    for (name, how), (iteration, state, same, rejected) in ranks[0]["found"].items():
        if how == "swapped" and not rejected:
            # Tensors, places and settings are the same, so these files are equal in both.
            assert name in ("config.json", "boxes.json", "passport.json") and (iteration, same) == (
                2,
                True,
            ), name
            continue
        assert (iteration, state, same) == (1, {"at": 1}, True), (name, how)
        ((folder, reason),) = rejected
        assert folder == "iter_0000002"
        # A manifest from elsewhere is valid in itself; it blames the first file that is not of its
        # checkpoint.
        assert name in reason or (name, how) == ("manifest.json", "swapped"), (reason, how)


def test_what_is_sound_is_loaded(ranks):
    """Weights alone load although a moment is damaged."""
    assert all(r["mended"] == (2, 0, True) for r in ranks)
    assert "exp_avg" in ranks[0]["tag"]
    assert all(r["weights"] == [(2, []), (1, ["iter_0000002"])] for r in ranks)


def test_tensors_that_the_model_has_not_are_an_error(ranks):
    """Tensors that the model lacks are an error, except those of an optimizer that is not loaded.

    They are no reason to load an older checkpoint.
    """
    first, second = (r["superfluous"] for r in ranks)
    assert (
        first == second
        and "master.mixed" in first
        and "exp_avg" not in first
        and "iter_0000001" not in first
    )


def test_errors_where_nothing_sound_is_left(ranks):
    first, second = ranks
    assert (first["tag"], first["nothing left"]) == (second["tag"], second["nothing left"])
    # Only the second stage reads the file that is named.
    assert all(words in first["tag"] for words in ("iter_0000002", "__1_0.distcp", "rank 1"))
    named = ("iter_0000002", "__1_0.distcp has 0 bytes", "iter_0000001", "boxes.json")
    assert all(words in first["nothing left"] for words in named)
