"""Writer of machine descriptions: its output is read as the same machine."""

import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.planner.cluster import (
    QualityOfService,
    load_cluster,
    read_cluster,
    write_cluster,
)
from megatron.planner.compute import BASES, COLUMNS, SCALARS, Figure

LUMI = load_cluster("lumi")
texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
numbers = st.floats(1e-9, 1e12)
RATES = "update_gb_per_s", "speed_beside_messages"  # single figures that are not 0


@st.composite
def figures(draw):
    name = draw(st.sampled_from(sorted(COLUMNS)))
    width = COLUMNS[name]
    if name in SCALARS:
        least = numbers if name in RATES else st.one_of(st.just(0.0), numbers)
        points = ((draw(least),),)
    else:
        points = tuple(draw(st.lists(st.tuples(*[numbers] * width), min_size=1, max_size=4)))
    low = draw(st.floats(0.01, 1.0))
    high = draw(st.floats(1.0, 100.0))
    return Figure(name, points, draw(st.sampled_from(BASES)), draw(texts), low, high)


@given(
    compute=st.lists(figures(), unique_by=lambda f: f.name),
    title=texts,
    cores=st.one_of(st.none(), st.integers(1, 64)),
)
def test_any_figures_survive(compute, title, cores):
    cluster = dataclasses.replace(
        LUMI,
        title=title,
        shared_cores=cores,
        compute={f.name: f for f in compute},
        qos=(QualityOfService("a b", max_nodes=3, over_partition=True),),
        sources={**LUMI.sources, 'odd "name"': "line\nbreak \\ é"},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.toml")
        write_cluster(cluster, path, "a heading\nof two lines")
        assert path.read_text().startswith("# a heading\n# of two lines\n")
        read = read_cluster(path)
    for field in dataclasses.fields(cluster):
        if field.name not in ("path", "sources"):
            assert getattr(read, field.name) == getattr(cluster, field.name)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/machine.toml"):
        write_cluster(LUMI, tmp_path / "file" / "machine.toml")
