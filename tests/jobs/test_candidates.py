"""List of candidates against every combination, by pretrain_gpt.py's parser and the planner."""

import itertools

import pytest

from megatron.config import parse_args
from megatron.config.settings import all_options
from megatron.errors import ConfigError
from megatron.jobs.candidate_layouts import Machine
from megatron.planner.cluster import GIB, load_cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.placement import placement_of
from megatron.planner.timing import estimate
from tests.jobs.small_spaces import MODEL, ONE, complete, config_of, enumerated, reasons


@pytest.fixture(scope="module")
def frontier():
    return load_cluster("frontier")


@pytest.mark.parametrize(
    "pp, mbs, batches",
    [
        ((2, 16), (1, 3), (6,)),
        pytest.param((1, 2, 4, 16), (1, 2, 3), (4, 6), marks=pytest.mark.campaign("search")),
    ],
)
def test_every_combination_is_put_to_the_parser(read, pp, mbs, batches):
    """Compare with brute force: flags are written out here, and equal settings count once."""
    text = f"""
    [parameters]
    tp = [1, 2, 3, 4]
    pp = {list(pp)}
    mbs = {list(mbs)}
    gbs = {list(batches)}
    sp = [false, true]
    schedule = ["1f1b", "zb-h1"]
    zero = [0, 1]
    recompute = ["none", "selective:mlp_act", "full:block:2"]
    """
    space = read(text, MODEL)
    listing = enumerated(space)
    recompute = {
        "none": "none",
        "selective:mlp_act": "selective --recompute-modules mlp_act",
        "full:block:2": "full --recompute-method block --recompute-num-layers 2",
    }
    valid = {}
    both = False, True
    for tp, stages, samples, gbs, sp, zb, zero, kind in itertools.product(
        (1, 2, 3, 4), pp, mbs, batches, both, both, (0, 1), recompute
    ):
        words = (
            f"{MODEL} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size "
            f"{stages} --micro-batch-size {samples} --global-batch-size {gbs} --zero-stage {zero} "
            f"--recompute-granularity {recompute[kind]} --mock-data --train-iters 8"
        )
        words += " --sequence-parallel" * sp + " --enable-zbh1-pipeline" * zb
        try:
            config = parse_args(words.split(), 4)
        except ConfigError:
            continue
        # One replica leaves the optimizer nothing to shard over.
        values = config.to_dict() | ({"zero_stage": 0} if tp * stages == 4 else {})
        valid.setdefault(str(sorted(values.items())), config)
    assert [config_of(c) for c in listing.candidates] == list(valid.values())
    assert len(valid) > 20 and complete(listing, space)
    assert space.combinations == 4 * len(pp) * len(mbs) * len(batches) * 2 * 2 * 2 * 3
    assert all(c.tokens == config_of(c).batch.global_batch_size * 64 for c in listing.candidates)


def test_a_schedule_that_would_be_another_is_no_candidate(read):
    space = read(
        "[parameters]\npp = [1, 4]\nchunks = [1, 2, 4]\n"
        'schedule = ["1f1b", "interleaved", "zb-h1"]\n[derived]\ngbs="8"'
    )
    listing = enumerated(space)
    # four chunks of four stages would be more than the layers
    assert [tuple(c.values.values()) for c in listing.candidates] == [
        (1, 1, "1f1b"), (4, 1, "1f1b"), (4, 1, "zb-h1"), (4, 2, "interleaved")
    ]  # fmt: skip
    for candidate in listing.candidates:
        parallel = config_of(candidate).parallel
        values = candidate.values
        assert (parallel.schedule, parallel.num_chunks) == (values["schedule"], values["chunks"])
    assert complete(listing, space)


