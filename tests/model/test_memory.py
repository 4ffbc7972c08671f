"""Tensors kept by a training pass, against its trace."""

import pytest
import torch

from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.model.gpt import build_chunks, stages_of
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from megatron.planner.events import Alloc, Free
from megatron.planner.trace import trace

S, B, H, V = 128, 2, 64, 256
FIELDS = dict(
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    vocab_size=V,
    micro_batch_size=B,
    global_batch_size=B,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
LLAMA = dict(
    position_embedding_type="rope",
    normalization="rmsnorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    num_key_value_heads=2,
    ffn_hidden_size=160,
)


def recompute(*modules):
    return dict(recompute_granularity="selective", recompute_modules=modules)


def stage(config, dtype):
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    tokens = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(5))
    return build_chunks(config, topology).to(dtype), make_micro_batch(tokens.numpy())


def gradients(dtype, **fields):
    """Return the gradients of all parameters after one micro-batch."""
    config = Config.create(**{**FIELDS, "num_layers": 2, **fields})
    chunks, batch = stage(config, dtype)
    stages_of(chunks)[0](batch, None).backward()
    return {name: p.grad for name, p in chunks.named_parameters() if p.grad is not None}


def kept_bytes(dtype, **fields):
    """Return the bytes of the tensors that autograd saves in a forward pass.

    Shared memory counts once, parameters not at all.
    """
    config = Config.create(**{**FIELDS, **fields})
    chunks, batch = stage(config, dtype)
    parameters = {p.untyped_storage().data_ptr() for p in chunks.parameters()}
    saved = {}

    def note(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
            # Held, so that no other tensor takes its place.
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        stages_of(chunks)[0](batch, None)
    return config, sum(x.untyped_storage().nbytes() for x in saved.values())


def kept(part):
    """Return the bytes that a forward pass without data leaves."""
    found = {}
    for step in part.forward.steps:
        if isinstance(step, Alloc):
            found[step.id] = step.bytes
        elif isinstance(step, Free):
            found.pop(step.id, None)
    return sum(found.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dropout": 0.1},
        {"recompute_granularity": "full"},
        LLAMA,
        recompute("mlp_act"),
        LLAMA | recompute("mlp_act", "layernorm"),
    ],
)
def test_a_layer_keeps_what_its_trace_says(changes):
    """One layer more keeps its tensors once, in bf16, as its trace says."""
    dtype = dict(bf16=True)
    config, two = kept_bytes(torch.bfloat16, num_layers=2, **dtype, **changes)
    _, three = kept_bytes(torch.bfloat16, num_layers=3, **dtype, **changes)
    traced = trace(config, "cpu")
    assert three - two == kept(traced.recompute or traced.layer)


@pytest.mark.parametrize(
    "model",
    [{}, {"hidden_dropout": 0.1}, LLAMA, {"apply_residual_connection_post_layernorm": True}],
)
def test_what_is_made_again_is_the_same_to_the_bit(model):
    """Recomputation is bitwise the same.

    This includes a kernel that adds the residual and normalises in one pass.
    """
    kept, made = (
        gradients(torch.bfloat16, **model, **more)
        for more in ({}, recompute("mlp_act", "layernorm"))
    )
    assert kept.keys() == made.keys() and len(kept) > 10
    assert all(torch.equal(kept[name], made[name]) for name in kept)


def test_the_head_keeps_its_norm_and_no_logits():
    config, one = kept_bytes(torch.bfloat16, num_layers=1, bf16=True)
    traced = trace(config, "cpu")
    head = kept(traced.head)
    labels, loss = 8 * S * B, 4  # no float, and none that autograd saves
    assert one == kept(traced.layer) + head - labels - loss
    assert head < 3 * S * B * H * 2
