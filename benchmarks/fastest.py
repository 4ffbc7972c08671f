"""Times of the implementations from which runs on a CPU choose (megatron/kernels/measured_times.py).

The implementations of a case take turns, and the shortest time of each counts: a disturbance only
adds time. Shapes are GPT-2 124M's.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernel_cases import OPERATORS, Shape
from megatron.kernels import choose, library, measured_times
from megatron.kernels.measured_times import MeasuredTimes
from megatron.layers.attention_blocked import blocked_attention
from megatron.layers.attention_fused import torch_attention
from megatron.layers.attention_unfused import PLAIN, Scoring
from megatron.training.run.host import tune_allocator

Call = Callable[[], object]
Case = tuple[str, dict[str, Call]]
"""Name of a case, and its implementations by name."""

BLOCKS = (64, 128, 256)
# Sequence, micro-batch, heads
SEQUENCES: list[Shape] = [(512, 2, 12), (1024, 1, 12), (2048, 1, 6)]
FEW: list[Shape] = [(512, 1, 2)]
WINDOW = 512
OF_FUSION = {
    "attention_block": ("attention_weights", "attention_gradient", "row_dots"),
    "masked_softmax": ("causal_softmax", "masked_softmax"),
    "bias_activation": ("bias_gelu", "bias_swiglu"),
    "bias_dropout": ("bias_dropout_add",),
    "layer_norm": ("layer_norm", "add_layer_norm"),
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "rotary": ("rotate",),
    "cross_entropy": ("cross_entropy",),
    "permute": ("permute", "unpermute"),
    "optimizer": ("adamw",),
}
SMALLER: dict[str, Shape] = {
    "causal_softmax": (1, 4, 1024, 1024),
    "masked_softmax": (1, 4, 1024, 1024),
    "cross_entropy": (256, 50304),
    "adamw": (16, 840_000),
    "scale_and_norm": (16, 840_000),
}
_ROUNDS, _CASE_S = 5, 0.3  # per case: maximum rounds, and seconds after which none begins


def operators(dtype: torch.dtype) -> Iterator[Case]:
    """Yield a case for each of the fusions: its kernels, and torch's operators."""
    cpu = torch.device("cpu")
    for fusion, names in OF_FUSION.items():
        if fusion == "optimizer" and dtype == torch.bfloat16:
            names = (*names, "scale_and_norm")  # in other types, neither side fuses this pass
        variants: dict[str, list[Call]] = {"fused": [], "torch": []}
        for name in names:
            operator = OPERATORS[name]
            work = operator.prepare(SMALLER.get(name, operator.host[0]), cpu, dtype)
            for runs, run in zip(variants.values(), (work.ours, work.torch), strict=True):
                runs.append(partial(both_passes, run, work.arguments, work.leaves))
        yield (
            f"{fusion} {name_of(dtype)}",
            {side: partial(each, runs) for side, runs in variants.items()},
        )


def each(runs: list[Call]) -> None:
    """Run all calls."""
    for run in runs:
        run()


def both_passes(
    implementation: Callable[..., Any], arguments: tuple[Any, ...], leaves: list[torch.Tensor]
) -> None:
    """Compute a result and, where there are leaves, their gradients."""
    with torch.set_grad_enabled(bool(leaves)):
        result = implementation(*arguments)
    if leaves:
        results = result if isinstance(result, tuple) else (result,)
        gradients = [torch.ones_like(x) for x in results]
        torch.autograd.grad(results, leaves, gradients, allow_unused=True)


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Yield cases of attention: torch's, and blocks of several lengths.

    In fp16, whose products are slow on most processors, only one small case is measured.
    """
    name = name_of(dtype)
    for shape in SEQUENCES if dtype != torch.float16 else FEW:
        case = f"attention {name} {shape[0]}"
        x = projection(shape, dtype)
        blocks = {str(n): chosen(case, str(n), passes(by_blocks, x)) for n in BLOCKS}
        yield case, {"torch": passes(by_torch, x), **blocks}
    if dtype == torch.float16:
        return
    limited = PLAIN._replace(window=WINDOW)
    variants = {
        str(choose.usual_block(name, shape[0])): partial(by_blocks, scoring=limited),
        "torch": partial(by_torch, scoring=limited),
    }
    yield f"windowed {case}", {variant: passes(run, x) for variant, run in variants.items()}
    case = f"keys {name}"
    x = projection(SEQUENCES[1], dtype)
    yield (
        case,
        {
            variant: chosen(case, variant, passes(by_blocks, x))
            for variant in ("copied", "in place")
        },
    )


def projection(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return random queries, keys and values [s, b, heads, 3, 64]."""
    return torch.randn(*shape, 3, 64).to(dtype).requires_grad_()


def passes(implementation: Callable[..., Any], x: torch.Tensor) -> Call:
    """Return a call that runs the forward and the backward pass of attention."""
    return partial(both_passes, implementation, (x,), [x])


def by_torch(x: torch.Tensor, scoring: Scoring = PLAIN) -> torch.Tensor:
    """Return attention of a projection [s, b, heads, 3, 64] by torch."""
    q, k, v = x.unbind(3)
    return torch_attention(q, k, v, scoring)


def by_blocks(x: torch.Tensor, scoring: Scoring = PLAIN) -> torch.Tensor:
    """Return attention of such a projection by blocks."""
    return blocked_attention((x,), scoring._replace(fusions=choose.ALL))


def chosen(case: str, variant: str, run: Call) -> Call:
    """Return a call of `run` for which `variant` counts as the fastest of a case."""

    def call() -> object:
        measured_times.agree(MeasuredTimes({case: {variant: 1.0}}))
        return run()

    return call


def name_of(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def times(variants: dict[str, Call], now: Callable[[], float]) -> dict[str, float]:
    """Return the shortest time of each variant, in seconds, after a warm-up call."""
    best = dict.fromkeys(variants, math.inf)
    end = 0.0
    for nth in range(_ROUNDS + 1):
        if nth == 1:
            end = now() + _CASE_S
        if nth > 1 and now() > end:
            break
        for variant, run in variants.items():
            start = now()
            run()
            if nth:
                best[variant] = min(best[variant], now() - start)
    return best


def measure(now: Callable[[], float] = time.perf_counter) -> MeasuredTimes:
    """Return the times of all cases on this machine. Raises KernelError without a CPU library."""
    tune_allocator()
    torch.manual_seed(0)
    seconds = {}
    try:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for cases in (operators(dtype), attention(dtype)):
                for case, variants in cases:
                    measured_times.agree(MeasuredTimes())
                    seconds[case] = times(variants, now)
    finally:
        measured_times.forget()
    return MeasuredTimes(
        seconds,
        torch.get_num_threads(),
        datetime.date.today().isoformat(),
        str(torch.__version__),
        library.find("cpu").build,
    )
