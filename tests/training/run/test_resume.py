"""Choice of the checkpoint that a run loads, and of the settings that it takes from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.files import write_manifest
from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.errors import CheckpointError
from megatron.parallel.topology import Layout, Topology
from megatron.training.run.checkpoints import (
    checkpoint_to_load,
    progress_from,
    with_checkpoint_settings,
)
from megatron.training.run.schedules import Progress

SINGLE = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))


class Listener:
    """Stand-in for the reporter that remembers all lines."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def config(**changes: Any) -> Config:
    fields: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=8,
        vocab_size=24,
        train_iters=10,
        lr=1e-3,
    )
    return Config.create(**{**fields, **changes})


def store(folder: Path, stored: Config) -> Path:
    """Write a checkpoint's folder, as far as settings are concerned."""
    checkpoint = folder / "iter_0000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(plain(stored)))
    contents = {"format": 3, "iteration": 5, "optimizer": True, "state": {}, "engine": {}}
    (checkpoint / "state.json").write_text(json.dumps(contents))
    write_manifest(checkpoint, ["config.json", "state.json"])
    (folder / "latest_checkpointed_iteration.txt").write_text("5\n")
    return checkpoint


def test_a_first_start_finds_nothing_and_goes_on(tmp_path: Path) -> None:
    assert checkpoint_to_load(config(), SINGLE) is None
    assert checkpoint_to_load(config(load=str(tmp_path)), SINGLE) is None


@pytest.mark.parametrize(
    "flag", [dict(exit_on_missing_checkpoint=True), dict(load_tag="iter_0000007")]
)
def test_a_checkpoint_that_must_be_there_is_missed(tmp_path: Path, flag: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoint_to_load(config(load=str(tmp_path), **flag), SINGLE)


def test_a_schedule_that_differs_is_ours_and_said(tmp_path: Path) -> None:
    checkpoint, listener = store(tmp_path, config(lr=5e-4, train_iters=8)), Listener()
    ours = config(load=str(tmp_path))
    assert with_checkpoint_settings(ours, checkpoint, listener) == ours  # type: ignore[arg-type]
    (said,) = listener.said
    assert all(part in said for part in ("lr 0.001", "0.0005", "lr_decay_iters 10", "8"))
    silent = Listener()
    with_checkpoint_settings(
        config(load=str(tmp_path), override_opt_param_scheduler=True), checkpoint, silent
    )  # type: ignore[arg-type]
    assert silent.said == []


def test_settings_are_taken_where_flags_ask_for_them(tmp_path: Path) -> None:
    stored = config(hidden_size=32, num_layers=3, swiglu=True, lr=5e-4)
    checkpoint = store(tmp_path, stored)
    asked = config(
        load=str(tmp_path), use_checkpoint_args=True, use_checkpoint_opt_param_scheduler=True
    )
    taken = with_checkpoint_settings(asked, checkpoint, Listener())  # type: ignore[arg-type]
    assert taken.model == stored.model and taken.optimizer.lr == 5e-4
    assert taken.batch == asked.batch


def test_a_tokenizer_says_the_vocabulary_itself(tmp_path: Path) -> None:
    """A tokenizer determines the vocabulary itself.

    NullTokenizer adds an end token to --vocab-size: the checkpoint's 25 passed to it again would
    become 26.
    """
    checkpoint = store(tmp_path, config(hidden_size=32, vocab_size=25))
    asked = config(load=str(tmp_path), use_checkpoint_args=True, tokenizer_type="NullTokenizer")
    taken = with_checkpoint_settings(asked, checkpoint, Listener())  # type: ignore[arg-type]
    assert (taken.model.hidden_size, taken.model.vocab_size) == (32, 24)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    checkpoint = store(tmp_path, config())
    (checkpoint / "config.json").write_text("{}")
    write_manifest(checkpoint, ["config.json", "state.json"])
    with pytest.raises(CheckpointError, match="config.json"):
        with_checkpoint_settings(config(load=str(tmp_path)), checkpoint, Listener())  # type: ignore[arg-type]


def test_counters_come_back_or_the_checkpoint_is_refused(tmp_path: Path) -> None:
    state = dict(
        iteration=5,
        consumed_samples=40,
        consumed_tokens=320,
        consumed_valid_samples=8,
        skipped_iterations=1,
    )
    state |= dict(scheduled_iterations=4, scheduled_samples=32, scheduled_tokens=256)
    assert progress_from(state, tmp_path) == Progress(5, 40, 320, 8, 1, 4, 32, 256)
    sources = {"web": {"samples": 40, "tokens": 320, "epochs": 0.5}}
    assert progress_from({**state, "sources": sources}, tmp_path) == Progress(
        5, 40, 320, 8, 1, 4, 32, 256, sources
    )
    with pytest.raises(CheckpointError):
        progress_from({**state, "sources": {"web": 40}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"consumed_tokens.*--finetune"):
        progress_from({k: v for k, v in state.items() if k != "consumed_tokens"}, tmp_path)
    for value in ("40", [40], -1, math.inf, 2**64, None, True):
        with pytest.raises(CheckpointError, match="consumed_tokens"):
            progress_from({**state, "consumed_tokens": value}, tmp_path)
