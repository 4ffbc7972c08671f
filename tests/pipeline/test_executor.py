"""The executor on 2 and 4 processes gives the losses and gradients of one process without a pipeline, in float64."""
from __future__ import annotations

import datetime
import gc
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.errors import ConfigError
from megatron.parallel.deferred import WeightGradients
from megatron.parallel.topology import Topology
from megatron.pipeline.exchange import SENDS_IN_FLIGHT
from megatron.pipeline.executor import Executor
from megatron.pipeline.schedule import build_schedule, peak_activations
from tests.helpers.groups import join
from tests.helpers.processes import run_processes, run_processes_raw

WIDTH, ROWS = 6, 3


class DeferrableLinear(torch.autograd.Function):
    """x @ w.T, whose weight gradient goes to the queue while it collects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, queue: WeightGradients) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients

        def compute() -> None:
            weight.grad = gradient.t() @ x if weight.grad is None else weight.grad + gradient.t() @ x

        if ctx.queue.deferring:
            ctx.queue.add(compute)
            return gradient @ weight, None, None
        return gradient @ weight, gradient.t() @ x, None


class Stage(torch.nn.Module):
    """hidden -> tanh(hidden w^T + b); the first reads the micro-batch, the last returns a loss."""

    def __init__(self, stage: int, stages: int, queue: WeightGradients | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        draw = torch.randn(WIDTH + 1, WIDTH, generator=generator, dtype=torch.float64)
        self.weight, self.bias = torch.nn.Parameter(draw[:-1].clone()), torch.nn.Parameter(draw[-1].clone())
        self.last = stage == stages - 1
        self.queue = queue or WeightGradients()

    def forward(self, batch: dict[str, torch.Tensor], hidden: torch.Tensor | None) -> torch.Tensor:
        x = batch["x"] if hidden is None else hidden
        y = torch.tanh(DeferrableLinear.apply(x, self.weight, self.queue) + self.bias)
        return (y - batch["y"]).square().mean() if self.last else y


def micro_batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(99)
    shape = (ROWS, WIDTH)
    return [
        {k: torch.randn(shape, generator=generator, dtype=torch.float64) for k in ("x", "y")} for _ in range(count)
    ]


def reference(stages: int, count: int, scale: float, weights: list[float] | None) -> tuple[list[float], dict[str, Any]]:
    """Losses and gradients by one autograd graph over all micro-batches."""
    chunks = [Stage(g, stages) for g in range(stages)]
    losses = []
    for batch in micro_batches(count):
        hidden: torch.Tensor | None = None
        for chunk in chunks:
            hidden = chunk(batch, hidden)
        assert hidden is not None
        losses.append(hidden)
    factors = weights or [1 / count] * count
    total = sum(loss * factor for loss, factor in zip(losses, factors, strict=True)) * scale
    total.backward()  # type: ignore[union-attr]
    return [loss.item() for loss in losses], gradients(dict(enumerate(chunks)))


def gradients(chunks: dict[int, Stage]) -> dict[str, np.ndarray]:
    found = {}
    for g, chunk in chunks.items():
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None
            found[f"{g}.{name}"] = parameter.grad.numpy()
    return found


def make(
    topology: Topology, schedule: str, chunks: int, **options: Any
) -> tuple[Executor, dict[int, Stage]]:
    size, rank = topology.pipeline.size, topology.pipeline.rank
    queue = WeightGradients()
    stages = {c * size + rank: Stage(c * size + rank, size * chunks, queue) for c in range(chunks)}
    return Executor(topology, stages, schedule, chunks, (ROWS, WIDTH), torch.float64, queue, **options), stages


CASES = {
    2: [("1f1b", 1, 1), ("1f1b", 1, 5), ("interleaved", 2, 4), ("interleaved", 3, 3), ("interleaved", 2, 1),
        ("zb-h1", 1, 5), ("zb-h1", 1, 1)],
    4: [("1f1b", 1, 3), ("1f1b", 1, 9), ("interleaved", 2, 8), ("interleaved", 2, 7), ("interleaved", 2, 2),
        ("zb-h1", 1, 7), ("zb-h1", 1, 2)],
}  # fmt: skip


def every_case(rank: int, size: int) -> list[tuple[Any, ...]]:
    topology = join(pipeline=size)
    results = []
    for name, chunks, count in CASES[size]:
        backwards: list[int] = []
        executor, stages = make(topology, name, chunks, after_backward=lambda calls=backwards: calls.append(1))
        batches = micro_batches(count)
        evaluated = [loss.item() for loss in executor.evaluate(batches)]
        assert all(p.grad is None for stage in stages.values() for p in stage.parameters())
        trained = executor.train(batches, loss_scale=8.0)
        assert not any(loss.requires_grad for loss in trained)
        first = {k: v.copy() for k, v in gradients(stages).items()}
        calls = len(backwards)
        for stage in stages.values():
            stage.zero_grad()
        weights = [0.5 + i for i in range(count)]
        executor.train(batches, loss_weights=weights)
        results.append(([loss.item() for loss in trained], first, gradients(stages), evaluated, calls))
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_losses_and_gradients_are_those_of_one_process(size: int) -> None:
    """Float64; the order of summation over micro-batches differs, so equality is to rounding."""
    by_rank = run_processes(size, every_case, size)
    for number, (name, chunks, count) in enumerate(CASES[size]):
        stages = size * chunks
        losses, wanted = reference(stages, count, 8.0, None)
        _, weighted = reference(stages, count, 1.0, [0.5 + i for i in range(count)])
        seen: set[str] = set()
        for rank in range(size):
            trained, first, second, evaluated, calls = by_rank[rank][number]
            expected = losses if rank == size - 1 else []
            np.testing.assert_allclose(trained, expected, rtol=1e-14)
            np.testing.assert_allclose(evaluated, expected, rtol=1e-14)
            for key, gradient in first.items():
                np.testing.assert_allclose(gradient, wanted[key], rtol=1e-12, atol=1e-14, err_msg=f"{name} {key}")
                np.testing.assert_allclose(second[key], weighted[key], rtol=1e-12, atol=1e-14, err_msg=f"{name} {key}")
            seen |= first.keys()
            assert calls == count * chunks * (2 if name == "zb-h1" else 1)
        assert seen == wanted.keys()


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1)])
def test_one_rank_needs_no_process_group(schedule: str, chunks: int) -> None:
    executor, stages = make(Topology.create(), schedule, chunks)
    losses = [loss.item() for loss in executor.train(micro_batches(3), loss_scale=2.0)]
    wanted_losses, wanted = reference(chunks, 3, 2.0, None)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-14)
    found = gradients(stages)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        np.testing.assert_allclose(gradient, wanted[key], rtol=1e-12, atol=1e-14)


class Alive:
    """Counts objects that are alive."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def watch(self, thing: Any) -> Any:
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(thing, self._gone)
        return thing

    def _gone(self) -> None:
        self.now -= 1


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class InWatchedMemory(torch.autograd.Function):
    """The identity, with an output whose memory is watched."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: Alive) -> torch.Tensor:
        return torch.from_numpy(alive.watch(x.numpy().copy()))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def count_live(rank: int, name: str, chunks: int, count: int) -> tuple[int, int, int, int]:
    topology = join(pipeline=2)
    saved, outputs = Alive(), Alive()

    def chunk_of(stage: int) -> Callable[[Any, torch.Tensor | None], torch.Tensor]:
        """One saved tensor per forward pass, no parameter, and an output that only the next stage needs."""

        def chunk(batch: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
            x = torch.zeros(2, requires_grad=True) if hidden is None else hidden
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.watch(Box(t)), lambda box: box.value):
                y = x.exp()
            return y.sum() if stage == 2 * chunks - 1 else InWatchedMemory.apply(y + batch, outputs)

        return chunk

    stages = {c * 2 + rank: chunk_of(c * 2 + rank) for c in range(chunks)}
    executor = Executor(topology, stages, name, chunks, (2,), torch.float32, WeightGradients())
    gc.disable()  # what waits for the collector is not freed at once
    executor.train([torch.ones(2)] * count)
    return saved.peak, saved.now, outputs.peak, outputs.now


@pytest.mark.parametrize("name, chunks, count", [("1f1b", 1, 5), ("interleaved", 4, 9), ("zb-h1", 1, 5)])
def test_memory_is_freed_as_the_schedule_says(name: str, chunks: int, count: int) -> None:
    found = run_processes(2, count_live, name, chunks, count)
    # The chunks have no weights to keep anything for, so a split backward pass frees all in its first half.
    limits = peak_activations(build_schedule(name, 2, chunks, count), until_weights=False)
    assert [(peak, left) for peak, left, _, _ in found] == [(limit, 0) for limit in limits]
    # An output is gone when it has been sent, long before its backward pass: in the interleaved case rank 0 keeps
    # the graphs of twelve forward passes, and the outputs of those on their way and of the one just made.
    assert all(peak <= SENDS_IN_FLIGHT + 1 and left == 0 for _, _, peak, left in found)
    assert name != "interleaved" or limits[0] == 12 > SENDS_IN_FLIGHT + 1


def frozen_and_unused(rank: int) -> list[Any]:
    """A first stage without gradients, and a second one that does not look at its input."""
    topology = join(pipeline=2)
    weight = torch.ones(2, requires_grad=rank == 1)

    def first(batch: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        assert hidden is None
        return batch * weight

    def second(batch: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        assert hidden is not None
        return (batch * weight).sum()

    executor = Executor(topology, {rank: (first, second)[rank]}, "1f1b", 1, lambda batch: batch.shape, torch.float32)
    losses = executor.train([torch.ones(2), 3 * torch.ones(2)])
    return [[loss.item() for loss in losses], None if weight.grad is None else weight.grad.tolist()]


def test_any_callable_frozen_or_blind() -> None:
    assert run_processes(2, frozen_and_unused) == [[[], None], [[2.0, 6.0], [2.0, 2.0]]]


def other_size_for_evaluation(rank: int) -> list[float]:
    """message_shape as a function of the micro-batch: batches of different sizes in one executor."""
    executor, _ = make(join(pipeline=2), "1f1b", 1)
    executor.message_shape = lambda batch: batch["x"].shape
    batches = micro_batches(3)
    executor.train(batches)
    larger = [{k: torch.cat([batch[k] for batch in batches]) for k in ("x", "y")}]
    return [loss.item() for loss in executor.evaluate(larger)]


def test_message_shape_may_follow_the_micro_batch() -> None:
    losses, _ = reference(2, 3, 1.0, None)
    found = run_processes(2, other_size_for_evaluation)
    assert found[0] == []
    np.testing.assert_allclose(found[1], [np.mean(losses)], rtol=1e-14)  # of equal batches: the mean of means


def die_in_the_middle(rank: int, dying: int, name: str) -> None:
    size = 4 if name != "interleaved" else 2
    topology = join(pipeline=size)
    executor, stages = make(topology, name, 2 if name == "interleaved" else 1)
    if rank == dying:
        calls = iter(range(100))

        def stop(*_: Any) -> None:
            if next(calls) == 2:
                os._exit(3)

        stages[rank].register_forward_pre_hook(stop)
    executor.train(micro_batches(8))


@pytest.mark.parametrize("name, size, dying", [("1f1b", 4, 2), ("interleaved", 2, 0)])
def test_a_dead_neighbour_is_named(name: str, size: int, dying: int) -> None:
    started = time.monotonic()
    outcomes = run_processes_raw(size, die_in_the_middle, dying, name)
    assert time.monotonic() - started < 200, "someone hung"
    for rank in {dying - 1, dying + 1} & set(range(size)):
        ok, text = outcomes[rank]
        assert not ok
        assert text.startswith(f"LaunchError: rank {rank} lost its pipeline neighbour, rank {dying}, during "), text
        assert "of stage" in text


def one_sleeps(rank: int, named: str) -> None:
    # Also the time in which both have to come, and on a busy machine they do so seconds apart.
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
    executor, _ = make(Topology.create(1, 2), "1f1b", 1)
    if rank == 1:
        while not os.path.exists(named):
            time.sleep(0.05)
        return
    try:
        executor.train(micro_batches(2))
    finally:
        Path(named).touch()


def test_a_neighbour_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    (ok, text), _ = run_processes_raw(2, one_sleeps, str(tmp_path / "named"))
    assert not ok
    assert text.startswith("LaunchError: rank 0 lost its pipeline neighbour, rank 1, during "), text


def wrong_output(rank: int) -> str:
    executor, _ = make(join(pipeline=2), "1f1b", 1)
    executor.message_shape = (ROWS, WIDTH + 1)
    try:
        executor.train(micro_batches(1))
    except ConfigError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_an_output_of_another_shape_is_refused() -> None:
    first, second = run_processes(2, wrong_output)
    assert "FORWARD of stage 0" in first and f"[{ROWS}, {WIDTH}]" in first and f"[{ROWS}, {WIDTH + 1}]" in first
    assert second == "LaunchError"


def test_refused() -> None:
    topology = Topology.create()
    chunk = Stage(0, 1)

    def build(chunks: dict[int, Any], schedule: str = "1f1b", **options: Any) -> Executor:
        return Executor(topology, chunks, schedule, 1, (ROWS, WIDTH), torch.float64, **options)

    with pytest.raises(ConfigError, match=r"runs the global stages \[0\], but was given chunks for \[1\]"):
        build({1: chunk})
    with pytest.raises(ConfigError, match="weight_gradients"):
        build({0: chunk}, "zb-h1")
    with pytest.raises(ConfigError, match="does not exist"):
        build({0: chunk}, "gpipe")
    with pytest.raises(ConfigError, match="2 loss weights for 3 micro-batches"):
        build({0: chunk}).train(micro_batches(3), loss_weights=[1.0, 1.0])
    with pytest.raises(ConfigError, match="micro-batches must be at least 1, got 0"):
        build({0: chunk}).train([])
    with pytest.raises(ConfigError, match=r"scalar loss, got shape \[3, 6\]"):
        build({0: lambda batch, hidden: batch["x"]}).train(micro_batches(1))
