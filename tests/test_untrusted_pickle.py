"""Pickles that would take a time or memory out of proportion to their size, by all their readers."""

import io
import pickle
import random
import zipfile
from collections import OrderedDict
from contextlib import suppress

import numpy as np
import pytest
import torch

from megatron import untrusted_pickle
from megatron.checkpoint.reader import read_tensor
from megatron.checkpoint.shards import Shard
from megatron.errors import CheckpointError
from megatron.untrusted_pickle import check_pickle
from megatron_conversion.torch_dist import read_torch_dist
from megatron_conversion.unpickle import load_file

BEGIN = b"\x80\x02"
END = b"."
PAIRS = b")" + 60 * b"\x85q\x00h\x00h\x00\x86"  # ((),), and sixty times a pair of it twice
NUMBERS = b"](" + 30000 * b"K\x01" + b"eq\x01"  # a list, as value 1 of the memo
ORDERED = b"ccollections\nOrderedDict\n"
# What they make. A reader would need 2^60 steps, or 100 GB.
HOSTILE = {
    "a key": b"}" + PAIRS + b"Ns",
    "a set": b"\x8f(" + PAIRS + b"\x90",
    "pairs of an argument": ORDERED + b"](](" + PAIRS + b"Nee\x85R",
    "lists": b"]" + 60 * b"q\x00](h\x00h\x00e",
    "levels": 5000 * b"]" + 4999 * b"a",
    "itself": b"]q\x00h\x00a",
    "copies": NUMBERS + b"]q\x02(" + 300 * b"ctorch\nSize\nh\x01\x85R" + b"e",
    "a number": b"}\x8b\x00\x00\x10\x00" + b"\x01" * (1 << 20) + b"Ns",
}


def archive(content):
    """Return a file of torch.save with another pickle."""
    plain = io.BytesIO()
    made = io.BytesIO()
    torch.save({}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("/data.pkl") else old.read(name))
    return made.getvalue()


def from_before(content):
    """Return a file as torch before 1.6 wrote it, with another pickle."""
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    for _ in range(3):
        pickle.load(file)
    return file.getvalue()[: file.tell()] + content + pickle.dumps([], 2)


def as_metadata(path):
    (path.parent / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, path.parent / "common.pt")
    return read_torch_dist(path.parent, optimizer=False)


def as_shard(path):
    box = Shard((0,), (1,), path.name, 0, path.stat().st_size, None)
    entry = {"shape": (1,), "dtype": "float32", "boxes": [box]}
    return read_tensor(path.parent, {"x": entry}, "x")


READERS = {
    "checkpoint of others": ("model_optim_rng.pt", archive, load_file),
    "old checkpoint of others": ("mp_rank_00_model_states.pt", from_before, load_file),
    "list of torch_dist": (".metadata", lambda content: content, as_metadata),
    "shard of ours": ("__0_0.distcp", archive, as_shard),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("made", HOSTILE)
def test_what_would_not_end_is_refused(tmp_path, made, reader):
    name, written, read = READERS[reader]
    (tmp_path / name).write_bytes(written(BEGIN + HOSTILE[made] + END))
    with pytest.raises(CheckpointError, match=name):
        read(tmp_path / name)


def test_what_checkpoints_hold_is_taken(tmp_path):
    weight = torch.ones(3)
    common = {"lr": 0.1, "betas": (0.9, 0.95)}
    content = {
        "state": OrderedDict((f"layers.{i}.weight", weight) for i in range(2000)),
        "param_groups": [common] * 50,
        "rng": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        ("fqn", (0, 8)): torch.Size([4, 5]),
        7: {"step": 10**18},
    }
    for new in (True, False):
        torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=new)
        numpy = ["numpy._core.multiarray._reconstruct"]  # unknown to files of that age
        assert load_file(tmp_path / "file.pt", numpy).keys() == content.keys()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        check_pickle(pickle.dumps(content, protocol), "file", CheckpointError)


@pytest.mark.parametrize("target", [b"cfoo\nbar\n", b"N", b"("])
def test_one_pickle_does_not_affect_the_next(target, monkeypatch):
    """No pickle adds to a value that has nothing inside, which others share."""
    monkeypatch.setattr(untrusted_pickle, "_FREE", 0)
    for added in (b"(" + 1000 * b"N" + b"e", 1000 * b"Na"):
        with suppress(ValueError):
            check_pickle(BEGIN + target + added + END, "file", CheckpointError)
    check_pickle(pickle.dumps(OrderedDict(), 2), "file", CheckpointError)


@pytest.mark.parametrize("how", ["twice", "compressed"])
def test_two_readers_see_the_same_pickle(tmp_path, how):
    """An archive with two pickles, or a compressed one, can show another pickle to torch."""
    path = tmp_path / "file.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if how == "compressed" else 0) as file:
        for folder in ("a", "b") if how == "twice" else ("a",):
            file.writestr(f"{folder}/data.pkl", pickle.dumps({}))
    with pytest.raises(CheckpointError, match=r"file\.pt"):
        load_file(path)
