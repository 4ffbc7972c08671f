"""CPU time that the host spends on a layer of a micro-batch: ours and plain torch's, in one run.

    python -m benchmarks.host_cost [layer ...]

Tensors are so small that arithmetic is negligible, and every fused operator goes through its
kernel, as on a GPU. What remains is what a host pays to launch a layer: Python, autograd, torch's
dispatcher, checks and calls; and of matrix products the call of the CPU's library. The time is CPU
time of one thread, so other work on the machine matters little. It is the difference of 10 and 2
layers, each the least of many passes; the sides take turns, and ratios are of one turn.

Plain torch is eager under autocast with fp32 weights: an nn.Linear, nn.LayerNorm, F.rms_norm and
scaled_dot_product_attention each. Experts are a loop over those that have tokens.

Rows with tensor parallelism are of one of two ranks. A process group of torch's that sends nothing
(FakeProcessGroup) stands for the other: what counts is the host's part of a message. The peer's
linear layers are one autograd function each, as in Megatron-LM, with the same messages and the same
overlap.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.engine.gradients import to_sink
from megatron.kernels import choose
from megatron.model.gpt import build_chunks, layer_context
from megatron.parallel.gradient_accumulator import GradientSink
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import plain
from common import Task

HIDDEN, HEADS, SEQUENCE, SAMPLES, VOCABULARY, EXPERTS, CHOICES, RANKS = 64, 2, 8, 1, 64, 4, 2, 2
LLAMA: dict[str, Any] = dict(
    normalization="rmsnorm",
    swiglu=True,
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "GPT-2 with dropout": dict(hidden_dropout=0.1),
    "Llama": LLAMA,
    f"Llama, {EXPERTS} experts": {
        **LLAMA,
        **dict(num_experts=EXPERTS, moe_router_topk=CHOICES, moe_aux_loss_coeff=(0.01,)),
    },
}
DIVIDED: dict[str, Any] = dict(tensor_model_parallel_size=RANKS)
IN_SEQUENCE: dict[str, Any] = {**DIVIDED, **dict(sequence_parallel=True)}
for kind, fields in {"GPT-2": {}, "Llama": LLAMA}.items():
    MODELS[f"{kind}, TP"] = {**fields, **DIVIDED}
    MODELS[f"{kind}, TP, SP"] = {**fields, **IN_SEQUENCE}
PASSES, ROUNDS, F32 = 150, 3, torch.float32
Step = Callable[[], tuple[float, float]]


class Llama(nn.Module):
    """Attention with rotary embedding and a gated unit, each behind an RMS norm."""

    order, back = plain.Layer.order, plain.Layer.back

    def __init__(self, task: Task) -> None:
        super().__init__()
        hidden, wide = task.hidden, 4 * task.hidden
        self.heads = task.heads
        self.first, self.second = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_output = nn.Linear(hidden, hidden, bias=False)
        self.mlp = self.make_mlp(hidden, wide)
        angles = torch.outer(
            torch.arange(task.sequence),
            10000.0 ** -torch.linspace(0, 1, hidden // task.heads // 2 + 1)[:-1],
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def make_mlp(self, hidden: int, wide: int) -> nn.Module:
        return Gated(hidden, wide)

    def rotate(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-high, low), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        projected = self.query_key_value(self.first(x))
        q, k, v = projected.unflatten(-1, (3, self.heads, -1)).permute(self.order).unbind()
        q, k = self.rotate(q).to(v.dtype), self.rotate(k).to(v.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_output(mixed.permute(self.back).flatten(2))
        added: Tensor = self.mlp(self.second(x))
        return x + added


class Gated(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """The best experts of each token, by the softmax of the best scores, with a balancing loss."""

    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated(hidden, wide) for _ in range(EXPERTS))
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores = self.router(rows).float()
        best, chosen = scores.topk(CHOICES, dim=-1)
        weights = best.softmax(-1).to(x.dtype)
        out = torch.zeros_like(rows)
        masks = F.one_hot(chosen, EXPERTS)
        shares = masks.sum((0, 1)) / masks.sum()
        self.loss = EXPERTS * (shares * scores.softmax(-1).mean(0)).sum()
        for number, expert in enumerate(self.experts):
            row, choice = torch.where(chosen == number)
            if len(row):
                y = expert(rows[row]) * weights[row, choice, None]
                out.index_add_(0, row, y.to(out.dtype))
        return out.view_as(x)


class Mixture(Llama):
    def make_mlp(self, hidden: int, wide: int) -> nn.Module:
        return Experts(hidden, wide)


class Dropping(plain.Layer):
    """GPT-2's layer with dropout of what attention and MLP add."""

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)


# -- tensor parallelism: hidden states are [s(/tp), b, h] ------------------------------------------


