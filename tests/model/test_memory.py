"""Tensors kept by a training pass, against its trace."""

import pytest
import torch

from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.planner.events import Alloc, Free
from megatron.planner.trace import trace
from tests.helpers.tiny import one_stage
from tests.parity.cases import LLAMA

S = 128
B = 2
H = 64
V = 256
FIELDS = dict(
    hidden_size=H,
    num_attention_heads=4,
    seq_length=S,
    vocab_size=V,
    micro_batch_size=B,
    global_batch_size=B,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    bf16=True,
)


def recompute(*modules):
    return dict(recompute_granularity="selective", recompute_modules=modules)


def kept_bytes(**fields):
    """Return the bytes of the tensors that autograd saves in a forward pass in bf16.

    Shared memory counts once, parameters not at all.
    """
    config = Config.create(**{**FIELDS, **fields})
    model = one_stage(config).bfloat16()
    tokens = torch.arange(B * (S + 1)).view(B, -1) % V
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def note(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in parameters:
            # Held, so that no other tensor takes its place.
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(make_micro_batch(tokens.numpy()), None)
    return config, sum(x.untyped_storage().nbytes() for x in saved.values())


def live_bytes(module):
    """Return the bytes that a forward pass without data leaves."""
    live = {}
    for step in module.forward.steps:
        if isinstance(step, Alloc):
            live[step.id] = step.bytes
        elif isinstance(step, Free):
            live.pop(step.id, None)
    return sum(live.values())


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
    """One layer more keeps its tensors once, as its trace says."""
    config, two = kept_bytes(num_layers=2, **changes)
    _, three = kept_bytes(num_layers=3, **changes)
    traced = trace(config, "cpu")
    assert three - two == live_bytes(traced.recompute or traced.layer)


def test_the_head_keeps_its_norm_and_no_logits():
    config, one = kept_bytes(num_layers=1)
    traced = trace(config, "cpu")
    head = live_bytes(traced.head)
    labels, loss = 8 * S * B, 4  # no float, and none that autograd saves
    assert one == live_bytes(traced.layer) + head - labels - loss
    assert head < 3 * S * B * H * 2
