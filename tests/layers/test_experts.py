"""Layers of experts: output, balancing losses and all gradients against float64, token by token."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megatron.config import Config
from megatron.layers.context import CallContext, Experts, LayerContext
from megatron.layers.expert_load import move_biases, take_figures
from megatron.layers.experts import ExpertMLP
from megatron.parallel.keyed_random import DropoutKey
from megatron.parallel.layout import Layout
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Group, Topology

S = 6
B = 2
H = 8
E = 4
FFN = 10
SCALE = 0.7
BASE = dict(
    num_layers=1,
    hidden_size=H,
    num_attention_heads=2,
    seq_length=S,
    vocab_size=10,
    num_experts=E,
    moe_ffn_hidden_size=FFN,
    swiglu=True,
    add_bias_linear=False,
    init_method_std=0.5,
)
SIGMOID = dict(moe_router_score_function="sigmoid")
CASES = {
    "mixtral": dict(),
    "qwen": dict(moe_router_pre_softmax=True, moe_router_topk=3),
    "switch": dict(moe_router_pre_softmax=True, moe_router_topk=1, moe_aux_loss_coeff=(0.3,)),
    "deepseek": dict(
        SIGMOID,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_topk_scaling_factor=2.5,
        moe_router_enable_expert_bias=True,
        moe_shared_expert_intermediate_size=6,
        moe_shared_expert_gate=True,
        moe_router_load_balancing_type=("seq_aux_loss", "aux_loss"),
        moe_aux_loss_coeff=(0.2, 0.4),
    ),
    "deepseek 2": dict(
        moe_router_pre_softmax=True,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_group_top_scores=1,
    ),
    "one sigmoid": dict(SIGMOID, moe_router_topk=1),
    "global": dict(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(0.5,)),
    "z": dict(moe_z_loss_coeff=0.2),
    "few": dict(moe_expert_capacity_factor=0.7),
    "first": dict(moe_expert_capacity_factor=0.7, moe_token_drop_policy="position"),
    "biases": dict(swiglu=False, add_bias_linear=True),
    "gpt-oss": dict(
        swiglu=False,
        quick_geglu=True,
        activation_func_clamp_value=0.4,
        glu_linear_offset=1.0,
        add_bias_linear=True,
        moe_router_bias=True,
    ),
    **{name: {"swiglu": False, name: True} for name in ("reglu", "liglu")},
    "muP": dict(
        use_mup=True,
        mup_base_hidden_size=H // 4,
        mup_base_num_attention_heads=1,
        mup_base_head_dim=4,
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_gate=True,
        moe_ffn_hidden_size=8,
    ),
}
RECOMPUTED = {"kept": {}, "moe": dict(recompute=True)}
RECOMPUTED["moe_act"] = dict(recompute_activation=True)


def made(fields, **recompute):
    """Return a layer with random weights, biases of experts and load."""
    config = Config.create(**{**BASE, **fields})
    context = dataclasses.replace(LayerContext.single(), experts=Experts(loss_scale=SCALE))
    layer = ExpertMLP(context, "layers.0.mlp", config.model, 0, **recompute)
    generator = torch.Generator().manual_seed(3)
    for name, p in layer.named_parameters():
        if name.endswith("bias"):
            p.data.normal_(0.0, 0.3, generator=generator)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.uniform_(-0.2, 0.2, generator=generator)
    if layer.router.last_load is not None:
        layer.router.last_load.copy_(torch.tensor([3.0, 1.0, 5.0, 7.0]))
    return layer.train(), config


def reference(
    x,
    p,
    layer,
    config,
    lengths,
):
    """Return output, weighted losses and the experts of each token, by loops over tokens.

    Samples have these lengths, and the output of the rest is zero.
    """
    text = [(s, b) for s in range(S) for b in range(B) if s < lengths[b]]
    of_text = tuple(torch.tensor(text).t())
    m = config.model
    router = layer.router
    output = 0.25 if m.use_mup else 1.0  # of 4 times the inputs of the base model
    logits = x @ p["router.weight"].t() * output + p.get("router.bias", 0.0)
    bias = None if router.expert_bias is None else router.expert_bias.double()
    softmax = m.moe_router_score_function == "softmax"
    k = m.moe_router_topk
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    chosen = np.full((S, B, k), -1)
    weights = {}
    for s, b in text:
        ranking = (scores[s, b] if bias is None else scores[s, b] + bias).detach().numpy().copy()
        if m.moe_router_num_groups:
            grouped = ranking.reshape(m.moe_router_num_groups, -1)
            each = m.moe_router_group_top_scores or k // m.moe_router_group_topk
            sums = [np.sort(row)[::-1][:each].sum() for row in grouped]
            for group in np.argsort(sums)[: -m.moe_router_group_topk]:
                grouped[group] = -np.inf
            ranking = grouped.reshape(-1)
        best = np.argsort(-ranking)[:k]
        chosen[s, b] = best
        of = {int(e): scores[s, b, e] for e in best}
        total = sum(of.values()) if softmax or k > 1 else 1.0
        if softmax and m.moe_router_pre_softmax:
            total = 1.0
        factor = m.moe_router_topk_scaling_factor or 1.0
        weights[s, b] = {e: w / total * factor for e, w in of.items()}
    shares = scores / scores.sum(-1, keepdim=True)
    plain = np.argsort(-shares.detach().numpy(), axis=-1)[..., :k]

    def balance(of, load):
        f = load.double() / load.sum()
        return E * sum(f[e] * of[..., e].mean() for e in range(E))

    def load_of(picked):
        return torch.from_numpy(np.bincount(picked.reshape(-1), minlength=E))

    losses = []
    kinds = zip(m.moe_router_load_balancing_type, m.moe_aux_loss_coeff, strict=True)
    for kind, factor in kinds:
        if kind == "aux_loss" and factor:
            losses.append(factor * balance(shares[of_text], load_of(plain[of_text])))
        elif kind == "seq_aux_loss" and factor:
            samples = [(shares[:n, b], plain[:n, b]) for b, n in enumerate(lengths) if n]
            each = [balance(of, load_of(picked)) for of, picked in samples]
            losses.append(factor * sum(each) / len(each))
        elif factor:
            losses.append(factor * balance(shares[of_text], router.last_load))
    if m.moe_z_loss_coeff:
        squares = logits[of_text].exp().sum(-1).log().square()
        losses.append(m.moe_z_loss_coeff * squares.mean())
    if m.moe_expert_capacity_factor:
        capacity = math.ceil(len(text) * k / E * m.moe_expert_capacity_factor)
        for e in range(E):
            takers = [token for token, of in weights.items() if e in of]
            if m.moe_token_drop_policy == "probs":
                takers.sort(key=lambda token: -float(weights[token][e]))
            for token in takers[capacity:]:
                del weights[token][e]

    def mlp(y, up, down, *b):
        if m.gated:
            gate, value = (matrix @ y + (b[0][i] if b else 0.0) for i, matrix in enumerate(up))
            if m.quick_geglu:
                gate = gate.clamp(max=0.4)
                return (
                    down @ ((1 + value.clamp(-0.4, 0.4)) * gate / (1 + (-1.702 * gate).exp()))
                    + b[1]
                )
            function = F.relu if m.reglu else torch.Tensor.clone if m.liglu else F.silu
            return down @ (function(gate) * value)
        inner = up @ y + (b[0] if b else 0.0)
        return down @ F.gelu(inner, approximate="tanh") + (b[1] if b else 0.0)

    rows = {}
    names = [
        f"dense_{direction}.{kind}"
        for kind in ("weight", "bias")
        for direction in ("h_to_4h", "4h_to_h")
    ]
    for (s, b), of in weights.items():
        y = x[s, b]
        out = torch.zeros(H, dtype=torch.float64)
        for e, w in of.items():
            out = out + w * mlp(y, *(p[f"experts.{n}"][e] for n in names if f"experts.{n}" in p))
        if "shared_experts.gate.weight" in p:
            of_all = mlp(y, *(p[f"shared_experts.{n}"] for n in names[:2]))
            out = out + (p["shared_experts.gate.weight"] @ y * output).sigmoid() * of_all
        rows[s, b] = out
    none = torch.zeros(H, dtype=torch.float64)
    every = [rows.get((s, b), none) for s in range(S) for b in range(B)]
    return torch.stack(every).view(S, B, H), losses, chosen


@pytest.mark.parametrize(
    ("recompute", "lengths"), [("kept", (S - 3, S - 1)), ("moe", (S, S)), ("moe_act", (0, S - 1))]
)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_that_of_a_loop_over_tokens(name, recompute, lengths):
    """Values and gradients agree to the rounding of fp32, recomputed or not.

    Padding enters no load, loss or capacity, whatever it contains.
    """
    layer, config = made(CASES[name], **RECOMPUTED[recompute])
    generator = torch.Generator().manual_seed(5)
    x, g = torch.randn(2, S, B, H, generator=generator)
    padding = torch.arange(S) >= torch.tensor(lengths).unsqueeze(1)  # [b, s]
    x[padding.t()] = 3.0  # one id
    g[padding.t()] = 0.0  # no attention and no loss reads it
    layer_x = x.clone().requires_grad_()
    call = CallContext(dropout=DropoutKey(1, 0), padding=padding if padding.any() else None)
    layer(layer_x, call).backward(g)
    of = {sharding_of(p).name.removeprefix("layers.0.mlp."): p for p in layer.parameters()}
    wide = {n: p.detach().double().requires_grad_() for n, p in of.items()}
    reference_x = x.double().requires_grad_()
    y, losses, chosen = reference(reference_x, wide, layer, config, lengths)
    ((y * g.double()).sum() + SCALE * sum(losses)).backward()
    with torch.no_grad():
        inference_y = layer(x, CallContext(padding=call.padding))
    np.testing.assert_allclose(
        inference_y[~padding.t()], y.detach()[~padding.t()], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(layer_x.grad, reference_x.grad, rtol=1e-4, atol=1e-5)
    for n, p in of.items():
        expected = wide[n].grad
        np.testing.assert_allclose(p.grad, expected, rtol=1e-4, atol=1e-5, err_msg=n)
        assert expected.abs().max() > 1e-3, f"the comparison of {n} needs a gradient"
    # A recomputation, and a pass without gradients, count nothing.
    load = np.bincount(chosen[chosen >= 0], minlength=E)
    np.testing.assert_array_equal(layer.router.load, load)
    factors = [*layer.router.balancing.values(), config.model.moe_z_loss_coeff or 0.0]
    actual = layer.router.losses[: len(losses)].double() * torch.tensor(factors)[: len(losses)]
    np.testing.assert_allclose(actual, [float(loss.detach()) for loss in losses], rtol=1e-5)


@pytest.mark.parametrize("recompute", RECOMPUTED)
def test_all_weight_gradients_are_deferred_to_the_bit(recompute):
    """Those of the router and of the shared expert's gate included."""
    layer, _ = made(CASES["deepseek"] | CASES["z"], **RECOMPUTED[recompute])
    x, g = torch.randn(2, S, B, H, generator=torch.Generator().manual_seed(7))
    gradients = []
    queue = layer.context.weight_gradients
    for deferred in (False, True):
        y = layer(x, CallContext(dropout=DropoutKey(1, 0)))
        if deferred:
            queue.begin()
        y.backward(g)
        if deferred:
            assert all(p.grad is None for p in layer.parameters())
            for compute in queue.take():
                compute()
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
        layer.zero_grad()
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected) and expected.any(), name