def test_derived_names_and_constraints_over_everything(read):
    text = """
    [parameters]
    hidden-size = [64, 128]
    tp = [1, 2]
    pp = [1, 2]
    cp = [1, 2]
    [variables]
    accumulation = [2, 3]
    [derived]
    gbs = "mbs * dp * accumulation"
    ffn_hidden_size = "3 * hidden_size if hidden_size > 64 else hidden_size"
    [constraints]
    "width" = "kv_channels == 16 or tp * pp * cp == 1"
    "batch" = "gbs in (4, 6)"
    "model" = "num_layers == 8 and seq_length == 64 and nodes == 1"
    """
    space = read(text, ONE.replace("--hidden-size 64 ", ""))
    listing = enumerated(space)
    expected = []
    both = 1, 2
    for hidden, tp, pp, cp, accumulation in itertools.product((64, 128), both, both, both, (2, 3)):
        replicas = 4 // (tp * pp * cp)
        if replicas * accumulation in (4, 6) and (hidden // 4 == 16 or tp * pp * cp == 1):
            expected.append((hidden, tp, pp, cp, accumulation, replicas * accumulation))
    assert [
        (*c.values.values(), config_of(c).batch.global_batch_size) for c in listing.candidates
    ] == expected
    assert {config_of(c).model.ffn_hidden_size for c in listing.candidates} == {64} and complete(
        listing, space
    )
    assert set(reasons(listing)) > {"width", "batch"}  # eight ranks a replica are another


def test_the_size_of_a_job(read):
    """The size of a job must be valid.

    On two nodes of four devices, 12 processes are too many, and 6 fill no nodes.
    """
    space = read("[parameters]\nprocesses = [1, 2, 3, 4, 6, 8, 12]\n[derived]\ngbs = '24'")
    listing = enumerated(space, machine=Machine(None, 4, 2))
    sizes = [(c.processes, c.nodes) for c in listing.candidates]
    assert sizes == [(1, 1), (2, 1), (3, 1), (4, 1), (8, 2)]
    assert list(reasons(listing).values()) == [1, 1]
    by_nodes = enumerated(read("[parameters]\nnodes = [1, 2, 3]"), machine=Machine(None, 4, 2))
    assert [(c.processes, c.nodes, c.tokens) for c in by_nodes.candidates] == [
        (4, 1, 256),
        (8, 2, 512),
    ]


def test_flags_of_the_command_line_win_over_the_space_s(read):
    space = read(
        "[parameters]\ntp = [1, 2]",
        f"{MODEL} --micro-batch-size 2 --fp16 --initial-loss-scale 4096",
    )
    (first, _) = enumerated(space, "--micro-batch-size 3 --bf16 --num-layers 4").candidates
    config = config_of(first)
    actual = (config.batch.micro_batch_size, config.model.num_layers, config.precision.dtype_name)
    assert actual == (3, 4, "bfloat16")
    assert "--fp16" not in first.flags and list(first.flags).count("--micro-batch-size") == 1


@pytest.mark.parametrize(
    ("flags", "rule", "words"),
    [
        ("--tensor-model-parallel-size 2", "true", "--tensor-model-parallel-size 2|tp|space.toml"),
        ("--global-batch-size 2", "true", "--global-batch-size 2|gbs"),
        ("--save x --train-tokens 1e9", "true", "--save x|--train-tokens 1e9"),
        ("--fp16 --no-fp16", "true", "--fp16|--no-fp16"),
        ("--cluster frontier", "true", "--cluster frontier"),
        ("", "tp.x", "space.toml|[constraints] 'a'|tp.x"),
        ("", "64 % tp", "space.toml|[constraints] 'a'|neither true nor false"),
        ("", "tp > tp // 0", "space.toml|[constraints] 'a'|tp // 0"),
        ("", "gbs > 1", "space.toml|[derived] gbs"),
    ],
)
def test_flags_and_expressions_that_cannot_be_are_named_with_their_place(read, flags, rule, words):
    circle = "gbs = 'mbs + seed'\nseed = 'gbs'" if rule != "true" else "gbs = '8'"
    space = read(f"[parameters]\ntp = [1, 2]\n[derived]\n{circle}\n[constraints]\na = '{rule}'")
    with pytest.raises(ConfigError) as caught:
        enumerated(space, flags)
    assert all(word in str(caught.value) for word in words.split("|")), str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "0.5", "'a'", "none", "[1, 2]"])
def test_a_derived_size_that_is_none_leaves_nothing_and_ends_well(read, value):
    for name in ("pp", "tp", "nodes", "processes", "mbs"):
        listing = enumerated(
            read(f'[parameters]\nchunks = [1, 2]\n[derived]\n{name} = "{value}"', MODEL)
        )
        assert not listing.candidates and listing.rejections.counts


