#!/usr/bin/env python
"""Show a pipeline schedule: what each rank does when, how long it waits, and what it holds.

python tools/show_schedule.py --schedule interleaved --pipeline-size 4 --chunks 2 --micro-batches 8 --plot out.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, real, whole
from megatron.pipeline.clock import Timeline, simulate
from megatron.pipeline.lists import NOMINAL_DURATIONS
from megatron.pipeline.schedule import (
    SCHEDULES,
    Op,
    Schedule,
    build_schedule,
    count_messages,
    peak_activations,
    peak_receives,
)
from megatron.pipeline.trace import label, text_lanes
from megatron.planner.timeline_plot import draw_timeline
from megatron.training.run.process import as_tool

_TIME = real(least=0)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description="Show a pipeline schedule as text, and as a picture with --plot.")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument(
        "--pipeline-size",
        type=whole(1, 1024),
        default=4,
        metavar="P",
        help="pipeline ranks (default 4)",
    )
    parser.add_argument(
        "--chunks",
        type=whole(1, 128),
        metavar="V",
        help="chunks per rank (default 1; interleaved 2)",
    )
    parser.add_argument(
        "--micro-batches",
        type=whole(1, 10_000),
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
        "--plot", type=Path, metavar="FILE.png", help="draw the schedule (needs matplotlib)"
    )
    return parser.parse_args(argv)


def report(schedule: Schedule, timeline: Timeline) -> str:
    def row(what: str, values: tuple[int, ...]) -> str:
        return f"{what:<28}" + " ".join(f"{value:>4}" for value in values)

    messages = count_messages(schedule)
    return "\n".join(
        [
            f"makespan {timeline.makespan:g}, bubble {timeline.bubble_fraction:.1%}, {messages} "
            "messages",
            row("rank", tuple(range(len(schedule)))),
            row("live activations at most", peak_activations(schedule)),
            row("receive buffers at most", peak_receives(schedule)),
        ]
    )


@as_tool
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    chunks = (
        args.chunks if args.chunks is not None else (2 if args.schedule == "interleaved" else 1)
    )
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
