"""A step with experts beside the dense step of equal active FLOPs, and beside megatron-core's.

    python benchmarks/experts.py [--rounds 3] [--steps 4] [--experts 8] [--hidden 512] [--layers 6]

A token passes through two of the experts of each layer, each half as wide as the MLP of the dense
model. Every side is a training with AdamW in bf16 on one process with one thread; in a round each
side is started once, in turn. Figures are medians over the rounds; a ratio is the median of the
rounds' ratios, so that other work on the machine affects all sides. megatron-core is found as by
`make bench`, or in MEGATRON_CORE_FOLDER.

Predicted before measuring, for 8 experts, 6 layers of 512 and 4,096 tokens a step: with experts a step
takes 1.25 times the dense one. Its products have the same FLOPs in 8 parts of about 256 rows (0.1
more), a layer has 3 times the parameters for AdamW (0.1), and rows move to experts and back (0.05).
megatron-core's takes 1.5 times ours: its dense step takes 1.3 to 1.5 times ours, and it sorts and
copies rows in more passes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sides import run
from workloads import MEGATRON_CORE, SMALL, Case, Side

WITHOUT_BIASES = ("--disable-bias-linear",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 3), ("steps", 4), ("experts", 8), ("hidden", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layers", type=int, default=SMALL["layers"])
    args = parser.parse_args()
    ours, core = (
        Side("ours", flags=WITHOUT_BIASES),
        replace(MEGATRON_CORE, name="megatron-core, experts"),
    )
    settings = {**SMALL, "layers": args.layers, "hidden": args.hidden, "sides": ()}
    dense = Case(**settings, workload="E", name="dense", micro_batch=2, micro_batches=4)
    sparse = replace(dense, name="experts", experts=args.experts)
    sides = {
        "dense": (dense, ours),
        "experts": (sparse, replace(ours, name="ours, experts")),
        "megatron-core": (sparse, core),
    }
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(args.rounds):
            for name in list(sides)[:: 1 if index % 2 == 0 else -1]:
                outcome = run(
                    *sides[name], warm_up=1, steps=args.steps, threads=1, folder=Path(folder)
                )
                if outcome.reason:
                    print(f"{name}: {outcome.reason}")
                    sides.pop(name)
                else:
                    found.setdefault(name, []).append(statistics.median(outcome.step_s))
    for name, seconds in found.items():
        print(f"{name:<14} {statistics.median(seconds):8.3f} s a step", end="")
        for other in ("dense", "experts"):
            if name != other and len(found.get(other, ())) == len(seconds):
                ratio = statistics.median(a / b for a, b in zip(seconds, found[other], strict=True))
                print(f"  {ratio:5.2f} times {other}", end="")
        print()
    return 0 if {"dense", "experts"} <= found.keys() else 1


if __name__ == "__main__":
    sys.exit(main())
