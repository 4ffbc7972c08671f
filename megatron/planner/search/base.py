"""The fixed part of a search: a model and flags of pretrain_gpt.py, without what the search decides."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import PRESETS, Config
from megatron.config.command_line import Flag, flag_table, parse_plan, scan
from megatron.config.layout import MODULES
from megatron.config.parallel import SCHEDULES
from megatron.config.settings import did_you_mean, raise_problems
from megatron.errors import ConfigError

_DIMENSION_OF: Mapping[str, str] = {
    "global_batch_size": "gbs", "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp",
    "micro_batch_size": "mbs", "sequence_parallel": "sp", "tp_comm_overlap": "overlap", "zero_stage": "zero",
    "rank_order": "order", "device_order": "devices", "enable_zbh1_pipeline": "schedule",
}  # fmt: skip
_RECOMPUTE = ("recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers")
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
# What the tool says with flags of its own, or what must not be said in two places.
_REFUSED = {
    "world_size": "give --nodes, or --devices for a part of a node",
    "cluster": "give it before --, where the tool reads it",
    "deepspeed_config": "give its settings as flags: it would say again what the search decides",
    "virtual_pipeline_model_parallel_size": "give --num-layers-per-virtual-pipeline-stage",
}
# One replica of one device: no flag of a fixed part can contradict it.
_NEUTRAL = (
    "--tensor-model-parallel-size 1 --micro-batch-size 1 --recompute-granularity none "
    "--num-layers-per-virtual-pipeline-stage none --no-sequence-parallel --no-tp-comm-overlap "
    "--no-enable-zbh1-pipeline --rank-order auto"
).split()


@dataclass(frozen=True)
class Base:
    """What every layout of a search has in common.

    config     of one device
    wanted     what flags fixed, by dimension
    per_chunk  layers of a chunk, where a flag fixed them
    preset     its name, or None; flags: the rest of the command line that made it
    """

    config: Config
    wanted: Mapping[str, tuple[Any, ...]]
    per_chunk: int | None
    preset: str | None
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        model = self.config.model
        return self.preset or f"{model.num_layers} layers of width {model.hidden_size}"


def make_base(preset: str | None, flags: Sequence[str], batches: Sequence[int] = ()) -> Base:
    """The model of a preset (its layout and batch left out) and of flags, of which those of the layout are wishes.

    batches: global batches of the search; none: the flag's, else the preset's. Raises ConfigError.
    """
    scanned = scan(flags)
    raise_problems(scanned.problems)
    named = scanned.flags.pop("--preset", None)
    if named is not None:
        if preset is not None or len(named) != 1:
            raise ConfigError(f"--preset {' '.join(named)} beside --preset {preset}: choose one")
        preset = named[0]
    if preset is not None and preset not in PRESETS:
        hint = did_you_mean(preset, PRESETS) or f": choose one of {', '.join(PRESETS)}."
        raise ConfigError(f"--preset '{preset}' is unknown{hint} Its sizes may also follow -- as flags")
    searched, rest = _split(scanned.flags)
    wanted = _wishes(searched)
    if batches:
        if set(batches) & set(wanted.get("gbs", batches)) != set(batches):
            raise ConfigError(f"--global-batch and --global-batch-size {wanted['gbs'][0]} contradict each other")
        wanted["gbs"] = tuple(batches)
    elif "gbs" not in wanted and preset is not None and "global_batch_size" in PRESETS[preset]:
        wanted["gbs"] = (PRESETS[preset]["global_batch_size"],)
    if "gbs" not in wanted:
        raise ConfigError("--global-batch is missing: give the samples of a step, such as 640, or 640:8000 for a range")
    name = ["--preset", preset] if preset is not None else []
    stages = 1 + " ".join(scanned.flags.get("--pipeline-layout", [])).count(",")
    batch = ["--pipeline-model-parallel-size", str(stages), "--global-batch-size", str(max(wanted["gbs"]))]
    config = parse_plan([*name, *_NEUTRAL, *batch, *rest])
    per_chunk = searched.get(_PER_CHUNK)
    if per_chunk is None and _PER_CHUNK in searched:
        wanted["chunks"] = (1,)
    return Base(config, wanted, per_chunk, preset, tuple(rest))


def _split(flags: Mapping[str, list[str]]) -> tuple[dict[str, Any], list[str]]:
    """(values of what the search decides, by setting; the other flags as words)."""
    searched, implied, rest = dict[str, Any](), dict[str, Any](), list[str]()
    for spelling, words in flags.items():
        flag = flag_table()[spelling]
        name = flag.option.name if flag.option is not None else ""
        if name in _REFUSED:
            raise ConfigError(f"{' '.join([spelling, *words])} has no place here: {_REFUSED[name]}")
        if set(flag.translated) & {"pipeline_layout", _PER_CHUNK} and words != ["type:transformer"]:
            raise ConfigError(f"{' '.join([spelling, *words])} has no place here: give --pipeline-layout, or neither")
        if name in _DIMENSION_OF or name in _RECOMPUTE or name == _PER_CHUNK:
            value = _value(spelling, flag, words)
            if searched.setdefault(name, value) != value:
                raise ConfigError(f"{' '.join([spelling, *words])} contradicts another flag of the same setting")
            assert flag.option is not None
            implied.update(flag.option.implies.get(spelling, {}))
        else:
            rest += [spelling, *words]
    return implied | searched, rest


def _value(spelling: str, flag: Flag, words: list[str]) -> Any:
    assert flag.option is not None
    try:
        if flag.kind != "value" and not words:
            return flag.value
        return flag.option.parse(words)
    except ValueError as error:
        raise ConfigError(f"{spelling} {error}") from None


def _wishes(searched: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    wanted: dict[str, tuple[Any, ...]] = {}
    for setting, dimension in _DIMENSION_OF.items():
        value = searched.get(setting)
        if dimension == "schedule" and value is not None:
            wanted["schedule"] = ("zb-h1",) if value else tuple(s for s in SCHEDULES if s != "zb-h1")
        elif value is not None:
            wanted[dimension] = (value,)
    if (pattern := _recompute_wish(searched)) is not None:
        wanted["recompute"] = (pattern,)
    return wanted


def _recompute_wish(searched: Mapping[str, Any]) -> str | None:
    given = {name: searched[name] for name in _RECOMPUTE if name in searched}
    if not given:
        return None
    kind = given.get("recompute_granularity")
    modules, method = given.get("recompute_modules"), given.get("recompute_method")
    if modules is not None and kind != "selective":
        raise ConfigError(f"--recompute-modules {' '.join(modules)} needs --recompute-granularity selective")
    layers = given.get("recompute_num_layers")
    if (method is not None or layers is not None) and kind != "full":
        raise ConfigError("--recompute-method and --recompute-num-layers need --recompute-granularity full")
    if kind is None:
        return "none"
    if kind == "selective":
        return "selective:" + "+".join(m for m in MODULES if m in modules) if modules else "selective"
    words = ["full"]
    if method is not None or layers is not None:
        words.append(method or "uniform")
    return ":".join(words if layers is None else [*words, str(layers)])
