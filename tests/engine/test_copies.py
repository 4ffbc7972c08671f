"""Copies of weights: a user's own layer keeps them equal, and a difference is found and named."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.engine import copies
from megatron.engine.engine import Engine
from megatron.errors import ConfigError, TrainingError
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.custom_layer import put
from tests.helpers.groups import join
from tests.helpers.poison import flip_bit
from tests.helpers.processes import run_processes
from tests.helpers.training import assemble, train_in_process, train_plainly

# -- a user's own layer, on two tensor-parallel ranks ----------------------------------------------

FIELDS = dict(num_layers=2, global_batch_size=2)
TENSOR = dict(FIELDS, tensor_model_parallel_size=2)
SEQUENCE = dict(TENSOR, sequence_parallel=True)
HEAD_NORM = "head_norm.weight"
NORM = ".norm.weight"


def past_the_entrance(self, x, call):
    """Feed a tensor that all ranks hold into the tensor-parallel region.

    It goes beside ColumnParallelLinear.
    """
    tensor = self.up.context.tensor
    normed = self.norm(x)
    out, bias = self.down(self.up(normed) + normed.chunk(tensor.size, -1)[tensor.rank])
    return x + out + bias


def behind_a_checkpoint(self, x, call):
    """Run the layer's own arithmetic.

    No graph leads from the output to the parameters of a head.
    """
    heads = self.up(self.norm(x)).unflatten(-1, (-1, self.head_dim))
    heads = checkpoint(
        lambda y: torch.tanh(self.head_norm(y)) * self.gain, heads, use_reentrant=True
    )
    out, bias = self.down(heads.flatten(-2))
    return x + out + bias


RUNS = {
    "tensor": (TENSOR, {}, None),
    "sequence": (SEQUENCE, {}, None),
    "declared": (TENSOR, {HEAD_NORM: True, "gain": True, NORM: False}, behind_a_checkpoint),
    "not declared": (TENSOR, {"gain": True}, behind_a_checkpoint),
    "a term declared whole": (TENSOR, {HEAD_NORM: False}, None),
    "whole declared a term": (TENSOR, {NORM: True}, None),
    "a way past the entrance": (TENSOR, {}, past_the_entrance),
}


def train(rank):
    from megatron.model import gpt

    out = {}
    for name, (fields, declared, forward) in RUNS.items():
        with pytest.MonkeyPatch.context() as patch:
            put(patch, gpt, declared, forward)
            try:
                out[name] = train_in_process(rank, fields)
            except ConfigError as error:
                out[name] = str(error)
    return out


@pytest.fixture(scope="module")
def trained():
    return run_processes(2, train)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "sequence", "declared"])
def test_a_layer_of_ones_own_trains_as_in_one_process(trained, name):
    from megatron.model import gpt

    with pytest.MonkeyPatch.context() as patch:
        put(patch, gpt, {})
        expected = train_plainly(FIELDS)
    parameters = assemble([rank[name]["parameters"] for rank in trained])
    assert (
        parameters.keys() == expected["parameters"].keys()
        and "heads.0.head_norm.weight" in parameters
    )
    # to the tolerance of tests/parity/test_grid.py
    for key, values in expected["parameters"].items():
        np.testing.assert_allclose(parameters[key], values, rtol=0, atol=5e-6, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, parameter",
    [
        ("a term declared whole", "heads.0.head_norm.weight"),
        ("whole declared a term", "heads.0.norm.weight"),
        ("not declared", "heads.0.head_norm.weight"),
        ("a way past the entrance", ""),
    ],
)
def test_a_gradient_that_is_not_what_it_is_taken_for_is_an_error_on_all_ranks(
    trained, name, parameter
):
    first, second = (rank[name] for rank in trained)
    assert isinstance(first, str) and first == second and parameter in first


# -- a bit that flips, on four ranks ---------------------------------------------------------------


def check_after_flip(topology, precision, name, victim):
    """Check copies after a step whose weights are still in flight.

    Then one bit of one copy changes.
    """
    engine = Engine(toy.config(precision, overlap_param_gather=True), topology, toy.build(topology))
    toy.backward(engine, topology, 0)
    engine.step(toy.LR)
    engine.check_copies()
    if topology.rank == victim:
        flip_bit(next(p for p in engine.chunks.parameters() if sharding_of(p).name == name))
    try:
        engine.check_copies()
    except TrainingError as error:
        return str(error)
    return ""


FLIPS = {
    # (tensor, pipeline), precision, parameter, rank; the names in the error
    "data": ((1, 1), "bf16", "mixed", 2, ("mixed", "ranks 0-1, 3 ", "rank 2 ")),
    "data beside tensor": ((2, 1), "fp32", "up", 3, ("up ", "rank 1 ", "rank 3 ")),
    "tensor": ((2, 2), "bf16", "norm", 1, ("norm", "rank 0 ", "rank 1 ")),
    "pipeline": ((2, 2), "fp32", "embed", 3, ("embed", "rank 1 ", "rank 3 ")),
}


def flip(rank):
    join()
    return {
        case: check_after_flip(Topology.create(*sizes), precision, name, victim)
        for case, (sizes, precision, name, victim, _) in FLIPS.items()
    }


@pytest.mark.slow
def test_a_flipped_bit_is_found_in_every_kind_of_copy():
    ranks = run_processes(4, flip)
    for case, (*_, named) in FLIPS.items():
        texts = {rank[case] for rank in ranks}
        assert len(texts) == 1 and all(word in texts.copy().pop() for word in named), (case, texts)


# -- digests ---------------------------------------------------------------------------------------


def changes(x):
    """Change one bit; all bits of a word; two signs, which a sum of words misses; swap parts."""
    kind, n = torch.int16 if x.element_size() == 2 else torch.int32, len(x)
    word = 8 // x.element_size()

    def bit(i, b):
        flipped = 1 << b if b < 8 * x.element_size() - 1 else -1 << b
        return lambda y: y.view(kind)[i : i + 1].bitwise_xor_(flipped)

    def swap(size):
        return lambda y: y.copy_(torch.cat([y[size : 2 * size], y[:size], y[2 * size :]]))

    bits = [bit(i, b) for i in (0, 3, n // 2, n - 1) for b in range(8 * x.element_size())]
    return [
        *bits,
        lambda y: y.view(kind)[:word].bitwise_not_(),
        lambda y: y[word - 1 : 2 * word : word].neg_(),
        swap(1),
        swap(word),
        swap(copies._WORDS * word),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_digest_of_a_device_sees_every_change(dtype, monkeypatch):
    monkeypatch.setattr(copies, "_WORDS", 16)
    line = torch.randn(1 + 203, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = line[1:]  # not on word bounds, nor of a word's length
    digests = [int(copies.digest(x))]
    assert digests[0] == int(copies.digest(x.clone()))
    for change in changes(x):
        y = x.clone()
        change(y)
        digests.append(int(copies.digest(y)))
    assert len(set(digests)) == len(digests)
