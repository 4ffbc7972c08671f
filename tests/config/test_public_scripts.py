"""Command lines of public GPT launch scripts.

They resolve unchanged, or are refused for the listed reasons.
"""

import math
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from megatron.config import parse_args
from megatron.errors import ConfigError


def scripts(name):
    entries = tomllib.loads(Path(__file__).with_name(name).read_text())["script"]
    return entries


SCRIPTS = scripts("public_scripts.toml")
BY_FAMILY = scripts("scripts_by_family.toml")
RESOLVED = [s for s in SCRIPTS if "problems" not in s]
REFUSED = [s for s in SCRIPTS if "problems" in s]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_CLUSTER", raising=False)
    return tmp_path


def resolve(script):
    for name, text in {"ds.json": script.get("json", ""), **script.get("files", {})}.items():
        Path(name).write_text(text)
    config = parse_args(shlex.split(script["line"]), script["processes"])
    return config, list(config.notices)


def problems_of(script):
    with pytest.raises(ConfigError) as raised:
        resolve(script)
    text = str(raised.value)
    one = re.match(r"the configuration has 1 problem: (.*)", text, re.DOTALL)
    return [one[1]] if one else re.split(r"\n  \d+\. ", text)[1:]


def test_public_lines_resolve():
    """Lines resolve to sizes counted by hand, and to every value that the line has a flag for."""
    assert len(RESOLVED) >= 15
    for script in RESOLVED:
        config, _ = resolve(script)
        sizes = (
            config.parallel.data_parallel_size,
            config.num_micro_batches(),
            config.batch.global_batch_size,
        )
        assert sizes == tuple(script[n] for n in ("replicas", "micro_batches", "global_batch")), (
            script["follows"]
        )
        assert config.tokenizer.tokenizer_type is not None
        check_values(script, config)


def check_values(script, config):
    line = f"{script['line']} {script.get('read_as', '')}".strip()
    last = {
        flag: words for flag, *words in (option.split() for option in re.split(r"\s(?=--)", line))
    }
    for flag, words in last.items():
        setting = flag.removeprefix("--").replace("-", "_")
        if words and setting in config.explicit:
            value = config.explicit[setting]
            values = value if isinstance(value, tuple) else (value,)
            assert len(values) == len(words) and all(map(_same, values, words)), (
                script["follows"],
                flag,
                value,
            )


def test_scripts_of_every_family():
    """Four in five scripts that need only features present here resolve.

    Refusals say what to do instead.
    """
    assert len(BY_FAMILY) >= 60
    resolved = []
    refused = []
    for script in BY_FAMILY:
        if script.keys() & {"needs", "refused"}:
            refused.append(script)
            for problem in problems_of(script):
                assert not problem.startswith("unknown"), (script["follows"], problem)
                remedy = re.search(r"\b(use|remove|set it)\b", problem)
                assert remedy or "not supported" not in problem, (script["follows"], problem)
                listed = any(has(problem, names) for names in script.get("refused", ()))
                assert listed or "needs" in script, (script["follows"], problem)
            continue
        config, _ = resolve(script)
        resolved.append(script)
        check_values(script, config)
        words = script["line"].replace("_", "-").split()
        sizes = ("tensor-model", "pipeline-model", "context")
        layout = [f"--{name}-parallel-size" for name in sizes]
        model = [int(words[words.index(flag) + 1]) if flag in words else 1 for flag in layout]
        assert config.parallel.data_parallel_size * math.prod(model) == script["processes"], script[
            "follows"
        ]
    assert len(resolved) >= 0.8 * (len(resolved) + sum("needs" not in s for s in refused))


def _same(value, written):
    try:
        return float(str(value)) == float(written)
    except ValueError:
        return str(value).lower() in (written.lower(), "learned_absolute")


def test_public_lines_are_refused_for_the_right_reasons():
    for script in REFUSED:
        problems = problems_of(script)
        for names in script["problems"]:
            assert any(has(problem, names) for problem in problems), (
                f"{names}\nis not in\n" + "\n".join(problems)
            )
        for problem in problems:
            assert any(has(problem, names) for names in script["problems"]), (
                f"not listed: {problem}"
            )


def has(problem, names):
    return all(name in problem for name in names.split())
