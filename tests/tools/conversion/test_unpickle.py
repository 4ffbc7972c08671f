"""A foreign pickle executes nothing, and unknown names are refused by name."""

import argparse
import collections
import os

import numpy as np
import pytest
import torch

from megatron.errors import CheckpointError
from megatron_conversion.unpickle import Record, attributes, load_file


def test_classes_of_theirs_become_records(tmp_path):
    arguments = argparse.Namespace(num_layers=2, dtype=torch.bfloat16)
    content = {"args": arguments, "rng": np.random.get_state(), "w": torch.ones(3)}
    torch.save(content, tmp_path / "file.pt")
    loaded = load_file(tmp_path / "file.pt")
    assert type(loaded["args"]) is Record
    assert attributes(loaded["args"]) == {"num_layers": 2, "dtype": torch.bfloat16}
    assert torch.equal(loaded["w"], content["w"])


def test_unknown_classes_are_named_and_may_be_allowed(tmp_path):
    torch.save({"args": collections.UserDict(a=1)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"collections\.UserDict.*--plain-class"):
        load_file(tmp_path / "file.pt")
    assert attributes(load_file(tmp_path / "file.pt", ["collections.UserDict"])["args"]) == {
        "data": {"a": 1}
    }


def test_files_that_are_no_checkpoints(tmp_path):
    os.mkfifo(tmp_path / "fifo.pt")
    with pytest.raises(CheckpointError, match=r"fifo\.pt"):
        load_file(tmp_path / "fifo.pt")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match=r"list\.pt.* list\b"):
        load_file(tmp_path / "list.pt")
