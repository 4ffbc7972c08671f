"""Divides parameters by their shardings into buckets: the optimizer's groups, and frozen ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megatron.engine.optimizer_state import has_16_bit_moments, wants_full_parameters
from megatron.parallel.sharding import Sharding

if TYPE_CHECKING:
    from megatron.config import Config

_SMALLEST = 4_000_000
_PER_RANK = 1_000_000
_PER_RANK_OF_A_CALL = 4_000_000

ALIGNMENT = 8
"""A rank's share of a bucket is a multiple of this number of elements, so that each share begins on
a multiple of 16 bytes in both 16-bit and 32-bit formats. Otherwise kernels would load single
elements, and NCCL would not use wide loads either."""

Scales = Callable[[Sharding], tuple[float, float]]
"""Function that maps a parameter to the factors on its learning rate and on its epsilon."""


class BucketKind(NamedTuple):
    """Properties that the parameters of a bucket share. An optimizer's groups are sorted by them.

    frozen           whether the parameters do not train; such buckets are not groups of the
                     optimizer
    spared           whether they are exempt from weight decay
    full_parameters  whether the optimizer needs full parameters
    tied             whether the parameter is the tied embedding
    lr_scale         factor on the learning rate
    eps_scale        factor on AdamW's epsilon
    experts          whether they belong to experts, which expert-parallel ranks do not share
    fp32             whether passes use fp32 weights, even if other weights have 16 bits
    decoupled        whether --decoupled-lr is their learning rate
    unit             number of the unit that contains all of them (zero_plan._unit)
    """

    frozen: bool = False
    spared: bool = True
    full_parameters: bool = False
    tied: bool = False
    lr_scale: float = 1.0
    eps_scale: float = 1.0
    experts: bool = False
    fp32: bool = False
    decoupled: bool = False
    unit: int = 0


@dataclass(eq=False)
class BucketPlan:
    """Parameters whose gradients are summed, and whose weights are sent, as one flat tensor each.

    kind      properties that its parameters share
    members   indices of its parameters, in the reverse of the order in which forward passes first
              use them
    elements  number of their elements on this rank, without padding of the bucket
    vectors   whether all of them are norms or biases
    """

    kind: BucketKind
    members: list[int]
    elements: int = 0
    vectors: bool = True

    def padded(self, ranks: int) -> int:
        """Return the number of elements with padding that lets `ranks` ranks own equal shares."""
        each = ALIGNMENT * ranks
        return -(-max(self.elements, 1) // each) * each


@dataclass(frozen=True)
class BucketRule:
    """Settings that determine a run's buckets.

    limit            maximum number of elements in a bucket of several parameters
    full_parameters  function that tells whether the optimizer needs a full parameter
    scales           muP's factors on learning rate and epsilon
    decouples        whether word embedding and output layer have a learning rate of their own
    settings         the settings that determine `full_parameters` and `scales`: rules with the
                     same limit and settings are equal
    """

    limit: float = math.inf
    full_parameters: Callable[[Sharding], bool] = field(default=lambda record: False, compare=False)
    scales: Scales = field(default=lambda record: (1.0, 1.0), compare=False)
    decouples: bool = False
    settings: Hashable = None

    def plan(
        self,
        records: Sequence[Sharding],
        units: Sequence[Hashable] | None = None,
    ) -> list[BucketPlan]:
        """Divide parameters into buckets, in the order of the optimizer's groups.

        records  shardings of a rank's parameters, in the order in which forward passes first use
                 them
        units    unit of each parameter; no bucket spans two units. By default there is one unit

        Buckets of a kind are filled in the reverse of the order of `records`, which is roughly the
        order in which a backward pass produces gradients. Only a bucket with a single parameter
        exceeds the limit. The tied embedding has a bucket of its own, so that the first and the
        last stage shard it over their data-parallel ranks in the same way. If no parameters train,
        an empty bucket is added: an optimizer needs a group.
        """
        numbers: dict[Hashable, int] = {}
        for unit in units or ():
            numbers.setdefault(unit, len(numbers))
        kinds: dict[BucketKind, list[BucketPlan]] = {}
        known: dict[int, tuple[BucketKind, int, bool]] = {}  # layers share records
        for number in reversed(range(len(records))):
            record = records[number]
            if id(record) not in known:
                is_vector = record.kind == "vector"
                known[id(record)] = self._kind(record), record.elements, is_vector
            kind, elements, is_vector = known[id(record)]
            if units:
                kind = kind._replace(unit=numbers[units[number]])
            buckets = kinds.setdefault(kind, [BucketPlan(kind, [])])
            bucket = buckets[-1]
            if bucket.elements and bucket.elements + elements > self.limit and not record.tied:
                bucket = BucketPlan(kind, [])
                buckets.append(bucket)
            bucket.members.append(number)
            bucket.elements += elements
            bucket.vectors &= is_vector
        plans = [bucket for kind in sorted(kinds) for bucket in kinds[kind]]
        if all(bucket.kind.frozen for bucket in plans):
            plans.insert(0, BucketPlan(BucketKind(), []))
        return plans

    def _kind(self, record: Sharding) -> BucketKind:
        """Return the kind of a parameter's bucket, without its unit."""
        kind = BucketKind(tied=record.tied, experts=record.experts, fp32=record.fp32)
        if record.frozen:
            return kind._replace(frozen=True)
        lr_scale, eps_scale = self.scales(record)
        return kind._replace(
            spared=not record.decay,
            full_parameters=self.full_parameters(record),
            lr_scale=lr_scale,
            eps_scale=eps_scale,
            decoupled=self.decouples and record.of_vocabulary,
        )


