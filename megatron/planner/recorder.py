"""What the stages of a model compute, send and keep, in order, read off the code that trains.

The project's own modules run forward and backward on tensors without data (tensors.py): the embedding, one layer, and
the last norm with the output layer and the loss. A dispatch mode notes every operator that does something, every
message where it is posted and where it is waited for, and every storage where it is made and where nothing refers to it
any more. Nothing here knows what a layer is made of. Seconds, FLOPs, traffic and memory are folds over what is noted.
"""
from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.gradients import to_sink
from megatron.engine.terms import Terms
from megatron.kernels import library
from megatron.kernels.register import WORK
from megatron.kernels.work import Attention, Computation, Memory, Product, Scope, followed
from megatron.model.gpt import GPTChunk, hidden_dtype, hidden_shape, layer_context
from megatron.parallel.sharding import sharding_of
from megatron.parallel.sink import GradientSink
from megatron.parallel.topology import Group, Layout, Topology
from megatron.planner.events import Again, Give, Message, Parameter, Part, Pass, Post, Step, Take, Wait
from megatron.planner.tensors import Operators, Work, flat, is_empty, without_data
from megatron.protocols import Stage

_aten = torch.ops.aten
_FREE = frozenset((
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view",
    "_reshape_alias", "resize_", "set_", "lift_fresh", "as_strided_",
))  # fmt: skip
"""Operators that make a tensor without writing to it, beside views."""
_OVERWRITE = frozenset(("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_"))
_ROWS_OUT = frozenset(("embedding", "index_select", "gather", "index"))
_ROWS_IN = {"index_add_": 3, "index_put_": 2, "_index_put_impl_": 2, "index_copy_": 2}
"""Operators on rows of a table: where the rows are among their inputs."""
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm"))
_KINDS = {
    "norm": ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"),
    "activation": (
        "gelu", "gelu_backward", "silu", "silu_backward", "relu", "threshold_backward", "sigmoid", "tanh", "pow",
    ),
    "embedding": ("embedding", "embedding_dense_backward", *_ROWS_IN),
    "residual": ("add", "mul", "native_dropout", "native_dropout_backward"),
    "loss": ("exp", "log", "amax", "max", "_log_softmax", "_log_softmax_backward_data", "logsumexp"),
}  # fmt: skip
_KIND = {name: kind for kind, names in _KINDS.items() for name in names}
"""What torch's operators do; those that are not here copy."""
_MESSAGES = {"reduce_scatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce"}