def test_evaluation_drops_only_when_asked():
    """A token's output depends neither on other tokens nor, as in a cache, on how many there are."""
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(2))
    capacities = dict(moe_expert_capacity_factor=0.7), dict(moe_eval_capacity_factor=0.7)
    of_training, of_evaluation = (made(fields)[0] for fields in capacities)
    with torch.no_grad():
        dropped = of_training(x, CallContext())
        torch.testing.assert_close(of_evaluation.eval()(x, CallContext()), dropped)
        undropped = of_evaluation.train()(x, CallContext())
        assert (undropped - dropped).abs().max() > 1e-3
        alone = [of_training.eval()(row, CallContext()) for row in x.view(S * B, 1, 1, H)]
        torch.testing.assert_close(torch.cat(alone).view_as(x), undropped)


def test_biases_move_towards_an_even_load_where_the_step_counts():
    layer, _ = made(CASES["deepseek"] | dict(moe_router_bias_update_rate=0.25))
    router = layer.router
    assert router.expert_bias is not None
    before = router.expert_bias.clone()
    for counts in (False, True):
        router.load.copy_(torch.tensor([5.0, 2.0, 3.0, 2.0]))
        move_biases([router], Group((0,), 0), torch.tensor(counts))
        step = torch.tensor([-0.25, 0.25, 0.0, 0.25]) if counts else torch.zeros(E)
        torch.testing.assert_close(router.expert_bias, before + step)
        assert router.load.sum() == 0


