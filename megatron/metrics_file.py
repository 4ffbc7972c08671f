"""The metrics file of a run, a JSON record on each line, and the JSON files beside it; needs no
torch.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.untrusted import is_count, open_regular, read_json

_MOST_BYTES, _LONGEST_LINE = 1 << 31, 1 << 20
_MOST_BESIDE = 1 << 24
Kinds = Mapping[str, Callable[[Any], bool]]


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e100  # which neither NaN nor infinity is


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _table(value: Any) -> bool:
    return isinstance(value, dict)


RECORD: Kinds = {
    **dict.fromkeys(
        (
            "iteration",
            "global_batch_size",
            "consumed_samples",
            "memory_bytes",
            "memory_rank",
            "reserved_bytes",
            "skipped",
            "nan",
        ),
        is_count,
    ),
    **dict.fromkeys(
        (
            "time",
            "step_time_s",
            "samples_per_s",
            "tokens_per_s",
            "tokens_per_s_per_device",
            "model_tflops",
            "hardware_tflops",
            "loss_scale",
            "grad_norm",
            "lm_loss",
            "learning_rate",
        ),
        _number,
    ),
    **dict.fromkeys(("event", "device", "reason", "dataset"), _text),
    **dict.fromkeys(("config", "layout", "times_ms"), _table),
}
"""What each field of a record is, where it is there and not null."""
SETTINGS: Kinds = {
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "seq_length",
            "vocab_size",
            "make_vocab_size_divisible_by",
            "micro_batch_size",
            "global_batch_size",
            "world_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "data_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "train_iters",
            "log_interval",
        ),
        is_count,
    ),
    "recompute_granularity": _text,
}
"""The same of the settings that figures are made of."""


def check_kinds(values: Mapping[str, Any], kinds: Kinds, where: object) -> None:
    """Raise DataError for a value that is not of its kind."""
    for name, is_right in kinds.items():
        if (value := values.get(name)) is not None and not is_right(value):
            shown = repr(value)[:60]
            raise DataError(
                f"{where}: {name} is {shown}, which no run writes: the file is damaged, or another "
                "one"
            )


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a text file. Raises DataError for one that cannot be read or is far too
    large.
    """
    with open_regular(path, error=DataError) as raw:
        if os.fstat(raw.fileno()).st_size > _MOST_BYTES:
            raise DataError(
                f"{path} has more than {_MOST_BYTES:,} bytes: it is not what a run writes"
            )
        with io.TextIOWrapper(raw, errors="replace") as file:
            yield from iter(lambda: file.readline(_LONGEST_LINE), "")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order, each with its "event"; a line cut short is left out,
    and a start or an iteration without its number.

    Raises DataError for a file that cannot be read, and for a record that no run wrote.
    """
    records = []
    for number, line in enumerate(text_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or "event" not in record:
            continue
        check_kinds(record, RECORD, f"{path}, line {number}")
        if record["event"] not in ("start", "iteration") or record.get("iteration") is not None:
            records.append(record)
    return records


def read_beside(path: Path, kinds: Kinds) -> dict[str, Any]:
    """A JSON object beside a metrics file; {} where there is none. Raises DataError for one that
    cannot be read.
    """
    if not path.exists():
        return {}
    found: dict[str, Any] = read_json(path, _MOST_BESIDE, error=DataError)
    check_kinds(found, kinds, path)
    return found


POINT: Kinds = {
    **dict.fromkeys(("name", "experiment", "kind", "parameter"), _text),
    "settings": _table,
    "warm_up": is_count,
    "value": _number,
}
RESULT: Kinds = {"status": _text, "reason": _text}
