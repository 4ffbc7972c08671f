"""Find, load and call the compiled kernels.

For each kind of device one library is loaded, on first use. A C function is declared once, with
the types of its arguments (`Function`), and called with a tensor that determines its device and
stream. For some operators, layers call autograd nodes written in C++ (csrc/nodes) instead, if these
were built for this torch: see `nodes_for`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.errors import KernelError
from megatron.kernels.build import (
    LIBRARIES,
    host_archs,
    library_name,
    missing_bytes,
    nodes_hash,
    nodes_name,
    source_hash,
    without_kernels,
)
from megatron.kernels.cost import Scope

OVERRIDE = "MEGATRON_KERNELS_LIBRARY"
"""Environment variable: a library to load for CPU tensors instead of the host's, such as the
simulator; "none": no library on any device."""

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The codes for element types in the C interface."""

_C_TYPES = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "w": ctypes.c_uint32,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
}


@dataclass(frozen=True)
class KernelLibrary:
    """The result of searching for a kernel library for one kind of device.

    path          the library file, if one was loaded
    target, arch  target and architecture it was built for
    reason        why there is none; "" if there is one
    handle        the loaded library; None if there is none
    sources       hash of the sources it was built from
    functions     its functions that have been called, by name
    no_nodes      why autograd nodes (csrc/nodes) do not call its functions; "" if they do
    """

    path: Path | None = None
    target: str = ""
    arch: str = ""
    reason: str = ""
    handle: Any = None
    sources: str = ""
    functions: dict[str, Any] = field(default_factory=dict, compare=False)
    no_nodes: str = field(default="", compare=False)

    @property
    def build(self) -> str:
        """Return target, architecture and source hash, on which speed and results depend."""
        return f"{self.target}-{self.arch}-{self.sources}"

    @property
    def line(self) -> str:
        """Return one line for the log."""
        if self.handle is not None:
            called = f"; called from Python, {self.no_nodes}" if self.no_nodes else ""
            return f"fused kernels: {self.target} {self.arch} ({self.path}){called}"
        return f"fused kernels: none, {self.reason}; instead: torch's own operators"


@functools.cache
def find(device_type: str) -> KernelLibrary:
    """Return the library for "cuda" (CUDA and ROCm) or "cpu" tensors, or why there is none.

    The search runs once for each of these. For "meta", whose tensors have no data, the result is a
    placeholder: operators apply their shape functions, and nothing is launched. Raises KernelError
    only if MEGATRON_KERNELS_LIBRARY names a file that cannot be used. Searching for "cpu" does not
    touch GPUs.
    """
    override = os.environ.get(OVERRIDE, "")
    if device_type == "meta":
        return KernelLibrary(handle=object())
    if override == "none":
        return KernelLibrary(reason=f"{OVERRIDE} is none")
    if device_type == "cpu":
        if override:
            return _named(Path(override))
        return _first("host", host_archs())
    if device_type != "cuda":
        return KernelLibrary(reason=f"there are none for {device_type}")
    if not torch.cuda.is_available():
        return KernelLibrary(reason="torch sees no GPU")
    target, arch = device_arch()
    if target == "hip" and (reason := without_kernels(arch)):
        return KernelLibrary(reason=reason)
    return _first(target, [arch])


def available(device: torch.device) -> bool:
    """Return whether compiled kernels run on this device."""
    return find(device.type).handle is not None


def library_of(x: Tensor) -> KernelLibrary:
    """Return the library for a tensor's device, without creating a device object on the CPU."""
    return find("cpu" if x.is_cpu else x.device.type)


def forget() -> None:
    """Search again on next use: for tests, and after a build in the same process."""
    global _nodes
    find.cache_clear()
    _load_nodes.cache_clear()
    if _nodes is not None:
        for device_type in ("cpu", "cuda"):
            _nodes.bind(device_type, {})
    _nodes = None


def fingerprint(device_type: str) -> str:
    """Return a text that identifies the kernels for this kind of device.

    Ranks with the same kernels get the same text. All x86-64 levels count as the same: their
    results differ only by rounding, since those with FMA round a product and a sum together.
    """
    library = find(device_type)
    family = "x86-64" if library.arch.startswith("x86-64") else library.arch
    return f"{library.target} {family} {library.sources}"


