"""Recorder of the computations, messages and tensors of a model's parts, from the training code.

The modules used in training run forward and backward on tensors without data (tensors.py): the
embedding, one layer, and the last norm with the output layer and the loss. A dispatch mode records
every operator that does work, every message's post and wait, and every storage's allocation and
release. Nothing in this module depends on a layer's structure. Seconds, FLOPs, traffic and memory
are computed from the record.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.model import NOTHING_BEFORE
from megatron.data.sampler import MicroBatch
from megatron.engine.gradients import Terms, to_accumulator
from megatron.engine.optimizer import build_optimizer, unique_parameters
from megatron.engine.optimizer_state import group_keys
from megatron.kernels.cost import Attention, Computation, Memory, Product, Scope, followed
from megatron.kernels.operators import WORK
from megatron.model.gpt import GPTChunk, freeze, hidden_state, layer_context
from megatron.parallel.gradient_accumulator import GradientAccumulator
from megatron.parallel.layout import Layout, LayoutSizes
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Group, ShardGroups, Topology
from megatron.planner.events import (
    GroupMessage,
    Pass,
    PassEvent,
    Post,
    Recomputed,
    Sum,
    TracedModule,
    Wait,
)
from megatron.planner.tensors import (
    Arguments,
    Keywords,
    Operator,
    OperatorRecorder,
    Work,
    group_of,
    tensors_of,
    without_data,
)

_FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias _unsafe_view "
    "_reshape_alias resize_ set_ lift_fresh as_strided_".split()
)
"""Operators other than views that neither read nor write data."""
_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_"))
_ROWS_OUT = frozenset(("embedding", "index_select", "gather", "index"))
_ROWS_IN = {"index_add_": 3, "index_put_": 2, "_index_put_impl_": 2, "index_copy_": 3}
"""Operators that write rows of a table, with the position of the rows among their inputs."""
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
_KINDS = {
    "norm": "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward",
    "activation": (
        "gelu gelu_backward silu silu_backward relu threshold_backward sigmoid tanh pow"
    ),
    "embedding": "embedding embedding_dense_backward " + " ".join(_ROWS_IN),
    "residual": "add mul native_dropout native_dropout_backward",
    "loss": "exp log amax max _log_softmax _log_softmax_backward_data logsumexp",
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""Kinds of torch's operators; any other operator counts as a copy."""
_MESSAGES = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "recv": "ring",
}

Call = tuple[Callable[..., object], Arguments, Keywords]
Calls = tuple[Computation, list[Call]]
"""Computation, with the operator calls that it consists of."""


