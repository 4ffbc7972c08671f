"""Operators under `torch.ops.megatron`, and checks of their inputs.

Each operator has an implementation for CPU and CUDA (ROCm) tensors, a rule for the shapes of its
results, so that torch.compile can trace it, and, if it is differentiable, an autograd rule. The
implementation calls the compiled kernel if there is one, and torch's own operators otherwise.
torch's dispatcher takes more host time than a kernel launch, so ordinary calls bypass it. It is
needed by tracers and profilers, and by operators that write to their inputs while autograd records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megatron.errors import KernelError
from megatron.kernels.cost import Computation
from megatron.kernels.library import TYPES, library_of
from megatron.parallel.autograd import Context

T = TypeVar("T")

_LIBRARY = torch.library.Library("megatron", "DEF")

WORK: dict[str, str | Callable[..., Computation]] = {}
"""The declared cost of each operator, by name."""


class Gradient(NamedTuple):
    """Functions that differentiate an operator.

    save      (ctx, inputs or their record, output): saves tensors for the backward pass
    backward  (ctx, *gradients): one gradient or None per input; a second derivative is an error,
              since torch would treat the gradients as constants
    hidden    number of trailing results that only the backward pass needs: a call does not return
              them
    """

    save: Callable[..., None]
    backward: Callable[..., object]
    hidden: int = 0

    def visible(self, results: Any) -> object:
        """Return the results that a call returns, without the hidden ones."""
        if not self.hidden:
            return results
        return results[0] if len(results) == self.hidden + 1 else results[: -self.hidden]


def operator(
    schema: str,
    kernel: Callable[..., object],
    reference: Callable[..., T],
    shapes: Callable[..., object] | None = None,
    *,
    record: Callable[..., object] | None = None,
    check: Callable[..., None] | None = None,
    gradient: Gradient | None = None,
    work: str | Callable[..., Computation] = "copy",
) -> Callable[..., T]:
    """Define `megatron::<schema>` and return it, ready to call.

    kernel     computes it with the compiled library: (results of `shapes`, if there are any,
               *inputs). If the first input is a tensor, it is not empty; tensors of a list may be
    reference  computes it with torch's operators
    shapes     creates empty results with the right shape, dtype and device; None for an operator
               without results
    record     makes a record from the inputs, which kernel, reference, shapes, check and
               gradient.save receive instead of the inputs
    check      (name, *inputs): raises KernelError for an invalid input; None for backward passes,
               whose inputs autograd and the forward pass have checked
    gradient   how to differentiate it; None: it is not differentiable
    work       the kind of a memory-bound kernel that reads its inputs and writes its results once
               (cost.Memory), or a function from the inputs to the operator's cost
    """
    name = schema.partition("(")[0]

    def run(*inputs: Any) -> Any:
        first = inputs[0]
        if record is not None:
            inputs = (record(*inputs),)
        if check is not None:
            check(name, *inputs)
        if isinstance(first, Tensor):
            compiled = library_of(first).handle is not None and first.numel() > 0
        else:
            compiled = library_of(first[0]).handle is not None
        if not compiled:
            return reference(*inputs)
        if shapes is None:
            return kernel(*inputs)
        results = shapes(*inputs)
        kernel(results, *inputs)
        return results

    WORK[name] = work
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)

    def empty(*inputs: Any) -> object:
        return shapes and shapes(*inputs if record is None else [record(*inputs)])

    torch.library.register_fake(f"megatron::{name}", empty, lib=_LIBRARY)
    differentiable = None if gradient is None else _differentiable(name, run, gradient, record)
    visible = gradient.visible if gradient is not None and gradient.hidden else None
    registered = getattr(torch.ops.megatron, name).default
    # An operator without results writes to its inputs: only the dispatcher lets autograd know.
    writes = shapes is None

    def call(*inputs: Any) -> Any:
        records = torch.is_grad_enabled()
        if (records and writes) or not _ordinary(*inputs):
            _check_no_tangent(name, inputs)
            results = registered(*inputs)
        elif records and differentiable is not None:
            return differentiable(*inputs)
        else:
            results = run(*inputs)
        return results if visible is None else visible(results)

    return call


def _differentiable(
    name: str,
    run: Callable[..., object],
    gradient: Gradient,
    record: Callable[..., object] | None,
) -> Any:
    """Register an operator's autograd rule, and return a function that bypasses the dispatcher."""
    hidden = gradient.hidden

    def once(ctx: Context, *gradients: object) -> object:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise KernelError(
                f"{name} has no second derivative; use torch's own operators where one is needed"
            )
        return gradient.backward(ctx, *gradients)

    def forward(ctx: Context, *inputs: object) -> object:
        results = run(*inputs)
        save(ctx, inputs, results)
        return gradient.visible(results)

    def save(ctx: Context, inputs: tuple[object, ...], output: object) -> None:
        gradient.save(ctx, inputs if record is None else record(*inputs), output)

    def save_all(ctx: Context, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        """Save the same tensors in calls through torch's dispatcher, which return all results."""
        save(ctx, inputs, output)
        if hidden:
            ctx.mark_non_differentiable(*output[-hidden:])

    def backward_of_all(ctx: Context, *gradients: object) -> object:
        return once(ctx, *(gradients[:-hidden] if hidden else gradients))

    torch.library.register_autograd(
        f"megatron::{name}", backward_of_all, setup_context=save_all, lib=_LIBRARY
    )
    passes = {"forward": staticmethod(forward), "backward": staticmethod(once)}
    function: Any = type(f"megatron::{name}", (torch.autograd.Function,), passes)
    return function.apply


_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple})


