"""The figures of a measured run over its steady steps, and what contradicts them. Needs no torch.

Steady steps are those after the warm-up, of the full batch, that were not skipped and whose loss was finite. A figure
is taken from the median of their times; the spread is their range over it.
"""
from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.model import formulas
from megatron.planning.scaling.runs import Line, MeasuredRun

# Of the peak: no training run comes near, beyond it the figure is wrong.
PLAUSIBLE_PART_OF_PEAK = 0.9
# Best square matrix product measured on an MI250X GCD (4096 to 8192, fp16, ROCm 7.0): a training step cannot beat it.
MEASURED_GEMM_TFLOPS = {"MI250": 115.3}
# Logs print milliseconds with one decimal and rates with three: what rounding and reading clocks may explain.
_ROUNDING = 0.01
_CLOCK = 0.05
# By which the formula may differ from what a log prints for the same sizes: attention and vocabulary count otherwise.
_FORMULA = 0.10


@dataclass(frozen=True)
class Judge:
    """What figures are judged by. peak and ceiling: TFLOP/s of a device, None to take what is known of it."""

    warm_up: int | None = None
    peak_tflops: float | None = None
    ceiling_tflops: float | None = None


@dataclass(frozen=True)
class Figures:
    """One run's figures; None where they cannot be had. Rates are tokens per second; TFLOP/s are per device.

    spread        (slowest - fastest) / median of the steady steps
    paper_tflops  by the formula of Dash et al., whose published figures it compares with; paper_hfu over the peak
    memory_bytes  most that any rank held, and which: memory_rank. Where that is None, of rank 0 alone: files of older
                  runs tell of no other
    skipped, nan  steps of the whole run
    problems      what contradicts the figures: with any, they are invalid
    notes         what is worth knowing of valid ones
    """

    run: MeasuredRun
    steady: int = 0
    step_s: float | None = None
    spread: float | None = None
    batch: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    paper_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    paper_hfu: float | None = None
    memory_bytes: int | None = None
    memory_rank: int | None = None
    skipped: int = 0
    nan: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """What TFLOP/s are per."""
        return formulas.device_unit(self.run.device or "")

    @property
    def valid(self) -> bool:
        """Whether there are figures and nothing contradicts them."""
        return self.step_s is not None and not self.problems and self.run.failure is None


def figures(run: MeasuredRun, judge: Judge | None = None) -> Figures:
    """Measure a run. A run without lines gives figures without values."""
    judge = judge or Judge()
    skipped, nan = sum(line.skipped for line in run.lines), sum(line.nan for line in run.lines)
    memory, fullest = _memory(run)
    if not run.lines:
        return Figures(run, skipped=skipped, nan=nan)
    after = _after_warm_up(run, judge)
    steady = [line for line in after if not line.skipped and not line.nan]
    if not steady:
        problem = (
            f"no steady step: {skipped} of {_steps(run.lines)} steps were skipped, {nan} had a loss that is not finite"
            if after
            else f"no steady step: the run has {_steps(run.lines)}, none after the warm-up with its full batch"
        )
        known = () if not after and run.failure else (problem,)
        return Figures(run, memory_bytes=memory, memory_rank=fullest, skipped=skipped, nan=nan, problems=known)
    times = [line.step_s for line in steady]
    step_s, batch = statistics.median(times), steady[0].global_batch_size
    sequence, world = run.get("seq_length"), run.world_size
    tokens = batch * sequence / step_s if sequence else None
    peak = judge.peak_tflops or _known_peak(run)
    paper = _paper_tflops(run, batch, step_s)
    model = _at_median(steady, "model_tflops", step_s)
    hardware = _at_median(steady, "hardware_tflops", step_s)
    per_device = tokens / world if tokens and world else _at_median(steady, "tokens_per_s_per_device", step_s)
    values = Figures(
        run, _steps(steady), step_s, (max(times) - min(times)) / step_s, batch, tokens, per_device, model, hardware,
        paper, _part(model, peak), _part(hardware, peak), _part(paper, peak), memory, fullest,
        skipped, nan,
    )  # fmt: skip
    return dataclasses.replace(
        values, problems=tuple(_problems(values, steady, judge, peak)), notes=tuple(_notes(values))
    )


def _steps(lines: tuple[Line, ...] | list[Line]) -> int:
    return sum(line.steps for line in lines)


def _memory(run: MeasuredRun) -> tuple[int | None, int | None]:
    """(most bytes that a rank held, which rank); no rank where the file tells only of rank 0 of several."""
    known = [line for line in run.lines if line.memory_bytes]
    if not known:
        return None, None
    most = max(known, key=lambda line: line.memory_bytes or 0)
    return most.memory_bytes, 0 if run.world_size == 1 else most.memory_rank


