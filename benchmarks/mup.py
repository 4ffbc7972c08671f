"""Prove muP: sizes of activations at several widths and depths, and the best learning rate of each.

    python benchmarks/mup.py coordinates [--widths 128 256 ...] [--layers 2 4 ...] [--standard]
    python benchmarks/mup.py rates [--widths 64 512 ...] [--text FILE] [--standard]

`coordinates` trains a few steps and prints the activations of each part of the model, and how far
they have moved, as roots of mean squares: the coordinate check of Yang et al., arXiv 2203.03466,
appendix D.1. With several depths only what all layers together add to the residual stream. Exit
code 1 if the largest of any part is more than 10 % above the smallest. `rates` trains with each
learning rate 2^x of --exponents and prints the one of the lowest loss on text that was not trained
on, by a parabola through the three lowest points; with --standard without muP. All runs are of one
process on the CPU; the base model has a width of 64.
"""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron.config import Config  # noqa: E402
from megatron.data.sampler import MicroBatch  # noqa: E402
from megatron.engine.buckets import bucket_rule  # noqa: E402
from megatron.engine.optimizer import (  # noqa: E402
    build_optimizer,
    parameter_groups,
    unique_parameters,
)
from megatron.model.gpt import GPTChunk, build_chunks  # noqa: E402
from megatron.parallel.layout import Layout  # noqa: E402
from megatron.parallel.sharding import sharding_of  # noqa: E402
from megatron.parallel.topology import Topology  # noqa: E402

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
    """Return tokens of which each depends on the one before: int64 [tokens].

    A token has eight possible successors, of unequal probability. muP is about widths far above the
    number of different inputs of a layer; the first layer has one for each kind of token, and their
    embeddings overlap by 1 / sqrt(width).
    """
    draw = torch.Generator().manual_seed(0)
    successors = torch.randint(0, kinds, (kinds, 8), generator=draw)
    ranks = (torch.rand(tokens, generator=draw).square() * 8).long().tolist()
    table, found, last = successors.tolist(), [], 0
    for rank in ranks:
        last = table[last][rank]
        found.append(last)
    return torch.tensor(found)


