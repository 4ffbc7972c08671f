"""Which fused kernels this machine has, where they come from, and whether they compute what they should.

    python -m megatron.kernels [--device cpu|cuda] [--list]
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from megatron.errors import KernelError, print_error
from megatron.kernels import availability, library
from megatron.kernels.build import LIBRARIES, SOURCES, TARGETS, compiler, no_compiler, source_hash


def describe(device_type: str) -> list[str]:
    """Lines that say which library serves this kind of device, or why none."""
    found = library.find(device_type)
    if found.handle is None:
        return [f"{device_type:<5} none: {found.reason}"]
    gpu = f", {torch.cuda.get_device_name()}" if device_type == "cuda" else ""
    now = source_hash()
    same = "those of csrc/kernels" if found.sources == now else "NOT those of csrc/kernels"
    sources = f"; built from sources {found.sources}" + (f", {same}" if now else "")
    return [f"{device_type:<5} {found.target} {found.arch}{gpu}{sources}", f"      {found.path}"]


def print_inventory(device_types: Sequence[str]) -> None:
    """Libraries, compilers and optional packages."""
    print("fused kernels, by kind of device")
    for device_type in device_types:
        for line in describe(device_type):
            print(f"  {line}")
    names = sorted(path.name for path in LIBRARIES.glob("libmegatron-*.so"))
    print(f"  in {LIBRARIES}: {', '.join(names) or 'nothing'}")
    if SOURCES.is_dir():
        print("compilers for python setup.py build_kernels")
        for target in TARGETS:
            print(f"  {target:<5} {compiler(target) or no_compiler(target)}")
    print("optional packages")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    flash = availability.flash_attention(kind, "bfloat16")
    for finding in (flash, availability.fused_norm(kind), availability.fused_adam(kind)):
        print(f"  {finding.line}")


def test(device_type: str) -> bool:
    """Run the self-test on a kind of device and print a line per operator; False when one failed."""
    from megatron.kernels import self_test

    found = library.find(device_type)
    print(f"self-test on {device_type} ({found.target} {found.arch}), against float64")
    results = []
    for result in self_test.run(torch.device(device_type)):
        print(f"  {result.line}", flush=True)
        results.append(result.ok)
    if not all(results):
        failed = f"{results.count(False)} of {len(results)} operators failed"
        print(f"  {failed}. {library.OVERRIDE}=none runs without this library")
    return all(results)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 unless an operator fails or a device that was asked for has no library."""
    parser = argparse.ArgumentParser(prog="python -m megatron.kernels", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="this kind only (cuda: ROCm, too)")
    parser.add_argument("--list", action="store_true", help="print what is there, without the self-test")
    chosen = parser.parse_args(arguments)
    device_types = [chosen.device] if chosen.device else ["cpu", "cuda"]
    try:
        print_inventory(device_types)
        loaded = [kind for kind in device_types if library.find(kind).handle is not None]
        if chosen.list:
            return 0
        passed = [test(kind) for kind in loaded]
    except KernelError as error:
        print_error(error)
        return 1
    if not loaded:
        print("self-test: no library to test")
    return 0 if all(passed) and (loaded or not chosen.device) else 1


if __name__ == "__main__":
    sys.exit(main())