class _Recorder(Operators):
    """Notes what is done while a pass is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[torch.nn.Module, str] = {}
        self._vocabulary = -1  # length of the logits' rows
        self._steps: list[Step] | None = None
        self._labels: list[str] = []
        self._category, self._label = "activations", ""
        self._modules: list[str] = []
        # The numbers that torch gives to the nodes of a graph, at which another module's began.
        self._begins: list[int] = [0]
        self._owners: list[str] = [""]
        self._counted = self._recomputed = self._sent = 0
        self._ids = 0
        self._alive: dict[int, tuple[int, Any]] = {}
        self._rules: dict[Any, _Rule] = {}
        self.calls: list[Calls] | None = None

    def know(self, chunk: GPTChunk) -> None:
        """The names of its modules."""
        self._names = {module: name for name, module in chunk.named_modules()}
        if chunk.is_last:
            self._vocabulary = chunk.output_weight.shape[0]

    @contextlib.contextmanager
    def recorded(self, category: str) -> Iterator[list[Pass]]:
        """Inside a pass is noted, and handed out at the end. category: of what is made in it."""
        found: list[Pass] = []
        self._steps, self._labels, self._category, self._label = [], [], category, ""
        try:
            yield found
        finally:
            found.append(Pass(tuple(self._steps), tuple(self._labels)))
            self._steps = None

    def begin(self) -> None:
        """Number what follows alike each time."""
        self._ids = self._sent = 0

    def held(self) -> int:
        """Bytes of what is alive."""
        return sum(storage.nbytes() for _, ref in self._alive.values() if (storage := ref()) is not None)

    def _note(self, step: Step) -> None:
        if self._steps is not None:
            self._steps.append(step)
            self._labels.append(self._label)

    # -- modules -------------------------------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module, _: Any) -> None:
        self._modules.append(self._names.get(module, self._modules[-1] if self._modules else ""))
        self._mark()

    def leave_module(self, *_: Any) -> None:
        self._modules.pop()
        self._mark()

    def _mark(self) -> None:
        self._begins.append(torch.autograd._get_sequence_nr())
        self._owners.append(self._modules[-1] if self._modules else "")

    def _look(self) -> None:
        """Whose operator this is: of the module that runs, or in a backward pass of the one whose node runs."""
        if self._modules:
            self._label = self._modules[-1]
        elif self._category == "activations":
            self._label = ""
        elif (node := torch._C._current_autograd_node()) is not None:
            number = node._sequence_nr()
            if number <= self._begins[-1] + 1:
                self._label = self._owners[bisect.bisect_right(self._begins, number) - 1]

    # -- pieces of work that the code declares -------------------------------------------------------------------------

    def enter(self, scope: Scope) -> None:
        if scope.work is None:
            self._recomputed += 1
            return
        if not self._counted:
            self._look()
            self._computed(scope.work)
            if self.calls is not None:
                self.calls.append((scope.work, []))
        self._counted += 1

    def leave(self, scope: Scope) -> None:
        if scope.work is None:
            self._recomputed -= 1
        else:
            self._counted -= 1

    def _computed(self, work: Computation) -> None:
        self._note(Again(work) if self._recomputed else work)

    # -- operators -----------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if self._steps is not None:
            self._look()
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor):
                self._see(each)
        if self._steps is not None and (not self._counted or self.calls is not None):
            rule = self._rules.get(func)
            if rule is None:
                rule = self._rules[func] = _rule(func)
            work = rule(args, kwargs, out)
            if work is not None and not self._counted:
                self._computed(work)
            if work is not None and self.calls is not None:
                if not self._counted:
                    self.calls.append((work, []))
                self.calls[-1][1].append((func, args, kwargs))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or not storage.nbytes() or not is_empty(tensor):
            return
        self._ids += 1
        number = self._ids
        self._alive[key] = number, weakref.ref(storage, lambda _: self._gone(key, number))
        category = self._category
        if category != "activations" and tensor.dim() >= 2 and tensor.shape[-1] == self._vocabulary:
            category = "logits"
        self._note(Take(storage.nbytes(), number, category))

    def _gone(self, key: int, number: int) -> None:
        del self._alive[key]
        self._note(Give(number))

    # -- messages ------------------------------------------------------------------------------------------------------

    def sent(self, name: str, args: Any, tensors: list[torch.Tensor], work: Work) -> None:
        self._sent += 1
        work.number = self._sent  # type: ignore[attr-defined]
        kind = next((ours for theirs, ours in _MESSAGES.items() if theirs in name), name)
        self._look()
        self._note(Post(Message(kind, max((t.nbytes for t in tensors), default=0)), self._sent))

    def arrived(self, work: Work) -> None:
        self._look()
        self._note(Wait(work.number))  # type: ignore[attr-defined]


_Rule = Callable[[Any, Any, Any], Computation | None]
Call = tuple[Any, Any, Any]
"""An operator, its arguments, and those by name."""
Calls = tuple[Computation, list[Call]]
"""A computation, and what it is made of."""


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """That reading or writing each of them moves: of one that repeats rows, those that there are."""
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in flat(values) if isinstance(t, torch.Tensor)]


def _rule(func: Any) -> _Rule:
    """How an operator's work follows from its arguments and results."""
    name = func._schema.name.partition("::")[2]
    if func.namespace == "megatron" and callable(WORK[name]):
        declared: Any = WORK[name]
        return lambda args, kwargs, out: declared(*args, **kwargs)
    if func.is_view or name in _FREE:
        return lambda args, kwargs, out: None
    if name in _PRODUCTS:
        return _product
    if "scaled_dot_product" in name:
        backward = "backward" in name
        return lambda args, kwargs, out: Attention(*_attended(args[1 if backward else 0]), backward)
    kind = str(WORK[name]) if func.namespace == "megatron" else _KIND.get(name, "copy")
    if name in _ROWS_OUT:
        return lambda args, kwargs, out: Memory(2 * out.nbytes, 1, kind)
    if name in _ROWS_IN:
        place = _ROWS_IN[name]
        return lambda args, kwargs, out: Memory(3 * args[place if place < 3 else 3].nbytes, 1, kind)
    written = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    names = [func._schema.arguments[i].name for i in written]
    overwrites = name in _OVERWRITE

    def moved(args: Any, kwargs: Any, out: Any) -> Computation | None:
        into = [args[i] for i in written if i < len(args)]
        outs = [kwargs[n] for n in names if n in kwargs]
        inputs = _tensors(args) + _tensors(v for n, v in kwargs.items() if n not in names)
        if overwrites:
            inputs = [t for t in inputs if t is not into[0]]
        results = _tensors(into + outs) or _tensors(out if isinstance(out, (tuple, list)) else (out,))
        written_bytes = _bytes(results)  # none where a tensor is only asked about: its device, its shape
        return Memory(_bytes(inputs) + written_bytes, 1, kind) if written_bytes else None

    return moved


