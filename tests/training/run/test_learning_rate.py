"""Schedules of learning rate, weight decay, betas and the average, against closed forms."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config, parse_args
from megatron.config.pieces import Pieces
from megatron.errors import ConfigError
from megatron.training.run.schedules import (
    Progress,
    Schedules,
    learning_rate,
    weight_decay,
)
from tests.helpers.tiny import tiny


def config(**fields):
    """Return a configuration of batches of 8 samples of 16 tokens."""
    usual = dict(lr=1.0, min_lr=0.1, lr_decay_style="linear", seq_length=16, global_batch_size=8)
    return tiny(**{**usual, "train_iters": None, "weight_decay": 0.1, **fields})


def lr(schedule, iteration):
    return schedule.at(iteration, 8 * iteration, 128 * iteration)


def falling(shape, q):
    return {
        "constant": 1.0,
        "linear": 1 - q,
        "cosine": (1 + math.cos(math.pi * q)) / 2,
        "exponential": 2 * 0.5**q - 1,
        "minus_sqrt": 1 - math.sqrt(q),
    }[shape]


SHAPES = "linear", "cosine", "exponential", "minus_sqrt"


@given(
    st.sampled_from(["constant", "linear", "cosine", "inverse-square-root"]),
    st.integers(0, 130),
    st.sampled_from([0.0, 0.05]),
)
def test_closed_forms(style, at, init):
    fields = dict(lr_decay_iters=104, lr_warmup_iters=4, lr_warmup_init=init)
    schedule = learning_rate(config(lr_decay_style=style, **fields))
    if at <= 4:
        expected = init + (1 - init) * at / 4
    elif style == "inverse-square-root":
        expected = math.sqrt(4 / at) if at <= 104 else 0.1
    else:
        expected = 0.1 + 0.9 * falling(style, min(at - 4, 100) / 100)
    assert lr(schedule, at) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("style", SHAPES)
def test_warmup_stable_decay(style):
    schedule = learning_rate(
        config(
            lr_decay_style="WSD",
            lr_wsd_decay_style=style,
            lr_decay_iters=100,
            lr_warmup_iters=10,
            lr_wsd_decay_iters=20,
        )
    )
    assert [lr(schedule, i) for i in (5, 10, 11, 80)] == [0.5, 1.0, 1.0, 1.0]
    assert lr(schedule, 85) == pytest.approx(0.1 + 0.9 * falling(style, 0.25))
    assert lr(schedule, 100) == pytest.approx(0.1)
    assert lr(schedule, 101) == 0.1


@given(st.integers(0, 130))
def test_units_agree(iteration):
    """One schedule is the same in iterations, samples (8 each) and tokens (16 per sample)."""
    by = [
        config(lr_decay_iters=100, lr_warmup_iters=10),
        config(lr_decay_samples=800, lr_warmup_samples=80),
        config(lr_decay_tokens=12800, lr_warmup_tokens=1280),
        config(lr_decay_iters=100, lr_warmup_fraction=0.1),
        config(lr_decay_tokens=12800, lr_warmup_samples=80),
        config(train_iters=100, lr_warmup_tokens=1280),
        config(train_samples=800, lr_warmup_fraction=0.1),
    ]
    values = [lr(learning_rate(c), iteration) for c in by]
    assert values == pytest.approx([values[0]] * len(values), abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(train_iters=10, lr_warmup_iters=10), "10"),
        (dict(train_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=11), "11"),
        (dict(train_samples=100, lr_warmup_iters=1), "train-samples"),
    ],
)
def test_contradictions_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        learning_rate(config(**fields))


@given(st.sampled_from(["linear", "cosine"]), st.integers(0, 200))
def test_weight_decay(style, at):
    expected = 0.3 - 0.2 * falling(style, min(at, 100) / 100)
    ends = dict(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style=style)
    schedule = weight_decay(config(train_samples=800, **ends))
    assert schedule.at(at, 8 * at, 128 * at) == pytest.approx(expected)
    assert weight_decay(config()).at(at) == 0.1


# -- phases ----------------------------------------------------------------------------------------


def phased(lr_schedule, **fields):
    """Return a configuration of 200 iterations of 4 samples of 16 tokens."""
    usual = dict(seq_length=16, lr=1.0, min_lr=0.1, train_iters=200)
    return tiny(**{**usual, "lr_schedule": lr_schedule or None, **fields})


@given(st.sampled_from(SHAPES), st.integers(0, 230))
def test_phases_follow_one_another(shape, n):
    """Of 200 iterations the constant phase takes 40 %, and the last one the 90 left of them."""
    schedule = learning_rate(phased(f"warmup 30 to 0.5, constant 40%,\n {shape} to 0.2"))
    expected = 0.5 * n / 30 if n <= 30 else 0.5
    if n > 110:
        expected = 0.2 + 0.3 * falling(shape, min(n - 110, 90) / 90)
    assert schedule.at(n, 4 * n, 64 * n) == pytest.approx(expected, rel=1e-14)


@given(st.integers(0, 230))
def test_warm_restarts(n):
    """Equation 5 of arXiv 1608.03983: 10 steps, 20, 40 and 80 steps, then the last value."""
    schedule = learning_rate(phased("cosine 10 cycles 4 factor 2"))
    begin = 0
    period = 10
    while n >= begin + period and period < 80:
        begin = begin + period
        period = 2 * period
    expected = 0.1 + 0.45 * (1 + math.cos(math.pi * min(n - begin, period) / period))
    assert schedule.at(n) == pytest.approx(expected, rel=1e-14)
    rest = learning_rate(phased("cosine cycles 4 factor 2", train_iters=150))
    assert rest.at(n) == pytest.approx(expected, rel=1e-14), "the cycles fill the run"


@given(st.integers(0, 230))
def test_power(n):
    """Shen et al., arXiv 2408.13359: min(lr, a B t^b) for t tokens, at least min_lr.

    Then a decay from there.
    """
    schedule = learning_rate(phased("power 150 amplitude 2, linear to 0"))
    power = [max(0.1, min(1.0, 8 * max(64 * i, 1) ** -0.51)) for i in (min(n, 150), 150)]
    expected = power[0] if n <= 150 else power[1] * (1 - min(n - 150, 50) / 50)
    assert schedule.at(n, 4 * n, 64 * n) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_a_jump_and_a_square_root():
    schedule = learning_rate(phased("warmup 16, inverse-square-root 84 to 0.3, constant from 0.7"))
    values = [schedule.at(n) for n in (16, 64, 99, 100, 1000)]
    assert values == pytest.approx([1.0, 0.5, 4 / math.sqrt(99), 0.7, 0.7], rel=1e-14)
    assert learning_rate(phased("constant 10, linear 10 from 0.4 to 0.8")).at(10) == 0.4


def test_betas_and_weight_decay_by_phases():
    schedules = Schedules.from_config(
        phased(
            "constant",
            adam_beta1=0.8,
            adam_beta2=0.9,
            adam_beta2_schedule="constant 50, linear 100 to 0.99",
            weight_decay=0.2,
            weight_decay_schedule="cosine 50% to 0.1",
        )
    )
    for n, beta2, decay in ((0, 0.9, 0.2), (50, 0.9, 0.15), (100, 0.945, 0.1), (180, 0.99, 0.1)):
        values = schedules.at(Progress(scheduled_iterations=n))
        assert values.betas == (0.8, pytest.approx(beta2))
        assert (values.lr, values.weight_decay) == (1.0, pytest.approx(decay))
    assert Schedules.from_config(phased("")).at(Progress()).betas is None


@pytest.mark.parametrize("warmup", [False, True])
def test_average_moves_at_its_interval(warmup):
    """The n-th update has the decay (1 + n) / (10 + n), from n = 0, up to --ema-decay."""
    config = phased("", ema_decay=0.5, ema_interval=3, ema_warmup=warmup)
    schedules = Schedules.from_config(config)
    new = [schedules.at(Progress(scheduled_iterations=n)).new_in_average for n in range(30)]
    updates = [min(0.5, (1 + n) / (10 + n)) if warmup else 0.5 for n in range(10)]
    assert new == pytest.approx([0.0 if i % 3 < 2 else 1 - updates[i // 3] for i in range(30)])


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        (dict(lr_schedule="warmup 10, kosine 5"), "kosine"),
        (dict(lr_schedule="warmup, constant 5"), "warmup"),
        (dict(lr_schedule="linear 120%"), "120"),
        (dict(lr_schedule="linear", lr_decay_style="cosine"), "cosine"),
        (dict(lr_schedule="linear", lr_warmup_iters=3), "--lr-warmup-iters 3"),
        (dict(adam_beta2_schedule="linear 10 to 1.5"), "1.5"),
        (dict(adam_beta1_schedule="constant 10", optimizer="sgd"), "--optimizer adam"),
        (dict(clip_grad_by_kind=("embedings=1",)), "embedings"),
        (dict(eval_ema=True), "--ema-decay"),
        (dict(step_batch_size_schedule="0:4 64:6", global_batch_size=4), "6"),
        (dict(step_batch_size_schedule="32:4", global_batch_size=None), "32:4"),
        (dict(step_batch_size_schedule="0:3 64:4", micro_batch_size=2), "3"),
    ],
)
def test_wrong_phases_are_refused_by_the_configuration(fields, value):
    with pytest.raises(ConfigError, match=value):
        phased(**{"lr_schedule": "", **fields})


def test_phases_replace_the_decay_of_a_preset():
    config = Config.create(preset="tiny", train_iters=100, lr_schedule="constant")
    assert learning_rate(config).at(99) == config.optimizer.lr
    assert learning_rate(Config.from_dict(config.to_dict())).at(99) == config.optimizer.lr
    with pytest.raises(ConfigError, match="--lr-decay-style cosine"):
        config.replace(lr_decay_style="cosine")


def test_a_learning_rate_of_ones_own_takes_the_place_of_the_schedule():
    own = tiny(lr=1.0).with_pieces(learning_rate=lambda n, samples, tokens, o: o.lr * n / tokens)
    at = Progress(iteration=9, scheduled_iterations=4, scheduled_samples=32, scheduled_tokens=512)
    assert Schedules.from_config(own).at(at).lr == 4 / 512
    for bad in (math.nan, -1.0, None):
        wrong = tiny(lr=1.0).with_pieces(learning_rate=lambda *_, bad=bad: bad)
        with pytest.raises(ConfigError, match=str(bad)):
            Schedules.from_config(wrong).at(at)
    rate = dict(learning_rate=lambda *_: 1.0)
    with pytest.raises(ConfigError, match="104"):
        tiny(lr_decay_iters=104).with_pieces(**rate)
    preset = ["--preset", "tiny", "--mock-data", "--vocab-size", "9", "--train-iters", "1"]
    with_preset = parse_args(preset, pieces=Pieces(**rate)).optimizer
    assert (with_preset.lr, with_preset.lr_decay_style) == (1e-3, "linear")  # not the preset's
    assert parse_args(preset).with_pieces(**rate).optimizer.lr_decay_style == "cosine"  # unread


def test_the_decoupled_rate_has_its_own_ends():
    """The same shape between other values; equal ends need no second schedule."""
    fields = dict(lr_decay_iters=104, lr_warmup_iters=4)
    schedules = Schedules.from_config(config(**fields, decoupled_lr=3.0, decoupled_min_lr=0.5))
    at = Progress(scheduled_iterations=54, scheduled_samples=8 * 54, scheduled_tokens=128 * 54)
    assert schedules.at(at).lr == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedules.at(at).decoupled_lr == pytest.approx(0.5 + 2.5 * 0.5)
    same = Schedules.from_config(config(**fields, decoupled_lr=1.0))
    assert same.at(at).decoupled_lr is None
