"""Lines for parsers, against a line of a real run."""

import math
import re

import pytest

from megatron.training.report.events import Iteration, Validation
from megatron.training.report.reporter import format_iteration, format_timers, format_validation

REAL_LINE = (
    " iteration        2/       5 | consumed samples:         2560 | consumed tokens:      "
    "5242880 | elapsed time per iteration (ms): 196496.4 | learning rate: 6.000E-05 | global batch "
    "size:  1280 | lm loss: 1.109811E+01 | loss scale: 1073741824.0 | grad norm: 0.000 | num "
    "zeros: 0.0 | actual seqlen:  2048 | number of skipped iterations:   0 | number of nan "
    "iterations:   0 | samples per second: 6.514 | TFLOPs: 149.46 |"
)


def report(**changes):
    values = dict(
        iteration=2,
        total_iterations=5,
        consumed_samples=2560,
        consumed_tokens=5242880,
        global_batch_size=1280,
        seq_length=2048,
        learning_rate=6e-5,
        lm_loss=11.09811,
        loss_scale=1073741824.0,
        grad_norm=0.0,
        num_zeros=0.0,
        params_norm=None,
        skipped=0,
        nan=0,
        step_time_s=196.4964,
        samples_per_s=6.514,
        tokens_per_s=13340.7,
        tokens_per_s_per_device=2.223,
        model_tflops=112.1,
        hardware_tflops=149.46,
        mfu=None,
        hfu=None,
        memory_bytes=None,
        memory_rank=None,
        reserved_bytes=None,
    )
    return Iteration(**{**values, **changes})


def test_the_same_figures_give_the_real_line():
    # That run's version printed no tgs; everything else is equal to the last character.
    line = format_iteration(report())
    assert line.replace(" tokens per gpu per second (tgs): 2.223 |", "") == REAL_LINE


def test_all_fields_and_their_order():
    line = format_iteration(
        report(
            params_norm=12.3456,
            grad_norm=1.25,
            num_zeros=7.0,
            skipped=3,
            nan=1,
            mfu=0.41237,
            hfu=0.5,
            lm_loss=0.5,
        )
    )
    assert line.split(" global batch size:  1280 |")[1] == (
        " lm loss: 5.000000E-01 | loss scale: 1073741824.0 | grad norm: 1.250 | num zeros: 7.0 | "
        "params norm: 12.346 | actual seqlen:  2048 | number of skipped iterations:   3 | "
        "number of nan iterations:   1 | samples per second: 6.514 | "
        "tokens per gpu per second (tgs): 2.223 | TFLOPs: 149.46 | MFU: 0.412 | HFU: 0.500 |"
    )


@pytest.mark.parametrize("loss", [2.5, 31.0])
def test_validation_lines(loss):
    event = Validation(
        iteration=10,
        consumed_samples=0,
        consumed_tokens=0,
        dataset="valid",
        lm_loss=loss,
        samples=1,
        elapsed_s=1.0,
        where="iteration 10",
    )
    above, line, below = format_validation(event).split("\n")
    match = re.fullmatch(
        r" validation loss at iteration 10 \| lm loss value: (\d\.\d{6}E[+-]\d\d) \| lm loss PPL: "
        r"(\d\.\d{6}E[+-]\d\d) \| ",
        line,
    )
    assert match
    assert float(match[1]) == pytest.approx(loss, rel=1e-6)
    assert float(match[2]) == pytest.approx(math.exp(loss) if loss < 20 else math.exp(20), rel=1e-6)
    assert set(above) == {"-"} == set(below) and len(above) == len(below) > len(line.rstrip())


def test_timer_lines():
    times = {"forward-backward": [10.0, 12.5, 11.0], "optimizer": [1.0, 1.0, 1.0]}
    first, *rows = format_timers(times).split("\n")
    assert first == "(min, max) time across ranks (ms):"
    assert [
        re.fullmatch(r"    ([\w-]+) \.+: \((\d+\.\d\d), (\d+\.\d\d)\)", row).groups()
        for row in rows
    ] == [
        ("forward-backward", "10.00", "12.50"),
        ("optimizer", "1.00", "1.00"),
    ]
    assert format_timers(times, "max").split("\n")[1].endswith(": 12.50")
    assert format_timers(times, "all").count("rank") == 1 + 2 * 3
