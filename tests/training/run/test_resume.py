"""Choice of the checkpoint that a run loads, and of the settings that it takes from it."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import pytest

from megatron.checkpoint.files import write_manifest
from megatron.checkpoint.settings import plain, settings_to_take
from megatron.config import Config, parse_args
from megatron.errors import CheckpointError, ConfigError
from megatron.training.run.checkpoints import checkpoint_to_load, progress_from
from megatron.training.run.resume import describe_changes, other_values, with_checkpoint_settings
from megatron.training.run.schedules import Progress, Schedules
from megatron.training.run.stored import stored_settings
from tests.helpers.launching import TINY, launch
from tests.helpers.tiny import MODEL, rank_topology, records, values

SINGLE = rank_topology()


def config(**changes):
    return Config.create(**{**MODEL, "train_iters": 10, "lr": 1e-3, **changes})


def store(folder, stored, iteration=5):
    """Write a checkpoint's folder, as far as settings are concerned."""
    checkpoint = folder / f"iter_{iteration:07d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(plain(stored)))
    contents = {"format": 3, "iteration": iteration, "optimizer": True, "state": {}, "engine": {}}
    (checkpoint / "state.json").write_text(json.dumps(contents))
    (checkpoint / "boxes.json").write_text("{}")
    write_manifest(checkpoint, ["config.json", "state.json", "boxes.json"])
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return checkpoint


def test_a_first_start_finds_nothing_and_goes_on(tmp_path):
    assert checkpoint_to_load(config(), SINGLE) is None
    assert checkpoint_to_load(config(load=str(tmp_path)), SINGLE) is None
    for flag in (dict(exit_on_missing_checkpoint=True), dict(load_tag="iter_0000007")):
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            checkpoint_to_load(config(load=str(tmp_path), **flag), SINGLE)


BEFORE = dict(lr=1e-2, lr_schedule="warmup 2, cosine", train_iters=20, global_batch_size=4)


def cosine(length, at):
    """Return the learning rate of BEFORE after `at` of the iterations of a run of this length."""
    return 1e-2 * (1 + math.cos(math.pi * (at - 2) / (length - 2))) / 2


def stopped(iteration=10):
    """Return the progress of BEFORE, without skipped steps."""
    samples = 4 * iteration
    counts = (iteration, samples, 8 * samples)
    return Progress(*counts, 0, 0, *counts)


def changed(folder, end=40, **changes):
    """Return each quantity that differs: its value, the iteration, and the checkpoint's value."""
    stored = stored_settings(store(folder, config(**BEFORE)), ours := config(**BEFORE | changes))
    lines = other_values(stored, ours, stopped(), end)
    pattern = r"(.+) (\S+) at iteration (\d+) \(was (\S+)\)"
    return {m[1]: m.groups()[1:] for line in lines if (m := re.fullmatch(pattern, line))}


@pytest.mark.parametrize(
    ("changes", "name", "ours", "iteration", "saved"),
    [
        (dict(train_iters=40), "learning rate", cosine(40, 10), 11, cosine(20, 10)),
        (dict(lr_schedule="warmup 2, cosine 18, constant 5 from 0.5"), "learning rate", 0.5, 21, 0),
        (dict(weight_decay=0.1), "weight decay", 0.1, 11, 0.01),
        (dict(adam_beta2_schedule="constant 15, linear to 0.9"), "beta2", 0.9792, 17, 0.999),
        (dict(rampup_batch_size=(1, 1, 48)), "global batch size", 3, 11, 4),
        (dict(ema_decay=0.99), "decay of the average", 0.99, 11, 1),
    ],
)
def test_values_of_schedules_are_compared_over_the_rest_of_the_run(
    tmp_path, changes, name, ours, iteration, saved
):
    differences = changed(
        tmp_path, 40 if "train_iters" in changes else 20 + (iteration > 20), **changes
    )
    assert list(differences) == [name]
    here, at, there = map(float, differences[name])
    assert (here, there) == pytest.approx((ours, saved), rel=1e-5) and at == iteration


