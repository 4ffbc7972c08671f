"""Shards of global tensors, sums of their gradients, and random numbers by global position.

Every parameter has a `Sharding` as `parameter.sharding`. From it the engine reads how gradients are
reduced, and the checkpoint under which name and offset a tensor is stored; neither needs to know
the layer that made it.

An optimizer that keeps the sums attaches a `GradientSink` to each parameter. A layer that computes
a weight gradient itself adds it there and returns None to autograd, so that no second tensor of the
weight's size is needed and nothing iterates over all parameters after a backward pass. A parameter
without a sink, or with one that is not `direct`, gets its gradient from autograd as usual; in the
second case the sink's owner takes it from `.grad`.

Random numbers depend on what they are for, not on what was drawn before. Whether an element is
dropped depends on (seed, layer, site) and on its place in the tensor of the whole job: sample,
head, position, column. So masks are the same on any layout, for any size of the micro-batch, with
and without recomputation and after a resume, and no generator state needs to be stored. A rank that
holds a part of the tensor has that part of the mask.
"""

from __future__ import annotations

import contextlib
import enum
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

Kind = Literal["hidden", "embedding", "output", "vector"]


def kind_of(name: str, global_shape: Sequence[int]) -> Kind:
    """Return the kind of a parameter, on which its optimizer and its learning rate may depend.

    hidden     a matrix of a layer, from features to features; several side by side have 3 dimensions
    embedding  a table from tokens or positions to features
    output     any other matrix, normally from features to the vocabulary
    vector     a norm or a bias

    A tied embedding is an embedding. A router, or the gate of a shared expert, is an output: from
    features to experts.

    >>> kind_of("layers.0.mlp.dense_h_to_4h.weight", (2, 8, 4))
    'hidden'
    >>> kind_of("layers.0.mlp.dense_h_to_4h.bias", (2, 8))
    'vector'
    """
    if len(global_shape) < 2 or name.endswith(".bias"):
        return "vector"
    if name.startswith("layers."):
        return "output" if name.endswith((".router.weight", ".gate.weight")) else "hidden"
    return "embedding" if name.startswith("embedding.") else "output"


@dataclass(frozen=True)
class Sharding:
    """A shard of a global tensor.

    name             unique name in the whole model, the same on any layout
    global_shape     shape without padding
    offset           global index of the local tensor's first element
    extent           how much of the local tensor, from its first element, is real; the rest is
                     padding
    dim              the dimension that tensor parallelism divides; None when every tensor rank
                     holds the same values
    partial_gradient whether the gradients of the tensor ranks are terms of a sum; None: as the
                     autograd graph of the first forward pass says (engine/gradients.py)
    tied             whether this is the tied embedding weight, held by the first and the last stage
    decay            whether weight decay applies
    copies           how many neighbouring tensor ranks hold this part of a divided dimension; the
                     gradients of more than one are terms of a sum
    base_shape       global shape in the base model of muP; None without muP
    fp32             whether forward and backward passes use it in fp32, also beside 16-bit weights
    experts          whether expert-parallel ranks hold different parts of dimension 0
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    dim: int | None = None
    partial_gradient: bool | None = None
    tied: bool = False
    decay: bool = True
    copies: int = 1
    base_shape: tuple[int, ...] | None = None
    fp32: bool = False
    experts: bool = False

    @property
    def growth(self) -> tuple[float, float]:
        """Return by how much outputs and inputs are more than in the base model of muP.

        A vector has outputs only. The features of a table are its inputs.
        """
        shape, base = self.global_shape, self.base_shape or self.global_shape
        if kind_of(self.name, shape) == "vector":
            return math.prod(shape) / math.prod(base), 1.0
        return math.prod(shape[:-1]) / math.prod(base[:-1]), shape[-1] / base[-1]


@dataclass(frozen=True)
class Rows:
    """Rows of a global tensor that a tensor rank holds where they are not an even part.

    copies  see Sharding
    """

    first: int
    count: int
    copies: int = 1


def shard(
    name: str,
    global_shape: Sequence[int],
    dim: int | None,
    rank: int,
    size: int,
    *,
    padded: int | None = None,
    **properties: Any,
) -> Sharding:
    """Return the shard of tensor rank `rank` of `size`; dimension `dim` is cut into equal parts.

    `padded` is the padded length of `dim`, a multiple of `size`; entries beyond the global shape
    are not real.

    >>> shard("w", (6, 4), 0, 1, 2).offset
    (3, 0)
    >>> shard("e", (10, 4), 0, 1, 2, padded=16).extent
    (2, 4)
    """
    offset, extent = [0] * len(global_shape), list(global_shape)
    if dim is not None:
        total = padded or global_shape[dim]
        assert total % size == 0, (
            f"{name}: dimension {dim} of length {total} does not divide by {size}"
        )
        each = total // size
        offset[dim] = min(rank * each, global_shape[dim])
        extent[dim] = max(0, min(each, global_shape[dim] - rank * each))
    return Sharding(name, tuple(global_shape), tuple(offset), tuple(extent), dim, **properties)


def attach(
    parameter: torch.nn.Parameter, sharding: Sharding, tensor_size: int
) -> torch.nn.Parameter:
    """Set a parameter's `sharding`, and the attributes that mark a shard for DeepSpeed."""
    parameter.sharding = sharding  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = sharding.dim is not None and tensor_size > 1  # type: ignore[attr-defined]
    return parameter


