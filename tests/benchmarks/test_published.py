"""Published results: their implications, and their absence from the machines' figures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_tables as table
from benchmarks.published_runs import MI250X_RUNS, RUNS, XMOE_RUNS
from megatron.config.command_line import parse_plan
from megatron.pipeline.orders import Op
from megatron.pipeline.schedule import build_schedule
from megatron.planner.cluster import CLUSTERS, load_cluster
from megatron.planner.compute import ASSUMED, Figure
from megatron.planner.error_bars import LINKS, spread
from megatron.planner.published import MODELS
from megatron.planner.trace import cached_sizes
from tests.helpers.replay import simulate

ROOT = Path(__file__).resolve().parents[2]


# -- arithmetic ------------------------------------------------------------------------------------


def test_flags_are_the_published_layouts():
    for model in MODELS:
        config = parse_plan(table.argv_of(model, model.replica_gcds, model.per_replica))
        sizes = (
            config.parallel.tensor_model_parallel_size,
            config.parallel.pipeline_model_parallel_size,
        )
        assert sizes == (model.tensor_size, model.pipeline_size)
        assert (config.model.num_layers, config.model.hidden_size) == (
            model.num_layers,
            model.hidden_size,
        )
        assert config.model.padded_vocab_size(model.tensor_size) == 51200
        assert config.precision.dtype_name == "float16"
        assert config.num_micro_batches() == model.per_replica


def test_efficiency_by_the_bubble_is_that_of_the_schedule():
    """Efficiency by the bubble equals that of the executor's own order on a clock.

    Stages take one unit forward and three backward.
    """

    def turns(micro_batches):
        schedule = build_schedule("1f1b", 16, 1, micro_batches)
        return simulate(schedule, {Op.FORWARD: 1.0, Op.BACKWARD: 3.0}).makespan / 4

    sequences = 800
    replicas = 16
    micro_batch = 2
    base = sequences // micro_batch
    shared = sequences // micro_batch // replicas
    expected = turns(base) / (replicas * turns(shared))
    assert table.efficiency_by_bubble(16, sequences, replicas, micro_batch) == pytest.approx(
        expected
    )


def test_what_the_throughput_of_22b_asks_of_its_last_stage():
    """Count the work of the last stage from its pieces.

    They are six layers, forward, again and twice that backward, and the output layer.
    """
    model = MODELS[0]
    config = parse_plan(table.argv_of(model, 8, 640))
    h = config.model.hidden_size
    layer = 2048 * (2 * 12 * h * h + 4 * 2048 * h)
    head = 2 * 51200 * h
    last_stage = 6 * 4 * layer + 3 * 2048 * head
    every = 48 * 4 * layer + 3 * 2048 * head
    implied = table.implied(model, {})
    assert implied.step_s == pytest.approx(640 * every / (8 * 73.5e12))
    assert implied.turn_s == pytest.approx(implied.step_s / 647)
    assert implied.reduces_s == 0.0
    assert implied.overlapped_tflops == pytest.approx(last_stage / implied.turn_s / 1e12)
    assert implied.other == pytest.approx(6 * 4 * layer)


# -- nothing is fitted -----------------------------------------------------------------------------


def test_no_machine_is_described_by_the_results_it_is_compared_with():
    """No source and no number in the machine files is a published result."""
    papers = re.compile(
        r"2312\.12705|Dash et al|2407\.21783|dgxc|nemotron|spyysalo|lumi-reframe|2508\.13337|x-moe",
        re.IGNORECASE,
    )
    results = {model.tflops for model in MODELS} | {model.percent for model in MODELS}
    results |= {run.seconds for run in (*RUNS, *MI250X_RUNS)}
    results |= {tflops for _, tflops in XMOE_RUNS}
    for path in CLUSTERS.glob("*.toml"):
        text = path.read_text()
        assert not papers.search(text), f"{path.name} cites a result that it is compared with"
        numbers = {float(number) for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text)}
        assert not numbers & results, path.name


# -- error bars ------------------------------------------------------------------------------------


@pytest.fixture
def machine():
    figures = (
        Figure("kernel_s", ((2.0,),), ASSUMED, "test", 0.5, 2.0),
        Figure("memory_gb_per_s", ((1.0, 10.0),), ASSUMED, "test", 0.8, 1.25),
        Figure("update_gb_per_s", ((7.0,),), "measured", "test"),
        Figure("products.float16", ((64.0, 64.0, 64.0, 5.0),), ASSUMED, "test", 0.9, 1.1),
    )
    return replace(load_cluster("frontier"), compute={figure.name: figure for figure in figures})


def test_bounds_are_those_of_figures_at_their_ends(machine):
    """Bounds of a value whose every dependence is written down here.

    They are 2 s and 100 / 10 s, and 50 GB over two links.
    """

    def seconds(cluster):
        figures = cluster.compute
        return (
            figures["kernel_s"].value
            + 100 / figures["memory_gb_per_s"].value
            + 50 / cluster.nic_gb_per_s
        )

    bounds = spread(seconds, machine, "float16")
    assert bounds.value == pytest.approx(2 + 10 + 2)
    by_name = {effect.figure: effect for effect in bounds.effects}
    assert (by_name["kernel_s"].slow, by_name["kernel_s"].fast) == pytest.approx((16.0, 13.0))
    assert (by_name["memory_gb_per_s"].slow, by_name["memory_gb_per_s"].fast) == pytest.approx(
        (16.5, 12.0)
    )
    assert (by_name[LINKS].slow, by_name[LINKS].fast) == pytest.approx((14.5, 13.6))
    assert (bounds.low, bounds.high) == pytest.approx((1 + 8 + 1.6, 4 + 12.5 + 2.5))
    assert bounds.likely == pytest.approx((1.5**2 + 2.25**2 + 0.45**2) ** 0.5)
    assert [effect.figure for effect in bounds.effects[:2]] == ["memory_gb_per_s", "kernel_s"]


# -- tables ----------------------------------------------------------------------------------------


def test_runs_are_laid_out_as_published():
    """Replicas, micro-batches and parameters are as the sources state or imply."""
    stated = {
        ("GPT-3 175B", 128): (4, 64, 175),
        ("GPT-3 175B", 1024): (32, 64, 175),
        ("GPT-3 175B", 2048): (64, 64, 175),
        ("Nemotron-4 15B", 16): (4, 4, 15.6),
        ("Nemotron-4 340B", 128): (2, 16, 341),
        ("Llama 3 405B", 8192): (64, 32, 405),
        ("Llama 3 405B", 16384): (128, 16, 405),
        ("Llama 2 7B, 2025, ROCm 6.2", 16): (8, 16, 6.74),
        ("175B, 2023, ROCm 5.2", 128): (2, 256, 175),
        ("175B, 2023, ROCm 5.2", 2048): (32, 16, 175),
        ("6.7B, GPT-NeoX, 2023, ROCm 5.2", 8): (8, 4, 6.85),
        ("33B, 2023, ROCm 5.5", 64): (8, 64, 32.3),
        # of 2^30 parameters
        ("X-MoE Small, 10.1B", 256): (256, 8, 10.1 * 2**30 / 1e9),
        ("X-MoE Medium, 55.2B", 256): (256, 4, 55.2 * 2**30 / 1e9),
        ("X-MoE Large, 201.4B", 256): (128, 8, 201.4 * 2**30 / 1e9),
        ("X-MoE Super, 545.4B", 1024): (512, 2, 545.4 * 2**30 / 1e9),
    }
    for run in (*RUNS, *MI250X_RUNS, *(run for run, _ in XMOE_RUNS)):
        config = parse_plan(run.argv())
        if (run.name, run.devices) not in stated:
            continue
        replicas, micro_batches, billions = stated[run.name, run.devices]
        assert config.parallel.data_parallel_size == replicas
        assert config.num_micro_batches() == micro_batches
        assert cached_sizes(config).parameters() / 1e9 == pytest.approx(billions, rel=0.01)


# -- the page --------------------------------------------------------------------------------------


def rows_of(page, name):
    """Return the cells of the table behind a mark, without its head."""
    lines = page.split(f"<!-- published: {name} -->\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize(
    ("machine_name", "mark", "comparisons"),
    [
        ("frontier", "frontier", table.frontier_comparisons()),
        ("frontier", "x-moe", table.xmoe_comparisons()),
        ("lumi", "mi250x", table.mi250x_comparisons()),
        ("dgx-h100", "dgx-h100", table.h100_comparisons()),
    ],
    ids=["frontier", "x-moe", "mi250x", "dgx-h100"],
)
def test_the_page_has_these_predictions(machine_name, mark, comparisons):
    """docs/measured/published.md matches the present time model.

    Update it by `python benchmarks/published.py --update docs/measured/published.md`.
    """
    cluster = load_cluster(machine_name)
    written = rows_of((ROOT / "docs/measured/published.md").read_text(), mark)
    assert [row[:2] for row in written] == [[each.result, each.layout] for each in comparisons]
    for row, each in zip(written, comparisons, strict=True):
        value = each.value([table.estimated_seconds(argv, cluster) for argv in each.runs])
        digits = ".2f" if each.unit == "s" else ".1f"
        assert row[2:4] == [
            f"{each.published:{digits}} {each.unit}",
            f"{value:{digits}} {each.unit}",
        ], each.result
        low, high = (float(end) for end in row[4].split(" to "))
        assert low <= float(row[3].split()[0]) <= high


def test_the_page_has_the_times_of_both_ways_to_experts():
    text = (ROOT / "docs/measured/published.md").read_text()
    made = table.dispatch_table(load_cluster("frontier"))
    assert rows_of(text, "x-moe-dispatch") == [list(row) for row in made.rows]


def test_the_margins_that_are_told_are_those_of_the_table():
    """README and guides state the range of factors of MI250X predictions, by the runs' year."""

    def factor_range(*rows):
        factors = [row[-1] for row in rows]
        return f"{min(factors)} to {max(factors)}"

    text = (ROOT / "docs/measured/published.md").read_text()
    measured_rows = rows_of(text, "mi250x")
    authors = rows_of(text, "frontier")[: len(MODELS)]
    new = factor_range(*(row for row in measured_rows if "2025" in row[0]))
    old = factor_range(*(row for row in measured_rows if "2023" in row[0]), *authors)
    for name in ("README.md", "docs/planning.md", "docs/measured/published.md"):
        page = " ".join((ROOT / name).read_text().split())
        assert f"{new} times" in page and f"{old} times" in page, name


def test_the_page_has_these_tables():
    page = (ROOT / "docs/measured/published.md").read_text()
    cluster = load_cluster("frontier")
    for name, made in (
        ("asked", table.implied_table(cluster)),
        ("changes", table.change_table(cluster)),
        ("micro-batch", table.micro_batch_table()),
        ("findings", table.finding_table(cluster)),
    ):
        assert rows_of(page, name) == [list(row) for row in made.rows], name