def _after_warm_up(run: MeasuredRun, judge: Judge) -> list[Line]:
    """Lines of which no step belongs to the warm-up or to a smaller batch."""
    warm_up = judge.warm_up if judge.warm_up is not None else run.point.get("warm_up", 1)
    full = max(line.global_batch_size for line in run.lines)
    first = run.start_iteration + warm_up
    return [line for line in run.lines if line.iteration - line.steps >= first and line.global_batch_size == full]


def _known_peak(run: MeasuredRun) -> float | None:
    return formulas.peak_tflops(run.device, run.dtype_name) if run.device else None


def _part(tflops: float | None, peak: float | None) -> float | None:
    return tflops / peak if tflops is not None and peak else None


def _at_median(lines: list[Line], name: str, step_s: float) -> float | None:
    """A rate that goes with one over the time, at the median time."""
    work = [getattr(line, name) * line.step_s for line in lines if getattr(line, name) is not None]
    return statistics.median(work) / step_s if work else None


def _vocabulary(run: MeasuredRun) -> int | None:
    padded = run.get("padded_vocab_size")
    if padded:
        return int(padded)
    size, multiple = run.get("vocab_size"), run.get("make_vocab_size_divisible_by") or 128
    if not size:
        return None
    multiple *= run.get("tensor_model_parallel_size") or 1
    return int(-(-size // multiple) * multiple)


def _paper_tflops(run: MeasuredRun, batch: int, step_s: float) -> float | None:
    """Hardware TFLOP/s of a device as Dash et al. count them, for what the run says of its sizes."""
    sequence, layers, hidden = (run.get(name) for name in ("seq_length", "num_layers", "hidden_size"))
    vocabulary, world = _vocabulary(run), run.world_size
    if not (sequence and layers and hidden and vocabulary and world):
        return None
    full = run.get("recompute_granularity") == "full"
    flops = formulas.paper_flops(batch, sequence, layers, hidden, vocabulary, checkpointing=full)
    return formulas.achieved_tflops(flops, step_s, world)


# ---- what contradicts the figures


def _problems(found: Figures, steady: list[Line], judge: Judge, peak: float | None) -> Iterator[str]:
    run = found.run
    yield from _samples(run)
    yield from _batch_sizes(run, found)
    yield from _rates(run, steady)
    yield from _clock(run)
    yield from _ceiling(found, judge, peak)
    yield from _hidden_skips(run)
    yield from _formula(found)


def _samples(run: MeasuredRun) -> Iterator[str]:
    """Samples against batch times steps, from one line to the next."""
    if run.get("rampup_batch_size") and any(line.steps > 1 for line in run.lines):
        return  # the batch of the steps between two lines is not known
    for before, line in itertools.pairwise(run.lines):
        if before.consumed_samples is None or line.consumed_samples is None:
            continue
        counted, expected = line.consumed_samples - before.consumed_samples, line.global_batch_size * line.steps
        if counted != expected:
            yield (
                f"iteration {line.iteration}: {counted} samples were counted since iteration {before.iteration}, but "
                f"{line.steps} step(s) of {line.global_batch_size} take {expected}"
            )
            return


def _batch_sizes(run: MeasuredRun, found: Figures) -> Iterator[str]:
    micro, engine = run.get("micro_batch_size"), run.get("engine_micro_batch_size")
    if engine and micro and engine != micro:
        yield (
            f"the engine's micro-batch is {engine}, the command line's {micro}: samples and TFLOP/s may be counted "
            f"{max(engine, micro) / min(engine, micro):g} times"
        )
    replicas, batch = run.replicas, found.batch
    if micro and replicas and batch and batch % (micro * replicas):
        yield f"a batch of {batch} does not divide into micro-batches of {micro} on {replicas} replicas"
    sizes = [run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline")]
    if None not in (*sizes, replicas, run.world_size) and sizes[0] * sizes[1] * replicas != run.world_size:
        yield f"TP {sizes[0]} x PP {sizes[1]} x DP {replicas} are not {run.world_size} processes"


def _rates(run: MeasuredRun, steady: list[Line]) -> Iterator[str]:
    """Rates that a line states against its own batch and time."""
    for line in steady:
        stated, own = line.samples_per_s, line.global_batch_size / line.step_s
        tolerance = _ROUNDING + (0.0005 / stated if stated else 0.0)
        if stated is not None and abs(stated - own) > tolerance * own:
            yield (
                f"iteration {line.iteration}: says {stated:.4g} samples/s, but {line.global_batch_size} samples in "
                f"{line.step_s:.4g} s are {own:.4g}"
            )
            return


def _clock(run: MeasuredRun) -> Iterator[str]:
    """Times of steps against the clock: steps cannot take longer than the clock says has passed."""
    for before, line in itertools.pairwise(run.lines):
        if before.clock_s is None or line.clock_s is None:
            continue
        passed, stated = line.clock_s - before.clock_s, line.step_s * line.steps
        if stated > passed * (1 + _CLOCK) + 1.0:
            yield f"iteration {line.iteration}: says {stated:.4g} s, but the clock moved by {passed:.4g} s"
            return
        paused = any(before.clock_s <= at <= line.clock_s for at in run.pauses)
        if not paused and passed > 2 * stated + 10.0:
            yield (
                f"iteration {line.iteration}: says {stated:.4g} s, but {passed:.4g} s passed since iteration "
                f"{before.iteration} without a checkpoint or an evaluation"
            )
            return


def _ceiling(found: Figures, judge: Judge, peak: float | None) -> Iterator[str]:
    measured = next((v for name, v in MEASURED_GEMM_TFLOPS.items() if name in (found.run.device or "")), None)
    ceiling, why = judge.ceiling_tflops, "the ceiling given"
    if ceiling is None and measured is not None and found.run.dtype_name != "float32":
        ceiling, why = measured, "the best matrix product measured on such a device"
    if ceiling is None and peak is not None:
        ceiling, why = PLAUSIBLE_PART_OF_PEAK * peak, f"{PLAUSIBLE_PART_OF_PEAK:g} of the peak"
    rates = [v for v in (found.model_tflops, found.hardware_tflops, found.paper_tflops) if v is not None]
    if ceiling is not None and rates and max(rates) > ceiling:
        yield f"{max(rates):.4g} TFLOP/s per {found.device} are more than {ceiling:.4g}, {why}"


def _hidden_skips(run: MeasuredRun) -> Iterator[str]:
    """Steps that were skipped without being counted: the loss scale fell, or nothing came of the gradients."""
    for before, line in itertools.pairwise(run.lines):
        counted = before.skipped or line.skipped  # a line shows the scale of before or after its skipped step
        if before.loss_scale and line.loss_scale and line.loss_scale < before.loss_scale and not counted:
            yield (
                f"iteration {line.iteration}: the loss scale fell from {before.loss_scale:g} to {line.loss_scale:g}, "
                "but no step is counted as skipped"
            )
            return
    silent = [line for line in run.lines if line.grad_norm == 0.0 and not line.skipped]
    if silent and len(silent) == len(run.lines):
        yield (
            f"the gradient norm is 0 in every line ({silent[0].iteration} to {silent[-1].iteration}), but no step is "
            "counted as skipped"
        )


def _formula(found: Figures) -> Iterator[str]:
    """TFLOP/s that a log prints against its own sizes, batch and time; only for the GPT that the formula is of."""
    run, stated, own = found.run, found.hardware_tflops, found.paper_tflops
    hidden, heads = run.get("hidden_size"), run.get("num_attention_heads")
    plain = (
        run.source == "log" and not run.get("swiglu") and run.get("ffn_hidden_size") in (None, 4 * (hidden or 0))
        and run.get("num_key_value_heads") in (None, heads) and run.get("recompute_granularity") != "selective"
    )  # fmt: skip
    if not plain or stated is None or own is None:
        return
    # With k = 3 the formula counts three quarters of the vocabulary's operations (see formulas.paper_flops).
    low, high = own, own if run.get("recompute_granularity") == "full" else own * 4 / 3
    if stated > high * (1 + _FORMULA) or stated < low * (1 - _FORMULA):
        yield f"prints {stated:.4g} TFLOP/s per {found.device}, but its sizes, batch and time make {own:.4g}"


def _notes(found: Figures) -> Iterator[str]:
    run = found.run
    if found.skipped:
        yield f"{found.skipped} step(s) skipped, left out of the figures"
    if found.nan:
        yield f"{found.nan} step(s) with a loss that is not finite, left out"
    if found.memory_bytes is not None and found.memory_rank is None:
        yield "memory is that of rank 0, the only one its metrics file tells of: others may have held more"
    if run.finished is False and run.failure is None:
        yield "the run did not come to its end"
    if found.steady < 2:
        yield "one steady step only: no spread"
    elif found.spread is not None and found.spread > 0.1:
        yield f"step times differ by {found.spread:.0%} of their median"
