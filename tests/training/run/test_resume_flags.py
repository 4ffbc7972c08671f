"""Property of resumes: with any setting changed it is the same run, or a notice names the setting."""

import contextlib
import dataclasses
from pathlib import Path

import pytest

from megatron.config import Config
from megatron.config.settings import SECTIONS, all_options, section_of
from megatron.errors import MegatronError
from megatron.metrics_file import read_records
from megatron.program import pretrain
from megatron.training.report.reporter import Console
from megatron.training.run.resume import UNCOMPARED, describe_changes
from megatron.training.run.stored import accepted as read_values
from megatron.training.run.stored import stored_settings
from tests.helpers.processes import run_processes
from tests.helpers.tiny import RUN
from tests.training.run.test_resume import config, stopped, store
from tests.training.run.test_run import write_numbers

BASE = dict(
    RUN,
    max_position_embeddings=16,
    vocab_size=900,
    micro_batch_size=2,
    split="1",
    train_iters=4,
    min_lr=1e-3,
    lr_decay_style="cosine",
)
# Values of settings that have a syntax of their own.
_VALUES = dict(
    lr_schedule="warmup 1, linear",
    weight_decay_schedule="linear to 0.5",
    adam_beta1_schedule="linear to 0.5",
    adam_beta2_schedule="linear to 0.5",
    step_batch_size_schedule="0:2 64:4",
    rampup_batch_size=(2, 2, 8),
    clip_grad_by_kind=("hidden=0.001",),
    split="9,1",
    window_size=(3, 0),
    walltime="none",
    train_data_exact_num_epochs=1,
    recompute_modules=("mlp",),
)


def other_values(option, value):
    """Return values of a setting that are not `value`, of which some may be refused."""
    if option.name in _VALUES:
        return [_VALUES[option.name]]
    if option.kind is bool:
        return [not value]
    if option.choices:
        return [choice for choice in option.choices if choice != value]
    if option.kind in (int, float) and not option.many:
        numbers = (0.5, 2.0, 0.05) if value is None else (value / 2, value * 2, value + 1, 0.5)
        return [option.kind(number) for number in numbers if option.kind(number) != value]
    return []


def accepted(name, fields):
    """Return the other values of a setting that BASE takes beside these fields."""
    values = []
    for value in other_values(all_options()[name], Config.create(**BASE).get(name)):
        with contextlib.suppress(MegatronError):
            Config.create(**{**BASE, "load": "x", **fields, name: value})
            values.append(value)
    return values


def resumed(rank, folder, changes):
    """Start a run, resume it with each of these changes, and return the figures and the log."""
    prefix = write_numbers(Path(folder, "x"), 8 * 100 + 1)
    base = {**BASE, "data_path": (prefix,)}
    pretrain(Config.create(**base, save=folder, exit_interval=2))
    printed = []
    Console.say = lambda self, text: printed.append(text)
    outcomes = []
    for number, change in enumerate(changes):
        metrics = Path(folder, f"{number}.jsonl")
        printed.clear()
        fields = {**base, "metrics_file": str(metrics), "load": folder, **change}
        try:
            pretrain(Config.create(**fields))
        except MegatronError as error:
            outcomes.append((None, str(error)))
            continue
        names = ("iteration", "lm_loss", "grad_norm", "learning_rate", "consumed_samples")
        records = read_records(metrics, "iteration")
        figures = [tuple(record[name] for name in names) for record in records]
        outcomes.append((figures, " ".join(" ".join(printed).split())))
    return outcomes


def test_each_setting_of_a_run_that_differs_is_named(tmp_path):
    """Whatever is not in this notice changes no figure, as the next test shows."""
    before = config()
    checkpoint = store(tmp_path, before)
    named = 0
    for name, option in all_options().items():
        section = section_of(name)
        if name in UNCOMPARED or section in ("checkpoint", "logging"):
            continue
        if option.one_start or option.inert or name == "schedule_basis":
            continue
        value = before.get(name)
        other = next(iter(other_values(option, value)), ("other",) if option.many else "other")
        changed = dataclasses.replace(getattr(before, section), **{name: other})
        ours = dataclasses.replace(before, **{section: changed})
        stored = stored_settings(checkpoint, before)
        lines = []
        quiet = dataclasses.replace(ours.checkpoint, override_opt_param_scheduler=True)
        ours = dataclasses.replace(ours, checkpoint=quiet)
        describe_changes(stored, ours, stopped(), 10, lines.append)
        assert f" {name} " in lines[0], name
        named += 1
    assert named > 150


SOME = ("lr", "train_iters", "hidden_dropout", "clip_grad", "weight_decay", "no_load_optim")
GROUPS = 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [
        None,
        *(
            pytest.param(group, marks=[pytest.mark.campaign("kills"), pytest.mark.timeout(1200)])
            for group in range(GROUPS)
        ),
    ],
)
def test_any_setting_changed_is_the_same_run_or_named(tmp_path, group):
    names = SOME if group is None else list(all_options())[group::GROUPS]
    changes = [{}]
    for name in names:
        values = accepted(name, {})
        changes += [
            {name: value} for value in (values if all_options()[name].choices else values[:1])
        ]
    (outcomes,) = run_processes(
        1, resumed, str(tmp_path), changes, timeout_s=1200 if group is not None else None
    )
    plain = outcomes[0][0]
    different = set()
    for change, (figures, log) in zip(changes, outcomes, strict=True):
        for name in change:
            spellings = (name, *all_options()[name].flags)
            same = figures in (plain, None)  # None: refused
            assert same or any(word in log for word in spellings), (change, log)
            different |= set() if same else {name}
    assert len(different) == len(names) if group is None else len(different) > 2


def test_numbers_that_have_a_word_come_back_from_a_checkpoint():
    """A checkpoint has the number, which the command line may refuse."""
    for name, option in all_options().items():
        for number in option.value_names.values():
            if type(number) in (int, float):
                section = SECTIONS[section_of(name)]
                stored = read_values(section, {name: number}, Path("config.json"))
                assert dict(stored) == {name: number}
