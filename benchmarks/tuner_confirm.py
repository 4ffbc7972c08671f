"""What `tools/tune.py --confirm N` buys, without a machine: searches of made layouts with made noise.

    python benchmarks/tuner_confirm.py [--seeds 150]          half a minute, the same figures everywhere

Each search has tried every layout once. Printed is how far behind the best what it names truly is, in the mean and in
19 of 20 searches, after so many more trials that confirming (megatron/tuning/confirming.py) chooses; and how many of
eight it asked for.
"""
from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.tuning.confirming import in_turn
from megatron.tuning.layouts import best_layout
from megatron.tuning.types import CONFIRM, DONE, Candidate, Result, Trial

RATE = "tokens_per_s"
LAYOUTS, MOST = 62, 8
SHOWN = (0, 3, 5, 8)
Chance = random.Random


def restless(chance: Chance) -> float:
    """Error of log(step time) of a trial on the virtual machine of docs/tuning.md: now and then it stands still."""
    return chance.gauss(0, 0.025) + (chance.uniform(0.06, 0.17) if chance.random() < 1 / 14 else 0.0)


def quiet(chance: Chance) -> float:
    return chance.gauss(0, 0.01)


def one_best(chance: Chance) -> list[float]:
    """log(step time): one layout, then a gap as in the measured space."""
    return [0.0, *(0.035 + 2 * chance.random() ** 1.5 for _ in range(LAYOUTS - 1))]


def crowded(chance: Chance) -> list[float]:
    """Some layouts within each per cent."""
    return [0.0, *(0.4 * chance.random() for _ in range(LAYOUTS - 1))]


def search(chance: Chance, costs: Sequence[float], noise: Callable[[Chance], float]) -> tuple[list[float], int]:
    """How far behind the best what is named is, after 0, 1, ... confirming trials; and how many there were."""
    candidates = [Candidate(i, f"k={i}", {"k": i}, (), 8, 1, 1000) for i in range(len(costs))]

    def measured(number: int, index: int, by: str) -> Trial:
        step_s = math.exp(costs[index] + noise(chance))
        spread = abs(chance.gauss(0.03 if noise is restless else 0.01, 0.01))
        result = Result(DONE, step_s=step_s, spread=spread, steady=4)
        return Trial(number, candidates[index], by, f"trials/{number:04}", result=result)

    def behind() -> float:
        named = best_layout(trials, RATE)
        assert named is not None, "every trial has figures"
        return math.expm1(costs[named.candidate.index])

    order = chance.sample(range(len(costs)), len(costs))
    trials = [measured(number, index, "made") for number, index in enumerate(order, 1)]
    found, keys = [behind()], {candidate.key: candidate.index for candidate in candidates}
    while len(found) <= MOST and (turn := in_turn(trials, RATE, keys)):
        trials.append(measured(len(trials) + 1, keys[turn[0]], CONFIRM))
        found.append(behind())
    return found + found[-1:] * (MOST + 1 - len(found)), len(trials) - len(costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=150, help="searches of each kind (default 150)")
    seeds = range(parser.parse_args().seeds)
    print(f"{'layouts':10} {'noise':10}" + "".join(f"{f'--confirm {n}':>18}" for n in SHOWN) + f"{'asked for':>12}")
    for costs in (one_best, crowded):
        for noise in (restless, quiet):
            chances = [random.Random(seed) for seed in seeds]
            found = [search(chance, costs(chance), noise) for chance in chances]
            cells = []
            for n in SHOWN:
                losses = sorted(losses[n] for losses, _ in found)
                cells.append(f"{100 * statistics.mean(losses):.2f} %, {100 * losses[19 * len(losses) // 20]:.1f} %")
            asked = statistics.mean(used for _, used in found)
            print(f"{costs.__name__:10} {noise.__name__:10}" + "".join(f"{c:>18}" for c in cells) + f"{asked:12.1f}")


if __name__ == "__main__":
    main()
