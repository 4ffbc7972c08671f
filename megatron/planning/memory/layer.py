"""The memory of one transformer layer's passes, tensor by tensor, in the order in which the code makes and frees them.

Read beside megatron/layers: transformer.py, attention.py, mlp.py, linear.py. Letters: T tokens of a micro-batch (s b),
h hidden size, f MLP size, n heads, g key and value heads, d head size, w bytes of the format of computation.

Not counted: gradients of norms and biases, partial sums within kernels, statistics of a few bytes for each token beside
those that are kept (together below a percent of a layer's activations).
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.pipeline.schedule import splits_backward
from megatron.planning.memory.tape import Block, Tape

if TYPE_CHECKING:
    from megatron.config import Config, ModelConfig, RecomputeConfig
    from megatron.planning.memory.operators import Operators

_LEAST_TOKENS = 256
"""Of a chunk of --tp-comm-overlap (megatron.layers.chunked_products)."""
_ROWS_OF = 1 << 20
"""Elements of a weight gradient that go through a buffer at once (megatron.parallel.sink)."""
_SCORES = 1 << 22
_TILE, _MOST_TIMES, _BLOCKS = 32, 2, 8
"""Of attention in blocks (megatron.layers.blocked_attention)."""


@dataclass(frozen=True)
class Settings:
    """What of a configuration the passes of a chunk depend on. `model` has a vocabulary."""

    model: ModelConfig
    recompute: RecomputeConfig
    dtype_bytes: int
    micro_batch_size: int
    tensor_size: int
    sequence_parallel: bool
    chunks: int
    direct_gradients: bool
    fp16: bool
    sum_width: int
    deferring: bool

    @classmethod
    def of(cls, config: Config, model: ModelConfig) -> Settings:
        parallel = config.parallel
        return cls(
            model, config.recompute, 4 if config.precision.dtype_name == "float32" else 2,
            config.batch.micro_batch_size, parallel.tensor_model_parallel_size,
            parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1, _chunks(config),
            config.kernels.gradient_accumulation_fusion, config.precision.fp16, config.precision.gradient_bytes,
            splits_backward(
                config.schedule, parallel.pipeline_model_parallel_size, parallel.num_chunks, config.num_micro_batches()
            ),
        )


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors on one tensor rank.

    residual    the stream between layers: T h, in fp32 with --fp32-residual-connection; a part of it under sequence
                parallelism
    outside     the same in the format of computation; `whole`: all tokens of it
    projection  T (n + 2 g) d; `heads` T n d, `keys` T g d, each divided over the tensor ranks
    up, inner   the MLP's values before and after the activation
    statistics  of a norm, fp32; `logarithms` of a softmax's sums, fp32
    width       of an element
    """

    residual: float
    outside: float
    whole: float
    projection: float
    heads: float
    keys: float
    up: float
    inner: float
    statistics: float
    logarithms: float
    width: int

    @classmethod
    def of(cls, settings: Settings) -> Sizes:
        model, tp, width = settings.model, settings.tensor_size, settings.dtype_bytes
        parts = tp if settings.sequence_parallel else 1
        tokens = float(model.seq_length * settings.micro_batch_size)
        n, g, d, h = model.num_attention_heads, model.num_key_value_heads, model.kv_channels, model.hidden_size
        return cls(
            residual=tokens * h * (4 if model.fp32_residual_connection else width) / parts,
            outside=tokens * h * width / parts,
            whole=tokens * h * width,
            projection=tokens * (n + 2 * g) * d * width / tp,
            heads=tokens * n * d * width / tp,
            keys=tokens * g * d * width / tp,
            up=tokens * model.ffn_hidden_size * (2 if model.swiglu else 1) * width / tp,
            inner=tokens * model.ffn_hidden_size * width / tp,
            statistics=4.0 * tokens * (2 if model.normalization == "layernorm" else 1) / parts,
            logarithms=4.0 * tokens * n / tp,
            width=width,
        )


