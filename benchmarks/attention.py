"""Time causal attention, forward and backward; on a CPU with each --attention-backend.

    python benchmarks/attention.py                        # bf16 and fp32, torch's default threads
    python benchmarks/attention.py --dtype bfloat16 --threads 1 --rounds 9
    python benchmarks/attention.py --device cuda          # torch's and, if installed, flash-attn

The backends take turns, so that a busy machine slows all of them equally; each figure is the
minimum of its rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.kernels import library
from megatron.kernels.choose import ALL
from megatron.kernels.choose import flash_attention as look_for_flash
from megatron.layers.attention_blocked import blocked_attention
from megatron.layers.attention_fused import flash_attention, torch_attention
from megatron.layers.attention_unfused import Scoring, unfused_attention

# Sequence, micro-batch, groups, queries of a group, head dimension: 2048 tokens of 12 heads, or as
# much.
SHAPES = [
    (512, 2, 12, 1, 64),
    (1024, 1, 12, 1, 64),
    (2048, 1, 6, 1, 64),
    (512, 1, 8, 1, 128),
    (2048, 1, 4, 1, 128),
    (1024, 1, 3, 4, 64),
]
GPU_SHAPES = [
    (1024, 16, 12, 1, 64),
    (2048, 4, 16, 1, 128),
    (8192, 1, 16, 1, 128),
    (4096, 2, 8, 4, 128),
]


def parts(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [s, b, heads, d], k and v [s, b, groups, d] of the projection."""
    q, k, v = mixed.split((mixed.shape[3] - 2, 1, 1), dim=3)
    return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


FUSED = Scoring(fusions=ALL)
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch": lambda x: torch_attention(*parts(x)),
    "unfused": lambda x: unfused_attention(*parts(x), FUSED),
    "blocked": lambda x: blocked_attention((x,), FUSED),
    "blocked, torch's operators": lambda x: blocked_attention((x,)),
}
GPU_WAYS = {
    "torch": WAYS["torch"],
    "flash-attn": lambda x: flash_attention(*parts(x)),
}


def now(device: str) -> float:
    """The time when the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, rounds: int, device: str
) -> dict[str, tuple[float, float]]:
    """Milliseconds of the forward and of the backward pass, of each way."""
    s, b, groups, share, d = shape
    mixed = torch.randn(s, b, groups, share + 2, d, device=device).to(dtype).requires_grad_()
    gradient = torch.randn(s, b, groups * share, d, device=device).to(dtype)
    ways = GPU_WAYS if device == "cuda" else WAYS
    best = dict.fromkeys(ways, (float("inf"), float("inf")))
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = now(device)
            out = way(mixed)
            middle = now(device)
            torch.autograd.grad(out, mixed, gradient)
            end = now(device)
            best[name] = (
                min(best[name][0], (middle - start) * 1e3),
                min(best[name][1], (end - middle) * 1e3),
            )
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    types = ["bfloat16", "float32", "float16"]
    parser.add_argument(
        "--dtype", nargs="+", choices=types, help="default: bfloat16; on a CPU also float32"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="the first shape, in one round")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    gpu = chosen.device == "cuda"
    ways, shapes, beside = (
        (GPU_WAYS, GPU_SHAPES, "flash-attn") if gpu else (WAYS, SHAPES, "blocked")
    )
    if chosen.quick:
        shapes, chosen.rounds = shapes[:1], 1
    dtypes, ratios = chosen.dtype or types[: 1 if gpu else 2], []
    for flash in (look_for_flash("cuda", dtype) for dtype in dtypes if gpu):
        if not flash.usable:
            raise SystemExit(flash.line)
    print(library.find(chosen.device).line, f"{chosen.threads} threads", sep="; ")
    print("| dtype | s, b, groups, share, d |", " | ".join(ways), f"| torch / {beside} |")
    print("|---" * (len(ways) + 3) + "|")
    for dtype in dtypes:
        for shape in shapes:
            times = measure(shape, getattr(torch, dtype), chosen.rounds, chosen.device)
            cells = " | ".join(
                f"{forward:.2f} + {backward:.2f}" for forward, backward in times.values()
            )
            ratios.append(sum(times["torch"]) / sum(times[beside]))
            print(f"| {dtype} | {shape} | {cells} | {ratios[-1]:.2f} |", flush=True)
    print(f"torch / {beside}: {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} shapes")


if __name__ == "__main__":
    main()