def _attended(q: torch.Tensor) -> tuple[int, int, int, int]:
    batch, heads, seq, d = q.shape
    return batch, heads, seq, d


def _product(args: Any, kwargs: Any, out: torch.Tensor) -> Computation:
    *sums, a, b = args[:3] if len(args) > 2 and isinstance(args[2], torch.Tensor) else args[:2]
    batch = a.shape[0] if a.dim() == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    moved = 0
    if sums and out.element_size() > a.element_size():
        # Of a sum in the factors' own format the old values cost no more than the lines that a result is written to.
        moved = _bytes(sums) + _bytes([out]) - out.numel() * a.element_size()
    return Product(m, n, k, batch, moved)


# -- what is run -------------------------------------------------------------------------------------------------------


class _Before(torch.autograd.Function):
    """The stage before: it makes a chunk's input and takes its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Behind(torch.autograd.Function):
    """The stage behind: it makes the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = x.shape, x.dtype, x.device
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        shape, dtype, device = ctx.like
        return torch.empty(shape, dtype=dtype, device=device)


class _Piece:
    """A chunk of the model with its sums of gradients, as an engine would have put it up."""

    def __init__(self, config: Config, topology: Topology, kind: str) -> None:
        first, layers, last = kind == "embedding", range(kind == "layer"), kind == "head"
        context = layer_context(config, topology, perform_initialization=False)
        dtype = getattr(torch, config.precision.dtype_name)
        self.config, self.last, self.queue, self.device = config, last, context.weight_gradients, topology.device
        make: Stage = config.pieces.model or GPTChunk
        self.chunk: Any = make(config, context, 0 if first else 1, layers, last=last).to(dtype).train()
        self.terms = Terms([self.chunk], context.sequence_parallel)
        self.tensor = topology.tensor.size
        sums = torch.bfloat16 if config.precision.gradient_bytes == 2 else torch.float32
        for p in self.chunk.parameters():
            total = torch.empty(p.shape, dtype=sums, device=topology.device)
            sink = GradientSink(p, total, None, config.kernels.gradient_accumulation_fusion)
            sink.fresh = False  # most micro-batches are not the first of their step
            p.gradient_sink = sink  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(to_sink)

    def forward(self, recorder: _Recorder) -> tuple[Pass, list[torch.Tensor]]:
        """Also the root of the graph, alone in a list: what the graph holds goes with it, after the backward pass."""
        recorder.begin()
        config, device = self.config, self.device
        size = config.batch.micro_batch_size, config.model.seq_length
        tokens, labels, positions = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(3))
        batch = MicroBatch(tokens, labels, torch.empty(size, device=device), positions, None, 0)
        hidden = None
        if not self.chunk.is_first:
            shape, dtype = hidden_shape(config), hidden_dtype(config)
            anchor = torch.empty((), requires_grad=True, device=device)
        with recorder.recorded("activations") as found:
            if not self.chunk.is_first:
                hidden = _Before.apply(anchor, lambda: torch.empty(shape, dtype=dtype, device=device))
            out = self.chunk(batch, hidden, late_loss=True)
            hidden, self.hands_on = None, out.nbytes
            if not self.last:
                out = _Behind.apply(out)
        return found[0], [out]

    def backward(self, recorder: _Recorder, root: list[torch.Tensor]) -> Pass:
        one = torch.ones_like(root[0])
        with recorder.recorded("temporary") as found:
            root[0].backward(one)
            root.clear()
        return found[0]

    def split(self, recorder: _Recorder, root: list[torch.Tensor]) -> tuple[Pass, Pass]:
        self.queue.begin()
        inputs = self.backward(recorder, root)
        waiting = self.queue.take()[::-1]
        with recorder.recorded("temporary") as weights, torch.no_grad():
            while waiting:
                waiting.pop(0)()
        return inputs, weights[0]

    def parameters(self) -> tuple[Parameter, ...]:
        found = []
        for p in self.chunk.parameters():
            s = sharding_of(p)
            partial = self.tensor > 1 and s.dim is None and self.terms.partial(p, True)
            found.append(Parameter(s.name, tuple(p.shape), s.global_shape, s.dim, s.decay, s.tied, partial))
        return tuple(found)


