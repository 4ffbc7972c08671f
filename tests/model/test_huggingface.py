"""Logits and gradients equal to Hugging Face transformers: random weights, fp32, at 1e-5."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.model.gpt import build_chunks
from megatron.parallel.layout import Layout
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.training import assemble

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


PRE = {x: x for x in ("input_layernorm", "post_attention_layernorm")}
POST = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
BOTH = POST | {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
}


def from_llama(p, norms=PRE):
    """Convert the parameters of Llama's relatives; `norms`: our names of a layer's norms to theirs.

    Some have biases and norms of queries and keys.
    """
    out = {
        "embedding.word_embeddings.weight": p["model.embed_tokens.weight"],
        "final_layernorm.weight": p["model.norm.weight"],
    }
    if "lm_head.weight" in p:
        out["output_layer.weight"] = p["lm_head.weight"]
    for i in range(2):
        t, o = f"model.layers.{i}.", f"layers.{i}."
        for our, their in norms.items():
            out[f"{o}{our}.weight"] = p[f"{t}{their}.weight"]
        for kind in ("weight", "bias"):
            if f"{t}self_attn.q_proj.{kind}" in p:
                out[f"{o}self_attention.query_key_value.{kind}"] = fuse(
                    *(p[f"{t}self_attn.{x}_proj.{kind}"] for x in "qkv"), heads=4, groups=2
                )
        for x in "qk":
            if f"{t}self_attn.{x}_norm.weight" in p:
                norm = p[f"{t}self_attn.{x}_norm.weight"]
                out[f"{o}self_attention.{x}_layernorm.weight"] = norm
        out[o + "self_attention.dense.weight"] = p[t + "self_attn.o_proj.weight"]
        if f"{t}mlp.gate.weight" in p:
            out[f"{o}mlp.router.weight"] = p[f"{t}mlp.gate.weight"]
            both = p[f"{t}mlp.experts.gate_up_proj"]
            out[f"{o}mlp.experts.dense_h_to_4h.weight"] = both.unflatten(1, (2, -1))
            out[f"{o}mlp.experts.dense_4h_to_h.weight"] = p[f"{t}mlp.experts.down_proj"]
            continue
        out[o + "mlp.dense_h_to_4h.weight"] = torch.stack(
            (p[t + "mlp.gate_proj.weight"], p[t + "mlp.up_proj.weight"])
        )
        out[o + "mlp.dense_4h_to_h.weight"] = p[t + "mlp.down_proj.weight"]
    return out


def from_neox(p, prefix="gpt_neox.layers", attention="attention", names=None):
    """Convert the parameters of GPT-NeoX or, with its other names, of BLOOM."""
    out = {
        our: p[their]
        for our, their in (
            names
            or {
                "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
                "output_layer.weight": "lm_head.weight",
                "final_layernorm.weight": "gpt_neox.final_layer_norm.weight",
                "final_layernorm.bias": "gpt_neox.final_layer_norm.bias",
            }
        ).items()
    }
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attention.query_key_value": f"{attention}.query_key_value",
        "self_attention.dense": f"{attention}.dense",
        "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
    }
    for i in range(2):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                out[f"layers.{i}.{ours}.{kind}"] = p[f"{prefix}.{i}.{theirs}.{kind}"]
    return out


BLOOM_NAMES = {
    "embedding.word_embeddings.weight": "transformer.word_embeddings.weight",
    "embedding_layernorm.weight": "transformer.word_embeddings_layernorm.weight",
    "embedding_layernorm.bias": "transformer.word_embeddings_layernorm.bias",
    "final_layernorm.weight": "transformer.ln_f.weight",
    "final_layernorm.bias": "transformer.ln_f.bias",
}
from_bloom = functools.partial(
    from_neox, prefix="transformer.h", attention="self_attention", names=BLOOM_NAMES
)


def llama_like(transformers, style, positions=S):
    """Return a model of Llama's relatives, and the conversion of its parameters."""
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
    norms = {"olmo2": POST, "gemma2": BOTH}.get(style, PRE)
    convert = functools.partial(from_llama, norms=norms)
    return getattr(transformers, f"{name}ForCausalLM")(config), convert


