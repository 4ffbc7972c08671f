"""Reads a run's metrics file, which has one JSON record per line, and the JSON files next to it.

This module needs no torch.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.untrusted import check_depth, is_count, open_regular, read_json

_MOST_BYTES = 1 << 31
_LONGEST_LINE = 1 << 20
_MOST_BESIDE = 1 << 24
Check = Callable[[Any], bool]
Kinds = Mapping[Check, Sequence[str]]
"""Names of values, by the check that each value must pass if it is present and not null."""


def strict_json(
    value: object,
    constant: Callable[[str], object] = lambda _: None,
    indent: int | None = None,
) -> str:
    """Return JSON, which cannot represent infinities and NaN: `constant` replaces their names."""
    text = json.dumps(value, default=str)
    return json.dumps(json.loads(text, parse_constant=constant), indent=indent)


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e100  # excludes NaN and infinity


def _number_or_null(value: object) -> bool:
    return value is None or _number(value)


def is_text(value: object) -> bool:
    return isinstance(value, str)


def _table(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(is_right: Check) -> Check:
    return lambda values: isinstance(values, list) and all(map(is_right, values))


def _table_of(is_right: Check) -> Check:
    return lambda value: _table(value) and all(map(is_right, value.values()))


def _samples(value: object) -> bool:
    return is_count(value) or _counts(value)  # a number in an evaluation, a list in a rollback


def _yes_or_no(value: object) -> bool:
    return isinstance(value, bool)


def _phase(value: Any) -> bool:
    """Return whether this is a phase of the data; see history.summary."""
    counts = ("position", "tokens", "seq_length", "seed")
    return (
        _table(value)
        and all(is_count(value.get(name)) for name in counts)
        and is_text(value.get("packing"))
        and _table_of(_number)(value.get("blend"))
    )


_counts = _list_of(is_count)
_numbers = _list_of(_number_or_null)

RECORD: Kinds = {
    is_count: (
        "iteration total_iterations back_to_iteration parameters global_batch_size seq_length "
        "consumed_samples consumed_tokens size_bytes memory_bytes memory_rank reserved_bytes "
        "skipped skipped_since skipped_iterations nan empty examples cut slow_ranks seed context "
        "stride bytes restart ranks received_bytes reached"
    ).split(),
    _number: (
        "time step_time_s samples_per_s tokens_per_s tokens_per_s_per_device model_tflops "
        "hardware_tflops loss_scale grad_norm num_zeros params_norm lm_loss ema_loss loss median "
        "learning_rate decoupled_learning_rate mfu hfu elapsed_s stall_s seconds bubble predicted_bubble energy_j "
        "energy_kwh joules_per_token min_ms median_ms max_ms accuracy accuracy_bytes "
        "outage_s accuracy_tokens log_likelihood perplexity bits_per_byte tokens tokens_per_second"
    ).split(),
    is_text: (
        "event device reason dataset corpus folder instead task checkpoint first file prompt text "
        "loss_name cause"
    ).split(),
    _yes_or_no: ("background",),
    _table: (
        "config",
        "layout",
        "differs",
        "costs",
        "versions",
        "balancing",
        "components",
        "scalars",
        "ways",
    ),
    _numbers: ("stage_memory_bytes",),
    _samples: ("samples",),
    _list_of(_counts): ("left_out",),
    _list_of(is_text): ("places", "data"),
    _list_of(_table): ("slow",),
    _list_of(_phase): ("phases",),
    _table_of(_table_of(_number_or_null)): ("phases_ms", "sources"),
    _table_of(_table): ("experts", "results"),
}
"""Fields of a record."""
SETTINGS: Kinds = {
    is_count: (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_key_value_heads seq_length "
        "vocab_size make_vocab_size_divisible_by micro_batch_size global_batch_size world_size "
        "tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size "
        "virtual_pipeline_model_parallel_size train_iters log_interval"
    ).split(),
    is_text: ("recompute_granularity",),
}
"""Settings that computations on a metrics file need."""


def check_kinds(values: Mapping[str, Any], kinds: Kinds, where: object) -> None:
    """Raise DataError if a value does not pass its check."""
    for is_right, names in kinds.items():
        for name in names:
            if (value := values.get(name)) is not None and not is_right(value):
                raise DataError(
                    f"{where}: {name} is {repr(value)[:60]}, which no run writes: the file is "
                    "damaged, or not the right file"
                )


class Records(list[dict[str, Any]]):
    """Records of a metrics file in order; `left_out` counts the lines that were left out."""

    left_out = 0


def read_records(path: Path, event: str | None = None) -> Records:
    """Return the records in a metrics file, only those of `event` if it is given.

    Lines that are not records, such as truncated ones, are left out, and so are start and iteration
    records without an iteration number. Raises DataError if the file cannot be read or has a record
    that no run would write.
    """
    records = Records()
    with open_regular(path, error=DataError) as raw:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path} has more than {_MOST_BYTES:,} bytes: no run writes that many")
        file = io.TextIOWrapper(raw, errors="replace")
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), ""), 1):
            record = _record(line)
            if record is None:
                records.left_out += bool(line.strip())
                continue
            check_kinds(record, RECORD, f"{path}, line {number}")
            if event in (None, record["event"]):
                records.append(record)
    return records


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        check_depth(record)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or "event" not in record:
        return None
    numbered = record["event"] not in ("start", "iteration") or record.get("iteration") is not None
    return record if numbered else None


def read_beside(path: Path, kinds: Kinds) -> dict[str, Any]:
    """Return the JSON object in a file next to a metrics file, without nulls; {} if there is none.

    Raises DataError if the file cannot be read or has a value that no run would write.
    """
    if not path.exists():
        return {}
    content: dict[str, Any] = read_json(path, _MOST_BESIDE, error=DataError)
    check_kinds(content, kinds, path)
    return {name: value for name, value in content.items() if value is not None}


POINT: Kinds = {
    is_text: ("name", "experiment", "kind", "parameter"),
    _table: ("settings",),
    is_count: ("warm_up",),
    _number: ("value",),
}
RESULT: Kinds = {is_text: ("status", "kind", "reason")}