def _topology(config: Config, device: str) -> Topology:
    """A rank of a tensor-parallel group whose messages go nowhere, without the rest of the job."""
    size = config.parallel.tensor_model_parallel_size
    alone, tensor = Group((0,), 0), Group((0,), 0, kind="tensor")
    if size > 1:
        handle: Any = torch.distributed.ProcessGroup  # whose constructor without a store its stubs leave out
        tensor = Group(range(size), 0, handle(0, size), "tensor")
    return Topology(Layout(size, 1, 1), 0, tensor, tensor, alone, alone, tensor, None, torch.device(device))


@contextlib.contextmanager
def _followed(config: Config, device: str, kind: str) -> Iterator[tuple[_Recorder, _Piece]]:
    """Follow what a part of the model runs inside, on a "cuda" or "cpu" device that need not be here."""
    on, recorder = "cpu" if device == "cpu" else "meta", _Recorder()
    with contextlib.ExitStack() as stack:
        if on == "meta":
            stack.enter_context(library.assumed("meta"))
        stack.enter_context(without_data(on, recorder))
        piece = _Piece(config, _topology(config, on), kind)
        recorder.know(piece.chunk)
        stack.enter_context(followed(recorder))
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(recorder.enter_module),
            hooks.register_module_forward_hook(recorder.leave_module, always_call=True),
        ):
            stack.callback(handle.remove)
        yield recorder, piece


def record(config: Config, device: str, kind: str) -> Part:
    """Run one part of the model, "embedding", "layer" or "head"."""
    with _followed(config, device, kind) as (recorder, piece):
        before = recorder.held()
        piece.backward(recorder, piece.forward(recorder)[1])  # makes tables, and asks what is asked of a device once
        tables = recorder.held() - before
        forward, root = piece.forward(recorder)
        backward = piece.backward(recorder, root)
        inputs, weights = piece.split(recorder, piece.forward(recorder)[1])
        return Part(piece.parameters(), piece.hands_on, tables, forward, backward, inputs, weights)


def calls(config: Config, device: str, kind: str) -> list[Calls]:
    """List what one part computes, forward and backward, in order: the operators, on tensors without data."""
    with _followed(config, device, kind) as (recorder, piece):
        recorder.calls = found = list[Calls]()
        piece.backward(recorder, piece.forward(recorder)[1])
        return found
