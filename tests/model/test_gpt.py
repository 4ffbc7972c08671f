"""One stage in one process: documents, ALiBi, masks, padding, recomputation, residual precision, dropout sites."""
from __future__ import annotations

import math

import pytest
import torch

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.layers.attention import torch_attention
from megatron.layers.masks import alibi_slopes
from megatron.model.gpt import build_chunks, hidden_dtype, hidden_shape
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Layout, Topology

V, S, B = 50, 16, 2
FIELDS = dict(
    num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=S, vocab_size=V, make_vocab_size_divisible_by=8,
    hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2, micro_batch_size=B, global_batch_size=B,
)


def build(**fields):
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    return build_chunks(Config.create(**{**FIELDS, **fields}), topology)["0"]


def micro_batch(tokens, mask=None, positions=None, documents=None, first_sample=0):
    b, s = tokens.shape[0], tokens.shape[1] - 1
    return MicroBatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(b, s) if mask is None else mask,
        position_ids=torch.arange(s).expand(b, s) if positions is None else positions, document_ids=documents,
        first_sample=first_sample,
    )


def tokens(seed=0, s=S, b=B):
    return torch.randint(0, V, (b, s + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "alibi"])
def test_packed_documents_equal_documents_alone(positions):
    resets = dict(reset_attention_mask=True, reset_position_ids=True)
    model = build(position_embedding_type=positions, **resets)
    t = tokens()
    cut = 6
    ids = (torch.arange(S) >= cut).long().expand(B, S)
    restarted = torch.cat((torch.arange(cut), torch.arange(S - cut))).expand(B, S)
    with torch.no_grad():
        packed = model.logits(micro_batch(t, positions=restarted, documents=ids), None)
        alone = []
        for piece in (t[:, : cut + 1], t[:, cut:]):
            n = piece.shape[1] - 1
            alone.append(model.logits(micro_batch(piece, documents=torch.zeros(B, n, dtype=torch.long)), None))
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        joined = build(position_embedding_type=positions).logits(micro_batch(t), None)
    assert (joined - packed)[cut:, :, :V].abs().max() > 0.01, "the documents must matter"


def test_alibi_attention_against_the_formula_in_float64():
    g = torch.Generator().manual_seed(4)
    s, b, heads, d = 9, 2, 4, 8
    q, k, v = (torch.randn(s, b, heads, d, generator=g) for _ in range(3))
    out = torch_attention(q, k, v, alibi_slopes(heads), None, 0.0)
    for bi in range(b):
        for h in range(heads):
            slope = 2.0 ** (-8 * (h + 1) / heads)
            for i in range(s):
                scores = torch.stack(
                    [q[i, bi, h].double() @ k[j, bi, h].double() / math.sqrt(d) - slope * (i - j) for j in range(i + 1)]
                )
                expected = torch.softmax(scores, 0) @ v[: i + 1, bi, h].double()
                torch.testing.assert_close(out[i, bi, h].double(), expected, rtol=1e-5, atol=1e-6)


def test_loss_is_the_mean_over_unmasked_tokens():
    model, t = build(), tokens()
    mask = (torch.rand(B, S, generator=torch.Generator().manual_seed(1)) > 0.4).float()
    with torch.no_grad():
        loss = model(micro_batch(t, mask), None)
        logits = model.logits(micro_batch(t), None)[..., :V]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), t[:, 1:].t().flatten(), reduction="none")
    expected = (losses.view(S, B) * mask.t()).sum() / mask.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        assert model(micro_batch(t, torch.zeros(B, S)), None).item() == 0.0


def gradients(model, batch):
    model.zero_grad()
    loss = model(batch, None)
    loss.backward()
    return loss.detach(), {sharding_of(p).name: p.grad[: sharding_of(p).extent[0]].clone() for p in model.parameters()}


def test_padding_changes_no_number():
    batch = micro_batch(tokens())
    loss, grads = gradients(build(make_vocab_size_divisible_by=1), batch)
    padded = build(make_vocab_size_divisible_by=64)
    loss_padded, grads_padded = gradients(padded, batch)
    assert padded.output_weight.shape[0] == 64
    assert not padded.output_weight.grad[V:].any()
    torch.testing.assert_close(loss_padded, loss, rtol=1e-6, atol=0)
    for name, g in grads.items():
        torch.testing.assert_close(grads_padded[name], g, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "recompute",
    [
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
        dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2),
        dict(recompute_granularity="selective"),
    ],
)
def test_recomputation_repeats_every_bit_with_dropout_on(recompute):
    fields = dict(hidden_dropout=0.3, attention_dropout=0.2)
    batch = micro_batch(tokens())
    loss, grads = gradients(build(**fields), batch)
    again, grads_again = gradients(build(**fields, **recompute), batch)
    assert torch.equal(loss, again)
    for name, g in grads.items():
        assert torch.equal(grads_again[name], g), name


def test_full_recomputation_keeps_less():
    def kept(**fields):
        total = 0

        def pack(x):
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            build(**fields)(micro_batch(tokens()), None)
        return total

    everything = kept()
    full = kept(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    block = kept(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
    assert full < block < everything


def test_dropout_depends_on_sample_seed_and_mode_only():
    fields = dict(hidden_dropout=0.3, attention_dropout=0.2)
    model, t = build(**fields), tokens()
    with torch.no_grad():
        first = model(micro_batch(t), None)
        torch.rand(5)
        assert torch.equal(model(micro_batch(t), None), first)
        assert not torch.equal(model(micro_batch(t, first_sample=2), None), first)
        assert not torch.equal(build(**fields, seed=99)(micro_batch(t), None), first)
        model.eval()
        assert torch.equal(model(micro_batch(t), None), build()(micro_batch(t), None))


def test_fp32_residual_stream_beside_bf16_weights():
    fields = dict(bf16=True, fp32_residual_connection=True)
    config = Config.create(**{**FIELDS, **fields})
    assert hidden_dtype(config) == torch.float32
    assert hidden_shape(config) == (S, B, 32)
    model = build(**fields).bfloat16()
    batch = micro_batch(tokens())
    hidden = model._hidden(batch, None)
    assert hidden.dtype == torch.float32
    exact, narrow = build()(batch, None), build(bf16=True).bfloat16()(batch, None)
    wide = model(batch, None)
    assert wide.dtype == torch.float32
    assert abs(wide - exact) < 0.02 * exact
    assert abs(narrow - exact) < 0.02 * exact


def test_initial_loss_is_that_of_a_guess():
    # With small weights the logits are nearly equal: -log(1/V); they vary by 0.0002 sqrt(32).
    loss = build(init_method_std=0.0002)(micro_batch(tokens()), None)
    assert loss.item() == pytest.approx(math.log(V), abs=1e-3)


def test_initial_scale_of_residual_projections():
    model = build(hidden_size=256, init_method_std=0.02)
    layer = model.layers[0]
    assert layer.mlp.dense_h_to_4h.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.mlp.dense_4h_to_h.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.02)
    assert layer.self_attention.dense.weight.std().item() == pytest.approx(0.02 / math.sqrt(6), rel=0.02)
