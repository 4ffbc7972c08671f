"""Time of a family's model beside transformers', in one run: forward and backward passes, fp32.

    python benchmarks/families.py qwen3_next    gated DeltaNet in three of four layers
    python benchmarks/families.py deepseek_v3   multi-head latent attention

Both have the same random weights and get the same tokens, in turns; printed are medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import megatron
from megatron.data.sampler import make_micro_batch

ROUNDS = 5
SAMPLES = 2
SEQUENCE = 512
COMMON: dict[str, Any] = dict(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    moe_intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_experts_per_tok=2,
    max_position_embeddings=SEQUENCE,
)
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": dict(
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        num_experts=8,
        mlp_only_layers=[0, 1, 2],
        shared_expert_intermediate_size=256,
    ),
    "deepseek_v3": dict(
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,
    ),
}


def main() -> None:
    kind = sys.argv[1]
    config = AutoConfig.for_model(kind, **COMMON, **SIZES[kind])
    theirs: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        theirs.train().save_pretrained(folder)
        ours = megatron.load_model(f"hf:{folder}").chunks["0"].train()
    tokens = torch.randint(COMMON["vocab_size"], (SAMPLES, SEQUENCE + 1))
    batch = make_micro_batch(tokens.numpy())
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    cross_entropy = torch.nn.functional.cross_entropy
    sides: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: ours(batch, None),
        "transformers": lambda: cross_entropy(theirs(inputs).logits.flatten(0, 1), labels),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses = {}
    for number in range(ROUNDS + 1):
        for name, forward in sides.items():
            began = time.perf_counter()
            loss = forward()
            loss.backward()
            if number:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
            losses[name] = loss.item()
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{kind} {name}: {median:.3f} s, from {min(times):.3f} to {max(times):.3f}")
    print("losses", losses)


if __name__ == "__main__":
    main()
