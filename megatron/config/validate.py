"""Checks of a resolved configuration.

All problems are collected; no check needs a process group or a file.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config import attention, io_checks, model_checks, parallel_checks, training_checks
from megatron.config.checks import Check
from megatron.config.io import is_same_folder
from megatron.config.settings import Settings, all_options
from megatron.config.training_checks import piece_problems

MODULES = (attention, model_checks, parallel_checks, training_checks, io_checks)
CHECKS = [each for module in MODULES for each in vars(module).values() if isinstance(each, Check)]


def _rules(kind: str) -> list[str]:
    """Return the rules of a kind in all modules."""
    texts = (getattr(module, kind, "") for module in MODULES)
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


CONFLICTS = [
    (names.split(), reason)
    for names, _, reason in (line.partition(": ") for line in _rules("CONFLICTS"))
]
"""Groups of settings, or NAME=VALUE, of which at most one may be chosen; with reasons if any.

A chosen one of a group without a reason replaces those of a preset (presets.py).
"""
ASCENDING = [line.split() for line in _rules("ASCENDING")]
"""Pairs of settings of which the first must not be greater than the second."""
NEEDED = _rules("NEEDED")
"""Rules with a setting, or NAME=VALUE, and the settings that need it unless they have their defaults."""


@functools.cache
def _term(word: str) -> tuple[str, Any]:
    """Return the setting and the value in NAME=VALUE; None if there is only a NAME."""
    name, _, text = word.partition("=")
    return name, all_options()[name].parse([text]) if text else None


def _met(name: str, value: Any, actual: Any) -> bool:
    """Return whether a setting has the value; for None, whether it is on, and not by default."""
    if value is None:
        return bool(actual) and actual != all_options()[name].default
    return bool(actual == value)


def _needed() -> Iterator[tuple[str, Any, list[str]]]:
    """Yield a setting, the value it must have (None: any), and the settings that need it."""
    for line in NEEDED:
        rule, *names = line.split()
        yield *_term(rule), names


def unneeded(values: Mapping[str, Any]) -> set[str]:
    """Return the settings among `values` that have no effect, since what they need is not set."""
    useless: set[str] = set()
    for needed, value, names in _needed():
        actual = values.get(needed, all_options()[needed].default)
        useless.update(() if needed not in useless and _met(needed, value, actual) else names)
    return useless & values.keys()


# Settings that every configuration must give, itself or through a preset or a checkpoint.
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
DATA = (
    "data_path",
    "data_file_list",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "blend_schedule",
)
"""Settings that name data files."""


def validate(settings: Settings) -> None:
    """Add every problem of `settings.values` to `settings.problems`."""
    add = settings.problems.append
    options = all_options()
    values = settings.values
    bad = settings.bad

    for name in REQUIRED:
        if values[name] is None and name not in bad:
            add(f"{options[name].flag} is missing: give it, or a --preset")
    config = settings.sections()
    for each in CHECKS:
        if settings.usable(*each.needs):
            settings.problems.extend(each.problems(config))
    settings.problems.extend(
        piece_problems(config.kernels.cuda_graph_impl, settings.pieces, settings.explicit)
    )
    for names, reason in CONFLICTS:
        terms = map(_term, names)
        chosen = [name for name, value in terms if _met(name, value, values[name])]
        if len(chosen) > 1 and bad.isdisjoint(chosen):
            remedy = f"{reason}; leave one of them out" if reason else "choose one"
            for name in itertools.filterfalse(settings.changed, chosen):  # stays if left out
                off = options[name].written(False)
                other = off if values[name] is True else f"another {options[name].flag}"
                remedy = f"{reason}; give {other}"
            add(f"{' and '.join(map(settings.written, chosen))} contradict each other: {remedy}")
    for low, high in ASCENDING:
        derived = settings.explicit.keys().isdisjoint((low, high))  # their sources are compared
        if settings.usable(low, high) and values[low] > values[high] and not derived:
            add(f"{settings.written(low)} is greater than {settings.written(high)}")
    settings.problems.extend(_unmet_needs(settings))


def _unmet_needs(settings: Settings) -> Iterator[str]:
    """Yield problems with settings that need others.

    If the needed setting itself has no effect, for lack of a third one, only that is a problem.
    """
    useless: set[str] = set()
    for needed, value, names in _needed():
        option = all_options()[needed]
        actual = settings.values[needed]
        if needed in settings.bad | useless or _met(needed, value, actual):
            continue
        remedy = option.usage if value is None else option.written(value)
        remedy += f", not {option.named(actual)}" if actual else ""
        wrong = [name for name in names if name not in settings.bad and settings.changed(name)]
        if wrong:
            useless.update(wrong)
            verb = "needs" if len(wrong) == 1 else "need"
            yield f"{' and '.join(map(settings.written, wrong))} {verb} {remedy}"


def run_requirements(settings: Settings) -> None:
    """Add problems for missing settings that a training run needs, before defaults replace them.

    Also add those of --requeue and --max-restarts, which must continue the run.
    """
    explicit = settings.explicit
    known = {*explicit, *settings.bad}
    add = settings.problems.append
    skips_training = explicit.get("skip_train")
    if not known & {"train_iters", "train_samples", "train_tokens"} and not skips_training:
        add(
            "the length of the run is missing: give --train-iters, --train-samples or "
            "--train-tokens"
        )
    if "lr" not in known and not skips_training:
        add("--lr is missing: give the maximum learning rate, such as --lr 3e-4")
    if "micro_batch_size" not in known:
        add("--micro-batch-size is missing: give the number of samples in one forward pass")
    user_data = settings.pieces.datasets is not None
    if not user_data and known.isdisjoint(DATA) and not explicit.get("mock_data"):
        add("no data: give --data-path PREFIX, --train-data-path PREFIX or --mock-data")
    if not known & {"tokenizer_type", "vocab_size"} and not {"vocab_file", "merge_file"} <= known:
        add("the vocabulary is unknown: give --tokenizer-type with its files, or --vocab-size")
    repeats = [name for name in ("requeue", "max_restarts") if explicit.get(name)]
    if repeats and settings.bad.isdisjoint(("save", "load")):
        flags = " and ".join(all_options()[name].flag for name in repeats)
        settings.problems.extend(_repeated_start(explicit, flags))


def missing(settings: Settings) -> list[str]:
    """List the problems that `run_requirements` would add to settings without problems."""
    settings.problems.clear()
    run_requirements(settings)
    return settings.problems


def _repeated_start(explicit: Mapping[str, Any], flags: str) -> Iterator[str]:
    """Yield problems of `flags`, which start the same command again, and must not lose checkpoints."""
    save = explicit.get("save", "FOLDER")
    once = [
        all_options()[name].written(explicit[name])
        for name in ("finetune", "reset_iteration", "load_tag", "no_load_optim")
        if explicit.get(name)
    ]
    load = explicit.get("load")
    other = load is not None and "save" in explicit and not is_same_folder(load, save)
    if other or once:
        causes = [f"--load {load}"] * other + once
        then = " and without ".join([f"with --load {save}", *once])
        yield (
            f"{flags} would start the same command again, which with {', '.join(causes)} does not "
            f"continue from --save {save}: start once without {flags} (REQUEUE=0 in the job "
            f"scripts), then with it, {then}"
        )
    elif load is None:
        need = "needs" if flags.count("--") == 1 else "need"
        yield (
            f"{flags} {need} --load {save}, the folder of --save, from which the run continues: add "
            "it. An empty folder starts a new run"
        )
    if explicit.get("no_save_optim"):
        yield (
            f"{flags} would continue from checkpoints without the optimizer's state: leave "
            "--no-save-optim out"
        )
