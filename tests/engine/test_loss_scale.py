"""Loss scale, step by step."""

from megatron.config.training import PrecisionConfig
from megatron.engine.engine import LossScale


def dynamic(initial, minimum, window, hysteresis):
    return LossScale(
        PrecisionConfig(
            fp16=True,
            initial_loss_scale=initial,
            min_loss_scale=minimum,
            loss_scale_window=window,
            hysteresis=hysteresis,
        )
    )


def run(scale, steps):
    """Return the scale after each step; "x" overflows."""
    out = []
    for step in steps:
        scale.update(step == "x")
        out.append(scale.scale)
    return out


def test_window_and_hysteresis():
    assert run(dynamic(16, 1, 3, 1), "...x....") == [16, 16, 32, 16, 16, 16, 32, 32]
    # Of three overflows the first is forgiven; growing restores the allowance.
    assert run(dynamic(16, 1, 2, 2), "xxx..xx") == [16, 8, 4, 4, 8, 8, 4]


def test_never_below_the_minimum():
    assert run(dynamic(4, 2, 100, 1), "xxx") == [2, 2, 2]
    assert dynamic(1, 2, 100, 1).scale == 2


def test_state_continues():
    a = dynamic(16, 1, 3, 2)
    b = dynamic(1024, 1, 3, 2)
    run(a, "x..")
    b.load_state(a.state())
    assert run(b, ".x") == run(a, ".x") == [32, 32]
