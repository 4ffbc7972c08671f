"""Plain PyTorch training loop of a GPT-2, eager or compiled, with DDP on several processes.

Attention is scaled_dot_product_attention, and the optimizer is fused AdamW over fp32 weights, with
gradient clipping. In eager mode, fp32 weights are used under autocast, as usual in small training
loops. Compiled bf16 training on one process has bf16 weights with fp32 masters and gradients, like
our side: autocast would cast all weights again in every micro-batch. On several processes, torch's
DistributedDataParallel averages the gradients; every process then updates all weights (ZeRO-1 would
divide that work).
"""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import (
    BETAS,
    CLIP,
    EPSILON,
    LEARNING_RATE,
    Task,
    decay_groups,
    micro_batch,
    read_task,
    run_steps,
    world,
)
from torch import Tensor, nn


class PlainLayer(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a residual.

    order  permutes the dimensions of the fused projection, [b, s, 3, n, d], to [3, b, n, s, d]
    back   permutes those of the result, [b, n, s, d], to [b, s, n, d]
    """

    order = (2, 0, 3, 1, 4)
    back = (0, 2, 1, 3)

    def __init__(self, task: Task) -> None:
        super().__init__()
        hidden = task.hidden
        self.heads = task.heads
        self.before_attention = nn.LayerNorm(hidden)
        self.before_mlp = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        self.mlp_input = nn.Linear(hidden, 4 * hidden)
        self.mlp_output = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        projected = self.query_key_value(self.before_attention(x))
        heads = projected.unflatten(-1, (3, self.heads, -1)).permute(self.order)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.drop(self.attention_output(mixed.permute(self.back).flatten(2)))
        up = F.gelu(self.mlp_input(self.before_mlp(x)), approximate="tanh")
        return x + self.drop(self.mlp_output(up))

    def drop(self, x: Tensor) -> Tensor:
        """Return what is added to the residual: without dropout, x itself."""
        return x


class GPT(nn.Module):
    """GPT-2 that returns the mean cross entropy; the embedding is also the output layer."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.words = nn.Embedding(task.vocabulary, task.hidden)
        self.positions = nn.Embedding(task.sequence, task.hidden)
        self.layers = nn.ModuleList(PlainLayer(task) for _ in range(task.layers))
        self.last_norm = nn.LayerNorm(task.hidden)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # [b, s] each
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.last_norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Masters:
    """fp32 copies of a model's bf16 weights, and their gradients, summed over micro-batches."""

    def __init__(self, model: nn.Module) -> None:
        self.working = [p for _, p in model.named_parameters()]
        self.weights = [p.detach().float().requires_grad_() for p in self.working]
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)

    def take_gradients(self) -> None:
        """Add the gradients of a micro-batch."""
        sums = [weight.grad for weight in self.weights]
        torch._foreach_add_(sums, [p.grad for p in self.working])
        for p in self.working:
            p.grad = None

    def give_weights(self) -> None:
        """Copy the new weights to bf16, and begin a new sum of gradients."""
        with torch.no_grad():
            torch._foreach_copy_(self.working, self.weights)
        torch._foreach_zero_([weight.grad for weight in self.weights])


def main() -> None:
    task = read_task()
    rank, size = world()
    torch.manual_seed(1)
    with torch.device(task.device):
        model = GPT(task)
    masters = None
    if task.compiled and task.bf16 and size == 1:
        model.bfloat16()
        masters = Masters(model)
    weights = list(model.parameters()) if masters is None else masters.weights
    optimizer = torch.optim.AdamW(
        decay_groups(weights), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True
    )
    run: nn.Module = torch.compile(model) if task.compiled else model  # type: ignore[assignment]
    if size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        run = nn.parallel.DistributedDataParallel(run)
    precision = torch.autocast(task.device, torch.bfloat16, enabled=task.bf16 and masters is None)

    def step() -> tuple[float, float]:
        total = torch.zeros((), device=task.device)
        for index in range(task.accumulation):
            tokens, targets = micro_batch(task)
            alone = size > 1 and index < task.accumulation - 1
            with run.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
                with precision:
                    loss = run(tokens, targets) / task.accumulation
                loss.backward()
            total += loss.detach()
            if masters is not None:
                masters.take_gradients()
        began = time.perf_counter()
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        if masters is None:
            optimizer.zero_grad(set_to_none=True)
        else:
            masters.give_weights()
        return total.item(), began

    run_steps(
        task, step, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
