"""Expert and context parallelism in the planner: links, messages, parameters, FLOPs, search."""

import contextlib
import random
from collections import Counter

import pytest

from megatron.config import command_line_of
from megatron.errors import ConfigError
from megatron.kernels.cost import Product
from megatron.parallel.launch import Launch
from megatron.parallel.layout import Layout, LayoutSizes
from megatron.planner.channels import Channels
from megatron.planner.cluster import load_cluster
from megatron.planner.events import GroupMessage, Post, Wait
from megatron.planner.memory import parameters_of_rank
from megatron.planner.placement import (
    choose_placement,
    naive_placement,
    placement_of,
    plan_ranks,
    render_placement,
    step_messages,
)
from megatron.planner.search.find import LayoutSearch, search
from megatron.planner.search.space import LayoutSpace, Rejections, make_config
from megatron.planner.tensors import rows_to_ranks
from megatron.planner.timing import dispatch_choice, estimate
from megatron.planner.trace import trace
from tests.planner.layouts import planned

FRONTIER = load_cluster("frontier")
FIELDS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 128 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --bf16 --attention-dropout 0 "
    "--hidden-dropout 0 --world-size 16 --global-batch-size 32"
)
TP4 = "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 1"
EXPERTS = "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 32"
WIDE = "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --moe-router-topk 8"


def made(*flags):
    return planned(FIELDS, *flags)


def channels_of(config):
    return Channels(config, FRONTIER, naive_placement(config, FRONTIER))


# -- links -----------------------------------------------------------------------------------------


def test_all_to_alls_by_hand():
    """A pair has its link; ranks of two nodes share cards, two of each, at 0.4 of 25 GB/s.

    Of 16 ranks, 8 of the 15 others are on the other node. Messages begin eight at a time.
    """
    config = made(f"{EXPERTS} --expert-model-parallel-size 2")
    pair = channels_of(config)
    start = 10e-6
    within = 3.6e-6
    between = 19.8e-6
    assert pair.seconds("all_to_all", 1e9, "expert") == pytest.approx(start + within + 0.5 / 129)
    both = channels_of(made(f"{EXPERTS} --num-experts 16 --expert-model-parallel-size 16"))
    sent = 1e9 * 15 / 16
    assert both.seconds("all_to_all", 1e9, "expert") == pytest.approx(
        start + within + between + sent * 8 / 15 / 5e9
    )
    # Over nodes: a pair of ranks on two nodes, whose cards others share, and the ranks of a node.
    assert both.seconds("all_to_all", 1e9, "expert_between") == pytest.approx(
        start + between + 0.5 / 5
    )
    assert both.lanes["expert_within"][:3] == (8, 1, 1)
    # Experts over all ranks of a node, of which four are tensor-parallel, have its links; divided
    # like attention they are on both nodes.
    ranks = f"{EXPERTS} --tensor-model-parallel-size 4 --expert-tensor-parallel-size"
    plain, folded, divided = (
        channels_of(made(flags)).lanes["expert"]
        for flags in (
            f"{EXPERTS} --expert-model-parallel-size 8",
            f"{ranks} 1 --expert-model-parallel-size 8",
            f"{ranks} 4 --expert-model-parallel-size 4",
        )
    )
    assert folded == plain and (folded.nodes, divided.nodes) == (1, 2)
    # Heads are exchanged by neighbours, and rings have one rank of each pair.
    sizes = "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"
    mixed = channels_of(made(f"--cp-comm-type a2a+p2p {sizes}"))
    assert mixed.seconds("all_to_all", 1e9, "heads") == pytest.approx(start + within + 0.5 / 129)
    assert mixed.lanes["context"][:3] == (2, 1, 2)
    # One step of a ring of pairs, and of one of 16 ranks that leaves each node once.
    two, all_ranks = (channels_of(made(f"--context-parallel-size {size}")) for size in (2, 16))
    assert two.seconds("ring", 1e9, "context") == pytest.approx(start + within + 1 / 129)
    # 0.1 ms between nodes for the steps of rings
    assert all_ranks.seconds("ring", 1e9, "context") == pytest.approx(start + 1e-4 + 1 / 40)


