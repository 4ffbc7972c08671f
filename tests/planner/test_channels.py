"""Seconds of messages and collectives: against the cost of a step, by hand, and every replica one by one."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.parallel import RANK_ORDERS
from megatron.parallel.topology import Layout
from megatron.planner.channels import Channels
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.compute import ASSUMED, MEASURED, PUBLISHED, Figure
from megatron.planner.cost import CostModel
from megatron.planner.placement import choose_placement, naive_placement, place_with
from megatron.planner.traffic import traffic_of
from tests.planner.layouts import made

FRONTIER = load_cluster("frontier")
DGX = load_cluster("dgx-h100")
LATENCIES = ("collective_start_s", "hop_within_s", "hop_between_s", "message_within_s", "message_between_s")


def without_latency(cluster: Cluster) -> Cluster:
    return replace(cluster, compute=cluster.compute.varied(dict.fromkeys(LATENCIES, 0.0)))


INSTANT = without_latency(FRONTIER)


# -- against the cost of a step's messages ----------------------------------------------------------------------------

LAYOUTS = [
    (4, 2, 1, 1), (8, 4, 4, 1), (4, 16, 16, 1), (4, 16, 16, 3), (2, 8, 4, 1), (1, 8, 8, 1), (1, 16, 1, 3), (8, 1, 4, 1),
]  # fmt: skip


@pytest.mark.parametrize(("tensor", "pipeline", "data", "chunks"), LAYOUTS)
def test_collectives_cost_what_a_step_is_said_to_cost(tensor: int, pipeline: int, data: int, chunks: int) -> None:
    """Without latency: seconds for each byte that a rank sends are those of the placement's cost."""
    config = made(tensor, pipeline, data, chunks)
    placement = choose_placement(config, INSTANT)
    channels, traffic = Channels(config, INSTANT, placement), traffic_of(config, "cuda")
    of_tensor = [(flow.bytes, "all_gather") for flow in traffic.tensor]
    of_data = [(flow.bytes, kind) for flow, kind in zip(traffic.data, ("reduce_scatter", "all_gather"), strict=False)]
    for direction, flows, size, ask in (
        ("tp", of_tensor, tensor, channels.tensor_s), ("dp", of_data, data, channels.data_s)
    ):  # fmt: skip
        whole = [(sent * size / (size - 1), kind) for sent, kind in flows]
        seconds = sum(ask(kind, n_bytes) for n_bytes, kind in whole)
        assert seconds == pytest.approx(placement.cost.seconds_of(direction))
        for n_bytes, kind in whole:
            assert ask("all_reduce", n_bytes) == pytest.approx(2 * ask(kind, n_bytes))
    if traffic.tied is not None:
        (tied,) = [part for part in placement.cost.of("pp") if part.name == traffic.tied.name]
        assert channels.tied_s(traffic.tied.bytes) == pytest.approx(tied.seconds)


# -- every replica one by one -----------------------------------------------------------------------------------------


