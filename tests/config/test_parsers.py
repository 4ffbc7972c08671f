"""Flags of other GPT programs' parsers: each is a setting, maps to some, or has a reason."""

import re
import tomllib
from pathlib import Path

import pytest

from megatron.config import parse_args
from megatron.config.command_line import flag_table, settings_flags
from megatron.config.flags_of_others import foreign_flags
from megatron.errors import ConfigError

PARSERS = tomllib.loads(Path(__file__).with_name("parsers.toml").read_text())
RUN = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--vocab-size 100 --global-batch-size 16 --train-iters 100 --lr 0.001 --min-lr 0.0 "
    "--init-method-std 0.02 --mock-data"
).split()
FOREIGN = foreign_flags()


FAMILIES = {(flag.refused, flag.reason) for flag in FOREIGN.values()}


def test_every_flag_of_every_parser_is_known():
    """Every flag of every parser is known, and no setting is also listed as unsupported."""
    flags = {f"--{name}" for names in PARSERS.values() for name in names.split()}
    assert len(flags) > 1500 and len(PARSERS) >= 5
    known = set(flag_table())
    assert [f for f in sorted(flags) if not known & {f, f.replace("_", "-")}] == []
    assert [flag for flag in FOREIGN if flag in settings_flags()] == []
    assert "--no-such-flag" not in flag_table()


def test_each_reason_is_there_once_and_a_refusal_has_a_remedy():
    reasons = [reason for _, reason in FAMILIES]
    assert len(set(reasons)) == len(reasons) and all(
        reason and "\n" not in reason for reason in reasons
    )
    for refused, reason in FAMILIES:
        assert not refused or re.search(r"\b(use|remove)\b", reason), reason
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", reason)) <= set(settings_flags()), reason


def notices_of(words):
    config = parse_args([*RUN, *words], 1)
    notices = list(config.notices)
    assert config == parse_args(RUN, 1), words
    return notices


def problem_of(words):
    with pytest.raises(ConfigError) as raised:
        parse_args([*RUN, *words], 1)
    assert "has 1 problem:" in str(raised.value), raised.value
    return str(raised.value).partition("1 problem: ")[2]


VALUES = {"0": [], "1": ["7"], "?": ["7"], "*": ["7", "8"]}


def test_flags_without_effect_are_accepted_and_change_nothing():
    for spelling, flag in FOREIGN.items():
        if not flag.refused:
            (notice,) = notices_of([spelling, *VALUES[flag.values]])
            assert notice.startswith(spelling) and flag.reason in notice


def test_refused_flags_are_accepted_where_their_value_leaves_the_feature_off():
    """Refused flags are accepted at values that leave the feature off.

    The values are mostly the framework's own default; every value of every flag is tested.
    """
    settings = dict(zip(RUN[::2], RUN[1::2], strict=False))
    counted = 0
    for spelling, flag in FOREIGN.items():
        if not flag.refused:
            continue
        off = {"0": ["false"]}.get(flag.values, ["none", *flag.harmless])
        for value in off:
            word = settings["--" + value[1:].replace("_", "-")] if value.startswith("@") else value
            if word is not None:
                (notice,) = notices_of([spelling, word])
                assert notice.startswith(f"{spelling} {word} "), notice
                counted += 1
        assert flag.reason in problem_of([spelling, *VALUES[flag.values]])
    assert counted > 700


def test_what_takes_no_value_takes_none():
    for line in ("--moe-grouped-gemm 3", "--topk", "--topk 1 2", "--use_turbo_attention maybe"):
        assert line.split()[0] in problem_of(line.split())


def test_underscores_and_dashes_are_the_same_in_them():
    """Underscores equal dashes: Primus writes its keys with them, and some forks all flags."""
    assert notices_of(["--use_turbo_gemm", "true"])[0].startswith("--use_turbo_gemm true ")
    assert "--bf16" in problem_of(["--fp8_hybrid"])
    assert parse_args([*RUN, "--log_interval", "7"], 1).logging.log_interval == 7


def test_no_flag_is_offered_that_is_refused():
    for spelling in sorted(FOREIGN)[::10]:
        for typo in (spelling[:-1], spelling + "s"):
            if typo in flag_table():
                continue
            text = problem_of([typo])
            offered = re.findall(r"--[\w-]+", text.partition("did you mean")[2])
            assert all(flag in settings_flags() for flag in offered), text
