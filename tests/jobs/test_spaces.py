"""Supplied spaces: the paper's Table V, a wider one with its best recipe, and a small one."""

import dataclasses
import itertools
import shlex

import pytest

from megatron.config import parse_args
from megatron.jobs.candidate_layouts import Machine, enumerate_candidates
from megatron.jobs.space import load_space
from megatron.planner.cluster import load_cluster

ANYWHERE = Machine(None, 8, 16)
WHOLE = pytest.mark.campaign("search")


@pytest.fixture(scope="module")
def frontier():
    return load_cluster("frontier")


def listed(name, machine, flags="", **only):
    """Return the layouts of a space, or of the part in which parameters have these values alone.

    The whole space has all of that part too.
    """
    space = load_space(name)
    parameters = tuple(
        dataclasses.replace(p, values=tuple(only.get(p.name, p.values))) for p in space.parameters
    )
    space = dataclasses.replace(space, parameters=parameters)
    return enumerate_candidates(space, shlex.split(flags), machine, predict=False)


def settings(candidate):
    """Return the settings of a run, without the placement of its ranks."""
    config = parse_args(
        [*candidate.flags, "--mock-data", "--train-iters", "1"], candidate.processes
    ).to_dict()
    places = ("rank_order", "device_order", "cluster", "mock_data")
    return {
        name: value for name, value in config.items() if name not in places and "iters" not in name
    }


@pytest.mark.parametrize("sizes_of_batch", [(4, 20), pytest.param(range(4, 21), marks=WHOLE)])
def test_table_five_has_its_combinations(sizes_of_batch):
    """Table five has all of its combinations.

    PP is {1,2,4,8,12,16}, TP {1,2,4,8}, MBS 4-20, accumulation {5,10}, ZeRO-1 {yes,no}, nodes
    {12,16}; there are ten iterations. Without a device's memory TP x PP must divide the GCDs of 12
    or 16 nodes, and no other condition applies; with one replica ZeRO-1 has no effect.
    """
    space = load_space("paper-175b")
    values = {parameter.name: parameter.values for parameter in space.parameters}
    assert values == {
        "pp": (1, 2, 4, 8, 12, 16),
        "tp": (1, 2, 4, 8),
        "mbs": tuple(range(4, 21)),
        "accumulation": (5, 10),
        "zero": (0, 1),
        "nodes": (12, 16),
    }
    assert space.combinations == 3264 == 6 * 4 * 17 * 2 * 2 * 2 and space.iterations == 10
    sizes = list(itertools.product((1, 2, 4, 8, 12, 16), (1, 2, 4, 8), (96, 128)))
    replicas = [gcds // (pp * tp) for pp, tp, gcds in sizes if gcds % (pp * tp) == 0]
    enumeration = listed("paper-175b", ANYWHERE, mbs=sizes_of_batch)
    many = len(sizes_of_batch)
    counts = sorted(enumeration.rejections.counts.values())
    assert counts == sorted(
        [(len(sizes) - len(replicas)) * many * 2 * 2, replicas.count(1) * many * 2]
    )
    assert len(enumeration.candidates) == 6 * 4 * many * 2 * 2 * 2 - sum(counts)
    for candidate in enumeration.candidates[::41]:
        of = candidate.values
        run = settings(candidate)
        assert (
            run["global_batch_size"] == of["mbs"] * run["data_parallel_size"] * of["accumulation"]
        )
        assert candidate.nodes == of["nodes"] and candidate.processes == 8 * candidate.nodes
        assert (
            run["zero_stage"] == of["zero"]
            and run["fp16"]
            and run["recompute_granularity"] == "full"
        )
        assert run["num_layers"] == 96 and run["hidden_size"] == 12288 and run["seq_length"] == 2048
