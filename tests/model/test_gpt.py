"""One stage in one process: documents, masks, padding, recomputation, residuals and dropout."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.kernels.choose import ALL, Fusions
from megatron.layers import gated_delta_net
from megatron.model.gpt import hidden_state
from megatron.model.mtp import mask_ahead
from megatron.parallel.sharding import sharding_of
from tests.helpers import own_loss
from tests.helpers.fusions import force
from tests.helpers.tiny import LINEAR, one_stage
from tests.parity.cases import BLOCK, CHEAP, FULL2, LLAMA, SELECTIVE, UNFUSED

V = 50
S = 16
B = 2
FIELDS = dict(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=S,
    vocab_size=V,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    init_method_std=0.2,
    micro_batch_size=B,
    global_batch_size=B,
)


def build(**fields):
    return one_stage(Config.create(**{**FIELDS, **fields}))


def micro_batch(tokens, mask=None, first_sample=0):
    batch = make_micro_batch(tokens.numpy(), first_sample=first_sample)
    return batch if mask is None else dataclasses.replace(batch, loss_mask=mask)


def tokens(seed=0, s=S, b=B):
    return torch.randint(0, V, (b, s + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("positions", ["learned_absolute", "rope", "alibi", "linear"])
def test_packed_documents_equal_documents_alone(positions, monkeypatch):
    """Packed documents equal documents alone.

    Each piece of a packed sample is run as a batch of its own; the rest of a sample is padding.
    """
    monkeypatch.setattr(gated_delta_net, "CHUNK", 4)  # in which several documents may be
    fields = dict(position_embedding_type=positions, num_key_value_heads=2)
    model = build(**(LINEAR if positions == "linear" else fields))
    t = tokens()
    segments = [[6, 1, 4, 6], [9, 5]]  # 17 and 14 of 17 tokens
    batch = make_micro_batch(t.numpy(), segments=[np.array(n) for n in segments])
    with torch.no_grad():
        packed = model.logits(batch, None)
        loss = model(batch, None)
        losses = []
        for row, lengths in enumerate(segments):
            for start, n in zip(np.cumsum([0, *lengths]), lengths, strict=False):
                alone = t[row : row + 1, start : start + n]
                scores = model.logits(micro_batch(torch.cat((alone, alone[:, :1]), 1)), None)[:, 0]
                # The last token of a full sample is only a label.
                inside = min(start + n, S) - start
                torch.testing.assert_close(
                    packed[start : start + inside, row], scores[:inside], rtol=1e-5, atol=1e-5
                )
                losses.append(cross_entropy(scores[: n - 1, :V], alone[0, 1:], reduction="none"))
        torch.testing.assert_close(loss, torch.cat(losses).mean(), rtol=1e-5, atol=0)
        joined = model.logits(micro_batch(t), None)
    assert batch.loss_mask.sum() == len(torch.cat(losses)) == 17 - 4 + 14 - 2
    assert (joined - packed)[6:, :, :V].abs().max() > 0.01, "the documents must matter"


def test_positions_that_restart_without_a_mask():
    """Rotation has no effect where every token is the first of its document, but otherwise has.

    Tokens are attended to across documents.
    """
    fields = dict(reset_position_ids=True)
    batch = micro_batch(tokens())
    firsts = dataclasses.replace(batch, position_ids=torch.zeros_like(batch.position_ids))
    rotated = build(position_embedding_type="rope", **fields)
    with torch.no_grad():
        expected = build(position_embedding_type="none").logits(batch, None)
        torch.testing.assert_close(rotated.logits(firsts, None), expected, rtol=1e-5, atol=1e-5)
        assert (rotated.logits(batch, None) - expected)[..., :V].abs().max() > 0.01


@pytest.mark.parametrize("positions", ["learned_absolute", "alibi"])
def test_padding_alone_gives_zero_loss_and_gradients(positions):
    batch = make_micro_batch(tokens().numpy(), segments=[np.array([], np.int64), np.array([1])])
    assert not batch.loss_mask.any()
    loss, grads = gradients(build(position_embedding_type=positions), batch)
    assert loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads.values())


def gradients(model, batch):
    model.zero_grad()
    loss = model(batch, None)
    loss.backward()
    return loss.detach(), {
        sharding_of(p).name: p.grad[: sharding_of(p).extent[0]].clone() for p in model.parameters()
    }


@pytest.mark.parametrize("recompute", [FULL2, BLOCK, SELECTIVE, CHEAP])
@pytest.mark.parametrize(
    ("fields", "documents"),
    [
        ({}, False),
        (LLAMA, True),
        (dict(UNFUSED, apply_residual_connection_post_layernorm=True), False),
    ],
)
@pytest.mark.parametrize("fusions", [Fusions(), ALL], ids=["plain", "fused"])
def test_recomputation_repeats_every_bit_with_dropout_on(
    monkeypatch, fusions, recompute, fields, documents
):
    force(monkeypatch, fusions)
    fields = dict(hidden_dropout=0.3, attention_dropout=0.2, **fields)
    segments = [np.array([6, 1, 4, 6]), np.array([9, 5])]
    batch = make_micro_batch(tokens().numpy(), segments=segments if documents else None)
    loss, grads = gradients(build(**fields), batch)
    repeated, repeated_grads = gradients(build(**fields, **recompute), batch)
    assert torch.equal(loss, repeated)
    for name, g in grads.items():
        assert torch.equal(repeated_grads[name], g), name


def test_dropout_depends_on_sample_seed_and_mode_only():
    fields = dict(hidden_dropout=0.3, attention_dropout=0.2)
    model = build(**fields)
    t = tokens()
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
    assert hidden_state(config) == ((S, B, 32), torch.float32)
    model = build(**fields).bfloat16()
    batch = micro_batch(tokens())
    hidden = model._hidden(batch, None)
    assert hidden.dtype == torch.float32
    exact = build()(batch, None)
    narrow = build(bf16=True).bfloat16()(batch, None)
    wide = model(batch, None)
    assert wide.dtype == torch.float32
    assert abs(wide - exact) < 0.02 * exact
    assert abs(narrow - exact) < 0.02 * exact


def test_a_loss_of_ones_own_is_that_of_float64():
    """Value, components and gradients of tests/helpers/own_loss.py, which uses every input."""
    config = Config.create(**{**FIELDS, "untie_embeddings_and_output_weights": True})
    model = one_stage(config.with_pieces(loss=own_loss.OwnLoss))
    t = tokens()
    mask = (torch.rand(B, S, generator=torch.Generator().manual_seed(1)) > 0.3).float()
    batch = micro_batch(t, mask)
    values = model(batch, None)
    values[0].backward()
    hidden = model._outputs(model._hidden(batch, None)).detach().double()
    weight = model.output_weight.detach().double().requires_grad_()
    logits = (hidden @ weight.T)[..., :V]
    log_p = logits.log_softmax(-1)
    teacher = own_loss.table(V).double().log_softmax(-1)[batch.tokens.t()]
    entropy = -log_p.gather(-1, batch.labels.t().unsqueeze(-1)).squeeze(-1)
    kl = (teacher.exp() * (teacher - log_p)).sum(-1)
    loss = entropy.square() + 0.5 * kl + 0.01 * logits.square().sum(-1)
    expected = [(x * mask.t()).sum() / mask.sum() for x in (loss, entropy, kl)]
    expected[0].backward()
    assert values.tolist() == pytest.approx([x.item() for x in expected], rel=1e-5)
    torch.testing.assert_close(model.output_weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("untied", [True, False])
def test_later_tokens_are_predicted_as_in_the_papers_equations(untied):
    """Losses and gradients of arXiv 2412.19437, equations 21 to 25, over positions that have them.

    In float64, except for the transformer layer, which other tests compare.
    """
    depths = 2
    model = build(
        **LLAMA | {"mtp_num_layers": depths, "untie_embeddings_and_output_weights": untied}
    ).train()
    mask = (torch.rand(B, S, generator=torch.Generator().manual_seed(1)) > 0.3).float()
    batch = micro_batch(tokens(), mask)
    values = model(batch, None)
    values[0].backward()
    parameters = [model.word_embeddings.weight, model.mtp[0].projection, model.mtp[1].enorm.weight]
    gradients = [p.grad.clone() for p in parameters]
    model.zero_grad()

    def norm(module, x):
        x = x.double()
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * module.weight.double()

    labels = batch.labels.t()  # labels[i] is token i + 1
    hidden = norm(model.final_layernorm, model._hidden(batch, None))
    losses = []
    for k in range(depths + 1):
        count = S - k
        if k:
            depth = model.mtp[k - 1]
            embedded = model.word_embeddings.weight[labels[k - 1 : k - 1 + count]]
            both = norm(depth.enorm, embedded), norm(depth.hnorm, hidden[:count])
            x = (torch.cat(both, -1) @ depth.projection.double().T).float()
            hidden = norm(depth.final_layernorm, depth.layer(x, model._call(batch, None)))
        logits = (hidden @ model.output_weight.double().T)[..., :V].flatten(0, 1)
        each = cross_entropy(logits, labels[k:].flatten(), reduction="none")
        in_loss = mask.t()[k:].flatten()
        losses.append((each * in_loss).sum() / in_loss.sum())
    (losses[0] + 0.1 * sum(losses[1:]) / depths).backward()
    assert values.tolist() == pytest.approx([x.item() for x in losses], rel=1e-5)
    for p, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert model.eval()(batch, None).item() == pytest.approx(losses[0].item(), rel=1e-5)


def test_later_tokens_of_another_document_are_not_in_the_loss():
    bounds = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    mask = torch.tensor([[1.0, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    assert mask_ahead(mask, 2, bounds).tolist() == [[0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    assert mask_ahead(mask, 2, None).tolist() == [[0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]