def sharding_of(parameter: torch.Tensor) -> Sharding:
    """Return the Sharding of a parameter."""
    found: Sharding | None = getattr(parameter, "sharding", None)
    assert found is not None, (
        "parameter without sharding: create it through megatron.layers.context"
    )
    return found


# --- sink


_BLOCK = 1 << 20  # elements on a CPU: 2 MiB in 16 bit
_GPU_BYTES = 1 << 27


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of 16-bit matrices to an fp32 matrix without rounding.

    CUDA since torch 2.8, ROCm since 2.10, not on a CPU. Builds that lack it raise, and some
    returned wrong sums (pytorch issue 154086), so a small product whose sum is exact is tried once
    for each device.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    a = (torch.arange(32, device=device) % 7).to(dtype).expand(64, 32)
    b = (torch.arange(48, device=device) % 5).to(dtype).expand(64, 48)
    small = 2.0**-12  # next to a sum of up to 1536 it is exact in fp32 and lost in 16 bits
    total = torch.full((32, 48), small, device=device)
    try:
        add_in_fp32(total, a.contiguous(), b.contiguous(), 1.0)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(total, 64.0 * torch.outer(a[0].float(), b[0].float()) + small)


def add_in_fp32(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, keep: float) -> None:
    """Set the fp32 matrix `total` to keep * total + dy^T x, for dy and x in 16 bits."""
    torch.addmm(total, dy.t(), x, out_dtype=torch.float32, beta=keep, out=total)


