"""The result of a trial from its metrics file: figures of the steady steps, unless something contradicts them."""
from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config import Config
from megatron.errors import DataError
from megatron.model import formulas
from megatron.planning.experiments.endings import Ending
from megatron.planning.metrics_file import read_records
from megatron.planning.scaling.figures import Figures, Judge, figures
from megatron.planning.scaling.runs import MeasuredRun, read_run
from megatron.tuning.types import DONE, FAILED, INVALID, Candidate, Result

# What decides how much work a step is and how it is laid out, and what a run does not change by itself, as a tokenizer
# changes the size of the vocabulary.
_COMPARED = (
    "micro_batch_size", "global_batch_size", "seq_length", "num_layers", "hidden_size", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "enable_zbh1_pipeline", "sequence_parallel",
    "zero_stage", "recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers", "fp16",
    "bf16",
)  # fmt: skip
_ROUNDING = 0.01  # of a rate


def failed(ending: Ending) -> Result:
    """Of a trial that did not do its steps."""
    return Result(FAILED, ending.kind, ending.reason)


def read_result(
    metrics: Path, candidate: Candidate, asked: Config, iterations: int, warm_up: int, *, note: str | None = None
) -> Result | None:
    """None where the file does not tell of all steps: the trial did not come to its end.

    asked  the settings that it was to run with; note: worth knowing beside the figures, such as how it ended after its
    last step. A result with anything in it that contradicts itself, or `asked`, is INVALID and says what.
    """
    try:
        if not metrics.is_file() or not (records := read_records(metrics)):
            return None
        run = read_run(metrics)
        if not run.lines or run.lines[-1].iteration != warm_up + iterations:
            return None
        found = figures(run, Judge(warm_up=warm_up))
        problems = [*found.problems, *_contradictions(run, found, records, candidate, asked)]
    except OSError:
        return None
    except DataError as error:
        return Result(INVALID, None, str(error))
    if not problems and not (found.step_s and 0 < found.step_s < math.inf):
        problems = ["no steady step"]
    notes = (*found.notes, *([note] if note else []))
    return Result(
        INVALID if problems else DONE, None, "; ".join(problems) or None, found.step_s, found.spread, found.steady,
        found.tokens_per_s, found.tokens_per_s_per_device, found.model_tflops, found.hardware_tflops,
        found.memory_bytes, found.skipped, found.nan, notes,
    )  # fmt: skip


def _contradictions(
    run: MeasuredRun, found: Figures, records: list[dict[str, Any]], candidate: Candidate, asked: Config
) -> Iterator[str]:
    """Of a run with what was asked for, beyond what contradicts itself in any run (planning.scaling.figures)."""
    starts = [record for record in records if record["event"] == "start"]
    if len(starts) != 1:
        yield f"{len(starts)} runs wrote to the metrics file"
    yield from _other_settings(run, candidate, asked)
    yield from _missing_steps(run)
    if found.batch is not None and found.batch * asked.model.seq_length != candidate.tokens:
        yield (
            f"a step took {found.batch} sequences of {asked.model.seq_length} tokens, but {candidate.tokens} tokens "
            "were asked for"
        )
    first = run.lines[0]
    if first.consumed_samples is not None and first.consumed_samples != first.global_batch_size * first.steps:
        yield f"{first.consumed_samples} samples were counted after a first step of {first.global_batch_size}"
    yield from _flops(run, asked)


def _other_settings(run: MeasuredRun, candidate: Candidate, asked: Config) -> Iterator[str]:
    if run.world_size != candidate.processes:
        yield f"ran on {run.world_size} processes, asked for {candidate.processes}"
    if run.replicas != asked.parallel.data_parallel_size:
        yield f"ran with {run.replicas} replicas, asked for {asked.parallel.data_parallel_size}"
    for name in _COMPARED:
        ran, wanted = run.get(name), json.loads(json.dumps(asked.get(name)))
        if ran != wanted:
            yield f"ran with {name} {ran}, asked for {wanted}"


def _missing_steps(run: MeasuredRun) -> Iterator[str]:
    gap = next((line for line in run.lines if line.steps != 1), None)
    if gap is not None:
        yield f"iteration {gap.iteration}: no record of the {gap.steps - 1} step(s) before it"
    if len({line.iteration for line in run.lines}) != len(run.lines):
        yield "an iteration is recorded twice"


def _flops(run: MeasuredRun, asked: Config) -> Iterator[str]:
    """TFLOP/s that a record states against those of its batch, its time and the model's sizes."""
    vocabulary = run.get("vocab_size") or asked.model.vocab_size
    if not vocabulary:
        return
    of_a_sample = formulas.model_flops_per_token(asked.model, vocabulary) * asked.model.seq_length
    unit = formulas.device_unit(run.device or "")
    for line in run.lines:
        own = formulas.achieved_tflops(of_a_sample * line.global_batch_size, line.step_s, run.world_size or 1)
        stated = line.model_tflops
        if stated is not None and abs(stated - own) > _ROUNDING * own:
            yield (
                f"iteration {line.iteration}: says {stated:.4g} TFLOP/s per {unit}, but {line.global_batch_size} "
                f"sequences in {line.step_s:.4g} s are {own:.4g}"
            )
            return