def hugging_face(style, positions=S):
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
        model, convert = transformers.GPT2LMHeadModel(config), from_gpt2
    elif style == "bloom":
        config = transformers.BloomConfig(
            vocab_size=V, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2
        )
        model, convert = transformers.BloomForCausalLM(config), from_bloom
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
        model, convert = transformers.GPTNeoXForCausalLM(config), from_neox
    else:
        model, convert = llama_like(transformers, style, positions)
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases and gains that are not at their neutral initial values
            neutral = 0.0 if "bias" in name or style == "gemma2" else 1.0
            torch.nn.init.normal_(p, neutral, 0.1)
    return model, convert


def tokens():
    return torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(2))


def micro_batch():
    t = tokens()
    return MicroBatch(
        tokens=t[:, :-1],
        labels=t[:, 1:],
        loss_mask=torch.ones(B, S),
        position_ids=torch.arange(S).expand(B, S),
        cu_seqlens=None,
        first_sample=0,
    )


def load(chunk, values):
    """Copy global values into this rank's shards."""
    for p in chunk.parameters():
        s = sharding_of(p)
        box = tuple(slice(o, o + n) for o, n in zip(s.offset, s.extent, strict=True))
        with torch.no_grad():
            p.zero_()
            p[tuple(slice(0, n) for n in s.extent)] = values[s.name][box]


def gradients(chunk):
    found = {}
    for p in chunk.parameters():
        s = sharding_of(p)
        found[s.name] = (s.offset, p.grad[tuple(slice(0, n) for n in s.extent)].numpy().copy())
    return found


@functools.cache
def expected(style):
    model, convert = hugging_face(style)
    t = tokens()
    logits = model(t[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), t[:, 1:].flatten()).backward()
    named = dict(model.named_parameters())
    values = convert({n: p.detach() for n, p in named.items()})
    return values, logits.detach(), convert({n: p.grad for n, p in named.items()})


def ours(values, fields, topology):
    chunk = build_chunks(Config.create(**fields), topology)["0"]
    load(chunk, values)
    assert {sharding_of(p).name for p in chunk.parameters()} == set(values)
    batch = micro_batch()
    with torch.no_grad():
        logits = chunk.logits(batch, None)
    chunk(batch, None).backward()
    return logits.numpy(), gradients(chunk)


@pytest.mark.slow
@pytest.mark.parametrize("style", FAMILIES)
def test_logits_and_gradients(style):
    values, logits, grads = expected(style)
    found, mine = ours(
        values, FAMILIES[style], Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    )
    np.testing.assert_allclose(
        found[..., :V].transpose(1, 0, 2), logits.numpy(), rtol=1e-5, atol=1e-5
    )
    assert logits.abs().max() > 1.0, "the comparison needs logits that are not tiny"
    for name, g in grads.items():
        np.testing.assert_allclose(mine[name][1], g.numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
        assert g.abs().max() > 1e-4, f"the comparison of {name} needs a gradient"


def tensor_parallel_body(rank, cases):
    topology = join(tensor=2)
    return [
        ours(
            {n: torch.from_numpy(v) for n, v in values.items()},
            {**f, "tensor_model_parallel_size": 2, "world_size": 2},
            topology,
        )
        for values, f in cases
    ]


@pytest.mark.slow
def test_two_tensor_ranks():
    cases = [
        ({n: v.numpy() for n, v in expected(style)[0].items()}, fields)
        for style, fields in FAMILIES.items()
    ]
    for style, *ranks in zip(FAMILIES, *run_processes(2, tensor_parallel_body, cases), strict=True):
        _, logits, grads = expected(style)
        found = np.concatenate([r[0] for r in ranks], axis=-1)[..., :V].transpose(1, 0, 2)
        np.testing.assert_allclose(found, logits.numpy(), rtol=1e-5, atol=1e-5)
        # Of a vector that both ranks hold, each may have a term of the gradient.
        first, second = (r[1] for r in ranks)
        known = [n for n in grads if grads[n].ndim > 1 or first[n][0] != second[n][0]]
        whole = assemble([{n: r[1][n] for n in known} for r in ranks])
        for name, g in whole.items():
            np.testing.assert_allclose(
                g, grads[name].numpy(), rtol=1e-5, atol=1e-5, err_msg=f"{style} {name}"
            )
