"""Captured passes: the passes of a chunk over a micro-batch, recorded once and replayed.

After some eager steps each pass is recorded as a CUDA or HIP graph, which the host launches in
one call. Host decisions stay outside: messages between stages, gradient buckets, the factor on a
loss. A chunk has as many slots as its schedule has micro-batches in flight: a slot has static
inputs, and the memory of the activations that its forward pass keeps for its backward pass. A
micro-batch's integers become inputs on the device as well: dropout masks depend on the index of
its first sample.

Like torch.cuda.make_graphed_callables, this module records the forward pass with autograd and the
backward pass through its graph, in one memory pool. The graph is retained, so that the backward
pass of the last micro-batch, during which gradients are sent, can run eagerly.

A CPU has no such graphs. There, a rehearsal records the operators instead and calls them again on
the same memory. It enforces the rules of a capture, so that tests find code that would break one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.errors import ConfigError
from megatron.parallel.autograd import Context
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.gradient_accumulator import GradientAccumulator

_aten = torch.ops.aten


def _operators(names: str) -> frozenset[OpOverloadPacket[..., object]]:
    return frozenset(getattr(_aten, name) for name in names.split())


DATA_DEPENDENT = _operators(
    "equal nonzero masked_select _unique2 unique_dim unique_consecutive bincount repeat_interleave"
)
"""Operators that return a value to the host, or a tensor whose size depends on values."""
INDEXED = _operators("index index_put index_put_ _index_put_impl_")
"""Operators that need a tensor of such a size if an index is a mask."""
_MOVES = _operators("set_ resize_ resize_as_")
_EMPTY = _operators("empty empty_like new_empty empty_strided new_empty_strided")

MicroBatch = Any  # any dataclass whose attributes are the inputs of chunks
Chunk = Callable[[MicroBatch, Tensor | None], Tensor]


class Root(torch.autograd.Function):
    """A scalar from which a chunk's graph is run backward, without keeping the chunk's output.

    Autograd needs the output tensor only for the shape of its gradient. This node takes the
    gradient from a list instead, so the output's memory is free as soon as it has been sent.
    """

    @staticmethod
    def forward(ctx: Context, output: Tensor, gradient: list[Tensor]) -> Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Context, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.pop(), None


class _Rules(TorchDispatchMode):
    """Rules of a capture, checked for every operator that runs in it.

    what   name of the pass, for errors
    names  names of the chunk's modules, by id
    calls  list to which a rehearsal appends a function for each operator, which repeats it; None:
           a device's graph records the operators

    Tensors from outside, such as rotary tables, are kept alive: a replay reads their memory.
    """

    def __init__(
        self, what: str, names: Mapping[int, str], calls: list[Callable[[], object]] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        self._names = names
        self._calls = calls
        self._made = set[int]()  # storages of results
        self._sent = set[int]()  # storages of messages
        self.outside = dict[int, Tensor]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch's compiler would be imported

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        self._check(func, args, kwargs)
        out = func(*args, **kwargs)
        used = _tensors_of((args, kwargs))
        results = _tensors_of(out)
        if func.namespace == "c10d":
            self._sent.update(map(_storage, used))
        elif (
            func is _aten.copy_.default
            and _storage(args[0]) in self._sent
            and _storage(args[1]) not in self._made
        ):  # gloo sums in its own memory, and copies the sum during the wait
            return out
        for x in used:
            if (storage := _storage(x)) not in self._made:
                self.outside[storage] = x.detach()
        if not func.is_view:  # an operator that writes to an input may also return new tensors
            self._made.update({*map(_storage, results)} - {*map(_storage, used)})
        if self._calls is not None and not func.is_view and func.overloadpacket not in _EMPTY:
            self._calls.append(_repeated(func, args, kwargs, results))
        return out

    def _check(
        self, func: OpOverload[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        packet = func.overloadpacket
        problem = ""
        masks = (torch.bool, torch.uint8)
        if packet is _aten._local_scalar_dense or packet in DATA_DEPENDENT:
            problem = "returns a value to the host, or a size that depends on values"
        elif packet in INDEXED and any(x is not None and x.dtype in masks for x in args[1]):
            problem = "selects by a mask, so that a size depends on values"
        elif packet in _MOVES:
            problem = "moves or frees memory that a replay would use"
        elif torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(packet):
            problem = "draws random numbers, which a replay would repeat"
        elif packet in (_aten._to_copy, _aten.copy_):
            of = [x.device for x in args[:2] if isinstance(x, Tensor)]
            to = torch.device(kwargs.get("device") or of[0])
            if any(x.type != to.type for x in of):
                problem = "copies between host and device"
        if problem:
            raise ConfigError(
                f"--cuda-graph-impl local cannot capture {self._what}: {func} in {self._location()} "
                f"{problem}. Leave the flag out, or compute this outside of the passes"
            )

    def _location(self) -> str:
        """Return the innermost module of the chunk whose code is running, else the code itself."""
        frame = sys._getframe(1).f_back
        code = ""
        while frame is not None:
            here = frame.f_code
            if (name := self._names.get(id(frame.f_locals.get("self")))) is not None:
                return f"{name or 'the chunk'} ({here.co_filename}:{frame.f_lineno})"
            if not code and "/megatron/" in here.co_filename and here.co_filename != __file__:
                code = f"{here.co_qualname} ({here.co_filename}:{frame.f_lineno})"
            frame = frame.f_back
        return code or "the backward pass"


def _repeated(
    func: OpOverload[..., object], args: Any, kwargs: Any, results: list[Tensor]
) -> Callable[[], object]:
    """Return a function that repeats an operator, writing to the memory of its results."""

    def bare(x: Tensor) -> Tensor:
        # Without autograd, and with a separate version counter: the counters that autograd has
        # recorded do not change.
        return x.data

    args, kwargs = tree_map_only(Tensor, bare, (args, kwargs))
    if func.namespace == "c10d":  # a message, for which a replay waits immediately

        def send() -> None:
            for work in tree_leaves(func(*args, **kwargs)):
                if not isinstance(work, Tensor):
                    work.wait()

        return send
    outputs = [bare(x) for x in results]

    def compute() -> None:
        for output, x in zip(outputs, _tensors_of(func(*args, **kwargs)), strict=True):
            if _storage(output) != _storage(x):  # else it was written in place
                output.copy_(x)

    return compute


class Recorded:
    """One recorded pass: a graph, or a rehearsal if the pool is on a CPU.

    The constructor also runs `function` once, with the effects of a `replay`.

    added  parameters that got a contribution to their gradient, in order
    """

    def __init__(
        self,
        function: Callable[[], None],
        pool: Pool,
        what: str,
        names: Mapping[int, str],
        accumulators: Iterable[GradientAccumulator],
    ) -> None:
        self.added: list[nn.Parameter] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls: list[Callable[[], object]] = []
        hooks = [(accumulator, accumulator.added) for accumulator in accumulators]
        for accumulator, _ in hooks:
            accumulator.added = self.added.append
        rules = _Rules(what, names, self._calls if pool.stream is None else None)
        try:
            if pool.stream is None:
                with rules:
                    function()
            else:
                self._graph = torch.cuda.CUDAGraph()
                # Threads that copy or wait for messages may continue (capture_error_mode). All
                # passes share one stream: libraries create a handle per stream (pytorch pull
                # request 187745).
                with (
                    torch.cuda.graph(
                        self._graph,
                        pool=pool.handle,
                        stream=pool.stream,
                        capture_error_mode="thread_local",
                    ),
                    rules,
                ):
                    function()
                self._graph.replay()
        finally:
            for accumulator, added in hooks:
                accumulator.added = added
        self._outside = rules.outside  # kept alive
        self._tell()

    def replay(self) -> None:
        """Repeat the pass on the current contents of its inputs."""
        if self._graph is None:
            for call in self._calls:
                call()
        else:
            self._graph.replay()
        self._tell()

    def _tell(self) -> None:
        """Count the contributions to gradients, as layers do in an eager pass."""
        for p in self.added:
            added = p.gradient_accumulator.added  # type: ignore[attr-defined]
            if added is not None:
                added(p)


Message = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of the hidden states between stages."""


