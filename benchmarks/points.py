"""Compare design choices of the GPU path, before and after, in one run on a GPU.

    python benchmarks/points.py [--device cpu|cuda] [--part trainings|operators] [--output FOLDER]

trainings   settings of pretrain_gpt.py and its environment: both sides take turns, a ratio is that
            of medians
operators   replacements of torch operators, compared with the torch version, which is kept here;
            results are checked against float64

A failed row does not end the others; a row that needs another machine gives the reason. On a CPU
everything is small, as a smoke test. Exit code 1 if a row failed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from machine import device_memory, seconds_of
from parity import train
from sides import our_arguments, run
from workloads import OURS, ROOT, Case, cpu_cases, cuda_cases, quick

from megatron.checkpoint.tensors import Shards, Snapshot
from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.layers.vocabulary import look_up
from megatron.model.gpt import build_chunks
from megatron.parallel import gradient_accumulator
from megatron.parallel.gradient_accumulator import GradientSink
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from megatron.planner.processes import gpus_here

GIB = 2**30
WARM_UP, STEPS, REPEAT = 3, 8, 5
Pair = tuple[float, float, str]  # before, after, unit


class Cannot(Exception):
    """Reason why this machine cannot run a row."""


@dataclass(frozen=True)
class Place:
    """Device "cpu" or "cuda", their number and the memory of one; `small`: a smoke test."""

    device: str
    count: int
    memory_bytes: int
    folder: Path

    @property
    def small(self) -> bool:
        return self.device == "cpu"


# ---- trainings -----------------------------------------------------------------------------------

Setting = tuple[Mapping[str, str], tuple[str, ...]]  # variables and flags


def medians(case: Case, before: Setting, after: Setting, place: Place) -> Pair:
    """ms of a step with both settings, which take turns: A B B A (small: A B)."""
    found: dict[int, list[float]] = {0: [], 1: []}
    threads = case.processes if place.small else len(os.sched_getaffinity(0))
    for index in (0, 1) if place.small else (0, 1, 1, 0):
        variables, flags = (before, after)[index]
        side = replace(OURS, name=f"ours {index}", flags=flags)
        with mock.patch.dict(os.environ, variables):
            outcome = run(
                case, side, warm_up=WARM_UP, steps=STEPS, threads=threads, folder=place.folder
            )
        if outcome.reason:
            raise RuntimeError(outcome.reason)
        found[index] += outcome.step_s
    return 1e3 * statistics.median(found[0]), 1e3 * statistics.median(found[1]), "ms a step"


def meter(place: Place) -> Pair:
    case = quick(cpu_cases()[4]) if place.small else cuda_cases(place.memory_bytes)[0]
    return medians(case, ({}, ("--hang-timeout", "0")), ({}, ()), place)


def reserved(place: Place) -> Pair:
    """Most bytes that torch's allocator took from the device."""
    if place.small:
        raise Cannot("needs a GPU")
    found, arguments = [], our_arguments(cuda_cases(place.memory_bytes)[0], OURS, WARM_UP + STEPS)
    for on in (False, True):
        variables = dict.fromkeys(
            ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), f"expandable_segments:{on}"
        )
        records = train(place.folder / f"reserved-{on}.jsonl", arguments, 1, variables)
        found.append(max(record["reserved_bytes"] for record in records.values()) / GIB)
    return found[0], found[1], "GiB reserved"


def of_two(variable: str, before: str, after: str, *, tensor: bool) -> Callable[[Place], Pair]:
    """Compare an environment variable, on two devices whose messages overlap with products."""
    zero = ("--overlap-grad-reduce", "--overlap-param-gather")
    flags = ("--sequence-parallel", "--tp-comm-overlap") if tensor else zero

    def measure(place: Place) -> Pair:
        if variable.startswith("GPU_") and torch.version.hip is None:
            raise Cannot("needs ROCm")
        if place.count < 2:
            raise Cannot("needs two devices")
        case = replace(cuda_cases(place.memory_bytes)[:2][-1], tensor=1 + tensor, data=2 - tensor)
        return medians(case, ({variable: before}, flags), ({variable: after}, flags), place)

    return measure


# ---- operators -----------------------------------------------------------------------------------


def timed(call: Callable[[], object], place: Place) -> float:
    """ms, the median of REPEAT calls after one."""
    return 1e3 * statistics.median([seconds_of(call, place.device) for _ in range(REPEAT + 1)][1:])


