#!/usr/bin/env python
"""List this machine's libraries of fused kernels, and compare each kernel with torch's operators.

    python tools/check_kernels.py [--device cpu|cuda] [--list]
    python tools/check_kernels.py --measure

Use it on a new machine after `python setup.py build_kernels`. It takes seconds. --measure times the
implementations from which runs on this kind of CPU choose, and saves the times next to the
libraries, or in the file that MEGATRON_KERNELS_MEASURED names. Nothing else should run on the
machine meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import fastest
from benchmarks.kernel_cases import OPERATORS, Operator
from megatron.config.option import Parser
from megatron.errors import KernelError
from megatron.kernels import choose, library, measured_times
from megatron.kernels.build import LIBRARIES, SOURCES, TARGETS, compiler, no_compiler, source_hash
from megatron.kernels.ops.elementwise import bias_dropout_add
from megatron.kernels.ops.optimizer import AdamWInputs, adamw_
from megatron.training.run.process import as_tool

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of results to compare, of a kernel and of torch."""
Check = Callable[[torch.device, torch.dtype], Pairs]
_ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def compared(operator: Operator, odd: bool) -> Check:
    """Return a check of values and gradients at the benchmark's shape, reduced.

    Sizes of at least 512 are divided by 8.

    odd  whether to use rows whose size is not a multiple of 16 bytes
    """

    def check(device: torch.device, dtype: torch.dtype) -> Pairs:
        shape = tuple(n // 8 if n >= 512 else n for n in operator.host[0])
        work = operator.prepare((*shape[:-1], shape[-1] | odd), device, dtype)

        def results(implementation: Callable[..., Any]) -> list[torch.Tensor]:
            torch.manual_seed(1)  # for the gradients of the outputs
            outputs = implementation(*work.arguments)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            if not work.leaves:
                return list(outputs)
            gradients = torch.autograd.grad(
                outputs, work.leaves, [torch.randn_like(y) for y in outputs]
            )
            return [y.detach() for y in (*outputs, *gradients)]

        expected = results(work.exact or work.torch)  # first: a kernel may overwrite its arguments
        yield from zip(results(work.ours), expected, strict=True)

    return check


def dropout(device: torch.device, dtype: torch.dtype) -> Pairs:
    """Compare bias_dropout_add, given the mask that an input of ones reveals; check the rate.

    Raises ArithmeticError if the rate of dropped elements is wrong.
    """
    rate = 0.2
    seed = 1234567890123
    x, residual, bias = (
        torch.randn(shape, device=device).to(dtype) for shape in ((200, 1001), (200, 1001), (1001,))
    )
    mask = bias_dropout_add(torch.ones_like(x), None, None, rate, seed) != 0
    share = (mask.float().mean() - (1 - rate)) / (5 * (rate * (1 - rate) / mask.numel()) ** 0.5)
    if abs(share) > 1:
        raise ArithmeticError(
            f"{mask.float().mean():.4f} of elements are kept, expected {1 - rate}"
        )
    actual = bias_dropout_add(x, bias, residual, rate, seed)
    yield actual, residual.float() + (x.float() + bias.float()) * mask / (1 - rate)


def adamw(device: torch.device, dtype: torch.dtype, moments: torch.dtype = torch.float32) -> Pairs:
    """Compare three steps over tensors of several sizes, with gradients and copies in `dtype`.

    The average of the weights is updated as well. With bf16 moments, only one step is compared: a
    moment that differs by one rounding in fp32 may then differ by one in bf16, and later steps
    differ more.
    """
    settings: dict[str, Any] = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    weights = [torch.randn(n, device=device) for n in (1, 1000, 4099, 70000)]
    sides: list[Any] = []
    for _ in range(2):
        both = [[torch.zeros_like(w, dtype=moments) for w in weights] for _ in range(2)]
        copies = [] if dtype == torch.float32 else [w.to(dtype) for w in weights]
        averages = [torch.zeros_like(w) for w in weights]
        sides.append(([w.clone() for w in weights], *both, copies, averages))
    for step in (1, 2, 3) if moments == torch.float32 else (1,):
        gradients = [torch.randn_like(w).to(dtype) for w in weights]
        more: dict[str, Any] = {"step": step, "gradient_scale": 0.5, "new_in_average": 0.1}
        for kernel, lists in zip((True, False), sides, strict=True):
            values, first, second, rounded, averages = lists
            adamw_(
                AdamWInputs(
                    values, gradients, first, second, rounded, averages, **settings, **more
                ),
                kernel,
            )
    for actual, expected in zip(*sides, strict=True):
        yield from zip(actual, expected, strict=True)


CHECKS: dict[str, list[Check]] = {
    # Only matrices get odd rows: heads have even widths, and a causal softmax has square scores.
    name: [
        compared(operator, odd)
        for odd in ((False, True) if len(operator.host[0]) == 2 else (False,))
    ]
    for name, operator in OPERATORS.items()
} | {
    "bias_dropout_add": [dropout],
    "adamw": [adamw],
    "adamw_bf16_moments": [functools.partial(adamw, moments=torch.bfloat16)],
    "adamw_average": [adamw],
}


def verdict(checks: Sequence[Check], device: torch.device) -> tuple[bool, str]:
    """Return whether the kernel agrees with torch, and a text with its worst error and the limit.

    The limit, relative to the largest entry, is sixteen roundings to the coarser of the types of
    inputs and result (torch rounds after each of its operators), plus 2^-16 for fp32 arithmetic and
    sums of thousands of terms. The error that is largest relative to its limit is the worst.
    """
    worst = 0.0
    detail = "no error"
    for check in checks:
        for dtype in _ROUNDING:
            torch.manual_seed(0)
            try:
                for actual, expected in check(device, dtype):
                    if actual.shape != expected.shape:
                        return (
                            False,
                            f"{dtype}: shape {list(actual.shape)}, not {list(expected.shape)}",
                        )
                    off = float(
                        (actual.double() - expected.double()).abs().nan_to_num(math.inf).max()
                    )
                    rounding = max(_ROUNDING[dtype], _ROUNDING.get(actual.dtype, 0.0))
                    limit = (16 * rounding + 2.0**-16) * float(expected.abs().max()) or 1e-30
                    if off / limit > worst:
                        worst = off / limit
                        detail = f"largest error {off:.1e}, allowed {limit:.1e} ({dtype})"
            except Exception as error:  # report any failure
                return (
                    False,
                    f"{dtype}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                )
    return worst <= 1.0, detail


def describe(device_type: str) -> Iterator[str]:
    """Describe the library for this kind of device, or why there is none."""
    kernels = library.find(device_type)
    if kernels.handle is None:
        yield f"{device_type:<5} none: {kernels.reason}"
        return
    gpu = f", {torch.cuda.get_device_name()}" if device_type == "cuda" else ""
    same = (
        "those of csrc/kernels" if kernels.sources == source_hash() else "not those of csrc/kernels"
    )
    yield (
        f"{device_type:<5} {kernels.target} {kernels.arch}{gpu}; built from sources "
        f"{kernels.sources}, {same}"
    )
    yield f"      {kernels.path}"


def inventory(device_types: Sequence[str]) -> Iterator[str]:
    """List libraries, compilers and optional packages."""
    yield "fused kernels, by kind of device"
    for device_type in device_types:
        yield from (f"  {line}" for line in describe(device_type))
    names = sorted(path.name for path in LIBRARIES.glob("libmegatron-*.so"))
    yield f"  in {LIBRARIES}: {', '.join(names) or 'nothing'}"
    if SOURCES.is_dir():
        yield "compilers for python setup.py build_kernels"
        yield from (
            f"  {target:<5} {compiler(target) or no_compiler(target)}" for target in TARGETS
        )
    yield measured_times.find().line
    yield from table(measured_times.find())
    yield "optional packages"
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    yield f"  {choose.flash_attention(kind, 'bfloat16').line}"
    yield f"  {choose.fused_norm(kind).line}"
    yield f"  {choose.fused_adam(kind).line}"


def table(times: measured_times.MeasuredTimes) -> Iterator[str]:
    """List the times of a measurement, each case's fastest first."""
    for case, seconds in times.seconds.items():
        names = sorted(seconds, key=seconds.__getitem__)
        yield f"  {case:<32} " + ", ".join(f"{name} {1e3 * seconds[name]:.2f} ms" for name in names)


def measure() -> None:
    """Measure this machine; save and print the times. Raises KernelError."""
    file = measured_times.path()
    kernels = library.find("cpu")
    if file is None or kernels.handle is None:
        why = f"{measured_times.OVERRIDE} is none" if file is None else kernels.line
        raise KernelError(f"nothing to measure: {why}")
    times = fastest.measure()
    measured_times.write(file, times)
    print(f"{measured_times.cpu()}\n{times.line}, in {file}", *table(times), sep="\n")


def compare(device_type: str) -> bool:
    """Compare all kernels of a kind of device with torch, and print and return the outcome."""
    kernels = library.find(device_type)
    print(f"{kernels.target} {kernels.arch} on {device_type}, compared with torch")
    failed = 0
    for name, checks in CHECKS.items():
        good, detail = verdict(checks, torch.device(device_type))
        print(f"  {name:<18} {'ok    ' if good else 'FAILED'}  {detail}", flush=True)
        failed += not good
    if failed:
        print(
            f"  {failed} of {len(CHECKS)} operators failed. {library.OVERRIDE}=none runs without "
            "this library"
        )
    return not failed


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="check kernels of this kind of device only (cuda includes ROCm)",
    )
    parser.add_argument(
        "--list", action="store_true", help="list libraries without testing kernels"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time the implementations for this CPU and save the times",
    )
    return parser


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code.

    It is 1 if a kernel disagrees or there is no library for the device of --device, and 2 after an
    error.
    """
    args = build_parser().parse_args(argv)
    if args.measure:
        measure()
        return 0
    device_types = [args.device] if args.device else ["cpu", "cuda"]
    print(*inventory(device_types), sep="\n")
    if args.list:
        return 0
    loaded = [kind for kind in device_types if library.find(kind).handle is not None]
    if not loaded:
        print("there is no library to compare")
    agree = [compare(kind) for kind in loaded]
    return 0 if all(agree) and (loaded or not args.device) else 1


if __name__ == "__main__":
    sys.exit(main())