def _ordinary(x: Any, *rest: object) -> bool:
    """Return whether a call can go directly to the operator's kernel.

    It can if there is no tracer, profiler, transform, forward-mode derivative or tensor subclass,
    and if the first input is a tensor on a CPU or GPU, and the others have types of _PLAIN.
    """
    return not (
        torch.compiler.is_compiling()
        or (type(x) is not Tensor and type(x) is not torch.nn.Parameter)
        or not (x.is_cpu or x.is_cuda)
        or not _PLAIN.issuperset(map(type, rest))
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
    )


def _check_no_tangent(name: str, inputs: Iterable[object]) -> None:
    """Check that no input has a forward-mode derivative, which torch would silently drop."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise KernelError(
                f"{name} has no forward-mode derivative; use torch's own operators where one is "
                "needed"
            )


def empty_like_first(first: Tensor, *_: object) -> Tensor:
    """Return an empty tensor like the first input: the shape function of many operators."""
    return torch.empty_like(first)


def narrow(parameter: Tensor, x: Tensor) -> Tensor:
    """Convert an fp32 parameter, whose gradient must not be rounded, to the type of x."""
    return parameter.to(x.dtype) if parameter.dtype == torch.float32 else parameter


# -- checks ----------------------------------------------------------------------------------------


def check(operator: str, condition: bool, message: str) -> None:
    """Raise a KernelError with the operator's name unless `condition` holds."""
    if not condition:
        raise KernelError(f"{operator}: {message}")


def fits(x: Tensor, *columns: Tensor | None, residual: Tensor | None = None) -> bool:
    """Return whether this is an ordinary call, which needs none of the checks below.

    In such a call all tensors are contiguous, have one floating-point dtype and are on one device;
    `columns` are vectors as long as the last dimension of x, and the residual has the shape of x.
    """
    dtype = x.dtype
    device = x.device
    shape = x.shape
    if dtype not in TYPES or not shape or not x.is_contiguous():
        return False
    if residual is not None and residual.shape != shape:
        return False
    rest = [tensor for tensor in (residual, *columns) if tensor is not None]
    return all(t.dtype is dtype and t.device == device and t.is_contiguous() for t in rest) and all(
        tensor is None or tensor.shape == shape[-1:] for tensor in columns
    )


