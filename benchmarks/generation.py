"""Time greedy generation beside transformers' `generate`: GPT-2 124M with random weights.

    python benchmarks/generation.py                 # this machine's CPU, fp32, batches of 1 and 8
    python benchmarks/generation.py --device cuda --dtype bfloat16

The sides take turns in one process; each figure is the median over the rounds of new tokens per
second, with the pass over the prompts, and the ratio that of ours to transformers' in the same
round. Both keep keys and values; no text ends early.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import megatron

POSITIONS, VOCABULARY = 1024, 50257


def ours(device: torch.device, dtype: str, tokens: int) -> Callable[[torch.Tensor], object]:
    """Return what generates from prompts [b, s] with this library."""
    config = megatron.Config.create(
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        seq_length=POSITIONS,
        vocab_size=VOCABULARY,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
    )
    topology = megatron.Topology.create(device=device)
    chunks = megatron.build_chunks(config, topology).to(getattr(torch, dtype))
    model = SimpleNamespace(config=config, topology=topology, chunks=chunks, tokenizer=None)
    greedy = megatron.Sampling(temperature=0)
    return lambda prompts: megatron.generate(
        model, prompts.tolist(), max_new_tokens=tokens, sampling=greedy
    )


def theirs(device: torch.device, dtype: str, tokens: int) -> Callable[[torch.Tensor], object]:
    """Return what generates with transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config())
    model.to(device, getattr(torch, dtype)).eval()
    return lambda prompts: model.generate(
        prompts.to(device),
        attention_mask=torch.ones_like(prompts, device=device),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )


def main() -> None:
    """Print a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="on a shared CPU: 1 thread, CPU time")
    args = parser.parse_args()
    clock = time.process_time if args.busy else time.perf_counter
    if args.busy:
        torch.set_num_threads(1)
    device = torch.device(args.device)
    sides = [make(device, args.dtype, args.tokens) for make in (ours, theirs)]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.dtype}")
    for batch in args.batch:
        prompts = torch.randint(0, VOCABULARY, (batch, args.prompt_tokens))
        rates: tuple[list[float], list[float]] = [], []
        for _ in range(args.rounds + 1):
            for side, found in zip(sides, rates, strict=True):
                start = clock()
                side(prompts)
                found.append(batch * args.tokens / (clock() - start))
        mine, other = (found[1:] for found in rates)  # without the first, which warms up
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        print(
            f"batch {batch}: ours {statistics.median(mine):.1f} tokens/s, transformers "
            f"{statistics.median(other):.1f}, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
