"""The simulated checkpoint of benchmarks/scale.py is whole; a rank reads its own stage's part."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from benchmarks import scale
from megatron.checkpoint import shards
from megatron.checkpoint.files import read_manifest, write_manifest

pytestmark = pytest.mark.campaign("benchmarks")


def of_stage(stage: int, data: int) -> list[dict[str, shards.Stored]]:
    """Merge what each data-parallel group of a stage wrote, one entry for each tensor rank."""
    return [
        shards.merged(scale.written(tensor, stage, d, data) for d in range(data))
        for tensor in range(scale.TENSOR)
    ]


@pytest.mark.parametrize(("stage", "data"), [(0, 1), (31, 6), (63, 147)])
def test_as_much_is_written_as_there_is(stage: int, data: int) -> None:
    groups = of_stage(stage, data)
    shards.check_complete([shards.totals(group) for group in groups])
    for group in groups:
        places = sorted(
            (box[2], box[3], box[3] + box[4])
            for stored in group.values()
            for box in stored["boxes"]
        )
        assert all(a[0] != b[0] or a[2] == b[1] for a, b in itertools.pairwise(places)), (
            "one after another"
        )


def test_the_model_has_a_trillion_parameters() -> None:
    local = sum(
        math.prod(p[1]) for stage in range(scale.PIPELINE) for p in scale.stage_parameters(0, stage)
    )
    # 12 h^2 per layer and h per word, the rest below a thousandth (Narayanan et al., arXiv
    # 2104.04473, section 5.1)
    expected = 12 * scale.LAYERS * scale.HIDDEN**2 + scale.VOCABULARY * scale.HIDDEN
    assert expected == pytest.approx(local, rel=1e-3) and local > 1e12


def test_a_rank_reads_the_pieces_of_its_stage_only(tmp_path: Path) -> None:
    data, stages = 3, (30, 31)
    totals, written = [], []
    for position, stage in enumerate(stages):
        for tensor, group in enumerate(of_stage(stage, data)):
            written.append(shards.write_piece(tmp_path, position * scale.TENSOR + tensor, group))
            totals.append(shards.totals(group))
    written.append(shards.write_index(tmp_path, totals))
    write_manifest(tmp_path, [name for name, _ in written])
    for number in range(scale.TENSOR):  # stage 30
        (tmp_path / f"boxes_{number:05d}.json").write_text("not to be read")
    names = [f"exp_avg.{p[0]}" for p in scale.stage_parameters(5, 31)]
    found = shards.read_stored(read_manifest(tmp_path), names)
    assert names and found.keys() == set(names)
    shards.check_complete([shards.totals(found)])
    listed = json.loads((tmp_path / "boxes.json").read_text())["pieces"]
    # Row-parallel biases and norms are written by the first tensor rank alone.
    assert {len(listed[name]) for name in names} == {1, scale.TENSOR}
