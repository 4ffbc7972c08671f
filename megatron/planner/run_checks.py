"""Checks that a run makes before its first step, by one process without devices.

A wrong path then costs seconds on one node, not minutes on all. Torch is imported only by what
needs it: a checkpoint to resume from, --freeze, LoRA, --save-hf, --fim-rate, and the user's
callbacks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint.find import chosen_checkpoint, left_behind, open_checkpoint
from megatron.checkpoint.settings import check_architecture
from megatron.config import Config
from megatron.config.pieces import load_callbacks
from megatron.data.datasets import ContinuedData, data_prefixes
from megatron.data.forecast import check_data
from megatron.data.tokenizer import Tokenizer, with_tokenizer
from megatron.errors import ConfigError, MegatronError
from megatron.planner.cluster import load_cluster
from megatron.planner.placement import allowed_placements, check_device_order
from megatron.training.run.schedules import BatchSchedule, planned_samples
from megatron.training.run.tasks import context_of, read_tasks

T = TypeVar("T")


@dataclass
class RunFindings:
    """Errors with which a run would end, by subject, and what could not be checked here."""

    problems: list[tuple[str, Exception]] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def attempt(self, about: str, check: Callable[[], T]) -> T | None:
        """Return what `check` returns; None after an error, which is noted."""
        try:
            return check()
        except ImportError as error:  # torch, on a login node
            self.unchecked.append(f"{about}: {error}")
        except (MegatronError, OSError) as error:
            self.problems.append((about, error))
        return None


def check_run(config: Config) -> list[str]:
    """Raise the error with which a run would end before its first step; return what is not checked.

    Several errors are raised as one ConfigError that numbers them.
    """
    findings = examine(config)
    errors = [error for _, error in findings.problems]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        listed = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise ConfigError(f"the run has {len(errors)} problems:{listed}")
    return findings.unchecked


def examine(config: Config) -> RunFindings:
    """Check callbacks, placement, folders, checkpoint, tokenizer, tasks and data of a run."""
    findings = RunFindings()
    if config.logging.callback:
        findings.attempt("callbacks", lambda: load_callbacks(config.logging.callback or ()))
    findings.attempt("placement", lambda: _check_placement(config))
    findings.attempt("saving", lambda: _check_save(config))
    folder = findings.attempt("checkpoint", lambda: _check_checkpoint(config))
    tokenized = findings.attempt("tokenizer", lambda: with_tokenizer(config))
    if tokenized is None:
        return findings
    sized, tokenizer = tokenized
    if sized.model.trains_in_part:
        findings.attempt("trainable parameters", lambda: _check_patterns(sized))
    if sized.data.fim_rate:
        findings.attempt("fill-in-the-middle", lambda: _check_tokens(sized, tokenizer))
    if sized.checkpoint.save_hf is not None:
        findings.attempt("--save-hf", lambda: _check_export(sized))
    tasks = sized.training.eval_tasks or ()
    findings.attempt("tasks", lambda: read_tasks(tasks, tokenizer, context_of(sized)))
    if prefixes := data_prefixes(sized):
        if away := [prefix for prefix in prefixes if is_elsewhere(config, prefix)]:
            findings.unchecked.append(f"data {', '.join(away)}, on disks of compute nodes")
        else:
            findings.attempt("data", lambda: _check_data(sized, tokenizer, folder))
    return findings


def is_elsewhere(config: Config, path: str) -> bool:
    """Return whether a path is on disks of compute nodes of the machine, and this is none."""
    if config.parallel.cluster in (None, "none"):
        return False
    disk = load_cluster(config.parallel.cluster or "").nvme_path.split("$")[0].rstrip("/")
    return bool(disk) and Path(path).is_relative_to(disk) and not Path(disk).exists()


def _check_placement(config: Config) -> None:
    """Raise the errors of `plan_ranks`, without comparing placements, which needs torch."""
    parallel = config.parallel
    if parallel.cluster in (None, "none") or parallel.world_size == 1:
        return
    cluster = load_cluster(parallel.cluster or "")
    each = cluster.devices_per_node
    if parallel.world_size <= each or parallel.world_size % each == 0:
        allowed_placements(config, cluster)
    elif parallel.device_order is not None:
        check_device_order(parallel.device_order, cluster)


def _check_save(config: Config) -> None:
    """Check that --save can be written, without creating it. Raises MegatronError."""
    left_behind(config)
    save = config.checkpoint.save
    if not save or is_elsewhere(config, save):
        return
    folder = Path(save).absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--save {save}: {folder}: {error.strerror}: choose a place that is writable"
        ) from error


def _check_checkpoint(config: Config) -> Path | None:
    """Return the checkpoint from which the run starts, after a look at its model."""
    folder = chosen_checkpoint(config).folder
    if folder is not None:
        check_architecture(open_checkpoint(folder).config, config, str(folder))
    return folder


def _check_patterns(config: Config) -> None:
    from megatron.model.gpt import check_patterns

    check_patterns(config)


def _check_export(config: Config) -> None:
    from megatron.checkpoint.huggingface_save import check_export

    check_export(config)


def _check_tokens(config: Config, tokenizer: Tokenizer | None) -> None:
    from megatron.data.fill_in_the_middle import FillInTheMiddle

    FillInTheMiddle.of(config, tokenizer)


def _check_data(config: Config, tokenizer: Tokenizer | None, checkpoint: Path | None) -> None:
    continued = ContinuedData()
    if checkpoint is not None:
        from megatron.training.run.resume_data import planned_data

        config, continued = planned_data(config)
    samples = planned_samples(config, BatchSchedule.from_config(config))[0]
    check_data(config, tokenizer, samples, continued=continued)
