"""Reading a space: meaning of names, ranges, and every mistake with its place."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.command_line import read_settings
from megatron.config.settings import all_options
from megatron.errors import ConfigError
from megatron.jobs.space import flags_of, parse_expression, read_value


@pytest.fixture
def read(read):
    return partial(read, flags=None)


WHOLE = """
title = "A space"
source = "somewhere"
cluster = "frontier"
flags = ["--preset", "tiny", "--num-layers", 8]
[parameters]
tp = [4, 1, 2]
"--micro-batch-size" = [1, 2, 4, 8]
lr = [0.1, 0.2, 0.3]
schedule = ["zb-h1", "1f1b"]
sp = [true, false]
num-layers-per-virtual-pipeline-stage = [2, "none", 1]
[variables]
accumulation = [4, 8, 12]
[derived]
gbs = "mbs * dp * accumulation"
processes = 4
[constraints]
"node" = "tp <= 2"
[trial]
iterations = 7
warm_up = 0
"""


def test_a_whole_file(read):
    space = read(WHOLE)
    assert [(p.name, p.values, p.ordered) for p in space.parameters] == [
        ("tp", (1, 2, 4), True),
        ("mbs", (1, 2, 4, 8), True),
        ("lr", (0.1, 0.2, 0.3), True),
        ("schedule", ("zb-h1", "1f1b"), False),
        ("sp", (False, True), True),
        ("num_layers_per_virtual_pipeline_stage", (2, None, 1), False),
        ("accumulation", (4, 8, 12), True),
    ]
    assert space.variables == {"accumulation"}
    assert space.flags == tuple("--preset tiny --num-layers 8".split())
    assert (space.title, space.cluster, space.name) == ("A space", "frontier", "space")
    assert {name: e.text for name, e in space.derived.items()} == {
        "gbs": "mbs * dp * accumulation",
        "processes": "4",
    }
    assert (space.iterations, space.warm_up) == (7, 0)
    assert space.combinations == 3 * 4 * 3 * 2 * 2 * 3 * 3


def test_the_digest_is_of_the_meaning(read):
    first = read(WHOLE).digest()
    assert (
        read(WHOLE.replace("A space", "Another title").replace('"node"', '"why"')).digest() == first
    )
    for old, new in (
        ("tp <= 2", "tp <= 1"),
        ("[4, 1, 2]", "[4, 2]"),
        ('"tiny"', '"gpt2-124m"'),
        ("[4, 8, 12]", "[4]"),
        ("* accumulation", "* accumulation * 2"),
        ("processes = 4", "processes = 8"),
    ):
        assert old in WHOLE and read(WHOLE.replace(old, new)).digest() != first, new


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[parameters]", "[parameters]"),
        ("[parameters]\ntp = 4", "[parameters] tp|4"),
        ("[parameters]\ntp = [0]", "[parameters] tp|0"),
        ("[parameters]\nmicro-batch-sise = [1]", "micro_batch_size"),
        (
            "[parameters]\ntp = [1]\ntensor-model-parallel-size = [2]",
            "tp|tensor-model-parallel-size",
        ),
        ("[parameters]\nnodes = [1]\nprocesses = [8]", "processes|nodes"),
        ("[parameters]\nrecompute = ['all']", "[parameters] recompute|selective"),
        ("[parameters]\norder = ['tp-pp']", "[parameters] order|tp-dp-pp"),
        ("[parameters]\ntrain-iters = [10]", "train-iters|--iterations"),
        ("[parameters]\nsave = ['x']", "save"),
        ("[parameters]\ndp = [2]", "dp|processes"),
        ("[parameters]\ntp = { from = 1, to = 4 }", "[parameters] tp"),
        (f"[parameters]\nseed = [1{'0' * 5000}]", ""),
        ("[parameters]\ntp = [1979-05-27]", "[parameters] tp"),
        ("[parameters]\ntp = [1]\n[variables]\nmbs = [1]", "[variables] mbs|[parameters]"),
        ("[parameters]\ntp = [1]\n[derived]\ntp = '1'", "[derived] tp|tp is given"),
        ("[parameters]\ntp = [1]\n[derived]\ngbs = 'mbs *'", "[derived] gbs|'mbs *'"),
        ("[parameters]\ntp = [1]\n[derived]\ngbs = 'mbs * accu'", "[derived] gbs|accu"),
        ("[parameters]\ntp = [1]\n[trial]\niterations = 0", "[trial]|iterations|0"),
        ("[parameters]\ntp = [1]\n[trial]\nwarmup = 1", "[trial]|warmup|warm_up"),
        ("flags = ['--bf61']\n[parameters]\ntp = [1]", "--bf61"),
        ("flags = ['--load', 'x', '--save', 'x']\n[parameters]\ntp = [1]", "--load x|--save x"),
        ("flags = ['--micro-batch-size', 2]\n[parameters]\nmbs = [1]", "mbs|--micro-batch-size 2"),
        ("titel = 'x'\n[parameters]\ntp = [1]", "title"),
        ("[parameters\ntp = [1]", "line 1"),
    ],
)
def test_a_mistake_is_named_with_its_place(read, text, words):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert all(word in str(caught.value) for word in ("space.toml", *words.split("|")))


@given(
    st.one_of(
        st.text(max_size=60),
        st.tuples(
            st.sampled_from("tp mbs lr sp recompute preset devices bf16 x".split()),
            st.sampled_from(
                "[1];['none'];[[1,2]];[{a=1}];{from=1,to=3,step=1};[-1.5];['1'];{};[true, 'x'];"
                "[99999999999999999999];['']".split(";")
            ),
            st.sampled_from(
                ["", "[derived]\ngbs = 'tp'", "[derived]\ntp = 1", "[constraints]\na = true"]
            ),
        ).map(lambda t: f"[parameters]\n{t[0]} = {t[1]}\n{t[2]}"),
    )
)
def test_no_file_does_anything_but_be_read_or_refused(read, text):
    try:
        space = read(text)
    except ConfigError:
        return
    assert all(
        len({str(value) for value in p.values}) == len(p.values) > 0 for p in space.parameters
    )


def test_every_setting_that_has_a_flag_varies():
    """Every setting with a flag varies: pretrain_gpt.py's parser reads the value back."""
    varied = 0
    for name, option in all_options().items():
        value = (
            option.choices[-1]
            if option.choices
            else {int: 8, float: 1.5, str: "a_b"}.get(option.kind, True)
        )
        if not option.flags or option.kind is dict:
            continue
        try:
            accepted = read_value(name, value)
        except ConfigError as error:
            limited = any(word in str(error) for word in ("at most", "less than", "at least"))
            assert limited or option.syntax is not None, name
            continue
        parsed = read_settings(flags_of(name, accepted))
        assert not parsed.problems and parsed.explicit[name] == (
            (value,) if option.many else value
        ), name
        varied += 1
    assert varied > 150


