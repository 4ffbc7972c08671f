"""Output layer and cross entropy over a vocabulary that is sharded over the tensor-parallel group.

For each token a rank computes three numbers from its logits: the maximum, the sum of exponentials
relative to the maximum, and the label's logit. An all-gather gives every rank the numbers of all
ranks, from which it computes the loss and the gradient of its own logits (Shoeybi et al., arXiv
1909.08053, section 3).

Output layer and cross entropy work on chunks of tokens, so that only one chunk's logits exist at a
time: they are overwritten by their gradient, from which the gradients of input and weight are
computed before the next chunk uses the memory. Only a deferred weight gradient needs all tokens at
once. All of this happens in the backward pass, because the gradient of the loss is known only then:
a loss scale must be applied before 16-bit rounding, the weight gradient is added directly to its
accumulator, and a schedule may defer it. With `late` the logits are computed only once. In exchange
the loss gets its value only in the backward pass, which is early enough for a pipeline's executor.

The alternatives were to compute gradients in the forward pass for a loss gradient of 1 and to scale
them afterwards (Liger, Hsu et al., arXiv 2410.10989, section 3.2: an fp32 [vocabulary/tp, h] tensor
has to be kept and read once more, and fp16 underflows), or to compute the logits twice (a third
more work in this layer); the latter is done if the loss is needed immediately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.kernels.ops import vocabulary as kernel
from megatron.kernels.ops.elementwise import soft_cap
from megatron.kernels.ops.vocabulary import add_rows_, reference_
from megatron.layers.context import Fill, LayerContext
from megatron.layers.linear import linear, product
from megatron.parallel import collectives
from megatron.parallel.autograd import Context, Node
from megatron.parallel.collectives import reduce_from_tensor_region, split_first
from megatron.parallel.gradient_accumulator import accumulator_of
from megatron.parallel.topology import Group

CPU_TOKENS = 512
GPU_TOKENS = 4096
"""Default numbers of tokens in a chunk. Each chunk reads and writes the fp32 weight gradient once:
4 / tokens bytes per FLOP of the matrix product that computes it. On typical devices this is a few
percent of the product's time at these sizes."""


