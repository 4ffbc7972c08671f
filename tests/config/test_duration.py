"""Durations in Slurm's format."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.config.duration import duration_s, show_duration


def test_every_form_of_slurm_and_nothing_else():
    for text, seconds in {
        "2-03:04:05": 183845,
        "2-03:04": 183840,
        "2-03": 183600,
        "0-0": 0,
        "03:04:05": 11045,
        "3:04:05": 11045,
        "100:00:00": 360000,
        "04:05": 245,
        "0:00": 0,
        "120:00": 7200,
        "90": 5400,
        " 04:05\n": 245,
    }.items():
        assert duration_s(text) == seconds, text
    wrong = "UNLIMITED NOT_SET INVALID - 1- -1:00 1:60 1:2:3:4 1-24:00 1.5 1:00:60 4m 1-2-3".split()
    for text in ("", *wrong):
        assert duration_s(text) is None, text


@given(st.integers(0, 400 * 86400))
def test_what_is_shown_is_read(seconds):
    assert duration_s(show_duration(seconds)) == seconds
