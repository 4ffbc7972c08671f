"""The memory of a chunk's passes over one micro-batch: embedding, layers, what is recomputed, norm and output layer.

Layers of a kind are alike, so of a run of them one is followed while the others are held: the last in the forward pass;
in the backward pass the same, which comes first, and the first, for which the weight gradients of the others wait.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megatron.kernels.choose import NONE
from megatron.planning.memory.layer import Kept, Layer, Settings
from megatron.planning.memory.operators import Operators
from megatron.planning.memory.tape import ACTIVATIONS, LOGITS, TEMPORARY, Block, Held, Tape

if TYPE_CHECKING:
    from megatron.config import RecomputeConfig

_AT_A_TIME = 1 << 22
"""Elements that torch's operators take at a time where there is no kernel (megatron.kernels.ops.cross_entropy)."""


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of one micro-batch in one chunk, beyond what was held before.

    kept      after the forward pass
    forward   the fullest moment of the forward pass
    backward  that of the backward pass, what was kept included
    waiting   after a backward pass whose weight gradients wait
    """

    kept: Held
    forward: Held
    backward: Held
    waiting: Held


class _Unit(NamedTuple):
    """`times` so many layers that run together; `again`: their forward pass is made again as a whole."""

    layers: int
    again: bool
    times: int


class _Passed(NamedTuple):
    """What the forward pass of a unit has left: of each layer, where it keeps something, and the output."""

    kept: Kept | None
    output: Block


def units_of(recompute: RecomputeConfig, layers: int) -> list[_Unit]:
    """The layers of a chunk in the groups in which they are recomputed."""
    n = recompute.recompute_num_layers
    if recompute.recompute_granularity != "full":
        found = [_Unit(1, False, layers)]
    elif recompute.recompute_method == "block":
        found = [_Unit(1, True, min(n, layers)), _Unit(1, False, max(0, layers - n))]
    else:
        found = [_Unit(n, True, layers // n), _Unit(layers % n, True, 1 if layers % n else 0)]
    return [unit for unit in found if unit.times]


@lru_cache(maxsize=1 << 14)
def chunk_memory(
    settings: Settings, operators: Operators, layers: int, *, first: bool, last: bool
) -> ChunkMemory:
    """Of a chunk with `layers` layers, on the first or the last stage or between."""
    chunk = _Chunk(settings, operators, units_of(settings.recompute, layers), first, last)
    forward = chunk.forward()
    kept = chunk.tape.now
    chunk.tape.begin_again()
    chunk.backward()
    return ChunkMemory(kept, forward, chunk.tape.fullest, chunk.waiting)


class _Chunk:
    """One micro-batch's way through a chunk, on one tape."""

    def __init__(
        self, settings: Settings, operators: Operators, units: list[_Unit], first: bool, last: bool
    ) -> None:
        self.settings, self.model, self.operators = settings, settings.model, operators
        self.layer = Layer(settings, operators)
        self.z, self.units, self.first, self.last = self.layer.sizes, units, first, last
        self.tape = self._tape()
        self.passed: list[_Passed] = []
        self.input: Block | None = None
        self.normed: list[Block] = []
        self.waiting = self.waiting_of_last = Held()

    def _tape(self, kind: int = ACTIVATIONS) -> Tape:
        return Tape(self.operators.block_bytes, kind)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self) -> Held:
        """The fullest moment."""
        tape, z = self.tape, self.z
        self.input = self._embed() if self.first else tape.take(z.residual)
        for unit in self.units:
            tape.add(self._left(unit), unit.times - 1)
            self.passed.append(self._unit_forward(tape, unit))
        if self.last:
            self.normed = [tape.take(z.outside), tape.take(z.statistics), *self.layer.norm_steps(tape)]
        elif self.passed:  # the output is a message then
            tape.give(self.passed[-1].output)
        return tape.fullest

    def _left(self, unit: _Unit) -> Held:
        """What a unit's forward pass leaves, its output included."""
        if unit.times == 1:
            return Held()
        tape = self._tape()
        self._unit_forward(tape, unit)
        return tape.now

    def _unit_forward(self, tape: Tape, unit: _Unit) -> _Passed:
        if unit.again:
            return _Passed(None, self.layer.forget(tape, unit.layers))
        kept, output = self.layer.forward(tape)
        assert output is not None, "only a recomputed layer has no output"
        return _Passed(kept, output)

    def _embed(self) -> Block:
        """The sum of the embeddings, which the residual stream and the first norm keep."""
        tape, z, model = self.tape, self.z, self.model
        now = tape.take(z.whole)
        if self.layer.tp > 1:
            found = tape.take(z.whole)  # without the rows of other ranks
            tape.give(now)
            now = tape.take(z.outside)
            tape.give(found)
        if model.position_embedding_type == "learned_absolute":
            now = self._instead(now, z.outside, z.outside / self.settings.micro_batch_size)
        if not self.layer.same_format:
            now = self._instead(now, z.residual)
        if model.hidden_dropout:
            if not self.layer.fused.bias_dropout:
                tape.take(z.residual / z.width)
            now = self._instead(now, z.residual)
        return now

    def _instead(self, before: Block, n_bytes: float, beside: float = 0.0) -> Block:
        other = self.tape.take(beside)
        after = self.tape.take(n_bytes)
        self.tape.give(before, other)
        return after

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """The tape then has the fullest moment, `waiting` what waits."""
        tape = self.tape
        tape.kind = TEMPORARY
        if self.last:
            gradient = self._head_backward()
            if self.passed:
                tape.give(self.passed[-1].output)
        else:
            gradient = tape.take(self.z.residual)
        for place in reversed(range(len(self.units))):
            unit, passed = self.units[place], self.passed[place]
            if place + 1 < len(self.units):
                tape.give(passed.output)
            gradient = self._run_backward(unit, passed, gradient)
        if self.first:
            self._embed_backward(gradient)

    def _run_backward(self, unit: _Unit, passed: _Passed, gradient: Block) -> Block:
        tape, left = self.tape, self._left(unit)
        gradient = self._unit_backward(unit, passed.kept, gradient)
        if unit.times == 1:
            return gradient
        late = self.waiting_of_last
        tape.add(left, -(unit.times - 1.0))
        if late.total > 0:
            # The first unit of the run comes last, and what all others wait with is there.
            tape.add(late, unit.times - 2.0)
            self.waiting = _sum(self.waiting, late, unit.times - 2.0)
            again = self._unit_forward(self._tape(), unit)
            tape.add(_without(left, again.output))
            gradient = self._unit_backward(unit, again.kept, gradient)
        return gradient

    def _unit_backward(self, unit: _Unit, kept: Kept | None, gradient: Block) -> Block:
        """The unit's output has gone before."""
        tape, layer = self.tape, self.layer
        dropped = layer.dropped(tape, gradient) if unit.again else None
        kepts: list[tuple[Kept, Block | None]] = []
        if kept is not None:
            kepts.append((kept, None))
        else:
            source = None
            for i in range(unit.layers):
                made, output = layer.forward(tape, stops_early=i + 1 == unit.layers)
                kepts.append((made, source))
                source = output
        waiting = Held()
        for made, source in reversed(kepts):
            gradient = layer.backward(tape, made, gradient, dropped)
            dropped = None
            tape.give(source)
            for block in made.late:
                waiting = _sum(waiting, Held(*(block.n_bytes if kind == block.kind else 0.0 for kind in range(3))))
        self.waiting_of_last = waiting
        self.waiting = _sum(self.waiting, waiting)
        return gradient

    def _head_backward(self) -> Block:
        """Output layer and loss over chunks of tokens (megatron.layers.vocabulary_loss): the last norm's gradient."""
        tape, z, model, layer = self.tape, self.z, self.model, self.layer
        tokens = model.seq_length * self.settings.micro_batch_size
        at_once = tokens if self.settings.deferring else min(self.operators.tokens, tokens)
        columns = model.padded_vocab_size(layer.tp) // layer.tp
        normed, *steps = self.normed
        whole = tape.take(z.whole) if layer.gathers else None
        dx = tape.take(z.whole)
        logits = tape.take(float(at_once * columns * z.width), LOGITS)
        if not layer.fused.cross_entropy:
            piece = 4.0 * columns * min(at_once, max(1, _AT_A_TIME // columns))
            wide, padded = tape.take(piece), tape.take(piece, LOGITS)  # the gradient in fp32, and with its padding
            rounded = tape.take(piece * z.width / 4, LOGITS) if z.width < 4 else None
            tape.give(wide, padded, rounded)
        if layer.gathers:
            terms, dx = dx, tape.take(z.outside)
            tape.give(terms)
        if self.settings.deferring:
            self.waiting = Held(0.0 if whole else normed.n_bytes, logits.n_bytes, whole.n_bytes if whole else 0.0)
            tape.give(normed if whole else None)
        else:
            # Through autograd the gradient of several chunks of tokens is one sum in fp32.
            summed = not layer.direct and at_once < tokens
            total = tape.take(4.0 * columns * model.hidden_size) if summed else None
            layer.weight_gradient(tape, columns, model.hidden_size)
            tape.give(total, logits, whole, normed)
        gradient = tape.take(z.residual)
        tape.give(dx, *steps)
        return gradient

    def _embed_backward(self, gradient: Block) -> None:
        """Gradients of the rows that were looked up; the embeddings' sum has gone with the first norm.

        On a GPU they leave two sums in fp32 for each 16 (megatron.kernels.ops.embedding); torch takes all in fp32.
        """
        tape, z, layer, kernels = self.tape, self.z, self.layer, self.operators.fusions != NONE
        tape.give(self.input)
        if layer.tp > 1:
            gathered = tape.take(z.whole) if layer.gathers else None
            tape.give(gradient if layer.gathers else None)
            masked = tape.take(z.whole)
            tape.give(gathered)
            gradient = masked
        if kernels and self.operators.gpu:
            tape.for_a_moment(8.0 * -(-(z.whole / z.width / self.model.hidden_size) // 16) * self.model.hidden_size)
        elif z.width < 4 and not (kernels and self.settings.sum_width < 4):
            tape.for_a_moment(z.whole * 4 / z.width)
        tape.give(gradient)


def _sum(a: Held, b: Held, times: float = 1.0) -> Held:
    return Held(*(x + times * y for x, y in zip(a, b, strict=True)))


def _without(held: Held, block: Block) -> Held:
    return _sum(held, Held(block.n_bytes), -1.0)