# -- with a described machine ----------------------------------------------------------------------

SMALL = "--preset gpt-1.4b --global-batch-size 64"
LAYOUTS = """
[parameters]
tp = [1, 2, 4, 8]
pp = [1, 2, 4]
mbs = [2, 16]
recompute = ["none", "full:uniform:1"]
"""


def test_shards_of_a_node_take_the_memory_of_their_number(read, frontier):
    space = read(
        '[parameters]\nnodes = [2]\nzero = [3]\nshard = ["node", 8, "world"]',
        f"{ONE} --global-batch-size 16",
    )
    candidates = enumerated(space, machine=Machine(frontier, 8, 2)).candidates
    memory = {candidate.values["shard"]: candidate.memory_bytes for candidate in candidates}
    assert memory[-1] == memory[8] > memory[0]


def test_memory_is_the_planner_s(read, frontier):
    """A layout is a candidate exactly if its rank with the highest peak fits.

    The closest miss is the example.
    """
    capacity = 20 * GIB
    free = enumerated(read(LAYOUTS, SMALL), machine=Machine(frontier, 8, 2))
    some = enumerated(read(LAYOUTS, SMALL), machine=Machine(frontier, 8, 2, capacity))
    needs = {
        c.key: max(rank.total for rank in memory_of_ranks(config_of(c), "gpu"))
        for c in free.candidates
    }
    assert {c.key: c.memory_bytes for c in free.candidates} == pytest.approx(needs)
    assert [c.key for c in some.candidates] == [
        key for key, need in needs.items() if need <= capacity
    ]
    assert 0 < len(some.candidates) < len(needs)
    (reason,) = reasons(some).keys() - reasons(free).keys()
    count, (_, example) = reasons(some)[reason], some.rejections.nearest[reason]
    assert (
        count == len(needs) - len(some.candidates)
        and example.split(":")[0] in needs
        and "20.0" in example
    )


def test_the_placement_is_the_fastest_of_all(read, frontier):
    """The placement is the fastest of all rank orders and of all device orders of the machine."""
    space = read("[parameters]\ntp = [2, 4]\npp = [1, 4]\n", SMALL)
    for candidate in enumerated(space, machine=Machine(frontier, 8, 2), predict=True).candidates:
        config = config_of(candidate)
        assert config.parallel.cluster == "frontier"
        assert config.parallel.rank_order is not None and config.parallel.device_order is not None
        chosen = placement_of(
            config, frontier, config.parallel.rank_order, config.parallel.device_order
        )
        assert candidate.step_s == pytest.approx(estimate(config, frontier, chosen).seconds)
        bare = config.replace(rank_order=None, device_order=None)
        every = [
            estimate(bare, frontier, placement_of(bare, frontier, order, devices)).seconds
            for order in all_options()["rank_order"].choices or ()
            for devices in frontier.device_orders
        ]
        assert candidate.step_s == pytest.approx(min(every))


def test_orders_that_are_fixed_are_kept(read, frontier):
    flags = f"{SMALL} --rank-order dp-tp-pp --device-order 0,1,2,3,4,5,6,7"
    space = read("[parameters]\ntp = [2]", flags)
    (one,) = enumerated(space, machine=Machine(frontier, 8, 2), predict=True).candidates
    assert one.flags.count("--rank-order") == one.flags.count("--device-order") == 1
    config = config_of(one)
    assert config.parallel.rank_order == "dp-tp-pp"
    assert config.parallel.device_order == tuple(range(8))


# -- many ------------------------------------------------------------------------------------------


def test_a_space_without_end_is_refused(read):
    names = [f"v{n}" for n in range(20)]
    text = "[parameters]\ntp = [1, 2, 4]\n[variables]\n" + "\n".join(
        f"{name} = {list(range(100))}" for name in names
    )
    with pytest.raises(ConfigError, match="30,000,000,000.* more than 50,000"):
        enumerated(read(f"{text}\n[derived]\ngbs = '4 * ({' + '.join(names)})'"))
