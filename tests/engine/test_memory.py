"""Memory of an engine: every byte is needed for training, and none exists twice."""

import gc
import weakref

import pytest
import torch

from megatron.engine.engine import Engine
from megatron.engine.gradients import Terms
from megatron.parallel.sharding import attach, shard
from tests.engine import toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

SHAPES = {"up": (96, 64), "down": (64, 96), "norm": (512,)}
ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values())
LEAST = 1024  # bytes: smaller tensors are a number or two
# Per element: weight, fp32 master weight unless the weight is fp32, fp32 gradient sum, two fp32
# moments.
BYTES = {"fp32": 4 + 0 + 4 + 8, "bf16": 2 + 4 + 4 + 8, "fp16": 2 + 4 + 4 + 8}
# of which ZeRO gives each data-parallel rank a part
DIVIDED = {"fp32": 8, "bf16": 4 + 8, "fp16": 4 + 8}


def storages():
    """Return bytes by address for the memory of all live tensors."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "cpu"
    }
    return {address: size for address, size in sizes.items() if size >= LEAST}


def allocated(rank, precision, stage):
    topology = join()
    chunk = torch.nn.Module()
    for name, shape in SHAPES.items():
        p = torch.nn.Parameter(torch.ones(shape))
        chunk.register_parameter(
            name, attach(p, shard(name, shape, None, 0, 1, decay=name != "norm"), 1)
        )
    chunks = torch.nn.ModuleDict({"0": chunk})
    del p
    before = set(storages()) - {p.untyped_storage().data_ptr() for p in chunks.parameters()}
    engine = Engine(toy.config(precision, stage, zero_reduce_bucket_size=10**6), topology, chunks)
    for p in chunks.parameters():
        engine.gradient(p).fill_(1.0)
    engine.step(0.1)  # which is when deferred allocations would happen
    return sum(size for address, size in storages().items() if address not in before)


CASES = {1: [("fp32", 1), ("bf16", 1), ("fp16", 1)], 2: [("bf16", 1), ("fp32", 0)]}


def allocated_in_each(rank, cases):
    return [allocated(rank, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_nothing_is_held_twice(ranks):
    """No tensor is held twice.

    DeepSpeed rounds the length of a group up to an even number for each rank: here it already is
    one.
    """
    expected = []
    for precision, stage in CASES[ranks]:
        divided = ELEMENTS * DIVIDED[precision]
        expected.append(
            ELEMENTS * BYTES[precision] - (divided - divided // ranks if stage == 1 else 0)
        )
    assert run_processes(ranks, allocated_in_each, CASES[ranks]) == [expected] * ranks


def test_what_a_chunk_is_given_is_not_kept_to_know_whose_gradients_are_terms():
    chunk = torch.nn.Linear(4, 4)
    terms = Terms([chunk], sequence_parallel=True)
    x = torch.ones(2, 4, requires_grad=True)
    chunk(x).sum().backward()
    gone = weakref.ref(x)
    del x
    assert gone() is None and set(terms._seen) == set(chunk.parameters())
