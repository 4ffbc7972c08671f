"""Convert records of overlap_worker.py for tests.helpers.replay, to a Chrome trace and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron import drawing
from tests.helpers.replay import Action, Compute, Lane, Post, Replay, Wait


class Seen(NamedTuple):
    """A message as a rank recorded it (delayed_links.Message)."""

    kind: str
    link: str
    size_bytes: float
    posted: float
    begun: float
    departs: float
    arrives: float
    waited: tuple[float, float] | None


def messages(window: dict[str, Any]) -> list[Seen]:
    return [Seen(*fields) for fields in window["messages"]]


def actions_of_window(
    window: dict[str, Any], latency_s: float, gigabytes_per_s: float | None
) -> list[Action]:
    """Return a rank's program over links with this delay, with recorded computation times.

    Waits count as idle time. The program therefore includes only the link's time of a message, not
    gloo's own.
    """
    events: list[tuple[float, float, Action]] = []  # start, end and what happened
    count: dict[str, int] = {}
    for seen in messages(window):
        # both ends post in one order, so they find one name
        name = f"{seen.link} #{count.setdefault(seen.link, 0)}"
        count[seen.link] += 1
        occupies = seen.size_bytes / (gigabytes_per_s * 1e9) if gigabytes_per_s else 0.0
        events.append((seen.posted, seen.posted, Post(name, seen.link, occupies, latency_s)))
        if seen.waited is not None:
            events.append((*seen.waited, Wait(name)))
    actions: list[Action] = []
    clock = window["started"]
    for start, end, action in sorted(events, key=lambda event: event[:2]):
        actions += [Compute("computing", max(0.0, start - clock)), action]
        clock = max(clock, end)
    return [*actions, Compute("computing", max(0.0, window["ended"] - clock))]


def lanes(window: dict[str, Any]) -> tuple[list[Lane], list[Lane], list[tuple[Seen, Lane]]]:
    """Computing, waiting, and messages on their links, in seconds from the window's start."""
    zero = window["started"]
    waited = [
        Lane(seen.kind, seen.waited[0] - zero, seen.waited[1] - zero)
        for seen in messages(window)
        if seen.waited
    ]
    computed = [Lane(label, start - zero, end - zero) for label, start, end in window["computed"]]
    if not computed:  # a program, of which only its messages are known: what is not waiting
        clock = 0.0
        for lane in sorted(waited, key=lambda lane: lane.start):
            if lane.start > clock:
                computed.append(Lane("computing", clock, lane.start))
            clock = max(clock, lane.end)
        computed.append(Lane("computing", clock, window["ended"] - zero))
    on_links = [
        (seen, Lane(seen.kind, seen.departs - zero, seen.arrives - zero))
        for seen in messages(window)
    ]
    return computed, waited, on_links


def write_trace(window: dict[str, Any], rank: int, path: Path) -> None:
    """A file for chrome://tracing or Perfetto: computation, waiting, and a lane for each link."""
    computed, waited, on_links = lanes(window)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "computation"}},
        {
            "ph": "M",
            "name": "thread_name",
            "pid": rank,
            "tid": 1,
            "args": {"name": "waiting for messages"},
        },
    ]

    def add(lane: Lane, thread: int, **arguments: Any) -> None:
        events.append(
            {
                "ph": "X",
                "name": lane.label,
                "pid": rank,
                "tid": thread,
                "ts": lane.start * 1e6,
                "dur": (lane.end - lane.start) * 1e6,
                "args": arguments,
            }
        )

    for thread, found in enumerate((computed, waited)):
        for lane in found:
            add(lane, thread)
    threads: dict[str, int] = {}
    for seen, lane in on_links:
        if seen.link not in threads:
            threads[seen.link] = 2 + len(threads)
            name = {"name": f"link {seen.link}"}
            events.append(
                {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": rank,
                    "tid": threads[seen.link],
                    "args": name,
                }
            )
        add(
            lane,
            threads[seen.link],
            bytes=seen.size_bytes,
            posted_us=(seen.posted - lane.start) * 1e6,
        )
    path.write_text(json.dumps({"traceEvents": events}))


def plot(windows: Sequence[dict[str, Any]], predicted: Replay, title: str, path: Path) -> None:
    """Draw measured above predicted timelines: per rank computation, waits, and its messages."""
    pyplot = drawing.pyplot()
    from matplotlib.patches import Patch

    colours = {"computing": "#4878b0", "waiting": "#c8553d", "on the link": "#8a8f98"}
    zero = min(window["started"] for window in windows)
    figure, axes = pyplot.subplots(
        2, 1, sharex=True, figsize=(14, 1.5 + 0.9 * len(windows)), layout="constrained"
    )
    figure.suptitle(title, fontsize=10)

    def bar(axis: Any, rank: int, row: int, lane: Lane, shift: float, kind: str) -> None:
        axis.barh(
            rank + 0.28 * row,
            (lane.end - lane.start) * 1e3,
            left=(lane.start + shift) * 1e3,
            height=0.26,
            color=colours[kind],
            edgecolor="white",
            linewidth=0.3,
        )

    for rank, window in enumerate(windows):
        computed, waited, on_links = lanes(window)
        shift = window["started"] - zero
        for row, (kind, found) in enumerate(
            (
                ("computing", computed),
                ("waiting", waited),
                ("on the link", [lane for _, lane in on_links]),
            )
        ):
            for lane in found:
                bar(axes[0], rank, row - 1, lane, shift, kind)
        own = {seen.link for seen in messages(window)}
        crossings = [
            Lane("", crossing.departs, crossing.arrives)
            for crossing in predicted.crossings.values()
            if crossing.link in own or crossing.link in neighbours(rank, len(windows))
        ]
        for row, (kind, of_rank) in enumerate(
            (
                ("computing", predicted.computed[rank]),
                ("waiting", predicted.waited[rank]),
                ("on the link", crossings),
            )
        ):
            for lane in of_rank:
                bar(axes[1], rank, row - 1, lane, 0.0, kind)
    for axis, name in zip(axes, ("measured", "predicted"), strict=True):
        axis.set(ylabel=f"{name}\nrank", yticks=range(len(windows)))
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xlabel("ms")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()],
        ncol=3,
        frameon=False,
        loc="outside lower right",
        fontsize=8,
    )
    drawing.save(figure, path, dpi=120)


def neighbours(rank: int, size: int) -> set[tuple[int, int]]:
    """Links of a rank in a pipeline's program (replay.actions_of)."""
    others = [other for other in range(size) if other != rank]
    return {(rank, other) for other in others} | {(other, rank) for other in others}
