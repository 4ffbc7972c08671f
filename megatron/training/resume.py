"""The run's side of checkpoints: what is kept beside the weights, and where a resumed run continues."""
from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import CONFIG, find_folder, latest_iteration, read_json
from megatron.checkpoint.settings import ARCHITECTURE, plain
from megatron.config import Config
from megatron.data.ledger import is_consumed
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology
from megatron.training.progress import Progress
from megatron.training.reporter import Reporter

# Settings that shape the learning rate and weight decay over the run.
SCHEDULE = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_decay_tokens", "lr_warmup_fraction",
    "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_wsd_decay_style", "lr_wsd_decay_iters",
    "lr_wsd_decay_samples", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip


def checkpoint_to_load(config: Config, topology: Topology) -> Path | None:
    """The checkpoint that --load names; None without --load and where there is none yet.

    Rank 0 looks, all ranks get its answer. Raises CheckpointError where --load-tag or --exit-on-missing-checkpoint
    asks for one that does not exist.
    """
    settings = config.checkpoint
    if not settings.load:
        return None
    from megatron.checkpoint.together import decided_by_first  # with torch's checkpoints, which take long to import

    directory = settings.load

    def look() -> Path | None:
        wanted = settings.load_tag is not None or settings.exit_on_missing_checkpoint
        if not wanted and latest_iteration(directory) is None:
            return None
        return find_folder(directory, settings.load_tag)

    return decided_by_first(topology, look)


def with_checkpoint_settings(config: Config, folder: Path | None, reporter: Reporter) -> Config:
    """`config` with what --use-checkpoint-args and --use-checkpoint-opt_param-scheduler take from the checkpoint.

    The schedule given here holds otherwise; where it differs from the checkpoint's, the log says so.
    """
    if folder is None:
        return config
    stored, taken = read_json(folder / CONFIG), dict[str, Any]()
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
    loaded = load(settings.load, engine, topology, config)
    reporter.say(
        f" loaded checkpoint {folder} in {time.perf_counter() - start:.2f} s"
        + ("" if loaded.optimizer else ", without optimizer state")
    )
    if settings.finetune or settings.reset_iteration:
        return Progress()
    return progress_from(loaded.state, folder)


def progress_from(state: dict[str, Any], folder: Path) -> Progress:
    """The counters that `save_checkpoint` wrote. Raises CheckpointError when they are not there."""
    names = {field.name for field in dataclasses.fields(Progress)} - {"sources"}
    if not names <= state.keys():
        raise CheckpointError(
            f"{folder} does not say how far its run came ({', '.join(sorted(names - state.keys()))} missing): load it "
            f"with --finetune"
        )
    sources = state.get("sources", {})  # older checkpoints have none
    if not isinstance(sources, dict) or not all(is_consumed(record) for record in sources.values()):
        raise CheckpointError(f"{folder} holds a damaged list of data sources: load another checkpoint with --load-tag")
    return Progress(**{name: int(state[name]) for name in names}, sources=sources)


def save_checkpoint(
    config: Config, topology: Topology, engine: Engine, reporter: Reporter, progress: Progress
) -> None:
    """Write a checkpoint of this iteration into the --save folder. All ranks call it. Raises CheckpointError.

    Dropout masks and the order of the data are functions of seed and position, so no generator state is kept.
    """
    directory, iteration = config.checkpoint.save, progress.iteration
    assert directory is not None, "a checkpoint is written only with --save"
    reporter.say(f"saving checkpoint at iteration {iteration:7d} to {directory}")
    from megatron.checkpoint.save import save  # as above

    start = time.perf_counter()
    folder = save(directory, iteration, engine, topology, config, dataclasses.asdict(progress))
    seconds = time.perf_counter() - start
    reporter.say(f"  successfully saved checkpoint at iteration {iteration:7d} to {directory}")
    if topology.world.is_first:
        size = sum(file.stat().st_size for file in folder.iterdir())
        reporter.say(
            f"Checkpoint Save GB: {size / 1e9:.3f}, GB/Sec: {size / 1e9 / seconds:.2f}, Latency(second): {seconds:.3f}"
        )
        reporter.metrics.write(
            "checkpoint", iteration=iteration, folder=str(folder), size_bytes=size, elapsed_s=seconds
        )

