"""Named starting points. Every flag or argument given beside a preset wins over it."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.settings import Settings, did_you_mean

# Dash et al., "Optimizing Distributed Training on Frontier for Large Language Models" (arXiv 2312.12705): sizes,
# layouts, batches and learning rates. They trained in fp16; bf16 needs no loss scale and keeps MI250X from
# flushing fp16 denormals. The vocabulary is GPT-2's.
_FRONTIER: Mapping[str, Any] = {
    "seq_length": 2048, "vocab_size": 50257, "bf16": True, "lr": 6e-5, "min_lr": 6e-6, "lr_decay_style": "cosine",
    "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 1.0, "init_method_std": 0.006,
    "use_flash_attn": True, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    "zero_stage": 1, "micro_batch_size": 1,
}


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {**_FRONTIER, "num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, **more}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "vocab_size": 512,
        "micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "cosine",
        "weight_decay": 0.1, "adam_beta2": 0.95, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    },
    # Radford et al. 2019 (sizes); learning rate and half a million tokens a step as in Brown et al. 2020, table 2.1.
    "gpt2-124m": {
        "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024, "vocab_size": 50257,
        "openai_gelu": True, "bf16": True, "micro_batch_size": 8, "global_batch_size": 512, "lr": 6e-4, "min_lr": 6e-5,
        "lr_decay_style": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95, "use_flash_attn": True,
    },
    "gpt-1.4b": _gpt(24, 2064, 24),
    "gpt-22b": _gpt(48, 6144, 48, pipeline_model_parallel_size=8, global_batch_size=640),
    "gpt-175b": _gpt(
        96, 12288, 96, tensor_model_parallel_size=4, pipeline_model_parallel_size=16, global_batch_size=640
    ),
    "gpt-1t": _gpt(
        128, 25600, 128, tensor_model_parallel_size=8, pipeline_model_parallel_size=64, global_batch_size=1600
    ),
    # Grattafiori et al. 2024 (arXiv 2407.21783), table 3; the layout fits one node of eight devices.
    "llama-8b": {
        "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "ffn_hidden_size": 14336, "seq_length": 8192, "vocab_size": 128256, "position_embedding_type": "rope",
        "rotary_base": 500000.0, "normalization": "rmsnorm", "layernorm_epsilon": 1e-5, "swiglu": True,
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "bf16": True, "lr": 3e-4, "min_lr": 3e-5, "lr_decay_style": "cosine",
        "weight_decay": 0.1, "adam_beta2": 0.95, "use_flash_attn": True, "recompute_granularity": "full",
        "recompute_method": "uniform", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4,
        "sequence_parallel": True, "micro_batch_size": 1, "global_batch_size": 512,
    },
}

# A choice beside the preset that makes some of its settings meaningless takes those back.
_YIELDS: Mapping[str, tuple[str, ...]] = {
    "fp16": ("bf16",),
    "squared_relu": ("swiglu", "openai_gelu"),
    "swiglu": ("openai_gelu",),
    "openai_gelu": ("swiglu",),
    "recompute_granularity": ("recompute_method", "recompute_num_layers"),
}


def give_preset(settings: Settings, name: str, chosen: Mapping[str, Any]) -> None:
    """Give a preset's values, except for `chosen` settings and those that a chosen one makes meaningless."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f": choose one of {', '.join(PRESETS)}"
        settings.problems.append(f"--preset '{name}' is unknown{hint}")
        return
    takers = [s for s in _YIELDS if s in chosen and chosen[s] is not False]
    dropped = {other for taker in takers for other in _YIELDS[taker]}
    for setting, value in PRESETS[name].items():
        if setting not in chosen and setting not in dropped:
            settings.give(setting, value, f"preset {name}")