def batches(text: torch.Tensor, seed: int, samples: int, length: int) -> Iterator[MicroBatch]:
    """Yield micro-batches from random places of the text."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length - 1, (samples, 1), generator=draw)
        rows = text[starts + torch.arange(length + 1)]
        yield MicroBatch(rows[:, :-1], rows[:, 1:], torch.ones(samples, length), None, None, 0)


class Training:
    """A model, its optimizer and its data in one process."""

    def __init__(self, config: Config, text: torch.Tensor, samples: int) -> None:
        topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
        chunk = build_chunks(config, topology)["0"]
        assert isinstance(chunk, GPTChunk)
        self.model, self.config = chunk.train(), config
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

    Of its layers, those in the middle and at the end, which models of any depth have.
    """
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            found[name] = (output[0] if isinstance(output, tuple) else output).clone()

        return hook

    parts = {"embedding": model.word_embeddings, "final norm": model.final_layernorm}
    for place, i in (("middle", len(model.layers) // 2 - 1), ("last", -1)):
        layer: Any = model.layers[i]
        parts |= {f"{place} layer": layer, f"{place} MLP": layer.mlp}
        attention = layer.self_attention
        parts |= {f"{place} attention": attention, f"{place} QKV": attention.query_key_value}
    handles = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    found["scores"] = model.logits(batch, None)[..., : model.config.model.vocab_size]
    for handle in handles:
        handle.remove()
    return found


def coordinates(
    config: Config, text: torch.Tensor, steps: int, samples: int = 8
) -> dict[str, float]:
    """Return the activations of each part after some steps, and their change: roots of mean squares.

    An output layer of its own starts with zeros, as appendix D.2 recommends: the scores of random
    weights vanish with growing width, and are noise in the first steps of the narrow models.
    """
    training = Training(config, text, samples)
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
    found, depths = [], len({config.model.num_layers for config in configs})
    for config in configs:
        runs = [coordinates(config.replace(seed=1 + seed), text, steps) for seed in range(seeds)]
        names = [n for n in runs[0] if depths == 1 or not n.split(",")[0].endswith(INNER)]
        found.append({name: sum(run[name] for run in runs) / seeds for name in names})
    return found


# ---- the best learning rate


def loss_of(config: Config, text: torch.Tensor, rate: float, steps: int, samples: int) -> float:
    """Train on nine tenths of the text and return the loss on the rest.

    A tenth of the steps is a warm-up; then the rate falls to zero in a straight line.
    """
    part = len(text) * 9 // 10
    training, warm_up = Training(config, text[:part], samples), max(1, steps // 10)
    for i in range(steps):
        training.step(rate * min((i + 1) / warm_up, (steps - i) / (steps - warm_up)))
    unseen = batches(text[part:], 1, 16, config.model.seq_length)
    with torch.no_grad():
        return sum(float(training.model(next(unseen), None)) for _ in range(4)) / 4


def lowest(points: dict[float, float]) -> float:
    """Return the exponent of the lowest loss by a parabola through the three lowest neighbours."""
    best = min(points, key=lambda x: points[x])
    order = sorted(points)
    i = order.index(best)
    if not 0 < i < len(order) - 1:
        return best
    (x0, x1, x2), (y0, y1, y2) = order[i - 1 : i + 2], (points[x] for x in order[i - 1 : i + 2])
    bend = (y2 - y1) / (x2 - x1) - (y1 - y0) / (x1 - x0)
    return (x0 + x1) / 2 - (y1 - y0) / (x1 - x0) * (x2 - x0) / 2 / bend


def best_rate(width: int, mup: bool, text: torch.Tensor, a: argparse.Namespace) -> float:
    """Train with each rate 2^exponent until the loss rises; return the best exponent."""
    points: dict[float, float] = {}
    for exponent in a.exponents:
        start = time.perf_counter()
        fields = dict(untie_embeddings_and_output_weights=True, **(MUP if mup else {}))
        loss = loss_of(configured(width, **fields), text, 2.0**exponent, a.steps or 150, a.samples)
        points[exponent] = loss
        seconds = time.perf_counter() - start
        print(f"  width {width} rate 2^{exponent:g}: loss {loss:.4f} ({seconds:.0f} s)", flush=True)
        if loss > min(points.values()) + 0.1:
            break
    return lowest(points)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("coordinates", "rates"))
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--layers", type=int, nargs="+", default=[2])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--samples", type=int, default=4, help="in a batch")
    parser.add_argument("--standard", action="store_true", help="without muP")
    parser.add_argument("--kinds", type=int, default=16, help="of tokens in the text made up")
    parser.add_argument("--text", type=Path, help="a text whose bytes are the tokens, below 128")
    parser.add_argument(
        "--exponents", type=float, nargs="+", default=[x / 2 for x in range(-18, -5)]
    )
    parser.add_argument("--fields", nargs="*", default=[], metavar="NAME=VALUE", help="settings")
    a = parser.parse_args(argv)
    text = synthetic_text(kinds=a.kinds)
    if a.text:
        text = torch.frombuffer(bytearray(a.text.read_bytes()), dtype=torch.uint8).long() % 128
    if a.what == "rates":
        rates = {width: best_rate(width, not a.standard, text, a) for width in a.widths}
        moved = 2.0 ** (max(rates.values()) - min(rates.values()))
        shown = ", ".join(f"{width}: {2.0**x:.2e}" for width, x in rates.items())
        print(f"{'standard' if a.standard else 'muP'}: best rates {shown}; moved by {moved:.2f}")
        return 0
    fields = {o.partition("=")[0]: ast.literal_eval(o.partition("=")[2]) for o in a.fields}
    usual = dict(lr=1e-3, weight_decay=0.0, untie_embeddings_and_output_weights=True)
    fields = usual | fields | ({} if a.standard else MUP)
    if len(a.layers) > 1 and not a.standard:
        fields["mup_base_num_layers"] = a.layers[0]
    sizes = [(width, layers) for layers in a.layers for width in a.widths]
    configs = [configured(width, **{**fields, "num_layers": n}) for width, n in sizes]
    rows = mean_coordinates(configs, text, a.steps or 5, a.seeds)
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
