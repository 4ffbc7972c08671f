"""The executor on 2 and 4 processes equals one process without a pipeline, in float64."""

import gc
import os
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.config.parallel import V_SHAPED
from megatron.errors import ConfigError, LaunchError
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.flight import FlightRecorder, FlightState, PendingCall
from megatron.parallel.topology import Group, Topology
from megatron.pipeline.executor import SENDS_IN_FLIGHT, Executor, StageMessages
from megatron.pipeline.orders import Instruction, Op, stage_owners, stages_of_rank
from megatron.pipeline.schedule import build_schedule
from tests.helpers.groups import join
from tests.helpers.processes import run_processes, run_processes_raw
from tests.pipeline.test_orders import gpipe, whole_v
from tools.show_schedule import peak_activations

WIDTH = 6
ROWS = 3


class DeferrableLinear(torch.autograd.Function):
    """Linear layer x @ w.T whose weight gradient goes to the queue while it collects."""

    @staticmethod
    def forward(ctx, x, weight, queue):
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        (gradient,) = gradients

        def compute():
            weight.grad = (
                gradient.t() @ x if weight.grad is None else weight.grad + gradient.t() @ x
            )

        if ctx.queue.deferring:
            ctx.queue.add(compute)
            return gradient @ weight, None, None
        return gradient @ weight, gradient.t() @ x, None


class Stage(torch.nn.Module):
    """Stage tanh(hidden w^T + b); the first reads the micro-batch, the last returns a loss."""

    def __init__(self, stage, stages, queue=None):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        draw = torch.randn(WIDTH + 1, WIDTH, generator=generator, dtype=torch.float64)
        self.weight = torch.nn.Parameter(draw[:-1].clone())
        self.bias = torch.nn.Parameter(draw[-1].clone())
        self.last = stage == stages - 1
        self.queue = queue or WeightGradients()

    def forward(self, batch, hidden):
        x = batch["x"] if hidden is None else hidden
        y = torch.tanh(DeferrableLinear.apply(x, self.weight, self.queue) + self.bias)
        return (y - batch["y"]).square().mean() if self.last else y


def micro_batches(count):
    generator = torch.Generator().manual_seed(99)
    shape = (ROWS, WIDTH)
    return [
        {k: torch.randn(shape, generator=generator, dtype=torch.float64) for k in ("x", "y")}
        for _ in range(count)
    ]


def reference(stages, count, scale, weights):
    """Return losses and gradients by one autograd graph over all micro-batches."""
    chunks = [Stage(g, stages) for g in range(stages)]
    losses = []
    for batch in micro_batches(count):
        hidden = None
        for chunk in chunks:
            hidden = chunk(batch, hidden)
        assert hidden is not None
        losses.append(hidden)
    factors = weights or [1 / count] * count
    total = sum(loss * factor for loss, factor in zip(losses, factors, strict=True)) * scale
    total.backward()
    return [loss.item() for loss in losses], gradients(dict(enumerate(chunks)))


def gradients(chunks):
    result = {}
    for g, chunk in chunks.items():
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None
            result[f"{g}.{name}"] = parameter.grad.numpy()
    return result


def make(topology, schedule, chunks, **options):
    size = topology.pipeline.size
    topology = replace(topology, owners=stage_owners(schedule, size, chunks))
    queue = WeightGradients()
    mine = stages_of_rank(schedule, size, chunks, topology.pipeline.rank)
    stages = {stage: Stage(stage, size * chunks, queue) for stage in mine}
    return Executor(
        topology, stages, schedule, ((ROWS, WIDTH), torch.float64), queue, **options
    ), stages


CASES = {
    2: [
        ("1f1b", 1, 1),
        ("1f1b", 1, 5),
        ("interleaved", 2, 4),
        ("interleaved", 3, 3),
        ("interleaved", 2, 1),
        ("zb-h1", 1, 5),
        ("zb-h1", 1, 1),
        ("v-half", 2, 5),
    ],
    4: [
        ("1f1b", 1, 3),
        ("1f1b", 1, 9),
        ("interleaved", 2, 8),
        ("interleaved", 2, 7),
        ("interleaved", 2, 2),
        ("zb-h1", 1, 7),
        ("zb-h1", 1, 2),
        (gpipe, 2, 5),
        ("zb-v", 2, 1),
        ("v-half", 2, 9),
        ("v-min", 2, 7),
        ("dualpipev", 2, 9),
        (whole_v, 2, 6),
    ],
}


