"""The result of a trial from its metrics file: figures of the steady steps, unless something contradicts them."""
from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.config.layout import layout_of
from megatron.errors import DataError
from megatron.jobs.scaling import Figures, Judge, figures, read_run
from megatron.metrics_file import read_records

DONE, FAILED, INVALID = "done", "failed", "invalid"
"""How a trial ended: with figures; without; with figures that contradict themselves, which are never the best."""


@dataclass(frozen=True)
class Result:
    """What came of a trial; without a status it has not ended. Figures are None where there are no valid ones.

    kind, reason    of a failure (endings.py); why figures are invalid
    step_s          median of the steady steps; spread: (slowest - fastest) / median; steady: how many they are
    memory_bytes    most that any rank held
    notes           worth knowing of valid figures
    """

    status: str = ""
    kind: str | None = None
    reason: str | None = None
    step_s: float | None = None
    spread: float | None = None
    steady: int = 0
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    notes: str = ""

    @property
    def said(self) -> str:
        """In the fewest words: done, out of memory, invalid, ..."""
        return self.kind or self.status


RUNNING = Result()


def read_result(metrics: Path, asked: Config, warm_up: int) -> Result:
    """Read the result of a run that has done all its steps. One with anything in it that contradicts itself, or the
    settings that were asked for, is INVALID and says what."""
    try:
        found = figures(read_run(metrics), Judge(warm_up=warm_up))
        starts = sum(record["event"] == "start" for record in read_records(metrics))
    except DataError as error:
        return Result(INVALID, None, str(error))
    problems = [*found.problems, *_contradictions(found, asked)]
    problems += [] if starts == 1 else [f"{starts} runs wrote to the metrics file"]
    problems += [] if problems or found.step_s else ["no steady step"]
    if problems:
        return Result(INVALID, None, "; ".join(problems))
    return Result(DONE, None, None, found.step_s, found.spread, found.steady, found.tokens_per_s, found.memory_bytes,
                  "; ".join(found.notes))  # fmt: skip


def _contradictions(found: Figures, asked: Config) -> Iterator[str]:
    """Compare a run with what was asked for, beyond what contradicts itself in any run (scaling.py)."""
    run, layout = found.run, layout_of(asked)
    # Not its places, nor what a run changes by itself, as a tokenizer changes the size of the vocabulary.
    names = layout.settings(1).keys() - {"rank_order", "device_order"}
    for name in sorted(names | {"seq_length", "num_layers", "hidden_size", "fp16", "bf16"}):
        ran, wanted = run.get(name), json.loads(json.dumps(asked.get(name)))
        if ran != wanted:
            yield f"ran with {name} {ran}, asked for {wanted}"
    if run.start_iteration or [line.iteration for line in run.lines] != list(range(1, len(run.lines) + 1)):
        yield "not every step is recorded once"
    if found.batch not in (None, layout.batch):
        yield f"a step took {found.batch} sequences, but {layout.batch} were asked for"