def device_arch(index: int | None = None) -> tuple[str, str]:
    """Return target and architecture of a GPU: ("hip", "gfx90a") or ("cuda", "sm_90")."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return "hip", properties.gcnArchName.split(":")[0]  # without the ECC and XNACK modes
    return "cuda", f"sm_{properties.major}{properties.minor}"


def _named(path: Path) -> KernelLibrary:
    """Load the library named by the user; raise KernelError if it cannot be used."""
    if not os.path.isfile(path):  # also if the path is too long for the system
        reason = "there is no such file"
    elif path.name.startswith(("libmegatron-hip-", "libmegatron-cuda-")):
        reason = (
            "the variable is for tensors on the CPU; libraries for GPUs are found in "
            "megatron/kernels/lib"
        )
    else:
        library = _load(path, None)
        if library.handle is not None:
            return library
        reason = library.reason
    raise KernelError(
        f"{OVERRIDE} is {path}: {reason}. Unset it, or set it to none to run without kernels"
    )


def _first(target: str, archs: list[str]) -> KernelLibrary:
    """Load the first library that exists and fits."""
    reason = ""
    prefix = f"libmegatron-{target}-"
    for arch in archs:
        for path in sorted(LIBRARIES.glob(f"{prefix}*.so")):
            if arch in path.stem.removeprefix(prefix).split("+"):
                library = _load(path, target)
                if library.handle is not None:
                    return library
                reason = reason or library.reason
    arch = archs[0]
    how = f"python setup.py build_kernels --target {target}"
    if target != "host":
        how += f" --arch {arch}"
    if reason:  # the build may consider the existing file up to date
        how += " --force"
    else:
        reason = f"no {library_name(target, arch)} in {LIBRARIES}"
    return KernelLibrary(reason=f"{reason}: {how}")


def _load(path: Path, target: str | None) -> KernelLibrary:
    """Load a library; with `target` None, for any target and built from any sources."""
    try:
        missing = missing_bytes(path)
        if missing > 0:
            return KernelLibrary(reason=f"{path.name} is truncated, {missing} bytes are missing")
        if target == "hip":
            _share_hip_runtime()
        handle = ctypes.CDLL(str(path))
        handle.mk_describe.restype = ctypes.c_char_p
        handle.mk_error.restype = ctypes.c_char_p
        built_for, arch, sources = handle.mk_describe().decode().split(" ")
    except (OSError, AttributeError, ValueError) as error:
        return KernelLibrary(reason=f"{path.name} cannot be loaded ({_short(error)})")
    sources = sources.partition("-")[0]  # a hash of the compiler command follows
    if target is not None:
        if built_for != target:
            return KernelLibrary(reason=f"{path.name} was built for {built_for}")
        if source_hash() not in ("", sources):
            return KernelLibrary(
                reason=f"{path.name} was built from other sources than those in csrc/kernels"
            )
    problem = _try_on_gpu(handle) if target in ("hip", "cuda") else ""
    if problem:
        where = torch.cuda.get_device_name()
        return KernelLibrary(reason=f"{path.name} does not run on {where} ({problem})")
    device_type = "cuda" if target in ("hip", "cuda") else "cpu"
    no_nodes = _bind_nodes(device_type, handle, sources)
    return KernelLibrary(path, built_for, arch, "", handle, sources, no_nodes=no_nodes)


# -- nodes of autograd's graph ---------------------------------------------------------------------

_nodes: Any = None
"""The extension that calls kernels from autograd nodes, once it has a device's kernels."""

_CALLED_BY_NODES = (
    "mk_error mk_norm mk_norm_backward mk_bias_activation mk_bias_activation_backward "
    "mk_bias_dropout_add mk_bias_dropout_add_backward mk_rotary"
).split()


@functools.cache
def _load_nodes() -> tuple[Any, str]:
    """Return the extension of csrc/nodes for this torch, or None and the reason."""
    path = LIBRARIES / nodes_name(torch.__version__)
    how = "python setup.py build_kernels"
    if not path.is_file():
        return None, f"there is no {path.name}: {how}"
    try:
        if (missing := missing_bytes(path)) > 0:
            return None, f"{path.name} is truncated, {missing} bytes are missing: {how}"
        loader = importlib.machinery.ExtensionFileLoader("megatron.kernels._nodes", str(path))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None, "a loader that exists"
        nodes = importlib.util.module_from_spec(spec)
        loader.exec_module(nodes)
    except (ImportError, OSError) as error:
        return None, f"{path.name} cannot be loaded ({_short(error)}): {how} --force"
    if nodes_hash() not in ("", nodes.sources):
        return None, f"{path.name} was built from other sources: {how}"
    nodes.set_up(KernelError, getattr(torch._C, "_cuda_getCurrentRawStream", None))
    return nodes, ""


def _bind_nodes(device_type: str, handle: Any, sources: str) -> str:
    """Pass a library's kernels to the nodes; return why the nodes cannot call them, or ""."""
    global _nodes
    nodes, reason = _load_nodes()
    if nodes is None:
        return reason
    # A library may contain only some of the kernels.
    functions = [(name, f) for name in _CALLED_BY_NODES if (f := getattr(handle, name, None))]
    if nodes.sources.partition("-")[0] != sources or len(functions) < len(_CALLED_BY_NODES):
        nodes.bind(device_type, {})
        return "the nodes were built for other kernels: python setup.py build_kernels"
    addresses = {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in functions}
    nodes.bind(device_type, addresses)
    _nodes = nodes
    return ""