def every_case(topology):
    size = topology.pipeline.size
    results = []
    for name, chunks, count in CASES[size]:
        executor, stages = make(topology, name, chunks)
        batches = micro_batches(count)
        evaluated = [loss.item() for loss in executor.evaluate(batches)]
        assert all(p.grad is None for stage in stages.values() for p in stage.parameters())
        trained = executor.train(batches, loss_scale=8.0)
        assert not any(loss.requires_grad for loss in trained)
        first = {k: v.copy() for k, v in gradients(stages).items()}
        for stage in stages.values():
            stage.zero_grad()
        weights = [0.5 + i for i in range(count)]
        executor.train(batches, loss_weights=weights)
        results.append(([loss.item() for loss in trained], first, gradients(stages), evaluated))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(size, runs):
    """Losses and gradients are those of one process, in float64.

    The order of summation over micro-batches differs, so equality is to rounding.
    """
    by_rank = [results["cases"] for results in runs[size]]
    for number, (name, chunks, count) in enumerate(CASES[size]):
        stages = size * chunks
        losses, expected_gradients = reference(stages, count, 8.0, None)
        _, weighted = reference(stages, count, 1.0, [0.5 + i for i in range(count)])
        seen = set()
        for rank in range(size):
            trained, first, second, evaluated = by_rank[rank][number]
            folded = name is whole_v or name in V_SHAPED
            expected = losses if rank == (0 if folded else size - 1) else []
            np.testing.assert_allclose(trained, expected, rtol=1e-14)
            np.testing.assert_allclose(evaluated, expected, rtol=1e-14)
            for key, gradient in first.items():
                np.testing.assert_allclose(
                    gradient,
                    expected_gradients[key],
                    rtol=1e-12,
                    atol=1e-14,
                    err_msg=f"{name} {key}",
                )
                np.testing.assert_allclose(
                    second[key], weighted[key], rtol=1e-12, atol=1e-14, err_msg=f"{name} {key}"
                )
            seen |= first.keys()
        assert seen == expected_gradients.keys()


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1)])
def test_one_rank_needs_no_process_group(schedule, chunks):
    executor, stages = make(Topology.create(), schedule, chunks)
    losses = [loss.item() for loss in executor.train(micro_batches(3), loss_scale=2.0)]
    expected_losses, expected = reference(chunks, 3, 2.0, None)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-14)
    actual = gradients(stages)
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        np.testing.assert_allclose(gradient, expected[key], rtol=1e-12, atol=1e-14)


def test_a_split_pass_without_a_queue_is_refused_before_the_first_pass():
    def splits_the_second(size, chunks, count, rank):
        backward = [[Op.BACKWARD], [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]]
        ops = [[Op.FORWARD, *backward[i > 0]] for i in range(count)]
        return [Instruction(op, 0, i) for i, of_batch in enumerate(ops) for op in of_batch]

    message = ((ROWS, WIDTH), torch.float64)
    stage = Stage(0, 1)
    executor = Executor(Topology.create(), {0: stage}, splits_the_second, message)
    executor.train(micro_batches(1))
    stage.zero_grad()
    with pytest.raises(ConfigError, match="weight_gradients"):
        executor.train(micro_batches(2))
    assert stage.weight.grad is None


class Alive:
    """Count objects that are alive."""

    def __init__(self):
        self.now = self.peak = 0

    def watch(self, thing):
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(thing, self._gone)
        return thing

    def _gone(self):
        self.now -= 1


class Box:
    def __init__(self, value):
        self.value = value


class InWatchedMemory(torch.autograd.Function):
    """Identity, with an output whose memory is watched."""

    @staticmethod
    def forward(ctx, x, alive):
        return torch.from_numpy(alive.watch(x.numpy().copy()))

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], None


def count_live(topology, name, chunks, count):
    topology = replace(topology, owners=stage_owners(name, 2, chunks))
    saved = Alive()
    outputs = Alive()

    def chunk_of(stage):
        """Return a chunk with one saved tensor per forward pass and no parameter.

        Only the next stage needs its output.
        """

        def chunk(batch, hidden):
            x = torch.zeros(2, requires_grad=True) if hidden is None else hidden
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: saved.watch(Box(t)), lambda box: box.value
            ):
                y = x.exp()
            return y.sum() if stage == 2 * chunks - 1 else InWatchedMemory.apply(y + batch, outputs)

        return chunk

    mine = stages_of_rank(name, 2, chunks, topology.pipeline.rank)
    stages = {stage: chunk_of(stage) for stage in mine}
    executor = Executor(topology, stages, name, ((2,), torch.float32), WeightGradients())
    gc.disable()  # tensors that wait for the collector are not freed at once
    executor.train([torch.ones(2)] * count)
    gc.enable()
    return saved.peak, saved.now, outputs.peak, outputs.now


LIVE = [("1f1b", 1, 5), ("interleaved", 4, 9), ("zb-h1", 1, 5), ("v-min", 2, 9)]


