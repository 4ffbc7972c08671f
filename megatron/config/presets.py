"""Presets: named starting points, which every other flag or argument overrides.

They are listed in presets.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.settings import Settings, did_you_mean


def _read() -> dict[str, dict[str, Any]]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    presets = {}
    for name, own in content["presets"].items():
        values: dict[str, Any] = {}
        for part in own.pop("parts", ()):
            values |= content["parts"][part]
        presets[name] = values | own
    return presets


PRESETS: Mapping[str, Mapping[str, Any]] = _read()

# A setting chosen in addition to the preset -> the preset's settings that it makes meaningless.
_YIELDS: Mapping[str, tuple[str, ...]] = {
    "fp16": ("bf16",),
    "squared_relu": ("swiglu", "openai_gelu"),
    "swiglu": ("openai_gelu",),
    "openai_gelu": ("swiglu",),
    "recompute_granularity": ("recompute_method", "recompute_num_layers", "recompute_modules"),
    "num_layers": ("num_layers_per_virtual_pipeline_stage",),
    "pipeline_layout": ("num_layers_per_virtual_pipeline_stage",),
    "enable_zbh1_pipeline": ("num_layers_per_virtual_pipeline_stage",),
}


def give_preset(settings: Settings, name: str, chosen: Mapping[str, Any]) -> None:
    """Set a preset's values, except those that `chosen` settings replace or make meaningless."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f": choose one of {', '.join(PRESETS)}"
        settings.problems.append(f"--preset '{name}' is unknown{hint}")
        return
    takers = [s for s in _YIELDS if s in chosen and chosen[s] is not False]
    dropped = {other for taker in takers for other in _YIELDS[taker]}
    if _cannot_interleave(PRESETS[name], chosen.get("pipeline_model_parallel_size")):
        dropped.add("num_layers_per_virtual_pipeline_stage")
    for setting, value in PRESETS[name].items():
        if setting not in chosen and setting not in dropped:
            settings.give(setting, value, f"preset {name}")


def _cannot_interleave(preset: Mapping[str, Any], pipeline_size: Any) -> bool:
    """Return whether another pipeline size makes the preset's interleaving impossible.

    The preset's chunk size then gives fewer than two chunks per rank.
    """
    each = preset.get("num_layers_per_virtual_pipeline_stage")
    if each is None or not isinstance(pipeline_size, int) or pipeline_size < 1:
        return False
    chunks, rest = divmod(preset["num_layers"], pipeline_size * each)
    return pipeline_size == 1 or rest != 0 or chunks < 2
