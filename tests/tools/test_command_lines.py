"""Common behaviour of all tools: mistakes, --help, models by name, names of files, numbers."""

import argparse
import importlib
import math

import pytest

from megatron.config.option import integer, real
from tests.helpers.launching import ROOT, Script

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("*.py"))


def call(tool, words):
    try:
        return importlib.import_module(f"tools.{tool}").main(
            [*(["measure"] if tool == "preflight" else []), *words]
        )
    except SystemExit as end:  # of --help
        return int(end.code or 0)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_mistake_ends_with_2_and_one_prefix(tool, capsys):
    assert call(tool, ["--no-such-flag"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and out == "" and "Traceback" not in err


@pytest.mark.slow
def test_a_name_that_is_no_text(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "module.py").write_text(
        "x = 1  # long enough to be a document of the corpus, as it is\n" * 2
    )
    output = tmp_path / "corpus\udcff.jsonl"
    words = ["--stdlib", str(tmp_path / "lib"), "--output", str(output)]
    with Script("tools/build_corpus.py", words, tmp_path / "log") as script:
        outcome = script.wait()
    assert outcome.code == 0 and output.exists() and "Traceback" not in outcome.output, outcome


EXTREMES = ("0", "-1", "nan", "-inf", "1e308", "5e-324", str(2**64), "9" * 5000)


def test_every_number_of_a_tool_has_a_range():
    modules = [importlib.import_module(f"tools.{tool}") for tool in TOOLS]
    parsers = [module.build_parser() for module in modules if hasattr(module, "build_parser")]
    types = [action.type for parser in parsers for action in parser._actions if action.type]
    assert len(types) > 50 and int not in types and float not in types


@pytest.mark.parametrize(
    ("make", "accepted"),
    [
        (integer(), 1),
        (integer(0, 64), 0),
        (real(60), 1e-3),
        (real(least=0), 0.0),
        (real(least=5), 5.0),
    ],
)
def test_a_number_is_within_its_range_or_refused(make, accepted):
    assert make(str(accepted)) == accepted
    for text in EXTREMES:
        try:
            number = make(text)
        except argparse.ArgumentTypeError:
            continue
        assert math.isfinite(number) and 0 <= number <= 10**9, text
