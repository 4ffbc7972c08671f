"""Timelines and phases of a recorded step, by clocks that computations advance."""

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.kernels.cost import Memory, counts_as, recomputed
from megatron.parallel import flight as flight_module
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.flight import DeviceCalls
from megatron.pipeline.executor import Executor
from megatron.pipeline.orders import COMPUTE, Op
from megatron.pipeline.schedule import build_schedule
from megatron.training.report import timeline as timeline_module
from megatron.training.report.timeline import (
    Recording,
    Timeline,
    phases_s,
)
from tests.helpers.clock import VirtualClock
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.tiny import rank_topology
from tests.parallel.test_flight import Stream

SINGLE = rank_topology()


@pytest.fixture
def clock(monkeypatch):
    clock = VirtualClock()
    monkeypatch.setattr(flight_module, "_clock", clock)
    return clock


def a_step(topology, advance):
    """Record a step of 100 s, in which powers of two tell the phases apart."""
    flight = topology.flight

    def call(kind, seconds, peer=-1):
        flight.enter(b"call", kind, 8, True, peer=peer)
        advance(seconds)
        flight.leave()

    recording = Recording(topology, 7)
    advance(1.0)
    meter = flight.meter
    begun = meter.mark()
    advance(2.0)
    meter.add("data", begun)
    begun = meter.mark()
    flight.instruction(b"FORWARD", 0, 0)
    call("pipeline", 4.0, peer=1)
    advance(8.0)
    call("tensor", 0.5)
    call("context", 0.03125, peer=1)
    call("data", 0.25)  # weights that have not arrived
    flight.computed()
    flight.instruction(b"SEND_FORWARD", 0, 0)
    call("pipeline", 0.125, peer=1)
    flight.instruction(b"BACKWARD", 0, 0)
    with recomputed():
        advance(16.0)
        with recomputed(), counts_as(Memory(1)):  # a part that is recomputed in any case
            call("tensor", 0.5)
    advance(32.0)
    flight.computed()
    flight.schedule_ends()
    meter.add("forward-backward", begun)
    begun = meter.mark()
    advance(0.5)
    call("data", 0.0625)
    call("model", 0.25)  # for the norm of the gradient
    meter.add("optimizer", begun)
    advance(100.0 - 64.9375 - 0.25 - 0.03125)
    recording.end()
    return recording


def test_time_counts_for_one_phase(clock):
    recording = a_step(SINGLE, clock.advance)
    clock.advance(50.0)
    flight = SINGLE.flight
    assert flight.meter is None, "nothing is recorded behind the step"
    flight.instruction(b"FORWARD", 0, 9)
    flight.computed()
    activities = recording.activities(clock)
    seconds = phases_s(activities)
    assert seconds == pytest.approx(
        {
            "data": 2.0,
            "forward": 8.0,
            "backward": 32.0,
            "recompute": 16.0,
            "tensor-parallel": 1.0,
            "context-parallel": 0.03125,
            "pipeline-wait": 4.125,
            "data-parallel": 0.3125,
            "optimizer": 0.75,
            "save": 0.0,
        }
    )
    step = next(one for one in activities if one.what == "step")
    assert (step.start, step.end) == (1000.0, 1100.0)
    assert sum(seconds.values()) <= step.end - step.start
    # A pass begins when its message has arrived.
    forward = next(one for one in activities if one.phase == "forward")
    assert (forward.start, forward.end) == (1000.0 + 1 + 2 + 4, 1000.0 + 7 + 8.78125)


def test_times_of_a_device_are_moved_to_the_clock_of_its_host():
    """The device begins a step 30 s after its host, and its clock is another one."""
    stream = Stream([])
    now = [0.0]
    stream.now = 1e9

    class Event:
        def record(self):
            self.at = now[0] + 30.0

        def query(self):
            return True

        def synchronize(self):
            now[0] = max(now[0], self.at)

        def elapsed_time(self, later):
            return float(1000 * (later.at - self.at))

    topology = rank_topology()
    meter = topology.flight.meter = DeviceCalls(Event, on_host=True)

    def advance(seconds):
        now[0] += seconds

    recording = a_step(topology, advance)
    assert topology.flight.meter is meter and meter.marks is None
    activities = recording.activities(lambda: now[0])
    step = next(one for one in activities if one.what == "step")
    assert (step.start, step.end) == pytest.approx((30.0, 130.0))


def of_one_rank(path, say, clock):
    executor = Executor(SINGLE, {0: lambda *_: None}, "1f1b", ((1,), torch.float32))
    return Timeline(SINGLE, executor, path, say, clock=clock)


# -- a pipeline ------------------------------------------------------------------------------------

RANKS, FORWARD_S, HALF_S = 4, 1.0, 1.25  # seconds of a pass, and of each half of a backward pass
SHAPE = (2, 3)
CASES = [("1f1b", 1, 12), ("interleaved", 2, 8), ("zb-h1", 1, 12)]


class Compute(torch.autograd.Function):
    """Let the clock advance, by a backward pass too, and put its time into the result."""

    @staticmethod
    def forward(ctx, x, clock, queue):
        ctx.clock = clock
        ctx.queue = queue
        clock.advance(FORWARD_S)
        return torch.full_like(x, clock.now - clock.origin)

    @staticmethod
    def backward(ctx, *gradients):
        clock = ctx.clock
        clock.advance(HALF_S)
        if ctx.queue.deferring:
            ctx.queue.add(lambda: clock.advance(HALF_S))
        else:
            clock.advance(HALF_S)
        return torch.full_like(gradients[0], clock.now - clock.origin), None, None


