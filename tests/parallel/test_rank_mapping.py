"""Placement of ranks on devices: a node's visible devices, its choices, and disagreements."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import LaunchError
from megatron.parallel.launch import Launch, select_device
from megatron.parallel.rank_mapping import (
    Assignment,
    LaunchedProcess,
    RankMapping,
    assign,
    device_number,
    near_devices,
    near_index,
    ranks_per_node,
    visible_devices,
)

# A Frontier node: local rank i runs on cores 8i to 8i+7, which are next to device LOCAL[i].
LOCAL = (4, 5, 2, 3, 6, 7, 0, 1)
CORES = tuple((8 * LOCAL.index(device), 8 * LOCAL.index(device) + 7) for device in range(8))
PAIRS_OF_PAIRS = (0, 1, 6, 7, 2, 3, 4, 5)
FRONTIER = RankMapping(PAIRS_OF_PAIRS, LOCAL, CORES)

# -- which rank ------------------------------------------------------------------------------------

ORDERS = st.integers(1, 6).flatmap(lambda n: st.permutations(range(n)))
TASKS = st.lists(
    st.builds(
        LaunchedProcess,
        st.sampled_from(["a", "b", "c"]),
        st.none() | st.integers(0, 6),
        st.just(()) | st.tuples(st.integers(0, 1), st.integers(0, 9)),
    ),
    max_size=20,
)


@given(TASKS, ORDERS)
def test_ranks_are_a_permutation_whatever_the_processes_say(tasks, order):
    ranks = assign(tasks, order).ranks
    assert sorted(ranks) == list(range(len(tasks)))
    for task, rank in enumerate(ranks):
        assert tasks[task].node == tasks[rank].node, "a rank stays on its node"


@given(ORDERS, st.data(), st.integers(1, 4), st.booleans())
def test_on_whole_nodes_ranks_follow_the_device_order(order, data, nodes, by_bus):
    tasks = []
    size = len(order)
    for node in range(nodes):
        devices = data.draw(st.permutations(range(size)))
        # The bus addresses of a node, by which the devices are numbered; a variable may give all of
        # them the same one.
        tasks += [
            LaunchedProcess(f"n{node}", 0, (0, 10 * d))
            if by_bus
            else LaunchedProcess(f"n{node}", d)
            for d in devices
        ]
    devices_of = [task.address[1] // 10 if by_bus else task.number for task in tasks]
    assignment = assign(tasks, order)
    ranks = assignment.ranks
    assert assignment.notices == [] and assignment.devices == devices_of
    of_rank = sorted(range(len(tasks)), key=ranks.__getitem__)
    assert [devices_of[task] for task in of_rank] == order * nodes


def tasks_of(text):
    """Return processes of nodes of one letter each, with the numbers of their devices."""
    return [LaunchedProcess(word[0], int(word[1:]) if word[1:] else None) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a0 b0 a1 b1", ["2 of 2", "--distribution=block"]),
        ("a0 a1 a0 a1", ["4", "2"]),
        ("a0 a", ["1 of 2"]),
        ("a1 a2", ["1,2"]),
    ],
)
def test_nodes_that_keep_their_ranks(text, words):
    tasks = tasks_of(text)
    assignment = assign(tasks, (1, 0))
    assert assignment.ranks == list(range(len(tasks)))
    assert len(assignment.notices) == 1 and all(word in assignment.notices[0] for word in words), (
        assignment.notices
    )
    assert assign(tasks, ()) == Assignment(assignment.ranks, [task.number for task in tasks], [])


def test_one_bad_node_does_not_touch_the_others():
    assignment = assign(tasks_of("a0 a1 b0 b1 c0 c d0 d1"), (1, 0))
    assert assignment.ranks == [1, 0, 3, 2, 4, 5, 7, 6]
    (notice,) = assignment.notices
    assert "1 of 4" in notice and "(c)" in notice


# -- which device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"ROCR_VISIBLE_DEVICES": "4"}, (4,)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a"}, None),
        ({"ROCR_VISIBLE_DEVICES": "4,4"}, None),
        ({"HIP_VISIBLE_DEVICES": "3"}, (3,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, tuple(range(8))),
        # counts within the first list
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2"}, (6,)),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1,0"}, (0, 1)),
        (
            {
                "ROCR_VISIBLE_DEVICES": "4,5",
                "HIP_VISIBLE_DEVICES": "0",
                "CUDA_VISIBLE_DEVICES": "1",
            },
            (4,),
        ),
        # srun --gpu-bind=closest beside a script that exports all eight
        ({"ROCR_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, (4,)),
        # Slurm without a known kind of device
        ({"ROCR_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "4"}, (4,)),
        ({"ROCR_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "5"}, None),
    ],
)
def test_what_a_process_is_shown(variables, expected):
    assert visible_devices(variables) == expected


@pytest.mark.parametrize("local_rank", range(8))
def test_one_device_or_all_of_them_are_the_same_device(local_rank):
    """A task's one device under --gpu-bind=closest is the one that it finds among all eight."""
    device = LOCAL[local_rank]
    assert device_number(FRONTIER, local_rank, 0, 1, (device,)) == device
    assert near_index(FRONTIER, local_rank, 8, None) == device
    assert device_number(FRONTIER, local_rank, device, 8, None) == device
    backwards = tuple(range(8))[::-1]
    index = near_index(FRONTIER, local_rank, 8, backwards)
    assert index == 7 - device
    assert device_number(FRONTIER, local_rank, index, 8, backwards) == device
    assert device_number(FRONTIER, local_rank, None, 0, None) == device, (
        "a process on the CPU stands for its device"
    )


