"""Trace of a step: it agrees with the timeline, in the words and units of the trace format."""

import json

import pytest

from megatron.pipeline import trace
from megatron.pipeline.clock import (
    Boundaries,
    Pipeline,
    StageTimes,
    run_pipeline,
    timeline,
)
from megatron.pipeline.orders import SENDS
from megatron.pipeline.schedule import build_schedule
from megatron.pipeline.trace import trace_of


def a_run(schedule="interleaved", size=3, chunks=2, micro_batches=5):
    stages = size * chunks
    times = StageTimes((0.001,) * stages, (0.002,) * stages, (0.0005,) * stages)
    boundaries = Boundaries(((0.0001, 0.0),) * size, ((0.0002, 0.0),) * size)
    return run_pipeline(Pipeline(schedule, size, chunks, micro_batches, times, boundaries))


def events(run):
    return json.loads(trace_of(run))["traceEvents"]


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_passes(schedule, chunks):
    run = a_run(schedule, 3, chunks)
    found = events(run)
    for rank, spans in enumerate(timeline(run).ranks):
        passes = [event for event in found if event["ph"] == "X" and event["tid"] == rank]
        assert [(e["args"]["stage"], e["args"]["micro-batch"]) for e in passes] == [
            s.instruction[1:] for s in spans
        ]
        assert [e["args"]["chunk"] for e in passes] == [s.instruction.stage // 3 for s in spans]
        assert [e["cat"] for e in passes] == [trace.NAMES[s.instruction.op] for s in spans]
        assert [e["ts"] for e in passes] == pytest.approx([1e6 * s.start for s in spans], abs=1e-3)
        assert [e["dur"] for e in passes] == pytest.approx(
            [1e6 * (s.end - s.start) for s in spans], abs=1e-3
        )
        named = [e["args"] for e in found if e["ph"] == "M" and e.get("tid") == rank]
        assert {"name": f"pipeline rank {rank}"} in named


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_an_arrow_for_each_message(schedule, chunks):
    found = events(a_run(schedule, 3, chunks))
    begins = {event["id"]: event for event in found if event["ph"] == "s"}
    ends = {event["id"]: event for event in found if event["ph"] == "f"}
    listed = build_schedule(schedule, 3, chunks, 5)
    sends = sum(i.op in SENDS for instructions in listed for i in instructions)
    assert len(begins) == len(ends) == sends
    assert begins.keys() == ends.keys()
    starts = {(e["tid"], e["ts"]) for e in found if e["ph"] == "X"}
    for number, begin in begins.items():
        end = ends[number]
        assert end["tid"] == (begin["tid"] + (1 if begin["name"] == "activation" else -1)) % 3
        assert end["ts"] >= begin["ts"] + (100 if begin["name"] == "activation" else 200) - 0.01
        assert (end["tid"], end["ts"]) in starts


def test_large_traces_have_no_arrows(monkeypatch):
    monkeypatch.setattr(trace, "_WITH_ARROWS", 10)
    assert {event["ph"] for event in events(a_run())} == {"M", "X"}
