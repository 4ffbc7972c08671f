"""Compare attention by batches of similar documents with one call under a mask [b, 1, s, s].

Both sides are torch's scaled_dot_product_attention, forward and backward, in one process and
alternating; the medians and their ratio are printed, and the memory kept from forward to backward.

Expected: the masked side always computes s * s scores, ours only those of the documents. Ours is
therefore faster for shorter documents, down to the cost of reordering rows and of the calls; and a
layer keeps no mask, which in fp32 is 4 * b * s * s bytes on a CPU.

    python benchmarks/document_attention.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.layers.attention_fused import torch_attention
from megatron.layers.attention_unfused import Scoring
from megatron.layers.positions import Documents

Attention = Callable[..., torch.Tensor]


def draw_lengths(s: int, b: int, mean: float, seed: int = 1) -> np.ndarray:
    """Draw exponential document lengths that fill b samples of s tokens, cut at sample ends."""
    draw, lengths = np.random.RandomState(seed), []
    for _ in range(b):
        left = s
        while left:
            lengths.append(min(left, int(draw.exponential(mean)) + 1))
            left -= lengths[-1]
    return np.array(lengths, np.int64)


def under_a_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: np.ndarray
) -> torch.Tensor:
    """[s, b, heads, d]: one call with a boolean mask [b, 1, s, s]."""
    s, b = q.shape[:2]
    ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).view(b, s)
    mask = (ids.unsqueeze(2) == ids.unsqueeze(1)) & torch.ones(s, s, dtype=torch.bool).tril()
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1)).permute(2, 0, 1, 3)


def kept_bytes(attend: Attention) -> int:
    """Bytes of memory that the forward pass keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attend()
    del out
    return sum(kept.values())


def measure(options: argparse.Namespace, mean: float) -> str:
    """One line of the table."""
    s, b, heads, d = options.seq_length, options.micro_batch_size, options.heads, options.head_dim
    lengths = draw_lengths(s, b, mean)
    bounds = torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32))
    shape, dtype = (s, b, heads, d), getattr(torch, options.dtype)
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, dtype=dtype)
    sides: dict[str, Attention] = {
        "mask": lambda: under_a_mask(q, k, v, lengths),
        # The batches are made anew each time; a model makes them once for all layers.
        "documents": lambda: torch_attention(
            q, k, v, Scoring(documents=Documents(bounds, lengths, b))
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(options.repeats + 1):
        for name, attend in sides.items():
            start = time.perf_counter()
            attend().backward(gradient)
            if repeat:  # the first one warms up
                times[name].append(time.perf_counter() - start)
            q.grad = k.grad = v.grad = None
    mask, documents = (statistics.median(times[name]) * 1000 for name in sides)
    mask_mib, documents_mib = (kept_bytes(attend) / 2**20 for attend in sides.values())
    return (
        f"{mean:9.0f} {len(lengths):9d} {lengths.max():7d} {mask:9.1f} {documents:12.1f} "
        f"{mask / documents:6.1f}x {mask_mib:10.1f} {documents_mib:14.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--means", type=float, nargs="+", default=[10.0, 100.0, 600.0], help="tokens of a document"
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    print(
        "mean length documents longest   mask ms documents ms   ratio mask keeps documents keep MiB"
    )
    for mean in options.means:
        print(measure(options, mean), flush=True)


if __name__ == "__main__":
    main()
