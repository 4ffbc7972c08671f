"""Settings and progress in the checkpoint from which a run resumes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.files import CONFIG, PROVENANCE, STATE, read_manifest
from megatron.checkpoint.find import find, required
from megatron.config import Config
from megatron.config.option import options_of
from megatron.config.settings import SECTIONS
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run.checkpoints import progress_from
from megatron.training.run.schedules import (
    Progress,
)

if TYPE_CHECKING:  # slow to import, because of torch
    from megatron.checkpoint.local_load import LocalCheckpoint


@dataclass(frozen=True)
class Stored:
    """The settings in a checkpoint.

    folder      the checkpoint's folder
    values      as stored, by name
    config      the same as a Config; settings that the checkpoint lacks come from this run
    provenance  the provenance in the checkpoint; empty if it has none
    state       counters of its run; None if they are in a file of the folder
    """

    folder: Path
    values: Mapping[str, object]
    config: Config
    provenance: Mapping[str, object]
    state: Mapping[str, Any] | None = None


def stored_settings(folder: Path, config: Config) -> Stored:
    """Return the settings in a checkpoint.

    Raises CheckpointError if they are not the settings of a run, or if one has an invalid value.
    """
    manifest = read_manifest(folder)
    provenance = manifest.read_json(PROVENANCE) if PROVENANCE in manifest.files else {}
    return _stored(folder, manifest.read_json(CONFIG), provenance, config)


def stored_in_memory(checkpoint: LocalCheckpoint, config: Config) -> Stored:
    """Return the settings and the progress in a local checkpoint. Raises CheckpointError."""
    about = checkpoint.about
    stored = _stored(Path(checkpoint.where), about["config"], about["provenance"], config)
    return replace(stored, state=checkpoint.state)


def _stored(
    folder: Path, stored: Mapping[str, Any], provenance: Mapping[str, object], config: Config
) -> Stored:
    if not all(isinstance(stored.get(section), dict) for section in ("model", "optimizer")):
        raise CheckpointError(
            f"{folder / CONFIG} does not contain the settings of a run: load another checkpoint"
        )
    values: dict[str, object] = {"pieces": stored.get("pieces", {})}
    sections = {}
    for name, section in SECTIONS.items():
        saved = stored.get(name)
        values |= saved if isinstance(saved, dict) else {}
        sections[name] = replace(
            getattr(config, name), **dict(accepted(section, values, folder / CONFIG))
        )
    return Stored(folder, values, replace(config, **sections), provenance)


def stored_to_load(config: Config) -> Stored | None:
    """Return the settings in the checkpoint that --load selects; None if its folder has none.

    Raises CheckpointError if all are damaged, and the errors of `stored_settings`.
    """
    load = config.checkpoint.load
    choice = find(load, config.checkpoint.load_tag) if load else None
    if load is None or choice is None or not (choice.folder or choice.rejected):
        return None
    return stored_settings(required(load, choice), config)


def stored_progress(stored: Stored | None, config: Config) -> Progress:
    """Return the progress from which a run continues; that of a new run if it takes only weights.

    Raises CheckpointError if the checkpoint does not contain it.
    """
    settings = config.checkpoint
    if stored is None or settings.finetune or settings.reset_iteration:
        return Progress()
    if config.model.moe_use_upcycling and stored.config.model.num_experts is None:
        return Progress()
    state = stored.state
    if state is None:
        state = read_manifest(stored.folder).read_json(STATE).get("state")
    return progress_from(state if isinstance(state, dict) else {}, stored.folder)


def accepted(
    section: type, values: Mapping[str, object], file: Path
) -> Iterator[tuple[str, object]]:
    """Yield the settings of a section that are among the `values` in a file, with their names.

    Raises CheckpointError for a value that the setting does not accept.
    """
    optional = {f.name for f in dataclasses.fields(section) if "None" in str(f.type)}
    for option in options_of(section):
        value = values.get(option.name)
        if value is None:
            if option.name in values and option.name in optional:
                yield option.name, None
            continue
        try:
            yield option.name, option.accept(option.named(value))
        except ValueError as error:
            raise CheckpointError(
                f"{file}: {option.name} {error}: load another checkpoint"
            ) from None


@contextlib.contextmanager
def checked(stored: Stored) -> Iterator[None]:
    """Convert the errors that a checkpoint's settings can raise to CheckpointError."""
    try:
        yield
    except (ConfigError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{stored.folder / CONFIG} has settings that cannot be used ({error}): load another "
            "checkpoint"
        ) from error


def words_of(value: object) -> object:
    """Return the entries of a list, as on the command line; another value as it is."""
    return " ".join(map(str, value)) if isinstance(value, list) and value else value
