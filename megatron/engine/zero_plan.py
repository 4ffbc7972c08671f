"""ZeRO's plan: what each pass and the end of a step do with each bucket of parameters.

Rajbhandari et al., arXiv 1910.02054, with shards of two sizes (Wang et al., arXiv 2306.10209; Zhang
et al., arXiv 2205.00119). The plan depends only on settings, the parameters' shardings and the
modules that use them. The engine carries out the plan on tensors; the planner adds up its memory,
time and messages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from megatron.engine.buckets import BucketPlan, BucketRule
from megatron.errors import ConfigError
from megatron.parallel.sharding import Sharding

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.parallel.layout import Layout

IN_FLIGHT = 2
"""Maximum number of buckets whose gradients ZeRO stages 2 and 3 reduce at a time."""

REDUCED_ALREADY = (
    "the gradients of earlier micro-batches are being reduced already: call Engine.step() after "
    "every Executor.train(), or turn the overlap off with --no-overlap-grad-reduce"
)

# -- what is divided, and its messages -------------------------------------------------------------


class BucketOp(Enum):
    """Operation on a bucket. Messages overlap with later operations until their result is needed.

    GATHER         allocate the weights and gather them from the inner ranks (stage 3)
    FREE           free gathered weights (stage 3)
    ALLOCATE       allocate gradients (stages 2 and 3)
    REDUCE         sum gradients over the inner ranks, each of which gets its shard
    ACCUMULATE     add that shard to the sums of earlier micro-batches, and free the gradients
                   (stages 2 and 3)
    REDUCE_BEYOND  sum the shard over the ranks beyond the inner ones: each rank gets the sums that
                   its optimizer owns
    FETCH, STORE   copy optimizer state from or to host memory (--cpu-offload)
    UPDATE         run the optimizer on the elements that this rank owns
    RETURN         gather new weights from their owners
    """

    GATHER = "gather"
    FREE = "free"
    ALLOCATE = "allocate"
    REDUCE = "reduce"
    ACCUMULATE = "accumulate"
    REDUCE_BEYOND = "reduce beyond"
    FETCH = "fetch"
    STORE = "store"
    UPDATE = "update"
    RETURN = "return"


class BucketInstruction(NamedTuple):
    """Operation on a bucket.

    bucket  its number in the plan
    names   tensors of the state that a FETCH, UPDATE or STORE applies to; (): all
    """

    op: BucketOp
    bucket: int
    names: tuple[str, ...] = ()


class Hop(NamedTuple):
    """Collective of an instruction; an instruction's hops follow one another.

    kind     "reduce_scatter", "all_reduce" or "all_gather"
    ranks    group among ShardGroups: "inner", "outer" or "copies"
    divided  factor by which the collective's full tensor is smaller than the bucket
    """

    kind: str
    ranks: str
    divided: int


class ShardSizes(NamedTuple):
    """Numbers of ranks that share a parameter.

    inner           ranks that shard its gradients in stages 2 and 3, and its weights in stage 3
    states          ranks that shard its optimizer state
    gradient_ranks  ranks that sum its gradients
    """

    inner: int
    states: int
    gradient_ranks: int

    @functools.lru_cache(maxsize=1 << 12)  # noqa: B019 (sizes are values)
    def hops(self, op: BucketOp, divided_weights: bool = False) -> tuple[Hop, ...]:
        """Return the collectives of an instruction.

        divided_weights  whether passes gather the weights: new ones then stay sharded over the
                         inner ranks
        """
        inner, states, gradient_ranks = self
        outward = Hop("reduce_scatter", "outer", inner), states > inner
        summed = Hop("all_reduce", "copies", states), gradient_ranks > states
        from_outer = Hop("all_gather", "outer", inner), states > inner
        from_inner = Hop("all_gather", "inner", 1), inner > 1
        of_op: dict[BucketOp, list[tuple[Hop, bool]]] = {
            BucketOp.GATHER: [from_inner],
            BucketOp.REDUCE: [(Hop("reduce_scatter", "inner", 1), inner > 1)],
            BucketOp.REDUCE_BEYOND: [outward, summed],
            BucketOp.RETURN: [from_outer] if divided_weights else [from_outer, from_inner],
        }
        return tuple(hop for hop, needed in of_op.get(op, ()) if needed)


class Zero(NamedTuple):
    """ZeRO's stage and sizes.

    stage         the stage in effect
    sizes         numbers of ranks that share a parameter other than an expert's
    of_experts    numbers of ranks that share an expert's
    ahead, early  whether weights are gathered, and gradients sent, while passes run
    offload       whether the optimizer's state is in host memory
    weight_bytes, gradient_bytes  bytes per element
    """

    stage: int
    sizes: ShardSizes
    of_experts: ShardSizes
    ahead: bool
    early: bool
    offload: bool
    weight_bytes: int
    gradient_bytes: int

    @property
    def gradient_ranks(self) -> int:
        """Return the largest number of ranks that share a parameter."""
        return max(self.sizes.gradient_ranks, self.of_experts.gradient_ranks)

    def sizes_of(self, experts: bool) -> ShardSizes:
        """Return the sizes of experts, or of other parameters."""
        return self.of_experts if experts else self.sizes

    def divides_weights(self, bucket: BucketPlan) -> bool:
        """Return whether a bucket's weights are sharded outside of the passes that use them.

        Vectors have few weights, and a message for each layer would be small: they are not sharded.
        """
        inner = self.sizes_of(bucket.kind.experts).inner
        return self.stage == 3 and not bucket.vectors and inner > 1

    @property
    def divides_gradients(self) -> bool:
        """Return whether gradients have memory only while a pass computes and reduces them."""
        return self.stage > 1

    def hops(self, op: BucketOp, bucket: BucketPlan) -> tuple[Hop, ...]:
        """Return the collectives of an instruction on a bucket."""
        return self.sizes_of(bucket.kind.experts).hops(op, self.divides_weights(bucket))

    def bytes_of_weight(self, bucket: BucketPlan) -> int:
        """Return the bytes per element of a bucket's weights."""
        return 4 if bucket.kind.fp32 else self.weight_bytes

    def resident_weights(self, bucket: BucketPlan) -> float:
        """Return the bytes of weights that a rank holds for the whole run."""
        inner = self.sizes_of(bucket.kind.experts).inner
        divided = inner if self.divides_weights(bucket) else 1
        return self.bytes_of_weight(bucket) * bucket.elements / divided

    def resident_gradients(self, bucket: BucketPlan) -> float:
        """Return the bytes of gradient sums that a rank holds for the whole run."""
        inner = self.sizes_of(bucket.kind.experts).inner
        divided = inner if self.divides_gradients else 1
        return self.gradient_bytes * bucket.elements / divided

    def owned(self, bucket: BucketPlan) -> float:
        """Return the elements that a rank's optimizer owns."""
        return bucket.elements / self.sizes_of(bucket.kind.experts).states


