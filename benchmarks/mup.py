"""Prove muP: activations change equally at several widths and depths.

    python benchmarks/mup.py coordinates [--widths 128 256 ...] [--layers 2 4 ...] [--standard]

Trains for a few steps, and prints the root mean square of each part's activations and of their
change: the coordinate check of Yang et al., arXiv 2203.03466, appendix D.1. With several depths,
these parts are the embedding, the last layer, the final norm and the scores. Exit code 1 if the
largest value of any part is more than 10 % above the smallest. --standard trains without muP. All
runs have one process on the CPU; the base model has a width of 64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.shared import parser
from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.engine.buckets import bucket_rule
from megatron.engine.optimizer import (
    build_optimizer,
    parameter_groups,
    unique_parameters,
)
from megatron.model.gpt import GPTChunk, build_chunks
from megatron.parallel.layout import Layout
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

BASE = 64
HEAD = 16
SIZES: dict[str, Any] = dict(
    num_layers=2,
    seq_length=64,
    vocab_size=128,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    adam_beta2=0.95,
    clip_grad=1.0,
    init_method_std=0.03,
)
MUP = dict(use_mup=True, mup_base_hidden_size=BASE, mup_base_head_dim=HEAD)
LIMIT = 1.1
INNER = "QKV", "attention", "MLP", "middle layer"


def configured(width: int, **fields: Any) -> Config:
    """Return the configuration of a model of this width, with heads of HEAD."""
    return Config.create(
        **{**SIZES, "hidden_size": width, "num_attention_heads": width // HEAD, **fields}
    )


def synthetic_text(tokens: int = 1 << 18, kinds: int = 16) -> torch.Tensor:
    """Return tokens, each of which depends on the one before: int64 [tokens].

    A token has eight possible successors, of unequal probability. There are few kinds of tokens,
    because muP assumes widths far above the number of different inputs of a layer: the first layer
    has one input for each kind, and their embeddings overlap by 1 / sqrt(width).
    """
    draw = torch.Generator().manual_seed(0)
    successors = torch.randint(0, kinds, (kinds, 8), generator=draw)
    ranks = (torch.rand(tokens, generator=draw).square() * 8).long().tolist()
    table = successors.tolist()
    tokens_drawn = []
    last = 0
    for rank in ranks:
        last = table[last][rank]
        tokens_drawn.append(last)
    return torch.tensor(tokens_drawn)


def batches(text: torch.Tensor, seed: int, samples: int, length: int) -> Iterator[MicroBatch]:
    """Yield micro-batches from random places of the text."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (samples, 1), generator=draw)
        rows = text[starts + torch.arange(length + 1)]
        yield MicroBatch(rows[:, :-1], rows[:, 1:], torch.ones(samples, length), None, None, 0)  # type: ignore[arg-type]


class MupTraining:
    """A model, its optimizer and its data in one process."""

    def __init__(self, config: Config, text: torch.Tensor, samples: int) -> None:
        topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
        chunk = build_chunks(config, topology)["0"]
        assert isinstance(chunk, GPTChunk)
        self.model = chunk.train()
        self.config = config
        parameters = unique_parameters(chunk)
        buckets = bucket_rule(config, 1).plan([sharding_of(p) for p in parameters])
        of_groups = ([parameters[number] for number in bucket.members] for bucket in buckets)
        groups = parameter_groups(of_groups, config.optimizer.weight_decay, buckets)
        self.optimizer = build_optimizer(groups, config, topology.device)
        self.batches = batches(text, config.training.seed, samples, config.model.seq_length)

    def step(self, rate: float) -> float:
        """Train on a batch and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        loss = self.model(next(self.batches), None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


# ---- sizes of activations


@torch.no_grad()
def activations(model: GPTChunk, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the outputs of the parts of a model, and its scores, by name.

    Layers are represented by the middle and the last one, which models of any depth have.
    """
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    modules = {"embedding": model.word_embeddings, "final norm": model.final_layernorm}
    for depth, i in (("middle", len(model.layers) // 2 - 1), ("last", -1)):
        layer: Any = model.layers[i]
        modules |= {f"{depth} layer": layer, f"{depth} MLP": layer.mlp}
        attention = layer.self_attention
        modules |= {f"{depth} attention": attention, f"{depth} QKV": attention.query_key_value}
    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    outputs["scores"] = model.logits(batch, None)[..., : model.config.model.vocab_size]
    for handle in handles:
        handle.remove()
    return outputs


def coordinates(
    config: Config, text: torch.Tensor, steps: int, samples: int = 8
) -> dict[str, float]:
    """Return the root mean square of each part's activations after some steps, and of their change.

    An untied output layer starts at zero, as appendix D.2 recommends: with random weights, scores
    vanish with growing width, and are noise in the first steps of the narrow models.
    """
    training = MupTraining(config, text, samples)
    if config.model.untie_embeddings_and_output_weights:
        training.model.output_weight.detach().zero_()
    probe = next(batches(text, -1, samples, config.model.seq_length))
    before = activations(training.model, probe)
    for _ in range(steps):
        training.step(config.optimizer.lr)
    after = activations(training.model, probe)
    changes = {f"{name}, change": after[name] - x for name, x in before.items()}
    return {name: float(x.square().mean().sqrt()) for name, x in (after | changes).items()}


def mean_coordinates(
    configs: Sequence[Config], text: torch.Tensor, steps: int, seeds: int
) -> list[dict[str, float]]:
    """Return the coordinates of each configuration, as means over several seeds."""
    rows = []
    depths = len({config.model.num_layers for config in configs})
    for config in configs:
        runs = [coordinates(config.replace(seed=1 + seed), text, steps) for seed in range(seeds)]
        names = [n for n in runs[0] if depths == 1 or not n.split(",")[0].endswith(INNER)]
        rows.append({name: sum(run[name] for run in runs) / seeds for name in names})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("what", choices=["coordinates"])
    made.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    made.add_argument("--layers", type=int, nargs="+", default=[2])
    made.add_argument("--seeds", type=int, default=4)
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--standard", action="store_true", help="train without muP")
    options = made.parse_args(argv)
    fields = dict(lr=1e-3, weight_decay=0.0, untie_embeddings_and_output_weights=True)
    if not options.standard:
        fields |= MUP
        if len(options.layers) > 1:
            fields["mup_base_num_layers"] = options.layers[0]
    sizes = [(width, layers) for layers in options.layers for width in options.widths]
    configs = [configured(width, num_layers=n, **fields) for width, n in sizes]
    rows = mean_coordinates(configs, synthetic_text(), options.steps, options.seeds)
    return show(sizes, rows)


def show(sizes: Sequence[tuple[int, int]], rows: Sequence[dict[str, float]]) -> int:
    """Print how far each part has moved, and whether all sizes agree; return the exit code."""
    worst = 1.0
    print(f"{'width x layers':25}", *(f"{width}x{layers}".rjust(9) for width, layers in sizes))
    for name in rows[0]:
        values = [row[name] for row in rows]
        ratio = max(values) / min(values)
        worst = max(worst, ratio)
        print(f"{name:25}", *(f"{value:9.4f}" for value in values), f"  x {ratio:.3f}")
    print(f"largest ratio {worst:.3f}; allowed {LIMIT}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