def test_jitter_depends_on_the_sample_not_on_the_micro_batch():
    layer, _ = made(dict(moe_input_jitter_eps=0.5))
    x = torch.randn(S, 3, H, generator=torch.Generator().manual_seed(1))
    weights, _ = layer.router(x, CallContext(dropout=DropoutKey(1, 4)))
    alone, _ = layer.router(x[:, 1:2], CallContext(dropout=DropoutKey(1, 5)))
    torch.testing.assert_close(weights.view(S, 3, -1)[:, 1], alone, rtol=0, atol=0)
    plain, _ = layer.router(x[:, 1:2], CallContext())
    assert not torch.equal(alone, plain)


@pytest.mark.parametrize("groups", [None, 2])
def test_forced_choices_are_even_and_those_of_the_sample(groups):
    """A router that would send every token to the same experts draws them instead, in training.

    Weights are by score, and evaluation chooses by score.
    """
    fields = dict(moe_router_num_groups=groups, moe_router_group_topk=groups and 1)
    layer, _ = made(
        {"moe_router_force_load_balancing": True, "moe_router_pre_softmax": True, **fields}
    )
    router = layer.router
    x = 1 + torch.rand(S, 400, H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        router.weight.copy_(torch.arange(E).unsqueeze(1).expand_as(router.weight) / H)
    weights, experts = router(x, CallContext(dropout=DropoutKey(1, 4)))
    tokens = len(experts)
    assert (experts[:, 0] != experts[:, 1]).all()
    pairs = np.unique(experts.sort(dim=1).values, axis=0, return_counts=True)[1] / tokens
    assert len(pairs) == (2 if groups else math.comb(E, 2))
    # each of n sets of experts has 1/n of the tokens, within 5 standard deviations
    assert abs(pairs - 1 / len(pairs)).max() < 5 * (len(pairs) * tokens) ** -0.5
    shares = F.linear(x, router.weight).softmax(-1).flatten(0, 1)
    torch.testing.assert_close(weights, shares.gather(1, experts))
    _, of_alone = router(x[:, 7:9], CallContext(dropout=DropoutKey(1, 11)))
    assert torch.equal(experts.view(S, -1, 2)[:, 7:9].flatten(0, 1), of_alone)
    assert (router(x, CallContext())[1] == torch.tensor([E - 1, E - 2])).all()


def test_figures_are_means_over_layers_and_shares_of_the_interval():
    layer, config = made(
        dict(
            num_layers=3, moe_layer_freq=(0, 1, 0), moe_aux_loss_coeff=(0.5,), moe_z_loss_coeff=0.1
        )
        | dict(moe_expert_capacity_factor=0.5)
    )
    router = layer.router
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    router.layer = 1
    router.measured = True
    xs = torch.randn(2, S, B, H, generator=torch.Generator().manual_seed(1))
    router(xs[0], CallContext(padding=torch.ones(B, S, dtype=torch.bool)))  # is no micro-batch
    chosen = []
    dropped = 0
    logits = []
    for x, length in zip(xs, (S, S - 2), strict=True):
        padding = torch.arange(S).expand(B, S) >= length
        _, experts = router(x, CallContext(padding=padding if padding.any() else None))
        dropped += int((experts.view(S, B, -1)[:length] < 0).sum())
        logits.append((x[:length].double() @ router.weight.detach().double().t()).view(-1, E))
        chosen.append(logits[-1].topk(2).indices)
    figures = take_figures([router], config.model, topology)
    tokens = np.bincount(torch.cat(chosen).flatten(), minlength=E)
    shares = [of.softmax(-1) for of in logits]
    loads = [np.bincount(of.flatten(), minlength=E) / of.numel() for of in chosen]
    both = zip(shares, loads, strict=True)
    balance = [float(E * (of.mean(0) * torch.from_numpy(f)).sum()) for of, f in both]
    z = [float(of.logsumexp(-1).square().mean()) for of in logits]
    assert figures["balancing"] == pytest.approx(
        {"load_balancing_loss": np.mean(balance), "z_loss": np.mean(z)}, rel=1e-5
    )
    (of,) = figures["experts"].values()
    assert list(figures["experts"]) == ["1"] and of["tokens"] == tokens.tolist()
    assert of["imbalance"] == pytest.approx(tokens.max() / tokens.mean())
    assert of["dropped"] == pytest.approx(dropped / tokens.sum()) and dropped > 0
    entropy = -torch.cat([(of * of.log()).sum(-1) for of in shares]).mean() / math.log(E)
    assert of["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert take_figures([router], config.model, topology)["experts"] is None