def zero_of(config: Config, layout: Layout | None = None) -> Zero:
    """Return ZeRO's stage and sizes for a configuration.

    layout  layout of the job; without it, shards per node (-1) count as shards over all
            data-parallel ranks, unless planner.placement.over_nodes has replaced them
    """
    engine = config.engine
    precision = config.precision
    if layout is not None:
        gradient_ranks = layout.data
        tensor, experts = layout.tensor, layout.expert_ranks
        inner, states = layout.shard_sizes
    else:
        gradient_ranks = config.parallel.gradient_ranks
        tensor = config.parallel.tensor_model_parallel_size
        experts = config.parallel.expert_ranks
        inner = max(0, engine.zero_shard_size) or gradient_ranks
        states = max(0, engine.zero_state_shard_size) or gradient_ranks
    stage = stage_in_effect(engine.zero_stage, inner)
    sizes = ShardSizes(inner, states, gradient_ranks)
    of_experts = ShardSizes(*(max(1, ranks * tensor // experts) for ranks in sizes))
    if not stage:
        sizes, of_experts = (each._replace(inner=1, states=1) for each in (sizes, of_experts))
    return Zero(
        stage,
        sizes,
        of_experts,
        engine.overlap_param_gather,
        engine.overlap_grad_reduce,
        engine.cpu_offload,
        precision.weight_bytes,
        precision.gradient_bytes,
    )


def stage_in_effect(stage: int, ranks: int) -> int:
    """Return the stage that ZeRO follows if `ranks` ranks shard gradients.

    With a single rank, stages 2 and 3 act as stage 1: otherwise that rank would hold all gradients
    of a pass in addition to its sums.
    """
    return stage if ranks > 1 else min(stage, 1)


# -- passes ----------------------------------------------------------------------------------------


class ModuleCall(NamedTuple):
    """Call of a module in a forward pass.

    parameters  numbers of the parameters that it uses
    outlives    whether these are also used after the call, until the backward pass begins
    layer       whether it may be recomputed
    table       whether it looks parameters up: its backward pass does not need them
    """

    parameters: tuple[int, ...]
    outlives: bool = False
    layer: bool = False
    table: bool = False


FORWARD = "forward"
RECOMPUTE = "recompute"
BACKWARD = "backward"
"""Kinds of steps; RECOMPUTE is a forward pass that the backward pass repeats. The RECOMPUTE of a
group's last layer comes before those of the others, since autograd reaches that layer first, but
computes nothing: the layer is recomputed within its BACKWARD."""


class ModulePass(NamedTuple):
    """Step of a pass: one module, with the instructions around it.

    kind    FORWARD, RECOMPUTE or BACKWARD
    call    number among the calls of the stage
    before  instructions that have to be complete when it begins
    beside  instructions that begin when it does and overlap with it
    after   instructions that begin when it has ended
    """

    kind: str
    call: int
    before: tuple[BucketInstruction, ...] = ()
    beside: tuple[BucketInstruction, ...] = ()
    after: tuple[BucketInstruction, ...] = ()


class Reductions:
    """A step's gradients on the way to their owners: which instructions follow which event.

    Buckets are sent in order, so that all ranks post the same messages: with stages 2 and 3, the
    buckets of a pipeline stage are sent once per backward pass of the stage, otherwise once per
    step. With overlap, a bucket is sent as soon as it and all before it are complete.

    flying  buckets whose REDUCE is in flight
    """

    def __init__(self, plan: ZeroPlan) -> None:
        self._plan = plan
        self.flying: deque[int] = deque()
        self._sent: dict[int, int] = {}
        self._complete = set[int]()
        self._final = set[int]()

    @property
    def state(self) -> object:
        """Return everything that later instructions depend on."""
        fields = self._sent.items(), self._complete, self._final
        return tuple(self.flying), *(tuple(sorted(one)) for one in fields)

    def copy(self) -> Reductions:
        """Return an independent copy."""
        made = Reductions(self._plan)
        made.flying = self.flying.copy()
        made._sent = self._sent.copy()
        made._complete = self._complete.copy()
        made._final = self._final.copy()
        return made

    def use(self, bucket: int) -> Iterator[BucketInstruction]:
        """Prepare the memory of a bucket before something is added to its gradients."""
        while bucket in self.flying:
            yield from self._arrive()
        yield BucketInstruction(BucketOp.ALLOCATE, bucket)

    def complete(self, bucket: int, final: bool) -> Iterator[BucketInstruction]:
        """Note that a bucket has all gradients of a pass; `final`: it is the step's last pass.

        If a step's passes count separately, a bucket that passes of several stages add to is only
        sent when a pass of its stage ends, and never as the last time: the weight gradients of
        another stage may follow.
        """
        if bucket in self._plan.of_several_stages:
            return
        self._complete.add(bucket)
        if not self._plan.zero.early:
            return
        stage = self._plan.stage_of(bucket)
        while (following := self._following(stage)) in self._complete:
            yield from self._send_next(stage, following, final)

    def was_sent(self, bucket: int) -> bool:
        """Return whether a bucket was sent in this pass."""
        stage = self._plan.stage_of(bucket)
        return bucket in self._plan.order_of(stage)[: self._sent.get(stage, 0)]

    def pass_ends(self, stage: int, final: bool = False) -> Iterator[BucketInstruction]:
        """Send the buckets that a backward pass has not sent."""
        while (following := self._following(stage)) is not None:
            if self._plan.zero.divides_gradients:
                yield from self.use(following)
            last = final and following not in self._plan.of_several_stages
            yield from self._send_next(stage, following, last)
        if self._plan.zero.divides_gradients:  # otherwise a step's passes count as one
            self._sent.pop(stage, None)
            self._complete.difference_update(self._plan.order_of(stage))

    def _send_next(self, stage: int, bucket: int, final: bool) -> Iterator[BucketInstruction]:
        self._sent[stage] = self._sent.get(stage, 0) + 1
        yield from self.send(bucket, final)

    def send(self, bucket: int, final: bool) -> Iterator[BucketInstruction]:
        """Send a bucket; `final`: REDUCE_BEYOND follows when REDUCE has arrived.

        Raises ConfigError for a bucket that has already been sent with `final` in this step.
        """
        if bucket in self._final:
            raise ConfigError(REDUCED_ALREADY)
        while len(self.flying) >= self._plan.in_flight(bucket):
            yield from self._arrive()
        if final:
            self._final.add(bucket)
        yield BucketInstruction(BucketOp.REDUCE, bucket)
        if self._plan.reduced_by_message[bucket]:
            self.flying.append(bucket)
        else:
            yield from self._arrived(bucket)

    def step_ends(self) -> Iterator[BucketInstruction]:
        """Finish all sums on their owners."""
        while self.flying:
            yield from self._arrive()
        for bucket in self._plan.order:
            if bucket not in self._final:
                yield BucketInstruction(BucketOp.REDUCE_BEYOND, bucket)

    def _following(self, stage: int) -> int | None:
        order = self._plan.order_of(stage)
        sent = self._sent.get(stage, 0)
        return order[sent] if sent < len(order) else None

    def _arrive(self) -> Iterator[BucketInstruction]:
        yield from self._arrived(self.flying.popleft())

    def _arrived(self, bucket: int) -> Iterator[BucketInstruction]:
        if self._plan.zero.divides_gradients:
            yield BucketInstruction(BucketOp.ACCUMULATE, bucket)
        if bucket in self._final:
            yield BucketInstruction(BucketOp.REDUCE_BEYOND, bucket)


@dataclass(frozen=True, eq=False)
class ZeroPlan:
    """Everything that ZeRO does on a rank.

    zero        ZeRO's stage and sizes
    buckets     in the order of the optimizer's groups; frozen ones come last
    first_uses  stage and call in which each parameter is first used
    calls       calls of each stage, in the order of a forward pass
    recomputed  for each stage, sizes of the groups of layers that the backward pass recomputes,
                starting at its first layer
    sweeps      passes of the optimizer's update over buckets of full parameters: names of the state
                that each needs; (): all
    """

    zero: Zero
    buckets: tuple[BucketPlan, ...]
    first_uses: tuple[tuple[int, int], ...]
    calls: Mapping[int, tuple[ModuleCall, ...]]
    recomputed: Mapping[int, tuple[int, ...]]
    sweeps: tuple[tuple[str, ...], ...] = ((),)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Buckets that train, in the order in which backward passes complete them."""
        return tuple(n for n in self.return_order[::-1] if not self.buckets[n].kind.frozen)

    @functools.cached_property
    def return_order(self) -> tuple[int, ...]:
        """All buckets, in the order in which forward passes need them."""
        firsts = [min(bucket.members, default=0) for bucket in self.buckets]
        return tuple(sorted(range(len(firsts)), key=lambda n: (firsts[n], -n)))

    @functools.cached_property
    def bucket_of(self) -> Mapping[int, int]:
        """Bucket of each parameter, by number."""
        return {member: n for n, bucket in enumerate(self.buckets) for member in bucket.members}

    def stage_of(self, bucket: int) -> int:
        """Return the stage whose passes complete a bucket; below ZeRO-2, 0 for all buckets."""
        return self._stages[bucket] if self.zero.divides_gradients else 0

    @functools.cached_property
    def _stages(self) -> tuple[int, ...]:
        some = min(self.calls, default=0)  # for a bucket without parameters
        firsts = (bucket.members[:1] for bucket in self.buckets)
        return tuple(self.first_uses[first[0]][0] if first else some for first in firsts)

    @functools.cached_property
    def reduced_by_message(self) -> tuple[bool, ...]:
        """For each bucket, whether its reduction is a message."""
        return tuple(bool(self.zero.hops(BucketOp.REDUCE, bucket)) for bucket in self.buckets)

    @functools.cached_property
    def of_several_stages(self) -> frozenset[int]:
        """Buckets with a parameter that several stages of this rank use: a tied embedding.

        Below ZeRO-2 there are none: a step's passes count as one.
        """
        if not self.zero.divides_gradients:
            return frozenset()
        used = Counter[int]()
        for calls in self.calls.values():
            used.update({number for call in calls for number in call.parameters})
        return frozenset(self.bucket_of[number] for number, stages in used.items() if stages > 1)

    @functools.cached_property
    def _orders(self) -> Mapping[int, tuple[int, ...]]:
        orders: dict[int, list[int]] = {}
        for bucket in self.order:
            orders.setdefault(self.stage_of(bucket), []).append(bucket)
        return {stage: tuple(order) for stage, order in orders.items()}

    def order_of(self, stage: int) -> tuple[int, ...]:
        """Return the buckets that are sent during or after a stage's backward pass, in order."""
        return self._orders.get(stage, ())

    def in_flight(self, bucket: int) -> float:
        """Return how many reductions may be in flight once that of a bucket has begun.

        Below ZeRO-2 any number, but only one if reductions have a second hop: it then begins before
        the first hop of the next reduction.
        """
        if self.zero.divides_gradients:
            return IN_FLIGHT
        return 1 if self.zero.hops(BucketOp.REDUCE_BEYOND, self.buckets[bucket]) else math.inf

    @functools.cached_property
    def _divided(self) -> frozenset[int]:
        """Buckets whose weights passes gather."""
        numbered = enumerate(self.buckets)
        return frozenset(n for n, bucket in numbered if self.zero.divides_weights(bucket))

    def gathered(self, stage: int, call: int) -> tuple[int, ...]:
        """Return the buckets that a call needs and that have to be gathered for it."""
        if not self._divided:
            return ()
        parameters = self.calls[stage][call].parameters
        buckets = dict.fromkeys(self.bucket_of[p] for p in parameters)
        return tuple(n for n in buckets if n in self._divided)

    # -- passes ------------------------------------------------------------------------------------

    def forward(self, stage: int, training: bool = True) -> tuple[ModulePass, ...]:
        """Return the steps of a forward pass; `training`: a backward pass follows."""
        return self._passes[stage][0 if training else 1]

    def backward(self, stage: int, final: bool = False) -> tuple[ModulePass, ...]:
        """Return the steps of a backward pass; `final`: no forward pass follows in this step.

        The reduction of gradients is not included: see `reducing`.
        """
        return self._passes[stage][3 if final else 2]

    def reducing(self, stage: int, final: bool, sums: Reductions) -> tuple[ModulePass, ...]:
        """Return the steps of a backward pass with the reduction of gradients.

        sums  state after the earlier passes of this step; it advances by this pass
        """
        steps = list(self.backward(stage, final))
        if not (self.zero.divides_gradients or (final and self.zero.early)):
            return tuple(steps)
        final = final and self.zero.early
        for n, step in enumerate(steps):
            after = list(step.after)
            if step.kind == BACKWARD:
                for bucket in self._completed_by[stage].get(step.call, ()):
                    after += sums.complete(bucket, final)
            if self.zero.divides_gradients and n == len(steps) - 1:
                ends = sums.pass_ends(stage, final)
                after += (one for one in ends if one.op != BucketOp.ALLOCATE)
            steps[n] = step._replace(after=tuple(after))
        return tuple(steps)

    def end(self, sums: Reductions) -> Iterator[BucketInstruction]:
        """Yield the instructions after the passes of a step."""
        if not self.zero.divides_gradients:
            yield from sums.pass_ends(0, final=True)
        yield from sums.step_ends()
        yield from self.updates()
        for bucket in self.return_order:
            if not self.buckets[bucket].kind.frozen:
                yield BucketInstruction(BucketOp.RETURN, bucket)

    def updates(self) -> Iterator[BucketInstruction]:
        """Yield the optimizer's update, bucket by bucket, with transfers of offloaded state."""
        trained = [n for n, bucket in enumerate(self.buckets) if not bucket.kind.frozen]
        full = [n for n in trained if self.buckets[n].kind.full_parameters]
        uses: list[Use] = [(n, ()) for n in trained if n not in full]
        uses += [(n, names) for names in self.sweeps for n in full]
        if self.zero.offload:
            return streamed(uses)
        return (BucketInstruction(BucketOp.UPDATE, *use) for use in uses)

    @functools.cached_property
    def _passes(self) -> Mapping[int, tuple[tuple[ModulePass, ...], ...]]:
        """Passes of each stage: forward in training, forward alone, backward, last backward."""
        passes = {}
        for stage, calls in self.calls.items():
            forward = [(FORWARD, call) for call in range(len(calls))]
            backward = list(self._backward_order(stage))
            split = len(forward)
            end = len(forward) + len(backward)
            alone = self._with_weights(stage, forward)
            last = self._with_weights(stage, forward + backward)
            steady = last
            if self._divided:
                steady = self._with_weights(stage, forward + backward + forward)
            passes[stage] = last[:split], alone, steady[split:end], last[split:]
        return passes

    @functools.cached_property
    def groups(self) -> Mapping[int, Mapping[int, tuple[int, ...]]]:
        """Calls that are recomputed together, by stage and by the last of them."""
        by_last = {}
        for stage, calls in self.calls.items():
            layers = iter([n for n, call in enumerate(calls) if call.layer])
            groups = [tuple(itertools.islice(layers, n)) for n in self.recomputed.get(stage, ())]
            by_last[stage] = {group[-1]: group for group in groups if group}
        return by_last

    def _backward_order(self, stage: int) -> Iterator[tuple[str, int]]:
        """Yield the kinds and calls of a backward pass, in order.

        With ZeRO-3, whose pipeline has one stage, it ends at the first call with trained
        parameters.
        """
        calls = self.calls[stage]
        trained = (
            number
            for number, call in enumerate(calls)
            if any(not self.buckets[self.bucket_of[p]].kind.frozen for p in call.parameters)
        )
        first = next(trained, len(calls)) if self.zero.stage == 3 else 0
        for call in reversed(range(first, len(calls))):
            group = self.groups[stage].get(call, ())
            yield from ((RECOMPUTE, member) for member in (*group[-1:], *group[:-1]))
            yield BACKWARD, call

    def _with_weights(self, stage: int, runs: Sequence[tuple[str, int]]) -> tuple[ModulePass, ...]:
        """Return the steps of consecutive passes, with instructions that gather and free weights.

        A call's weights are gathered for its forward pass and again for its backward pass; those
        gathered for its recomputation are kept until then. With overlap, the weights of a call are
        gathered during the previous call that gathers any.
        """
        here = set[int]()
        steps = list[ModulePass]()
        gathers = list[int]()
        for n, (kind, number) in enumerate(runs):
            call = self.calls[stage][number]
            needed = self.gathered(stage, number)
            if kind == BACKWARD and call.table:
                needed = ()
            missing = [bucket for bucket in needed if bucket not in here]
            here.update(needed)
            stays = kind == RECOMPUTE or (kind == FORWARD and call.outlives)
            freed = () if stays else needed
            here.difference_update(freed)
            before, after = (
                tuple(BucketInstruction(op, bucket) for bucket in buckets)
                for op, buckets in ((BucketOp.GATHER, missing), (BucketOp.FREE, freed))
            )
            if missing and gathers and self.zero.ahead:
                steps[gathers[-1]] = steps[gathers[-1]]._replace(beside=before)
            if missing:
                gathers.append(n)
            steps.append(ModulePass(kind, number, before, (), after))
        return tuple(steps)

    @functools.cached_property
    def _completed_by(self) -> Mapping[int, Mapping[int, list[int]]]:
        """Buckets that have all their gradients after a call's backward pass, by stage and call."""
        completed: dict[int, dict[int, list[int]]] = {stage: {} for stage in self.calls}
        for stage, calls in self.calls.items():
            first = dict[int, int]()
            for number, call in reversed(list(enumerate(calls))):
                first |= dict.fromkeys((self.bucket_of[p] for p in call.parameters), number)
            for bucket in self.order:
                if bucket in first and self._stages[bucket] == stage:
                    completed[stage].setdefault(first[bucket], []).append(bucket)
        return completed


Use = tuple[int, tuple[str, ...]]
"""Bucket that an update uses, and names of the state; (): all."""


def streamed(uses: Sequence[Use]) -> Iterator[BucketInstruction]:
    """Yield the updates of offloaded state.

    During an UPDATE the state of the next use arrives and the state of the previous use leaves,
    which takes two sets of tensors. State that an UPDATE changes is not fetched for the next use
    before it has been stored.
    """
    fetched = 0
    for now, (bucket, names) in enumerate(uses):
        for ahead in (now, now + 1):
            following = uses[ahead : ahead + 1]
            if ahead < fetched or not following:
                continue
            ((other, next_names),) = following
            shares = not names or not next_names or not set(names).isdisjoint(next_names)
            if ahead == now or other != bucket or not shares:
                yield BucketInstruction(BucketOp.FETCH, other, next_names)
                fetched = ahead + 1
        yield BucketInstruction(BucketOp.UPDATE, bucket, names)
        yield BucketInstruction(BucketOp.STORE, bucket, names)


def zero_plan(
    zero: Zero,
    rule: BucketRule,
    records: Sequence[Sharding],
    calls: Mapping[int, Sequence[ModuleCall]],
    recomputed: Mapping[int, Sequence[int]],
    sweeps: Iterable[tuple[str, ...]] = ((),),
) -> ZeroPlan:
    """Return a rank's plan.

    records  shardings of its parameters, in the order in which forward passes first use them
    calls    by stage; a parameter without a call counts as part of the rank's first stage

    recomputed, sweeps  see ZeroPlan
    """
    first: dict[int, tuple[int, int]] = {}
    for stage, of_stage in calls.items():
        for number, call in enumerate(of_stage):
            for parameter in call.parameters:
                first.setdefault(parameter, (stage, number))
    some = min(calls, default=0), 0
    first_uses = [first.get(n, some) for n in range(len(records))]
    units = [
        _unit(record, zero.stage, *use) for record, use in zip(records, first_uses, strict=True)
    ]
    return ZeroPlan(
        zero,
        tuple(rule.plan(records, units)),
        tuple(first_uses),
        {stage: tuple(of_stage) for stage, of_stage in calls.items()},
        {stage: tuple(groups) for stage, groups in recomputed.items()},
        tuple(sweeps),
    )


def _unit(record: Sharding, zero_stage: int, stage: int, call: int) -> Hashable:
    """Return the unit within which a parameter's bucket stays.

    With ZeRO stage 2 it is a pipeline stage, so that a bucket is complete after a backward pass.
    With stage 3 this applies only to vectors: a matrix shares a bucket only with other matrices of
    its call, whose weights are gathered together.
    """
    if zero_stage < 2:
        return ()
    if zero_stage == 2 or record.kind == "vector":
        return (stage,)
    return stage, call
