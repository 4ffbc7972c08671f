"""The run's side of checkpoints: what is kept beside the weights, and where a resumed run continues."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint.find import Found, find, required
from megatron.checkpoint.folder import CONFIG
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.settings import ARCHITECTURE, plain
from megatron.config import Config
from megatron.data.ledger import is_consumed
from megatron.data.sampler import are_ranges
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology
from megatron.training.metrics import MetricsFile
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter
from megatron.untrusted import is_count

if TYPE_CHECKING:
    from megatron.checkpoint.load import LoadedState

# Settings that shape the learning rate and weight decay over the run.
SCHEDULE = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens", "lr_warmup_fraction",
    "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_wsd_decay_style", "lr_wsd_decay_iters",
    "lr_wsd_decay_samples", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip


def checkpoint_to_load(config: Config, topology: Topology, reporter: Reporter | None = None) -> Path | None:
    """The checkpoint that --load names: the newest good one; None without --load and where there is none at all.

    Rank 0 looks, all ranks get its answer. What is broken, and where the tracker file is wrong, the reporter says.
    Raises CheckpointError where all that are there are broken, and where --load-tag or --exit-on-missing-checkpoint
    asks for one that does not exist.
    """
    settings = config.checkpoint
    if not settings.load:
        return None
    from megatron.checkpoint.together import decided_by_first  # with torch's checkpoints, which take long to import

    directory = settings.load

    def look() -> Found:
        found = find(directory, settings.load_tag)
        if found.rejected or settings.exit_on_missing_checkpoint:
            required(directory, found)
        return found

    found = decided_by_first(topology, look)
    if reporter is not None:
        say_found(found, reporter.say, reporter.metrics)
    return found.folder


def say_found(found: Found | LoadedState, say: Callable[[str], object], metrics: MetricsFile) -> None:
    """Report why a checkpoint was chosen, and those that are broken, so that nobody overlooks it."""
    for note in found.notes:
        say(f" note: {note}")
    for one in found.rejected:
        say(f"WARNING: broken checkpoint {one}\nWARNING: {found.folder} is loaded instead of it")
        metrics.write("rejected_checkpoint", folder=str(one.folder), reason=one.reason, instead=str(found.folder))


def with_checkpoint_settings(config: Config, folder: Path | None, reporter: Reporter) -> Config:
    """`config` with what --use-checkpoint-args and --use-checkpoint-opt_param-scheduler take from the checkpoint.

    The schedule given here holds otherwise; where it differs from the checkpoint's, the log says so.
    """
    if folder is None:
        return config
    stored, taken = read_manifest(folder).read_json(CONFIG), dict[str, Any]()
    if not all(isinstance(stored.get(section), dict) for section in ("model", "optimizer")):
        raise CheckpointError(f"{folder / CONFIG} does not hold the settings of a run: load another checkpoint")
    if config.checkpoint.use_checkpoint_args:
        names = set(ARCHITECTURE) | {"max_position_embeddings"}
        if config.tokenizer.tokenizer_type is not None:
            names.remove("vocab_size")  # the tokenizer says it, and may add to what --vocab-size gives
        taken |= {name: value for name, value in stored["model"].items() if name in names}
    theirs, ours = stored["optimizer"], plain(config.optimizer)
    different = {name: theirs[name] for name in SCHEDULE if name in theirs and theirs[name] != ours[name]}
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        taken |= different
    elif different and not (config.checkpoint.override_opt_param_scheduler or config.checkpoint.finetune):
        listed = ", ".join(f"{name} {ours[name]} (was {value})" for name, value in different.items())
        reporter.say(
            f" note: the schedule differs from the checkpoint's and is the one given here: {listed}. "
            f"--use-checkpoint-opt_param-scheduler takes the checkpoint's"
        )
    return config.replace(**taken) if taken else config


def load_checkpoint(
    config: Config, topology: Topology, engine: Engine, folder: Path | None, reporter: Reporter
) -> Progress:
    """Load what `checkpoint_to_load` found into the engine; where training continues. Raises CheckpointError."""
    settings = config.checkpoint
    if folder is None:
        if settings.load:
            reporter.say(f" no checkpoint in {settings.load} yet: starting from initial weights")
        return Progress()
    assert settings.load is not None, "a folder was found in it"
    from megatron.checkpoint.load import load  # as above

    start = time.perf_counter()
    loaded = load(settings.load, engine, topology, config, folder, topology.flight.alive)
    assert loaded.folder is not None, "it raises when there is nothing to load"
    say_found(loaded, reporter.say, reporter.metrics)
    reporter.say(
        f" loaded checkpoint {loaded.folder} in {time.perf_counter() - start:.2f} s"
        + ("" if loaded.optimizer else ", without optimizer state")
    )
    if settings.finetune or settings.reset_iteration:
        return Progress()
    return progress_from(loaded.state, loaded.folder)


def progress_from(state: dict[str, Any], folder: Path) -> Progress:
    """The counters that a run saved. Raises CheckpointError when they are not there."""
    lists = ("sources", "left_out", "recent_losses")  # older checkpoints have none
    names = {field.name for field in dataclasses.fields(Progress)} - set(lists)
    missing = sorted(name for name in names if not is_count(state.get(name)))
    if missing:
        raise CheckpointError(
            f"{folder} does not say how far its run came ({', '.join(missing)} missing or no count): load it with "
            f"--finetune"
        )
    sources, left_out, losses = state.get("sources", {}), state.get("left_out", []), state.get("recent_losses", [])
    if not isinstance(sources, dict) or not all(is_consumed(record) for record in sources.values()):
        raise CheckpointError(f"{folder} holds a damaged list of data sources: load another checkpoint with --load-tag")
    if not are_ranges(left_out) or not isinstance(losses, list) or not all(isinstance(x, float) for x in losses):
        raise CheckpointError(
            f"{folder} holds a damaged list of left-out samples or of losses: load another checkpoint with --load-tag"
        )
    return Progress(
        **{name: state[name] for name in names}, sources=sources, left_out=left_out, recent_losses=losses
    )
