"""Meaning of the placement flags for a job."""

import pytest

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.parallel.launch import Launch
from megatron.parallel.rank_mapping import RankMapping
from megatron.planner.cluster import load_cluster
from megatron.planner.placement import choose_placement, plan_ranks

FIELDS = dict(
    num_layers=16,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    micro_batch_size=1,
    global_batch_size=64,
    tensor_model_parallel_size=4,
    pipeline_model_parallel_size=2,
)


def config(world_size, **fields):
    return Config.create(**{**FIELDS, **fields}, world_size=world_size)


def launched(world_size):
    return Launch(world_size=world_size, local_world_size=min(world_size, 8), launcher="slurm")


def test_a_cluster_chooses_and_says_what_it_costs():
    frontier = load_cluster("frontier")
    chosen = choose_placement(config(16), frontier)
    plan = plan_ranks(config(16, cluster="frontier"), launched(16))
    assert plan.mapping == RankMapping(
        chosen.device_order, frontier.local_order, frontier.cores_of_device, chosen.layout.order
    )
    assert plan.mapping.local_order == (4, 5, 2, 3, 6, 7, 0, 1)
    # Four tensor-parallel ranks are kept on links of 200 and 100 GB/s.
    assert {frozenset(plan.mapping.device_order[i : i + 4]) for i in (0, 4)} == {
        frozenset((0, 1, 6, 7)),
        frozenset((2, 3, 4, 5)),
    }
    text = "\n".join(plan.describe())
    assert f"device order {','.join(map(str, chosen.device_order))}" in text and "naive" in text


def test_what_is_given_is_kept_on_a_cluster_too():
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    given = config(16, cluster="frontier", rank_order="dp-pp-tp", device_order=order)
    placing = plan_ranks(given, launched(16)).mapping
    assert (placing.device_order, placing.rank_order) == (order, "dp-pp-tp")
    with pytest.raises(ConfigError, match="--device-order 1,0"):
        plan_ranks(config(16, cluster="frontier", device_order=(1, 0)), launched(16))


def test_a_part_of_a_node_keeps_its_ranks_and_finds_its_devices():
    placing = plan_ranks(
        config(4, cluster="frontier", pipeline_model_parallel_size=1), launched(4)
    ).mapping
    assert placing.device_order == () and len(placing.local_order) == 8


def test_processes_that_fill_no_whole_nodes_run_as_they_were_launched():
    given = {"tensor_model_parallel_size": 2, "global_batch_size": 48, "cluster": "frontier"}
    plan = plan_ranks(config(12, **given), launched(12))
    assert (plan.mapping.device_order, plan.mapping.rank_order) == ((), "tp-dp-pp")
    # A process that sees all devices still takes its own.
    assert plan.mapping.local_order == (4, 5, 2, 3, 6, 7, 0, 1)
    assert "12 processes" in plan.describe()[0]