def test_other_words_for_the_same_values_and_what_is_over_are_not_said(tmp_path):
    same = dict(lr_schedule="warmup 10%, cosine 18 to 0", min_lr=1e-3)
    assert changed(tmp_path / "words", 20, **same) == {}
    over = dict(lr_schedule="warmup 1, constant 1, cosine")
    assert changed(tmp_path / "over", 20, **over) == {}


def test_all_settings_that_differ_are_named_and_a_flag_keeps_still(tmp_path):
    checkpoint = store(tmp_path, config(**BEFORE, hidden_dropout=0.1))
    messages = []
    for flags in ({}, dict(override_opt_param_scheduler=True)):
        ours = config(**BEFORE | dict(lr=5e-3, hidden_dropout=0.2, log_interval=7), **flags)
        describe_changes(stored_settings(checkpoint, ours), ours, stopped(), 20, messages.append)
    settings, schedules, repeated = messages
    assert "hidden_dropout 0.2 (was 0.1), lr 0.005 (was 0.01)" in settings == repeated
    assert "log_interval" not in settings and "learning rate" in schedules


@pytest.mark.parametrize(
    "changes",
    [
        dict(train_iters=None, train_samples=160, global_batch_size=8),
        dict(train_iters=None, train_tokens=10**6, seq_length=4, rampup_batch_size=(2, 2, 9)),
        dict(lr_schedule=None, lr_decay_style="cosine", min_lr=1e-4, lr_warmup_iters=3),
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        dict(weight_decay_schedule="constant 50%, linear to 0.5", adam_beta1_schedule="warmup 12"),
        dict(weight_decay_incr_style="cosine", end_weight_decay=0.3, adam_beta2=0.95),
        dict(train_iters=None, train_samples=80, lr_schedule=None, lr_warmup_samples=9),
    ],
)
def test_the_schedules_are_the_checkpoints_where_a_flag_asks_for_it(tmp_path, before, changes):
    """They keep the values also through another checkpoint, and what they replace is said."""
    saved = config(**BEFORE | before)
    ours = BEFORE | dict(lr=1.0, use_checkpoint_opt_param_scheduler=True) | changes
    folder = store(tmp_path / "0", saved)
    messages = []
    listener = SimpleNamespace(say=messages.append)
    for attempt in range(2):
        stored = stored_settings(folder, config(**ours))
        here = config(**ours)
        resumed = with_checkpoint_settings(here, stored, listener)
        for step in (0, 1, 2, 10, 11, 15, 19, 20, 30):
            at = Progress(*3 * [0], 0, 0, step, 4 * step, 32 * step)
            values = Schedules.from_config(resumed).at(at)
            expected = Schedules.from_config(saved).at(at)
            if expected.betas is None:
                expected = expected._replace(betas=(0.9, saved.optimizer.adam_beta2))
            assert values == expected
        assert resumed.batch == config(**ours).batch
        folder = store(tmp_path / f"{attempt + 1}", resumed.replace(hidden_dropout=0.3))
    assert "lr 0.01 (here 1.0)" in messages[0]


RUN = "--micro-batch-size 2 --mock-data --train-iters 3 --lr 1e-3".split()


def parsed(folder, *flags, world_size=1):
    """Parse the flags of a run that takes its model from a checkpoint."""
    words = [*RUN, "--load", str(folder), "--use-checkpoint-args", *flags]
    return parse_args(words, world_size, checkpoint=settings_to_take)


