"""Times causal attention on a CPU, forward and backward, by each way that --attention-backend offers.

    python benchmarks/attention.py                        # bf16 and fp32, this many threads as torch takes
    python benchmarks/attention.py --dtype bfloat16 --threads 1 --rounds 9

The ways take turns, so that a busy machine slows all alike; each figure is the least of its rounds, in milliseconds.
"""
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from megatron.kernels import library
from megatron.kernels.choose import ALL
from megatron.layers.attention import torch_attention
from megatron.layers.blocked_attention import blocked_attention
from megatron.layers.unfused_attention import unfused_attention

# Sequence, micro-batch, groups, queries of a group, head dimension: 2048 tokens of 12 heads, or as much.
SHAPES = [(512, 2, 12, 1, 64), (1024, 1, 12, 1, 64), (2048, 1, 6, 1, 64), (512, 1, 8, 1, 128), (2048, 1, 4, 1, 128),
          (1024, 1, 3, 4, 64)]  # fmt: skip


def parts(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [s, b, heads, d], k and v [s, b, groups, d] of the projection."""
    q, k, v = mixed.split((mixed.shape[3] - 2, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch": lambda x: torch_attention(*parts(x), None, None, 0.0),
    "unfused": lambda x: unfused_attention(*parts(x), None, None, 0.0, None, ALL),
    "blocked": lambda x: blocked_attention((x,), None, None, 0.0, None, True),
    "blocked, torch's operators": lambda x: blocked_attention((x,), None, None, 0.0, None, False),
}


def measure(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of the forward and of the backward pass, of each way."""
    s, b, groups, share, d = shape
    mixed = torch.randn(s, b, groups, share + 2, d).to(dtype).requires_grad_()
    gradient = torch.randn(s, b, groups * share, d).to(dtype)
    best = dict.fromkeys(WAYS, (float("inf"), float("inf")))
    for _ in range(rounds + 1):
        for name, way in WAYS.items():
            start = time.perf_counter()
            out = way(mixed)
            middle = time.perf_counter()
            torch.autograd.grad(out, mixed, gradient)
            end = time.perf_counter()
            best[name] = (min(best[name][0], (middle - start) * 1e3), min(best[name][1], (end - middle) * 1e3))
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    types = ["bfloat16", "float32", "float16"]
    parser.add_argument("--dtype", nargs="+", default=types[:2], choices=types)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    print(library.find("cpu").line, f"{chosen.threads} threads", sep="; ")
    print("| dtype | s, b, groups, share, d |", " | ".join(WAYS), "| torch / blocked |")
    print("|---" * (len(WAYS) + 3) + "|")
    for dtype in chosen.dtype:
        for shape in SHAPES:
            times = measure(shape, getattr(torch, dtype), chosen.rounds)
            cells = " | ".join(f"{forward:.2f} + {backward:.2f}" for forward, backward in times.values())
            print(f"| {dtype} | {shape} | {cells} | {sum(times['torch']) / sum(times['blocked']):.2f} |", flush=True)


if __name__ == "__main__":
    main()