def check_type(
    operator: str, allowed: Iterable[torch.dtype] = TYPES, **tensors: Tensor | None
) -> None:
    """Check that the tensors have the same dtype, one of `allowed`."""
    types = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(types), "")
    for name, dtype in types.items():
        if dtype not in allowed:
            names = " or ".join(str(each).removeprefix("torch.") for each in allowed)
            raise KernelError(f"{operator}: {name} is {dtype}; it must be {names}")
        if dtype != types[first]:
            raise KernelError(
                f"{operator}: {name} is {dtype} but {first} is {types[first]}; they must be equal"
            )


def check_device(operator: str, x: Tensor, /, **tensors: Tensor | None) -> None:
    """Check that the tensors are on the device of x."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise KernelError(
                f"{operator}: {name} is on {tensor.device} but the other tensors are on {x.device}"
            )


def check_shape(operator: str, shape: Iterable[int], **tensors: Tensor | None) -> None:
    """Check that each tensor has this shape."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise KernelError(
                f"{operator}: {name} has shape {list(tensor.shape)}; it must be {list(shape)}"
            )


def check_all(
    operator: str, shape: Iterable[int] | None = None, /, **tensors: Tensor | None
) -> None:
    """Check that the tensors are contiguous, not scalars, of one floating dtype, on one device.

    `shape`: the required shape of all of them; None: any.
    """
    first = next(tensor for tensor in tensors.values() if tensor is not None)
    check_beside(operator, first, TYPES, shape, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() == 0:
            raise KernelError(f"{operator}: {name} has no dimension; [.., n] is needed")


def check_beside(
    operator: str,
    x: Tensor,
    allowed: Iterable[torch.dtype],
    shape: Iterable[int] | None = None,
    /,
    **tensors: Tensor | None,
) -> None:
    """Check that the tensors share one dtype of `allowed` and the device of x, and are contiguous.

    `shape`: the required shape of all of them; None: any.
    """
    check_type(operator, allowed, **tensors)
    check_device(operator, x, **tensors)
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(
                f"{operator}: {name} with strides {tensor.stride()} is not contiguous"
            )
    if shape is not None:
        check_shape(operator, shape, **tensors)


# -- sums over rows --------------------------------------------------------------------------------

# A block has about this many rows, or more if there would be too many blocks. Writing and reading
# the sums, 8 bytes per column and block, then adds about 6 % to the bytes of a pass that reads and
# writes one 16-bit tensor.
BLOCK_ROWS = 32
# blocks of 256 threads: about twice as many as run at once on 110 (MI250X) or 132 (H100) compute
# units
_BLOCKS = 2048
HOST_ROW_BLOCKS = 64  # so that each of up to 64 threads has a block


def partial_sums(like: Tensor, needed: bool, sums: int = 1) -> tuple[int, Tensor | None]:
    """Return the number of row blocks of `like`, and memory for their sums.

    The memory is fp32 [blocks, sums, n]. The kernel sums each block separately, then adds up the
    sums of the blocks, for example to the gradient of a bias.

    sums    number of sums for each column
    needed  if false, there is nothing to sum: (0, None)
    """
    if not needed:
        return 0, None
    columns = like.shape[-1]
    row_blocks = count_row_blocks(like.numel(), columns, like.element_size(), like.is_cpu)
    return row_blocks, torch.empty(
        row_blocks, sums, columns, dtype=torch.float32, device=like.device
    )


@functools.lru_cache(1024)
def count_row_blocks(count: int, columns: int, element_size: int, on_cpu: bool) -> int:
    """Return the number of row blocks that are summed separately, for `count` elements in total.

    It depends only on the shape and the kind of device, not on threads or compute units, so that
    results are reproducible.
    """
    # thread blocks side by side, each of 64 lanes of 16 bytes
    across = -(-columns * element_size // (16 * 64))
    most = HOST_ROW_BLOCKS if on_cpu else max(1, _BLOCKS // across)
    return max(1, min(most, -(-count // columns // BLOCK_ROWS)))
