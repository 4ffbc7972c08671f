"""Shards of flat stretches, against numbering every element."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.engine.optimizer import Fragment, boxes
from megatron.parallel.sharding import shard

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_stretch_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = torch.arange(count).view(shape)
    found = boxes(start, stop, shape)
    parts = [
        numbers[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]
        for offset, sizes in found
    ]
    assert [int(x) for part in parts for x in part.reshape(-1)] == list(range(start, stop))
    assert len(found) <= 2 * len(shape) - 1


@given(shapes, st.data())
def test_real_boxes_put_every_element_in_its_place(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Shards form the tensor together.

    They are cut over ranks with padding, and over stretches of each rank.
    """
    dim = data.draw(st.integers(0, len(shape) - 1))
    size = data.draw(st.integers(1, 3))
    each = -(-shape[dim] // size) + data.draw(st.integers(0, 2))
    whole = torch.arange(math.prod(shape)).view(shape)
    found = torch.full(shape, -1)
    for rank in range(size):
        s = shard("w", shape, dim, rank, size, padded=each * size)
        local_shape = [each if d == dim else n for d, n in enumerate(shape)]
        part = torch.full(local_shape, -7)
        real = tuple(slice(0, n) for n in s.extent)
        part[real] = whole[tuple(slice(o, o + n) for o, n in zip(s.offset, s.extent, strict=True))]
        cut = data.draw(st.integers(0, part.numel()))
        for start, flat in ((0, part.view(-1)[:cut]), (cut, part.view(-1)[cut:])):
            p = torch.nn.Parameter(torch.empty(local_shape))
            for offset, view in Fragment(p, s, start, len(flat), flat, {}).real(flat):
                place = tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))
                assert (found[place] == -1).all()
                found[place] = view
                view.zero_()
        assert not part[real].any(), "views share the fragment's memory"
        assert part.sum() == -7 * (part.numel() - math.prod(s.extent)), "padding is not touched"
    assert torch.equal(found, whole)