def close(found: torch.Tensor, expected: torch.Tensor, off: float) -> None:
    """Raise ValueError if `found` differs from float64 `expected` by more than `off` of its norm."""
    error = float((found.double() - expected).norm() / expected.norm())
    if not error <= off:
        raise ValueError(f"the result is off by {error:.1e} of its norm, {off:.0e} is allowed")


def weight_gradient(place: Place, in_fp32: bool) -> Pair:
    """Compare rows of 256 with GradientSink's method, with or without torch.addmm(out_dtype=)."""
    rows, columns, tokens = (768, 256, 512) if place.small else (12288, 4096, 8192)
    dy, x = (
        torch.randn(tokens, n, device=place.device, dtype=torch.bfloat16) for n in (rows, columns)
    )
    if in_fp32 and not gradient_accumulator._adds_in_fp32(dy.device, dy.dtype):
        raise Cannot("torch.addmm has no out_dtype here")
    ours = GradientSink(
        torch.nn.Parameter(x.new_empty(rows, columns)),
        x.new_empty(rows, columns, dtype=torch.float32),
    )
    total, product = torch.zeros_like(ours.total), x.new_empty(256, columns)

    def before() -> None:
        for first in range(0, rows, 256):
            total[first : first + 256] += torch.mm(dy[:, first : first + 256].t(), x, out=product)

    def after() -> None:
        with mock.patch.object(gradient_accumulator, "_adds_in_fp32", lambda *_: in_fp32):
            ours.add_product(dy, x)

    expected = dy[:, ::97].double().t() @ x.double()
    before()
    after()
    for sums in (total, ours.total):
        close(sums[::97], expected, 4e-3)  # each product is rounded to bf16: by 2^-9 at most
    return timed(before, place), timed(after, place), "ms"


def embedding_gradient(place: Place) -> Pair:
    """Compare index_put_(accumulate=True) with look_up's backward pass, on Zipf-distributed tokens."""
    rows, columns, tokens = (512, 64, 256) if place.small else (50304, 4096, 8192)
    frequency = 1 / torch.arange(1, rows + 1, dtype=torch.float64)
    ids = torch.multinomial(frequency, tokens, replacement=True).to(place.device)
    values = torch.randn(tokens, columns, device=place.device, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(values.new_zeros(rows, columns))
    ours = GradientSink(weight, torch.empty(rows, columns, device=place.device))
    weight.gradient_sink = ours  # type: ignore[attr-defined]
    found, total = look_up(weight, ids), torch.zeros_like(ours.total)

    def before() -> None:
        total.index_put_((ids,), values.float(), accumulate=True)

    def after() -> None:
        found.backward(values, retain_graph=True)

    before()
    after()
    for row in ids.unique()[:32].tolist():
        expected = values[ids == row].double().sum(0)
        for sums in (total, ours.total):
            close(sums[row], expected, 1e-5)
    return timed(before, place), timed(after, place), "ms"


def host_copy(place: Place, of_bytes: bool) -> Pair:
    """Compare torch's pinned memory with a Snapshot, at the first copy of a state of odd size."""
    size = 2**26 + 2**22 if place.small else 2**32 + 2**28
    state = torch.zeros(size // 4, device=place.device)
    kept: list[Any] = []

    def before() -> None:
        kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=place.device == "cuda"))
        kept[0].view(torch.float32).copy_(state, non_blocking=True)

    def after() -> None:
        kept.append(Snapshot())
        kept.append(kept[0].take({"state": Shards(tuple(state.shape), {(0,): state})}))

    found = []
    for copy in (after, before):  # torch keeps what it pinned
        free = available_bytes()
        seconds = seconds_of(copy, place.device)
        found.append((free - available_bytes()) / size if of_bytes else seconds)
        kept.clear()
    return found[1], found[0], "bytes taken a byte copied" if of_bytes else "s"


def available_bytes() -> int:
    """Bytes of the machine's memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def model_of(place: Place, **fields: Any) -> tuple[Config, Topology]:
    sizes = (
        dict(hidden_size=64, num_attention_heads=4, seq_length=128, vocab_size=512)
        if place.small
        else (dict(hidden_size=1024, num_attention_heads=16, seq_length=2048, vocab_size=50304))
    )
    config = Config.create(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields})
    device = torch.device(place.device, 0) if place.device == "cuda" else torch.device("cpu")
    return config, Topology.from_layout(Layout(), 0, device=device)


def alibi(place: Place) -> Pair:
    """Return the MiB that ALiBi adds to a training pass, with 1 layer and with 8."""

    def extra(layers: int) -> float:
        held = [
            peak_bytes(
                *model_of(
                    place,
                    num_layers=layers,
                    position_embedding_type=kind,
                    attention_backend="fused",
                )
            )
            for kind in ("learned_absolute", "alibi")
        ]
        return (held[1] - held[0]) / 2**20

    return extra(1), extra(8), "MiB, 1 layer and 8"


def peak_bytes(config: Config, topology: Topology) -> float:
    """Return a training pass's memory above the weights; on a CPU only the saved tensors."""
    model = build_chunks(config, topology)["0"]
    batch = make_micro_batch(np.zeros((1, config.model.seq_length + 1), np.int64)).to(
        topology.device
    )
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    cuda = topology.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch, None)
    loss.backward()
    return torch.cuda.max_memory_allocated() - before if cuda else sum(saved.values())


