"""Made-up searches whose truth is a formula: candidates with real flags, trials with figures, failures and noise."""
from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

from megatron.planning.search.space import Rejections
from megatron.tuning.types import DONE, FAILED, INVALID, OUT_OF_MEMORY, Candidate, Parameter, Result, Trial

GIB = 2**30
MODEL = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 512 --global-batch-size 64"
).split()
PARAMETERS = (
    Parameter("tp", (1, 2, 4)),
    Parameter("pp", (1, 2, 4, 8)),
    Parameter("mbs", (1, 2, 4, 8)),
    Parameter("sp", (False, True), ordered=False),
    Parameter("recompute", ("none", "selective:mlp_act+layernorm", "full:uniform:1"), ordered=False),
)
_AGAIN = {"none": 1.0, "selective:mlp_act+layernorm": 1.05, "full:uniform:1": 1.31}
_HELD = {"none": 1.0, "selective:mlp_act+layernorm": 0.6, "full:uniform:1": 0.2}


def step_s(values: dict[str, Any]) -> float:
    """The truth: a tensor group talks, a pipeline has a bubble, small micro-batches are slow, recomputation costs."""
    replicas = 8 // (values["tp"] * values["pp"])
    micro_batches = 64 // (replicas * values["mbs"])
    bubble = (values["pp"] - 1) / micro_batches
    work = (1 + 0.35 / values["mbs"]) * (1 + 0.12 * math.log2(values["tp"]) * (0.8 if values["sp"] else 1))
    return 1.2 * work * (1 + bubble) * _AGAIN[values["recompute"]]


def memory_bytes(values: dict[str, Any]) -> float:
    model = 9 / (values["tp"] * values["pp"])
    return (1 + model + 0.9 * values["mbs"] * _HELD[values["recompute"]] / (values["tp"] if values["sp"] else 1)) * GIB


def flags_of(values: dict[str, Any]) -> tuple[str, ...]:
    kind, *rest = str(values["recompute"]).split(":")
    more = {
        "none": [],
        "selective": ["--recompute-granularity", "selective", "--recompute-modules", *"".join(rest).split("+")],
        "full": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    }[kind]
    layout = {"tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "micro-batch-size": "mbs"}
    words = [word for flag, name in layout.items() for word in (f"--{flag}", str(values[name]))]
    return (*MODEL, *words, *(["--sequence-parallel"] if values["sp"] else []), *more)


def candidates(seed: int = 0, error: float = 0.06, parameters: Sequence[Parameter] = PARAMETERS) -> list[Candidate]:
    """All valid combinations on 8 processes; the planner's step times are lognormal errors away from the truth."""
    chance, found = random.Random(seed), list[Candidate]()
    fixed = {"tp": 2, "pp": 2, "mbs": 4, "sp": False, "recompute": "none"}
    for chosen in itertools.product(*(p.values for p in parameters)):
        own = {p.name: value for p, value in zip(parameters, chosen, strict=True)}
        values = fixed | own
        replicas = 8 // (values["tp"] * values["pp"])
        if not replicas or 64 % (replicas * values["mbs"]) or (values["sp"] and values["tp"] == 1):
            continue
        key = ",".join(f"{name}={value}" for name, value in own.items())
        predicted = step_s(values) * math.exp(chance.gauss(0.1, error))
        found.append(Candidate(len(found), key, own, flags_of(values), 8, 1, 64 * 64, memory_bytes(values), predicted))
    return found


def trial(number: int, candidate: Candidate, by: str, chance: random.Random, capacity: float = 8 * GIB) -> Trial:
    """What a run of it gives: out of memory beyond `capacity`, now and then a hang or figures that contradict."""
    values = {"tp": 2, "pp": 2, "mbs": 4, "sp": False, "recompute": "none", **candidate.values}
    made = Trial(number, candidate, by, f"trials/{number:04d}", ("node1",), 1000.0 * number, 1000.0 * number + 60)
    if memory_bytes(values) > capacity:
        result = Result(FAILED, OUT_OF_MEMORY, "rank 3: CUDA out of memory. Tried to allocate 2.00 GiB")
    elif chance.random() < 0.03:
        result = Result(FAILED, "hang", "no step for 60 s after iteration 4")
    else:
        seconds = step_s(values) * math.exp(chance.gauss(0, 0.01))
        rate = candidate.tokens / seconds
        result = Result(
            DONE, step_s=seconds, spread=abs(chance.gauss(0, 0.02)), steady=5, tokens_per_s=rate,
            tokens_per_s_per_device=rate / 8, model_tflops=rate / 1e5, hardware_tflops=rate / 8e4,
            memory_bytes=int(0.95 * memory_bytes(values)),
        )  # fmt: skip
        if chance.random() < 0.02:
            result = dataclasses.replace(result, status=INVALID, reason="the global batch is 32, not 64")
    return dataclasses.replace(made, result=result)


def trials(
    count: int, seed: int = 0, parameters: Sequence[Parameter] = PARAMETERS
) -> tuple[list[Candidate], list[Trial]]:
    """A search that tries the planner's first four, then candidates by chance with a leaning to good ones."""
    chance, everything = random.Random(seed), candidates(seed, parameters=parameters)
    ranked = sorted(everything, key=lambda c: c.step_s or 0.0)
    order, rest = ranked[:4], ranked[4:]
    while rest and len(order) < count:
        order.append(rest.pop(min(chance.randrange(len(rest)) for _ in range(2))))
    made = [trial(i, c, "planner" if i <= 4 else "deephyper", chance) for i, c in enumerate(order[:count], 1)]
    return everything, made


def rejections() -> Rejections:
    found = Rejections()
    found.add("combinations", "tp * pp <= 8", "tp=4,pp=4,mbs=1", times=48)
    found.add("combinations", "the batch does not divide", "tp=1,pp=1,mbs=16", times=12)
    return found
