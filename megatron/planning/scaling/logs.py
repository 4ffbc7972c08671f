"""Training logs as text: our lines, Megatron-DeepSpeed's and Megatron-LM's. Needs no torch.

A line of iteration figures is `iteration N/ M | name: value | ...`, after whatever a launcher or a time stamp puts
before it. The block of arguments (`  name ....... value`) gives the settings, and DeepSpeed's print of its own
configuration the micro-batch that the engine really uses.
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.planning.metrics_file import SETTINGS, check_kinds, text_lines

_ITERATION = re.compile(r"\biteration\s+(\d{1,18})/\s*(\d+)\s*\|")
_ARGUMENT = re.compile(r"^.*?\s(\w+) \.{3,} (.*?)\s*$")
_ORIGIN = re.compile(r"\s{2,}\([^()]*\)$|\s\([^()]*\)$")
_ENGINE_MICRO_BATCH = re.compile(r"\btrain_micro_batch_size_per_gpu[ .]+(\d{1,18})\s*$")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)\]\s*iteration")

# Name in a line -> (our field, its type).
_FIELDS: Mapping[str, tuple[str, type]] = {
    "consumed samples": ("consumed_samples", int),
    "elapsed time per iteration (ms)": ("step_s", float),
    "global batch size": ("global_batch_size", int),
    "samples per second": ("samples_per_s", float),
    "tokens per gpu per second (tgs)": ("tokens_per_s_per_device", float),
    "TFLOPs": ("hardware_tflops", float),
    "throughput per GPU (TFLOP/s/GPU)": ("hardware_tflops", float),
    "number of skipped iterations": ("skipped", int),
    "number of nan iterations": ("nan", int),
    "loss scale": ("loss_scale", float),
    "grad norm": ("grad_norm", float),
}
# Settings that are read out of the block of arguments; others are of no use here.
_SETTINGS = {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads", "seq_length",
    "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "micro_batch_size", "global_batch_size",
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "train_iters",
    "recompute_granularity", "checkpoint_activations", "fp16", "bf16", "swiglu", "rampup_batch_size", "log_interval",
    "virtual_pipeline_model_parallel_size",
}  # fmt: skip


@dataclass(frozen=True)
class Log:
    """What a log holds: fields of each iteration line, from the last start on; `interval` is the steps between two."""

    lines: tuple[dict[str, Any], ...]
    settings: dict[str, Any]
    interval: int
    device: str | None = None


def read_log(path: Path) -> Log:
    """Read a log; one without iteration lines has none."""
    lines: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    for text in text_lines(path):
        found = iteration_fields(text)
        if found is not None:
            if lines and found["iteration"] <= lines[-1]["iteration"]:
                lines.clear()  # started again
            lines.append(found)
            continue
        engine = _ENGINE_MICRO_BATCH.search(text)
        if engine:
            settings["engine_micro_batch_size"] = int(engine[1])
            continue
        argument = _ARGUMENT.match(text)
        if argument and argument[1] in _SETTINGS:
            settings.setdefault(argument[1], _value(argument[2]))
    check_kinds(settings, SETTINGS, path)
    if settings.get("checkpoint_activations") and not settings.get("recompute_granularity"):
        settings["recompute_granularity"] = "full"
    gaps = {b["iteration"] - a["iteration"] for a, b in itertools.pairwise(lines)}
    interval = min(gaps) if gaps else int(settings.get("log_interval") or 1)
    return Log(tuple(lines), settings, max(1, interval))


def iteration_fields(text: str) -> dict[str, Any] | None:
    """The fields of an iteration line under the names of `Line`; None for any other line, or one cut short.

    >>> iteration_fields(" iteration 2/ 5 | elapsed time per iteration (ms): 1500.0 | global batch size: 8 |")
    {'iteration': 2, 'step_s': 1.5, 'global_batch_size': 8}
    """
    head = _ITERATION.search(text)
    if head is None:
        return None
    fields: dict[str, Any] = {"iteration": int(head[1])}
    for part in text[head.end() :].split("|")[:-1]:
        name, _, value = part.rpartition(":")
        known = _FIELDS.get(name.strip())
        if known is None:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if abs(number) < 2**63:
            fields[known[0]] = known[1](number)
    if not (fields.get("step_s", 0) > 0 and fields.get("global_batch_size", 0) > 0):
        return None
    fields["step_s"] /= 1000.0
    stamp = _STAMP.search(text)
    if stamp:
        with suppress(ValueError):  # no date of any calendar
            fields["clock_s"] = datetime.fromisoformat(stamp[1]).replace(tzinfo=UTC).timestamp()
    return fields


def _value(text: str) -> Any:
    """An argument's value, without the origin that our own block adds behind it."""
    text = _ORIGIN.sub("", text).strip()
    if text in ("None", "none", ""):
        return None
    if text in ("True", "False"):
        return text == "True"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