def nodes_for(x: Tensor) -> Any:
    """Return the nodes for a call with x; None if the call must take the general path.

    A node returns NotImplemented for a call that must take it for another reason: a profiler, a
    tensor subclass, tensors that do not fit together, a device without kernels.
    """
    if _nodes is None or torch.compiler.is_dynamo_compiling() or not x.dim():
        return None
    return _nodes


class _Recomputation(Scope):
    """A recomputation, which calls nodes if the first pass did."""

    __slots__ = ("_before", "_watched")

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self._watched = watched

    def __enter__(self) -> None:
        super().__enter__()
        if _nodes is not None:
            self._before = _nodes.repeat(self._watched)

    def __exit__(self, *exception: object) -> None:
        if _nodes is not None:
            _nodes.repeat(self._before)
        super().__exit__(*exception)


def _forward_and_recompute() -> tuple[contextlib.nullcontext[None], Scope]:
    """Return the contexts of a forward pass and of its recomputation for torch.utils.checkpoint.

    Both must call kernels in the same way, or they would save different tensors. This is not
    guaranteed otherwise: a profiler, or a mode that records operators, may be active during only
    one of them.
    """
    return contextlib.nullcontext(), _Recomputation(_nodes is None or _nodes.watched())


def recompute_later(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """Return function(*inputs), which the backward pass recomputes instead of keeping activations.

    Dropout masks are functions of seeds, so there is no generator state to restore.
    """
    out: Tensor = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_forward_and_recompute,
    )
    return out


def _share_hip_runtime() -> None:
    """Let kernel libraries find HIP's functions in the runtime that torch has loaded.

    They are not linked with a runtime: a torch wheel ships its own ROCm, and with two runtimes in a
    process neither can use the other's streams.
    """
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return
    for line in mapped.splitlines():
        if "/libamdhip64.so" in line:
            ctypes.CDLL(line.split()[-1], ctypes.RTLD_GLOBAL)
            return


def _try_on_gpu(handle: Any) -> str:
    """Return why a kernel cannot be launched on this GPU; "" if it can.

    One reason is a driver older than the compiler.
    """
    x = torch.zeros(1, device="cuda")
    address = ctypes.c_void_p(x.data_ptr())
    one = ctypes.c_int64(1)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    try:
        code = handle.mk_causal_softmax(
            0, address, address, one, one, one, one, ctypes.c_float(1.0), stream
        )
        if code:
            result: str = handle.mk_error(code).decode()
            return result
        return "" if x.item() == 1.0 else "a test kernel left no result"
    except (AttributeError, RuntimeError) as error:
        return _short(error)


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class Function:
    """A C function: its name and its argument types between the element type and the stream.

    Letters: p pointer, i int32, l int64, u uint64, w uint32, f float, d double.
    """

    def __init__(self, name: str, arguments: str) -> None:
        self.name = name
        self.arguments = arguments
        # Only arguments in this range can be tensors.
        self._first = arguments.index("p")
        self._end = arguments.rindex("p") + 1

    def __call__(self, like: Tensor, *arguments: Any, type_of: Tensor | None = None) -> None:
        """Run on the device and current stream of `like`.

        The element type is taken from `type_of` (default: `like`). Tensors are passed by address.
        Raises KernelError if there is no library, if it lacks the function, and if the function
        returns an error.
        """
        library = library_of(like)
        try:
            function = library.functions[self.name]
        except KeyError:
            function = self._load(library)
        first = self._first
        end = self._end
        values = (
            TYPES[(like if type_of is None else type_of).dtype],
            *arguments[:first],
            *[x.data_ptr() if isinstance(x, Tensor) else x for x in arguments[first:end]],
            *arguments[end:],
        )
        if like.is_cpu:
            code = function(*values, None)
        elif (index := like.get_device()) == torch._C._cuda_getDevice():
            code = function(*values, torch._C._cuda_getCurrentRawStream(index))
        else:
            with torch.cuda.device(index):
                code = function(*values, torch._C._cuda_getCurrentRawStream(index))
        if code:
            message = library.handle.mk_error(code).decode()
            raise KernelError(f"{self.name} on {like.device}: {message} (code {code})")

    def _load(self, library: KernelLibrary) -> Any:
        """Return this function from a library, and keep it for the next call."""
        if library.handle is None:
            raise KernelError(f"{self.name}: {library.line}")
        function = getattr(library.handle, self.name, None)
        if function is None:
            raise KernelError(
                f"{self.name} is not in {library.path}, which was built from other sources"
            )
        letters = (_C_TYPES[letter] for letter in self.arguments)
        function.argtypes = [ctypes.c_int, *letters, ctypes.c_void_p]
        library.functions[self.name] = function
        return function