@pytest.mark.slow
@pytest.mark.parametrize("name, chunks, count", LIVE)
def test_memory_is_freed_as_the_schedule_says(name, chunks, count, runs):
    counts = [rank[name] for rank in runs[2]]
    # The chunks have no weights, so a split backward pass frees everything in its first half.
    limits = peak_activations(build_schedule(name, 2, chunks, count), until_weights=False)
    assert [(peak, left) for peak, left, _, _ in counts] == [(limit, 0) for limit in limits]
    # An output is freed when it has been sent, long before its backward pass: in the interleaved
    # case rank 0 keeps the graphs of twelve forward passes, and the outputs in flight and of the
    # latest one.
    assert all(peak <= SENDS_IN_FLIGHT + 1 and left == 0 for _, _, peak, left in counts)
    assert name != "interleaved" or limits[0] == 12 > SENDS_IN_FLIGHT + 1


def other_size_for_evaluation(topology):
    """Evaluate with another size: the shape of messages is a function of the micro-batch.

    Batches of different sizes use one executor.
    """
    executor, _ = make(topology, "1f1b", 1)
    executor.message = (lambda batch: batch["x"].shape, torch.float64)
    batches = micro_batches(3)
    executor.train(batches)
    larger = [{k: torch.cat([batch[k] for batch in batches]) for k in ("x", "y")}]
    return [loss.item() for loss in executor.evaluate(larger)]


def on_two(rank):
    topology = join(pipeline=2)
    out = {name: count_live(topology, name, chunks, count) for name, chunks, count in LIVE}
    return out | {"cases": every_case(topology), "sizes": other_size_for_evaluation(topology)}


def on_four(rank):
    return {"cases": every_case(join(pipeline=4))}


@pytest.fixture(scope="module")
def runs():
    """Return the results of the ranks of pipelines of two and of four."""
    return {2: run_processes(2, on_two), 4: run_processes(4, on_four)}


@pytest.mark.slow
def test_message_shape_may_follow_the_micro_batch(runs):
    losses, _ = reference(2, 3, 1.0, None)
    by_rank = [rank["sizes"] for rank in runs[2]]
    assert by_rank[0] == []
    # The batches are equal: the mean of means.
    np.testing.assert_allclose(by_rank[1], [np.mean(losses)], rtol=1e-14)


def wrong_output(rank):
    executor, _ = make(join(pipeline=2), "1f1b", 1)
    executor.message = ((ROWS, WIDTH + 1), torch.float64)
    executor.train(micro_batches(1))


@pytest.mark.slow
def test_an_output_of_another_shape_is_refused():
    """The other rank sees the connection of the one that has ended, and need not wait for it."""
    (_, first), (_, second) = run_processes_raw(2, wrong_output)
    assert first.startswith("ConfigError: ") and second.startswith("LaunchError: ")
    assert all(
        word in first for word in ("stage 0", f"[{ROWS}, {WIDTH}]", f"[{ROWS}, {WIDTH + 1}]")
    )


def die_in_the_middle(rank, dying):
    topology = join(pipeline=3)
    executor, stages = make(topology, "1f1b", 1)
    if rank == dying:
        calls = iter(range(100))

        def stop(*_):
            if next(calls) == 2:
                os._exit(3)

        stages[rank].register_forward_pre_hook(stop)
    executor.train(micro_batches(8))


@pytest.mark.slow
def test_a_dead_neighbour_is_named_on_both_sides():
    """A dead neighbour is named on both sides.

    So is a hanging one when its group's time limit has passed: torch raises the same error then.
    """
    outcomes = run_processes_raw(3, die_in_the_middle, 1)
    for rank in (0, 2):
        ok, text = outcomes[rank]
        assert not ok and text.startswith("LaunchError: ")
        assert f"rank {rank}" in text and "rank 1" in text, text


class Waited:
    """Stand-in for the work of dist.irecv; its wait has reached the time limit."""

    def wait(self):
        raise RuntimeError("Timed out waiting 10000ms for recv operation to complete")


def test_messages_are_recorded_and_blamed_by_global_ranks(monkeypatch):
    """Record and blame messages by global ranks, for the reports of hangs.

    The neighbours of pipeline rank 1 of 3 are the global ranks 2 and 10.
    """
    flight = FlightRecorder()
    flight.describe(6, 1, "n")
    seen = []

    def post(tensor, peer, group):
        state = FlightState.read(bytes(flight.buffer))
        seen.append((peer, state and state.call))
        return Waited()

    monkeypatch.setattr("torch.distributed.irecv", post)
    exchange = StageMessages(Group((2, 6, 10), 1, None, "pipeline", flight), range(3))
    for operation, stage, peer in ((Op.RECV_FORWARD, 1, 2), (Op.RECV_BACKWARD, 1, 10)):
        instruction = Instruction(operation, stage, 0)
        exchange.receive(instruction, torch.empty(4))
        assert seen.pop() == (peer, PendingCall("receive", "pipeline", peer, 16, 0))
        with pytest.raises(LaunchError) as caught:
            exchange.take(instruction)
        assert f"rank {peer}," in str(caught.value) and "10000ms" in str(caught.value)
