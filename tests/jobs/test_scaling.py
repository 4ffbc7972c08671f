"""Figures of known runs: validity, efficiencies, and what is a difference beyond the noise."""

import math
import random
import re

import pytest

from megatron.jobs.scaling import (
    compare,
    figures,
    find_runs,
    independent_values,
    median_interval,
    read_run,
    row,
)
from tests.tools.measured import SEQUENCE, paper_flops, records, settings, write

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")


def measure(folder, written, point=None, **judge):
    return figures(read_run(write(folder, written, point)), **judge)


def series_of(folder):
    (series,) = compare([figures(run) for run in find_runs([folder])])
    return series


def test_figures_are_those_of_the_steady_steps(tmp_path):
    config = settings("22b", 1, 8, 2, 1280)
    result = measure(tmp_path / "run", records(config, [900.0, 430.0, 410.0, 420.0]))
    assert result.valid and result.notes == ()
    assert (result.steady, result.step_s, result.batch, result.skipped) == (3, 420.0, 1280, 0)
    assert result.spread == (430.0 - 410.0) / 420.0
    assert result.tokens_per_s == 1280 * SEQUENCE / 420.0
    assert result.tokens_per_s_per_device == 1280 * SEQUENCE / 420.0 / 16
    assert result.memory_bytes == 44 * 2**30
    expected = paper_flops("22b", 1280) / 420.0 / 16 / 1e12
    assert result.hardware_tflops == pytest.approx(expected, rel=1e-12)
    assert result.model_tflops == pytest.approx(0.75 * expected, rel=1e-12)
    assert result.hfu == pytest.approx(expected / 191.5, rel=1e-12)
    config["moe_router_force_load_balancing"] = True
    drawn = measure(tmp_path / "drawn", records(config, [900.0, 430.0, 410.0]))
    assert "--moe-router-force-load-balancing" in drawn.notes[0]


def test_warm_up_and_smaller_batches_do_not_count(tmp_path):
    config = settings("22b", 1, 8, 1, 640, rampup_batch_size=[32, 608, 64])
    written = records(
        config, [90.0, 25.0, 470.0, 430.0, 420.0, 440.0], batches=[32, 32, 640, 640, 640, 640]
    )
    assert measure(tmp_path / "a", written).step_s == 435.0
    assert measure(tmp_path / "b", written, {"name": "x", "warm_up": 3}).step_s == 430.0
    result = measure(tmp_path / "c", written, {"name": "x", "warm_up": 3}, warm_up=4)
    assert (result.step_s, result.steady) == (430.0, 2) and result.valid


def longer_than_the_clock_says(written):
    written[3]["time"] = 1e9 + 845.0


def counted_four_times(written):
    for record in written[1:-1]:
        record["consumed_samples"] *= 4


def four_times_too_fast(written):
    """Every figure agrees with the others except the time, as for a batch counted four times."""
    config = written[0]["config"]
    written[:] = records(config, [0.25 * r["step_time_s"] for r in written[1:-1]])


@pytest.mark.parametrize(
    ("spoil", "figures_"),
    [
        (counted_four_times, (2560, 640)),
        (four_times_too_fast, (115.3,)),
        (longer_than_the_clock_says, (420, 5)),
    ],
)
def test_contradictions_make_a_run_invalid(tmp_path, spoil, figures_):
    config = settings("22b", 1, 8, 1, 640)
    written = records(config, [420.0] * 4)
    assert measure(tmp_path / "good", written).valid
    spoil(written)
    result = measure(tmp_path / "bad", written)
    numbers = {float(number) for number in NUMBER.findall(" / ".join(result.problems))}
    assert not result.valid and numbers >= {*figures_}, result.problems


def test_a_resumed_run_counts_from_its_last_start(tmp_path):
    config = settings("22b", 1, 8, 1, 640)
    first = records(config, [100.0] * 3)[:-1]
    second = records(config, [900.0, 420.0, 422.0], first=2, clock=2e9)
    result = measure(tmp_path / "run", first + second)
    assert result.valid and result.step_s == 421.0


