"""AdamW and scaling with a sum of squares, each over many tensors in one pass.

AdamW is available as a function and as a torch optimizer.

Bytes moved for N elements. AdamW with gradients of g bytes: in 12 N (weights, both moments) + g N,
out 12 N; 4 N less for each moment in bf16, 2 N more if the weights have a 16-bit copy, and 8 N more
if their average is updated. Scaling of elements of e bytes: in N e, out N e; without a factor only
in.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.kernels.library import TYPES, Function
from megatron.kernels.operators import check, check_beside, check_shape, operator

_ADAMW = Function("mk_adamw", "iippllpffffffif")
_SCALE_AND_NORM = Function("mk_scale_and_norm", "ppppllf")

# Each block processes one chunk of a tensor: `_SMALLEST` elements (csrc/kernels/tensor_list.h
# requires a multiple of it), or more if there would be too many blocks. The norm writes one number
# per block, and one block adds them up.
_SMALLEST = 4096
_MOST_UPDATES = 1 << 18
_MOST_SUMS = 1 << 14

Tensors = Sequence[Tensor]


def _chunk(sizes: Sequence[int], most: int) -> int:
    """Return the number of elements per chunk, so that there are about `most` chunks or fewer."""
    chunk = _SMALLEST
    total = sum(sizes)
    while total > chunk * most:
        chunk *= 2
    return chunk


def _array(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _check_list(
    name: str, what: str, tensors: Tensors, like: Tensors, dtypes: Iterable[torch.dtype]
) -> None:
    """Check dtypes and contiguity, and that tensors match `like` in number, shapes and device."""
    check(
        name, len(tensors) == len(like), f"there are {len(tensors)} {what} for {len(like)} tensors"
    )
    named = {f"{what}[{i}]": tensor for i, tensor in enumerate(tensors)}
    check_beside(name, like[0], dtypes, **named)
    for (which, tensor), model in zip(named.items(), like, strict=True):
        check_shape(name, model.shape, **{which: tensor})


# -- AdamW -----------------------------------------------------------------------------------------


class AdamWInputs(NamedTuple):
    """Lists of tensors and the settings of their AdamW update: the inputs of adamw_.

    parameters             fp32
    gradients              fp32, fp16 or bf16, all of one type; multiplied by `gradient_scale`
                           before use
    exp_avgs, exp_avg_sqs  fp32 or bf16, all of one type. The step is computed in fp32, and new
                     moments in bf16 are then rounded stochastically (round_). With rounding to
                     nearest, a second moment would never fall: with beta2 = 0.999 it falls by at
                     most 0.1 % in a step, and half the distance between neighbouring bf16 numbers
                     is 0.2 to 0.4 %
    copies           fp16 or bf16 tensors that get the new weights, rounded; empty if there are
                     none
    averages         fp32 averages of the weights, which move towards the new weights by the share
                     `new_in_average`, as with torch.lerp; at 0 they are not read
    lr, beta1, beta2, eps, weight_decay  as for torch.optim.AdamW
    step             counts from 1: the bias correction is that of `step` steps
    gradient_scale   a number, or one fp32 number on the device; if it is not finite the step is
                     skipped: nothing changes

    Tensors at the same index of the lists have the same shape; all are contiguous and on one
    device. Empty lists and tensors are allowed.
    """

    parameters: Tensors
    gradients: Tensors
    exp_avgs: Tensors
    exp_avg_sqs: Tensors
    copies: Tensors
    averages: Tensors
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    gradient_scale: float | Tensor = 1.0
    new_in_average: float = 0.0


def _check_adamw(name: str, adamw: AdamWInputs) -> None:
    wide = [torch.float32]
    moments = [torch.float32, torch.bfloat16]
    parameters = adamw.parameters
    scale = adamw.gradient_scale
    _check_list(name, "parameters", parameters, parameters, wide)
    _check_list(name, "gradients", adamw.gradients, parameters, TYPES)
    _check_list(name, "exp_avgs", adamw.exp_avgs, parameters, moments)
    _check_list(name, "exp_avg_sqs", adamw.exp_avg_sqs, parameters, moments)
    if adamw.copies:
        _check_list(name, "copies", adamw.copies, parameters, [torch.float16, torch.bfloat16])
    if adamw.averages:
        _check_list(name, "averages", adamw.averages, parameters, wide)
    check(
        name,
        0.0 <= adamw.beta1 < 1.0 and 0.0 <= adamw.beta2 < 1.0,
        f"betas ({adamw.beta1}, {adamw.beta2}) must be in [0, 1)",
    )
    check(name, adamw.step >= 1, f"step is {adamw.step}; the first is 1")
    device = parameters[0].device
    assert isinstance(scale, Tensor), "adamw_ has made a tensor of it"
    fits = scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == device
    shown = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
    check(name, fits, f"gradient_scale is {shown}; it must be one fp32 number on {device}")


_ODDS = 0x61C88647, 0x2545F491, 0x2C1B3C6D  # multipliers of the hash, less than 2**31


def round_(target: Tensor, x: Tensor, step: int) -> None:
    """Round fp32 values x stochastically to one of the two nearest in bf16, and write to `target`.

    The probability of rounding away from 0 is the position of the value in the gap between the two,
    from 0 to 1. The 16 random bits that decide are a hash of the value and the step. Thus all ranks
    that hold the same value round it in the same way, on any layout and after a resume, and no
    generator is needed. Values that bf16 can represent are unchanged, and NaNs remain NaNs. The
    kernel uses the same hash (`stochastic` in csrc/kernels/adamw.cpp).
    """
    bits = x.view(torch.int32)
    random = (bits * _ODDS[0]).add_((step * _ODDS[1] + 2**31) % 2**32 - 2**31)
    # Without this, the bits in successive steps would be spread too evenly, and a value close to
    # the next bf16 number would reach it too soon.
    random.bitwise_xor_(random >> 15).mul_(_ODDS[2])
    random.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    rounded = random.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    target.copy_(rounded.masked_fill_(x.isnan(), math.nan))


@torch.no_grad()
def adamw_reference_(adamw: AdamWInputs) -> None:
    """Compute `adamw_` with torch's fused AdamW."""
    parameters = list(adamw.parameters)
    scale = adamw.gradient_scale
    assert isinstance(scale, Tensor), "adamw_ has made a tensor of it"
    wide = list(torch._foreach_mul([g.float() for g in adamw.gradients], scale))
    moments = adamw.exp_avgs, adamw.exp_avg_sqs
    first, second = ([x.float() for x in each] for each in moments)
    good = torch.isfinite(scale)
    torch._fused_adamw_(
        parameters,
        wide,
        first,
        second,
        [],
        [torch.full((), float(adamw.step), device=p.device) for p in parameters],
        lr=adamw.lr,
        beta1=adamw.beta1,
        beta2=adamw.beta2,
        weight_decay=adamw.weight_decay,
        eps=adamw.eps,
        amsgrad=False,
        maximize=False,
        found_inf=good.logical_not().float(),
    )
    for moment, x in zip(itertools.chain(*moments), (*first, *second), strict=True):
        if moment is not x:
            round_(moment, x, adamw.step)
    if adamw.copies:
        torch._foreach_copy_(list(adamw.copies), parameters)
    share = adamw.new_in_average * good
    for average, p in zip(adamw.averages, parameters, strict=False):  # averages may be empty
        average.lerp_(p, share)


