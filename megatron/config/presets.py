"""Presets: named starting points, which every other flag or argument overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.settings import Settings, did_you_mean

# Dash et al., "Optimizing Distributed Training on Frontier for Large Language Models" (arXiv
# 2312.12705): sizes, layouts, batches and learning rates. They trained in fp16; bf16 needs no loss
# scale and keeps MI250X from flushing fp16 denormals. The vocabulary is GPT-2's. Of the 1.4B model
# they published no layout and no batch.
_PAPER: Mapping[str, Any] = {
    "seq_length": 2048,
    "vocab_size": 50257,
    "bf16": True,
    "lr": 6e-5,
    "min_lr": 6e-6,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    "init_method_std": 0.006,
    "use_flash_attn": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "zero_stage": 1,
    "micro_batch_size": 1,
}


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        **_PAPER,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        **more,
    }


def _ours(paper: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the paper's model in a recipe of this project, without full recomputation, which costs
    a quarter of all work.
    """
    values = {
        **paper,
        **dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers")),
        **more,
    }
    return {name: value for name, value in values.items() if value is not None}


_GPT_1_4B = _gpt(24, 2064, 24)
_GPT_22B = _gpt(48, 6144, 48, pipeline_model_parallel_size=8, global_batch_size=640)
_GPT_175B = _gpt(
    96,
    12288,
    96,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=16,
    global_batch_size=640,
)
_GPT_1T = _gpt(
    128,
    25600,
    128,
    tensor_model_parallel_size=8,
    pipeline_model_parallel_size=64,
    global_batch_size=1600,
)


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 64,
        "vocab_size": 512,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_decay_style": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    # Radford et al. 2019 (sizes); learning rate and half a million tokens a step as in Brown et al.
    # 2020, table 2.1.
    "gpt2-124m": {
        "num_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "seq_length": 1024,
        "vocab_size": 50257,
        "openai_gelu": True,
        "bf16": True,
        "micro_batch_size": 8,
        "global_batch_size": 512,
        "lr": 6e-4,
        "min_lr": 6e-5,
        "lr_decay_style": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "use_flash_attn": True,
    },
    # The paper's layouts, in bf16 (--fp16 is what they ran).
    "gpt-1.4b": _GPT_1_4B,
    "gpt-22b": _GPT_22B,
    "gpt-175b": _GPT_175B,
    "gpt-1t": _GPT_1T,
    # The same models in recipes of ours, none of which has run on Frontier; docs/frontier.md has
    # the arithmetic behind each choice. Ranks and devices are placed by --cluster, not by the
    # preset. A replica on every GCD; four samples at a time make its products, with h = 2064, large
    # enough for the device.
    "gpt-1.4b-frontier": _ours(_GPT_1_4B, micro_batch_size=4, global_batch_size=512),
    # Tensor parallel on the 200 GB/s pairs of a node. Four stages instead of eight: the output
    # layer, 2/3 of a layer's work, weighs half as much beside twelve layers as beside six, and the
    # bubble is smaller.
    "gpt-22b-frontier": _ours(
        _GPT_22B,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        num_layers_per_virtual_pipeline_stage=3,
        sequence_parallel=True,
    ),
    # A stage in a node: groups of eight have a published bandwidth beyond that of four. Eight
    # stages of six chunks, so that 1024 GCDs lose 3 % to the bubble with 640 samples a step, where
    # sixteen stages of one chunk lose a quarter.
    "gpt-175b-frontier": _ours(
        _GPT_175B,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        num_layers_per_virtual_pipeline_stage=2,
        sequence_parallel=True,
    ),
    # 32 stages instead of 64, for the same reasons; the memory of twice the weights is there since
    # activations are divided too, the optimizer is divided over more replicas, and outputs of
    # activation functions and norms, 12 of the 32 bytes per token and h that a layer keeps, are
    # made again for a percent of the work or less. 1920 samples divide into the 12 replicas of 3072
    # GCDs; the paper's 1600 do not.
    "gpt-1t-frontier": _ours(
        _GPT_1T,
        pipeline_model_parallel_size=32,
        num_layers_per_virtual_pipeline_stage=1,
        sequence_parallel=True,
        recompute_granularity="selective",
        recompute_modules=("mlp_act", "layernorm"),
        global_batch_size=1920,
    ),
    # Grattafiori et al. 2024 (arXiv 2407.21783), table 3; the layout fits one node of eight
    # devices.
    "llama-8b": {
        "num_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "ffn_hidden_size": 14336,
        "seq_length": 8192,
        "vocab_size": 128256,
        "position_embedding_type": "rope",
        "rotary_base": 500000.0,
        "normalization": "rmsnorm",
        "layernorm_epsilon": 1e-5,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": True,
        "lr": 3e-4,
        "min_lr": 3e-5,
        "lr_decay_style": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "use_flash_attn": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "sequence_parallel": True,
        "micro_batch_size": 1,
        "global_batch_size": 512,
    },
}

# A choice beside the preset that makes some of its settings meaningless takes those back.
_YIELDS: Mapping[str, tuple[str, ...]] = {
    "fp16": ("bf16",),
    "squared_relu": ("swiglu", "openai_gelu"),
    "swiglu": ("openai_gelu",),
    "openai_gelu": ("swiglu",),
    "recompute_granularity": ("recompute_method", "recompute_num_layers", "recompute_modules"),
    "num_layers": ("num_layers_per_virtual_pipeline_stage",),
    "pipeline_layout": ("num_layers_per_virtual_pipeline_stage",),
    "enable_zbh1_pipeline": ("num_layers_per_virtual_pipeline_stage",),
}


def give_preset(settings: Settings, name: str, chosen: Mapping[str, Any]) -> None:
    """Set a preset's values, except for `chosen` settings and those that a chosen one makes
    meaningless.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f": choose one of {', '.join(PRESETS)}"
        settings.problems.append(f"--preset '{name}' is unknown{hint}")
        return
    takers = [s for s in _YIELDS if s in chosen and chosen[s] is not False]
    dropped = {other for taker in takers for other in _YIELDS[taker]}
    if _cannot_interleave(PRESETS[name], chosen.get("pipeline_model_parallel_size")):
        dropped.add("num_layers_per_virtual_pipeline_stage")
    for setting, value in PRESETS[name].items():
        if setting not in chosen and setting not in dropped:
            settings.give(setting, value, f"preset {name}")


def _cannot_interleave(preset: Mapping[str, Any], pipeline_size: Any) -> bool:
    """Return whether the preset's chunk size gives fewer than two chunks per rank for another
    pipeline size.
    """
    each = preset.get("num_layers_per_virtual_pipeline_stage")
    if each is None or not isinstance(pipeline_size, int) or pipeline_size < 1:
        return False
    chunks, rest = divmod(preset["num_layers"], pipeline_size * each)
    return pipeline_size == 1 or rest != 0 or chunks < 2
