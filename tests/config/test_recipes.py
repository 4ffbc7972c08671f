"""Recipes for Frontier fit, and pages say what tools print."""

import re
from pathlib import Path

import pytest

from megatron.config.command_line import parse_plan
from megatron.planner.cluster import load_cluster
from megatron.planner.placement import choose_placement
from megatron.planner.timing import estimate
from tools import plan
from tools.show_placement import rank_rows

ROOT = Path(__file__).resolve().parents[2]
MEASURED = (ROOT / "docs/measured/frontier.md").read_text()
RECIPES = {  # preset, nodes and more flags by name
    name: (preset, int(nodes), *flags.split())
    for name, nodes, preset, flags in re.findall(
        r"^\| (.+) \| (\d+) \| `--preset (\S+)(.*)` \|$",
        (ROOT / "docs/frontier.md").read_text(),
        re.MULTILINE,
    )
}
GIB = 2**30
# By hand, from the table of facts and the presets: GCDs of a replica, and its micro-batches on the
# script's nodes.
BY_HAND = {
    "1.4B paper": (1, 8),
    "1.4B frontier": (1, 2),
    "22B paper": (8, 40),
    "22B frontier": (8, 40),
    "175B paper": (64, 40),
    "175B frontier": (64, 40),
    "1T paper": (512, 320),
    "1T frontier": (256, 160),
}


@pytest.fixture(autouse=True)
def no_cluster_of_the_environment(monkeypatch):
    monkeypatch.delenv("MEGATRON_CLUSTER", raising=False)


def planned(preset, nodes, *flags):
    return parse_plan(["--preset", preset, "--world-size", str(8 * nodes), *flags])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resolves_on_its_nodes_and_fits(recipe):
    """The pages have its predicted memory and time; a fifth of the memory and more is left."""
    config = planned(*RECIPES[recipe])
    if recipe in BY_HAND:
        replica, micro_batches = BY_HAND[recipe]
        assert config.parallel.world_size == replica * config.parallel.data_parallel_size
        assert config.num_micro_batches() == micro_batches
    cluster = load_cluster("frontier")
    step = estimate(config, cluster)
    full = max(step.memory, key=lambda rank: rank.total)
    assert full.total < 0.8 * cluster.memory_gib * GIB
    rest = full.logits + full.buffers + full.temporary
    optimizer = full.master + full.moments
    sizes = (full.weights, full.gradients, optimizer, full.activations, rest, full.total)
    parts = "recompute", "bubble", "layer messages", "pipeline messages", "data-parallel"
    shares = [step.mfu, *(step.breakdown[part] / step.seconds for part in parts)]
    memory = " | ".join([recipe, str(full.rank), *(f"{size / GIB:.1f}" for size in sizes)])
    time = " | ".join([recipe, f"{step.seconds:.2f}", *(f"{100 * s:.1f} %" for s in shares)])
    assert f"| {memory} |" in MEASURED and f"| {time} |" in MEASURED


# -- the scripts and the document ------------------------------------------------------------------


def test_the_planners_first_choices_are_what_the_document_says():
    """Flags, times and memory of first choice and recipe, and the share of a step that is saved."""
    cluster = load_cluster("frontier")
    rows = re.findall(r"^\| (\S+ frontier) \| `(.*)` \| (.*) \|$", MEASURED, re.M)
    assert len(rows) == 4
    for recipe, flags, documented in rows:
        choices = (flags.split(), [])
        first, ours = (estimate(planned(*RECIPES[recipe], *f), cluster) for f in choices)
        figures = ""
        for one in (first, ours):
            peak = max(rank.total for rank in one.memory)
            figures += f"{one.seconds:.2f} | {peak / GIB:.1f} | "
        assert documented == f"{figures}{100 * (1 - first.seconds / ours.seconds):.1f} %"


def test_every_rank_of_a_recipe_has_a_place():
    config = planned("moe-55b-frontier", 32)
    rows = list(rank_rows(config, choose_placement(config, load_cluster("frontier"))))
    assert [row[:2] for row in rows] == [(str(rank), str(rank // 8)) for rank in range(256)]


def test_the_published_layout_of_experts_is_slower_as_the_page_says():
    result = estimate(planned("moe-55b", 32), load_cluster("frontier"))
    messages = 100 * result.breakdown["layer messages"] / result.seconds
    direct = estimate(
        planned("moe-55b", 32, "--expert-ranks-per-node", "1"), load_cluster("frontier")
    )
    text = (ROOT / "docs/experts.md").read_text()
    assert f"takes {result.seconds:.2f} s, {messages:.0f} % of it all-to-alls" in text
    assert f"and {direct.seconds:.2f} s with tokens sent directly" in text


def test_commands_of_the_document_print_what_stands_below_them(capsys):
    (command,) = re.findall(r"^python tools/plan\.py ((?:.*\\\n)*.*)$", MEASURED, re.MULTILINE)
    assert plan.main([*command.replace("\\\n", " ").split(), "--processes", "1"]) == 0
    tables = re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.MULTILINE)
    below = MEASURED[MEASURED.index(command) :]
    assert all(table in below for table in tables[1:3]), "put these tables in again"
