"""ZeRO stages 2 and 3 on tensors: passes allocate and free gradients, and in stage 3 also weights.

engine/zero_plan.py determines the order of these operations.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megatron.engine.copies import digest
from megatron.engine.gradients import (
    Bucket,
    Gradients,
    Terms,
    WeightGather,
    allocate,
    free,
    too_many,
    transfer,
    weight_users,
)
from megatron.engine.zero_plan import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    BucketInstruction,
    BucketOp,
    ModulePass,
    Reductions,
    ZeroPlan,
)
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.gradient_accumulator import within_backward
from megatron.parallel.topology import Topology

# -- gradients -------------------------------------------------------------------------------------


class ShardedGradients(Gradients):
    """Gradient sums of which this rank keeps a shard.

    A bucket is complete once its parameters have all contributions of a pass. The first pass
    assumes one from each call that uses a parameter, and counts the actual number. If it sent a sum
    in pieces, a resumed run would round otherwise than one that goes on. Nothing is sent in the
    first half of a split pass, since those of other micro-batches may follow before a second half. Sums over
    the ranks beyond the inner ones begin in the last pass if gradients are sent early, an earlier
    step has changed the weights (Gradients) and the passes were announced; else after it.
    """

    def __init__(
        self,
        plan: ZeroPlan,
        buckets: Sequence[Bucket],
        topology: Topology,
        terms: Terms,
        direct: bool,
        deferred: WeightGradients | None = None,
    ) -> None:
        super().__init__(plan, buckets, topology, terms, direct)
        self._deferred = deferred or WeightGradients()
        # contributions in the current pass, and in every pass: empty until the first pass is over
        self._new = dict.fromkeys(self._accumulators, 0)
        self._per_pass: dict[torch.nn.Parameter, int] = {}
        self._expected = self._uses()
        self._missing = self._parameters_of_buckets()
        self._ended = dict.fromkeys(plan.calls, 0)  # backward passes of each stage in this step
        self._empty = set(plan.order)  # buckets without sums so far
        self._used = set[torch.nn.Parameter]()
        for p, accumulator in self._accumulators.items():
            accumulator.before_use = partial(self._use, self._bucket_of[p])

    def _uses(self) -> dict[torch.nn.Parameter, int]:
        """Return how many calls of a pass use each parameter: two a tied embedding."""
        of_stages = (
            Counter(number for call in calls for number in call.parameters)
            for calls in self._plan.calls.values()
        )
        uses = Counter[int]()
        for of_stage in of_stages:
            uses |= of_stage
        return {
            p: uses[member] or 1
            for number in self._plan.order
            for member, p in zip(
                self._plan.buckets[number].members,
                self._numbered[number].parameters,
                strict=True,
            )
        }

    def begin(self, micro_batches: int) -> None:
        """Announce the backward passes of this many micro-batches.

        A gradient that arrives after the sums beyond the inner ranks have begun raises ConfigError.
        """
        self._micro_batches += micro_batches

    def _use(self, number: int) -> None:
        self._run(self._sums.use(number))

    def _added(self, p: torch.nn.Parameter) -> None:
        self._new[p] += 1
        due = self._per_pass.get(p) or self._expected[p]
        number = self._bucket_of[p]
        if self.local:
            return
        if self._new[p] > due and self._per_pass and self._sums.was_sent(number):
            raise too_many(p, due, 1)
        if self._new[p] != due:
            return
        self._missing[number] -= 1
        if not self._missing[number] and not self._deferred.deferring:
            self._run(self._sums.complete(number, self._is_last(self._plan.stage_of(number))))

    def _is_last(self, stage: int) -> bool:
        """Return whether sums beyond the inner ranks may begin in the stage's current pass."""
        last = self.counted and self._ended[stage] == self._micro_batches - 1
        return last and self._plan.zero.early

    def pass_ends(self, stage: int) -> None:
        """Send the buckets that a pipeline stage's backward pass has not sent."""
        order = self._plan.order_of(stage)
        if not order or self.local:
            return
        counts = {p: self._new[p] for n in order for p in self._numbered[n].parameters}
        self._run(self._sums.pass_ends(stage, self._is_last(stage)))
        if not self._per_pass.keys() >= counts.keys():
            for number in order:  # some were sent already when a second contribution arrived
                if any(not self._accumulators[p].fresh for p in self._numbered[number].parameters):
                    self._run(self._sums.send(number, final=False))
            self._per_pass |= {p: n or -1 for p, n in counts.items()}
        for number in order:
            self._missing[number] = len(self._numbered[number].parameters)
        for p in counts:
            self._new[p] = 0
        self._ended[stage] += 1

    @torch.no_grad()
    def _run(self, instructions: Iterable[BucketInstruction]) -> None:
        for op, number, _ in instructions:
            bucket = self._numbered[number]
            if op is BucketOp.ALLOCATE:
                allocate(bucket.gradients)
            elif op is BucketOp.ACCUMULATE:
                self._accumulate(number, bucket)
            else:
                super()._run([BucketInstruction(op, number)])

    def _reduce(self, number: int) -> None:
        for p in self._numbered[number].parameters:
            if not self._accumulators[p].fresh:
                self._used.add(p)
        super()._reduce(number)
        for p in self._numbered[number].parameters:
            self._accumulators[p].renew()

    def _accumulate(self, number: int, bucket: Bucket) -> None:
        self._arrive(number)
        shard = bucket.inner_shard(bucket.gradients)
        if number in self._empty:
            bucket.shard_sums.copy_(shard)
        else:
            bucket.shard_sums.add_(shard)
        self._empty.discard(number)
        free(bucket.gradients)

    def _reduce_beyond(self, number: int) -> None:
        if number in self._empty:
            self._numbered[number].shard_sums.zero_()
        super()._reduce_beyond(number)

    def of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Return what has not been added to the sum of `p` yet, in its shape.

        It is 0 after a pass unless `local` is set. All data-parallel ranks call this.
        """
        self._new[p] += 1
        return self._accumulators[p].complete()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the terms of all ranks; each rank then has the sums of the ranges that it owns."""
        for number in self._plan.order:  # gradients that were set by hand
            if any(self._new[p] for p in self._numbered[number].parameters):
                self._run(self._sums.send(number, final=False))
        self._run(self._sums.step_ends())
        self._drain()
        if not self.counted:
            self._look()
        self._over_model()

    def _digests(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Return digests of this rank's ranges, which are the same elements on all tensor ranks."""
        gradients = {p: b.owned_gradients[span] for b in self.buckets for p, _, span in b.owned()}
        none = torch.zeros((), dtype=torch.int64, device=self._topology.device)
        digests = [
            digest(gradients[p]) * gradients[p].any() if p in gradients else none
            for p in parameters
        ]
        return torch.stack(digests)

    def _was_used(self, p: torch.nn.Parameter) -> bool:
        return p in self._used

    def renew(self) -> None:
        """Begin new sums, after the messages in flight have arrived."""
        self._drain()
        self._sums = Reductions(self._plan)
        self._micro_batches = 0
        self._empty = set(self._plan.order)
        self._ended = dict.fromkeys(self._plan.calls, 0)
        self._missing = self._parameters_of_buckets()
        for bucket in self.buckets:
            free(bucket.gradients)
        for p, accumulator in self._accumulators.items():
            p.grad = None
            accumulator.renew()
            self._new[p] = 0
        self._used.clear()


# -- weights ---------------------------------------------------------------------------------------


def name_of(chunk: torch.nn.Module, module: torch.nn.Module) -> str:
    """Return a module's name in its chunk; "the chunk" for the chunk itself."""
    return next(name or "the chunk" for name, one in chunk.named_modules() if one is module)


class ShardedWeights(WeightGather):
    """Weights that are gathered for each call and freed after it, following the plan's steps.

    If a model calls its modules in another order, weights are gathered when they are needed,
    without overlap and with a warning.
    """

    def __init__(
        self, plan: ZeroPlan, buckets: Sequence[Bucket], chunk: torch.nn.Module, stage: int
    ) -> None:
        super().__init__([buckets[n] for n in plan.return_order], (), plan.zero.ahead)
        self._plan = plan
        self._numbered = buckets
        self._stage = stage
        self._names = [name_of(chunk, module) for module, _ in weight_users(chunk)]
        self._works: dict[int, Any] = {}
        self._here = set[int]()
        self._steps: tuple[ModulePass, ...] = ()
        # the current step, and whether its pass is a backward pass
        self._at = 0
        self._backward = False
        self._stays_gathered = False  # whether all weights stay gathered
        self._passes = 0  # backward passes still to come in this training step
        self._warned = False
        self._index = {
            backward: self._indices(steps)
            for backward, steps in ((False, plan.forward(stage)), (True, plan.backward(stage)))
        }
        # whether each call is a look-up, whose backward pass needs no weights
        self._looks_up = [call.table for call in plan.calls[stage]]
        calls: dict[torch.nn.Module, list[int]] = {}
        for number, (module, _) in enumerate(self._users([chunk])):
            calls.setdefault(module, []).append(number)
        for module, numbers in calls.items():
            self._watch(module, numbers)

    def _indices(self, steps: Sequence[ModulePass]) -> dict[tuple[str, int], int]:
        """Return the index of the step that each event (kind, call) begins.

        An event is a call, or the arrival of the gradient of its output.
        For the last layer in a recomputed group, the gradient arrives before the layer is called.
        """
        indices = {(step.kind, step.call): n for n, step in enumerate(steps)}
        for last in self._plan.groups[self._stage]:
            if (RECOMPUTE, last) in indices:
                first = indices[RECOMPUTE, last]
                second = indices[BACKWARD, last]
                indices[BACKWARD, last] = first
                indices[RECOMPUTE, last] = second
        return indices

    def _watch(self, module: torch.nn.Module, numbers: Sequence[int]) -> None:
        """Follow a module, which a pass calls once for each of these numbers."""
        calls = self._plan.calls[self._stage]
        used = {self._plan.bucket_of[p] for n in numbers for p in calls[n].parameters}
        returned = [self._numbered[n] for n in self._plan.return_order if n in used]
        module.register_forward_pre_hook(partial(self._wait, returned))  # for new weights
        now = numbers[0]

        def before(_: Any, args: Any) -> None:
            nonlocal now
            kind = RECOMPUTE if within_backward() else FORWARD
            now = self._next(kind, numbers)
            self._enter(kind, now)
            if kind == FORWARD:
                inputs = (x for x in args if isinstance(x, torch.Tensor))
                is_look_up = calls[now].table and not any(x.requires_grad for x in inputs)
                self._looks_up[now] = is_look_up

        def after(_: Any, __: Any, output: Any) -> None:
            if within_backward():  # recomputed: its backward pass follows
                return
            self._leave(self._index[False][FORWARD, now] + 1)
            for x in output if isinstance(output, tuple) else (output,):
                if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
                    x.register_hook(partial(self._enter_backward, now))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _next(self, kind: str, numbers: Sequence[int]) -> int:
        """Return the first of a module's calls that the pass has not reached."""
        backward = kind != FORWARD
        at = self._at if backward == self._backward else 0
        indices = self._index[backward]
        in_order = sorted(numbers, key=lambda number: indices.get((kind, number), 0))
        following = (n for n in in_order if indices.get((kind, n), 0) >= at)
        return next(following, in_order[0])

    def _enter_backward(self, call: int, _: torch.Tensor) -> None:
        self._enter(BACKWARD, call)

    def _enter(self, kind: str, call: int) -> None:
        """Begin a step: wait for its weights, and begin to gather the next step's."""
        if self._stays_gathered:
            return
        backward = kind != FORWARD
        indices = self._index[backward]
        # a model may also recompute calls outside the plan's groups: their backward pass follows
        index = indices.get((kind, call), indices.get((BACKWARD, call), len(indices)))
        if backward != self._backward or index < self._at or not self._steps:
            self._leave(len(self._steps))
            self._backward = backward
            self._at = 0
            if backward:
                self._steps = self._plan.backward(self._stage, self._passes == 1)
            else:
                self._steps = self._plan.forward(self._stage, torch.is_grad_enabled())
        self._leave(index)
        step = self._steps[index] if index < len(self._steps) else ModulePass(kind, call)
        needed = [instruction.bucket for instruction in step.before]
        if not (kind == BACKWARD and self._looks_up[call]):
            needed += self._plan.gathered(self._stage, call)
        following = [instruction.bucket for instruction in step.beside]
        gathers = any(number not in self._here for number in needed)
        for number in list(self._works):
            if gathers and number not in needed:  # gathered for the planned call, not this one
                self._warn(call)
                self._arrive_at([number])
                self._free([number])
        self._gather(needed)
        self._arrive_at(needed)
        self._gather(following)

    def _warn(self, call: int) -> None:
        """Warn, once, about a call that does not follow the plan."""
        if not self._warned and torch.is_grad_enabled():
            self._warned = True
            warnings.warn(
                f"{self._names[call]} is called in another order than weight_users() gives: with "
                "--zero-stage 3 its weights are gathered when it begins, not before",
                stacklevel=2,
            )

    def _leave(self, end: int) -> None:
        """End all steps before number `end`."""
        if self._stays_gathered:
            return
        for step in self._steps[self._at : end]:
            self._free(instruction.bucket for instruction in step.after)
        self._at = max(self._at, end)

    @torch.no_grad()
    def _gather(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            bucket = self._numbered[number]
            if number in self._works or number in self._here:
                continue
            self._wait([bucket])  # for the new weights that this rank holds
            allocate(bucket.weights)
            self._works[number] = next(transfer(bucket, BucketOp.GATHER))

    def _arrive_at(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number in self._works:
                for work in self._works.pop(number):
                    work.wait()
                self._here.add(number)

    def _free(self, numbers: Iterable[int]) -> None:
        """Free gathered weights, except those in flight."""
        for number in numbers:
            if number in self._here:
                self._here.discard(number)
                free(self._numbered[number].weights)

    def begin(self, micro_batches: int) -> None:
        self._passes += micro_batches

    def pass_ends(self) -> None:
        """Free the weights of calls whose end was not signalled by a gradient."""
        self._passes -= 1
        self._leave(len(self._steps))
        if not self._stays_gathered:
            self._free(list(self._here))

    @torch.no_grad()
    def start(self, frozen: bool = False) -> None:
        """Gather the new weights; if they are sharded, only the shard that this rank keeps."""
        self._stays_gathered = False
        self._passes = 0
        self._steps = ()
        self._at = 0
        self._arrive_at(list(self._works))
        self._free(list(self._here))
        super().start(frozen)

    def _divided(self) -> list[int]:
        return [n for n in self._plan.return_order if self._numbered[n].weight_shard is not None]

    def wait(self) -> None:
        """Gather all weights. They keep their memory until the next step."""
        self.settle()
        self._gather(self._divided())
        self._arrive_at(list(self._works))
        self._stays_gathered = True

    def each(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
        """Yield parameters whose weights have arrived, one after another."""
        self.settle()
        of = {p: n for n in self._divided() for p in self._numbered[n].parameters}
        for p in parameters:
            number = of.get(p)
            if number is None or self._stays_gathered:
                yield p
                continue
            self._gather([number])
            self._arrive_at([number])
            yield p
            self._free([number])
