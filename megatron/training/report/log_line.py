"""The lines that log parsers read: Megatron-DeepSpeed's fields, order and formats."""
from __future__ import annotations

import math

from megatron.training.report.metrics import IterationReport


def format_iteration(report: IterationReport) -> str:
    """The iteration line.

    `TFLOPs:` is hardware FLOP/s per device, recomputation included, as parsers expect; MFU and HFU follow where the
    device's peak is known. lm loss, loss scale, grad norm, num zeros and params norm appear only when there is one.
    """
    fields = [
        f"iteration {report.iteration:8d}/{report.total_iterations:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"consumed tokens: {report.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {report.step_time_s * 1000.0:.1f}",
        f"learning rate: {report.learning_rate:.3E}",
        f"global batch size: {report.global_batch_size:5d}",
    ]
    optional = [
        ("lm loss: {:.6E}", report.lm_loss if report.lm_loss != 0.0 else None),
        ("loss scale: {:.1f}", report.loss_scale),
        ("grad norm: {:.3f}", report.grad_norm),
        ("num zeros: {:.1f}", report.num_zeros),
        ("params norm: {:.3f}", report.params_norm),
    ]
    fields += [form.format(value) for form, value in optional if value is not None]
    fields += [
        f"actual seqlen: {report.seq_length:5d}",
        f"number of skipped iterations: {report.skipped:3d}",
        f"number of nan iterations: {report.nan:3d}",
        f"samples per second: {report.samples_per_s:.3f}",
        f"tokens per gpu per second (tgs): {report.tokens_per_s_per_device:.3f}",
        f"TFLOPs: {report.hardware_tflops:.2f}",
    ]
    if report.mfu is not None and report.hfu is not None:
        fields += [f"MFU: {report.mfu:.3f}", f"HFU: {report.hfu:.3f}"]
    return " " + " | ".join(fields) + " |"


def format_memory(size_bytes: int, rank: int, reserved_bytes: int | None = None) -> str:
    """The line about the rank that has held the most memory, and the most that an allocator has reserved."""
    line = f" most memory held by a rank: {size_bytes / 2**30:.2f} GiB, by rank {rank}"
    return line if reserved_bytes is None else f"{line}; reserved by an allocator: {reserved_bytes / 2**30:.2f} GiB"


def perplexity(loss: float) -> float:
    """exp(loss), where a loss beyond 20 counts as 20."""
    return math.exp(min(20.0, loss))


def format_validation(prefix: str, loss: float) -> str:
    """The validation line between its two dashed lines; `prefix` says where and on what the loss was measured."""
    line = f" validation loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def format_timers(times_ms: dict[str, list[float]], option: str = "minmax") -> str:
    """Milliseconds per step of each part of a step; `times_ms` has one value per rank.

    `option` as in --timing-log-option: minmax, max, or all for one value per rank.
    """
    what = {"minmax": "(min, max) time", "max": "max time", "all": "times"}
    rows = [f"{what[option]} across ranks (ms):"]
    for name, times in times_ms.items():
        label = "    " + (name + " ").ljust(48, ".") + ":"
        if option == "all":
            rows.append(f"  {name}:")
            rows += [f"     rank {rank:3d}: {t:.2f}" for rank, t in enumerate(times)]
        elif option == "max":
            rows.append(f"{label} {max(times):.2f}")
        else:
            rows.append(f"{label} ({min(times):.2f}, {max(times):.2f})")
    return "\n".join(rows)