def test_experts_of_a_node_stay_on_it():
    """Of the orders of ranks, one is chosen that keeps each group of experts on a node."""
    sizes = "--expert-model-parallel-size 4 --pipeline-model-parallel-size 4"
    for order, nodes in (("none", {1}), ("pp-tp-dp", {2})):
        config = made(f"{EXPERTS} {sizes} --rank-order {order}")
        chosen = choose_placement(config, FRONTIER)
        ranks = range(chosen.layout.world_size)
        lines = (chosen.layout.ranks("expert", rank) for rank in ranks)
        groups = [{chosen.location(r)[0] for r in line} for line in lines]
        assert set(map(len, groups)) == nodes


# -- messages, parameters, FLOPs -------------------------------------------------------------------


def test_tokens_go_once_to_each_rank_of_their_experts():
    """Draw choices: the expected number of pairs. X-MoE measured 54.8 % of redundancy for 8 of 256
    experts on 4 nodes (arXiv 2508.13337, section 5.4.2).
    """
    draw, (tokens, topk, ranks, each) = random.Random(0), (4000, 3, 4, 2)
    pairs = sum(
        len({expert // each for expert in draw.sample(range(ranks * each), topk)})
        for _ in range(tokens)
    )
    assert rows_to_ranks(tokens, topk, ranks, each) == pytest.approx(pairs, rel=0.02)
    assert rows_to_ranks(tokens, 1, ranks, each) == tokens
    assert 1 - rows_to_ranks(10**6, 8, 4, 64) / (8 * 10**6) == pytest.approx(0.548, abs=5e-4)


def test_messages_of_experts():
    """Tokens go and return in both passes: [pairs, h] in bf16, 4 times for each layer."""
    config = made(f"{EXPERTS} --expert-model-parallel-size 4")
    sent = step_messages(config, "cuda").collectives
    rows = rows_to_ranks(128, 3, 4, 2)
    assert (
        sent[GroupMessage("all_to_all", rows * 64 * 2, "expert")]
        == 4 * 4 * config.num_micro_batches()
    )
    of_nodes = made(f"{EXPERTS} --expert-model-parallel-size 4 --expert-ranks-per-node 2")
    hops = step_messages(of_nodes, "cuda").collectives
    for group, pairs in (("expert_between", rows_to_ranks(128, 3, 2, 4)), ("expert_within", rows)):
        times = 4 * 4 * config.num_micro_batches()
        assert hops[GroupMessage("all_to_all", pairs * 64 * 2, group)] == times
    experts = 4 * 2 * (2 * 64 * 32 + 64 + 32)  # layers, experts of a rank, matrices and biases
    assert sent[GroupMessage("reduce_scatter", 4 * experts, "expert_data")] == 1
    non_experts = parameters_of_rank(config, 0) - experts
    routers = 4 * 8 * 64  # weights of these in fp32
    assert sent[GroupMessage("all_gather", 2 * non_experts + 2 * routers, "data")] == 1


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("tp", "ep", "etp"), [(2, 4, 1), (4, 8, 1), (4, 2, 2), (4, 1, 1), (2, 2, 4), (1, 2, 2)]
)
def test_messages_of_experts_over_tensor_ranks(tp, ep, etp, sequence_parallel):
    """Bytes are the least possible: one of a tensor-parallel group's ranks sends a token.

    Ranks that divide an expert gather its tokens, and its results' gradients. Without sequence
    parallelism, tensor-parallel ones have the tokens, and their results are summed with the rest.
    """
    flags = f"--tensor-model-parallel-size {tp} --expert-tensor-parallel-size {etp}"
    flags += " --sequence-parallel" * sequence_parallel
    layer = trace(made(EXPERTS, flags, f"--expert-model-parallel-size {ep}"), "cuda").layer
    sent = Counter(m for of in (layer.forward, layer.backward) for m in of.messages())
    h = 2 * 64
    tokens = 2 * 64 * etp // tp
    pairs = rows_to_ranks(tokens, 3, ep, 8 // ep)
    expected = Counter()
    if ep > 1:
        choices = 3 * (4 + 4)  # weight and expert of each
        counts = 8 + ep  # of the rows for each expert and each rank
        for n_bytes, count in ((h * pairs, 4), (choices * pairs, 1), (choices // 2 * pairs, 1)):
            expected["all_to_all", n_bytes, "expert"] += count
        expected["all_to_all", 8 * counts, "expert"] += 1
    group = "expert_tensor" if sequence_parallel and tp > 1 else "expert_inputs"
    if etp > 1 and not (group == "expert_inputs" and etp <= tp):
        for kind in ("all_gather", "reduce_scatter"):
            expected[kind, h * tokens, group] += 2
    if etp > tp:  # weights, with their gradients, and experts of each choice
        of_choices = 2 * 64 * 3 * etp // tp
        for kind, size in (("all_gather", 4), ("all_gather", 8), ("reduce_scatter", 4)):
            expected[kind, size * of_choices, "expert_inputs"] += 1
    actual = {tuple(m): count for m, count in sent.items() if m.group.startswith("expert")}
    assert actual == dict(expected)


def test_tokens_go_over_the_nodes_of_the_machine_where_groups_divide_evenly():
    """The order of ranks decides how many of a group are on a node; a flag comes first."""
    sizes = f"{EXPERTS} --num-experts 16 --expert-model-parallel-size 16"
    step = estimate(made(sizes), FRONTIER, naive_placement(made(sizes), FRONTIER))
    assert step.placement.layout.expert_node == 8
    assert {m.group for m in step_messages(step.config, "cuda").collectives} >= {"expert_between"}
    flagged = naive_placement(made(f"{sizes} --expert-ranks-per-node 1"), FRONTIER)
    assert flagged.layout.expert_node == 1
    pairs = made(f"{sizes} --expert-model-parallel-size 8 --tensor-model-parallel-size 2")
    for order, each in (("tp-dp-pp", 4), ("dp-tp-pp", 1)):
        assert placement_of(pairs, FRONTIER, order, tuple(range(8))).layout.expert_node == each
    other = made(
        f"{sizes} {WIDE} --tensor-model-parallel-size 8 --world-size 128 --rank-order dp-tp-pp"
    )
    naive, placed = (method(other, FRONTIER) for method in (naive_placement, choose_placement))
    assert naive.layout.expert_node == 1 < placed.layout.expert_node
    assert "expert between" in render_placement(other, placed)
    uneven = LayoutSizes(expert_model_parallel_size=18, ranks_per_node=8)
    assert Layout.for_world(18, uneven).expert_node == 1


@pytest.mark.parametrize(("model", "each"), [("", 1), (WIDE, 8)])
def test_tokens_go_to_nodes_or_directly_whichever_is_predicted_to_be_faster(model, each):
    """So a run on a known machine, an estimate and a search choose; each tells of the other way."""
    model = f"{EXPERTS} --num-experts 16 {model}"
    sizes = f"{model} --expert-model-parallel-size 16"
    steps = {n: estimate(made(sizes, f"--expert-ranks-per-node {n}"), FRONTIER) for n in (1, 8)}
    assert min(steps, key=lambda n: steps[n].seconds) == each
    step = estimate(made(sizes), FRONTIER)
    assert step.seconds == steps[each].seconds
    chosen, against = (dispatch_choice(one) for one in (step, steps[9 - each]))
    assert (chosen.seconds, chosen.other_s) == (steps[each].seconds, steps[9 - each].seconds)
    assert (against.seconds, against.other_s) == (chosen.other_s, chosen.seconds)
    flag = "--expert-ranks-per-node"
    assert flag in against.words and flag not in chosen.words
    plan = plan_ranks(made(sizes, "--cluster frontier"), Launch(world_size=16))
    assert plan.mapping.expert_ranks_per_node == each
    flags = f"{FIELDS.partition('--world')[0]} {model}".replace("--micro-batch-size 2", "").split()
    fixed = dict(gbs=(32,), tp=(1,), pp=(1,), ep=(16,), mbs=(2,), recompute=("none",), zero=(1,))
    space = LayoutSpace(make_config(None, flags, 32), "", FRONTIER, (16,), fixed)
    peaks = {n: max(rank.total for rank in one.memory) for n, one in steps.items()}
    for room, chosen in ((57.6 * 2**30, each), (max(peaks[1], peaks[8] - 1), 1)):
        best = search(LayoutSearch(space, room)).estimated[0].layout
        assert best.epn == chosen and f"epn={chosen}" in space.write(best)
    assert f"{flag}={chosen}" in " ".join(command_line_of(space.config(best)))


@pytest.mark.parametrize("each", [1, 2])
def test_the_shared_expert_is_computed_while_tokens_are_under_way(each):
    """Products lie between the start of the first hop and its end, in both passes."""
    ranks = f"--expert-model-parallel-size 4 --expert-ranks-per-node {each} --disable-bias-linear"
    shared = "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-overlap"
    config = made(EXPERTS, ranks, shared)
    layer = trace(config, "cuda").layer
    for run, shared in ((layer.forward, 2), (layer.backward, 4)):
        beside = []
        in_progress = {}
        for step in run.steps:
            if isinstance(step, Post) and step.message.group in ("expert", "expert_between"):
                in_progress[step.number] = 0
            elif isinstance(step, Wait) and step.number in in_progress:
                beside.append(in_progress.pop(step.number))
            elif isinstance(step, Product):
                in_progress = {number: count + 1 for number, count in in_progress.items()}
        assert sorted(beside)[-1] == sum(beside) == shared


@pytest.mark.parametrize(
    "flags",
    [
        "--context-parallel-size 4",
        "--context-parallel-size 4 --cp-comm-type a2a",
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        f"--expert-model-parallel-size 4 {EXPERTS}",
        f"--expert-model-parallel-size 2 --context-parallel-size 4 {EXPERTS}",
        f"--expert-model-parallel-size 8 {TP4} --sequence-parallel {EXPERTS}",
        f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 {EXPERTS}",
    ],
    ids=["ring", "exchange", "both", "ring, TP", "experts", "experts, ring", "folded", "divided"],
)
def test_a_step_is_the_same_work_on_any_layout(flags):
    alone = EXPERTS if EXPERTS in flags else ""
    unsharded, sharded = (estimate(made(fields), FRONTIER) for fields in (alone, flags))
    assert sharded.model_flops == pytest.approx(unsharded.model_flops)


def test_a_ring_is_hidden_by_attention():
    """Each message of a ring is under way during attention, but for the last one of gradients."""
    layer = trace(made("--context-parallel-size 4"), "cuda").layer
    names = [type(step).__name__ for step in layer.forward.steps]
    selected = [name for name in names if name in ("Post", "Attention", "Wait")]
    assert selected == ["Post", "Attention", "Wait"] * 3 + ["Attention"]
    sizes = [m.bytes for m in layer.backward.messages()]
    rows = 2 * 16 * 2 * 64  # keys and values of 16 rows of 2 samples
    assert Counter(sizes) == {2 * rows: 3, 4 * rows: 3}  # and their gradients, in fp32


# -- the search ------------------------------------------------------------------------------------


def test_the_search_divides_experts_and_long_sequences():
    def sizes(flags, tp=1, **choices):
        config = made("--world-size 1 --global-batch-size 32", flags)
        fixed = dict(gbs=(32,), tp=(tp,), pp=(1,))
        space = LayoutSpace(config, "m", FRONTIER, (16,), fixed | choices)
        valid = set()
        for layout in space.sizes(Rejections()):
            with contextlib.suppress(ConfigError):
                space.config(layout)
                valid.add((layout.ep, layout.etp) if tp > 1 else (layout.cp, layout.ep))
        return valid

    assert sizes("") == {(1, 1)}
    assert sizes(EXPERTS) == {(1, 1), (1, 2), (1, 4), (1, 8)}
    assert sizes("", tp=4) == {(1, 0)}
    # Divided experts on 8 ranks would only send more than undivided ones.
    assert sizes(EXPERTS, tp=4) == {(1, 1), (4, 1), (8, 1), (1, 0), (4, 0)}
    assert sizes(EXPERTS, tp=4, ep=(2,)) == {(2, 1), (2, 0)}
    asked = {(n, etp) for n in (1, 2, 4) for etp in (2, 0)} | {(8, 2)}
    assert sizes(EXPERTS, tp=4, etp=(2, 4)) == asked
    assert sizes("", cp=(1, 2, 4)) == {(1, 1), (2, 1), (4, 1)}
    assert sizes(f"--seq-length {2**16}") == {(2**k, 1) for k in range(5)}
