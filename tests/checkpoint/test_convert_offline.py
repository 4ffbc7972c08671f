"""A checkpoint written by one process, tensor by tensor, equals one written by a run."""

import json

import pytest
import torch

from megatron.checkpoint import save as save_module
from megatron.checkpoint.files import PROVENANCE, STATE, read_manifest
from megatron.checkpoint.find import find_folder
from megatron.checkpoint.shards import read_stored
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron_conversion import write as write_module
from megatron_conversion.write import tensor_shards, write_offline
from megatron_inspection.checkpoint import verify
from tests.tools.conversion.full_tensors import whole_tensors

SHAPES = {"a": (7, 5), "b": (3,), "c": (2, 6, 4), "d": (1,), "e": (4, 3)}


def tensors():
    return {
        f"master.{name}": torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def write(directory, named_tensors, iteration=3):
    config = Config.create(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=50
    )
    return write_offline(
        directory,
        iteration,
        (piece for name, tensor in named_tensors for piece in tensor_shards(name, tensor)),
        config=config,
        state={"iteration": iteration},
        scalars={"optimizer_step": 2},
        optimizer=False,
        provenance={"from": "a test"},
    )


@pytest.mark.parametrize(("box", "of_file"), [(1 << 20, 1 << 30), (100, 1), (24, 4000), (1, 1)])
def test_boxes_of_any_size(tmp_path, monkeypatch, box, of_file):
    monkeypatch.setattr(write_module, "SHARD_BYTES", box)
    monkeypatch.setattr(write_module, "FILE_BYTES", of_file)
    folder = write(tmp_path, tensors().items())
    assert folder == find_folder(tmp_path) == tmp_path / "iter_0000003"
    reread = whole_tensors(folder)
    assert reread.keys() == tensors().keys()
    assert all(torch.equal(reread[name], value) for name, value in tensors().items())
    manifest = read_manifest(folder)
    assert manifest.read_json(STATE)["state"] == {"iteration": 3}
    assert manifest.read_json(PROVENANCE) == {"from": "a test"}
    stored = read_stored(manifest)
    for entry in stored.values():
        for _, sizes, *_ in entry["boxes"]:
            assert torch.Size(sizes).numel() * 4 <= box or sizes[0] == 1
    boxes = [box for entry in stored.values() for box in entry["boxes"]]
    files = {box[2] for box in boxes}
    assert len(files) == 1 if of_file == 1 << 30 else len(files) > 1
    assert len(files) == len(boxes) or of_file > 1
    assert verify(folder) == []


def test_one_tensor_at_a_time(tmp_path):
    """Each tensor is released before the next one is made."""
    import weakref

    alive = []

    def one_by_one():
        for i in range(4):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = torch.full((8,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"master.{i}", tensor
            del tensor

    write(tmp_path, one_by_one())


def test_after_an_error_all_is_as_before(tmp_path, monkeypatch):
    write(tmp_path, tensors().items())
    before = sorted(p.name for p in tmp_path.iterdir())

    def broken():
        yield "master.a", torch.ones(3)
        raise CheckpointError("shard 7")

    with pytest.raises(CheckpointError, match="shard 7"):
        write(tmp_path, broken(), 4)
    monkeypatch.setattr(save_module, "write_manifest", full)
    with pytest.raises(CheckpointError, match="iter_0000004"):
        write(tmp_path, tensors().items(), 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert json.loads((tmp_path / "latest_checkpointed_iteration.txt").read_text()) == 3


def full(*_):
    raise OSError(28, "No space left on device")