def scaled(tmp_path, kind, worlds):
    """Write runs of 175B to a folder: world size -> (seconds of a step, batch)."""
    for world, (step_s, batch) in worlds.items():
        config = settings("175b", 4, 16, world // 64, batch)
        name = f"gcds-{world:05d}"
        point = dict(name=name, experiment=f"{kind}-175b-paper", kind=kind, warm_up=1)
        write(tmp_path / name, records(config, [2 * step_s, step_s, step_s, step_s]), point)
    return tmp_path


STRONG = {64: (5400.0, 8000), 256: (1420.0, 8000), 1024: (375.0, 8000)}
WEAK = {64: (424.0, 640), 256: (428.0, 2560), 1024: (432.0, 10240)}


@pytest.mark.parametrize("named", [True, False])
def test_strong_and_weak_efficiency(tmp_path, named):
    """Efficiency of points that name their kind, and of points without names.

    The latter are told apart by batches and layouts.
    """
    for kind, worlds in (("strong", STRONG), ("weak", WEAK)):
        folder = scaled(tmp_path / kind, kind, worlds)
        if not named:
            for path in folder.glob("*/point.json"):
                path.unlink()
        series = series_of(folder)
        assert series.kind == kind and series.base is not None and series.base.run.world_size == 64
        for member in series.members:
            world = member.run.world_size
            assert world is not None
            (base_s, _), (step_s, _) = worlds[64], worlds[world]
            expected = base_s * 64 / (step_s * world) if kind == "strong" else base_s / step_s
            assert series.efficiency(member) == pytest.approx([expected] * 3, rel=1e-12)


def test_an_invalid_run_is_no_base(tmp_path):
    folder = scaled(tmp_path, "strong", STRONG)
    smallest = folder / "gcds-00064/metrics.jsonl"
    smallest.write_text(
        smallest.read_text().replace('"consumed_samples": 16000', '"consumed_samples": 4000')
    )
    series = series_of(folder)
    assert [m.valid for m in series.members] == [False, True, True]
    assert series.base is not None and series.base.run.world_size == 256
    assert series.efficiency(series.members[0]) is None
    assert series.efficiency(series.members[2]) == pytest.approx(
        [1420 * 256 / (375 * 1024)] * 3, rel=1e-12
    )


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({2: [46.0, 44.0, 48.0], 4: [45.0, 43.0, 47.0], 8: [60.0, 58.0, 62.0]}, {2, 4}),
        ({2: [46.0, 44.0, 48.0], 4: [40.0, 39.0, 43.0], 8: [60.0, 58.0, 62.0]}, {4}),
        ({2: [46.0, 44.0, 48.0], 4: [40.0]}, {2, 4}),  # one step has no known spread
    ],
)
def test_no_run_is_better_within_the_spread(tmp_path, times, best):
    for value, steps in times.items():
        name = f"mbs-{value}"
        point = dict(name=name, experiment="mbs", kind="sweep", value=value, warm_up=1)
        write(tmp_path / name, records(settings("22b", 1, 8, 1, 64), [90.0, *steps]), point)
    series = series_of(tmp_path)
    assert {member.run.point["value"] for member in series.best()} == best


def test_an_efficiency_has_the_ends_of_the_spread(tmp_path):
    """The bounds of an efficiency pair the slowest step of one with the fastest of the other."""
    one = [[424.0], [424.0]], (0.0, 1.0, math.inf), [0.0, None]  # bounds nothing from above
    ends = 420 / 430, 424 / 426, 428 / 421
    many = [[424.0, 420.0, 428.0], [426.0, 421.0, 430.0]], ends, [ends[0], ends[2]]
    for name, (steps, efficiency, interval) in {"one": one, "many": many}.items():
        for replicas, times in enumerate(steps, 1):
            config = settings("175b", 4, 16, replicas, 640 * replicas)
            write(tmp_path / name / str(replicas), records(config, [900.0, *times]))
        series = series_of(tmp_path / name)
        assert series.efficiency(series.members[1]) == pytest.approx(efficiency)
        assert row(series, series.members[1])["efficiency_interval"] == pytest.approx(interval)


@pytest.mark.parametrize("above", [".", "attempt-3/runs"])
def test_what_a_run_moved_aside_is_no_run(tmp_path, above):
    """Records that a run moved aside are no run. A user's folder of such a name is one."""
    folder = tmp_path / above
    first = write(folder / "p1", records(settings("22b", 8, 1, 1, 8), [1.0] * 3), {"name": "p1"})
    write(first / "attempt-1", records(settings("22b", 8, 1, 1, 8), [2.0] * 3), {"name": "p1"})
    write(folder / "attempt-1", records(settings("22b", 8, 1, 1, 8), [3.0] * 3))
    assert {run.path.parent for run in find_runs([tmp_path])} == {first, folder / "attempt-1"}


@pytest.mark.parametrize("n", [2, 5, 8, 9, 20, 51, 200])
def test_the_interval_of_a_median_covers_it(n):
    """The chance that k or fewer of n values are below the true median is a binomial sum."""
    values = [i // 2 if i % 2 else n - 1 - i // 2 for i in range(n)]  # neighbours are far apart
    assert sorted(values) == list(range(n))
    k, high = median_interval(values)
    assert high == n - 1 - k
    outside = 2 * sum(math.comb(n, i) for i in range(int(k) + 1)) / 2**n
    assert k == 0 or outside == pytest.approx(0.05, abs=0.03)


def test_values_that_follow_each_other_count_less():
    """An autoregressive series of order 1 with r = 0.8 has a ninth of its values in effect."""
    source = random.Random(1)
    values = [0.0]
    for _ in range(20_000):
        values.append(0.8 * values[-1] + source.gauss(0, 1))
    assert independent_values(values) == pytest.approx(20_001 / 9, rel=0.1)
    assert independent_values([source.gauss(0, 1) for _ in range(20_000)]) > 19_000
    assert independent_values([1.0] * 30) == 30


@pytest.mark.parametrize(("faster", "significant"), [(1.0005, False), (1.05, True)])
def test_only_a_difference_beyond_the_noise_is_one(tmp_path, faster, significant):
    """Steps scatter by 1 %; the runs differ in their layout, and are compared in one table."""
    source = random.Random(2)
    for name, tensor, step_s in (("a", 1, 420.0), ("b", 2, 420.0 / faster)):
        steps = [step_s * (1 + 0.01 * source.gauss(0, 1)) for _ in range(40)]
        write(tmp_path / name, records(settings("22b", tensor, 8 // tensor, 1, 640), [900, *steps]))
    series = series_of(tmp_path)
    first, second = (row(series, member) for member in series.members)
    assert first["verdict"] is None and first["efficiency"] == 1
    assert ("no difference" not in second["verdict"]) is significant
    low, high = second["efficiency_interval"]
    assert low < faster < high and (low > 1) is significant