class Kept:
    """What a layer's forward pass leaves for its backward pass; `late`: what its weight gradients wait with."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[Block]] = {}
        self.late: list[Block] = []

    def add(self, name: str, *blocks: Block) -> None:
        self.blocks.setdefault(name, []).extend(blocks)

    def take(self, name: str) -> list[Block]:
        return self.blocks.pop(name, [])


class Layer:
    """Forward and backward passes of one layer, on a tape."""

    def __init__(self, settings: Settings, operators: Operators) -> None:
        model = settings.model
        self.sizes, self.tp = Sizes.of(settings), settings.tensor_size
        self.fused, self.attention = operators.fusions, operators.attention
        self.gathers, self.chunks = settings.sequence_parallel, settings.chunks
        selective = settings.recompute.recompute_granularity == "selective"
        again = settings.recompute.recompute_modules if selective else ()
        after = model.apply_residual_connection_post_layernorm
        self.core_again, self.activation_again = "core_attn" in again, "mlp_act" in again
        self.norms_again = "layernorm" in again and not after
        self.bias, self.swiglu = model.add_bias_linear, model.swiglu
        self.dropout = model.hidden_dropout > 0.0
        self.attention_dropout = model.attention_dropout
        self.drops = self.dropout or self.bias or after  # else norm and residual are one operator
        self.fused_norm = self.fused.rms_norm if model.normalization == "rmsnorm" else self.fused.layer_norm
        self.same_format, self.fp16 = self.sizes.residual == self.sizes.outside, settings.fp16
        self.rope, self.share = model.position_embedding_type == "rope", _share(model)
        self.alibi = model.position_embedding_type == "alibi"
        self.samples, self.length = settings.micro_batch_size, model.seq_length
        self.groups = model.num_key_value_heads // self.tp
        self.model = model
        n, g, d, f = model.num_attention_heads, model.num_key_value_heads, model.kv_channels, model.ffn_hidden_size
        self.rows = ((n + 2 * g) * d // self.tp, f * (2 if model.swiglu else 1) // self.tp)
        self.columns = (n * d // self.tp, f // self.tp)
        self.direct, self.deferring = settings.direct_gradients, settings.deferring
        self.by_rows = not operators.gpu and self.sizes.width < settings.sum_width

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, tape: Tape, stops_early: bool = False) -> tuple[Kept, Block | None]:
        """What is kept, and the output, which is not among it; nor is the input.

        `stops_early`: made again for a backward pass, which needs no output.
        """
        z, kept = self.sizes, Kept()
        normed = self._norm(tape, kept, "norm1")
        projection = self._column(tape, z.projection, added=self.bias)
        heads = self._attend(tape, kept, projection)
        out = self._row(tape)
        kept.add("dense", heads)
        middle = self._add(tape, kept, "drop1") if self.drops else tape.take(z.residual)
        kept.add("middle", middle)
        normed2 = self._norm(tape, kept, "norm2")
        if self.norms_again:
            tape.give(normed)
        up = self._column(tape, z.up, added=self.bias and not self.fused.bias_activation)
        kept.add("up", up)
        if self.swiglu and not self.fused.bias_activation:
            kept.add("up", tape.take(z.inner))  # silu of the gate
        inner = tape.take(z.inner)
        out2 = self._row(tape)
        if self.activation_again:
            tape.give(inner)
        else:
            kept.add("down", inner)
        tape.give(out)
        result = None if stops_early else self._add(tape, kept, "drop2")
        tape.give(out2)
        if self.norms_again:
            tape.give(normed2)
        return kept, result

    def _norm(self, tape: Tape, kept: Kept, name: str) -> Block:
        normed = tape.take(self.sizes.outside)
        if not self.norms_again:
            kept.add(name, normed)
        kept.add(f"{name} input", tape.take(self.sizes.statistics), *self.norm_steps(tape))
        return normed

    def norm_steps(self, tape: Tape) -> list[Block]:
        """What a norm of torch's operators keeps more than its input: an RMS norm that in fp32, where it is narrower,
        and the quotient before the weight is multiplied in; a layer norm in fp16 its input in fp32 instead."""
        z = self.sizes
        if self.fused_norm and self.same_format:
            return []
        if self.model.normalization != "rmsnorm":
            return [tape.take((4.0 / z.width - 1.0) * z.residual)] if self.fp16 and self.same_format else []
        wide = [tape.take(4.0 / z.width * z.residual)] if self.same_format and z.width < 4 else []
        return [*wide, tape.take(z.residual)]

    def _column(self, tape: Tape, out_bytes: float, added: bool) -> Block:
        """A column-parallel product; `added`: a bias is added by an operator of its own."""
        z = self.sizes
        if self.gathers and self.chunks > 1:
            out = tape.take(out_bytes)
            tape.for_a_moment(2 * z.whole / self.chunks, out_bytes / self.chunks)
        else:
            whole = tape.take(z.whole) if self.gathers else None
            out = tape.take(out_bytes)
            tape.give(whole)
        if not added:
            return out
        biased = tape.take(out_bytes)
        tape.give(out)
        return biased

    def _row(self, tape: Tape) -> Block:
        """A row-parallel product, and the sum over the ranks."""
        z = self.sizes
        if not self.gathers:
            return tape.take(z.whole)
        if self.chunks > 1:
            out = tape.take(z.outside)
            tape.for_a_moment(z.whole)
            return out
        terms = tape.take(z.whole)
        out = tape.take(z.outside)
        tape.give(terms)
        return out

    def _add(self, tape: Tape, kept: Kept, name: str) -> Block:
        """residual + dropout(x + bias)."""
        z = self.sizes
        if (self.fused.bias_dropout and self.same_format) or not (self.bias or self.dropout):
            return tape.take(z.residual)
        biased = tape.take(z.outside) if self.bias else None
        dropped = None
        if self.dropout:
            mask = tape.take(z.outside / z.width)  # one byte an element
            kept.add(name, mask)
            scaled = tape.take(z.outside)
            dropped = tape.take(z.outside)
            tape.give(scaled)
        result = tape.take(z.residual)
        tape.give(biased, dropped)
        return result

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attend(self, tape: Tape, kept: Kept, projection: Block) -> Block:
        """The output of the attention core; what its gradient needs is kept."""
        z = self.sizes
        if self.rope or self.attention != "blocked":
            if self.rope:
                kept.add("core", tape.take(z.heads), tape.take(z.keys))
                if not self.fused.rotary:
                    tape.for_a_moment(8.0 / z.width * z.heads)
            elif self.share > 1:
                kept.add("core", tape.take(z.heads))
        copied = self.alibi and self.attention == "torch" and self.share > 1  # queries, keys and values, all of it
        if not copied:
            kept.add("core", projection)
        out, inside = self._core(tape)
        tape.give(projection if copied else None)
        if self.core_again:
            tape.give(*inside)
        else:
            kept.add("core", *inside)
        return out

    def _core(self, tape: Tape) -> tuple[Block, list[Block]]:
        """The output, and what is kept beside queries, keys, values and the output."""
        z = self.sizes
        if self.attention == "unfused":
            return self._explicit(tape)
        if self.attention == "blocked":
            out, logarithms = tape.take(z.heads), tape.take(z.logarithms)
            copies = [tape.take(z.heads), tape.take(z.heads)] if self.share > 1 else []
            tape.give(tape.take(self._scores(1)), *self._reference(tape), *copies)
            return out, [logarithms]
        inside = []
        if self.alibi and self.attention == "torch" and self.share > 1:
            # No kernel takes a mask and groups of queries: keys and values are copied for each query.
            inside = [tape.take(z.heads), tape.take(z.heads)]
        out = tape.take(z.heads)
        return out, [*inside, tape.take(z.logarithms)]

    def _square(self) -> float:
        """Elements of the scores of all heads."""
        return self.samples * self.groups * self.share * float(self.length) ** 2

    def _explicit(self, tape: Tape) -> tuple[Block, list[Block]]:
        """softmax(q k^T) as it is written."""
        z = self.sizes
        square = self._square()
        queries = [tape.take(z.heads)] if self.share > 1 else []
        scores = tape.take(square * z.width)
        if self.alibi:
            tape.for_a_moment(square * z.width)
        if not self.fused.masked_softmax:
            tape.for_a_moment(4.0 * square, 4.0 * square)
        kept = [tape.take(square * (z.width if self.fused.masked_softmax or z.width == 4 else 4 + z.width))]
        if self.attention_dropout:
            kept.append(tape.take(square * (z.width if self.fused.bias_dropout else z.width + 1)))
        products = tape.take(z.heads)
        out = tape.take(z.heads)
        tape.give(scores, products)
        return out, [*queries, *kept]

    def _reference(self, tape: Tape) -> list[Block]:
        """What a block of scores takes in fp32 where no kernel does the softmax: itself, its mask and a product."""
        if self.fused.attention_block:
            return []
        wide = 4.0 / self.sizes.width * self._scores(1)
        return [tape.take(wide * (5 if self.attention_dropout else 3))]

    def _scores(self, buffers: int) -> float:
        """Bytes of the block of scores of attention in blocks."""
        least = 64 if self.sizes.width == 4 else 128
        block = max(least, min(-(-self.length // (_BLOCKS * _TILE)) * _TILE, _MOST_TIMES * least))
        each = min(block, self.length) * self.share * self.length
        return float(buffers * min(self.samples * self.groups, max(_SCORES // each, 1)) * each * self.sizes.width)

    # -- backward ------------------------------------------------------------------------------------------------------

    def forget(self, tape: Tape, layers: int) -> Block:
        """The forward passes of layers of which nothing is kept but the input: the output."""
        z, out = self.sizes, None
        for _ in range(layers):
            before, rest = out, Kept()
            normed = self._norm(tape, rest, "norm")
            heads = self._attend(tape, rest, self._column(tape, z.projection, added=self.bias))
            attended = self._row(tape)
            tape.give(*([] if self.norms_again else rest.take("norm")), *rest.take("norm input"))
            tape.give(heads, *rest.take("core"))
            middle = self._add(tape, rest, "drop") if self.drops else tape.take(z.residual)
            normed2 = tape.take(z.outside)
            tape.give(normed if self.norms_again else None)
            up = self._column(tape, z.up, added=self.bias and not self.fused.bias_activation)
            if self.swiglu and not self.fused.bias_activation:
                tape.for_a_moment(z.inner, z.inner)
            inner = tape.take(z.inner)
            product = self._row(tape)
            tape.give(up, inner, attended)
            out = self._add(tape, rest, "drop")
            tape.give(normed2, middle, product, before, *rest.take("drop"))
        assert out is not None, "there are layers"
        return out

    def backward(
        self, tape: Tape, kept: Kept, gradient: Block, dropped: tuple[Block, bool] | None = None
    ) -> Block:
        """The gradient of the input, given that of the output, which goes.

        `dropped`: what dropped() has made of it, where that ran before. The input itself stays.
        """
        z = self.sizes
        tape.give(*kept.take("drop2"))
        dout, own = dropped or self.dropped(tape, gradient)
        inner = [tape.take(z.inner)] if self.activation_again else kept.take("down")
        dinner = self._row_backward(tape, kept, inner, dout, own, z.inner, self.columns[1])
        dup = self._activation_backward(tape, dinner)
        # Who makes a value again holds what it is made of until the whole backward pass is over.
        tape.give(dinner, *([] if self.activation_again else kept.take("up")))
        normed = [tape.take(z.outside)] if self.norms_again else kept.take("norm2")
        dnormed = self._column_backward(tape, kept, normed, dup, self.rows[1])
        inputs = kept.take("norm2 input") + ([] if self.norms_again else kept.take("middle"))
        waits = self.deferring and not self.gathers  # a gradient that is a product's own is held by what waits
        held = waits and not own
        gradient = self._norm_backward(tape, None if held else gradient, dnormed, inputs, joined=not self.drops)
        tape.give(*kept.take("drop1"))
        dout, own = self.dropped(tape, gradient) if self.drops else (gradient, False)
        dheads = self._row_backward(tape, kept, kept.take("dense"), dout, own, z.heads, self.columns[0], shared=True)
        dprojection = self._attention_backward(tape, kept, dheads)
        normed = [tape.take(z.outside)] if self.norms_again else kept.take("norm1")
        dnormed = self._column_backward(tape, kept, normed, dprojection, self.rows[0])
        return self._norm_backward(tape, None if waits and not own else gradient, dnormed, kept.take("norm1 input"))

    def dropped(self, tape: Tape, gradient: Block) -> tuple[Block, bool]:
        """The gradient through dropout and bias, and whether it has memory of its own."""
        fused = self.fused.bias_dropout and self.same_format
        if (fused and (self.bias or self.dropout)) or self.dropout or not self.same_format:
            return tape.take(self.sizes.outside), True
        return gradient, False

    def _row_backward(
        self, tape: Tape, kept: Kept, x: list[Block], dy: Block, own: bool, dx_bytes: float, elements: int,
        shared: bool = False,
    ) -> Block:
        """The gradient of a row-parallel product's input, of `elements` columns. `shared`: others still hold x."""
        whole = tape.take(self.sizes.whole) if self.gathers else None
        dx = tape.take(dx_bytes)
        if self.chunks > 1:
            tape.for_a_moment(2 * self.sizes.whole / self.chunks, dx_bytes / self.chunks)
        if self.deferring:
            kept.late += x if whole is None else [*x, whole]
            if whole is None:
                kept.late.append(dy)
            elif own:
                tape.give(dy)
            return dx
        self.weight_gradient(tape, self.model.hidden_size, elements)
        tape.give(whole, dy if own else None)
        if shared:
            kept.add("core", *x)
        else:
            tape.give(*x)
        return dx

    def _activation_backward(self, tape: Tape, dinner: Block) -> Block:
        z = self.sizes
        if self.swiglu and not self.fused.bias_activation:
            tape.for_a_moment(z.inner, z.inner)
        return tape.take(z.up)

    def _column_backward(
        self, tape: Tape, kept: Kept, x: list[Block], dy: Block, rows: int
    ) -> Block:
        """The gradient of the input of a column-parallel product with `rows` outputs; x and dy go."""
        z = self.sizes
        whole = tape.take(z.whole) if self.gathers and not self.deferring else None
        if self.gathers and self.chunks > 1:
            out = tape.take(z.outside)
            tape.for_a_moment(z.whole)
        else:
            out = tape.take(z.whole)
            if self.gathers:
                terms, out = out, tape.take(z.outside)
                # The message of the sum travels behind the weight's gradient, and holds its terms until it has arrived.
                tape.give(terms)
        if self.deferring:
            if self.gathers:
                kept.late.append(tape.take(z.whole))  # and the message holds x until somebody waits for it
            kept.late += [*x, dy]
            return out
        self.weight_gradient(tape, rows, self.model.hidden_size)
        tape.give(whole, dy, *x)
        return out

    def weight_gradient(self, tape: Tape, rows: int, columns: int) -> None:
        """Of a matrix: into its sum at once, or through memory of its own, a few rows at a time."""
        if not self.direct:
            tape.for_a_moment(float(rows * columns * self.sizes.width))
        elif self.by_rows:
            tape.for_a_moment(float(min(rows, max(_ROWS_OF // columns, 256)) * columns * self.sizes.width))

    def _norm_backward(
        self, tape: Tape, gradient: Block | None, dnormed: Block, inputs: list[Block], joined: bool = False
    ) -> Block:
        """The sum of the gradient through a norm and of the one around it, which goes unless it is None.

        `joined`: the norm's own operator takes the sum.
        """
        z = self.sizes
        dx = tape.take(z.residual)
        if joined and self.fused_norm and self.same_format:
            tape.give(gradient, dnormed, *inputs)
            return dx
        tape.give(dnormed, *inputs)
        total = tape.take(z.residual)
        tape.give(gradient, dx)
        return total

    def _attention_backward(self, tape: Tape, kept: Kept, dheads: Block) -> Block:
        z = self.sizes
        inside = [*self._core(tape)[1], tape.take(0.0)] if self.core_again else []
        again = [tape.take(z.heads)] if self.core_again else []
        direct = self.attention == "blocked" and not self.rope
        if self.attention == "unfused":
            weights = self._square() * z.width
            inputs = weights if self.fused.masked_softmax else 8 * self._square()
            # Weights of which some were dropped go with the product that gives the gradients of weights and values.
            tape.for_a_moment(z.keys, max(weights, inputs) if self.attention_dropout else weights + inputs)
        gradients = [tape.take(z.projection)] if direct else [tape.take(size) for size in (z.heads, z.keys, z.keys)]
        if self.attention == "blocked":
            narrow = 2.0 * z.heads if z.width == 2 else 0.0
            copies = (3.0 if direct else 2.0) * z.heads if self.share > 1 else 0.0
            held = [tape.take(size) for size in (self._scores(2), narrow, z.logarithms, copies)]
            tape.give(*self._reference(tape), *held)
        tape.give(dheads, *kept.take("core"), *inside, *again)
        if direct:
            return gradients[0]
        if self.rope:
            for i, size in ((1, z.keys), (0, z.heads)):
                turned = tape.take(size)
                tape.give(gradients[i])
                gradients[i] = turned
        joined = tape.take(z.projection)
        tape.give(*gradients)
        return joined


def _share(model: ModelConfig) -> int:
    """Queries of a group of heads."""
    return model.num_attention_heads // model.num_key_value_heads


def _chunks(config: Config) -> int:
    """Pieces of a product whose message travels behind the next one."""
    parallel, tokens = config.parallel, config.model.seq_length * config.batch.micro_batch_size
    if not parallel.tp_comm_overlap or not parallel.sequence_parallel:
        return 1
    rows = config.model.seq_length // parallel.tensor_model_parallel_size
    return max(1, math.floor(min(parallel.tp_comm_overlap_chunks, rows, tokens // _LEAST_TOKENS)))
