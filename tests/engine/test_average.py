"""Average of the weights, clipping of kinds, and betas that change, against float64 on layouts.

Matrices of the toy model are of the kind "output", the others vectors.
"""

from functools import partial

import numpy as np
import pytest
import torch

from megatron.engine.engine import Engine
from megatron.engine.optimizer_state import AVERAGE, StepValues
from megatron.kernels.ops.optimizer import FusedAdamW
from tests.engine import cases, toy
from tests.engine.test_engine import rounding
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow
LIMITS = {
    "vector": 0.02,
    "output": 0.3,
}  # the first is active in every step, clip_grad 0.25 after it
FIELDS = dict(
    ema_decay=0.9,
    clip_grad=0.25,
    clip_grad_by_kind=tuple(f"{kind}={limit}" for kind, limit in LIMITS.items()),
)
STEPS = 5
BAD = 2


def values(step):
    """Return the values of a step; in one, the average stays as it is."""
    new = 0.0 if step == 3 else 0.5 / (step + 1)
    return StepValues(cases.lr(step), cases.weight_decay(step), (0.9 - 0.1 * step, 0.95), new)


def train(rank, sizes, runs):
    """Take steps, one of them bad; return the state after each, and the weights that were used."""
    topology = join(*sizes)
    out = {}
    for name in runs:
        precision, stage, *narrow = name.split()
        # with our kernel, or its equivalent
        more = dict(exp_avg_dtype="bf16", optimizer_implementation="fused") if narrow else {}
        config = toy.config(precision, int(stage), **FIELDS, **more)
        engine = Engine(config, topology, toy.build(topology))
        assert isinstance(engine._basic, FusedAdamW) == bool(narrow)
        results = []
        states = [toy.state_pieces(engine)]
        weights = []
        for s in range(STEPS):
            toy.backward(engine, topology, s)
            if s == BAD:
                gradient = engine.gradient(next(engine.chunks.parameters()))
                if rank == topology.world.size - 1:
                    gradient.view(-1)[0] = float("inf")
            engine.start_step(values(s))
            if s == BAD + 1:  # before anyone has asked for the result of the step
                with engine.averaged_weights():
                    engine.wait_for_weights()
                engine.wait_for_weights()
            results.append(engine.finish_step())
            states.append(toy.state_pieces(engine))
        engine.wait_for_weights()
        weights.append(toy.weight_pieces(engine))
        with engine.averaged_weights():
            engine.wait_for_weights()
            weights.append(toy.weight_pieces(engine))
        engine.wait_for_weights()
        weights.append(toy.weight_pieces(engine))
        out[name] = {"results": results, "states": states, "weights": weights}
    return out


RUNS = {
    (1, 1, 1): ["fp32 1", "fp16 1 bf16"],
    (2, 2, 1): ["fp32 1", "bf16sums 0", "bf16sums 1 bf16"],
    (1, 1, 2): ["fp32 3", "bf16 3", "fp16 3", "bf16sums 2 bf16"],
}
"""Precision, ZeRO stage, and where the average is updated in AdamW's pass, type of its first moment."""


@pytest.fixture(scope="module")
def runs():
    return {
        sizes: run_processes(
            sizes[0] * sizes[1] * sizes[2], partial(train, sizes=sizes[:2], runs=some)
        )
        for sizes, some in RUNS.items()
    }


CASES = [(sizes, name) for sizes, some in RUNS.items() for name in some]


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_average_is_that_of_the_weights_after_each_step_that_counts(runs, sizes, name):
    """The weights are of order 1, and fp32 rounds a step of the average to 6e-8 of that."""
    ranks = [r[name] for r in runs[sizes]]
    states = [toy.assemble([r["states"][i] for r in ranks]) for i in range(STEPS + 1)]
    assert [x.skipped for x in ranks[0]["results"]] == [s == BAD for s in range(STEPS)]
    average = {key: states[0][f"master.{key}"].astype(np.float64) for key in toy.SHAPES}
    for s in range(STEPS + 1):
        for key in toy.SHAPES:
            if s and s - 1 != BAD:
                new = values(s - 1).new_in_average
                average[key] += new * (states[s][f"master.{key}"] - average[key])
            np.testing.assert_allclose(
                states[s][f"{AVERAGE}.{key}"], average[key], rtol=0, atol=4e-7, err_msg=f"{key} {s}"
            )
    assert all(np.ptp(states[-1][f"{AVERAGE}.{k}"] - states[-1][f"master.{k}"]) for k in average)


@pytest.mark.parametrize(("sizes", "name"), CASES)
def test_forward_passes_use_the_average_and_then_the_same_weights(runs, sizes, name):
    ranks = [r[name] for r in runs[sizes]]
    before, within, after = (toy.assemble([r["weights"][i] for r in ranks]) for i in range(3))
    state = toy.assemble([r["states"][-1] for r in ranks])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name[:4], torch.float32)
    toy.assert_same(after, before)
    for key in toy.SHAPES:
        rounded = torch.tensor(state[f"{AVERAGE}.{key}"]).float().to(dtype).double().numpy()
        np.testing.assert_array_equal(within[key], rounded, err_msg=key)


@pytest.mark.parametrize(("sizes", "name"), [case for case in CASES if "bf16" not in case[1]])
def test_kinds_are_clipped_before_all_are(runs, sizes, name):
    """Bounds as in test_engine."""
    ranks = [r[name] for r in runs[sizes]]
    reference = toy.Reference()
    for s in range(STEPS):
        if s == BAD:
            continue
        precision = name.split()[0]
        scale = ranks[0]["results"][s].loss_scale
        gradients = toy.summed_gradients(sizes, s, rounding(precision, scale))
        norm = torch.cat([g.view(-1) for g in gradients.values()]).norm().item()
        for r in ranks:
            assert r["results"][s].grad_norm == pytest.approx(norm, rel=2e-6)
        for kind, limit in LIMITS.items():
            some = [g for k, g in gradients.items() if (g.dim() == 1) == (kind == "vector")]
            kind_norm = torch.cat([g.view(-1) for g in some]).norm()
            assert kind_norm > limit
            for g in some:
                g *= limit / (kind_norm + 1e-6)
        v = values(s)
        for group in reference.optimizer.param_groups:
            group["betas"] = v.betas
        clipped = reference.step(gradients, v.lr, v.weight_decay, FIELDS["clip_grad"])
        assert clipped > 1.1 * FIELDS["clip_grad"]
    reference.check(toy.assemble([r["states"][-1] for r in ranks]), atol=4e-6)