def test_a_run_takes_its_model_from_the_checkpoint(tmp_path):
    stored = config(num_layers=3, swiglu=True, hidden_dropout=0.0, max_position_embeddings=16)
    path = str(store(tmp_path, stored) / "config.json")
    resumed = parsed(tmp_path, "--tensor-model-parallel-size", "2", world_size=4)
    assert resumed.model == stored.model
    assert resumed.parallel.data_parallel_size == 2, "the layout is not the checkpoint's"
    assert resumed.origin("num_layers") == f"checkpoint {path}"
    # What agrees is no contradiction, and the length of a sample is free.
    other = parsed(tmp_path, "--num-layers", "3", "--swiglu", "--seq-length", "4")
    assert (other.model.seq_length, other.model.max_position_embeddings) == (4, 16)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert parsed(tmp_path, "--load-tag", "5").model == parsed(tmp_path).model == stored.model


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--num-layers 9 --no-add-bias-linear",
            ["num-layers 9", "num_layers 2", "add_bias_linear", "iter_0000005/config.json"],
        ),
        ("--tensor-model-parallel-size 4", ["num-attention-heads 2"]),
        ("--load-tag 7", ["iter_0000007"]),
    ],
)
def test_what_contradicts_the_checkpoint_is_refused(tmp_path, flags, words):
    store(tmp_path, config())
    with pytest.raises(ConfigError) as raised:
        parsed(tmp_path, *flags.split(), world_size=4)
    assert all(word in str(raised.value) for word in words), raised.value


def test_there_must_be_a_checkpoint_to_take_a_model_from(tmp_path):
    with pytest.raises(ConfigError, match=f"1 problem: .*{tmp_path}"):
        parsed(tmp_path)
    with pytest.raises(ConfigError, match="1 problem: .*--use-checkpoint-args.*--load"):
        parse_args([*RUN, "--use-checkpoint-args"], checkpoint=settings_to_take)
    # Where it is lost after the flags were read, the run does not start from scratch.
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        checkpoint_to_load(config(load=str(tmp_path), use_checkpoint_args=True), SINGLE)


@pytest.mark.parametrize("broken", ["config.json", "manifest.json"])
def test_the_model_of_a_broken_checkpoint_is_that_of_the_one_before(tmp_path, broken):
    for iteration, layers in ((5, 3), (6, 2)):
        store(tmp_path, config(num_layers=layers), iteration)
    assert parsed(tmp_path).model.num_layers == 2
    (tmp_path / "iter_0000006" / broken).write_text("{}")
    assert parsed(tmp_path).model.num_layers == 3


def test_the_tokenizer_is_taken_and_says_the_vocabulary(tmp_path):
    """NullTokenizer adds one id to --vocab-size, so that 25 ids are --vocab-size 24."""
    store(tmp_path / "null", config(vocab_size=25, tokenizer_type="NullTokenizer"))
    resumed = parsed(tmp_path / "null")
    assert (resumed.tokenizer.tokenizer_type, resumed.model.vocab_size) == ("NullTokenizer", 24)
    with pytest.raises(ConfigError, match=r"vocab-size 25.* 24 "):
        parsed(tmp_path / "null", "--vocab-size", "25")
    store(tmp_path / "own", config(tokenizer_type="HFTokenizer", tokenizer_model="old"))
    resumed = parsed(tmp_path / "own", "--tokenizer-model", "new")
    assert (resumed.tokenizer.tokenizer_type, resumed.tokenizer.tokenizer_model) == (
        "HFTokenizer",
        "new",
    )
    resumed = parsed(tmp_path / "own", "--vocab-file", "v", "--merge-file", "m")
    assert (resumed.tokenizer.tokenizer_type, resumed.tokenizer.tokenizer_model) == (
        "GPT2BPETokenizer",
        None,
    )


