"""ZeRO stages 2 and 3: gradients, and with stage 3 weights, of which each rank keeps a part.

Rajbhandari et al., arXiv 1910.02054, sections 5.2 and 5.3, with shards of two sizes (Wang et al.,
arXiv 2306.10209; Zhang et al., arXiv 2205.00119): gradients and weights are divided over
neighbours, the optimizer's state over as many or more ranks.

The gradients of a bucket have memory from the first to the last contribution of a backward pass.
Then they are summed over the inner ranks, each of which adds its part to its sums. The weights of a
bucket have memory while modules use them, in the forward and in the backward pass; before, they
are gathered from the inner ranks, while the module before them computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.engine.copies import digest
from megatron.engine.gradients import (
    REDUCED_ALREADY,
    Begun,
    Bucket,
    Gradients,
    Messages,
    Terms,
    WeightGather,
    free,
    gather_into,
    reduce_beyond,
    reduce_to_inner,
    take,
    too_many,
)
from megatron.engine.optimizer_state import IN_FLIGHT
from megatron.errors import ConfigError
from megatron.parallel.gradient_accumulator import within_backward
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

# -- gradients -------------------------------------------------------------------------------------


class ShardedGradients(Gradients):
    """Gradient sums of which this rank keeps parts.

    stage_of  the pipeline stage of each bucket

    The buckets of a stage are sent once after each of its backward passes, in their order, so that
    all ranks post the same messages: with overlap as soon as they are complete, otherwise when the
    pass ends. The first pass shows how many contributions a parameter gets; it assumes one. In the
    last pass of a step, the sum of a bucket over the inner ranks is followed by that over the
    others, once a step has counted (Gradients) and the passes were announced.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        topology: Topology,
        terms: Terms,
        overlap: bool,
        direct: bool,
        stage_of: Mapping[Bucket, int],
    ) -> None:
        super().__init__(buckets, topology, terms, True, direct)
        self._early = overlap
        self._of_stage: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            self._of_stage.setdefault(stage_of[bucket], []).append(number)
        self._stage_of = {n: stage for stage, some in self._of_stage.items() for n in some}
        # buckets of each stage that were sent in the current pass
        self._sent_of = dict.fromkeys(self._of_stage, 0)
        # contributions of the current pass, and of each: empty until a first pass is over
        self._new = dict.fromkeys(self._sinks, 0)
        self._per_pass: dict[torch.nn.Parameter, int] = {}
        self._incomplete = [len(bucket.parameters) for bucket in self.buckets]
        self._flying = set[int]()
        # backward passes of a stage in this step, and messages beyond the inner ranks
        self._ended = dict.fromkeys(self._of_stage, 0)
        self._outward: Begun = deque()
        self._final = set[int]()  # whose sums over all ranks have begun
        self._empty = set(range(len(self.buckets)))  # without sums
        self._used = set[torch.nn.Parameter]()
        for p, sink in self._sinks.items():
            sink.before_use = partial(self._take, self._bucket_of[p])

    def begin(self, micro_batches: int) -> None:
        """Announce backward passes. A gradient after the last of them raises ConfigError."""
        self._micro_batches += micro_batches

    def _take(self, number: int) -> None:
        """Give the gradients of a bucket memory, once its last message has arrived."""
        while number in self._flying:
            self._advance(1)
        take(self.buckets[number].gradients)

    def _added(self, p: torch.nn.Parameter) -> None:
        self._new[p] += 1
        due, number = self._per_pass.get(p, 1), self._bucket_of[p]
        if not self._early or self.local:
            return
        stage = self._stage_of[number]
        of_stage = self._of_stage[stage]
        if self._new[p] > due and self._per_pass and number in of_stage[: self._sent_of[stage]]:
            raise too_many(p, due, 1)
        if self._new[p] != due:
            return
        self._incomplete[number] -= 1
        while (at := self._sent_of[stage]) < len(of_stage) and not self._incomplete[of_stage[at]]:
            self._send_bucket(of_stage[at])
            self._sent_of[stage] += 1

    def pass_ends(self, stage: int) -> None:
        """Send what a backward pass of a pipeline stage has left."""
        if stage not in self._of_stage or self.local:
            return
        of_stage = self._of_stage[stage]
        counts = {p: self._new[p] for n in of_stage for p in self.buckets[n].parameters}
        for number in of_stage[self._sent_of[stage] :]:
            self._send_bucket(number)
        self._sent_of[stage] = 0
        if not self._per_pass.keys() >= counts.keys():
            for number in of_stage:  # sent before a second contribution
                if any(not self._sinks[p].fresh for p in self.buckets[number].parameters):
                    self._send_bucket(number)
            self._per_pass |= {p: n or -1 for p, n in counts.items()}
        for number in of_stage:
            self._incomplete[number] = len(self.buckets[number].parameters)
        for p in counts:
            self._new[p] = 0
        self._ended[stage] += 1

    @torch.no_grad()
    def _send_bucket(self, number: int) -> None:
        bucket = self.buckets[number]
        for p in bucket.parameters:
            if not self._sinks[p].fresh:
                self._used.add(p)
            self._sinks[p].complete()  # a parameter without any gradient counts as zero
            self._sinks[p].renew()
        if number in self._final:
            raise ConfigError(REDUCED_ALREADY)
        while len(self._begun) >= IN_FLIGHT:
            self._advance(1)
        self._flying.add(number)
        ended, of_step = self._ended[self._stage_of[number]], self._micro_batches
        final = self._early and self.counted and ended == of_step - 1
        if final:
            self._final.add(number)
        self._begin(self._to_sums(number, final))

    def _to_sums(self, number: int, final: bool) -> Messages:
        bucket = self.buckets[number]
        yield from reduce_to_inner(bucket)
        assert bucket.sums is not None, "made by divide()"
        part = bucket.inner_part(bucket.gradients)
        if number in self._empty:
            bucket.sums.copy_(part)
        else:
            bucket.sums.add_(part)
        self._empty.discard(number)
        free(bucket.gradients)
        self._flying.discard(number)
        if final:
            self._go_beyond(bucket)

    def _go_beyond(self, bucket: Bucket) -> None:
        """Begin to sum a bucket over the other ranks."""
        assert bucket.sums is not None, "made by divide()"
        self._begin(reduce_beyond(bucket, bucket.sums), self._outward)

    def _drain_all(self) -> None:
        """Wait for the sums over the inner ranks, then for those beyond, which may follow them."""
        self._drain()
        self._drain(self._outward)

    def of(self, p: torch.nn.Parameter) -> torch.Tensor:
        """Return what `p` adds to the sum, in its shape: zero after a pass, unless it is `local`.

        All data-parallel ranks call it.
        """
        self._new[p] += 1
        return self._sinks[p].complete()

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the terms of all ranks; each rank then has the sum of the parts that it owns."""
        for number, bucket in enumerate(self.buckets):  # gradients that were put there by hand
            if any(self._new[p] for p in bucket.parameters):
                self._send_bucket(number)
        self._drain()
        for number in self._empty:
            sums = self.buckets[number].sums
            assert sums is not None, "made by divide()"
            sums.zero_()
        for number, bucket in enumerate(self.buckets):
            if number not in self._final:
                self._go_beyond(bucket)
        self._drain_all()
        if not self.counted:
            self._look()
        self._over_model()

    def _digests(self, parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
        """Return digests of this rank's parts: the same elements on all tensor ranks."""
        parts = {p: b.own_gradients[place] for b in self.buckets for p, _, place in b.owned()}
        none = torch.zeros((), dtype=torch.int64, device=self._topology.device)
        found = [digest(parts[p]) * parts[p].any() if p in parts else none for p in parameters]
        return torch.stack(found)

    def _was_used(self, p: torch.nn.Parameter) -> bool:
        return p in self._used

    def renew(self) -> None:
        """Begin new sums, after the messages in flight have arrived."""
        self._drain_all()
        self._empty = set(range(len(self.buckets)))
        self._sent_of = dict.fromkeys(self._of_stage, 0)
        self._ended, self._micro_batches = dict.fromkeys(self._of_stage, 0), 0
        self._final.clear()
        self._incomplete = [len(bucket.parameters) for bucket in self.buckets]
        for bucket in self.buckets:
            free(bucket.gradients)
        for p, sink in self._sinks.items():
            p.grad = None
            sink.renew()
            self._new[p] = 0
        self._used.clear()


