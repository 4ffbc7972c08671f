"""Count the waits of the host for its device: for a number, a data-dependent size, or a copy.

`HostWaits` detects them on tensors of any device, also without data or on the CPU, so that a test
without a GPU finds waits that would stall one. On a GPU torch.cuda.set_sync_debug_mode detects
more, including waits within libraries. Within backward passes torch exposes only operators, so that
neither the reading of a list of numbers nor a tensor created from numbers is detected there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.pipeline.captured import DATA_DEPENDENT, INDEXED

_LIBRARY = str(Path(__file__).resolve().parents[1] / "megatron")
_aten = torch.ops.aten
# Functions in C that call no operator. Those of _MAKERS copy Python's numbers to a device from
# pageable memory.
_FUNCTIONS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
}
_MAKERS = {
    torch.tensor: "tensor",
    torch.as_tensor: "as_tensor",
    torch.Tensor.new_tensor: "new_tensor",
}


class HostWaits:
    """Context manager that records waits in `recorded`, as "operator at file:line" of our own code.

    device  type of the device. "meta": tensors without data instead of the device's. "cpu": all
            tensors that torch reads count as the device's, so that host memory must be read without
            torch (numpy)

    Consecutive reads of numbers, without work for the device in between, count as one wait. A
    non-blocking copy does not count.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.recorded = list[str]()
        self._idle = False
        self._modes = (_WaitingOperators(self), _Functions(self))

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)  # type: ignore[no-untyped-call]

    def of_device(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.device.type == self.device

    def read(self, what: str) -> None:
        """Record a read of numbers, which waits unless the device has been idle since the last."""
        if not self._idle:
            self.wait(what)
        self._idle = True

    def wait(self, what: str) -> None:
        """Record a wait for the device."""
        self.recorded.append(f"{what} at {_location()}")

    def work(self) -> None:
        self._idle = False


class _WaitingOperators(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waits = waits

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch's compiler would be imported to skip this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits = self._waits
        packet = func.overloadpacket
        if packet is _aten._local_scalar_dense and waits.of_device(args[0]):
            waits.read("item")
        elif packet in DATA_DEPENDENT and waits.of_device(args[0]):
            waits.wait(packet.__name__)
        elif packet in INDEXED and waits.of_device(args[0]) and any(_is_mask(i) for i in args[1]):
            waits.wait("index by a mask")
        elif self._copies_and_blocks(packet, args, kwargs):
            waits.wait("copy between host and device")
        elif not func.is_view:
            waits.work()
        return func(*args, **kwargs)

    def _copies_and_blocks(self, packet: Any, args: Any, kwargs: Any) -> bool:
        if packet is _aten._to_copy and kwargs.get("device") is not None:
            blocks = not kwargs.get("non_blocking")
            other = torch.device(kwargs["device"]).type
        elif packet is _aten.copy_:
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            other = args[1].device.type
        else:
            return False
        return (
            blocks
            and other != args[0].device.type
            and self._waits.device in (other, args[0].device.type)
        )


class _Functions(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        waits = self._waits
        if func in _FUNCTIONS and waits.of_device(args[0]):
            waits.read(_FUNCTIONS[func])
        out = func(*args, **kwargs)
        if func in _MAKERS and waits.of_device(out):
            waits.wait(_MAKERS[func])
        return out


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _location() -> str:
    """Return the innermost line of megatron/ on the stack, and the one that called it."""
    frame = sys._getframe(1).f_back
    lines = list[str]()
    while frame is not None and len(lines) < 2:
        path = frame.f_code.co_filename
        if path.startswith(_LIBRARY):
            lines.append(f"{path.removeprefix(_LIBRARY)[1:]}:{frame.f_lineno}")
        frame = frame.f_back
    return ", for ".join(lines) or "?"