class RealClock:
    """The machine's clock, on which a second of the passes takes 200 ms."""

    origin = 0.0
    now = property(lambda self: time.monotonic(), lambda self, value: None)

    def __call__(self):
        return time.monotonic()

    def advance(self, seconds):
        time.sleep(seconds / 5)


def run_pipeline(rank, folder, real=False):
    """Run all cases; messages carry the time of their sender, and so its clock to the receiver.

    The second half of the ranks has another host, whose clock is 5,000 s ahead unless it is `real`.
    """
    topology = join(pipeline=RANKS)
    clock = RealClock() if real else VirtualClock(start=1000.0 if rank < 2 else 6000.0)
    clock.origin = 0.0 if real else clock.now
    plain = dist.irecv

    class Arriving:
        def __init__(self, buffer, *args, **kwargs):
            self.buffer = buffer
            self.work = plain(buffer, *args, **kwargs)

        def wait(self):
            self.work.wait()
            clock.now = max(clock.now, clock.origin + self.buffer.flatten()[0].item())

    reports = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "irecv", Arriving)
        patch.setattr(flight_module, "_clock", clock)
        # as if the job were too large to gather all ranks
        patch.setattr(timeline_module, "_ALL_RANKS", RANKS - 1)
        for name, chunks, count in CASES:
            queue = WeightGradients()
            last = RANKS * chunks - 1

            def chunk(stage, hidden, queue=queue, last=last):
                x = torch.zeros(SHAPE, dtype=torch.float64, requires_grad=True)
                y = Compute.apply(x if hidden is None else hidden, clock, queue)
                return y.mean() if stage == last else y

            stages = {
                c * RANKS + rank: (lambda _, hidden, s=c * RANKS + rank: chunk(s, hidden))
                for c in range(chunks)
            }
            executor = Executor(topology, stages, name, (SHAPE, torch.float64), queue)
            path = Path(folder) / f"{name}.json"
            host = "a" if rank < 2 else "b"
            timeline = Timeline(topology, executor, path, print, ["n:cpu"] * 4, clock, host)
            dist.barrier()
            clock.now = clock.origin
            recording = Recording(topology, 5)
            executor.train(list(range(count)))
            recording.end()
            clock.now = clock.origin + 500.0  # the same moment
            reports.append(timeline.report(recording, 0.5))
            timeline.write()
    return reports


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timelines")
    return folder, run_processes(RANKS, run_pipeline, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_timeline_has_the_order_of_its_schedule_and_its_bubble(ran, case):
    name, chunks, count = case
    folder, (first, *rest) = ran
    times_ms, record = first[CASES.index(case)]
    assert all(rank[CASES.index(case)] == ({}, None) for rank in rest)
    assert record.iteration == 5 and record.file == f"{name}.json"
    assert record.bubble == pytest.approx(record.predicted_bubble, rel=1e-6)
    if name != "zb-h1":
        # Narayanan et al., arXiv 2104.04473, sections 2.2.1 and 2.2.2
        share = (RANKS - 1) / chunks / count
        assert record.bubble == pytest.approx(share / (1 + share), rel=0.1)
    passes = chunks * count
    assert times_ms["forward"] == pytest.approx([1e3 * passes * FORWARD_S] * RANKS)
    assert times_ms["backward"] == pytest.approx([1e3 * passes * 2 * HALF_S] * RANKS)
    assert times_ms["save"] == [500.0] * RANKS

    events = json.loads((folder / f"{name}.json").read_text())["traceEvents"]
    schedule = build_schedule(name, RANKS, chunks, count)
    for rank in range(RANKS):
        operations = [
            (e["args"]["op"], e["args"]["stage"], e["args"]["micro_batch"])
            for e in events
            if e["tid"] == rank and e.get("cat") in ("forward", "backward")
        ]
        assert operations == [tuple(i) for i in schedule[rank] if i.op in COMPUTE]
        (row,) = (e for e in events if e["tid"] == rank and e["ph"] == "M")
        step = next(e for e in events if e["tid"] == rank and e["name"] == "step")
        assert step["ts"] == pytest.approx(0.0)
        assert row["args"]["pipeline"] == rank and "n:cpu" in row["args"]["name"]
    # On one clock no stage begins a micro-batch before the stage before it has ended it.
    spans = {
        (e["args"]["op"], e["args"]["stage"], e["args"]["micro_batch"]): (
            e["ts"],
            e["ts"] + e["dur"],
        )
        for e in events
        if e.get("cat") == "forward"
    }
    for (op, stage, micro_batch), (start, _) in spans.items():
        if stage:
            before = spans[op, stage - 1, micro_batch]
            assert start >= before[1] - 1.0  # microseconds
    assert spans[Op.FORWARD, 1, 0][0] - spans[Op.FORWARD, 0, 0][0] == pytest.approx(1e6)
    assert spans[Op.FORWARD, 2, 0][0] - spans[Op.FORWARD, 1, 0][0] == pytest.approx(1e6)


@pytest.mark.campaign("real-time")
def test_a_bubble_by_the_real_clock_is_that_of_the_schedule(tmp_path):
    """Passes that wait are equally long whatever else the machine does."""
    first, *_ = run_processes(RANKS, run_pipeline, str(tmp_path), True)
    for _, record in first:
        assert record.bubble == pytest.approx(record.predicted_bubble, rel=0.1)


def test_a_file_that_cannot_be_written_is_noted_once(tmp_path, clock):
    path = tmp_path / "gone" / "timeline.json"
    messages = []
    timeline = of_one_rank(path, messages.append, clock)
    for _ in range(2):
        times_ms, record = timeline.report(a_step(SINGLE, clock.advance), 0.0)
        assert times_ms["forward"] == [8000.0]
        clock.advance(100.0)
    assert record.file is None and len(messages) == 1 and str(path) in messages[0]
