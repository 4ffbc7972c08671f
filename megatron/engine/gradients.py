"""Gradients between the backward passes and the optimizer's step.

They are summed in flat buckets and reduced over ranks.

Every parameter that trains has an accumulator in its bucket (parallel/gradient_accumulator.py).
With overlap, a complete bucket is sent to its owners while the backward pass continues. Several
ranks of a model-parallel group may hold terms of one sum; these are added up after the
data-parallel reduction, when each rank adds up only the elements that it owns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.engine.buckets import BucketPlan
from megatron.engine.copies import FirstGradients, digest
from megatron.engine.zero_plan import (
    REDUCED_ALREADY,
    BucketInstruction,
    BucketOp,
    Hop,
    ModuleCall,
    Reductions,
    ShardSizes,
    Zero,
    ZeroPlan,
)
from megatron.errors import ConfigError
from megatron.parallel.collectives import (
    all_reduce,
    all_reduce_async,
    reduce_scatter_into_async,
    start,
)
from megatron.parallel.gradient_accumulator import GradientAccumulator
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Group, ShardGroups, Topology


class Gradients:
    """Gradient sums of this rank's parameters, reduced according to ZeRO's plan.

    numbered  buckets of the plan, frozen ones included
    terms     which gradients are terms of a sum over the tensor ranks
    direct    whether layers may add weight gradients to the sums themselves

    A bucket is complete once each of its parameters has received all contributions of a step.
    The first step counts the contributions per micro-batch. Nothing overlaps in that step, or in
    any other step up to the first that changes the weights (`counts`). Schedules that split the
    backward pass, shared weights and layers that pass their gradient to autograd need no special
    treatment. Buckets are sent in their order, so that all ranks post the same messages, even if a
    parameter gets no gradient: its bucket and the later ones wait for `reduce`.

    buckets  the buckets that train, in the order in which they are sent
    local    see Engine.local_gradients
    counted  whether a step has changed the weights
    first    gradients of the first step that changed the weights, until they are checked; None
             without tensor parallelism
    """

    def __init__(
        self,
        plan: ZeroPlan,
        numbered: Sequence[Bucket],
        topology: Topology,
        terms: Terms,
        direct: bool,
    ) -> None:
        self._plan = plan
        self._numbered = numbered
        self.buckets = [numbered[number] for number in plan.order]
        self.local = False
        self.counted = False
        self.first: FirstGradients | None = None
        self._looked: FirstGradients | None = None
        self._topology = topology
        self._terms = terms
        zero = plan.zero
        self._counting = zero.divides_gradients or (zero.early and zero.gradient_ranks > 1)
        self._accumulators: dict[torch.nn.Parameter, GradientAccumulator] = {}
        self._bucket_of: dict[torch.nn.Parameter, int] = {}
        added = self._added if self._counting else None
        for number in plan.order:
            bucket = numbered[number]
            for p in bucket.parameters:
                accumulator = GradientAccumulator(p, bucket.gradient(p), added, direct)
                p.gradient_accumulator = accumulator  # type: ignore[attr-defined]
                p.register_post_accumulate_grad_hook(to_accumulator)
                self._accumulators[p] = accumulator
                self._bucket_of[p] = number
        # owned ranges of gradients that are terms; the first step shows which they are
        self._partial: list[torch.Tensor] = []
        # the same for parameters that several neighbouring tensor ranks hold, by number of ranks
        shared: dict[int, list[torch.nn.Parameter]] = {}
        for p in self._accumulators:
            if (copies := sharding_of(p).copies) > 1:
                shared.setdefault(copies, []).append(p)
        self._shared = {n: owned_gradients(self.buckets, some) for n, some in shared.items()}
        tied = [p for p in self._accumulators if sharding_of(p).tied]
        self._tied = owned_gradients(self.buckets, tied)
        self._sums = Reductions(plan)
        # messages of each bucket's REDUCE, and the transfers of REDUCE_BEYOND that have begun
        self._works: dict[int, list[Any]] = {}
        self._beyond: Begun = deque()
        self._micro_batches = 0  # of the current step; 0: not announced
        # contributions per micro-batch; empty until the first step is over
        self._per_micro_batch: dict[torch.nn.Parameter, int] = {}
        self._seen = dict.fromkeys(self._accumulators, 0)
        # number of incomplete parameters of each bucket; empty: nothing is sent early
        self._missing: dict[int, int] = {}

    # -- while backward passes run -----------------------------------------------------------------

    def begin(self, micro_batches: int) -> None:
        """Announce the backward passes of this many micro-batches; `reduce` follows them.

        Raises ConfigError, on every rank, for a second call before `reduce` if the overlap may
        already have sent sums.
        """
        if self._missing:
            raise ConfigError(REDUCED_ALREADY)
        self._micro_batches += micro_batches
        if self._counting and self._per_micro_batch and self.counted:
            self._missing = self._parameters_of_buckets()

    def _parameters_of_buckets(self) -> dict[int, int]:
        return {number: len(self._numbered[number].parameters) for number in self._plan.order}

    def pass_ends(self, stage: int) -> None:
        """Note that a pipeline stage's backward pass has ended."""

    def collect(self) -> None:
        """Collect gradients that were put into `.grad` without autograd, so that no hook ran."""
        for p in self._accumulators:
            if p.grad is not None:
                to_accumulator(p)

    def _added(self, p: torch.nn.Parameter) -> None:
        self._seen[p] += 1
        if not self._missing:
            return
        due = self._per_micro_batch[p] * self._micro_batches
        if self._seen[p] < due:
            return
        number = self._bucket_of[p]
        if self._sums.was_sent(number):
            raise too_many(p, due, self._micro_batches)
        if self._seen[p] == due:
            self._missing[number] -= 1
            if not self._missing[number]:
                self._run(self._sums.complete(number, final=True))

    @torch.no_grad()
    def _run(self, instructions: Iterable[BucketInstruction]) -> None:
        """Carry out instructions of the plan."""
        for op, number, _ in instructions:
            if op is BucketOp.REDUCE:
                self._reduce(number)
            elif op is BucketOp.REDUCE_BEYOND:
                self._reduce_beyond(number)

    def _reduce(self, number: int) -> None:
        """Begin to sum a bucket over the inner ranks."""
        bucket = self._numbered[number]
        for p in bucket.parameters:
            self._accumulators[p].complete()  # a parameter without any gradient counts as zero
        self._works[number] = next(transfer(bucket, BucketOp.REDUCE), [])

    def _reduce_beyond(self, number: int) -> None:
        """Begin to sum a bucket over the ranks beyond the inner ones, if there are any."""
        bucket = self._numbered[number]
        if bucket.hops(BucketOp.REDUCE_BEYOND):
            self._arrive(number)
            messages = transfer(bucket, BucketOp.REDUCE_BEYOND)
            self._beyond.append((messages, next(messages)))

    def _arrive(self, number: int) -> None:
        for work in self._works.pop(number, ()):
            work.wait()

    def _drain(self) -> None:
        """Wait for all reductions that have begun."""
        for number in list(self._works):
            self._arrive(number)
        while self._beyond:
            messages, works = self._beyond.popleft()
            for work in works:
                work.wait()
            if following := next(messages, []):
                self._beyond.append((messages, following))

    # -- between backward passes and the optimizer's step ------------------------------------------

    def of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient sum of `p` in its shape.

        It is zero without contributions, and undefined once it has been sent.
        """
        return self._accumulators[p].complete()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the terms of all ranks; each rank then has the sums of the ranges that it owns."""
        if self._micro_batches and not self._per_micro_batch:
            self._per_micro_batch = {
                p: _for_each(n, self._micro_batches) for p, n in self._seen.items()
            }
        if not self.counted:
            self._look()
        self._send_all()
        self._over_model()

    def _send_all(self) -> None:
        self._run(self._sums.pass_ends(0, final=True))
        self._run(self._sums.step_ends())
        self._drain()

    def _over_model(self) -> None:
        """Sum the owned ranges of gradients whose terms are on several ranks of the model."""
        topology = self._topology
        embedding = topology.embedding
        # The rank at the other end of the pipeline may still be computing: start early, wait late.
        works = (
            []
            if embedding is None
            else [all_reduce_async(shard, embedding) for shard in self._tied]
        )
        if self._partial:
            joined = torch.cat(self._partial)  # one message
            all_reduce(joined, topology.tensor)
            torch._foreach_copy_(self._partial, joined.split([len(t) for t in self._partial]))
        for copies, shards in self._shared.items():
            if shards:
                _sum_among_neighbours(shards, copies, topology.tensor)
        for work in works:
            work.wait()

    def _look(self) -> None:
        """Find which gradients of the first step are terms, and keep digests for checking them."""
        if self._topology.tensor.size == 1:
            return
        partial = {
            p: self._terms.partial(p, self._was_used(p))
            for p in self._accumulators
            if sharding_of(p).dim is None
        }
        terms = [p for p, is_term in partial.items() if is_term]
        self._partial = owned_gradients(self.buckets, terms)
        if partial:
            self._looked = FirstGradients(partial, self._digests(partial))

    def _was_used(self, p: torch.nn.Parameter) -> bool:
        return not self._accumulators[p].fresh

    def _digests(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        return torch.stack([digest(self.of(p)) * self.of(p).any() for p in parameters])

    def counts(self) -> None:
        """Note that the step of the last `reduce` changed the weights: later steps may overlap."""
        if not self.counted:
            self.counted = True
            self.first = self._looked

    def renew(self) -> None:
        """Begin new sums, after the messages in flight have arrived.

        All data-parallel ranks must call this.
        """
        if self._missing:
            self._send_all()  # other ranks may have sent more or fewer, or be waiting for this one
        self._drain()
        self._sums = Reductions(self._plan)
        self._micro_batches = 0
        self._missing = {}
        for p, accumulator in self._accumulators.items():
            p.grad = None
            accumulator.renew()
            self._seen[p] = 0


_OF_NODES = {
    "megatron::linear_with_partial_gradient": True,
    "megatron::linear_with_whole_gradient": False,
}
"""Values of partial_gradient for the nodes in csrc/nodes, by name, which set no attribute."""


def too_many(p: torch.nn.Parameter, due: int, micro_batches: int) -> ConfigError:
    """Return the error for a gradient that arrives after the sum of the expected ones was sent."""
    return ConfigError(
        f"{sharding_of(p).name} got more than the {due} gradient(s) that {micro_batches} "
        "micro-batch(es) gave it in the first step, after their sum was sent: turn the overlap off "
        "with --no-overlap-grad-reduce if parameters are used in some micro-batches only"
    )


def _sum_among_neighbours(shards: list[torch.Tensor], copies: int, group: Group) -> None:
    """Sum flat tensors, in place, over each set of `copies` neighbouring ranks of a group.

    The group sends one message, with a row for each set: the sets need no groups of their own.
    """
    rows = shards[0].new_zeros(group.size // copies, sum(map(len, shards)))
    row = rows[group.rank // copies]
    torch.cat(shards, out=row)
    all_reduce(rows, group)
    torch._foreach_copy_(shards, row.split([len(shard) for shard in shards]))


_NEVER = 1 << 62


def _for_each(contributions: int, micro_batches: int) -> int:
    """Return the number of contributions per micro-batch.

    If it is 0 or not a whole number, return a number that is never reached.
    """
    count, rest = divmod(contributions, micro_batches)
    return count if count and not rest else _NEVER


def to_accumulator(p: torch.Tensor) -> None:
    """Move autograd's gradient to the accumulator: a hook that runs once autograd has set `.grad`.

    There is no gradient in `.grad` if a layer has added its own to the accumulator.
    """
    if p.grad is not None:
        p.gradient_accumulator.add(p.grad)  # type: ignore[attr-defined]
        p.grad = None


class Terms:
    """Kind of each parameter's gradient: whole, or a term of a sum over the tensor ranks.

    It is determined from the first autograd graph that a forward pass of each of `chunks` makes. A
    parameter that all tensor ranks hold gets its whole gradient on each of them if it works on
    values that are the same on all. If each rank has separate heads, features or tokens, the
    gradient on a rank is one term of a sum. The messages between the parameter and the loss decide
    which: an autograd function that communicates over the tensor group sets `ctx.partial_gradient`
    in its forward pass, True if the gradients that it returns are terms. Every other function
    keeps the kind of gradient that it gets.

    sequence_parallel  whether gradients that enter a chunk through its output are those of this
                       rank's tokens only
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
        """Follow all paths from the root of a graph to parameters."""
        seen = set[tuple[Any, bool]]()
        paths = [(root, partial)]
        while paths:
            path = paths.pop()
            if path in seen:
                continue
            seen.add(path)
            node, partial = path
            # The chunk's input is a leaf as well, and must not be kept.
            if isinstance(getattr(node, "variable", None), torch.nn.Parameter):
                self._seen.setdefault(node.variable, set()).add(partial)
            partial = getattr(node, "partial_gradient", _OF_NODES.get(node.name(), partial))
            paths += [(after, partial) for after, _ in node.next_functions if after is not None]

    def partial(self, p: torch.Tensor, used: bool) -> bool:
        """Return whether the gradients of `p` on the tensor ranks are terms of a sum.

        Its Sharding may declare this.

        used  whether it has a gradient

        Raises ConfigError if paths of both kinds lead to it, or if it is used and no path does.
        """
        sharding = sharding_of(p)
        if sharding.partial_gradient is not None or sharding.dim is not None:
            return bool(sharding.partial_gradient)
        seen = self._seen.get(p, set())
        if len(seen) > 1:
            raise ConfigError(
                f"the gradient of {sharding.name} is whole along one path from the loss and a term "
                "of a sum over the tensor ranks along another: pass values that all ranks hold "
                "into a tensor-parallel region through ColumnParallelLinear, or through an "
                "autograd function that sums their gradient over the ranks"
            )
        if used and not seen:
            raise ConfigError(
                f"{sharding.name} got a gradient, but no autograd graph leads from the output of "
                "its chunk to it: call the chunk itself, or declare with partial_gradient=True or "
                "False whether the gradients of the tensor ranks are terms of a sum"
            )
        return True in seen


# --- buckets
#
# A bucket that trains is a parameter group of the optimizer: its parameters, one after another.
# Each data-parallel rank owns an equal range of it: messages load all ranks equally, and neither
# the sum of a bucket nor its new weights wait for another bucket. DeepSpeed gets each rank's range
# as a parameter. With ShardGroups of two levels there are as many shards as inner ranks, and each
# shard is cut into as many ranges as there are outer ranks.

Messages = Iterator[list[Any]]
"""Hops of a transfer, each as its work handles. The next hop begins when it is requested; wait for
these handles first.
"""
Begun = deque[tuple[Messages, list[Any]]]
"""Transfers that have begun, in their order, each with the work handles of its current hop."""


@dataclass(eq=False)
class Bucket:
    """A bucket's parameters as flat tensors with the same layout; zeros pad only the end.

    parameters    the parameters, in the order of the flat tensors
    gradients     sums, in fp32 or bf16; without memory if the parameters are frozen  # [n]
    weights       the weights that passes use; the parameters are views of them  # [n]
    shards        the ranks that share the bucket
    sums          sums over micro-batches that this rank keeps, if `gradients` hold only one
                  micro-batch's and have no memory between backward passes  # [n / inner]
    weight_shard  the weights that this rank keeps, if `weights` have no memory outside of the
                  passes that need them  # [n / inner]
    frozen        whether the parameters do not train: only loading changes them
    starts        index of the first element of each parameter
    owned_...     the ranges that this rank owns  # [n / states]
    """

    parameters: Sequence[torch.nn.Parameter]
    gradients: torch.Tensor
    weights: torch.Tensor
    shards: ShardGroups
    sums: torch.Tensor | None = None
    weight_shard: torch.Tensor | None = None
    frozen: bool = False
    starts: dict[torch.nn.Parameter, int] = field(init=False)
    owned_gradients: torch.Tensor = field(init=False)
    owned_weights: torch.Tensor = field(init=False)
    _gradients: dict[torch.nn.Parameter, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        assert self.gradients.shape == self.weights.shape, (
            "gradients and weights are laid out alike"
        )
        assert len(self.weights) % self.ranks == 0, "ranks own equal parts"
        size = len(self.weights) // self.ranks

        def owned_range(full: torch.Tensor, shard: torch.Tensor | None) -> torch.Tensor:
            inner = self.inner_shard(full) if shard is None else shard
            return inner.narrow(0, self.shards.outer.rank * size, size)

        self.owned_gradients = owned_range(self.gradients, self.sums)
        self.owned_weights = owned_range(self.weights, self.weight_shard)
        self.starts = {}
        self._gradients = {}
        at = 0
        for p in self.parameters:
            self.starts[p] = at
            self._gradients[p] = self.gradients.narrow(0, at, p.numel()).view(p.shape)
            at += p.numel()

    @property
    def shard_sums(self) -> torch.Tensor:
        """Return `sums`, which a bucket that trains has in ZeRO stages 2 and 3."""
        assert self.sums is not None, "made by divide()"
        return self.sums

    @property
    def ranks(self) -> int:
        """Return the number of ranks that own different ranges."""
        return self.shards.states.size

    def hops(self, op: BucketOp) -> tuple[Hop, ...]:
        """Return the collectives of an instruction on this bucket."""
        shards = self.shards
        sizes = ShardSizes(shards.inner.size, self.ranks, self.ranks * shards.copies.size)
        return sizes.hops(op, self.weight_shard is not None)

    def inner_shard(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor [n] among the inner ranks."""
        size = len(full) // self.shards.inner.size
        return full.narrow(0, self.shards.inner.rank * size, size)

    def gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the full gradient sum of a parameter, in its shape."""
        return self._gradients[p]

    def owned(self) -> Iterator[tuple[torch.nn.Parameter, int, slice]]:
        """Yield each parameter of which this rank owns elements.

        Each comes with the index of the first such element, and with the slice of the rank's range
        where these elements are.
        """
        size = len(self.owned_weights)
        for p in self.parameters:
            begin = self.starts[p] - self.shards.shard_index * size
            start = max(begin, 0)
            stop = min(begin + p.numel(), size)
            if start < stop:
                yield p, start - begin, slice(start, stop)


@torch.no_grad()
def divide(
    parameters: Sequence[torch.nn.Parameter],
    plan: BucketPlan,
    zero: Zero,
    shards: ShardGroups,
    dtype: torch.dtype,
    sums: torch.dtype,
    device: torch.device,
) -> tuple[Bucket, torch.Tensor]:
    """Put the parameters of a plan's bucket into flat tensors; return the bucket.

    Also return this rank's exact fp32 shard. Values that do not exist yet (ParameterFactory.late)
    are drawn. Without parameters everything is padding.

    dtype, sums  dtypes of the weights and of the gradient sums
    """
    frozen = plan.kind.frozen
    inner = shards.inner
    n = plan.padded(shards.states.size)
    exact = torch.zeros(n, device=device)
    at = 0
    for p in parameters:
        late = getattr(p, "late", None)
        values = p if late is None else late()
        exact[at : at + p.numel()] = values.reshape(-1)
        at += p.numel()
    weights = exact.to(torch.float32 if plan.kind.fp32 else dtype, copy=True)
    shard = exact.chunk(shards.states.size)[shards.shard_index].clone()
    at = 0
    for p in parameters:
        p.data = weights[at : at + p.numel()].view(p.shape)
        at += p.numel()
    del exact
    owned_sums = weight_shard = None
    if zero.divides_gradients and not frozen:
        owned_sums = torch.zeros(n // inner.size, dtype=sums, device=device)
    if zero.divides_weights(plan):
        weight_shard = weights.chunk(inner.size)[inner.rank].clone()
    gradients = torch.zeros(1 if frozen else n, dtype=sums, device="meta" if frozen else device)
    gradients = gradients.expand(n)
    bucket = Bucket(parameters, gradients, weights, shards, owned_sums, weight_shard, frozen)
    if owned_sums is not None:
        free(gradients)
    if weight_shard is not None:
        free(weights)
    return bucket, shard


def free(flat: torch.Tensor) -> None:
    """Free the memory of a flat tensor; its views remain.

    Memory that has had a NumPy view cannot be freed and stays.
    """
    if flat.untyped_storage().resizable():
        flat.untyped_storage().resize_(0)


def allocate(flat: torch.Tensor) -> None:
    """Allocate the memory of a flat tensor if it was freed; its values are then undefined."""
    if not flat.untyped_storage().size():
        flat.untyped_storage().resize_(flat.nbytes)


def owned_gradients(
    buckets: Iterable[Bucket], parameters: Collection[torch.nn.Parameter]
) -> list[torch.Tensor]:
    """Return this rank's ranges of the gradients of some parameters.

    Adjacent ranges form one flat tensor.
    """
    gradients = list[torch.Tensor]()
    selected = set(parameters)
    for bucket in buckets:
        runs = list[slice]()
        for p, _, span in bucket.owned():
            if p not in selected:
                continue
            if runs and runs[-1].stop == span.start:
                span = slice(runs.pop().start, span.stop)
            runs.append(span)
        gradients += [bucket.owned_gradients[run] for run in runs]
    return gradients


def transfer(bucket: Bucket, op: BucketOp) -> Messages:
    """Carry out an instruction's collectives, one hop after another (Messages).

    After a reduction only the owners have the summed gradients; the rest of the tensor is
    undefined.
    """
    of_weights = op in (BucketOp.GATHER, BucketOp.RETURN)
    flat = bucket.gradients
    shard = bucket.sums
    owned = bucket.owned_gradients
    if of_weights:
        flat = bucket.weights
        shard = bucket.weight_shard
        owned = bucket.owned_weights
    share = bucket.inner_shard(flat) if shard is None else shard
    for hop in bucket.hops(op):
        group: Group = getattr(bucket.shards, hop.ranks)
        if hop.kind == "all_reduce":
            yield [all_reduce_async(owned, group)]
        elif hop.kind == "reduce_scatter":
            outward = hop.ranks == "outer"
            ends = (share, owned) if outward else (flat, bucket.inner_shard(flat))
            yield _reduce_scatter(*ends, group)
        else:
            ends = (share, owned) if hop.ranks == "outer" else (flat, share)
            yield [gather_into(*ends, group)]


def _reduce_scatter(flat: torch.Tensor, out: torch.Tensor, group: Group) -> list[Any]:
    if flat.device.type == "cpu":
        # gloo's reduce-scatter copies its input and sums all of it on all ranks; its reduce to one
        # rank works in place. Measured for 40 MB on two ranks: 52 ms against 12.5 ms.
        chunks = zip(flat.chunk(group.size), group.ranks, strict=True)
        return [
            start(b"reduce", group, chunk.nbytes, dist.reduce, chunk, dst=rank)
            for chunk, rank in chunks
        ]
    return [reduce_scatter_into_async(out, flat, group)]


def gather_into(full: torch.Tensor, shard: torch.Tensor, group: Group) -> Any:
    """Start gathering the shards of all ranks in a group; return the work handle."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return start(b"all_gather", group, full.nbytes, gather, full, shard)


_BLOCK = 1 << 16


def sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of flat tensors, an fp32 scalar, with torch's operators.

    Squares within a block are added up in fp32 and the blocks in fp64: torch takes eighteen times
    as long with fp64 throughout.
    """
    norms = []
    for t in tensors:
        aligned = len(t) // _BLOCK * _BLOCK
        norms.append(
            torch.linalg.vector_norm(t[:aligned].view(-1, _BLOCK), dim=1, dtype=torch.float32)
        )
        norms.append(torch.linalg.vector_norm(t[aligned:], dtype=torch.float32).view(1))
    return torch.cat(norms).double().square().sum().float()


User = tuple[torch.nn.Module, Sequence[torch.nn.Parameter]]
"""A module that a chunk calls, and the parameters that the call needs."""


def weight_users(chunk: torch.nn.Module) -> list[User]:
    """Return the calls of a chunk; a chunk without a method `weight_users` counts as one call."""
    users = getattr(chunk, "weight_users", None)
    return list(users()) if users else [(chunk, list(chunk.parameters()))]


def calls_of(chunk: torch.nn.Module, numbers: Mapping[torch.nn.Parameter, int]) -> list[ModuleCall]:
    """Describe a chunk's calls for ZeRO's plan; `numbers` has the number of each parameter."""
    layers = getattr(chunk, "layers", None)
    layers = set(layers) if isinstance(layers, torch.nn.ModuleList) else set()
    calls = []
    for module, parameters in weight_users(chunk):
        inside = set(module.parameters())
        outlives = any(p not in inside for p in parameters)
        table = bool(inside) and all(sharding_of(p).kind == "embedding" for p in inside)
        used = tuple(numbers[p] for p in parameters)
        calls.append(ModuleCall(used, outlives, module in layers, table))
    return calls


class WeightGather:
    """Gathers the weights for forward and backward passes on all data-parallel ranks.

    buckets  in the order in which forward passes need them: the same on all data-parallel ranks
    chunks   this rank's model
    overlap  whether `start` returns while weights are in flight; a module that is about to run then
             waits for its weights

    A chunk's `weight_users()` returns which modules it calls, and which parameters each needs:
    pairs of a module and its parameters, including those of its submodules. A chunk without that
    method waits for all its weights before it runs. A state_dict of a chunk or of one of its
    modules waits for all weights of this rank. Code that reads weights in another way must call
    `wait` first.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        chunks: Iterable[torch.nn.Module],
        overlap: bool,
    ) -> None:
        self._buckets = list(buckets)
        self._overlap = overlap
        self._begun: dict[Bucket, tuple[Messages, list[Any]]] = {}
        if not overlap or all(bucket.ranks == 1 for bucket in self._buckets):
            return
        of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for module, parameters in self._users(chunks):
            needed = list(dict.fromkeys(of[p] for p in parameters if p in of))
            module.register_forward_pre_hook(partial(self._wait, needed))

    def _users(self, chunks: Iterable[torch.nn.Module]) -> Iterator[User]:
        """Yield the modules that use weights, and those weights; any state_dict waits for all."""
        for chunk in chunks:
            yield from weight_users(chunk)
            for module in chunk.modules():
                module.register_state_dict_pre_hook(lambda *_: self.wait())

    @torch.no_grad()
    def start(self, frozen: bool = False) -> None:
        """Gather the weights; all data-parallel ranks call it after their shards have changed.

        `frozen`: whether to include frozen parameters.
        """
        for bucket in self._buckets:
            if bucket.frozen and not frozen:
                continue
            self._continue(bucket, transfer(bucket, BucketOp.RETURN))
        for bucket, (messages, works) in list(self._begun.items()):
            if (
                len(bucket.hops(BucketOp.RETURN)) > 1
            ):  # the last hop arrives while forward passes run
                for work in works:
                    work.wait()
                self._continue(bucket, messages)
        if not self._overlap:
            self.settle()

    def begin(self, micro_batches: int) -> None:
        """Announce the forward and backward passes of this many micro-batches."""

    def pass_ends(self) -> None:
        """Note that a backward pass has ended."""

    def each(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
        """Yield parameters whose weights have arrived, one after another."""
        self.wait()
        yield from parameters

    def settle(self) -> None:
        """Wait until the messages of the last `start` have arrived."""
        self._wait(list(self._begun))

    def wait(self) -> None:
        """Wait until all weights have arrived and can be read outside of forward passes."""
        self.settle()

    def _continue(self, bucket: Bucket, messages: Messages) -> None:
        self._begun.pop(bucket, None)
        works = next(messages, None)
        if works is not None:
            self._begun[bucket] = messages, works

    def _wait(self, buckets: Iterable[Bucket], *_: Any) -> None:
        if self._begun:
            for bucket in buckets:
                while bucket in self._begun:
                    messages, works = self._begun[bucket]
                    for work in works:
                        work.wait()
                    self._continue(bucket, messages)
