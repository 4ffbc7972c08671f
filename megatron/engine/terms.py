"""Which gradients are terms of a sum over the tensor ranks, read off the autograd graph of the first forward pass.

A parameter that all tensor ranks hold gets its whole gradient on each of them where it works on values that are the
same on all. Where each rank has heads, features or tokens of its own, the gradient on a rank is one term of a sum over
the ranks. The messages between the parameter and the loss decide which of the two it is: an autograd function that
communicates over the tensor group sets `ctx.partial_gradient` in its forward pass, True where the gradients that it
hands on are terms. Every other function hands on what it was given.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron.errors import ConfigError
from megatron.parallel.sharding import sharding_of


class Terms:
    """What the gradients of parameters are, after the first forward pass of each of `chunks` with gradients.

    sequence_parallel  a gradient that enters a chunk through its output is of this rank's tokens only
    """

    def __init__(self, chunks: Iterable[torch.nn.Module], sequence_parallel: bool) -> None:
        self._seen: dict[torch.Tensor, set[bool]] = {}
        for chunk in chunks:
            self._watch(chunk, sequence_parallel)

    def _watch(self, chunk: torch.nn.Module, sequence_parallel: bool) -> None:
        def look(_: Any, __: Any, output: Any) -> None:
            root = getattr(output, "grad_fn", None)
            if root is not None:
                handle.remove()
                self._follow(root, sequence_parallel)

        handle = chunk.register_forward_hook(look)

    def _follow(self, root: Any, partial: bool) -> None:
        """Walk all ways from the root of a graph to parameters."""
        seen, ways = set[tuple[Any, bool]](), [(root, partial)]
        while ways:
            way = ways.pop()
            if way in seen:
                continue
            seen.add(way)
            node, partial = way
            # The chunk's input is a leaf, too, which must not be kept.
            if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
                self._seen.setdefault(node.variable, set()).add(partial)
            partial = getattr(node, "partial_gradient", partial)
            ways += [(after, partial) for after, _ in node.next_functions if after is not None]

    def partial(self, p: torch.Tensor, used: bool) -> bool:
        """Whether the gradients of `p` on the tensor ranks are terms of a sum; a declaration in its Sharding wins.

        `used`: it has got a gradient. Raises ConfigError where that came by no way, or by ways of both kinds.
        """
        sharding = sharding_of(p)
        if sharding.partial_gradient is not None or sharding.dim is not None:
            return bool(sharding.partial_gradient)
        seen = self._seen.get(p, set())
        if len(seen) > 1:
            raise ConfigError(
                f"the gradient of {sharding.name} is whole on one way from the loss and a term of a sum over the "
                f"tensor ranks on another: values that all ranks hold enter a tensor-parallel region through "
                f"ColumnParallelLinear, or through an autograd function that sums their gradient over the ranks"
            )
        if used and not seen:
            raise ConfigError(
                f"{sharding.name} got a gradient, but no autograd graph leads from the output of its chunk to it: call "
                f"the chunk itself, or say with partial_gradient=True or False whether the gradients of the tensor "
                f"ranks are terms of a sum"
            )
        return True in seen
