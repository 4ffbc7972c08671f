"""Logits and gradients equal to Hugging Face transformers: random weights, fp32, at 1e-5."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.model.gpt import build_chunks
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Layout, Topology
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


def from_llama(p):
    out = {
        "embedding.word_embeddings.weight": p["model.embed_tokens.weight"],
        "final_layernorm.weight": p["model.norm.weight"],
        "output_layer.weight": p["lm_head.weight"],
    }
    for i in range(2):
        t, o = f"model.layers.{i}.", f"layers.{i}."
        out[o + "input_layernorm.weight"] = p[t + "input_layernorm.weight"]
        out[o + "post_attention_layernorm.weight"] = p[t + "post_attention_layernorm.weight"]
        out[o + "self_attention.query_key_value.weight"] = fuse(
            *(p[f"{t}self_attn.{x}_proj.weight"] for x in "qkv"), heads=4, groups=2
        )
        out[o + "self_attention.dense.weight"] = p[t + "self_attn.o_proj.weight"]
        out[o + "mlp.dense_h_to_4h.weight"] = torch.stack(
            (p[t + "mlp.gate_proj.weight"], p[t + "mlp.up_proj.weight"])
        )
        out[o + "mlp.dense_4h_to_h.weight"] = p[t + "mlp.down_proj.weight"]
    return out


def from_neox(p):
    out = {
        "embedding.word_embeddings.weight": p["gpt_neox.embed_in.weight"],
        "output_layer.weight": p["lm_head.weight"],
        "final_layernorm.weight": p["gpt_neox.final_layer_norm.weight"],
        "final_layernorm.bias": p["gpt_neox.final_layer_norm.bias"],
    }
    names = {
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
        "self_attention.query_key_value": "attention.query_key_value",
        "self_attention.dense": "attention.dense",
        "mlp.dense_h_to_4h": "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h": "mlp.dense_4h_to_h",
    }
    for i in range(2):
        for ours, theirs in names.items():
            for kind in ("weight", "bias"):
                out[f"layers.{i}.{ours}.{kind}"] = p[f"gpt_neox.layers.{i}.{theirs}.{kind}"]
    return out


def hugging_face(style):
    transformers = pytest.importorskip("transformers")  # here: the processes below do without
    torch.manual_seed(1)
    if style == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=V,
            n_positions=S,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
        )
        model, convert = transformers.GPT2LMHeadModel(config), from_gpt2
    elif style == "llama":
        config = transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=S,
            rms_norm_eps=1e-5,
            initializer_range=0.2,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=False,
        )
        model, convert = transformers.LlamaForCausalLM(config), from_llama
    else:
        config = transformers.GPTNeoXConfig(
            vocab_size=V,
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=S,
            layer_norm_eps=1e-5,
            use_parallel_residual=False,
            hidden_act="gelu_new",
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
    for name, p in model.named_parameters():
        if p.ndim == 1:  # biases and gains that are not at their neutral initial values
            torch.nn.init.normal_(p, 0.0 if "bias" in name else 1.0, 0.1)
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
@pytest.mark.parametrize(("style", "fields"), [("gpt2", GPT2), ("llama", LLAMA), ("neox", NEOX)])
def test_logits_and_gradients(style, fields):
    values, logits, grads = expected(style)
    found, mine = ours(
        values, fields, Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
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
        ours(values, {**f, "tensor_model_parallel_size": 2, "world_size": 2}, topology)
        for values, f in cases
    ]


@pytest.mark.slow
def test_two_tensor_ranks():
    styles = {"gpt2": GPT2, "llama": LLAMA}
    cases = [
        ({n: v.clone() for n, v in expected(style)[0].items()}, fields)
        for style, fields in styles.items()
    ]
    for style, *ranks in zip(styles, *run_processes(2, tensor_parallel_body, cases), strict=True):
        _, logits, grads = expected(style)
        found = np.concatenate([r[0] for r in ranks], axis=-1)[..., :V].transpose(1, 0, 2)
        np.testing.assert_allclose(found, logits.numpy(), rtol=1e-5, atol=1e-5)
        whole = assemble([{n: g for n, g in r[1].items() if grads[n].ndim > 1} for r in ranks])
        for name, g in whole.items():
            np.testing.assert_allclose(
                g, grads[name].numpy(), rtol=1e-5, atol=1e-5, err_msg=f"{style} {name}"
            )
