"""Optimizer state in host memory, against closed forms and the engine's own buckets."""

import dataclasses

import pytest

from megatron.config.command_line import command_line_of
from megatron.errors import ConfigError
from megatron.planner.cluster import load_cluster
from megatron.planner.layout import candidate_of, parse_layout
from megatron.planner.memory import memory_of_ranks, parameters_of_rank
from megatron.planner.search.find import GIB, search
from megatron.planner.timing import estimate
from tests.planner.layouts import layout_search
from tests.planner.timing.configs import run

FRONTIER = load_cluster("frontier")
BARE = dataclasses.replace(FRONTIER, host_memory_gb_per_s=None, host_link_gb_per_s=None)


ON_EIGHT = "--world-size 8 --global-batch-size 16"


def on_host(*flags):
    return run("--cpu-offload", ON_EIGHT, *flags)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "n_bytes"),
    [
        ("", 12),
        ("--zero-stage 3", 12),
        ("--no-bf16", 8),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 8),
        ("--ema-decay 0.9 --optimizer sgd", 12),
    ],
)
def test_a_device_has_two_sets_and_a_cpu_the_state_as_well(fields, n_bytes):
    """Each weight is a bucket of its own, and the embedding has the most elements."""
    more = f"--zero-reduce-bucket-size 1 --make-vocab-size-divisible-by 1 {fields}"
    config = on_host(more)
    elsewhere = run(ON_EIGHT, more)
    (gpu,), (cpu,) = memory_of_ranks(config), memory_of_ranks(config, "cpu")
    assert gpu.master + gpu.moments == 2 * n_bytes * 3000 * 256 / 8
    (all_on_cpu,) = memory_of_ranks(elsewhere, "cpu")
    assert all_on_cpu.master + all_on_cpu.moments == n_bytes * parameters_of_rank(config, 0) / 8
    assert (
        cpu.master + cpu.moments
        == all_on_cpu.master + all_on_cpu.moments + gpu.master + gpu.moments
    )
    assert dataclasses.replace(gpu, master=0, moments=0) == dataclasses.replace(
        memory_of_ranks(elsewhere)[0], master=0, moments=0
    )


# -- time ------------------------------------------------------------------------------------------


def test_the_slowest_of_update_link_and_host_memory_counts():
    """A GCD's state of 12 bytes an element moves over 36 GB/s, and in both directions over 205 / 8."""
    config = on_host()
    n = 12 * parameters_of_rank(config, 0) / 8

    def optimizer_s(**facts):
        cluster = dataclasses.replace(FRONTIER, **facts)
        return estimate(config, cluster).breakdown["optimizer"]

    assert optimizer_s() == pytest.approx(2 * n * 8 / 205e9)
    assert optimizer_s(host_memory_gb_per_s=1e6) == pytest.approx(n / 36e9)
    without = estimate(run(ON_EIGHT), FRONTIER)
    assert optimizer_s(host_memory_gb_per_s=1e6, host_link_gb_per_s=1e6) == pytest.approx(
        without.breakdown["optimizer"]
    )
    sources = {used.figure: used.basis for used in estimate(config, FRONTIER).confidence.used}
    assert sources["host.memory_gb_per_s"] == "published"


def test_on_a_cpu_the_state_is_copied_in_and_out():
    """Each of 12 bytes of an element is read and written twice, at the rate of the update."""
    cpu = dataclasses.replace(BARE, device_type="cpu")
    streamed, plain = (
        estimate(config, cpu).breakdown["optimizer"] for config in (on_host(), run(ON_EIGHT))
    )
    owned = parameters_of_rank(on_host(), 0, "cpu") / 8
    assert streamed - plain == pytest.approx(48 * owned / 1000e9)


def test_a_machine_without_the_facts_is_refused():
    with pytest.raises(ConfigError, match="--cpu-offload.*frontier.*memory_gb_per_s, link_gb"):
        estimate(on_host(), BARE)
    estimate(run(), BARE)


# -- search ----------------------------------------------------------------------------------------


def search_for(host_gib=512.0, **choices):
    cluster = dataclasses.replace(FRONTIER, host_memory_gib=host_gib)
    fixed = dict(tp=(1,), pp=(1,), zero=(1,), mbs=(1,), recompute=("none",))
    return layout_search(cluster, **fixed, **choices)


def test_the_search_offloads_where_it_is_asked_to():
    assert {one.layout.offload for one in search(search_for()).estimated} == {False}
    both = search(search_for(offload=(False, True))).estimated
    assert [one.layout.offload for one in both] == [False, True]
    assert both[1].memory < both[0].memory
    layout = both[1].layout
    assert "offload=on" in layout.write(8) and "offload" not in both[0].layout.write(8)
    assert parse_layout(layout.write(8), "--layout")["offload"] == (True,)
    config = search_for().space.config(layout)
    assert "--cpu-offload" in command_line_of(config)
    assert candidate_of(config).offload


def test_the_state_has_to_fit_on_the_host():
    """The state of a node's 8 devices has 12 bytes a parameter; a share stays free, as on a device."""
    plain = search_for()
    config = plain.space.config(search(plain).estimated[0].layout)
    needed = 12 * parameters_of_rank(config, 0) / GIB
    for host_gib, fits in ((1.01 * needed / 0.9, True), (0.99 * needed / 0.9, False)):
        result = search(search_for(host_gib, offload=(True,)))
        assert bool(result.estimated) == fits
        reasons = [reason for reason in result.rejections.counts if "on the host" in reason]
        assert bool(reasons) != fits