@given(
    sizes=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 2, 3, 4, 8])),
    order=st.sampled_from(RANK_ORDERS), chunks=st.sampled_from([1, 2]), devices=st.sampled_from(FRONTIER.device_orders),
)  # fmt: skip
def test_a_boundary_is_that_of_its_slowest_replica(
    sizes: tuple[int, int, int], order: str, chunks: int, devices: tuple[int, ...]
) -> None:
    tensor, pipeline, data = sizes
    world = tensor * pipeline * data
    if world % 8 and world > 8:
        return
    config = made(tensor, pipeline, data, chunks, sequence_parallel=False)
    layout, used = Layout(tensor, pipeline, data, order), devices if world >= 8 else FRONTIER.local_order[:world]
    placement = place_with(config, FRONTIER, order, used)
    channels = Channels(config, FRONTIER, placement)
    model = CostModel(FRONTIER, layout, replace(traffic_of(config, "cuda"), message_bytes=1 << 20), len(used))
    seconds = model.message_seconds(used)
    for forward in (True, False):
        for stage in range(pipeline - (chunks == 1)):
            worst = 0.0
            for t in range(tensor):
                for d in range(data):
                    a = layout.rank(tensor=t, data=d, pipeline=stage)
                    b = layout.rank(tensor=t, data=d, pipeline=(stage + 1) % pipeline)
                    near = a // len(used) == b // len(used)
                    latency = 10e-6 if near else 25e-6
                    worst = max(worst, latency + seconds[(a % len(used), b % len(used)) if near else None])
            sender = stage if forward else (stage + 1) % pipeline
            assert sum(channels.boundary(sender, forward, 1 << 20)) == pytest.approx(worst)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_messages_by_hand() -> None:
    """TP 8: the eight ranks of a node send at once, two over each card of which 40 % of 25 GB/s were published."""
    config = made(8, 4, 1)
    channels = Channels(config, FRONTIER, naive_placement(config, FRONTIER))
    for sender in range(3):
        occupies, latency = channels.boundary(sender, True, 1e6)
        assert (occupies, latency) == pytest.approx((2e6 / 10e9, 25e-6))
        assert channels.boundary(sender + 1, False, 1e6) == pytest.approx((occupies, latency))
    # A pipeline along the eight devices of a node in an order that has a link for each step.
    config = made(1, 8, 1)
    chosen = Channels(config, FRONTIER)
    order = chosen.placement.device_order
    for sender in range(7):
        width = FRONTIER.link_gb_per_s(order[sender], order[sender + 1])
        rate = {200.0: 129e9, 50.0: 50e9, 100.0: (50 + 79 / 3) * 1e9}[width]
        assert chosen.boundary(sender, True, 1e6) == pytest.approx((1e6 / rate, 10e-6))


def test_latency_of_rings_and_trees() -> None:
    """What is left at no bytes: the start and the steps, as NCCL counts them."""
    channels = Channels(made(8, 1, 4), FRONTIER)  # data-parallel groups: 4 ranks on 4 nodes
    start, within, between = 10e-6, 3.6e-6, 19.8e-6
    assert channels.tensor_s("all_gather", 0) == pytest.approx(start + 7 * within)
    assert channels.tensor_s("all_reduce", 0) == pytest.approx(start + 14 * within)
    assert channels.data_s("reduce_scatter", 0) == pytest.approx(start + 3 * between)
    assert channels.data_s("all_reduce", 0) == pytest.approx(start + 4 * between)  # a tree of 4 nodes is 2 deep
    assert channels.world_s(0) == pytest.approx(start + 2 * (7 * within + 2 * between))
    assert channels.model_s(0) == pytest.approx(start + 14 * within)
    # A replica of 64 ranks, four on each of 16 nodes.
    channels = Channels(made(4, 16, 16), FRONTIER, naive_placement(made(4, 16, 16), FRONTIER))
    assert channels.model_s(0) == pytest.approx(start + 2 * (3 * within + 4 * between))
    assert channels.data_s("all_gather", 0) == pytest.approx(start + 8 * within + 7 * between)  # two on each of 8 nodes


def test_a_group_of_one_sends_nothing() -> None:
    channels = Channels(made(1, 1, 1), FRONTIER)
    assert channels.tensor_s("all_reduce", 1e9) == channels.data_s("all_gather", 1e9) == 0.0
    assert channels.model_s(1e9) == channels.tied_s(1) == channels.world_s(8) == 0.0
    assert channels.confidence.used == ()


# -- what was measured ------------------------------------------------------------------------------------------------


def measured(**points: tuple[tuple[float, ...], ...]) -> Cluster:
    names = {"messages": "messages"}
    figures = [
        Figure(names.get(name, f"collectives.{name}"), rows, MEASURED, "measured here") for name, rows in points.items()
    ]
    return replace(FRONTIER, compute=FRONTIER.compute.with_figures(figures))


