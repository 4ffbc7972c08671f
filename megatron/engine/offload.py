"""Optimizer state in host memory (--cpu-offload), streamed through the device in each step.

Groups of parameters are updated one after another, except groups of full parameters, whose update
passes over them several times (ZeroPlan.sweeps). During each update, the next group's state
arrives and the previous group's state leaves. The device holds two sets of working tensors, each
as large as the largest group. Transfers use both directions of the link. Nothing is computed on the
host: the update is bitwise the same as without offloading.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.engine.optimizer import tensors_of
from megatron.engine.optimizer_state import MASTER
from megatron.engine.zero_plan import BucketInstruction, BucketOp, Use, streamed
from megatron.errors import ConfigError

Group = dict[str, Any]


class HostState:
    """Master weights and state of an optimizer, in host memory outside of its steps.

    optimizer  has one parameter in each group. Its state is on the host at first; afterwards the
               state of a group has values only while the group is updated
    device     the device on which groups are updated
    masters    whether the optimizer's parameters are treated like its state; in fp32 they are the
               weights themselves, and stay on the device
    updated    called with a parameter after each use of MASTER, while the parameter has its values
    uses       expected uses of state in a step (ZeroPlan.updates): group numbers, and tensor names

    on_host    state of each parameter by name, with `masters` MASTER included, in host memory;
               valid after `settle` until the next `prefetch`
    working    the two sets of tensors on the device, by name and dtype

    An optimizer that needs full parameters requests their state through its attribute `near`:
    near(groups, *names) yields the groups one after another, each with its state of these names
    (MASTER: the parameter; no names: all) on the device until the next group is requested.

    Raises ConfigError if such an optimizer has no attribute `near`, or if host memory cannot be
    locked.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        masters: bool,
        updated: Callable[[Tensor], None],
        uses: Iterable[Use] = (),
    ) -> None:
        self._optimizer = optimizer
        self._updated = updated
        self._step: Callable[[], Any] = optimizer.step
        full = [group for group in optimizer.param_groups if group.get("full_parameters")]
        if full and not hasattr(optimizer, "near"):
            raise ConfigError(
                f"--cpu-offload: {type(optimizer).__name__} needs full parameters, but has no "
                "attribute `near` through which to get their state: see megatron/engine/offload.py"
            )
        parameters = [group["params"][0] for group in optimizer.param_groups]

        def tensors(p: Tensor) -> dict[str, Tensor]:
            return tensors_of(optimizer, p) | ({MASTER: p.detach()} if masters else {})

        most: dict[tuple[str, torch.dtype], int] = {}
        for p in parameters:
            for name, x in tensors(p).items():
                key = name, x.dtype
                most[key] = max(most.get(key, 0), x.numel())
        self.working = [
            {key: torch.empty(n, dtype=key[1], device=device) for key, n in most.items()}
            for _ in range(2)
        ]
        self._absent = {key: torch.zeros((), dtype=key[1], device=device) for key in most}
        self.on_host: dict[Tensor, dict[str, Tensor]] = {}
        for p in parameters:  # one by one, since each then frees its previous memory
            state = tensors(p).items()
            self.on_host[p] = {n: self._locked(x) if device.type == "cuda" else x for n, x in state}
            self._show(p, None)
        self._in: Any = None
        self._out: Any = None
        if device.type == "cuda":
            self._in = torch.cuda.Stream(device)
            self._out = torch.cuda.Stream(device)
        self._number = {p: number for number, p in enumerate(parameters)}
        self._parameters = parameters
        # expected uses, this step's uses so far, and the remaining instructions
        self._expected = [self._use(number, names) for number, names in uses]
        self._uses = list[Use]()
        self._instructions: Iterator[BucketInstruction] = iter(())
        self._fetched: deque[Use] = deque()
        self._arrived: dict[int, Any] = {}
        optimizer.step = self._by_group  # type: ignore[assignment, method-assign]
        if full:
            optimizer.near = self.near  # type: ignore[attr-defined]

    def _use(self, number: int, names: Sequence[str]) -> Use:
        """Return a use with the names of the tensors that move."""
        stored = self.on_host[self._parameters[number]]
        return number, tuple(name for name in stored if not names or name in names)

    def prefetch(self) -> None:
        """Begin a step: fetch the state that its update uses first."""
        if self._uses:
            self._expected = self._uses
        self._uses = []
        self._fetched.clear()
        self._instructions = streamed(self._expected)
        self._fetch()

    def settle(self) -> None:
        """Wait until all state is in host memory again."""
        if self._out is not None:
            self._out.synchronize()

    def _by_group(self) -> None:
        """Take a step of the optimizer, group by group; full parameters last, and together."""
        optimizer = self._optimizer
        every = self._optimizer.param_groups
        full = [group for group in every if group.get("full_parameters")]
        try:
            for group in self.near([group for group in every if not group.get("full_parameters")]):
                optimizer.param_groups = [group]
                self._step()
            if full:
                optimizer.param_groups = full
                self._step()
        finally:
            optimizer.param_groups = every

    def near(self, groups: Iterable[Group], *names: str) -> Iterator[Group]:
        """Yield groups, each with its state of these names (by default all) on the device."""
        for group in groups:
            (p,) = group["params"]
            use = self._use(self._number[p], names)
            number = len(self._uses)
            # an unexpected use: for the rest of the step, state is fetched when it is needed
            if not self._fetched or self._fetched[0] != use:
                self._instructions = iter(())
                self._fetched.clear()
                self._copy_in(use, number)
            self._uses.append(use)
            self._fetched.popleft()
            self._show(p, number % 2, use[1])
            yield group
            if MASTER in use[1]:  # in fp32 the masters are the working weights
                self._updated(p)
            if self._out is not None:
                self._out.wait_stream(torch.cuda.current_stream())
            with self._on(self._out):
                for name in use[1]:
                    used = self._in_set(p, name, number % 2)
                    self.on_host[p][name].copy_(used, non_blocking=True)
            self._show(p, None)
            self._fetch()

    def _fetch(self) -> None:
        """Carry out the plan's instructions up to the next update."""
        for op, number, names in self._instructions:
            if op is BucketOp.FETCH:
                self._copy_in((number, names), len(self._uses) + len(self._fetched))
            elif op is BucketOp.UPDATE:
                return

    def _copy_in(self, use: Use, position: int) -> None:
        """Fetch state into the set of working tensors for the use's position in the step."""
        p = self._parameters[use[0]]
        with self._on(self._in):
            if self._in is not None:  # the set's previous state has to leave first
                self._in.wait_stream(self._out)
            for name in use[1]:
                stored = self.on_host[p][name]
                self._in_set(p, name, position % 2).copy_(stored, non_blocking=True)
            if self._in is not None:
                self._arrived[position % 2] = self._in.record_event()
        self._fetched.append(use)

    def _in_set(self, p: Tensor, name: str, number: int) -> Tensor:
        stored = self.on_host[p][name]
        return self.working[number][name, stored.dtype][: stored.numel()].view(stored.shape)

    def _show(self, p: Tensor, number: int | None, names: Iterable[str] | None = None) -> None:
        """Point a parameter and its state at a set of working tensors, or at placeholders."""
        if number is not None and number in self._arrived:
            torch.cuda.current_stream().wait_event(self._arrived[number])
        for name in self.on_host[p] if names is None else names:
            stored = self.on_host[p][name]
            if number is None:
                x = self._absent[name, stored.dtype].expand(stored.shape)
            else:
                x = self._in_set(p, name, number)
            if name == MASTER:
                p.data = x
            else:
                self._optimizer.state[p][name] = x

    def _locked(self, x: Tensor) -> Tensor:
        """Return a copy in page-locked memory, so that the host need not wait for transfers.

        torch allocates such memory in powers of two; this function allocates it in pages.
        """
        pages = torch.frombuffer(mmap.mmap(-1, x.nbytes), dtype=x.dtype)
        runtime: Any = torch.cuda.cudart()
        if error := int(runtime.cudaHostRegister(pages.data_ptr(), x.nbytes, 0)):
            raise ConfigError(
                f"--cpu-offload: {x.nbytes >> 20} MiB of host memory cannot be locked (error "
                f"{error}): raise the limit of locked memory (ulimit -l), or put fewer processes "
                "on a node"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, pages.data_ptr())
        return pages.view(x.shape).copy_(x)

    @staticmethod
    def _on(stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
