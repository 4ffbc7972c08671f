#!/usr/bin/env python
"""Show a pipeline schedule: each rank's passes and waits over time, and its live activations.

python tools/show_schedule.py --schedule interleaved --pipeline-size 4 --chunks 2 --micro-batches 8 --plot out.png
python tools/show_schedule.py --timeline runs/a/timeline.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer, real
from megatron.config.parallel import SCHEDULES
from megatron.errors import DataError
from megatron.pipeline.clock import ScheduleTimeline, Span, simulate
from megatron.pipeline.orders import COMPUTE, ORDERS, RECEIVES, SENDS, Instruction, Op
from megatron.pipeline.schedule import NOMINAL_DURATIONS, Schedule, build_schedule
from megatron.planner.timeline_plot import draw_timeline
from megatron.training.run.process import as_tool
from megatron.untrusted import is_count, read_json

_TIME = real(least=0)
_MOST_BYTES = 1 << 27
_LETTERS = """\
F3.1 is a pass of micro-batch 3 in the rank's chunk 1; with one chunk, F3. F: forward, B: backward,
I and W: the halves of a split backward pass, for the gradients of inputs and of weights. Dots are
waits. With --instructions, SF and SB send an output and a gradient, RF and RB receive them. An
activation is that of one micro-batch in one chunk, kept until its weight gradients: with two
chunks per rank it is half of one with a single chunk."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        description="Show a pipeline schedule as text, and as a plot with --plot.", epilog=_LETTERS
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument(
        "--pipeline-size",
        type=integer(1, 1024),
        default=4,
        metavar="P",
        help="pipeline ranks (default 4)",
    )
    parser.add_argument(
        "--chunks",
        type=integer(1, 128),
        metavar="V",
        help="chunks per rank (default: the least that the schedule has)",
    )
    parser.add_argument(
        "--micro-batches",
        type=integer(1, 10_000),
        default=8,
        metavar="M",
        help="micro-batches per step (default 8)",
    )
    parser.add_argument(
        "--forward-only", action="store_true", help="show the schedule of an evaluation"
    )
    times = parser.add_argument_group("times of one micro-batch in one chunk, in any unit")
    times.add_argument(
        "--forward-time", type=_TIME, default=NOMINAL_DURATIONS[Op.FORWARD], metavar="T"
    )
    times.add_argument(
        "--input-time", type=_TIME, default=NOMINAL_DURATIONS[Op.BACKWARD_INPUT], metavar="T"
    )
    times.add_argument(
        "--weight-time", type=_TIME, default=NOMINAL_DURATIONS[Op.BACKWARD_WEIGHT], metavar="T"
    )
    times.add_argument(
        "--latency", type=_TIME, default=0.0, metavar="T", help="time of one message (default 0)"
    )
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="list every rank's instructions with the messages",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.json",
        help="draw a step that a run has recorded, instead of a schedule (default: to FILE.png)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="file for the plot (needs matplotlib)"
    )
    return parser.parse_args(argv)


def peak_activations(schedule: Schedule, *, until_weights: bool = True) -> tuple[int, ...]:
    """Return the largest number of activations that are alive at once, for each rank.

    An activation is that of one micro-batch in one chunk, and lives from the forward to the
    backward pass. The first half of a split backward pass (the input's gradient) frees part of it;
    the second half (the weights' gradient) frees the rest, the inputs of linear layers.

    until_weights   count an activation until the second half, an upper bound of memory; otherwise
                    until the first
    """
    frees = {Op.BACKWARD, Op.BACKWARD_WEIGHT if until_weights else Op.BACKWARD_INPUT}
    peaks = []
    for instructions in schedule:
        alive = peak = 0
        for instruction in instructions:
            if instruction.op is Op.FORWARD:
                alive += 1
                peak = max(peak, alive)
                alive -= schedule.forward_only
            elif instruction.op in frees:
                alive -= 1
        peaks.append(peak)
    return tuple(peaks)


def peak_receives(schedule: Schedule) -> tuple[int, ...]:
    """Return each rank's largest number of receive buffers posted and not yet used."""
    peaks = []
    for instructions in schedule:
        posted: set[tuple[bool, int, int]] = set()
        peak = 0
        for op, stage, micro_batch in instructions:
            if op in RECEIVES:
                posted.add((op is Op.RECV_FORWARD, stage, micro_batch))
                peak = max(peak, len(posted))
            elif op in COMPUTE and op is not Op.BACKWARD_WEIGHT:
                posted.discard((op is Op.FORWARD, stage, micro_batch))
        peaks.append(peak)
    return tuple(peaks)


def label(instruction: Instruction, schedule: Schedule) -> str:
    """Return the operation's letter and micro-batch, with several chunks also the chunk: F3.1."""
    chunk = f".{instruction.stage // schedule.pipeline_size}" if schedule.chunks > 1 else ""
    return f"{instruction.op.letters}{instruction.micro_batch}{chunk}"