def drawing(place: Place) -> Pair:
    """Compare initialization one weight after the other, with a copy, and build_chunks."""
    config, topology = model_of(place, num_layers=2 if place.small else 24)
    after = seconds_of(lambda: build_chunks(config, topology), place.device)
    shapes = [parameter.shape for parameter in build_chunks(config, topology).parameters()]

    def before() -> None:
        for shape in shapes:
            whole = torch.zeros(shape)
            for block in whole.split(64):
                block.copy_(
                    torch.empty(block.shape).normal_(
                        0.0, 0.02, generator=torch.Generator().manual_seed(1)
                    )
                )
            whole.to(topology.device)

    return seconds_of(before, place.device), after, "s"


Row = tuple[str, str, str, Callable[[Place], Pair]]  # point, before, after, measurement
TRAININGS: list[Row] = [
    ("10 meter of the watchdog, G1", "--hang-timeout 0", "default", meter),
    ("11 peak reserved, G1", "expandable_segments:False", "True", reserved),
    (
        "3 hardware queues, DP 2",
        "GPU_MAX_HW_QUEUES=4",
        "8",
        of_two("GPU_MAX_HW_QUEUES", "4", "8", tensor=False),
    ),
    (
        "3 priority of messages, DP 2",
        "TORCH_NCCL_HIGH_PRIORITY=0",
        "1",
        of_two("TORCH_NCCL_HIGH_PRIORITY", "0", "1", tensor=False),
    ),
    (
        "4 connections, TP 2",
        "CUDA_DEVICE_MAX_CONNECTIONS=8",
        "1",
        of_two("CUDA_DEVICE_MAX_CONNECTIONS", "8", "1", tensor=True),
    ),
]
OPERATORS: list[Row] = [
    (
        "2 weight gradient by rows",
        "256 rows",
        "current",
        lambda place: weight_gradient(place, False),
    ),
    (
        "2 weight gradient in fp32",
        "256 rows",
        "addmm(out_dtype=)",
        lambda place: weight_gradient(place, True),
    ),
    ("13 embedding gradient", "index_put_", "current", embedding_gradient),
    ("5 bias of ALiBi", "1 layer", "8 layers", alibi),
    ("6 host memory for a copy", "pin_memory", "Snapshot", lambda place: host_copy(place, False)),
    ("6 its size", "pin_memory", "Snapshot", lambda place: host_copy(place, True)),
    ("12 drawing weights", "on one thread, then copied", "current", drawing),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cuda (CUDA or ROCm) by default"
    )
    parser.add_argument("--part", choices=("trainings", "operators"), help="default: both")
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "runs" / "points",
        metavar="FOLDER",
        help="folder for logs",
    )
    options = parser.parse_args()
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    memory_bytes = device_memory()[1] if options.device == "cuda" else 0
    place = Place(options.device, gpus_here(), memory_bytes, folder)
    if place.small:
        torch.set_num_threads(1)
    # Trainings first: while they run this process holds no device.
    rows = [
        *(TRAININGS if options.part != "operators" else []),
        *(OPERATORS if options.part != "trainings" else []),
    ]
    failed = measured = 0
    print(
        "| point | before | after | before | after | unit | after / before |\n" + "|---" * 7 + "|"
    )
    for point, old, new, measure in rows:
        try:
            before, after, unit = measure(place)
            measured += 1
            ratio = f"{after / before:.2f}" if before > 0 else ""
            cells = f"{before:.4g} | {after:.4g} | {unit} | {ratio}"
        except Cannot as why:
            cells = f"| | | not done: {why}"
        except Exception as error:  # a failure of any kind is a row, and the others go on
            failed += 1
            traceback.print_exc()
            cells = f"| | | FAILED: {' '.join(str(error).split())[-200:].replace('|', '/')}"
        print(f"| {point} | {old} | {new} | {cells} |", flush=True)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    print(f"{measured} of {len(rows)} points measured, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
