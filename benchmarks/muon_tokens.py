"""Tokens that Muon needs to reach Adam's loss on a text: both tuned on the same budget, three seeds.

    python benchmarks/muon_tokens.py TEXT --folder F [--steps 2000] [--small]

1. Tuning: one run of --steps for each optimizer and each of the same number of learning rates
   (RATES), with the first seed. The best validation loss at the end wins.
2. For each seed, one run of both with their best rate. Adam's loss is that at its end. Muon's tokens
   are those at which its validation loss first is as low, interpolated between two evaluations; if
   it never is, the ratio is not known.

The model reads bytes (examples/extend/data.py) and has 4 layers of 128. The learning rate is constant
after a warm-up, so that a loss before the end is that of a shorter run. Finished runs are kept in
the folder, and a second start goes on after them. --small tries the recipe in some minutes, with
figures that mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from megatron.metrics_file import read_records  # noqa: E402

SEEDS = (1, 2, 3)
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
OPTIMIZERS = {
    "adam": "--adam-beta2 0.95",
    "muon": "--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2 "
    "--muon-fp32-matmul-prec high --adam-beta2 0.95",
}
MODEL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 256 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --micro-batch-size 16 --global-batch-size 16"
)
SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 256 "
    "--micro-batch-size 4 --global-batch-size 4"
)
TRAINING = (
    "--lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 --eval-iters 20 --num-workers 0 "
    f"--log-interval 100 --pieces {ROOT / 'examples/extend/data.py'}"
)

Losses = list[tuple[int, float]]
"""Training tokens and validation loss of each evaluation."""


def train(args: argparse.Namespace, optimizer: str, rate: float, seed: int) -> Losses:
    """Train, unless it has been done, and return the losses."""
    metrics = args.folder / f"{optimizer}-{rate:g}-{seed}.jsonl"
    if not metrics.exists():
        words = f"{SMALL if args.small else MODEL} {TRAINING} {OPTIMIZERS[optimizer]}".split()
        unfinished = metrics.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        words += f"--lr {rate:g} --seed {seed} --train-iters {args.steps}".split()
        words += f"--lr-warmup-iters {args.steps // 20} --eval-interval {args.steps // 40}".split()
        words += ["--data-path", str(args.text), "--metrics-file", str(unfinished)]
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *words],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        print(f"{metrics.stem}: {time.perf_counter() - start:.0f} s", flush=True)
        unfinished.rename(metrics)
    records = read_records(metrics, "validation")
    return [(r["consumed_tokens"], r["lm_loss"]) for r in records if r["dataset"] == "valid"]


def tokens_to(loss: float, losses: Losses) -> float | None:
    """Return the tokens at which `losses` reach a loss; None if they do not.

    >>> tokens_to(2.5, [(100, 4.0), (200, 3.0), (300, 2.0)])
    250.0
    """
    for (before, higher), (tokens, lower) in itertools.pairwise(losses):
        if lower <= loss < higher:
            return before + (tokens - before) * (higher - loss) / (higher - lower)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.steps = 80
    args.folder.mkdir(parents=True, exist_ok=True)
    rates = RATES[2:4] if args.small else RATES
    best = {}
    for optimizer in OPTIMIZERS:
        ends = {rate: train(args, optimizer, rate, SEEDS[0])[-1][1] for rate in rates}
        best[optimizer] = min(ends, key=ends.__getitem__)
        shown = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in ends.items())
        print(f"{optimizer}: losses by learning rate {shown}; best {best[optimizer]:g}", flush=True)
    ratios = []
    for seed in SEEDS:
        adam, muon = (train(args, name, best[name], seed) for name in OPTIMIZERS)
        tokens, loss = adam[-1]
        needed = tokens_to(loss, muon)
        ratios += [] if needed is None else [needed / tokens]
        print(
            json.dumps(
                {
                    "seed": seed,
                    "tokens": tokens,
                    "adam_loss": loss,
                    "muon_loss": muon[-1][1],
                    "muon_tokens_to_adam_loss": needed,
                }
            ),
            flush=True,
        )
    if ratios:
        print(
            f"tokens of Muon over Adam's: {statistics.mean(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}, {len(ratios)} of {len(SEEDS)} seeds)"
        )


if __name__ == "__main__":
    main()
