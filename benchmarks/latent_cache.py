"""Generation by multi-head latent attention: a cache of latents beside one of keys and values.

    python benchmarks/latent_cache.py [--samples N] [--prompt N] [--tokens N]

One model, most of whose work is attention with the sizes of heads of DeepSeek-V2, generates the same
tokens with both, in turns. Printed are the median time of a token of all samples, and the bytes that
a token of one sample takes in each cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from megatron.config import Config
from megatron.layers.latent_attention import LatentAttention
from megatron.model.gpt import build_chunks
from megatron.parallel.topology import Topology
from megatron.training.run.generate import Limits, generate
from megatron.training.run.load_model import Trained

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("samples", 8), ("prompt", 16), ("tokens", 240)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = Config.create(
        num_layers=2,
        hidden_size=512,
        ffn_hidden_size=512,
        num_attention_heads=16,
        seq_length=options.prompt + options.tokens,
        vocab_size=1024,
        position_embedding_type="rope",
        normalization="rmsnorm",
        qk_layernorm=True,
        add_bias_linear=False,
        swiglu=True,
        multi_latent_attention=True,
        kv_lora_rank=256,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    topology = Topology.create()
    chunks = build_chunks(config, topology).eval()
    model = Trained(config, topology, None, chunks, None)  # type: ignore[arg-type]
    attention = config.model
    entries = {
        "latents": attention.kv_lora_rank + attention.qk_pos_emb_head_dim,
        "keys and values": attention.num_attention_heads
        * (attention.kv_channels + attention.v_head_dim),
    }
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(1024, (options.samples, options.prompt), generator=draw).tolist()
    seconds: dict[str, list[float]] = {name: [] for name in entries}
    texts = {}
    for number in range(ROUNDS + 1):
        for name, times in seconds.items():
            LatentAttention.caches_latents = name == "latents"
            spent = {}
            for tokens in (1, options.tokens):
                began = time.perf_counter()
                limits = Limits(end_token=-1)
                texts[name] = [
                    each.ids
                    for each in generate(model, prompts, max_new_tokens=tokens, limits=limits)
                ]
                spent[tokens] = time.perf_counter() - began
            if number:  # the first warms up
                times.append((spent[options.tokens] - spent[1]) / (options.tokens - 1))
    assert texts["latents"] == texts["keys and values"], "rounding changed a token"
    for name, times in seconds.items():
        size = 4 * attention.num_layers * entries[name]
        print(
            f"{name}: {1e3 * statistics.median(times):.2f} ms per token, {size} bytes in the cache"
        )


if __name__ == "__main__":
    main()