class _Recorder(OperatorRecorder):
    """Recorder of passes.

    names  path of each module
    calls  if set, a list that collects each computation's operators
    last   pass that was recorded last
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[torch.nn.Module, str] = {}
        self.calls: list[Calls] | None = None
        self.last: Pass
        self._steps: list[PassEvent] | None = None
        self._labels: list[str] = []
        self._label = ""
        self._modules = [""]  # stack of running modules; "" outside all modules
        # torch's sequence numbers at which the autograd nodes of a module begin, and the modules
        self._begins: list[int] = [0]
        self._owners: list[str] = [""]
        self._counted = self._recomputed = self._sent = 0

    @contextlib.contextmanager
    def recorded(self, category: str) -> Iterator[None]:
        """Record a pass as `last`; `category` is that of the memory allocated in the pass."""
        self._steps = []
        self._labels = []
        self.category = category
        self._label = ""
        yield
        self.last = Pass(tuple(self._steps), tuple(self._labels))
        self._steps = None

    def begin(self) -> None:
        """Restart the numbering of storages and messages: equal passes then have equal records."""
        self.number = self._sent = 0

    def note(self, step: PassEvent, *_: object) -> None:
        """Record a step."""
        if self._steps is not None:
            self._steps.append(step)
            self._labels.append(self._label)

    allocated = freed = note

    # -- modules -----------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module, *_: object) -> None:
        self._modules.append(self.names.get(module, self._modules[-1]))
        self._mark()

    def leave_module(self, *_: object) -> None:
        self._modules.pop()
        self._mark()

    def _mark(self) -> None:
        self._begins.append(torch.autograd._get_sequence_nr())
        self._owners.append(self._modules[-1])

    def _look(self) -> None:
        """Find the operator's module: the running one or, in a backward pass, the graph node's."""
        if len(self._modules) > 1 or self.category == "activations":
            self._label = self._modules[-1]
        elif (node := torch._C._current_autograd_node()) is not None:
            number = node._sequence_nr()
            if number <= self._begins[-1] + 1:
                self._label = self._owners[bisect.bisect_right(self._begins, number) - 1]

    # -- computations ------------------------------------------------------------------------------

    def enter(self, scope: Scope) -> None:
        """Begin a scope of work that the code declares, or of recomputation."""
        if scope.work is None:
            self._recomputed += 1
            return
        if not self._counted:
            self._look()
            self._computed(scope.work)
        self._counted += 1

    def leave(self, scope: Scope) -> None:
        if scope.work is None:
            self._recomputed -= 1
        else:
            self._counted -= 1

    def _computed(self, work: Computation) -> None:
        self.note(Recomputed(work) if self._recomputed else work)
        if self.calls is not None:
            self.calls.append((work, []))

    def run(self, func: Operator, args: Arguments, kwargs: Keywords) -> object:
        if self._steps is None:
            return super().run(func, args, kwargs)
        out = func(*args, **kwargs)
        self._look()
        self.see(out)
        if self._counted and self.calls is None:
            return out
        work = _rule(func)(args, kwargs, out)
        if work is not None:
            if not self._counted:
                self._computed(work)
            if self.calls is not None:
                self.calls[-1][1].append((func, args, kwargs))
        return out

    # -- messages ----------------------------------------------------------------------------------

    def sent(self, name: str, args: Arguments, tensors: list[Tensor], work: Work) -> None:
        if name == "send":  # arrives with the message received in the same step of a ring
            return
        self._sent += 1
        work.number = self._sent
        kind = next(
            (planner_name for torch_name, planner_name in _MESSAGES.items() if torch_name in name),
            name,
        )
        size = max((t.nbytes for t in tensors), default=0)
        self._look()
        group = group_of(args).kind
        if (kind, group) == ("all_to_all", "context"):
            group = "heads"
        self.note(Post(GroupMessage(kind, size, group), self._sent))

    def arrived(self, work: Work) -> None:
        if work.number:
            self._look()
            self.note(Wait(work.number))


# -- the work of an operator -----------------------------------------------------------------------

_Rule = Callable[[Arguments, Keywords, Tensor], Computation | None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Count the bytes moved by reading or writing the tensors; expanded rows count once."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


@functools.cache
def _rule(func: Operator) -> _Rule:
    """Return the rule that derives an operator's work from its arguments and results."""
    name = func._schema.name.partition("::")[2]
    declared = WORK[name] if func.namespace == "megatron" else _KIND.get(name, "copy")
    if not isinstance(declared, str):
        return lambda args, kwargs, out: declared(*args, **kwargs)
    if func.is_view or name in _FREE:
        return lambda args, kwargs, out: None
    if name in _PRODUCTS:
        return _product
    if "scaled_dot_product" in name:
        queries_at = int("backward" in name)  # position of the queries

        def attention(args: Arguments, kwargs: Keywords, out: object) -> Computation:
            batch, heads, queries, head_dim = args[queries_at].shape
            keys = args[queries_at + 1].shape[2]
            # With a sliding window, a query sees its own key and as many earlier ones as there are
            # keys before the block.
            seen = None if keys == queries else keys - queries + 1
            return Attention(batch, heads, queries, head_dim, bool(queries_at), seen)

        return attention
    if name in _ROWS_OUT:
        return lambda args, kwargs, out: Memory(2 * out.nbytes, 1, declared)
    if name in _ROWS_IN:
        return lambda args, kwargs, out: Memory(3 * args[_ROWS_IN[name]].nbytes, 1, declared)
    written = [
        i
        for i, a in enumerate(func._schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    ]
    names = [func._schema.arguments[i].name for i in written]

    def moved(args: Arguments, kwargs: Keywords, out: object) -> Computation | None:
        into = [args[i] for i in written if i < len(args)]
        inputs = tensors_of([*args, *(v for n, v in kwargs.items() if n not in names)])
        if name in _OVERWRITE:
            inputs = [t for t in inputs if t is not into[0]]
        # An operator may write to an input and return another tensor.
        written_to = [*into, *(kwargs[n] for n in names if n in kwargs)]
        results = {id(t): t for t in tensors_of([*written_to, out])}.values()
        # no work for operators that only query a tensor's device or shape
        written_bytes = _bytes(results)
        return Memory(_bytes(inputs) + written_bytes, 1, declared) if written_bytes else None

    return moved


def _product(args: Arguments, kwargs: Keywords, out: object) -> Computation:
    a, b = tensors_of(args)[-2:]
    batch = a.shape[0] if a.dim() == 3 else 1
    return Product(a.shape[-2], b.shape[-1], a.shape[-1], batch)


# -- what is run -----------------------------------------------------------------------------------


class _Before(torch.autograd.Function):
    """Dummy previous stage: produces a chunk's input and consumes its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


class _Behind(torch.autograd.Function):
    """Dummy next stage: produces the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


class _Piece:
    """Part of the model ("embedding", "layer" or "head"), with gradient sums as in the engine."""

    def __init__(self, config: Config, topology: Topology, kind: str, recorder: _Recorder) -> None:
        first = kind == "embedding"
        last = kind == "head"
        context = layer_context(config, topology, perform_initialization=False)
        make: Any = config.pieces.model or GPTChunk
        chunk = make(config, context, 0 if first else 1, range(kind == "layer"), last=last)
        freeze(config.model, chunk)
        self.config = config
        self.device = topology.device
        self.recorder = recorder
        self.needs_gradient = NOTHING_BEFORE not in config.model.freeze  # the input
        self.chunk = chunk.to(getattr(torch, config.precision.dtype_name)).train()
        self.queue = context.weight_gradients
        self.hands_on = 0
        self.terms = Terms([self.chunk], context.sequence_parallel)
        sums = torch.bfloat16 if config.precision.gradient_bytes == 2 else torch.float32
        for index, p in enumerate(unique_parameters(self.chunk)):
            if not p.requires_grad:
                continue
            total = torch.empty(p.shape, dtype=sums, device=topology.device)
            direct = config.kernels.gradient_accumulation_fusion
            added = functools.partial(recorder.note, Sum(index, True))
            accumulator = GradientAccumulator(p, total, added, direct)
            accumulator.before_use = functools.partial(recorder.note, Sum(index, False))
            accumulator.fresh = False  # most micro-batches are not the first of their step
            p.gradient_accumulator = accumulator  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(to_accumulator)
        recorder.names = {module: name for name, module in self.chunk.named_modules()}
        if last:
            recorder.vocabulary = self.chunk.output_weight.shape[0]

    def forward(self) -> tuple[Pass, list[Tensor]]:
        """Record a forward pass; return it and a list that contains the graph's root.

        The list lets `backward` free the root.
        """
        self.recorder.begin()
        config = self.config
        device = self.device
        chunk = self.chunk
        size = config.batch.micro_batch_size, config.model.seq_length
        tokens, labels, positions = (
            torch.empty(size, dtype=torch.int64, device=device) for _ in range(3)
        )
        batch = MicroBatch(tokens, labels, torch.empty(size, device=device), positions, None, 0)
        shape, dtype = hidden_state(config)
        anchor = torch.empty((), requires_grad=True, device=device)
        with self.recorder.recorded("activations"):
            hidden = None
            if not chunk.is_first:
                made = functools.partial(torch.empty, shape, dtype=dtype, device=device)
                hidden = _Before.apply(anchor, made)  # type: ignore[no-untyped-call]
                hidden = hidden if self.needs_gradient else hidden.detach()
            out = chunk(batch, hidden, late_loss=True)
            hidden = None
            self.hands_on = out.nbytes
            if not chunk.is_last:
                out = _Behind.apply(out)  # type: ignore[no-untyped-call]
        return self.recorder.last, [out]

    def backward(self, root: list[Tensor]) -> Pass:
        one = torch.ones_like(root[0])
        with self.recorder.recorded("temporary"):
            if root[0].requires_grad:  # a part may be frozen
                root[0].backward(one)
            root.clear()
        return self.recorder.last

    def split(self, root: list[Tensor]) -> tuple[Pass, Pass]:
        """Record the two halves of a backward pass."""
        self.queue.begin()
        inputs = self.backward(root)
        waiting = self.queue.take()[::-1]
        with self.recorder.recorded("temporary"), torch.no_grad():
            while waiting:
                waiting.pop()()
        return inputs, self.recorder.last

    def parameters(self) -> tuple[Sharding, ...]:
        """List the shardings of the parameters in order of use.

        Call this after a forward pass, which determines which gradients are partial.
        """
        records = []
        for p in unique_parameters(self.chunk):
            s = sharding_of(p)
            partial = self.config.parallel.tensor_model_parallel_size > 1 and s.dim is None
            partial = s.copies > 1 or (partial and self.terms.partial(p, p.requires_grad))
            records.append(replace(s, partial_gradient=partial, frozen=not p.requires_grad))
        return tuple(records)


def _topology(config: Config, device: str) -> Topology:
    """Create the topology of one rank in a layer's groups, whose messages are dropped."""
    parallel = config.parallel
    layout = Layout.for_world(
        parallel.tensor_model_parallel_size * parallel.gradient_ranks,
        LayoutSizes(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            expert_ranks_per_node=parallel.expert_ranks_per_node or 1,
        ),
    )
    alone = Group((0,), 0)
    of_experts = "expert", "expert_between", "expert_within", "expert_tensor", "expert_inputs"
    kinds = "tensor", "context", *of_experts
    groups = {kind: _group(kind, layout.lines[kind].size) for kind in kinds}
    if not layout.folded:
        groups["expert_tensor"] = groups["tensor"]
    shards = ShardGroups.undivided(alone)
    return Topology(
        layout=layout,
        rank=0,
        device=torch.device(device),
        world=groups["tensor"],
        data=alone,
        pipeline=alone,
        model=groups["tensor"],
        embedding=None,
        expert_data=alone,
        expert_span=alone,
        shards=shards,
        expert_shards=shards,
        owners=(0,),
        **groups,
    )


class _Handle(torch.distributed.ProcessGroup):
    """Process group that sends nothing. kind: its name, as in events.GroupMessage.group."""

    def __init__(self, kind: str, size: int) -> None:
        # without a store, which the type stubs require
        super().__init__(0, size)  # type: ignore[call-arg]
        self.kind = kind


def _group(kind: str, size: int) -> Group:
    return Group(range(size), 0, _Handle(kind, size) if size > 1 else None, kind)


@contextlib.contextmanager
def _followed(config: Config, device: str, kind: str) -> Iterator[_Piece]:
    """Yield a part of the model on tensors without data, for a "cuda" or "cpu" device.

    This machine need not have such a device.
    """
    on = "cpu" if device == "cpu" else "meta"
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_data(on, recorder))
        topology = _topology(config, on)
        ranks = torch.distributed.distributed_c10d._world.pg_group_ranks
        of_groups = {
            group.handle: {rank: rank for rank in group.ranks}
            for group in (
                topology.tensor,
                topology.context,
                topology.expert_tensor,
                topology.expert_inputs,
                *topology.expert_hops,
            )
            if group.handle is not None
        }
        # where torch looks up the ranks of a message's group
        stack.enter_context(unittest.mock.patch.dict(ranks, of_groups))
        piece = _Piece(config, topology, kind, recorder)
        stack.enter_context(followed(recorder))
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(recorder.enter_module),
            hooks.register_module_forward_hook(recorder.leave_module, always_call=True),
        ):
            stack.callback(handle.remove)
        yield piece