def _run_adamw(adamw: AdamWInputs) -> None:
    parameters, gradients, *moments, copies, averages = adamw[:6]
    sizes = [p.numel() for p in parameters]
    # if there are no copies or averages, these rows are not read
    lists = (parameters, gradients, *moments, copies or parameters, averages or parameters)
    _ADAMW(
        parameters[0],
        TYPES[copies[0].dtype] if copies else -1,
        sum((of[0].dtype == torch.bfloat16) << i for i, of in enumerate(moments)),
        _array([t.data_ptr() for tensors in lists for t in tensors]),
        _array(sizes),
        len(sizes),
        _chunk(sizes, _MOST_UPDATES),
        adamw.gradient_scale,
        1.0 - adamw.beta1,
        1.0 - adamw.beta2,
        adamw.lr / (1.0 - adamw.beta1**adamw.step),
        1.0 / math.sqrt(1.0 - adamw.beta2**adamw.step),
        adamw.eps,
        adamw.lr * adamw.weight_decay,
        adamw.step,
        adamw.new_in_average if averages else 0.0,
        type_of=gradients[0],
    )


_adamw_ = operator(
    "adamw_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] "
    "exp_avg_sqs, Tensor(d!)[] copies, Tensor(e!)[] averages, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, SymInt step, Tensor gradient_scale, float new_in_average) -> ()",
    _run_adamw,
    adamw_reference_,
    record=AdamWInputs,
    check=_check_adamw,
)


