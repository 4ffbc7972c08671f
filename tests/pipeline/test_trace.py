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
from megatron.pipeline.trace import trace_of


def a_run(schedule="interleaved", size=3, chunks=2, micro_batches=5):
    stages = size * chunks
    times = StageTimes((0.001,) * stages, (0.002,) * stages, (0.0005,) * stages)
    boundaries = Boundaries(((0.0001, 0.0),) * stages, ((0.0002, 0.0),) * stages)
    return run_pipeline(Pipeline(schedule, size, chunks, micro_batches, times, boundaries))


def events(run):
    return json.loads(trace_of(run))["traceEvents"]


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zb-h1", 1), ("v-half", 2)])
def test_passes(schedule, chunks):
    run = a_run(schedule, 3, chunks)
    trace_events = events(run)
    for rank, spans in enumerate(timeline(run).ranks):
        passes = [event for event in trace_events if event["ph"] == "X" and event["tid"] == rank]
        assert [(e["args"]["stage"], e["args"]["micro-batch"]) for e in passes] == [
            s.instruction[1:] for s in spans
        ]
        assert [e["args"]["chunk"] for e in passes] == [s.instruction.stage // 3 for s in spans]
        assert [e["cat"] for e in passes] == [trace.NAMES[s.instruction.op] for s in spans]
        assert [e["ts"] for e in passes] == pytest.approx([1e6 * s.start for s in spans], abs=1e-3)
        assert [e["dur"] for e in passes] == pytest.approx(
            [1e6 * (s.end - s.start) for s in spans], abs=1e-3
        )
        named = [e["args"] for e in trace_events if e["ph"] == "M" and e.get("tid") == rank]
        assert {"name": f"pipeline rank {rank}"} in named
