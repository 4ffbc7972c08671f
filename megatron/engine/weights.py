"""Collects the weights that each data-parallel rank has updated, behind the forward pass that follows."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron.engine.buckets import Bucket, gather_from_owners
from megatron.parallel.topology import Group


class WeightGather:
    """The weights of forward and backward on all data-parallel ranks.

    buckets  in the order in which forward passes need them: the same on all data-parallel ranks
    chunks   this rank's model: a module that is about to run waits for its weights
    overlap  `start` returns at once

    A chunk says with `weight_users()` which modules it calls, and which parameters must be there for each: pairs of a
    module and its parameters, those of modules within included. Without, all of a chunk's weights are waited for
    before it runs. A state_dict of a chunk or of a module of it waits for all. Whoever reads weights in another way
    calls `wait` before.
    """

    def __init__(
        self, buckets: Iterable[Bucket], group: Group, chunks: Iterable[torch.nn.Module], overlap: bool
    ) -> None:
        self._buckets, self._group, self._overlap = list(buckets), group, overlap
        self._works: dict[Bucket, list[Any]] = {}
        if not overlap or all(bucket.ranks == 1 for bucket in self._buckets):
            return
        of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for chunk in chunks:
            users = getattr(chunk, "weight_users", None)
            for module, parameters in users() if users else [(chunk, list(chunk.parameters()))]:
                module.register_forward_pre_hook(self._waits_for(parameters, of))
            for module in chunk.modules():
                module.register_state_dict_pre_hook(self._before_state_dict)

    def _waits_for(
        self, parameters: Sequence[torch.nn.Parameter], of: Mapping[torch.nn.Parameter, Bucket]
    ) -> Callable[..., None]:
        needed = list(dict.fromkeys(of[p] for p in parameters if p in of))

        def before(*_: Any) -> None:
            if self._works:
                self._wait(needed)

        return before

    def _before_state_dict(self, *_: Any) -> None:
        self.wait()

    @torch.no_grad()
    def start(self) -> None:
        """Collect the weights: all ranks of the group call it, after their part has changed."""
        for bucket in self._buckets:
            works = gather_from_owners(bucket, self._group)
            if works:
                self._works[bucket] = works
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Return when all weights are there."""
        self._wait(list(self._works))

    def _wait(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            for work in self._works.pop(bucket, ()):
                work.wait()