@torch.no_grad()
def adamw_(adamw: AdamWInputs, kernel: bool = True) -> None:
    """Take one step of AdamW on lists of tensors.

    Loshchilov and Hutter, arXiv 1711.05101, algorithm 2, in the form of torch.optim.AdamW: the
    weight decay is multiplied by `lr`. `kernel` False: torch's operators even where there is a
    kernel. Raises KernelError for lists without parameters and, unless `kernel` is False, for other
    types, shapes and settings.

    torch.compile takes lr as a constant and would compile again for each value: call this function
    outside of compiled code.
    """
    if any(adamw[:5]):
        check("adamw_", bool(adamw.parameters), "there are no parameters for the other lists")
        scale = adamw.gradient_scale
        averages = adamw.averages
        if not isinstance(scale, Tensor):
            device = adamw.parameters[0].device
            scale = torch.full((), scale, dtype=torch.float32, device=device)
        averages = averages if adamw.new_in_average else []
        adamw = adamw._replace(averages=averages, gradient_scale=scale)
        if kernel:
            _adamw_(*adamw)
        else:
            adamw_reference_(adamw)


# -- scaling and norm ------------------------------------------------------------------------------


def _check_scaled(name: str, tensors: Tensors, factor: float) -> None:
    _check_list(name, "tensors", tensors, tensors, TYPES)


@torch.no_grad()
def _scale_and_norm_reference(tensors: Tensors, factor: float) -> Tensor:
    if factor != 1.0:
        torch._foreach_mul_(list(tensors), factor)
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(norms).square().sum().float()


def _run_scale_and_norm(out: Tensor, tensors: Tensors, factor: float) -> None:
    sizes = [t.numel() for t in tensors]
    chunk = _chunk(sizes, _MOST_SUMS)
    chunks = sum(-(-size // chunk) for size in sizes)
    partial = out.new_empty(chunks, dtype=torch.float64)
    pointers = _array([t.data_ptr() for t in tensors])
    _SCALE_AND_NORM(tensors[0], out, partial, pointers, _array(sizes), len(sizes), chunk, factor)


_scale_and_norm_ = operator(
    "scale_and_norm_(Tensor(a!)[] tensors, float factor) -> Tensor",
    _run_scale_and_norm,
    _scale_and_norm_reference,
    lambda tensors, factor: tensors[0].new_empty((), dtype=torch.float32),
    check=_check_scaled,
)


@torch.no_grad()
def scale_and_norm_(tensors: Tensors, factor: float = 1.0) -> Tensor:
    """Multiply all tensors by `factor` in place and return the sum of squares of the results.

    tensors  fp32, fp16 or bf16, all of one type, contiguous and on one device; some may be empty

    The sum is taken in fp64 and in a fixed order: the same bits every time. It is returned as a
    0-dimensional fp32 tensor on the tensors' device, without a copy to the host: NaN or infinite if
    an element is, and infinite above 3.4e38. An empty list gives 0, on the CPU. With a factor of 1
    no tensor is written. Raises KernelError for other types, layouts and devices.
    """
    if not tensors:
        return torch.zeros(())
    return _scale_and_norm_(tensors, float(factor))


class Untraced:
    """Methods of torch's optimizers without their marks for torch's compiler.

    torch marks them as not traceable and imports the compiler on their first call, which takes half
    as long as importing torch. These methods are never traced anyway.
    """

    add_param_group: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad: Callable[..., None] = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class FusedAdamW(Untraced, torch.optim.Optimizer):
    """AdamW through `adamw_`: fp32 weights, gradients in fp32 or 16 bit.

    params  as for torch's optimizers; weight_decay is 0.01 in groups that have none
    kernel  False: torch's operators even where there is a kernel

    Each group counts its steps in `group["step"]`, on the host. A parameter without a gradient is
    left out. State: `exp_avg` and `exp_avg_sq`, fp32 unless they already exist in bf16.

    copies          {parameter: 16-bit tensor of its shape}; the tensor gets the new weights in the
                    same pass
    average         name of an fp32 average in the state of each parameter, which moves towards the
                    new weights in the same pass, by the share `new_in_average`; "" for none
    gradients       {parameter: gradient}, instead of .grad, which has the parameter's format
    gradient_scale  factor of all gradients, e.g. for clipping: one fp32 number on their device,
                    which the host need not read. If it is not finite the step changes nothing,
                    and the caller must call `uncount`
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        kernel: bool = True,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.01, "step": 0}
        )
        self._kernel = kernel
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        self.average = ""
        self.new_in_average = 0.0
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.gradient_scale: float | torch.Tensor = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                gradient = self.gradients.get(p, p.grad)
                if gradient is None:
                    continue
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p)
                adamw = AdamWInputs(
                    [p],
                    [gradient],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [self.copies[p]] if p in self.copies else [],
                    [state[self.average]] if self.average else [],
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=group["step"],
                    gradient_scale=self.gradient_scale,
                    new_in_average=self.new_in_average,
                )
                adamw_(adamw, self._kernel)

    def uncount(self) -> None:
        """Remove the last step, which changed nothing, from the bias correction."""
        for group in self.param_groups:
            group["step"] -= 1
