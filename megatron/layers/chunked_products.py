"""Matrix products of the tensor-parallel regions together with their messages, in chunks of tokens.

A product that needs its input gathered, or its output summed, waits for the message when it is done in one piece. In
chunks, the message of one chunk travels while the next is multiplied (the idea of Wang et al., "Overlap Communication
with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). Every element is the same sum
over the same terms in any number of chunks.

How many chunks: of a message of M seconds M/n stays visible, and each further chunk costs some o seconds (its latency,
the start of a kernel, half-empty tiles), so that n = sqrt(M/o) is best. 16 MiB (2048 tokens of 4096 in 16 bit) take
about 0.3 ms at the 50 GB/s between two GCDs of an MI250X, and o is in the tens of microseconds: 4, the default.

With sequence parallelism a rank has the tokens [s/tp, b, ..] of its part of the sequence. Chunk i is made of the i-th
rows of every rank's part, so that all ranks send alike and each gets its own rows back.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.parallel import collectives
from megatron.parallel.topology import Group

LEAST_TOKENS = 256
"""Of a chunk: twice the rows of the largest tile that matrix products of GPUs and CPUs are built from, so that cutting
leaves few half-empty ones."""


@dataclass(frozen=True)
class Messages:
    """What a product's input and output need from the tensor-parallel group.

    group              nothing is sent in a group of one
    sequence_parallel  the outside of the region is cut along the sequence: inputs are gathered from [s/tp, b, ..], sums
                       are scattered to it; else inputs are whole and sums go to every rank
    chunks             at most so many pieces per product; fewer where they would have under LEAST_TOKENS tokens
    """

    group: Group
    sequence_parallel: bool
    chunks: int = 1

    def bounds(self, rows: int, tokens: int) -> list[tuple[int, int]]:
        """First and last + 1 of each chunk of `rows` rows, where the product has `tokens` tokens in all."""
        n = max(1, min(self.chunks, rows, tokens // LEAST_TOKENS))
        return [(rows * i // n, rows * (i + 1) // n) for i in range(n)]

    def gather_async(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The whole input [s, b, ..] and a handle to wait for before it is read."""
        if self.sequence_parallel:
            return collectives.gather_first_async(x, self.group)
        return x, collectives.DONE


def gathered_product(
    x: torch.Tensor, matrix: torch.Tensor, messages: Messages, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [s(/tp), b, in] of all ranks times matrix [in, out]: [s, b, out].

    With `keep` also the whole x [s, b, in].
    """
    size = messages.group.size
    if size == 1 or not messages.sequence_parallel:
        return x @ matrix, x
    bounds = messages.bounds(len(x), size * x[..., 0].numel())
    if len(bounds) == 1:
        whole = collectives.gather_first(x, messages.group)
        return whole @ matrix, whole
    y = x.new_empty(size, *x.shape[:-1], matrix.shape[1])  # [tp, s/tp, b, out]
    kept = x.new_empty(size, *x.shape) if keep else None  # [tp, s/tp, b, in]
    following = collectives.gather_first_async(x[slice(*bounds[0])], messages.group)
    for i, (first, end) in enumerate(bounds):
        part, arrived = following
        if i + 1 < len(bounds):
            following = collectives.gather_first_async(x[slice(*bounds[i + 1])], messages.group)
        arrived.wait()
        # One product over the rows of all ranks, then a copy to their places: a product for each rank would have fewer
        # rows, and a batched one is slower on a CPU.
        y[:, first:end] = (part @ matrix).view(size, end - first, *y.shape[2:])
        if kept is not None:
            kept[:, first:end] = part.view(size, end - first, *x.shape[1:])
    return y.flatten(0, 1), None if kept is None else kept.flatten(0, 1)


def summed_product(x: torch.Tensor, matrix: torch.Tensor, messages: Messages) -> tuple[torch.Tensor, list[Any]]:
    """The sum over the ranks of x [s, b, in] times matrix [in, out]: [s(/tp), b, out].

    The result may be read after wait() on all handles.
    """
    group = messages.group
    if group.size == 1:
        return x @ matrix, []
    parts = group.size if messages.sequence_parallel else 1
    rows = len(x) // parts
    bounds = messages.bounds(rows, x[..., 0].numel())
    if len(bounds) == 1:
        y = x @ matrix
        if not messages.sequence_parallel:
            return y, [collectives.all_reduce_async(y, group)]
        scattered, work = collectives.reduce_scatter_first_async(y, group)
        return scattered, [work]
    cut = x.unflatten(0, (parts, rows))  # [tp, s/tp, b, in]
    y = x.new_empty(rows, *x.shape[1:-1], matrix.shape[1])
    works = []
    for first, end in bounds:
        part = y[first:end].view(-1, matrix.shape[1])
        rows_of_all = cut[:, first:end].flatten(0, -2)
        if messages.sequence_parallel:
            works.append(collectives.reduce_scatter_into_async(part, rows_of_all @ matrix, group))
        else:
            torch.mm(rows_of_all, matrix, out=part)
            works.append(collectives.all_reduce_async(part, group))
    return y, works
