"""The plan of ZeRO: which parameters are summed, updated and sent together.

Pure functions of the parameters' records and of settings. The engine runs the plan on tensors; the
planner adds up its bytes and seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from megatron.engine.optimizer_state import has_16_bit_moments, wants_whole
from megatron.parallel.sharding import Sharding

if TYPE_CHECKING:
    from megatron.config import Config

_SMALLEST = 4_000_000
_PER_RANK = 1_000_000

Scales = Callable[[Sharding], tuple[float, float]]
"""Function from a parameter to the factors of its learning rate and of its epsilon."""


class BucketKind(NamedTuple):
    """Properties that the parameters of a bucket share. An optimizer's groups are in its order.

    spared     from weight decay
    whole      whether the optimizer takes each parameter whole
    lr_scale   factor of the learning rate
    eps_scale  factor of AdamW's epsilon
    fp32       whether passes use the weights in fp32, also beside 16-bit weights
    unit       number of what the bucket may not go beyond (unit_of)
    """

    spared: bool = True
    whole: bool = False
    tied: bool = False
    lr_scale: float = 1.0
    eps_scale: float = 1.0
    experts: bool = False
    fp32: bool = False
    unit: int = 0


@dataclass
class BucketPlan:
    """Parameters whose gradients are summed, and whose weights are sent, as one flat tensor.

    members   numbers of its parameters, from the last one that a forward pass uses to the first
    elements  of all of them on this rank
    """

    kind: BucketKind
    members: list[int]
    elements: int = 0


@dataclass(frozen=True)
class BucketRule:
    """Settings of a run that decide about buckets.

    limit     elements at which a bucket is closed
    whole     whether the optimizer takes a parameter whole
    scales    muP's factors
    settings  that decide about `whole` and `scales`: rules of equal ones are equal
    """

    limit: float = math.inf
    whole: Callable[[Sharding], bool] = field(default=lambda record: False, compare=False)
    scales: Scales = field(default=lambda record: (1.0, 1.0), compare=False)
    settings: Hashable = None

    def plan(
        self, records: Sequence[Sharding], units: Sequence[Hashable] | None = None
    ) -> list[BucketPlan]:
        """Divide parameters into buckets, in the order of the optimizer's groups.

        records  of a rank's parameters, in the order in which forward passes use them first
        units    of each, see unit_of; by default one unit

        Buckets of a kind are filled in the reverse of that order, which is about the order in which
        a backward pass produces gradients. A bucket exceeds the limit only with a single parameter.
        The tied embedding is a bucket of its own, so that the first and the last stage divide it
        alike over their data-parallel ranks. Without parameters there is one empty bucket: an
        optimizer needs a group.
        """
        numbers: dict[Hashable, int] = {}
        for unit in units or ():
            numbers.setdefault(unit, len(numbers))
        kinds: dict[BucketKind, list[BucketPlan]] = {}
        for number, record in reversed(list(enumerate(records))):
            kind = BucketKind(
                not record.decay,
                self.whole(record),
                record.tied,
                *self.scales(record),
                record.experts,
                record.fp32,
                numbers[units[number]] if units else 0,
            )
            buckets = kinds.setdefault(kind, [BucketPlan(kind, [])])
            size = buckets[-1].elements + record.elements
            if buckets[-1].elements and size > self.limit and not record.tied:
                buckets.append(BucketPlan(kind, []))
            buckets[-1].members.append(number)
            buckets[-1].elements += record.elements
        plans = [bucket for kind in sorted(kinds) for bucket in kinds[kind]]
        return plans or [BucketPlan(BucketKind(), [])]


def bucket_limit(config: Config, ranks: int) -> float:
    """Return the elements at which buckets are closed that `ranks` data-parallel ranks share.

    A single rank needs buckets only where 16-bit moments are widened, or offloaded state arrives,
    one bucket after another.
    """
    if ranks == 1 and not (has_16_bit_moments(config) or config.engine.cpu_offload):
        return math.inf
    return bucket_elements(config.engine.zero_reduce_bucket_size, ranks)


def bucket_rule(config: Config, ranks: int) -> BucketRule:
    """Return the rule of a configuration whose `ranks` data-parallel ranks share a parameter."""
    wants = wants_whole(config)

    def whole(record: Sharding) -> bool:
        return wants is not None and bool(wants(record.name, record.global_shape))

    key = repr((config.model, config.optimizer)), config.pieces
    return BucketRule(bucket_limit(config, ranks), whole, mup_scales(config), key)


def send_order(plans: Sequence[BucketPlan]) -> list[BucketPlan]:
    """Sort buckets as backward passes complete them: that of the first parameter is the last."""
    return sorted(plans, key=lambda bucket: -min(bucket.members, default=0))


def unit_of(record: Sharding, zero_stage: int, stage: int, part: int = 0) -> Hashable:
    """Return what a parameter's bucket may not go beyond.

    With ZeRO stage 2 a bucket is of one pipeline stage, so that it is complete after a backward
    pass. With stage 3 a matrix is in a bucket with others of its layer, whose weights are gathered
    together.

    part  number of the layer within its stage, where the record's name does not tell
    """
    if zero_stage < 2:
        return ()
    if zero_stage == 2 or record.kind == "vector":
        return (stage,)
    return stage, part, *record.name.split(".")[:2]


def stage_in_effect(stage: int, ranks: int) -> int:
    """Return what ZeRO does where `ranks` ranks divide gradients.

    Alone, a rank would hold those of a pass beside its sums, all of them: stages 2 and 3 then do
    what stage 1 does.
    """
    return stage if ranks > 1 else min(stage, 1)


def bucket_elements(most: int, ranks: int) -> int:
    """Return the elements at which a bucket over `ranks` data-parallel ranks is closed.

    At most `most` unless 0. A million for each rank, so that each gets a message worth its latency
    (4 MB in fp32) and a checkpoint has few pieces; at least 4 million, where the ranks are few and
    many buckets can be in flight during a backward pass.
    """
    size = max(_SMALLEST, ranks * _PER_RANK)
    return min(most, size) if most else size


def mup_scales(config: Config) -> Scales:
    """Return the function from a parameter to muP's factors of its learning rate and of epsilon.

    By width: Yang et al., arXiv 2203.03466, table 8 and appendix B.3. By depth: Dey et al., arXiv
    2505.01618, table 1 with alpha = 1; with it, Adam's rate does not depend on depth. SGD's is
    proportional to it, because gradients in the layers have the factor of the residual branches.
    Norms through which the residual stream passes have rates in proportion to 1 / depth: all of
    them change it, and none has that factor.
    Muon's updates are to have the norm sqrt(outputs / inputs) (Yang et al., arXiv 2310.17813,
    section 3); they have that of --muon-scale-mode. All other optimizers, also the user's own, are
    taken to be like Adam: the size of an update does not depend on that of the gradient.
    """
    model = config.model
    if not model.use_mup:
        return lambda record: (1.0, 1.0)
    on_stream = model.layer_norms
    kind = None if config.pieces.optimizer is not None else config.optimizer.optimizer
    sgd, mode = kind == "sgd", config.optimizer.muon_scale_mode

    def scales(s: Sharding) -> tuple[float, float]:
        hidden = s.kind == "hidden"
        outputs, inputs = s.growth
        branch = model.residual_scale if s.name.startswith("layers.") else 1.0
        eps = branch * model.mup_base_hidden_size / model.hidden_size
        if model.apply_residual_connection_post_layernorm and s.name.split(".")[-2] in on_stream:
            return outputs * branch if sgd else branch, eps
        if sgd:
            return outputs * (1.0 / inputs if hidden else inputs) / branch, eps
        if hidden and kind == "muon":
            base = muon_scale(mode, s.base_shape or s.global_shape)
            return math.sqrt(outputs / inputs) * base / muon_scale(mode, s.global_shape), eps
        return 1.0 / inputs if hidden else 1.0, eps

    return scales


def muon_scale(mode: str, shape: Sequence[int]) -> float:
    """Return the factor of Muon's orthogonal update of a matrix [.., rows, columns].

    Liu et al., arXiv 2502.16982, section 2.2 (spectral), Jordan et al. 2024 (shape_scaling), Pethick
    et al., arXiv 2502.07529 (unit_rms_norm).
    """
    rows, columns = shape[-2:]
    scale = {
        "spectral": max(rows, columns),
        "shape_scaling": max(1.0, rows / columns),
        "unit_rms_norm": rows / columns,
    }[mode]
    return math.sqrt(scale)
