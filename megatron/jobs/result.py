"""The result of a trial from its metrics file: figures of the steady steps, unless something contradicts them."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.errors import DataError
from megatron.jobs.scaling import Figures, Judge, MeasuredRun, figures, read_run
from megatron.metrics_file import read_records
from megatron.model import formulas

DONE, FAILED, INVALID = "done", "failed", "invalid"
"""How a trial ended: with figures; without; with figures that contradict themselves, which are never the best."""
# What decides how much work a step is and how it is laid out, and what a run does not change by itself, as a tokenizer
# changes the size of the vocabulary.
_COMPARED = (
    "micro_batch_size", "global_batch_size", "seq_length", "num_layers", "hidden_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "enable_zbh1_pipeline", "sequence_parallel",
    "zero_stage", "recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers", "fp16",
    "bf16", "data_parallel_size", "world_size",
)  # fmt: skip
_ROUNDING = 0.01  # of a rate


@dataclass(frozen=True)
class Result:
    """What came of a trial. Figures are None where there are none.

    kind, reason    of a failure (endings.py), or why the figures are invalid
    step_s          median of the steady steps; spread: (slowest - fastest) / median; steady: how many they are
    memory_bytes    most that any rank held
    skipped, nan    steps of the whole trial; notes: worth knowing of valid figures
    """

    status: str
    kind: str | None = None
    reason: str | None = None
    step_s: float | None = None
    spread: float | None = None
    steady: int = 0
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    memory_bytes: int | None = None
    skipped: int = 0
    nan: int = 0
    notes: str = ""

    @property
    def said(self) -> str:
        """In the fewest words: done, out of memory, invalid, ..."""
        return (self.kind or FAILED) if self.status == FAILED else self.status


def read_result(metrics: Path, asked: Config, warm_up: int, note: str = "") -> Result:
    """Read the result of a run that has done all its steps.

    asked  the settings that it was to run with; note: worth knowing beside the figures, such as how it ended after its
    last step. A result with anything in it that contradicts itself, or `asked`, is INVALID and says what.
    """
    try:
        run = read_run(metrics)
        found = figures(run, Judge(warm_up=warm_up))
        starts = [record for record in read_records(metrics) if record["event"] == "start"]
    except DataError as error:
        return Result(INVALID, None, str(error))
    problems = [*found.problems, *_contradictions(run, found, asked)]
    problems += [] if len(starts) == 1 else [f"{len(starts)} runs wrote to the metrics file"]
    step_s = found.step_s if found.step_s and 0 < found.step_s < math.inf else None
    problems += [] if step_s or problems else ["no steady step"]
    return Result(
        INVALID if problems else DONE, None, "; ".join(problems) or None, step_s, found.spread, found.steady,
        found.tokens_per_s, found.tokens_per_s_per_device, found.model_tflops, found.hardware_tflops,
        found.memory_bytes, found.skipped, found.nan, "; ".join([*found.notes, *([note] if note else [])]),
    )  # fmt: skip


def _contradictions(run: MeasuredRun, found: Figures, asked: Config) -> Iterator[str]:
    """Compare a run with what was asked for, beyond what contradicts itself in any run (scaling.py)."""
    for name in _COMPARED:
        ran, wanted = run.get(name), json.loads(json.dumps(asked.get(name)))
        if ran != wanted:
            yield f"ran with {name} {ran}, asked for {wanted}"
    if run.start_iteration or [line.iteration for line in run.lines] != list(range(1, len(run.lines) + 1)):
        yield "not every step is recorded once"
    if found.batch is not None and found.batch != asked.batch.global_batch_size:
        yield f"a step took {found.batch} sequences, but {asked.batch.global_batch_size} were asked for"
    first = run.lines[0] if run.lines else None
    if first is not None and first.consumed_samples not in (None, first.global_batch_size):
        yield f"{first.consumed_samples} samples were counted after a first step of {first.global_batch_size}"
    vocabulary = run.get("vocab_size") or asked.model.vocab_size
    if not vocabulary:
        return
    of_a_sample = formulas.model_flops_per_token(asked.model, vocabulary) * asked.model.seq_length
    for line in run.lines:
        own = formulas.achieved_tflops(of_a_sample * line.global_batch_size, line.step_s, run.world_size or 1)
        if line.model_tflops is not None and abs(line.model_tflops - own) > _ROUNDING * own:
            yield (f"iteration {line.iteration}: says {line.model_tflops:.4g} TFLOP/s for each device, but "
                   f"{line.global_batch_size} sequences in {line.step_s:.4g} s are {own:.4g}")  # fmt: skip
            return
