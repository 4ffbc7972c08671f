"""Writing and reading of layouts."""

import pytest

from megatron.errors import ConfigError
from megatron.planner.layout import CandidateLayout, candidate_of, matches, narrowed, parse_layout
from tests.planner.layouts import planned

WHOLE = CandidateLayout(
    *(1024, 640, 8, 8, 6, "interleaved", 2, True, False, 1, "selective:mlp_act+layernorm"),
    *("tp-pp-dp", (0, 1, 6, 7, 2, 3, 4, 5)),
)


def test_what_is_written_is_read():
    fields = WHOLE._asdict()
    names = dict(gbs="batch", mbs="micro", order="rank_order", devices="device_order")
    written = "gbs tp pp chunks schedule mbs sp overlap zero recompute order devices".split()
    assert parse_layout(WHOLE.write(8), "--layout") == {
        "nodes": (128,),
        **{name: (fields[names.get(name, name)],) for name in written},
    }


def test_the_ranks_of_an_expert_are_written_if_there_is_a_choice():
    for etp, ep, written in ((1, 8, "ep=8,etp=1,"), (0, 8, "ep=8,etp=4,"), (0, 1, "")):
        text = CandidateLayout(64, 32, 4, 4, ep=ep, etp=etp).write(8)
        assert f"pp=4,{written}chunks" in text


def test_the_short_form():
    parsed = parse_layout("tp=4,pp=16,chunks=2,mbs=1,recompute=selective", "--layout")
    assert parsed == dict(tp=(4,), pp=(16,), chunks=(2,), mbs=(1,), recompute=("selective",))
    parsed = parse_layout("tp=4,8,pp=2,recompute=full:block:3,none,chunks=1", "--fix")
    assert parsed == dict(tp=(4, 8), pp=(2,), recompute=("full:block:3", "none"), chunks=(1,))
    assert matches("selective:mlp_act", "selective")
    assert not matches("selective:mlp_act", "selective:layernorm")
    assert parse_layout("recompute=selective:layernorm+mlp_act", "x")["recompute"] == (
        "selective:mlp_act+layernorm",
    )


def test_mistakes_in_a_layout():
    for text, words in {
        "tq=4": "--layout tq=4 'tq' tp",
        "4": "'4' NAME=VALUE",
        "": "--layout",
        "tp=4,tp=8": "tp",
        "tp=0": "tp '0'",
        "schedule=gpipe": "zb-h1 'gpipe'",
        "recompute=half": "selective 'half'",
        "recompute=full:block:0": "'full:block:0'",
        "recompute=selective:attention": "core_attn mlp_act",
        "zero=4": "zero",
        "sp=maybe": "sp",
    }.items():
        with pytest.raises(ConfigError) as error:
            parse_layout(text, "--layout")
        assert all(word in str(error.value) for word in words.split()), text


def test_narrowing():
    first = {"tp": (2, 4), "recompute": ("full", "none")}
    assert narrowed(first, {"tp": (4, 8), "pp": (2,)}) == {**first, "tp": (4,), "pp": (2,)}
    second = {"recompute": ("full:block:2", "selective")}
    assert narrowed(first, second)["recompute"] == ("full:block:2",)
    assert narrowed(first, {"tp": (8,)})["tp"] == ()


@pytest.mark.parametrize(
    "layout",
    [
        CandidateLayout(64, 32, 4, 4, 1, "zb-h1", 1, True, False, 0, "full:block:2"),
        CandidateLayout(8, 8),
        CandidateLayout(64, 32, 4, 4, ep=8, etp=1),
        WHOLE._replace(world=64, batch=32, tp=2, pp=4, chunks=3, device_order=(1, 0)),
    ],
)
def test_a_configuration_has_the_layout_that_it_was_given(layout):
    sizes = "--num-layers 24 --hidden-size 256 --num-attention-heads 8 --seq-length 128"
    plain = planned(sizes, "--vocab-size 512 --bf16 --num-experts 8 --moe-router-topk 2")
    assert candidate_of(plain.replace(**layout.settings(24))) == layout
