"""Contexts of layers: for their construction (LayerContext) and for each call (CallContext).

A LayerContext makes the layers' parameters. Parameters have the same global values on any layout
and any device. A global tensor is drawn in blocks along its tensor-parallel dimension. Each block
has a separate generator, seeded by (seed, name, block). A rank draws only the blocks that its shard
touches, on the CPU, in fp32: torch's CPU generator, logarithms and cosines have no exact equivalent
on a device. Several threads draw, and finished blocks are copied to the device while the next are
drawn.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.kernels.choose import NONE, Fusions
from megatron.kernels.host_copy import HostCopy
from megatron.kernels.library import nodes_for
from megatron.layers.cache import KeyValueCache
from megatron.layers.context_parallel import ContextParallel
from megatron.layers.positions import Alibi, Documents, RotaryEmbedding, alibi_slopes
from megatron.parallel.collectives import gather_first_async
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.hashing import mix
from megatron.parallel.keyed_random import ALL_ROWS, DropoutKey, RowLayout, Site, name_key
from megatron.parallel.sharding import Rows, Sharding, attach, kind_of, shard
from megatron.parallel.topology import Group

BLOCK = 64
_PIECE = 1 << 20
"""Maximum number of elements that a thread draws at a time, unless one block is larger. Drawing
them takes a few milliseconds, so that all threads finish at about the same time.
"""
Fill = Callable[[Tensor, torch.Generator, tuple[int, ...]], object]
"""Fills a block of a parameter. Arguments: block, generator, and the parameter's global shape or,
in muP, its shape in the base model. Several threads call it at once.
"""


def normal(std: float) -> Fill:
    """Return a Fill that draws from N(0, std^2)."""
    return lambda block, generator, shape: block.normal_(0.0, std, generator=generator)


def xavier_uniform() -> Fill:
    """Return a Fill that draws from U(-a, a) (Glorot and Bengio, 2010, eq. 16).

    a = sqrt(6 / (fan in + fan out)), with the fans of the global matrix; in muP, of the base
    model's matrix.
    """

    def fill(block: Tensor, generator: torch.Generator, shape: tuple[int, ...]) -> None:
        bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
        block.uniform_(-bound, bound, generator=generator)

    return fill


def constant(value: float) -> Fill:
    return lambda block, generator, shape: block.fill_(value)


def weight_fills(config: ModelConfig) -> tuple[Fill, Fill]:
    """Return the Fill of most weights, and of those whose output goes to the residual stream.

    These are N(0, std^2) and N(0, std^2 / (2 L)) for L layers (Radford et al., GPT-2, section 2.3),
    or Xavier's distribution for both. In muP, L is the number of layers of the base model.
    """
    if config.init_method_xavier_uniform:
        return xavier_uniform(), xavier_uniform()
    std = config.init_method_std
    layers = config.mup_base_num_layers or config.num_layers
    return normal(std), normal(std / math.sqrt(2.0 * layers))


def draw(sharding: Sharding, fill: Fill, seed: int, device: torch.device | None = None) -> Tensor:
    """Draw the values of one shard, fp32 on `device` or on the CPU; padding is zero.

    In muP a hidden matrix has the base model's variance divided by the growth of its inputs (Yang
    et al., arXiv 2203.03466, table 8).

    In addition to the result, each thread needs memory, on the host and on the device, for at most
    two pieces of _PIECE elements each, or of one block each if a block is larger.
    """
    dim = 0 if sharding.dim is None else sharding.dim
    device = device or torch.device("cpu")
    rest = [n for d, n in enumerate(sharding.global_shape) if d != dim]
    total = sharding.global_shape[dim]
    start = sharding.offset[dim]
    extent = sharding.extent[dim]
    out = torch.zeros(sharding.shape, device=device)
    target = out.movedim(dim, 0)
    rows = BLOCK * max(1, _PIECE // (BLOCK * max(1, math.prod(rest))))  # in a piece
    shape = sharding.base_shape or sharding.global_shape
    shrink = 1.0
    if kind_of(sharding.name, shape) == "hidden":
        shrink = sharding.growth[1] ** -0.5

    def values(piece: Tensor, first: int) -> Tensor:
        """Fill `piece` with the rows from `first`, the first row of a block."""
        for i, block in enumerate(piece.split(BLOCK), first // BLOCK):
            fill(
                block,
                torch.Generator().manual_seed(mix(seed, name_key(sharding.name), i)),
                shape,
            )
        return piece if shrink == 1.0 else piece.mul_(shrink)

    def buffers() -> Iterator[tuple[Tensor, int]]:
        """Yield host memory and the first row of each piece.

        For a GPU the memory is pinned, and torch does not reuse it before it has been copied.
        """
        for first in range(start // BLOCK * BLOCK, start + extent, rows):
            count = min(rows, -(-(start + extent) // BLOCK) * BLOCK - first, total - first)
            yield torch.empty(count, *rest, pin_memory=device.type != "cpu"), first

    def put(piece: Tensor, first: int) -> None:
        low = max(first, start)
        high = min(first + len(piece), start + extent)
        # Rows of `target` may be columns of the shard: the strided copy is made on the device.
        target[low - start : high - start] = piece[low - first : high - first].to(
            device, non_blocking=True
        )

    threads = max(1, min(torch.get_num_threads(), -(-extent // rows)))
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[Future[Tensor], int]] = deque()
        todo = buffers()
        while True:
            waiting.extend(
                (pool.submit(values, piece, first), first)
                for piece, first in itertools.islice(todo, 2 * threads - len(waiting))
            )
            if not waiting:
                return out
            drawn, first = waiting.popleft()
            put(drawn.result(), first)


@dataclass(frozen=True)
class ParameterFactory:
    """Factory of fp32 parameters with their Sharding, for one of `size` tensor-parallel ranks.

    `perform_initialization=False` leaves zeros, for a model that is loaded from a checkpoint
    immediately. `late` leaves parameters without memory: their attribute `late` is a function that
    returns the values; the engine calls it bucket by bucket. `base_shapes` are the global shapes of
    the parameters of muP's base model, by name.
    """

    seed: int
    rank: int
    size: int
    device: torch.device
    perform_initialization: bool = True
    late: bool = False
    base_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def create(
        self,
        name: str,
        global_shape: Sequence[int],
        dim: int | None,
        fill: Fill,
        *,
        padded: int | None = None,
        rows: Rows | None = None,
        **properties: Any,
    ) -> nn.Parameter:
        """Create a parameter; `dim`, padded to `padded` entries, is sharded over the tensor ranks.

        `dim` None: every tensor rank holds the full parameter. `rows` are this rank's entries of
        dimension 0, instead of an equal shard. Raises ConfigError for a scalar.
        """
        if not global_shape:
            raise ConfigError(
                f"parameter {name} has shape (), which can be neither drawn nor divided: give it "
                "shape (1,)"
            )
        if rows is not None:
            offset = rows.first, *[0] * (len(global_shape) - 1)
            shape = rows.count, *global_shape[1:]
            properties |= {"copies": rows.copies}
            sharding = Sharding(name, tuple(global_shape), shape, offset, shape, dim, **properties)
        else:
            sharding = shard(
                name, global_shape, dim, self.rank, self.size, padded=padded, **properties
            )
        sharding = replace(sharding, base_shape=self.base_shapes.get(name))
        return self.make(sharding, lambda: draw(sharding, fill, self.seed, self.device))

    def make(self, sharding: Sharding, values: Callable[[], Tensor]) -> nn.Parameter:
        """Create a parameter of this rank with these values, or with zeros."""
        if self.device.type == "meta" or not self.perform_initialization:
            values = partial(torch.zeros, sharding.shape, device=self.device)
        if not self.late:
            return attach(nn.Parameter(values()), sharding, self.size)
        empty = torch.empty(sharding.shape, device=self.device)
        empty.untyped_storage().resize_(0)
        p = attach(nn.Parameter(empty), sharding, self.size)
        p.late = values  # type: ignore[attr-defined]
        return p


def change_initial(p: nn.Parameter, change: Callable[[Tensor], object]) -> None:
    """Change a new parameter's values in place by `change`; late ones once they are drawn."""
    late: Callable[[], Tensor] | None = getattr(p, "late", None)
    if late is None:
        change(p.detach())
        return

    def changed() -> Tensor:
        values = late()
        change(values)
        return values

    p.late = changed  # type: ignore[attr-defined]


