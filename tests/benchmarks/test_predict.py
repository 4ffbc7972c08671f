"""benchmarks/predict.py: its layouts are valid and unseen, and its figures are correct."""

import pytest

from benchmarks.predict import LayoutPrediction, spearman, summary, table
from benchmarks.predict_layouts import CALIBRATED, LAYOUTS, MODELS
from megatron.config.command_line import parse_plan

pytestmark = pytest.mark.campaign("benchmarks")


def test_layouts_are_valid_many_and_not_what_is_calibrated():
    shapes = {
        tuple(parse_plan(MODELS[m].split()).get(n) for n in ("hidden_size", "seq_length"))
        for m in MODELS
    }
    seen = parse_plan(CALIBRATED.split())
    assert len(LAYOUTS) >= 20 and len({layout.slug for layout in LAYOUTS}) == len(LAYOUTS)
    assert (seen.get("hidden_size"), seen.get("seq_length")) not in shapes
    configs = [
        parse_plan([*layout.arguments, "--world-size", str(layout.processes)]) for layout in LAYOUTS
    ]
    assert {c.parallel.schedule for c in configs} == {"1f1b", "interleaved", "zb-h1", "v-half"}
    assert {c.parallel.tensor_model_parallel_size for c in configs} == {1, 2, 4}
    assert {c.parallel.data_parallel_size for c in configs} >= {1, 2}


def test_ranking_and_errors():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [30, 20, 10]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    rows = [
        LayoutPrediction(LAYOUTS[i], predicted, 1.0, 1.1, {}, [])
        for i, predicted in enumerate((1.1, 0.7, 1.2))
    ]
    assert all(figure in summary(rows) for figure in ("20.0 %", "-30.0 %", "23.0 %", "+32.0 %"))
    assert table(rows)[1][3:] == ["1100", "1000", "+10.0 %", "1.10", "+21.0 %"]
