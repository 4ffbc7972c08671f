"""--blend-schedule: names of sources, blends of each split, and phases of the run's data."""

from types import SimpleNamespace

import pytest

from megatron.config import Config
from megatron.config.io import DataConfig
from megatron.data.datasets import data_prefixes, open_data, plan_splits, scheduled_phases
from megatron.errors import ConfigError, DataError
from tests.helpers.indexed import write_documents

WEB, CODE = "data/web_text_document", "data/code"


def blends(schedule, **data):
    """Return {tokens: {prefix with documents: weight}} of each split that has data."""
    plans = plan_splits(DataConfig(blend_schedule=schedule, **data))
    return [
        plan
        and {
            tokens: {f"{s.prefix}@{s.documents}".strip("@"): s.weight for s in blend}
            for tokens, blend in plan.schedule
        }
        for plan in plans
    ]


def test_names_of_sources_and_the_blend_of_each_split():
    known = ("3", WEB, "1", CODE)
    half = {WEB: 0.5, CODE: 0.5}
    weights = {WEB: 0.75, CODE: 0.25}
    assert blends("2K: 1 web 1 code", data_path=known) == [
        {0: weights, 2000: half},
        *[{0: weights}] * 2,
    ]
    assert blends(f"0: 1 web 1 {CODE}, 9: new", data_path=known) == [
        {0: half, 9: {"new": 1}},
        *[{0: weights}] * 2,
    ]
    alone = blends("0: 1 a 1 b, 1K: a")
    assert alone == [{0: {"a": 0.5, "b": 0.5}, 1000: {"a": 1}}, *[{0: {"a": 0.5, "b": 0.5}}] * 2]
    parts = dict(train_data_path=(f"{WEB}@0:0.5",), valid_data_path=(CODE,))
    assert blends("8: web, 9: web@0.5:1", **parts) == [
        {0: {f"{WEB}@0.0:0.5": 1}, 8: {f"{WEB}@0.0:0.5": 1}, 9: {f"{WEB}@0.5:1.0": 1}},
        {0: {CODE: 1}},
        None,
    ]
    with pytest.raises(ConfigError, match="'code'.* a/code@0:1, b/code@0:1"):
        blends("8: code", data_path=("1", "a/code", "1", "b/code"))


def test_files_of_later_phases_are_read_and_unused_weights_are_named():
    sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=4)
    config = Config.create(
        **sizes, train_data_path=("1", WEB, "1", CODE), blend_schedule="0: web, 9: new"
    )
    assert data_prefixes(config) == [WEB, "new"]
    assert any("--train-data-path" in notice for notice in config.notices)


def test_phases(tmp_path):
    """Sources without documents in the split are omitted; a source of the past keeps its name."""
    a, b, c = (
        write_documents(tmp_path / name, [[1] * 10] * documents)
        for name, documents in (("a", 10), ("b", 2), ("c", 10))
    )
    config = SimpleNamespace(
        data=DataConfig(data_path=("1", a, "2", b, "3", c), blend_schedule="1K: 1 a 1 a, 2K: c"),
        model=SimpleNamespace(seq_length=8),
        training=SimpleNamespace(seed=7),
    )

    def phases(index, past=(), split="1,9,0", **data):
        settings = DataConfig(**{**vars(config.data), "split": split, **data})
        (plan, *_) = plan_splits(settings)
        changed = SimpleNamespace(**{**vars(config), "data": settings})
        return scheduled_phases(changed, plan, lambda p: open_data(p, settings), index, past)

    scheduled = phases(0)
    assert [each.tokens for each in scheduled] == [0, 1000, 2000]
    first = scheduled[0].phase
    assert (first.seq_length, first.packing, first.seed) == (8, "concat", 7)
    named = [(s.name, s.first, s.stop, s.weight) for s in first.sources]
    assert named == [(a, 0, 1, 0.25), (c, 0, 1, 0.75)]  # b: round(0.2) documents
    assert [s.weight for s in scheduled[1].phase.sources] == [1]  # one stream for one part
    assert not phases(0, split="0,1")
    with pytest.raises(DataError, match="2,000"):
        phases(0, blend_schedule="2K: b")
    parts = dict(data_path=None, valid_data_path=(c,), blend_schedule=f"0: 1 {a}@0:0.6 1 {a}@0.4:1")
    (both,) = phases(0, **parts)
    assert [s.name for s in both.phase.sources] == [f"{a}@0:6", f"{a}@4:10"]
    (later,) = phases(0, [both.phase], **{**parts, "blend_schedule": f"0: {a}@0.4:1"})
    assert [s.name for s in later.phase.sources] == [f"{a}@4:10"]
    halves = phases(0, **{**parts, "blend_schedule": f"0: {a}@0:0.5, 1K: {a}@0.5:1"})
    assert [s.name for each in halves for s in each.phase.sources] == [f"{a}@0:5", f"{a}@5:10"]