def text_lanes(schedule: Schedule, timeline: ScheduleTimeline) -> str:
    """Return a line per rank, whose unit of time is the shortest computation; waits are dots."""
    spans = [span for rank in timeline.ranks for span in rank]
    step = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    width = max(len(label(span.instruction, schedule)) for span in spans) + 1
    lines = []
    for rank, of_rank in enumerate(timeline.ranks):
        line = ""
        for span in of_rank:
            line += "." * (round(span.start / step) * width - len(line))
            cell = label(span.instruction, schedule)
            line += (
                cell.ljust(max(width, round(span.end / step) * width - len(line)), "-")[:-1] + " "
            )
        line += "." * (round(timeline.makespan / step) * width - len(line))
        lines.append(f"rank {rank:>2} |{line}|")
    return "\n".join(lines)


def report(schedule: Schedule, timeline: ScheduleTimeline) -> str:
    def row(what: str, values: tuple[int, ...]) -> str:
        return f"{what:<32}" + " ".join(f"{value:>4}" for value in values)

    messages = sum(i.op in SENDS for instructions in schedule for i in instructions)
    return "\n".join(
        [
            f"makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%}, {messages} "
            "messages",
            row("rank", tuple(range(len(schedule)))),
            row("activations of a chunk, at most", peak_activations(schedule)),
            row("receive buffers, at most", peak_receives(schedule)),
        ]
    )


def recorded(path: Path) -> tuple[ScheduleTimeline, int]:
    """Return the passes of one pipeline in a run's timeline, and the iteration.

    The pipeline is that of the first tensor-parallel rank in the first replica. Raises DataError if
    the file is not such a timeline.
    """
    try:
        events = read_json(path, _MOST_BYTES, error=DataError)["traceEvents"]
        rows = {
            event["tid"]: event["args"]
            for event in events
            if event["ph"] == "M" and event["pid"] == 0 and event["args"]["tensor"] == 0
        }
        spans: dict[int, list[Span]] = {rank: [] for rank in rows}
        for event in events:
            if event["ph"] == "X" and event["cat"] in ("forward", "backward"):
                of = event["args"]
                start = event["ts"] / 1e6
                length = event["dur"] / 1e6
                numbers = of["stage"], of["micro_batch"]
                if not (all(map(is_count, numbers)) and 0 <= start < 1e9 and 0 <= length < 1e9):
                    raise ValueError(event)
                span = Span(Instruction(Op(of["op"]), *numbers), start, start + length)
                spans.get(event["tid"], []).append(span)
        zero = min(of_rank[0].start for of_rank in spans.values())
        lanes = [
            tuple(
                span._replace(start=span.start - zero, end=span.end - zero) for span in spans[rank]
            )
            for rank in sorted(rows, key=lambda rank: rows[rank]["pipeline"] + 0)
        ]
        (iteration,) = {row["iteration"] + 0 for row in rows.values()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path}: not the timeline of a run ({error!r}): give the timeline.json next to its "
            "metrics file"
        ) from None
    return ScheduleTimeline(tuple(lanes)), iteration


def draw_recorded(path: Path, picture: Path) -> None:
    """Draw a step that a run has recorded, and print its length and bubble."""
    timeline, iteration = recorded(path)
    size = len(timeline.ranks)
    stages = 1 + max(span.instruction.stage for spans in timeline.ranks for span in spans)
    title = (
        f"iteration {iteration}: {timeline.makespan:.4g} s, bubble {timeline.bubble_fraction:.1%}"
    )
    print(title)
    draw_timeline(timeline, size, -(-stages // size), picture, title=title)
    print(f"drawn to {picture}")


@as_tool
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.timeline:
        draw_recorded(args.timeline, args.plot or args.timeline.with_suffix(".png"))
        return 0
    chunks = args.chunks if args.chunks is not None else ORDERS[args.schedule].chunks[0]
    durations = {
        Op.FORWARD: args.forward_time,
        Op.BACKWARD: args.input_time + args.weight_time,
        Op.BACKWARD_INPUT: args.input_time,
        Op.BACKWARD_WEIGHT: args.weight_time,
    }
    schedule = build_schedule(
        args.schedule, args.pipeline_size, chunks, args.micro_batches, args.forward_only
    )
    timeline = simulate(schedule, durations, args.latency)
    print(text_lanes(schedule, timeline))
    print(report(schedule, timeline))
    if args.instructions:
        for rank, instructions in enumerate(schedule):
            print(f"rank {rank}: " + " ".join(label(i, schedule) for i in instructions))
    if args.plot:
        title = (
            f"{schedule.name}: {schedule.pipeline_size} ranks, {chunks} "
            f"chunk{'s' * (chunks > 1)}, {schedule.micro_batches} micro-batches, bubble "
            f"{timeline.bubble_fraction:.1%}"
        )
        draw_timeline(timeline, schedule.pipeline_size, schedule.chunks, args.plot, title=title)
        print(f"drawn to {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