@pytest.mark.slow
def test_all_ranks_take_the_model_and_give_the_settings_back(tmp_path):
    """A run of two ranks resumes that of one, and writes its settings beside the first ones."""
    model = TINY[: TINY.index("--micro-batch-size")]
    rest = [*TINY[len(model) : TINY.index("--tokenizer-type")], "--log-interval", "1"]
    rest += ["--eval-iters", "0", "--save", str(tmp_path), "--load", str(tmp_path)]
    resumed = "--tensor-model-parallel-size 2 --use-checkpoint-args --train-iters 5".split()
    for processes, flags in (
        (1, [*TINY, "--window-size", "7", "0", *rest]),
        (2, [*rest, *resumed]),
    ):
        for outcome in launch(processes, flags):
            assert outcome.code == 0, outcome
        # One process speaks, once; there is no rest after the only step of the later job.
        assert outcome.output.count(" node-hours") == (processes == 1)
    assert values(records(tmp_path)["iteration"], "iteration") == [(i,) for i in range(1, 6)]
    last = parse_args(["--config", str(tmp_path / "settings.toml")], 2)
    assert (last.batch.train_iters, last.parallel.tensor_model_parallel_size) == (5, 2)
    assert [file.name for file in tmp_path.glob("settings-*.toml")] == ["settings-0000004.toml"]


@pytest.mark.slow
def test_the_settings_of_a_run_do_not_repeat_one_of_its_starts(tmp_path):
    """A start that went back and ended early is continued, and another run begins anew."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    settings = ["--config", str(tmp_path / "a/settings.toml")]
    load = ["--load", str(a)]

    def steps(folder, *words):
        (outcome,) = launch(1, words)
        assert outcome.code == 0, outcome
        return values(records(folder)["iteration"], "iteration", "lm_loss")

    first = steps(a, *TINY, "--save", str(a), "--exit-interval", "2")
    steps(a, *settings, *load, "--load-tag", "2", "--exit-interval", "3")
    assert [n for n, _ in steps(a, *settings, *load)] == [1, 2, 3, 4]
    other = steps(b, *settings, "--lr", "1e-2", "--save", str(b))
    assert [n for n, _ in other] == [1, 2, 3, 4] and other[0] == first[0]
    (outcome,) = launch(1, settings)  # it would replace the checkpoints
    assert outcome.code == 2 and f"--load {a}" in outcome.output


def test_a_checkpoint_without_settings_is_refused(tmp_path):
    checkpoint = store(tmp_path, config())
    for content in ("{}", '{"model": {"num_layers": "x"}}', '{"model": 3}'):
        (checkpoint / "config.json").write_text(content)
        write_manifest(checkpoint, ["config.json", "state.json"])
        with pytest.raises(CheckpointError, match="config.json"):
            stored_settings(checkpoint, config(load=str(tmp_path)))
        with pytest.raises(ConfigError, match="config.json"):
            parsed(tmp_path)


def test_counters_come_back_or_the_checkpoint_is_refused(tmp_path):
    sources = {"web": {"samples": 40, "tokens": 320, "epochs": 0.5}}
    for progress in (Progress(5, 40, 320, 8, 1, 4, 32, 256, of) for of in ({}, sources)):
        state = dataclasses.asdict(progress)
        assert progress_from(state, tmp_path) == progress
    with pytest.raises(CheckpointError):
        progress_from({**state, "sources": {"web": 40}}, tmp_path)
    with pytest.raises(CheckpointError, match=r"consumed_tokens.*--finetune"):
        progress_from({k: v for k, v in state.items() if k != "consumed_tokens"}, tmp_path)
    for value in ("40", -1, 2**64, None):
        with pytest.raises(CheckpointError, match="consumed_tokens"):
            progress_from({**state, "consumed_tokens": value}, tmp_path)
    phase = dict(
        start=0, seq_length=8, packing="concat", seed=1, sources=[[1.0, "a", "a", 0, 9, 0]]
    )
    streams = {**state, "history": {"train": [phase]}}
    assert progress_from(streams, tmp_path).past()[0].seq_length == 8
    for damage in (
        dict(history={"train": []}),
        dict(history={"valid": [phase]}),
        dict(history={"train": [{**phase, "sources": [[1e308, "a", "a", 0, 9, 0]]}]}),
        dict(history={"train": [{**phase, "start": number} for number in range(10**5)]}),
        dict(consumed_samples=2**62),
        dict(left_out=[[2**63, 2**64]]),
    ):
        with pytest.raises(CheckpointError):
            progress_from({**streams, **damage}, tmp_path)
