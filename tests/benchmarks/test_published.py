"""Published results: their implications, and their absence from the machines' figures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published_dash as dash
from benchmarks import published_tables as table
from benchmarks.published_runs import RUNS, SHARED_CLOUDS, PublishedRun
from megatron.config.command_line import parse_plan
from megatron.pipeline.orders import Op
from megatron.pipeline.schedule import build_schedule
from megatron.planner.cluster import CLUSTERS, load_cluster
from megatron.planner.compute import ASSUMED, Figure
from megatron.planner.error_bars import LINKS, spread
from megatron.planner.evidence import CURRENT, Errors, evidence, evidence_words
from megatron.planner.published import MODELS
from megatron.planner.trace import cached_sizes
from tests.helpers.replay import simulate

ROOT = Path(__file__).resolve().parents[2]


# -- arithmetic ------------------------------------------------------------------------------------


def test_flags_are_the_published_layouts():
    for model in MODELS:
        config = parse_plan(dash.argv_of(model, model.replica_gcds, model.per_replica))
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
    assert dash.efficiency_by_bubble(16, sequences, replicas, micro_batch) == pytest.approx(
        expected
    )


def test_what_the_throughput_of_22b_asks_of_its_last_stage():
    """Count the work of the last stage from its pieces.

    They are six layers, forward, again and twice that backward, and the output layer.
    """
    model = MODELS[0]
    config = parse_plan(dash.argv_of(model, 8, 640))
    h = config.model.hidden_size
    layer = 2048 * (2 * 12 * h * h + 4 * 2048 * h)
    head = 2 * 51200 * h
    last_stage = 6 * 4 * layer + 3 * 2048 * head
    every = 48 * 4 * layer + 3 * 2048 * head
    implied = dash.implied(model, {})
    assert implied.step_s == pytest.approx(640 * every / (8 * 73.5e12))
    assert implied.turn_s == pytest.approx(implied.step_s / 647)
    assert implied.reduces_s == 0.0
    assert implied.overlapped_tflops == pytest.approx(last_stage / implied.turn_s / 1e12)
    assert implied.other == pytest.approx(6 * 4 * layer)


# -- nothing is fitted -----------------------------------------------------------------------------


def test_no_machine_is_described_by_the_results_it_is_compared_with():
    """No source and no number in the machine files is a published result."""
    of_runs = re.compile(r"(?:arXiv|github\.com/)\s?([\w./-]+)")
    sources = {found for run in RUNS for found in of_runs.findall(run.source)} | {"2312.12705"}
    allowed = {  # repositories and papers that have both runs and measurements of kernels
        "Dao-AILab/flash-attention",
        "ROCm/rocm-blogs",
        "AMD-AGI/Primus",
        "eth-cscs/cscs-reframe-tests",
        "hisohara/ai-scripts",
        "2407.21783",
    }
    values = {model.tflops for model in MODELS} | {model.percent for model in MODELS}
    values |= {run.value for run in RUNS if run.value % 1}
    for path in [*CLUSTERS.glob("*.toml"), *CLUSTERS.with_name("devices").glob("*.toml")]:
        text = path.read_text()
        cited = set(of_runs.findall(text)) & sources - allowed
        assert not cited, f"{path.name} cites a result that it is compared with"
        figures = text.partition("[sources]")[0]
        numbers = {
            float(number) for number in re.findall(r"(?<![\w.])\d+\.\d\d+(?![\w.])", figures)
        }
        assert not numbers & values, path.name


def test_two_of_three_new_runs_are_set_aside_by_their_names():
    for collection in (1, 2):
        new = [run for run in RUNS if run.collection == collection and not run.known]
        share = sum(run.drawn for run in new) / len(new)
        assert 0.6 < share < 0.73
        assert len({run.origin for run in new if run.drawn}) >= 12
    assert not any(run.drawn for run in RUNS if run.known)
    assert len({run.name for run in RUNS}) == len(RUNS)


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
        "GPT-3 175B, 1,024 devices": (32, 64, 175),
        "Nemotron-4 340B, 128 devices": (2, 16, 341),
        "Llama 3 405B, 16,384 devices": (128, 16, 405),
        "Llama 2 7B, 2025, ROCm 6.2, 16 devices": (8, 16, 6.74),
        "6.7B, GPT-NeoX, 2023, ROCm 5.2, 8 devices": (8, 4, 6.85),
        # of 2^30 parameters
        "X-MoE Medium, 55.2B, 256 devices": (256, 4, 55.2 * 2**30 / 1e9),
    }
    by_name = {run.name: run for run in RUNS}
    for name, (replicas, micro_batches, billions) in stated.items():
        config = by_name[name].config
        assert config.parallel.data_parallel_size == replicas
        assert config.num_micro_batches() == micro_batches
        assert cached_sizes(config).parameters() / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_published_speed_becomes_seconds():
    """A step of 8 samples of 2,048 tokens on 4 devices, in every unit."""
    flags = (
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 1024 --micro-batch-size 2 "
        "--global-batch-size 8 --bf16"
    )
    run = PublishedRun(
        "a", "dgx-h100", 4, flags, 2.0, "s", "te", "flash2", "a code", "somewhere", "none known"
    )
    tokens = 8 * 2048
    parameters = 2 * 12 * 256**2 + 1024 * 256
    scores = 12 * 2 * 256 * 2048
    flops = tokens * (6 * parameters + scores)
    known = {"flops": "palm", "parameters": parameters, "peak_tflops": 100.0}
    for unit, value in (
        ("s", 2.0),
        ("samples/s", 4.0),
        ("samples/s/device", 1.0),
        ("tokens/s", tokens / 2),
        ("tokens/s/device", tokens / 8),
        ("TFLOP/s/device", flops / 8 / 1e12),
        ("MFU %", 100 * flops / 8 / 100e12),
    ):
        one = replace(run, unit=unit, value=value, **known)
        assert one.seconds == pytest.approx(2.0), unit


def test_pairs_in_the_wrong_order_are_counted():
    """Three runs of a model; one pair differs by less than noise, one is predicted wrongly."""
    runs = [run for run in RUNS if run.name.startswith("GPT-3 175B")]
    assert len(runs) == 3
    times = [1.0, 1.01, 1.2]
    of_device = [run.devices / run.config.batch.global_batch_size for run in runs]
    published = [
        replace(run, value=t / d) for run, t, d in zip(runs, times, of_device, strict=True)
    ]
    predicted = [
        table.PredictedRun(run, t / d)
        for run, t, d in zip(published, (1.0, 1.3, 1.1), of_device, strict=True)
    ]
    result = table.orders(predicted, 0.027)
    assert result.pairs == 2
    assert [wrong[:2] for wrong in result.wrong] == [(runs[1].name, runs[2].name)]


# -- the page --------------------------------------------------------------------------------------


def rows_of(page, name):
    """Return the cells of the table behind a mark, without its head."""
    lines = page.split(f"<!-- published: {name} -->\n\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SAMPLE = 12


def test_the_page_has_these_predictions():
    """docs/measured/published.md matches the present time model, in a sample of its runs.

    Update it by `python benchmarks/published.py --update docs/measured/published.md`.
    """
    page = (ROOT / "docs/measured/published.md").read_text()
    written = {row[1]: row for run in RUNS for row in rows_of(page, run.machine)}
    assert {run.name for run in RUNS} <= set(written)
    for one in table.predicted_runs(sorted(RUNS, key=lambda run: run.name)[:: len(RUNS) // SAMPLE]):
        expected = [f"{one.run.seconds:.4g} s", f"{one.seconds:.4g} s"]
        assert written[one.run.name][3:5] == expected, one.run.name


def test_the_evidence_is_that_of_the_page():
    """The errors that plan.py names are those of the page's regular rows since 2024.

    Those of shared clouds count for these machines only.
    """
    page = (ROOT / "docs/measured/published.md").read_text()
    current = {run.name for run in RUNS if run.date >= CURRENT and run.machine not in SHARED_CLOUDS}
    ratios = [
        float(row[4].split()[0]) / float(row[3].split()[0])
        for machine in {run.machine for run in RUNS}
        for row in rows_of(page, machine)
        if row[1] in current and "irregular" not in row[5]
    ]
    stated = evidence()["all", "all"]
    assert stated.runs == len(ratios)
    assert stated.median == pytest.approx(Errors.of(ratios).median, abs=2e-3)
    assert stated.ninth == pytest.approx(Errors.of(ratios).ninth, abs=2e-3)


def test_a_machine_without_runs_is_told_so():
    config = parse_plan("--preset llama-8b --world-size 16".split())
    known, unknown = (evidence_words(load_cluster(name), config) for name in ("lumi", "mi300a"))
    everywhere = f"{evidence()['all', 'all'].runs} runs"
    assert everywhere in unknown and everywhere not in known


def test_the_page_has_the_times_of_both_ways_to_experts():
    text = (ROOT / "docs/measured/published.md").read_text()
    made = table.dispatch_table(load_cluster("frontier"))
    assert rows_of(text, "x-moe-dispatch") == [list(row) for row in made.rows]


def test_the_margins_that_are_told_are_those_of_the_table():
    """README and guides state the errors of the runs that were set aside."""
    text = (ROOT / "docs/measured/published.md").read_text()
    every = rows_of(text, "set-aside-machines")[-1]
    for name in ("README.md", "docs/planning.md"):
        page = " ".join((ROOT / name).read_text().split())
        assert all(cell in page for cell in every[1:4]), name


def test_the_page_has_these_tables():
    page = (ROOT / "docs/measured/published.md").read_text()
    cluster = load_cluster("frontier")
    for name, made in (
        ("asked", dash.implied_table(cluster)),
        ("changes", dash.change_table(cluster)),
        ("micro-batch", dash.micro_batch_table()),
        ("findings", dash.finding_table(cluster)),
    ):
        assert rows_of(page, name) == [list(row) for row in made.rows], name