# -- expressions -----------------------------------------------------------------------------------

NAMES = dict(tp=4, pp=12, mbs=3, half=0.5, sp=True, schedule="1f1b", chunks=None)
NUMBERS = st.sampled_from("0 1 2 3 7 64 1.5 tp pp mbs half".split())


def joined(operands):
    signs = st.sampled_from("+ - * / // %".split())
    return st.one_of(
        st.tuples(operands, signs, operands).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), operands, operands).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        operands.map(lambda a: f"(-{a})"),
    )


ARITHMETIC = st.recursive(NUMBERS, joined, max_leaves=8)
COMPARED = st.one_of(
    st.tuples(ARITHMETIC, st.sampled_from("< <= > >= == !=".split()), ARITHMETIC).map(" ".join),
    st.tuples(ARITHMETIC, ARITHMETIC, ARITHMETIC).map(lambda t: f"{t[0]} < {t[1]} <= {t[2]}"),
    st.tuples(ARITHMETIC, ARITHMETIC).map(lambda t: f"{t[0]} in (1, 2, {t[1]})"),
    st.tuples(ARITHMETIC, ARITHMETIC).map(lambda t: f"{t[0]} not in [3, {t[1]}]"),
)
LOGIC = st.recursive(
    COMPARED,
    lambda operands: st.one_of(
        st.tuples(operands, st.sampled_from(["and", "or"]), operands).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        operands.map(lambda a: f"(not {a})"),
        st.tuples(operands, operands, operands).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
    ),
    max_leaves=5,
)


@given(st.one_of(ARITHMETIC, LOGIC))
def test_values_are_python_s(text):
    try:
        expected = eval(text, {}, dict(NAMES))
    except ZeroDivisionError:
        with pytest.raises(ValueError):
            parse_expression(text).value(NAMES)
    else:
        value = parse_expression(text).value(NAMES)
        assert value == expected and type(value) is type(expected)


@given(
    st.one_of(st.text(max_size=40), st.text("tp12()[]*+-/.,'\"<>= :;{}@andorif_lmbyx", max_size=30))
)
def test_any_text_has_a_value_or_a_problem_and_nothing_else(text):
    try:
        value = parse_expression(text).value(NAMES)
    except ValueError as error:
        assert str(error)
    else:
        assert value is None or isinstance(value, (int, float, str, bool))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "tp.__class__",
        "(lambda: 1)()",
        "[x for x in (1, 2)]",
        "f'{tp}'",
        "(tp := 2)",
        "{'a': 1}",
        "tp[0]",
        "tp = 2",
        "print(tp)",
        "min(*(1, 2))",
        "tp is 1",
        "tp in 'tpa'",
        "'a' * 3",
        "'a' + 'b'",
        "1j",
        "tp & 1",
        "tp << 40",
        "await tp",
        "chunks + 1",
        "schedule < 2",
        "",
        "tp + none",
        # A power computed in full would take hours.
        "9**9**9**9",
        "2 ** (2 ** 64)",
        "1" * 5000,
        "(" * 400 + "1" + ")" * 400,
        "-" * 5000 + "1",
        "(1" + "+1" * 480 + ") // 0",
    ],
)
def test_what_is_not_offered_is_refused(text):
    with pytest.raises(ValueError):
        parse_expression(text).value(NAMES)


def test_words_and_what_is_not_given():
    assert parse_expression(
        "schedule == '1f1b' and chunks == 'none' and chunks == none and not false"
    ).value(NAMES)
    assert parse_expression("schedule in ('zb-h1', 'interleaved')").value(NAMES) is False