def rows_at_once(device_type: str, rows: int, columns: int, element_bytes: int) -> int:
    """Return how many rows of a weight [rows, columns] one product computes through a buffer.

    On a CPU the buffer stays in the cache: a product the size of an embedding table would be read
    from memory once more, and from fresh pages where the allocator has no such block (464 ms
    instead of 323 for [50304, 1024] times [1024, 768] in bf16 on one core). A GPU needs large
    products: all rows, in equal parts where they are above 128 MiB.
    """
    if device_type == "cpu":
        return min(rows, max(_BLOCK // columns, 256))
    products = -(-rows * columns * element_bytes // _GPU_BYTES)
    return min(rows, -(-rows // (128 * products)) * 128)  # 128: whole tiles of the product


class GradientSink:
    """The gradient sum of one parameter.

    total   fp32 or bf16, in the parameter's shape; a view of whatever the optimizer reduces and
            reads
    added   called with the parameter after each complete contribution, e.g. to count those of a
            bucket
    direct  whether layers may add here; False leaves it to autograd
            (--no-gradient-accumulation-fusion)

    before_use  called before the sum is read or written, where its memory is not always there

    The first contribution after `renew()` overwrites `total`, so it need not be filled with zeros;
    if there was none, `complete()` fills it.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        total: torch.Tensor,
        added: Callable[[torch.nn.Parameter], None] | None = None,
        direct: bool = True,
    ) -> None:
        assert total.dtype in (torch.float32, torch.bfloat16) and total.shape == parameter.shape, (
            "a sum is in fp32 or bf16, and in the weight's shape"
        )
        self.parameter, self._total, self.added, self.direct = parameter, total, added, direct
        self.in_fp32 = total.dtype == torch.float32
        self.before_use: Callable[[], None] | None = None
        self.fresh = True
        self.widens = False  # whether torch adds products in 16 bits to the sum: not known yet

    @property
    def total(self) -> torch.Tensor:
        """Return the tensor of the sum."""
        if self.before_use is not None:
            self.before_use()
        return self._total

    def renew(self) -> None:
        """Discard the sum: the next contribution begins a new one."""
        self.fresh = True

    def complete(self) -> torch.Tensor:
        """Return the sum; zeros where nothing was contributed."""
        if self.fresh:
            self.total.zero_()
            self.fresh = False
        return self.total

    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient in the parameter's shape, in any floating format, without autograd."""
        if self.fresh:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)
        self.done()

    def add_product(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        last: bool = True,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Add dy^T x, without autograd: dy [tokens, out], x [tokens, in], of one format.

        The last dimension of the weight is `in`.

        `last` False: more parts of this pass's contribution follow. `counts`: the weight is a
        matrix for each entry, which gets the product of that many tokens, one after the other.
        """
        if counts is None:
            self._add_one(self.total.view(dy.shape[-1], x.shape[-1]), dy, x)
        else:
            of_experts = self.total.unbind(), dy.split(counts), x.split(counts)
            for total, a, b in zip(*of_experts, strict=True):
                self._add_one(total.view(dy.shape[-1], x.shape[-1]), a, b)
        self.fresh = False
        if last:
            self.done()

    def _add_one(self, total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        keep = 0.0 if self.fresh else 1.0
        if dy.dtype == total.dtype:
            torch.addmm(total, dy.t(), x, beta=keep, out=total)
        elif total.dtype == torch.float32 and _adds_in_fp32(dy.device, dy.dtype):
            self.widens = True
            add_in_fp32(total, dy, x, keep)
        else:
            self._add_by_rows(total, dy, x)

    def _add_by_rows(self, total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add through a buffer, in blocks of rows of the weight."""
        rows = rows_at_once(dy.device.type, len(total), total.shape[1], dy.element_size())
        product = dy.new_empty(rows, total.shape[1])
        for part, of_part in zip(total.split(rows), dy.split(rows, dim=1), strict=True):
            values = torch.mm(of_part.t(), x, out=product[: len(part)])
            if self.fresh:
                part.copy_(values)
            else:
                part.add_(values)

    def done(self) -> None:
        """Complete a contribution.

        Also called by a layer that added to the sum returned by `complete()`.
        """
        self.fresh = False
        if self.added is not None:
            self.added(self.parameter)


def _any_sink(parameter: torch.Tensor) -> GradientSink | None:
    return getattr(parameter, "gradient_sink", None)


def sink_of(parameter: torch.Tensor) -> GradientSink | None:
    """Return the sink to which a layer adds; None where it leaves its gradient to autograd.

    A parameter that was frozen after it got a sink has none: autograd drops its gradient.
    """
    found = _any_sink(parameter)
    return found if found is not None and found.direct and parameter.requires_grad else None


def gradient_output(parameter: torch.Tensor | None) -> tuple[torch.Tensor | None, bool]:
    """Return where a kernel writes the fp32 gradient of a parameter, and whether it adds it there.

    It is the parameter's sum where that is in fp32; `gradient_written` follows. Without a parameter
    there is no gradient: None.
    """
    if parameter is None:
        return None, False
    sink = sink_of(parameter)
    if sink is None or not sink.in_fp32:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device), False
    return sink.total, not sink.fresh


def gradient_written(
    parameter: torch.Tensor | None, gradient: torch.Tensor | None
) -> torch.Tensor | None:
    """Complete the contribution of `gradient_output`: return the gradient where autograd adds it."""
    if parameter is None or gradient is None:
        return None
    sink = sink_of(parameter)
    if sink is None:
        return gradient
    if sink.in_fp32:
        sink.done()
    else:
        sink.add(gradient)
    return None


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, sink: GradientSink) -> torch.Tensor:
        ctx.sink = sink
        return parameter.detach().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.sink.add(gradient)
        return None, None


def wide(parameter: torch.Tensor) -> torch.Tensor:
    """Return an fp16 parameter with a sink in fp32, so that its gradient is not rounded.

    Others are returned unchanged. For vectors whose gradient is a sum over tokens: with sequence
    parallelism each rank sums over its own, and in fp16 the whole sum could overflow where the
    ranks' parts do not.
    """
    if parameter.dtype != torch.float16:
        return parameter
    found = _any_sink(parameter)
    if found is None:
        return parameter
    wider: torch.Tensor = _Wide.apply(parameter, found)  # type: ignore[no-untyped-call]
    return wider


@torch.no_grad()
def deliver(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient outside of a backward pass, where no hook would see `.grad`.

    It is added to the sink, otherwise to `.grad`; a parameter that was frozen meanwhile gets nothing.
    """
    if not parameter.requires_grad:
        return
    found = _any_sink(parameter)
    if found is not None:
        found.add(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def within_backward() -> bool:
    """Return whether a backward pass is under way: a forward pass within it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class WeightGradients:
    """The queue of deferred weight gradients, shared by a rank's linear layers and its executor.

    For the split backward pass of zero-bubble schedules (Qi et al., arXiv 2401.10241, sec. 2): in a
    BACKWARD_INPUT instruction the linear layers compute only the gradient of their input and queue
    the weight's part here as a callable; the BACKWARD_WEIGHT instruction of the same micro-batch
    runs it later.
    """

    def __init__(self) -> None:
        self.deferring = False  # layers must leave their weight gradients here
        self._waiting: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Defer every weight gradient until `take`."""
        assert not self._waiting, "weight gradients of another backward pass were never taken"
        self.deferring = True

    def add(self, compute: Callable[[], None]) -> None:
        assert self.deferring, "a weight gradient was deferred outside begin() ... take()"
        self._waiting.append(compute)

    def add_product(
        self,
        weights: torch.Tensor | tuple[torch.Tensor, ...],
        dy: torch.Tensor,
        x: torch.Tensor,
        gathered: Any = None,
    ) -> None:
        """Defer the gradient dy^T x of a weight, or of some: dy [.., out], x [.., in].

        gathered  the message of dy or x, which is waited for first
        """
        weights = (weights,) if isinstance(weights, torch.Tensor) else weights
        # not x itself: a deferred gradient must not keep the graph
        self.add(partial(_deferred, weights, dy, x.detach(), gathered))

    def take(self) -> list[Callable[[], None]]:
        """Stop deferring and return what was deferred, in order."""
        waiting, self._waiting, self.deferring = self._waiting, [], False
        return waiting


def weight_gradients(
    weights: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor | None]:
    """Compute dW [out, in], the sum over tokens of dy [.., out] times x [.., in], for each weight.

    The rows of the weights, one below the other, are those of dW. It has the weight's shape; None
    if the weight has a sink, to which it was added.
    """
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    parts: Sequence[torch.Tensor] = (dy,)
    if len(weights) > 1:
        parts = dy.split([weight.numel() // weight.shape[-1] for weight in weights], dim=1)
    gradients = list[torch.Tensor | None]()
    for weight, part in zip(weights, parts, strict=True):
        sink = sink_of(weight)
        if sink is None:
            gradients.append((part.t() @ x).view(weight.shape))
        else:
            sink.add_product(part, x)
            gradients.append(None)
    return gradients


@torch.no_grad()
def _deferred(
    weights: tuple[torch.Tensor, ...], dy: torch.Tensor, x: torch.Tensor, gathered: Any
) -> None:
    if gathered is not None:
        gathered.wait()
    for weight, gradient in zip(weights, weight_gradients(weights, dy, x), strict=True):
        if gradient is not None:
            deliver(weight, gradient)


_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return a well-distributed 63-bit hash of the values.

    SplitMix64 (Steele et al., OOPSLA 2014), chained over them.
    """
    state = 0
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_key(name: str) -> int:
    """Return a number for a name; the same in every process and Python version."""
    return zlib.crc32(name.encode())


class Site(enum.IntEnum):
    """The places in a layer where a mask is used."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    ROUTER = 4


class Place(NamedTuple):
    """The place of a tensor's rows among the rows [samples, heads, positions] of the whole job.

    Row r is number start + r // period * outer + r % period * inner of them; `positions` are those
    of a head. By default the tensor is the whole, in one piece.

    of_sample  the rows of a sample
    samples    how many samples come before `start`, int64 [1] on the device: what a replayed pass
               reads anew; None: none
    """

    start: int = 0
    period: int = 1
    outer: int = 1
    inner: int = 0
    positions: int = 0
    of_sample: int = 0
    samples: torch.Tensor | None = None

    def after(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the rows that come so many rows after the first one."""
        numbers = rows + self.start
        return numbers if self.samples is None else numbers + self.samples * self.of_sample

    def first(self) -> int:
        """Return the number of the first row; the host waits for it if it is on the device."""
        return self.start + (0 if self.samples is None else int(self.samples) * self.of_sample)


WHOLE = Place()


@dataclass(frozen=True)
class DropoutKey:
    """The source of a micro-batch's masks: the run's seed and the number of its first sample.

    samples  to be added to that number on the device, see Place
    """

    seed: int
    sample: int
    samples: torch.Tensor | None = None

    def at(self, layer: int, site: Site) -> int:
        """Return the seed of the masks of one site."""
        return mix(self.seed, layer, int(site))

    def hidden(self, x: torch.Tensor, rank: int = 0, ranks: int = 1) -> Place:
        """Return the place of x [s, b, h], part `rank` of `ranks` of the sequence, as one head."""
        rows, samples = x.shape[:2]
        positions = rows * ranks
        start = self.sample * positions + rank * rows
        return Place(start, samples, 1, positions, positions, positions, self.samples)

    def weights(self, positions: int, heads: int, rank: int = 0, ranks: int = 1) -> Place:
        """Return the place of attention weights [b, heads, positions, keys].

        They are part `rank` of `ranks` of the heads.
        """
        start = (self.sample * ranks + rank) * heads * positions
        of_sample = ranks * heads * positions
        return Place(start, heads * positions, of_sample, 1, positions, of_sample, self.samples)


def dropout_mask(
    like: torch.Tensor, probability: float, seed: int, place: Place = WHOLE
) -> torch.Tensor:
    """Return a boolean mask of `like`'s shape, True with 1 - probability.

    In each head of each sample it is a part of a separate mask.
    """
    keep = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    return _draw(
        keep, seed, place, lambda x, generator: x.bernoulli_(1.0 - probability, generator=generator)
    )


def placed_noise(like: torch.Tensor, most: float, seed: int, place: Place) -> torch.Tensor:
    """Return numbers of U(1 - most, 1 + most) in `like`'s shape and type, a part of each sample's."""
    noise = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _draw(
        noise,
        seed,
        place,
        lambda x, generator: x.uniform_(1.0 - most, 1.0 + most, generator=generator),
    )


def _draw(
    out: torch.Tensor,
    seed: int,
    place: Place,
    fill: Callable[[torch.Tensor, torch.Generator], object],
) -> torch.Tensor:
    """Fill `out` by a generator for each head of each sample, and return it."""
    if out.is_meta:  # without data nothing is drawn
        return out
    generator = torch.Generator(device=out.device)
    if not place.positions:
        fill(out, generator.manual_seed(seed))
        return out
    _, period, outer, inner, positions, *_ = place
    start = place.first()
    rows = out.view(-1, out.shape[-1])
    # The rows of a head are adjacent or, where samples are, `period` apart.
    heads = (
        rows.split(positions) if inner == 1 else [rows[sample::period] for sample in range(period)]
    )
    whole = rows.new_empty(positions, out.shape[-1])
    for i, part in enumerate(heads):
        row = i * positions if inner == 1 else i
        head, first = divmod(start + row // period * outer + row % period * inner, positions)
        fill(whole, generator.manual_seed(mix(seed, head)))
        part.copy_(whole[first : first + len(part)])
    return out


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's default generator inside the block and restore it afterwards.

    For operations that draw from it.
    """
    if device.type == "meta":  # without data nothing is drawn
        yield
        return
    # the CPU's state is always restored
    devices: list[torch.device] = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        (torch.get_device_module(device) if devices else torch).manual_seed(seed)
        yield
