"""Conversions in tests, and our checkpoints as full tensors, read by torch's own reader."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.checkpoint.find import find_folder
from megatron.errors import MegatronError
from megatron_conversion.convert import convert, find_source, plan_conversion, read_source
from megatron_conversion.names import ours
from tests.tools.conversion import megatron_deepspeed


def planned(source, settings=None, **how):
    """Return the plan of a conversion of this folder."""
    return plan_conversion(read_source(find_source(source), **how), settings or {})


def converted(source, target, settings=None, **how):
    plan = planned(source, settings, **how)
    convert(plan, target)
    return plan


def refused(source, target, *words):
    """Check that a conversion ends in an error with these words, and that nothing is written."""
    with pytest.raises(MegatronError) as caught:
        converted(source, target)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not target.exists() or not list(target.iterdir())


def whole_tensors(folder):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors = {
        name: torch.full(tuple(t.size), float("nan"), dtype=t.properties.dtype)
        for name, t in metadata.state_dict_metadata.items()
        if isinstance(t, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # One process without a process group is intended.
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def check_tensors(root, a, kinds):
    """Check that our checkpoint has exactly these tensors, {kind: {name: values}}, bit for bit."""
    tensors = whole_tensors(find_folder(root))
    expected = {
        f"{kind}.{ours(name)}": megatron_deepspeed.whole_in_our_shape(
            name, torch.as_tensor(value), a
        )
        for kind, values in kinds.items()
        for name, value in values.items()
    }
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == torch.float32
        assert torch.equal(tensors[name], value), name
