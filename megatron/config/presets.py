"""Presets: named starting points, which every other flag or argument overrides.

They are listed in presets.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from megatron.config.settings import Settings, did_you_mean
from megatron.config.validate import CONFLICTS


def _read() -> dict[str, dict[str, object]]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    presets = {}
    for name, settings in content["presets"].items():
        values: dict[str, object] = {}
        for group in settings.pop("parts", ()):
            values |= content["parts"][group]
        presets[name] = values | settings
    return presets


PRESETS: Mapping[str, Mapping[str, object]] = _read()

# A setting chosen on top of a preset or a file -> settings of the preset or file that become
# meaningless.
_YIELDS: Mapping[str, tuple[str, ...]] = {
    "recompute_granularity": ("recompute_method", "recompute_num_layers", "recompute_modules"),
    "num_layers": ("num_layers_per_virtual_pipeline_stage",),
    "pipeline_schedule": ("num_layers_per_virtual_pipeline_stage",),
    "weight_decay_schedule": ("start_weight_decay", "end_weight_decay"),
    "step_batch_size_schedule": ("global_batch_size",),
}

# Groups of settings in which a chosen one replaces the others.
_ALTERNATIVES = (
    *(names for names, reason in CONFLICTS if not reason),
    ("lr_schedule", "lr_decay_style"),
    ("pipeline_layout", "num_layers_per_virtual_pipeline_stage"),
)
_EVALUATED = ("valid_data_path", "test_data_path")  # they do not replace training data


def give_preset(settings: Settings, name: str, chosen: Mapping[str, object]) -> None:
    """Set a preset's values, except those that `chosen` settings replace or make meaningless."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS) or f": choose one of {', '.join(PRESETS)}"
        settings.problems.append(f"--preset '{name}' is unknown{hint}")
        return
    yields = yielding(PRESETS[name], chosen)
    for setting, value in PRESETS[name].items():
        if setting not in yields:
            settings.give(setting, value, f"preset {name}")


def yielding(values: Mapping[str, object], chosen: Mapping[str, object]) -> dict[str, str]:
    """Return the settings of `values` that yield, each with the `chosen` setting that wins."""
    per_chunk = "num_layers_per_virtual_pipeline_stage"
    pipeline = "pipeline_model_parallel_size"
    winners = {
        other: taker
        for taker, losers in _YIELDS.items()
        # --recompute-granularity none also counts as chosen
        if (chosen.get(taker) or (taker == "recompute_granularity" and taker in chosen))
        and chosen.get(taker) != "interleaved"
        for other in losers
    }
    for group in _ALTERNATIVES:
        takers = [name for name in group if chosen.get(name)]
        if takers and not (takers[0] in _EVALUATED and not chosen.get("train_data_path")):
            winners |= {name: takers[0] for name in group if values.get(name)}
    sizes = [values.get(per_chunk), values.get("num_layers"), chosen.get(pipeline)]
    if all(isinstance(number, int) and number > 0 for number in sizes):
        each, layers, ranks = cast(list[int], sizes)
        # with fewer than two chunks per rank there is nothing to interleave
        if ranks == 1 or layers % (ranks * each) or layers < 2 * ranks * each:
            winners[per_chunk] = pipeline
    winners |= {name: name for name in chosen}
    return {name: winner for name, winner in winners.items() if name in values}