class Pool:
    """Stream and memory shared by all recorded passes, and shape and dtype of their messages.

    The stream is None on a CPU.
    """

    def __init__(self, device: torch.device, flight: FlightRecorder, message: Message) -> None:
        self.device = device
        self.flight = flight
        self.message = message
        self.stream: torch.cuda.Stream | None = None
        self.handle: torch.cuda._POOL_HANDLE | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.handle = torch.cuda.graph_pool_handle()


class Slot:
    """Slot for one micro-batch in flight in a stage: its static inputs and recorded passes.

    loss  on the last stage, the loss, valid once the backward pass has run; else None
    """

    def __init__(self, stage: CapturedStage, batch: MicroBatch, hidden: Tensor | None) -> None:
        self._stage = stage
        # separate tensors, int64 [1] for integers
        inputs = {name: x.clone() for name, x in _tensors(batch).items()}
        for name, x in vars(batch).items():
            if isinstance(x, int):
                inputs[name] = torch.full((1,), x, dtype=torch.int64, device=stage.pool.device)
        self._batch = dataclasses.replace(batch, **inputs)
        self._hidden = None if hidden is None else hidden.detach().clone().requires_grad_()
        self._passes = dict[str, Recorded]()
        self._root: Tensor
        self._gradient: list[Tensor] = []  # see Root
        self._deferred: list[Callable[[], None]] = []
        self._of_output: Tensor | None = None  # the output's gradient, if passes are split
        self._eager = False  # whether the last backward pass ran eagerly
        self.loss: Tensor | None = None

    def forward(self, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Return a copy of the stage's output, which is the loss on the last stage."""
        inputs = [(x, getattr(batch, name)) for name, x in _tensors(self._batch).items()]
        if self._hidden is not None:
            inputs.append((self._hidden, hidden))
        for buffer, x in inputs:  # autograd must not detect that saved tensors have changed
            if isinstance(x, Tensor):
                buffer.data.copy_(x)
            else:  # passed as a kernel argument: nothing is copied from the host
                buffer.data.fill_(x)
        self._run("forward pass", self._forward)
        output = self._stage.output if self.loss is None else self.loss
        assert output is not None, "every stage except the last has an output"
        return output.clone()

    def _forward(self) -> None:
        output = self._stage.chunk(self._batch, self._hidden)
        self._root = Root.apply(output, self._gradient)  # type: ignore[no-untyped-call]
        if self._stage.output is None:
            self.loss = output.detach().reshape(())
        else:
            self._stage.output.copy_(output.detach())

    def backward(self, gradient: Tensor, eager: bool, split: bool) -> Tensor | None:
        """Run the backward pass from the output's gradient; return the input's gradient.

        eager  run it operator by operator, through the graph of the recorded forward pass
        split  leave the weight gradients to `later`: an order may do so for some passes only
        """
        stage = self._stage
        self._eager = eager
        of_output = stage.gradient
        if split:  # the weight gradients read it later, when other slots have used the stage's
            if self._of_output is None:
                self._of_output = torch.empty_like(of_output)
            of_output = self._of_output
        of_output.copy_(gradient)
        run = partial(self._backward, of_output)
        if eager:
            run()
        else:
            self._run("first half of the backward pass" if split else "backward pass", run)
        return None if stage.gradient_of_input is None else stage.gradient_of_input.clone()

    def _backward(self, of_output: Tensor) -> None:
        if self._root.requires_grad:  # a chunk may be frozen
            self._gradient.append(of_output)
            torch.autograd.backward(self._root, retain_graph=True)
        of_input = self._stage.gradient_of_input
        if of_input is None or self._hidden is None:
            return
        if self._hidden.grad is None:
            of_input.zero_()
        else:
            of_input.copy_(self._hidden.grad)
            self._hidden.grad = None

    def later(self, deferred: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """Return functions that compute the deferred weight gradients and release this slot.

        deferred  functions that the backward pass left in the queue: none if it was replayed
        """
        if self._eager:
            return [*deferred, self.release]
        if deferred:  # the pass was recorded just now; the functions' tensors stay allocated
            self._deferred = deferred
        return [lambda: self._run("weight gradients", self._weights), self.release]

    def _weights(self) -> None:
        for compute in self._deferred:
            compute()

    def release(self) -> None:
        """Leave the slot to the next micro-batch."""
        self._stage.free.append(self)

    def _run(self, kind: str, function: Callable[[], None]) -> None:
        """Record a pass the first time, which also runs it; replay it afterwards."""
        done = self._passes.get(kind)
        if done is not None:
            with torch.no_grad():
                done.replay()
            return
        stage = self._stage
        what = f"the {kind} of stage {stage.number}"
        with stage.pool.flight.silent():
            self._passes[kind] = Recorded(
                function, stage.pool, what, stage.names, stage.accumulators()
            )


class CapturedStage:
    """A stage of this rank, with the tensors that its slots share.

    number    number of the stage in the whole pipeline
    chunk     the function that the executor calls
    module    contains the parameters and modules that it uses
    last      whether its output is the loss

    The output, its gradient and the input's gradient hold values only while one pass runs.
    """

    def __init__(
        self,
        number: int,
        chunk: Chunk,
        module: nn.Module,
        last: bool,
        pool: Pool,
    ) -> None:
        self.number = number
        self.chunk = chunk
        self.pool = pool
        self.names = {id(one): name for name, one in module.named_modules()}
        self.free: list[Slot] = []
        shape, dtype = pool.message
        empty = partial(torch.empty, shape, dtype=dtype, device=pool.device)
        self.output = None if last else empty()
        self.gradient = torch.empty((), device=pool.device) if last else empty()
        self.gradient_of_input = empty() if number else None
        self._parameters = list(module.parameters())

    def accumulators(self) -> list[GradientAccumulator]:
        """Return the accumulators of the parameters."""
        every = (getattr(p, "gradient_accumulator", None) for p in self._parameters)
        return [accumulator for accumulator in every if accumulator is not None]


class Captures:
    """Recorded passes of this rank's stages, for an executor.

    stages      functions that the executor runs, and the modules they use, by global stage
    last_stage  global number of the stage whose output is the loss
    warmup      training steps that run eagerly first: they measure values that later steps rely on
    before      called before the first pass of a step whose passes are replayed
    """

    def __init__(
        self,
        stages: Mapping[int, tuple[Chunk, nn.Module]],
        last_stage: int,
        pool: Pool,
        warmup: int,
        before: Callable[[], None],
    ) -> None:
        self._stages = stages
        self._pool = pool
        self._last_stage = last_stage
        self._steps = warmup
        self._before = before
        self._captured: dict[int, CapturedStage] = {}
        self._last = -1
        self._inputs: dict[str, _Form] | None = None

    def begin(self, micro_batches: Sequence[MicroBatch]) -> bool:
        """Begin a training step; return whether its passes are replayed.

        Raises ConfigError, even in eager steps, if one pass cannot be used for all micro-batches.
        """
        for batch in micro_batches:
            self._check(batch)
        self._steps -= 1
        if self._steps >= 0:
            return False
        if not self._captured:
            for number, (chunk, module) in self._stages.items():
                last = number == self._last_stage
                self._captured[number] = CapturedStage(number, chunk, module, last, self._pool)
        self._before()
        accumulators = [
            accumulator for stage in self._captured.values() for accumulator in stage.accumulators()
        ]
        new = dict.fromkeys(accumulator for accumulator in accumulators if accumulator.fresh)
        if new:  # all passes add to the sums, even the first
            with torch.no_grad():
                torch._foreach_zero_([accumulator.total for accumulator in new])
            for accumulator in new:
                accumulator.fresh = False
        self._last = len(micro_batches) - 1
        return True

    def _check(self, batch: MicroBatch) -> None:
        """Check that a micro-batch has no NumPy arrays, and tensors shaped like earlier ones."""
        for name, value in vars(batch).items():
            if isinstance(value, np.ndarray):
                raise ConfigError(
                    "--cuda-graph-impl local replays passes, but the host chooses kernels by the "
                    f"{name} of a micro-batch: leave the flag out, or use data whose samples are "
                    "not divided into documents"
                )
        inputs: dict[str, _Form] = {n: (x.shape, x.dtype) for n, x in _tensors(batch).items()}
        if self._inputs is None:
            self._inputs = inputs
        if inputs != self._inputs:
            different = {**self._inputs, **inputs}
            name = next(n for n in different if inputs.get(n) != self._inputs.get(n))
            raise ConfigError(
                f"--cuda-graph-impl local replays passes over tensors of fixed shapes, but "
                f"{name} of a micro-batch is {_words(inputs.get(name))} and was "
                f"{_words(self._inputs.get(name))} before: leave the flag out"
            )

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Run training passes on the stream on which they are, or will be, recorded.

        Libraries create handles and memory for each stream, which a capture must not do: eager
        steps on this stream do it first (pytorch pull request 187745). Autograd nodes run on the
        stream on which they were created.
        """
        stream = self._pool.stream
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    def take(self, stage: int, batch: MicroBatch, hidden: Tensor | None) -> Slot:
        """Return one of a stage's slots for a micro-batch."""
        captured = self._captured[stage]
        return captured.free.pop() if captured.free else Slot(captured, batch, hidden)

    def eager(self, stage: int, micro_batch: int) -> bool:
        """Return whether a backward pass runs eagerly, because gradients are sent during it."""
        accumulators = self._captured[stage].accumulators() if micro_batch == self._last else []
        return any(accumulator.added is not None for accumulator in accumulators)


def _tensors_of(values: object) -> list[Tensor]:
    """Return the tensors in nested values."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(x: Tensor) -> int:
    """Return a number that identifies a tensor's memory."""
    return int(x.untyped_storage()._cdata)


def _tensors(batch: MicroBatch) -> dict[str, Tensor]:
    """Return the tensors of a micro-batch, a dataclass, by name."""
    return {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)}


_Form = tuple[torch.Size, torch.dtype]


def _words(form: _Form | None) -> str:
    return "absent" if form is None else f"{form[1]} {list(form[0])}"
