"""Meaning of the placement flags for a job."""

import pytest

from megatron.errors import ConfigError
from megatron.parallel.launch import Launch
from megatron.parallel.rank_mapping import RankMapping
from megatron.planner.cluster import load_cluster
from megatron.planner.placement import choose_placement, naive_placement, plan_ranks
from tests.planner.layouts import planned

SIZES = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size "
    "50257 --micro-batch-size 1 --global-batch-size 48 --tensor-model-parallel-size 4"
)
PP2 = "--pipeline-model-parallel-size 2"
ON_FRONTIER = "--cluster frontier"


def config(world_size, *flags):
    plain = planned(SIZES, f"--world-size {world_size}", *flags)
    return plain.with_pieces(callbacks=[print])  # a list, as in any run


def launched(world_size):
    return Launch(world_size=world_size, local_world_size=min(world_size, 8), launcher="slurm")


def test_a_cluster_chooses_and_says_what_it_costs():
    frontier = load_cluster("frontier")
    chosen = choose_placement(config(16, PP2), frontier)
    plan = plan_ranks(config(16, PP2, ON_FRONTIER), launched(16))
    assert plan.mapping == RankMapping(
        chosen.device_order, frontier.local_order, frontier.cores_of_device, chosen.layout.order
    )
    assert plan.mapping.local_order == (4, 5, 2, 3, 6, 7, 0, 1)
    text = "\n".join(plan.describe())
    assert f"device order {','.join(map(str, chosen.device_order))}" in text and "naive" in text


def test_what_is_given_is_kept_on_a_cluster_too():
    requested = config(16, PP2, ON_FRONTIER, "--rank-order dp-pp-tp --device-order 7,6,5,4,3,2,1,0")
    mapping = plan_ranks(requested, launched(16)).mapping
    assert (mapping.device_order, mapping.rank_order) == ((7, 6, 5, 4, 3, 2, 1, 0), "dp-pp-tp")
    chosen, naive = (
        method(requested, load_cluster("frontier"))
        for method in (choose_placement, naive_placement)
    )
    assert chosen.location(9) == (1, 6)
    assert (naive.layout.order, naive.device_order) == ("tp-dp-pp", (0, 1, 2, 3, 4, 5, 6, 7))
    with pytest.raises(ConfigError, match="--device-order 1,0"):
        plan_ranks(config(16, ON_FRONTIER, "--device-order 1,0"), launched(16))


def test_a_part_of_a_node_keeps_its_ranks_and_finds_its_devices():
    mapping = plan_ranks(config(4, ON_FRONTIER), launched(4)).mapping
    assert mapping.device_order == () and len(mapping.local_order) == 8


def test_processes_that_fill_no_whole_nodes_run_as_they_were_launched():
    plan = plan_ranks(config(12, ON_FRONTIER), launched(12))
    assert (plan.mapping.device_order, plan.mapping.rank_order) == ((), "tp-dp-pp")
    # A process that sees all devices still takes its own.
    assert plan.mapping.local_order == (4, 5, 2, 3, 6, 7, 0, 1)
    assert "12 processes" in plan.describe()[0] and "as launched" in plan.describe()[0]
    reverse = "7,6,5,4,3,2,1,0"
    plan = plan_ranks(config(12, ON_FRONTIER, f"--device-order {reverse}"), launched(12))
    assert plan.mapping.device_order == (7, 6, 5, 4, 3, 2, 1, 0) and reverse in plan.describe()[0]
    with pytest.raises(ConfigError, match="--device-order 1,1"):
        plan_ranks(config(12, ON_FRONTIER, "--device-order 1,1,2,3,4,5,6,7"), launched(12))
