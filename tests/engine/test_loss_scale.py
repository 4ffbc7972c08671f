"""The loss scale, step by step."""
from __future__ import annotations

from types import SimpleNamespace

from megatron.engine.loss_scale import DynamicLossScale, ScaleForDeepSpeed, loss_scale_of


def run(scale: DynamicLossScale, steps: str) -> list[float]:
    """The scale after each step; "x" overflows."""
    out = []
    for step in steps:
        scale.update(step == "x")
        out.append(scale.scale)
    return out


def test_window_and_hysteresis() -> None:
    assert run(DynamicLossScale(16, 1, 3, 1), "...x....") == [16, 16, 32, 16, 16, 16, 32, 32]
    # Of three overflows the first is forgiven; growing restores the allowance.
    assert run(DynamicLossScale(16, 1, 2, 2), "xxx..xx") == [16, 8, 4, 4, 8, 8, 4]


def test_never_below_the_minimum() -> None:
    assert run(DynamicLossScale(4, 2, 100, 1), "xxx") == [2, 2, 2]
    assert DynamicLossScale(1, 2, 100, 1).scale == 2


def test_state_continues() -> None:
    a, b = DynamicLossScale(16, 1, 3, 2), DynamicLossScale(1024, 1, 3, 2)
    run(a, "x..")
    b.load_state(a.state())
    assert run(b, ".x") == run(a, ".x") == [32, 32]


def test_choice() -> None:
    def chosen(**fields: object) -> tuple[float, bool]:
        base = dict(fp16=True, loss_scale=None, initial_loss_scale=2.0**32, min_loss_scale=1.0, loss_scale_window=1000)
        found = loss_scale_of(SimpleNamespace(**(base | {"hysteresis": 2} | fields)))
        return found.scale, found.dynamic

    assert chosen() == (2.0**32, True)
    assert chosen(loss_scale=128.0) == (128.0, False)
    assert chosen(loss_scale=0.0) == (2.0**32, True)
    assert chosen(fp16=False, loss_scale=128.0) == (1.0, False)


def test_deepspeed_cannot_change_it() -> None:
    inner = DynamicLossScale(16, 1, 1, 1)
    adapter = ScaleForDeepSpeed(inner)
    adapter.update_scale(False)
    assert adapter.cur_scale == adapter.loss_scale == 16
    inner.update(False)
    assert adapter.cur_scale == 32
