"""The configuration of a run: one frozen object with a section for each subject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.deepspeed_json import merge_deepspeed_json
from megatron.config.files import CheckpointConfig, DataConfig, LoggingConfig
from megatron.config.model import ModelConfig, TokenizerConfig
from megatron.config.option import options_of
from megatron.config.parallel import EngineConfig, ParallelConfig, RecomputeConfig
from megatron.config.pieces import PLAIN, Pieces
from megatron.config.presets import give_preset
from megatron.config.resolve import resolve
from megatron.config.settings import (
    SECTIONS,
    Settings,
    all_options,
    did_you_mean,
    raise_problems,
    section_of,
)
from megatron.config.training import (
    BatchConfig,
    KernelConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron.config.validate import run_requirements, validate
from megatron.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """All settings, resolved and checked. Make one with Config.create(...) or parse_args(...).

    `pieces` are those of one's own (with_pieces); they stay through replace(...) and are in no
    dictionary.
    """

    model: ModelConfig
    tokenizer: TokenizerConfig
    parallel: ParallelConfig
    recompute: RecomputeConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    engine: EngineConfig
    kernels: KernelConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    training: TrainingConfig
    logging: LoggingConfig
    given: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)
    origins: Mapping[str, str] = dataclasses.field(compare=False, repr=False)
    notices: tuple[str, ...] = dataclasses.field(compare=False, repr=False, default=())
    # The notices that do not follow from the settings: of flags that are no settings, and of the
    # DeepSpeed JSON.
    standing_notices: tuple[str, ...] = dataclasses.field(compare=False, repr=False, default=())
    pieces: Pieces = PLAIN

    @classmethod
    def create(cls, preset: str | None = None, **values: Any) -> Config:
        """A configuration from flat setting names: Config.create(num_layers=4, hidden_size=64,
        ...).

        Required: num_layers, hidden_size, num_attention_heads, seq_length. Where absent:
        micro_batch_size 1, lr 1e-4, train_iters 1, world_size one replica. `preset` names a preset
        to start from. Raises ConfigError with all problems.
        """
        settings = Settings()
        if preset is not None:
            give_preset(settings, preset, chosen=values)
        for name, value in values.items():
            settings.give(name, value, "argument")
        return finish(settings)

    def replace(self, **values: Any) -> Config:
        """A copy with some settings changed; what follows from them is computed anew. None un-sets
        a setting.
        """
        settings = Settings(
            given=dict(self.given),
            origins={n: self.origins[n] for n in self.given},
            notices=list(self.standing_notices),
            pieces=self.pieces,
        )
        for name, value in values.items():
            settings.give(name, value, "argument")
        merge = values.get("deepspeed_config") is not None
        return finish(settings, merge_json=merge)

    def with_pieces(self, **pieces: Any) -> Config:
        """A copy with pieces of one's own: layer, model, datasets, optimizer, schedule, callbacks
        (see Pieces).
        """
        return dataclasses.replace(self, pieces=dataclasses.replace(self.pieces, **pieces))

    @property
    def schedule(self) -> str | Callable[..., Any]:
        """The pipeline's order of computation: the name of one, or one's own."""
        return self.pieces.schedule or self.parallel.schedule

    @property
    def schedule_name(self) -> str:
        """Name of the schedule, for people."""
        own = self.pieces.schedule
        return (
            self.parallel.schedule
            if own is None
            else str(getattr(own, "__name__", type(own).__name__))
        )

    def origin(self, name: str) -> str:
        """Where a setting is from: 'default', 'command line', 'preset X', 'FILE:LINE: key',
        'derived ...' ...
        """
        self._check_name(name)
        return self.origins[name]

    def get(self, name: str) -> Any:
        """The value of a setting by its flat name."""
        self._check_name(name)
        return getattr(getattr(self, section_of(name)), name)

    @property
    def metrics_path(self) -> Path | None:
        """--metrics-file, or metrics.jsonl in the --save folder; None without either."""
        if self.logging.metrics_file:
            return Path(self.logging.metrics_file)
        return Path(self.checkpoint.save) / "metrics.jsonl" if self.checkpoint.save else None

    @staticmethod
    def _check_name(name: str) -> None:
        if name not in all_options():
            raise ConfigError(f"unknown setting '{name}'{did_you_mean(name, all_options())}")

    def num_micro_batches(self, global_batch_size: int | None = None) -> int:
        """Micro-batches of one step on each replica, for the full or the given global batch."""
        size = self.batch.global_batch_size if global_batch_size is None else global_batch_size
        per_round = self.batch.micro_batch_size * self.parallel.data_parallel_size
        if size % per_round:
            raise ConfigError(
                f"global batch size {size} is not a multiple of micro-batch-size "
                f"{self.batch.micro_batch_size} x "
                f"data-parallel size {self.parallel.data_parallel_size} = {per_round}"
            )
        return size // per_round

    def to_dict(self) -> dict[str, Any]:
        """All settings, flat and JSON-serialisable, for checkpoints and logs."""
        return {name: _plain(self.get(name)) for name in all_options()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The inverse of to_dict. A value equal to what would be derived stays derived.

        Raises ConfigError for an unknown name or an impossible value.
        """
        options = all_options()
        default = {n: _plain(o.default) for n, o in options.items()}
        chosen = {
            n: v
            for n, v in values.items()
            if n not in options or (not options[n].internal and v != default[n])
        }
        follows = {n for n in chosen if n in options and options[n].derived}
        first = Settings()
        for name in chosen.keys() - follows:
            first.give(name, chosen[name], "argument")
        resolve(first)
        settings = Settings()
        for name, value in chosen.items():
            if name not in follows or _plain(first.values[name]) != value:
                settings.give(name, value, "argument")
        return finish(settings, merge_json=False)


def _plain(value: Any) -> Any:
    return (
        list(value)
        if isinstance(value, tuple)
        else dict(value)
        if isinstance(value, dict)
        else value
    )


def _note_inert(settings: Settings) -> None:
    for name, value in settings.given.items():
        option = all_options()[name]
        if (
            option.inert
            and value != option.default
            and not settings.origins[name].startswith("preset")
        ):
            settings.notices.append(f"{option.written(value)} has no effect: {option.inert}")


def finish(settings: Settings, *, merge_json: bool = True, run: bool = False) -> Config:
    """Merge the DeepSpeed JSON, fill in what follows, check everything and freeze it.

    run: also require what only a training run needs. Raises ConfigError.
    """
    if merge_json:
        merge_deepspeed_json(settings)
    if run:
        run_requirements(settings)
    standing = tuple(dict.fromkeys(settings.notices))
    resolve(settings)
    _note_inert(settings)
    validate(settings)
    raise_problems(settings.problems)
    sections = {
        attribute: section(**{o.name: settings.values[o.name] for o in options_of(section)})
        for attribute, section in SECTIONS.items()
    }
    return Config(
        **sections,
        given=settings.given,
        origins=settings.origins,
        notices=tuple(dict.fromkeys(settings.notices)),
        standing_notices=standing,
        pieces=settings.pieces,
    )