def _combine(local: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, maxima and sums of exponentials over the full vocabulary, [n] each.

    The exponentials are relative to the maxima. One message is sent; all ranks add in rank order
    and get bitwise identical results.
    """
    if group.size == 1:
        maximum, total, target = local
    else:
        every = collectives.gather_first(local.unsqueeze(0), group)  # [tp, 3, n]
        maxima, sums, targets = every.unbind(dim=1)
        maximum = maxima.amax(dim=0)
        # A rank without entries has a maximum of -infinity and a sum of 0.
        total = (sums * (maxima - maximum).exp()).sum(dim=0)
        target = targets.sum(dim=0)
    return total.log() + (maximum - target), maximum, total


@dataclass(frozen=True)
class Vocabulary:
    """This rank's shard of the output layer.

    weight   [vocab/tp, h], rows `first`, `first` + 1, ... of the vocabulary; all after the first
             `real` are padding
    context  the tensor-parallel group, the queue of deferred weight gradients, fusions
    tokens   number of tokens in a chunk; 0: all at once; None: the device's default
    cap      soft cap of the logits x, which become cap tanh(x / cap); 0: none
    z_loss   coefficient z of the z-loss, z times the mean of log(sum exp(logits))^2 over the
             unmasked tokens (Chowdhery et al., arXiv 2204.02311, section 5). It contributes to the
             gradient, but not to the value of the loss
    """

    weight: Tensor
    context: LayerContext
    first: int
    real: int
    tokens: int | None = None
    cap: float = 0.0
    z_loss: float = 0.0

    def chunks(self, count: int) -> list[slice]:
        """Divide `count` tokens into chunks."""
        default = CPU_TOKENS if self.weight.device.type == "cpu" else GPU_TOKENS
        step = (default if self.tokens is None else self.tokens) or count
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return (maximum, sum of exponentials, label's logit) of a chunk: fp32 [3, n].

        The logits [n, vocab/tp] are this rank's.
        """
        fused = self.context.fusions.cross_entropy
        local = kernel.local_pass if fused else kernel.local_reference
        return torch.stack(local(logits, labels, self.first, self.real, self.cap))

    def gather(self, x: Tensor) -> Tensor:
        """Gather x [s(/tp), b, h] from all ranks: [s * b, h]."""
        full = (
            collectives.gather_first(x, self.context.tensor)
            if self.context.sequence_parallel
            else x
        )
        return full.reshape(-1, x.shape[-1])


def vocabulary_loss(
    x: Tensor,
    labels: Tensor,
    mask: Tensor,
    vocabulary: Vocabulary,
    late: bool = False,
    count: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean cross entropy of the unmasked tokens, a scalar in fp32.

    It is the same on every rank of the tensor group.

    x [s(/tp), b, h] in the weight's dtype, labels int64 [s, b], mask [s, b] of ones and zeros. The
    result is 0 if all tokens are masked. `count`: divisor of the sum, by default the number of
    unmasked tokens. `out`: memory for the value, a scalar; the result is then a view of it.

    The logits are computed chunk by chunk: in the backward pass, and, without `late`, also in the
    forward pass. With `late` the result is NaN until its backward pass fills in the value; if no
    gradient is needed there is no backward pass, and `late` has no effect.
    """
    labels = labels.reshape(-1)
    mask = mask.reshape(-1).float()
    weight = vocabulary.weight
    late = late and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _Loss.apply(x, weight, labels, mask, count, vocabulary, late, out)


def differentiable_losses(x: Tensor, labels: Tensor, v: Vocabulary) -> Tensor:
    """Return the cross entropy of each label [s, b], fp32, with gradients.

    x as in `vocabulary_loss`; the logits are computed chunk by chunk, in both passes.
    """
    flat = labels.reshape(-1)
    losses: Tensor = _Loss.apply(x, v.weight, flat, None, None, v, False, None)
    return losses.view_as(labels)


def scores(x: Tensor, v: Vocabulary, positions: Tensor | None = None) -> Tensor:
    """Return this rank's fp32 logits [s, b, vocab/tp] of x [s(/tp), b, h].

    Logits of the vocabulary's padding are -infinity.

    positions int64 [b]: only the logits of one position of each sample, [1, b, vocab/tp], without
    gradients.
    """
    if positions is None:
        logits = linear(x, True, v.context, None, (v.weight,)).float()
    else:
        with torch.no_grad():
            full = v.gather(x).view(-1, *x.shape[1:])
            samples = torch.arange(len(positions), device=x.device)
            logits = product(full[positions, samples].unsqueeze(0), v.weight.t()).float()
    if v.cap:
        logits = soft_cap(logits, v.cap)
    logits[..., v.real :] = float("-inf")
    return logits


def _count(mask: Tensor, count: Tensor | None) -> Tensor:
    return mask.sum().clamp(min=1.0) if count is None else count


def _mean(losses: Tensor, mask: Tensor, count: Tensor | None) -> Tensor:
    return (losses * mask).sum() / _count(mask, count)


@torch.no_grad()
def token_losses(x: Tensor, labels: Tensor, v: Vocabulary) -> tuple[Tensor, Tensor]:
    """Return the loss of each label, and whether no other token has a higher logit than the label.

    x [s(/tp), b, h], labels int64 [s, b] -> fp32 [s, b], bool [s, b]. Without gradients.
    """
    local = _statistics(x, labels.reshape(-1), v)
    losses, maximum, _ = _combine(local, v.context.tensor)
    target = local[2]  # 0 on ranks that do not hold the label's logit
    if v.context.tensor.size > 1:
        target = collectives.gather_first(target.unsqueeze(0), v.context.tensor).sum(dim=0)
    return losses.view_as(labels), (target >= maximum).view_as(labels)


def _statistics(x: Tensor, labels: Tensor, v: Vocabulary) -> Tensor:
    """Return the statistics of all tokens on this rank, fp32 [3, s * b]."""
    full = v.gather(x)
    statistics = [
        v.statistics(logits, labels[chunk])
        for chunk, logits in _logits(full, v, v.chunks(len(full)))
    ]
    return torch.cat(statistics, dim=1)


def _logits(x: Tensor, v: Vocabulary, chunks: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits [n, vocab/tp] of each chunk of x [tokens, h], all in the same memory."""
    memory = x.new_empty(
        max((chunk.stop - chunk.start for chunk in chunks), default=0), v.weight.shape[0]
    )
    for chunk in chunks:
        yield chunk, torch.mm(x[chunk], v.weight.t(), out=memory[: chunk.stop - chunk.start])


class _Loss(Node):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        count: Tensor | None,
        v: Vocabulary,
        late: bool,
        out: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, labels, mask, count)
        ctx.vocabulary = v
        ctx.late = late
        ctx.partial_gradient = v.context.sequence_parallel  # of x, for engine/gradients.py
        if not late:
            statistics = _statistics(x, labels, v)  # one message for all chunks
            losses = _combine(statistics, v.context.tensor)[0]
            if mask is None:
                return losses
            loss = _mean(losses, mask, count)
            return loss if out is None else out.copy_(loss).detach()
        loss = x.new_full((), float("nan"), dtype=torch.float32)
        if out is not None:
            loss = out.copy_(loss).detach()
        # the same memory; a view would keep the output alive, and with it this node
        ctx.loss = loss.detach()
        return loss

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, mask, count = ctx.saved_tensors
        v: Vocabulary = ctx.vocabulary
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        token_gradients = gradient
        if mask is not None:
            token_gradients = mask * (gradient / _count(mask, count))
        full = v.gather(x)
        dx = torch.empty_like(full) if needs_x else None
        dw = None
        accumulator = accumulator_of(v.weight)
        queue = v.context.weight_gradients
        deferred = needs_weight and queue.deferring
        # A deferred weight gradient needs the gradient of the logits for all tokens.
        chunks = [slice(0, len(full))] if deferred else v.chunks(len(full))
        losses = torch.empty_like(token_gradients)
        sent = collectives.DONE
        for chunk, logits in _logits(full, v, chunks):
            last = chunk.stop == len(full)
            losses[chunk] = _to_gradient(logits, labels[chunk], token_gradients[chunk], v)
            if dx is not None:
                torch.mm(logits, v.weight, out=dx[chunk])
                if last:
                    dx, sent = _summed(dx, v.context)
            if deferred:
                queue.add_product(v.weight, logits, full)
            elif needs_weight and accumulator is not None:
                accumulator.add_product(logits, full[chunk], last=last)
            elif needs_weight:
                product = logits.t() @ full[chunk]
                if dw is not None:
                    dw.add_(product)
                elif last:
                    dw = product
                else:  # The sum over several chunks is taken in fp32 and rounded once.
                    dw = product.to(torch.promote_types(product.dtype, torch.float32))
        sent.wait()
        loss = losses.sum() if mask is None else _mean(losses, mask, count)
        if ctx.late:
            ctx.loss.copy_(loss)
        if dx is not None:
            dx = dx.view(x.shape)
            # A loss may be infinite although its gradient is not. One value of the gradient passes
            # this on to the optimizer, which then skips the step; no other message is needed.
            dx[:1, :1, :1].add_(0.0 * loss)
        return dx, None if dw is None else dw.to(v.weight.dtype), *[None] * 6


def _to_gradient(logits: Tensor, labels: Tensor, token_gradients: Tensor, v: Vocabulary) -> Tensor:
    """Turn the logits of a chunk into their gradient; return the chunk's losses."""
    losses, maximum, total = _combine(v.statistics(logits, labels), v.context.tensor)
    if v.z_loss:
        # The gradient's first term, exp(logit - maximum) / total, gets the factor 1 + 2 z log(sum).
        total = total / (1.0 + 2.0 * v.z_loss * (maximum + total.log()))
    fused = v.context.fusions.cross_entropy
    differentiate = kernel.gradient_ if fused else kernel.gradient_reference
    differentiate(logits, labels, maximum, total, token_gradients, v.first, v.real, v.cap)
    return losses


def _summed(dx: Tensor, context: LayerContext) -> tuple[Tensor, collectives.Started]:
    """Return dx summed over the tensor ranks, or this rank's shard of it, and a handle to wait for.

    With overlap the message is sent while the last chunk's weight gradient is computed.
    """
    if context.sequence_parallel:
        dx, work = collectives.reduce_scatter_first_async(dx, context.tensor)
    else:
        work = collectives.all_reduce_async(dx, context.tensor)
    if not context.overlap:
        work.wait()
        return dx, collectives.DONE
    return dx, work


# --- embedding


WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"


class _LookUp(Node):
    """Lookup in a table whose gradient has an accumulator: only rows in use are added to it."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(rows)
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[None, None]:
        (rows,) = ctx.saved_tensors
        accumulator = accumulator_of(ctx.weight)
        assert accumulator is not None, (
            "the accumulator of a table was removed between a forward and its backward pass"
        )
        # In a fixed order: a resumed run must match an uninterrupted run bit for bit.
        total = accumulator.complete()
        faster = total.device.type == "cpu" and total.dtype == torch.float32  # torch's index_add_
        add = reference_ if faster else add_rows_
        add(total, rows.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        accumulator.done()
        return None, None


def look_up(weight: nn.Parameter, rows: Tensor) -> Tensor:
    """Return rows of the weight [n, h] for ids [..]: [.., h]."""
    return (
        F.embedding(rows, weight) if accumulator_of(weight) is None else _LookUp.apply(weight, rows)
    )


class VocabParallelEmbedding(nn.Module):
    """Token embedding: [b, s] -> [s(/tp), b, h].

    Each rank looks up the tokens whose rows it holds; the results are summed over the ranks.
    """

    def __init__(self, context: LayerContext, weight: nn.Parameter) -> None:
        super().__init__()
        self.context = context
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()  # [s, b]
        if self.context.tensor.size == 1:
            return look_up(self.weight, tokens)
        first = self.context.tensor.rank * self.weight.shape[0]
        local = tokens - first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = look_up(self.weight, local.masked_fill(elsewhere, 0))
        # [s, b, h], zero where another rank has the row
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_tensor_region(rows, self.context.tensor, self.context.sequence_parallel)


class PositionEmbedding(nn.Module):
    """Learned position embedding: [s(/tp), 1 or b, h], to be added to the token embeddings."""

    def __init__(self, context: LayerContext, positions: int, hidden: int, fill: Fill) -> None:
        super().__init__()
        self.context = context
        self.weight = context.parameters.create(
            POSITION_EMBEDDINGS, (positions, hidden), None, fill
        )

    def forward(self, sequence: int, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(sequence, device=self.weight.device).unsqueeze(0)
        ids = position_ids.t()  # [s, b]
        if self.context.sequence_parallel:
            ids = split_first(ids, self.context.tensor)
        return look_up(self.weight, ids)
