"""Initial weights: the same on any layout, with the right distribution."""

import pytest
import torch

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.layers import context as parameters
from megatron.layers.context import BLOCK, ParameterFactory, draw, normal, xavier_uniform
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.hashing import mix
from megatron.parallel.keyed_random import name_key
from megatron.parallel.layout import Layout
from megatron.parallel.sharding import shard, sharding_of
from megatron.parallel.topology import Topology
from tests.helpers.tiny import MODEL

CPU = torch.device("cpu")


@pytest.fixture
def threads():
    """Use three threads that draw two blocks of [BLOCK, 24] at a time."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_PIECE", 2 * BLOCK * 24)
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)


def unsharded(name, shape, dim, size, padded=None):
    shards = [
        ParameterFactory(7, rank, size, CPU)
        .create(name, shape, dim, normal(0.5), padded=padded)
        .detach()
        for rank in range(size)
    ]
    return torch.cat(shards, dim)


def test_padding_is_zero_and_does_not_change_the_rest():
    plain = unsharded("w", (100, 8), 0, 1)
    padded = unsharded("w", (100, 8), 0, 4, padded=256)
    assert torch.equal(padded[:100], plain)
    assert torch.count_nonzero(padded[100:]) == 0
    assert torch.count_nonzero(plain) == plain.numel()


def test_a_scalar_is_refused():
    with pytest.raises(ConfigError, match="the gain has shape"):
        ParameterFactory(7, 0, 1, CPU).create("the gain", (), None, normal(0.5))


def test_names_and_blocks_are_independent():
    a = unsharded("a", (512, 64), 0, 1)
    b = unsharded("b", (512, 64), 0, 1)
    # The correlation of n independent pairs has standard deviation 1/sqrt(n); five of them are
    # significant.
    n = a.numel()
    assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 5 / n**0.5
    first = a[:BLOCK].flatten()
    second = a[BLOCK : 2 * BLOCK].flatten()
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 5 / len(first) ** 0.5


def test_distribution():
    x = unsharded("w", (1024, 256), 1, 1)
    n = x.numel()
    assert abs(x.mean()) < 5 * 0.5 / n**0.5  # five standard errors
    assert abs(x.std() - 0.5) < 5 * 0.5 / (2 * n) ** 0.5
    u = draw(shard("u", (300, 200), 0, 0, 1), xavier_uniform(), 1)
    bound = (6 / 500) ** 0.5
    assert u.abs().max() <= bound
    assert u.abs().max() > 0.999 * bound
    assert abs(u.std() - bound / 3**0.5) < 0.01 * bound


@pytest.mark.parametrize(("shape", "dim"), [((1000, 24), 0), ((24, 1000), 1), ((2, 1000, 12), 1)])
def test_threads_draw_what_one_block_after_the_other_gives(threads, shape, dim):
    """Threads draw the same as block after block, even if a shard begins and ends inside a block.

    Parts are 250 long.
    """
    blocks = []
    for block in range(-(-1000 // BLOCK)):
        values = torch.empty(
            min(BLOCK, 1000 - block * BLOCK), *(n for d, n in enumerate(shape) if d != dim)
        )
        blocks.append(
            values.normal_(
                0.0, 0.5, generator=torch.Generator().manual_seed(mix(7, name_key("w"), block))
            )
        )
    assert torch.equal(unsharded("w", shape, dim, 4), torch.cat(blocks).movedim(0, dim))


MUP = dict(use_mup=True, mup_base_hidden_size=8, num_key_value_heads=1)
UPCYCLED = dict(moe_use_upcycling=True, num_experts=4, moe_ffn_hidden_size=32, load="dense")


@pytest.mark.parametrize(
    ("fields", "tensor"), [(MUP, 1), (MUP, 2), (UPCYCLED, 1)], ids=["mup", "shared", "upcycled"]
)
def test_values_drawn_late_are_the_same(fields, tensor):
    """ZeRO 3 draws weights bucket by bucket, also those that a layer changes after the draw."""
    config = Config.create(
        **{**MODEL, **fields}, tensor_model_parallel_size=tensor, world_size=tensor
    )
    for rank in range(tensor):
        topology = Topology.from_layout(Layout(tensor=tensor), rank, device=CPU)
        now, late = (
            build_chunks(config, topology, layer_context(config, topology, late=late))
            for late in (False, True)
        )
        for p, q in zip(now.parameters(), late.parameters(), strict=True):
            assert torch.equal(p, q.late()), sharding_of(p).name