# -- weights ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Use:
    """A call of a module, and the buckets whose weights it needs.

    last  whether the weights are used after the call: they stay until the backward pass
    """

    buckets: list[Bucket]
    last: bool = False
    backward: bool = True


class ShardedWeights(WeightGather):
    """Weights that are gathered for each use, and given up after it.

    Which use follows another is known from the passes before: its weights are gathered meanwhile,
    so that at most those of two uses have memory.
    """

    def __init__(
        self, buckets: Iterable[Bucket], chunks: Iterable[torch.nn.Module], overlap: bool
    ) -> None:
        super().__init__(buckets, (), overlap)
        self._ahead = overlap
        self._bucket_of = {p: b for b in self._buckets for p in b.parameters}
        self._of = {p: b for p, b in self._bucket_of.items() if b.held is not None}
        self._works: dict[Bucket, Any] = {}
        self._here = set[Bucket]()
        # uses by the two before: what a forward pass needs next differs from a backward pass
        self._after: dict[tuple[_Use | None, _Use], _Use] = {}
        self._before: tuple[_Use | None, _Use | None] = None, None
        self._kept = False  # all weights stay gathered
        self._passes = 0  # backward passes that follow in this step
        for module, parameters in self._users(chunks):
            self._watch(module, parameters)

    def _watch(self, module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
        buckets = dict.fromkeys(self._bucket_of[p] for p in parameters if p in self._bucket_of)
        module.register_forward_pre_hook(partial(self._wait, list(buckets)))  # for new weights
        needed = [bucket for bucket in buckets if bucket.held is not None]
        if not needed:
            return
        own = set(module.parameters())
        use = _Use(needed, last=any(p not in own for p in parameters))
        tables = all(sharding_of(p).kind == "embedding" for p in own)

        def before(_: Any, args: Any) -> None:
            self._need(use)
            if torch.is_grad_enabled() and not within_backward():
                given = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
                for x in given[:1]:  # its gradient is the last that the module computes
                    ended = getattr(x, "uses_ended", None)
                    if ended is None:
                        x.register_hook(lambda _: self._give_up(use))
                    else:  # another use's output, which has a hook that comes before
                        ended.append(use)
                # the backward pass of a look-up needs no weights
                use.backward = bool(given) or not tables

        def after(_: Any, __: Any, output: Any) -> None:
            if within_backward():  # recomputed: its backward pass follows
                return
            if use.backward and torch.is_grad_enabled():
                outputs = output if isinstance(output, tuple) else (output,)
                for x in outputs:
                    if isinstance(x, torch.Tensor) and x.requires_grad:
                        x.uses_ended = ended = list[_Use]()  # type: ignore[attr-defined]
                        x.register_hook(partial(begin, ended))
            if not use.last:
                self._give_up(use)

        def begin(ended: list[_Use], _: Any) -> None:
            for other in ended:
                self._give_up(other)
            self._need(use)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    @torch.no_grad()
    def _need(self, use: _Use) -> None:
        """Wait for the weights of a use, and begin to gather those of the next."""
        if self._kept:
            return
        if self._here.issuperset(use.buckets):
            return
        self._gather(use)
        self._arrive(use.buckets)
        first, second = self._before
        if second is not None:
            self._after[first, second] = use
        self._before = second, use
        following = self._after.get((second, use)) if self._ahead else None
        for bucket in list(self._works):  # of another use than was expected
            if following is None or bucket not in following.buckets:
                self._arrive([bucket])
                self._free([bucket])
        if following is None or (
            self._passes == 1 and not following.backward and within_backward()
        ):
            return  # no forward pass follows
        self._gather(following)

    def _gather(self, use: _Use) -> None:
        for bucket in use.buckets:
            if bucket.held is None or bucket in self._works or bucket in self._here:
                continue
            self._wait([bucket])  # for the new weights that this rank holds
            take(bucket.weights)
            self._works[bucket] = gather_into(bucket.weights, bucket.held, bucket.shards.inner)

    def _arrive(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            if bucket in self._works:
                self._works.pop(bucket).wait()
                self._here.add(bucket)

    def _free(self, buckets: Iterable[Bucket]) -> None:
        """Give up weights, other than those under way."""
        for bucket in buckets:
            if bucket in self._here:
                self._here.discard(bucket)
                free(bucket.weights)

    def _give_up(self, use: _Use) -> None:
        if not self._kept:
            self._free(use.buckets)

    def begin(self, micro_batches: int) -> None:
        self._passes += micro_batches

    def pass_ends(self) -> None:
        """Give up the weights of uses whose end no gradient has shown."""
        self._passes -= 1
        if not self._kept:
            self._free(list(self._here))

    @torch.no_grad()
    def start(self, frozen: bool = False) -> None:
        """Gather the new weights, of those that are held only what each rank holds."""
        self._kept, self._passes = False, 0
        self._arrive(list(self._works))
        self._free(list(self._here))
        super().start(frozen)

    def wait(self) -> None:
        """Gather all weights. They keep their memory until the next step."""
        self.settle()
        for bucket in dict.fromkeys(self._of.values()):
            self._gather(_Use([bucket]))
        self._arrive(list(self._works))
        self._kept = True

    def each(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
        """Yield parameters whose weights have arrived, one after another."""
        self.settle()
        for p in parameters:
            bucket = self._of.get(p)
            if bucket is None or self._kept:
                yield p
                continue
            self._gather(_Use([bucket]))
            self._arrive([bucket])
            yield p
            self._free([bucket])
