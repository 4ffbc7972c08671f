"""Parts that ZeRO gives to ranks, and the messages that it sends.

Sizes are those of megatron.parallel.topology.Shards: gradients, and with stage 3 weights, are
divided over `inner` neighbours of a data-parallel line, the optimizer's state over `states` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron.config import Config
from megatron.engine.zero_plan import BucketRule, bucket_limit, stage_in_effect
from megatron.parallel.sharding import Sharding
from megatron.planner.events import Message

Hop = tuple[str, str, int]
"""Kind and group of a message, and over how many ranks its tensor was divided before."""


class Zero(NamedTuple):
    """ZeRO's stage and sizes.

    line     ranks that sum a parameter's gradients
    experts  expert-parallel size: experts have shorter lines
    limit    elements at which a bucket is closed
    """

    stage: int
    inner: int
    states: int
    line: int
    experts: int
    weight_bytes: int
    gradient_bytes: int
    limit: float

    def sizes(self, experts: bool = False) -> tuple[int, int, int]:
        """Return `inner`, `states` and `line` of experts or of other parameters."""
        each = self.experts if experts else 1
        inner, states, line = (max(1, n // each) for n in (self.inner, self.states, self.line))
        return inner, states, line

    def weight_ranks(self, experts: bool = False) -> int:
        """Return over how many ranks matrices are divided outside of the passes that use them."""
        return self.sizes(experts)[0] if self.stage == 3 else 1

    def gradient_ranks(self, experts: bool = False) -> int:
        return self.sizes(experts)[0] if self.stage > 1 else 1

    def hops(self, experts: bool = False) -> list[Hop]:
        """List the messages, one after another, that sum gradients at the owners."""
        inner, states, line = self.sizes(experts)
        name = "expert_data" if experts else "data"
        steps = (
            ("reduce_scatter", "inner", inner, 1),
            ("reduce_scatter", "outer", states // inner, inner),
            ("all_reduce", "copies", line // states, states),
        )
        return [
            (kind, name if size == line else f"{name}.{part}", before)
            for kind, part, size, before in steps
            if size > 1
        ]

    def in_passes(self, experts: bool) -> list[Hop]:
        """List those of them that belong to each backward pass."""
        first = self.hops(experts)[:1]
        return first if self.gradient_ranks(experts) > 1 else []

    def at_end(self, experts: bool) -> list[Hop]:
        """List those of them that end a step."""
        return self.hops(experts)[len(self.in_passes(experts)) :]

    def gathers(self, experts: bool, vectors: bool) -> list[Hop]:
        """List the messages that gather new weights.

        vectors  of norms and biases, which are not divided
        """
        owners = [hop for hop in self.hops(experts) if hop[0] == "reduce_scatter"]
        if self.weight_ranks(experts) > 1 and not vectors:
            owners = owners[1:]
        return [("all_gather", group, before) for _, group, before in reversed(owners)]

    def sums(self, elements: int, experts: bool) -> list[Message]:
        """List the messages that sum the gradients of a bucket when a step ends."""
        size = self.gradient_bytes * elements
        return [Message(kind, size / before, group) for kind, group, before in self.at_end(experts)]

    def returns(self, elements: int, experts: bool, vectors: bool = False) -> list[Message]:
        """List the messages that gather the new weights of a bucket."""
        size, hops = self.weight_bytes * elements, self.gathers(experts, vectors)
        return [Message(kind, size / before, group) for kind, group, before in hops]

    def of_pass(self, parameters: Iterable[Sharding], backward: bool) -> list[Message]:
        """List the messages of matrices in each pass through the part that has them.

        Weights are gathered; gradients are summed after a backward pass.
        """
        found = list[Message]()
        matrices = [p for p in parameters if p.kind != "vector"]
        for bucket in BucketRule(self.limit).plan(matrices):
            for kind, group, _ in self.in_passes(bucket.kind.experts):
                if backward:
                    found.append(Message(kind, bucket.elements * self.gradient_bytes, group))
                elif self.stage == 3:
                    found.append(Message("all_gather", bucket.elements * self.weight_bytes, group))
        return found


def zero_of(config: Config) -> Zero:
    """Return what ZeRO divides in a configuration."""
    parallel, engine, precision = config.parallel, config.engine, config.precision
    line = parallel.gradient_ranks
    # those of a node (-1) become numbers where the node is known (placement.over_nodes)
    inner = max(0, engine.zero_shard_size) or line
    stage = stage_in_effect(engine.zero_stage, inner)
    states = max(0, engine.zero_state_shard_size) or line
    return Zero(
        stage,
        *((inner, states) if stage else (1, 1)),
        line,
        parallel.expert_model_parallel_size,
        precision.weight_bytes,
        precision.gradient_bytes,
        bucket_limit(config, line),
    )
