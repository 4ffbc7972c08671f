"""Models of transformers with random weights, and the fields of ours that compute the same."""

from __future__ import annotations

import pytest
import torch

from megatron.data.sampler import make_micro_batch

V, S, B = 50, 16, 3
COMMON = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=S,
    max_position_embeddings=S,
    vocab_size=V,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    micro_batch_size=B,
    global_batch_size=B,
)
GPT2 = dict(COMMON)
LLAMA = dict(
    COMMON,
    num_key_value_heads=2,
    ffn_hidden_size=48,
    position_embedding_type="rope",
    rotary_base=500.0,
    normalization="rmsnorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
NEOX = dict(
    COMMON,
    position_embedding_type="rope",
    rotary_percent=0.5,
    rotary_base=10000.0,
    untie_embeddings_and_output_weights=True,
)
LLAMA31 = dict(
    LLAMA,
    rope_scaling="llama3",
    rope_scaling_factor=2.0,
    rope_original_positions=64,
    rope_low_freq_factor=0.5,
    rope_high_freq_factor=4.0,
)
YARN = dict(
    LLAMA,
    rope_scaling="yarn",
    rope_scaling_factor=2.0,
    rope_original_positions=64,
    yarn_beta_fast=4.0,
    yarn_beta_slow=0.5,
)
GEMMA2 = dict(
    LLAMA,
    untie_embeddings_and_output_weights=False,
    swiglu=False,
    geglu=True,
    norm_position="both",
    apply_layernorm_1p=True,
    embedding_scale=32**0.5,
    final_logit_softcapping=3.0,
    attention_logit_softcapping=2.0,
    softmax_scale=0.25,
    window_size=(4,),
    window_attn_skip_freq=(2,),
)
FAMILIES = {
    "gpt2": GPT2,
    "neox": NEOX,
    "pythia": dict(NEOX, parallel_residual="two_norms", exact_gelu=True),
    "bloom": dict(COMMON, position_embedding_type="alibi", embedding_layernorm=True),
    "llama": LLAMA,
    "llama31": LLAMA31,
    "yarn": YARN,
    "mistral": dict(LLAMA, window_size=(4, 0)),
    "qwen2": dict(LLAMA, add_qkv_bias=True),
    "qwen3": dict(LLAMA, qk_layernorm=True, kv_channels=16),
    "olmo2": dict(LLAMA, norm_position="post", qk_layernorm=True, qk_layernorm_over="all"),
    "gemma2": GEMMA2,
    "mixtral": dict(LLAMA, num_experts=4, moe_router_topk=2),
}


def fuse(q, k, v, heads, groups):
    """Fuse rows of separate projections.

    The order is [group][queries ..., key, value][head dimension].
    """
    d = q.shape[0] // heads
    q = q.reshape(groups, heads // groups, d, *q.shape[1:])
    k, v = (x.reshape(groups, 1, d, *x.shape[1:]) for x in (k, v))
    out = torch.cat((q, k, v), dim=1)
    return out.reshape(-1, *out.shape[3:])


def from_gpt2(p):
    """Return the parameters of a GPT-2 under our names."""
    out = {
        "embedding.word_embeddings.weight": p["transformer.wte.weight"],
        "embedding.position_embeddings.weight": p["transformer.wpe.weight"],
        "final_layernorm.weight": p["transformer.ln_f.weight"],
        "final_layernorm.bias": p["transformer.ln_f.bias"],
    }
    for i in range(2):
        t, o = f"transformer.h.{i}.", f"layers.{i}."
        for ours, theirs in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
            for kind in ("weight", "bias"):
                out[f"{o}{ours}.{kind}"] = p[f"{t}{theirs}.{kind}"]
        for kind in ("weight", "bias"):
            fused = p[f"{t}attn.c_attn.{kind}"]
            q, k, v = (fused.t() if kind == "weight" else fused).chunk(3)
            out[f"{o}self_attention.query_key_value.{kind}"] = fuse(q, k, v, 4, 4)
            for ours, theirs in (
                ("self_attention.dense", "attn.c_proj"),
                ("mlp.dense_h_to_4h", "mlp.c_fc"),
                ("mlp.dense_4h_to_h", "mlp.c_proj"),
            ):
                x = p[f"{t}{theirs}.{kind}"]
                out[f"{o}{ours}.{kind}"] = x.t() if kind == "weight" else x
    return out


def llama_like(transformers, style, positions=S):
    """Return a model of Llama's relatives."""
    fields = FAMILIES[style]
    rope = {"rope_type": "default", "rope_theta": 500.0}
    if "rope_scaling" in fields:
        rope |= {
            "rope_type": fields["rope_scaling"],
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        }
        rope |= (
            {"low_freq_factor": 0.5, "high_freq_factor": 4.0}
            if style == "llama31"
            else {"beta_fast": 4.0, "beta_slow": 0.5}
        )
    more = {
        "mistral": dict(sliding_window=5),
        "qwen3": dict(head_dim=16),
        "gemma2": dict(
            head_dim=8,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            sliding_window=5,
        ),
        "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    }
    name = {"llama31": "Llama", "yarn": "Llama"}.get(style, style.capitalize())
    config = getattr(transformers, f"{name}Config")(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128 if "rope_scaling" in fields else positions,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        rope_parameters=rope,
        tie_word_embeddings=style == "gemma2",
        pad_token_id=None,
        **more.get(style, {}),
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def hugging_face(style, positions=S):
    """Return a model of this family."""
    transformers = pytest.importorskip("transformers")  # here: the processes below do without
    torch.manual_seed(1)
    if style == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=V,
            n_positions=positions,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
        )
        model = transformers.GPT2LMHeadModel(config)
    elif style == "bloom":
        config = transformers.BloomConfig(
            vocab_size=V, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2
        )
        model = transformers.BloomForCausalLM(config)
    elif style in ("neox", "pythia"):
        config = transformers.GPTNeoXConfig(
            vocab_size=V,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=positions,
            layer_norm_eps=1e-5,
            use_parallel_residual=style == "pythia",
            hidden_act="gelu" if style == "pythia" else "gelu_new",
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            attention_dropout=0.0,
            hidden_dropout=0.0,
            initializer_range=0.2,
            tie_word_embeddings=False,
        )
        model = transformers.GPTNeoXForCausalLM(config)
    else:
        model = llama_like(transformers, style, positions)
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases and gains that are not at their neutral initial values
            neutral = 0.0 if "bias" in name or style == "gemma2" else 1.0
            torch.nn.init.normal_(p, neutral, 0.1)
    return model


def micro_batch():
    drawn = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(2))
    return make_micro_batch(drawn.numpy())