@dataclass
class Experts:
    """State that the layers with experts on one rank share.

    group       the ranks over which the experts of a layer are distributed
    hops        the groups over which a token is sent, one after the other; (): only `group`
    tensor      the ranks that divide each expert; None: the tensor-parallel group
    inputs      those of them that have other samples than this rank
    loss_scale  the factor on a micro-batch's balancing losses in the total loss; set before its
                backward pass (Engine.begin)
    """

    group: Group = field(default_factory=lambda: Group((0,), 0))
    hops: tuple[Group, ...] = ()
    tensor: Group | None = None
    inputs: Group = field(default_factory=lambda: Group((0,), 0))
    loss_scale: float | Tensor = 1.0


@dataclass(frozen=True)
class LayerContext:
    """Distribution of layers over ranks.

    tensor             the tensor-parallel group
    parameters         makes this rank's shard of each parameter
    sequence_parallel  whether each tensor rank holds a slice of the sequence between layers
    overlap            whether the input gradient of a column-parallel layer is reduced while its
                       weight gradient is computed
    chunks             largest number of chunks of tokens in a matrix product: the message of each
                       chunk overlaps with the computation of the next (linear.py)
    context_parallel   this rank's slice of each sequence; None without context parallelism
    weight_gradients   the queue of weight gradients that zero-bubble schedules defer
    fusions            which operators use the fused kernels; none by default
    experts            state that layers with experts share; None without experts
    adapter            rank and factor of a linear layer's adapter, by name (ModelConfig.adapter)
    core_flops         forward FLOPs per token of each layer's attention without its projections,
                       which attention adds: all pairs of a token with the keys of a full sequence
                       or window count, including those that a causal mask hides
    alibis, rotaries   cached results of alibi() and rotary()
    """

    tensor: Group
    parameters: ParameterFactory
    sequence_parallel: bool = False
    overlap: bool = True
    chunks: int = 1
    context_parallel: ContextParallel | None = None
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    fusions: Fusions = NONE
    experts: Experts | None = None
    adapter: Callable[[str], tuple[int, float] | None] = lambda name: None
    core_flops: Counter[int] = field(default_factory=Counter)
    alibis: dict[int, Alibi] = field(default_factory=dict)
    rotaries: dict[tuple[int, float, ModelConfig | None], RotaryEmbedding] = field(
        default_factory=dict
    )

    @property
    def gives_terms(self) -> bool:
        """Return whether layers get terms of a sum as gradients of what all tensor ranks hold.

        These are terms of this rank's tokens or, in a context without messages, of its shards.
        """
        return self.sequence_parallel or self.tensor.size < self.parameters.size

    @property
    def heads_shard(self) -> tuple[int, int]:
        """Return the index of this rank's shard of the heads, and the number of shards."""
        rank = self.tensor.rank
        size = self.tensor.size
        if self.context_parallel is None:
            return rank, size
        return (
            rank * self.context_parallel.heads + self.context_parallel.head_rank,
            size * self.context_parallel.heads,
        )

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's slice [b, s/c] of x [b, s]."""
        return x if self.context_parallel is None else self.context_parallel.cut(x)

    def alibi(self, heads: int) -> Alibi:
        """Return ALiBi for this rank's shard of `heads` heads: one object for all layers."""
        index, count = self.heads_shard
        slopes = alibi_slopes(heads).chunk(count)[index]
        return self.alibis.setdefault(heads, Alibi(slopes.to(self.parameters.device)))

    def rotary(
        self, dimension: int, base: float, model: ModelConfig | None = None
    ) -> RotaryEmbedding:
        """Return the rotary embedding for `dimension` entries of a head: one object for all layers.

        `model` determines how frequencies are scaled and which entries are pairs (RotaryEmbedding).
        """
        made = RotaryEmbedding(dimension, base, self.fusions.rotary, model, self.context_parallel)
        return self.rotaries.setdefault((dimension, base, model), made)

    @cached_property
    def region(self) -> Any:
        """Return the tensor-parallel group, wrapped for messages of linear layers' C++ nodes.

        None for a group of one rank; NotImplemented if messages go through Python.
        """
        group = self.tensor
        nodes = nodes_for(torch.empty(1))
        if group.size == 1:
            return None
        if nodes is None or type(group.handle) is not torch.distributed.ProcessGroup:
            return NotImplemented
        return nodes.region(
            group.handle.group_name,
            group.size,
            group.flight,
            group.kind,
            self.sequence_parallel,
            self.overlap,
            partial(_defer_gathered, self.weight_gradients, group),
        )

    def alone(self) -> LayerContext:
        """Return a context for layers that send no messages, with the same parameter factory."""
        return replace(self, tensor=Group((0,), 0), sequence_parallel=False)

    @classmethod
    def single(cls, seed: int = 1234) -> LayerContext:
        """Make the context of one process without parallelism."""
        return cls(Group((0,), 0), ParameterFactory(seed, 0, 1, torch.device("cpu")))