def record(config: Config, device: str, kind: str) -> TracedModule:
    """Record one part of the model: "embedding", "layer" or "head"."""
    with _followed(config, device, kind) as piece:
        before = piece.recorder.live_bytes()
        piece.backward(piece.forward()[1])  # builds tables and runs one-time device queries
        tables = piece.recorder.live_bytes() - before
        forward, root = piece.forward()
        backward = piece.backward(root)
        inputs, weights = piece.split(piece.forward()[1])
        return TracedModule(
            piece.parameters(), piece.hands_on, tables, forward, backward, inputs, weights
        )


def record_update(
    config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Pass], int]:
    """Record the optimizer's work on full parameters; return a pass for each parameter by name.

    Also return the bytes per element of the tensors that the optimizer receives.

    shapes  shape of each parameter, by name
    """
    recorder = _Recorder()
    passes = dict[str, Pass]()
    sizes = list[int]()

    def with_full_parameters(
        flats: object,
        change: Callable[[str, Tensor], object],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        sizes.append(dtype.itemsize)
        for name, shape in shapes.items():
            x = torch.empty(shape, dtype=dtype, device="meta")
            with recorder.recorded("temporary"):
                change(name, x)
            passes[name] = recorder.last

    with without_data("meta", recorder):
        weights = torch.nn.Parameter(torch.zeros(8))
        weights.grad = torch.zeros(8)
        groups = [{"params": [weights], "weight_decay": 0.0, **group_keys(with_full_parameters)}]
        build_optimizer(groups, config, weights.device).step()
    return passes, sizes[0]


def calls(config: Config, device: str, kind: str) -> list[Calls]:
    """List one part's computations, forward then backward, with their operators, without data."""
    with _followed(config, device, kind) as piece:
        piece.recorder.calls = recorded = list[Calls]()
        piece.backward(piece.forward()[1])
        return recorded