def bucket_limit(config: Config, ranks: int) -> float:
    """Return the maximum number of elements in a bucket over `ranks` data-parallel ranks.

    A single rank needs a limit only if 16-bit moments are widened, or offloaded state is fetched,
    one bucket after another.
    """
    if ranks == 1 and not (has_16_bit_moments(config) or config.engine.cpu_offload):
        return math.inf
    engine = config.engine
    return _bucket_elements(engine.zero_reduce_bucket_size, ranks, engine.zero_stage)


def bucket_rule(config: Config, ranks: int) -> BucketRule:
    """Return the rule for a configuration in which `ranks` data-parallel ranks share parameters."""
    wants = wants_full_parameters(config)

    def full_parameters(record: Sharding) -> bool:
        return wants is not None and bool(wants(record.name, record.global_shape))

    key = config.model, config.optimizer, config.pieces.optimizer
    decouples = config.optimizer.decouples
    limit = bucket_limit(config, ranks)
    return BucketRule(limit, full_parameters, mup_scales(config), decouples, key)


def _bucket_elements(most: int, ranks: int, zero_stage: int) -> int:
    """Return the size, in elements, of buckets over `ranks` data-parallel ranks.

    It is a million per rank, so that each rank's message is worth its latency (4 MB in fp32) and a
    checkpoint has few shards. For up to four ranks it is 4 million, small enough for many buckets
    to be in flight during a backward pass. It never exceeds `most`, unless that is 0.

    With ZeRO stage 3 it is four million per rank: a bucket never spans two calls, and all weights
    of a call are gathered together, so that smaller messages would save no memory, but cost the
    latency of a ring over all nodes several times for each layer.
    """
    per_rank = _PER_RANK_OF_A_CALL if zero_stage == 3 else _PER_RANK
    size = max(_SMALLEST, ranks * per_rank)
    return min(most, size) if most else size


def mup_scales(config: Config) -> Scales:
    """Return the function that maps a parameter to muP's factors on learning rate and epsilon.

    By width: Yang et al., arXiv 2203.03466, table 8 and appendix B.3. By depth: Dey et al., arXiv
    2505.01618, table 1 with alpha = 1, where Adam's rate does not depend on depth. SGD's rate is
    proportional to depth, because gradients in the layers contain the factor of the residual
    branches. Norms that the residual stream passes through have rates proportional to 1 / depth:
    each of them changes the stream, and their gradients do not contain that factor.
    Muon's updates should have the norm sqrt(outputs / inputs) (Yang et al., arXiv 2310.17813,
    section 3); the factor on their rate corrects the norm that --muon-scale-mode gives them. All
    other optimizers, including the user's own, are assumed to be like Adam: the size of an update
    does not depend on the size of the gradient.
    """
    model = config.model
    if not model.use_mup:
        return lambda record: (1.0, 1.0)
    on_stream = model.layer_norms
    kind = None if config.pieces.optimizer is not None else config.optimizer.optimizer
    sgd = kind == "sgd"
    mode = config.optimizer.muon_scale_mode

    def scales(s: Sharding) -> tuple[float, float]:
        hidden = s.kind == "hidden"
        outputs, inputs = s.growth
        branch = model.residual_scale if s.name.startswith("layers.") else 1.0
        eps = branch * model.mup_base_hidden_size / model.hidden_size
        module = f".{s.name}".split(".")[-2]  # "" if the user's own name has no module
        if model.apply_residual_connection_post_layernorm and module in on_stream:
            return outputs * branch if sgd else branch, eps
        if sgd:
            return outputs * (1.0 / inputs if hidden else inputs) / branch, eps
        if hidden and kind == "muon":
            base = muon_scale(mode, s.base_shape or s.global_shape)
            return math.sqrt(outputs / inputs) * base / muon_scale(mode, s.global_shape), eps
        return 1.0 / inputs if hidden else 1.0, eps

    return scales


def muon_scale(mode: str, shape: Sequence[int]) -> float:
    """Return the factor on Muon's orthogonal update of a matrix [.., rows, columns].

    Liu et al., arXiv 2502.16982, section 2.2 (spectral), Jordan et al. 2024 (shape_scaling),
    Pethick et al., arXiv 2502.07529 (unit_rms_norm).
    """
    rows, columns = shape[-2:]
    scale = {
        "spectral": max(rows, columns),
        "shape_scaling": max(1.0, rows / columns),
        "unit_rms_norm": rows / columns,
    }[mode]
    return math.sqrt(scale)