def _defer_gathered(
    queue: WeightGradients, group: Group, weight: Tensor, dy: Tensor, x: Tensor
) -> None:
    """Defer a weight gradient, and start to gather the layer's input x [s/tp, b, in]."""
    queue.add_product(weight, dy, *gather_first_async(x.detach(), group))


@dataclass(frozen=True)
class CallContext:
    """Inputs of a forward pass over a micro-batch, in addition to the hidden states.

    position_ids   [b, s/c], this rank's, if positions restart within a sequence or do not start at
                   0; None: they are 0 ... s-1
    documents      documents within which tokens attend to each other; None: no limits in a sequence
    dropout        the key of this micro-batch's masks; None switches dropout off
    cache          keys and values of earlier tokens, to which attention appends this pass's own;
                   None except in generation
    padding        bool [b, s]: padding tokens in the full sequences; None: there are none

    numbers        row counts of each layer with experts, by layer index, for recomputation
    """

    position_ids: Tensor | None = None
    documents: Documents | None = None
    dropout: DropoutKey | None = None
    cache: KeyValueCache | None = None
    padding: Tensor | None = None
    numbers: dict[int, HostCopy] = field(default_factory=dict, init=False)

    def hidden_mask(
        self, x: Tensor, layer: int, site: Site, context: LayerContext
    ) -> tuple[int | None, RowLayout | list[RowLayout]]:
        """Return seed and row layout of the mask or noise for the residual stream x [s(/tp), b, h].

        The seed is None if dropout is off. With context parallelism there may be one row layout for
        each half of x.
        """
        if self.dropout is None:
            return None, ALL_ROWS
        shard = (context.tensor.rank, context.tensor.size) if context.sequence_parallel else (0, 1)
        seed = self.dropout.at(layer, site)
        if context.context_parallel is not None:
            layouts = context.context_parallel.hidden_layouts(self.dropout, x, *shard)
            return seed, layouts[0] if len(layouts) == 1 else layouts
        return seed, self.dropout.hidden(x, *shard)
