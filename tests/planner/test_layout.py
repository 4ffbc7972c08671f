"""Writing and reading of layouts."""

from __future__ import annotations

import pytest

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.planner.layout import CandidateLayout, candidate_of, matches, narrowed, parse_layout


def test_what_is_written_is_read():
    layout = CandidateLayout(
        1024,
        640,
        8,
        8,
        6,
        "interleaved",
        2,
        True,
        False,
        1,
        "selective:mlp_act+layernorm",
        "tp-pp-dp",
        (0, 1, 6, 7, 2, 3, 4, 5),
    )
    text = layout.write(8)
    assert parse_layout(text, "--layout") == {
        "nodes": (128,),
        "gbs": (640,),
        "tp": (8,),
        "pp": (8,),
        "chunks": (6,),
        "schedule": ("interleaved",),
        "mbs": (2,),
        "sp": (True,),
        "overlap": (False,),
        "zero": (1,),
        "recompute": ("selective:mlp_act+layernorm",),
        "order": ("tp-pp-dp",),
        "devices": ((0, 1, 6, 7, 2, 3, 4, 5),),
    }


def test_the_short_form():
    found = parse_layout("tp=4,pp=16,chunks=2,mbs=1,recompute=selective", "--layout")
    assert found == {
        "tp": (4,),
        "pp": (16,),
        "chunks": (2,),
        "mbs": (1,),
        "recompute": ("selective",),
    }
    assert parse_layout("tp=4,8,pp=2,recompute=full:block:3,none,chunks=1", "--fix") == {
        "tp": (4, 8),
        "pp": (2,),
        "recompute": ("full:block:3", "none"),
        "chunks": (1,),
    }
    assert matches("selective:mlp_act", "selective") and not matches(
        "selective:mlp_act", "selective:layernorm"
    )
    assert parse_layout("recompute=selective:layernorm+mlp_act", "x")["recompute"] == (
        "selective:mlp_act+layernorm",
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tq=4", ["--layout tq=4", "'tq'", "tp"]),
        ("4", ["'4'", "NAME=VALUE"]),
        ("", ["--layout"]),
        ("tp=4,tp=8", ["tp"]),
        ("tp=0", ["tp", "'0'"]),
        ("schedule=gpipe", ["zb-h1", "'gpipe'"]),
        ("recompute=half", ["selective", "'half'"]),
        ("recompute=full:block:0", ["'full:block:0'"]),
        ("recompute=selective:attention", ["core_attn", "mlp_act"]),
        ("zero=4", ["zero"]),
        ("sp=maybe", ["sp"]),
    ],
)
def test_mistakes_in_a_layout(text, parts):
    with pytest.raises(ConfigError) as error:
        parse_layout(text, "--layout")
    for part in parts:
        assert part in str(error.value)


def test_narrowing():
    first = {"tp": (2, 4), "recompute": ("full", "none")}
    assert narrowed(first, {"tp": (4, 8), "pp": (2,)}) == {
        "tp": (4,),
        "pp": (2,),
        "recompute": ("full", "none"),
    }
    assert narrowed(first, {"recompute": ("full:block:2", "selective")})["recompute"] == (
        "full:block:2",
    )
    assert narrowed(first, {"tp": (8,)})["tp"] == ()


@pytest.mark.parametrize(
    "layout",
    [
        CandidateLayout(64, 32, 4, 4, 1, "zb-h1", 1, True, False, 0, "full:block:2"),
        CandidateLayout(8, 8),
        CandidateLayout(
            64,
            32,
            2,
            4,
            3,
            "interleaved",
            1,
            True,
            True,
            1,
            "selective:mlp_act+layernorm",
            "pp-tp-dp",
            (1, 0),
        ),
    ],
)
def test_a_configuration_has_the_layout_that_it_was_given(layout):
    model = dict(
        num_layers=24,
        hidden_size=256,
        num_attention_heads=8,
        seq_length=128,
        vocab_size=512,
        bf16=True,
    )
    plain = Config.create(**model)
    assert candidate_of(plain.replace(**layout.settings(24))) == layout
