"""ZeRO stages 2 and 3: what has memory when. Values: tests/parity, tests/checkpoint."""

import dataclasses
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.config.pieces import Pieces
from megatron.engine import gradients
from megatron.engine.zero_plan import IN_FLIGHT, BucketOp
from megatron.errors import ConfigError
from megatron.model.gpt import GPTChunk, build_chunks
from tests.helpers.processes import run_processes
from tests.helpers.training import TrainingJob, configured

pytestmark = pytest.mark.slow
LAYERS = 6


def train(rank, stage, recompute):
    """Take steps; return how many layers had weights and gradients, at most, in the second."""
    fields = dict(num_layers=LAYERS, zero_stage=stage, global_batch_size=4)
    if recompute:
        fields |= dict(recompute_granularity="full", recompute_method="uniform")
    job = TrainingJob(configured(fields, 2))
    built = build_chunks(job.config, job.topology, job.context)
    before = sum(p.untyped_storage().nbytes() for p in built.parameters())
    (chunk,) = job.chunks.values()
    seen = {"weights": [], "gradients": []}

    def look(*_):
        for name, of in (
            ("weights", lambda p: p),
            ("gradients", lambda p: p.gradient_accumulator._total),
        ):
            count = sum(
                any(of(p).untyped_storage().nbytes() and p.dim() > 1 for p in layer.parameters())
                for layer in chunk.layers
            )
            seen[name].append(count)

    def watch(_, __, output):
        look()
        for x in output if isinstance(output, tuple) else (output,):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(look)

    for step in range(2):
        handles = [layer.register_forward_hook(watch) for layer in chunk.layers] if step else []
        job.train(step)
        for handle in handles:
            handle.remove()
        job.step()
    left = sum(b.gradients.untyped_storage().nbytes() for b in job.engine._update.buckets)
    return {"before": before, "left": left, **{name: max(some) for name, some in seen.items()}}


RUNS = [(stage, recompute) for stage in (2, 3) for recompute in (False, True)]


def on_two(rank):
    return [train(rank, *run) for run in RUNS], [of_users(rank, stage) for stage in (1, 3)]


def on_four(rank):
    return [outward(rank, *run) for run in ((2, False), (3, False), (3, True))]


@pytest.fixture(scope="module")
def runs():
    return run_processes(2, on_two), run_processes(4, on_four)


@pytest.mark.parametrize(("stage", "recompute"), RUNS)
def test_a_few_layers_have_memory_at_a_time(runs, stage, recompute):
    """Weights: of this layer and the next. Gradients: of this layer, and two under way."""
    for layers in (rank[RUNS.index((stage, recompute))] for rank, _ in runs[0]):
        assert layers["weights"] == (2 if stage == 3 else LAYERS)
        assert layers["gradients"] <= 4
        assert layers["left"] == 0
        assert (layers["before"] == 0) == (stage == 3)


def outward(rank, stage, twice):
    """Return how many sums over other ranks began in the passes of each step, of how many."""
    fields = dict(num_layers=2, zero_stage=stage, zero_shard_size=2, global_batch_size=8)
    job = TrainingJob(configured(fields, 4))
    reductions = []
    counts = []
    transfer = gradients.transfer

    def note(bucket, op):
        reductions.extend([bucket] * (op is BucketOp.REDUCE_BEYOND))
        return transfer(bucket, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "transfer", note)
        for step in range(2):
            job.train(step)
            if twice and step:
                try:
                    job.train(step)
                except ConfigError as error:
                    return str(error)
            in_passes = len(reductions)
            job.step()
            counts.append((in_passes, len(reductions), len(set(reductions))))
            reductions.clear()
    return counts


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_over_other_ranks_begin_in_the_last_backward_pass(runs, stage):
    """Not in the first step, in which contributions are counted."""
    for first, second in (rank[stage - 2] for rank in runs[1]):
        assert first[0] == 0 and second[0] == second[1] - IN_FLIGHT
        assert first[1] == first[2] == second[1] == second[2] > 2


def test_a_second_batch_after_the_sums_were_sent_is_refused(runs):
    messages = [rank[-1] for rank in runs[1]]
    assert len(set(messages)) == 1 and "--no-overlap-grad-reduce" in messages[0]


def of_users(rank, stage):
    """Return losses of users' models after a step, and warnings."""

    class Recomputes(GPTChunk):
        def _run_layers(self, hidden, call):
            for layer in self.layers:
                hidden = checkpoint(layer, hidden, call, use_reentrant=False)
            return hidden

    class Shares(GPTChunk):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.layers = torch.nn.ModuleList([*self.layers, *self.layers])

    class Trains(GPTChunk):
        """Its last layer alone."""

        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.requires_grad_(False)
            self.layers[-1].requires_grad_(True)

    results = []
    for model in (Recomputes, Shares, Trains):
        config = configured(dict(num_layers=3, zero_stage=stage, global_batch_size=4), 2)
        job = TrainingJob(dataclasses.replace(config, pieces=Pieces(model=model)))
        losses = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(3):
                losses.append(job.train(step))
                job.step()
        results.append((losses, sum("weight_users" in str(one.message) for one in warned)))
    return results


def test_models_of_users_train_alike_with_stage_3(runs):
    """They recompute by themselves, call a layer twice, or train their last layer."""
    for _, (stage_1, stage_3) in runs[0]:
        for (losses, _), (losses_3, warned) in zip(stage_1, stage_3, strict=True):
            assert losses_3 == pytest.approx(losses, rel=1e-5) and len(set(losses)) == 3
            assert not warned