def test_measured_collectives_come_before_links() -> None:
    near, far = (1.0, 4.0, 1.0), (1.0, 4.0, 4.0)
    rows = ((*near, 1e3, 1e-5), (*near, 1e6, 1e-3), (2.0, 4.0, 1.0, 1e6, 5.0), (*far, 1e6, 7.0))
    cluster, config = measured(all_gather=rows), made(4, 2, 1)
    channels = Channels(config, cluster, naive_placement(config, cluster))
    assert channels.tensor_s("all_gather", 10) == channels.tensor_s("all_gather", 1e3) == 1e-5
    middle = channels.tensor_s("all_gather", (1e3 + 1e6) / 2)
    assert middle == pytest.approx((1e-5 + 1e-3) / 2)
    assert channels.tensor_s("all_gather", 1e7) == pytest.approx(1e-3 + 9e6 * (1e-3 - 1e-5) / (1e6 - 1e3))
    assert "collectives.all_gather" in {used.figure for used in channels.confidence.used}
    plain = Channels(config, FRONTIER, naive_placement(config, FRONTIER))
    assert channels.tensor_s("all_reduce", 1e6) == plain.tensor_s("all_reduce", 1e6)
    # Groups of other sizes were not measured; those over several nodes were, with their own rows.
    pair = made(2, 4, 1)
    assert Channels(pair, cluster).tensor_s("all_gather", 1e6) == Channels(pair, FRONTIER).tensor_s("all_gather", 1e6)
    across = made(8, 1, 4)
    assert Channels(across, cluster).data_s("all_gather", 1e6) == 7.0
    elsewhere = Channels(config, measured(all_gather=((*far, 1e6, 7.0),)), naive_placement(config, FRONTIER))
    assert elsewhere.tensor_s("all_gather", 1e6) == plain.tensor_s("all_gather", 1e6)


@pytest.mark.parametrize("n_bytes", [1e6, 3e6, 1e9])
def test_measured_seconds_that_fall_are_no_way_down(n_bytes: float) -> None:
    """Noise: a larger message that took less. Beyond it the time grows with the bytes."""
    near, config = (1.0, 4.0, 1.0), made(4, 2, 1)
    channels = Channels(config, measured(all_gather=((*near, 1e3, 2e-4), (*near, 1e6, 1e-4))))
    assert channels.tensor_s("all_gather", n_bytes) == pytest.approx(1e-4 * n_bytes / 1e6)


def test_measured_messages_come_before_links() -> None:
    cluster, config = measured(messages=((1.0, 1e3, 2e-5), (1.0, 1e6, 1e-3), (2.0, 1e3, 1e-4))), made(4, 2, 1)
    channels = Channels(config, cluster)
    assert channels.boundary(0, True, 1e6) == pytest.approx((1e-3 - 2e-5, 2e-5))
    assert channels.boundary(1, False, 1) == pytest.approx((0.0, 2e-5))
    across = Channels(made(8, 2, 1), cluster)
    assert across.boundary(0, True, 1e4) == pytest.approx((1e-3 - 1e-4, 1e-4))  # one point: in proportion beyond it


# -- confidence -------------------------------------------------------------------------------------------------------


def test_confidence_tells_published_from_estimated() -> None:
    config = made(4, 2, 4)
    naive = naive_placement(config, FRONTIER)
    channels = Channels(config, FRONTIER, naive)
    channels.tensor_s("all_gather", 1e6)
    channels.boundary(0, True, 1e6)
    used = {u.figure.split()[0]: u for u in channels.confidence.used}
    assert used["tensor-parallel"].basis == PUBLISHED and "52 " in used["tensor-parallel"].value
    assert used["stage"].basis == ASSUMED and "data-parallel" not in used
    # On LUMI the same figures are taken from Frontier.
    lumi = load_cluster("lumi")
    there = Channels(config, lumi, naive_placement(config, lumi))
    there.tensor_s("all_gather", 1e6)
    assert {u.figure.split()[0]: u for u in there.confidence.used}["tensor-parallel"].basis == ASSUMED


def test_all_reduces_of_a_whole_dgx_node_as_published() -> None:
    """Azure's bus bandwidths, 2 (n - 1) / n of the bytes each second: 361.78 GB/s at 64 MiB, 0.07 at 1 KiB on H100."""
    channels = Channels(made(8, 1, 1), DGX)
    for size, bus in ((1 << 26, 361.78), (1 << 20, 43.70), (1 << 10, 0.07), (1 << 33, 478.87)):
        assert 2 * 7 / 8 * size / channels.tensor_s("all_reduce", size) / 1e9 == pytest.approx(bus, rel=2e-3)
    assert channels.tensor_s("all_gather", 1 << 26) == pytest.approx(8.4e-6 + 7 * 3.4e-6 + 7 / 8 * (1 << 26) / 370e9)