def test_variables_that_hide_every_device(monkeypatch):
    """Variables that hide every device are no reason to train on the CPU.

    ROCR_VISIBLE_DEVICES=4 leaves one device, which HIP_VISIBLE_DEVICES=4 hides.
    """
    launch = Launch(rank=3, node="n1")
    both = {"ROCR_VISIBLE_DEVICES": "4", "HIP_VISIBLE_DEVICES": "4"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(LaunchError, match=r"rank 3 .*n1 .*ROCR\w+=4, HIP\w+=4"):
        select_device(launch, None, FRONTIER, both)
    assert select_device(launch, "gloo", FRONTIER, both) == torch.device("cpu")
    assert select_device(launch, None, FRONTIER, {"CUDA_VISIBLE_DEVICES": "-1"}) == torch.device(
        "cpu"
    )
    monkeypatch.setattr(torch.version, "hip", None)
    assert select_device(launch, None, FRONTIER, both) == torch.device("cpu"), (
        "a torch without devices"
    )

    def refuse():
        raise RuntimeError("HIP_VISIBLE_DEVICES")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", refuse)
    with pytest.raises(LaunchError, match="HIP_VISIBLE_DEVICES"):
        select_device(launch, None, FRONTIER, both)


@pytest.mark.parametrize(
    ("mapping", "shown", "expected"),
    [
        (FRONTIER, "", 6),
        (None, "", 4),
        (RankMapping((1, 0)), "", 4),
        (FRONTIER, "7,6,5,4,3,2,1,0", 1),
    ],
)
def test_the_device_next_to_the_cores(monkeypatch, mapping, shown, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    launch = Launch(rank=4, local_rank=4, local_world_size=8, world_size=8, launcher="slurm")
    environ = {"ROCR_VISIBLE_DEVICES": shown}
    assert select_device(launch, None, mapping, environ) == torch.device("cuda", expected)


@pytest.mark.parametrize(
    ("cores", "near"),
    [({65}, (4,)), ({1, 9}, (4, 5)), (range(128), tuple(range(8))), ((), ())],
)
def test_devices_next_to_cores(cores, near):
    """Devices are found by the next cores: hardware thread 65 is the second one of core 1."""
    assert near_devices(FRONTIER, cores) == near
    assert near_devices(RankMapping(), cores) == ()


@pytest.mark.parametrize(("nodes", "each"), [("aabb", 2), ("aab", 1), ("abab", 1)])
def test_ranks_of_a_node(nodes, each):
    assert ranks_per_node(nodes) == each