# torch 2.13 renamed these two calls and warns about the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Product(torch.autograd.Function):
    """x W^T + b of a column-parallel layer, or a row-parallel one's sum of x W^T over the ranks."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, column: bool, in_sequence: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.column, ctx.in_sequence, ctx.biased = column, in_sequence, bias is not None
        if column and in_sequence:
            x, work = gathered(x)
            work.wait()
        y = F.linear(x, weight, bias)
        if not column:
            y, work = summed(y, in_sequence)
            work.wait()
        return y

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        work = None
        if ctx.in_sequence:
            if ctx.column:
                x, work = gathered(x)
            else:
                dy, work = gathered(dy)
                work.wait()
        dx = dy.matmul(weight)
        if ctx.column:
            if work is not None:
                work.wait()
            dx, work = summed(dx, ctx.in_sequence)
        flat = dy.flatten(0, 1)
        dw = flat.t().matmul(x.flatten(0, 1))
        db = flat.sum(0) if ctx.biased else None
        if ctx.column:
            work.wait()
        return dx, dw, db, None, None


def gathered(x: Tensor) -> tuple[Tensor, Any]:
    whole = x.new_empty(RANKS * len(x), *x.shape[1:])
    return whole, all_gather(whole, x.contiguous(), async_op=True)


def summed(x: Tensor, in_sequence: bool) -> tuple[Tensor, Any]:
    if not in_sequence:
        return x, dist.all_reduce(x, async_op=True)
    part = x.new_empty(len(x) // RANKS, *x.shape[1:])
    return part, reduce_scatter(part, x.contiguous(), async_op=True)


class Divided(nn.Linear):
    """This rank's part of a linear layer; a row-parallel one adds its bias to the sum."""

    def __init__(self, whole: nn.Linear, column: bool, in_sequence: bool) -> None:
        inputs, outputs = whole.in_features, whole.out_features
        inputs, outputs = (inputs, outputs // RANKS) if column else (inputs // RANKS, outputs)
        super().__init__(inputs, outputs, bias=whole.bias is not None)
        self.column, self.in_sequence = column, in_sequence

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bias if self.column else None
        y: Tensor = Product.apply(  # type: ignore[no-untyped-call]
            x, self.weight, inside, self.column, self.in_sequence
        )
        return y if self.column or self.bias is None else y + self.bias


def divide(layer: Any, in_sequence: bool) -> None:
    """Leave a rank's part of the layer."""
    layer.heads //= RANKS
    layer.order, layer.back = (2, 1, 3, 0, 4), (2, 0, 1, 3)
    for module in list(layer.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                column = name not in ("attention_output", "mlp_output", "down")
                setattr(module, name, Divided(child, column, in_sequence))


LAYERS = dict(zip(MODELS, (plain.Layer, Dropping, Llama, Mixture), strict=False))


def ours(name: str, layers: int) -> Step:
    """Return a micro-batch of our model: seconds of the forward and of the backward pass."""
    fields: dict[str, Any] = dict(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        seq_length=SEQUENCE,
        vocab_size=VOCABULARY,
        micro_batch_size=SAMPLES,
        global_batch_size=SAMPLES,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        attention_backend="fused",
    )
    config = Config.create(**{**fields, **MODELS[name]})
    handle = dist.group.WORLD
    topology = Topology.from_layout(
        Layout(tensor=config.parallel.tensor_model_parallel_size),
        0,
        device=torch.device("cpu"),
        new_group=lambda ranks: handle,
    )
    context = dataclasses.replace(layer_context(config, topology), fusions=choose.ALL)
    chunk = build_chunks(config, topology, context)["0"]
    for p in chunk.parameters():
        if not p.sharding.fp32:
            p.data = p.data.bfloat16()
        # sums of products in 16 bits: a product is added in one call, as on a GPU
        p.gradient_sink = GradientSink(p, torch.zeros_like(p, dtype=None if p.dim() > 1 else F32))
        p.register_post_accumulate_grad_hook(to_sink)
    chunk.train()
    batch = make_micro_batch(
        np.random.default_rng(1).integers(0, VOCABULARY, (SAMPLES, SEQUENCE + 1)), first_sample=0
    )
    return timed(lambda: chunk(batch, None, late_loss=True))


def eager(name: str, layers: int) -> Step:
    """Return the same of plain torch."""
    task = Task(layers, HIDDEN, HEADS, VOCABULARY, SEQUENCE, SAMPLES, 1, "bf16", 1, "")
    model = plain.GPT(task)
    kind, *parallel = name.split(", ")
    divided, in_sequence = "TP" in parallel, "SP" in parallel
    make = LAYERS[kind if divided else name]
    model.layers = nn.ModuleList(make(task) for _ in range(layers))
    tokens = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE))
    if divided:
        for layer in model.layers:
            divide(layer, in_sequence)
        tokens = torch.randint(VOCABULARY, (SEQUENCE // RANKS if in_sequence else SEQUENCE, 1))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            total: Tensor = model(tokens, tokens)
            for layer in model.layers:
                if isinstance(layer, Mixture):
                    total = total + 0.01 * layer.mlp.loss
        return total

    return timed(loss)


def timed(forward: Callable[[], Tensor]) -> Step:
    def step() -> tuple[float, float]:
        began = time.thread_time()
        loss = forward()
        between = time.thread_time()
        loss.backward()
        return between - began, time.thread_time() - between

    return step


def milliseconds(steps: tuple[Step, Step]) -> tuple[float, float]:
    """Return ms of a layer, forward and backward, from models of 2 and 10 layers."""
    few, many = (np.min([step() for _ in range(PASSES)], axis=0) for step in steps)
    forward, backward = 1e3 * (many - few) / 8
    return float(forward), float(backward)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print("CPU ms of a layer: forward + backward = sum, and ours / plain torch, eager")
    for name in sys.argv[1:] or MODELS:
        sides = {"ours": ours, "eager": eager}
        steps = {side: (make(name, 2), make(name, 10)) for side, make in sides.items()}
        # In turns, so that what else the machine does meets both.
        rounds = {side: [milliseconds(steps[side])] for side in sides}
        for _ in range(ROUNDS - 1):
            for side in sides:
                rounds[side].append(milliseconds(steps[side]))
        sums = {side: np.sum(found, axis=1) for side, found in rounds.items()}
        for side, found in rounds.items():
            forward, backward = np.median(found, axis=0)
            total = forward + backward
            print(f"{name:18} {side:6} {forward:.3f} + {backward:.3f} = {total:.3f}", flush=True)
        ratios = sums["ours"] / sums["eager"]
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        print(f"{name:18} ratio  {np.median(ratios):.2f} ({spread})", flush=True)


if __name__ == "__main__":
    main()
