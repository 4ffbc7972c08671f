"""Trace of a pipeline step: JSON for chrome://tracing and https://ui.perfetto.dev.

The trace has one row for each rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatron.pipeline.clock import PipelineRun, Span, timeline
from megatron.pipeline.orders import Op

NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward of inputs",
    Op.BACKWARD_WEIGHT: "backward of weights",
}
# Arrows for messages triple the size of the file: they are omitted above this number of passes.
_WITH_ARROWS = 20_000
_MICROSECONDS = 1e6  # the format's unit


def trace_of(run: PipelineRun) -> str:
    """Return the JSON for a run whose times are in seconds.

    Each pass is one event of the trace event format (phase X), named after its kind and
    micro-batch; in steps of up to 20,000 passes, each message is an arrow.
    """
    lanes = timeline(run).ranks
    # A large step has hundreds of thousands of events: each is converted to text right away.
    events = (json.dumps(event, separators=(",", ":")) for event in _events(run, lanes))
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


def _events(run: PipelineRun, lanes: tuple[tuple[Span, ...], ...]) -> Iterator[dict[str, object]]:
    pipeline = run.pipeline
    sizes = (
        f"{pipeline.size} ranks, {pipeline.chunks} chunks, {pipeline.micro_batches} micro-batches"
    )
    yield _about("process_name", {"name": f"{pipeline.name}: {sizes}"})
    for rank in range(pipeline.size):
        yield _about("thread_name", {"name": f"pipeline rank {rank}"}, tid=rank)
        yield _about("thread_sort_index", {"sort_index": rank}, tid=rank)
    for rank, spans in enumerate(lanes):
        for span in spans:
            op, stage, micro_batch = span.instruction
            yield {
                "ph": "X",
                "name": f"{NAMES[op]} {micro_batch}",
                "cat": NAMES[op],
                "pid": 0,
                "tid": rank,
                "ts": _at(span.start),
                "dur": _at(span.end - span.start),
                "args": {
                    "micro-batch": micro_batch,
                    "chunk": stage // pipeline.size,
                    "stage": stage,
                },
            }
    if sum(map(len, lanes)) <= _WITH_ARROWS:
        yield from _arrows(lanes)


def _about(name: str, values: object, **where: int) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": 0, **where, "args": values}


def _at(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


def _arrows(lanes: tuple[tuple[Span, ...], ...]) -> Iterator[dict[str, object]]:
    """Yield arrows from the pass that produces a message's tensor to the pass that uses it."""
    passes = {
        (span.instruction.op is Op.FORWARD, *span.instruction[1:]): (rank, span)
        for rank, spans in enumerate(lanes)
        for span in spans
        if span.instruction.op is not Op.BACKWARD_WEIGHT
    }
    for number, ((forward, stage, micro_batch), (rank, made)) in enumerate(passes.items()):
        to = stage + 1 if forward else stage - 1
        at, used = passes.get((forward, to, micro_batch), (rank, made))
        if at == rank:
            continue
        shared = {
            "name": "activation" if forward else "gradient",
            "cat": "message",
            "id": number,
            "pid": 0,
        }
        yield {**shared, "ph": "s", "tid": rank, "ts": _at(made.end)}
        yield {**shared, "ph": "f", "bp": "e", "tid": at, "ts": _at(used.start)}
