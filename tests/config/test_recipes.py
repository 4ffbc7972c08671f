"""Recipes for Frontier fit, and pages say what tools print."""

import re
from pathlib import Path

import pytest

from megatron.config.command_line import parse_plan
from megatron.planner.cluster import load_cluster
from megatron.planner.memory import memory_of_ranks
from megatron.planner.placement import choose_placement
from megatron.planner.timing import estimate
from tools import show_recipe
from tools.show_placement import rank_rows
from tools.show_recipe import RECIPES

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "docs/frontier.md", ROOT / "docs/measured/frontier.md"]
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


def name_of(recipe):
    return f"{recipe.model} {recipe.kind} {recipe.note}".strip()


def plan(preset, nodes, *flags):
    return parse_plan(["--preset", preset, "--world-size", str(8 * nodes), *flags])


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_resolves_on_its_nodes_and_fits(recipe):
    config = parse_plan(recipe.argv())
    if "weak" not in recipe.note:
        replica, micro_batches = BY_HAND[f"{recipe.model} {recipe.kind}"]
        assert recipe.nodes * 8 == replica * config.parallel.data_parallel_size
        assert config.num_micro_batches() == micro_batches
    cluster = load_cluster("frontier")
    peak = max(rank.total for rank in memory_of_ranks(config))
    assert peak < 0.8 * cluster.memory_gib * GIB, "a fifth and more is left for what is not counted"
    assert recipe.nodes <= cluster.nodes and recipe.nodes * 8 == config.parallel.world_size


# -- the scripts and the document ------------------------------------------------------------------


def printed(capsys, command):
    """Return the tables that the tool prints."""
    assert show_recipe.main(command.split()) == 0
    return capsys.readouterr().out.strip().split("\n\n")


def test_the_document_has_what_the_tool_prints(capsys):
    text = "".join(page.read_text() for page in DOCUMENTS)
    for table in printed(capsys, "--all --markdown"):
        assert table in text, "docs/frontier.md: put this table in again"


def test_the_planners_first_choices_are_what_the_document_says():
    """Flags, times and memory of first choice and recipe, and the share of a step that is saved."""
    cluster = load_cluster("frontier")
    rows = re.findall(r"^\| (\S+) frontier \| `(.*)` \| (.*) \|$", DOCUMENTS[1].read_text(), re.M)
    recipes = {r.model: r for r in RECIPES if r.kind == "frontier" and not r.note}
    assert [model for model, *_ in rows] == list(recipes)
    for model, flags, documented in rows:
        argv = recipes[model].argv()
        first, ours = (estimate(parse_plan([*argv, *f]), cluster) for f in (flags.split(), []))
        figures = ""
        for one in (first, ours):
            peak = max(rank.total for rank in one.memory)
            figures += f"{one.seconds:.2f} | {peak / GIB:.1f} | "
        assert documented == f"{figures}{100 * (1 - first.seconds / ours.seconds):.1f} %"


@pytest.mark.parametrize(
    ("page", "preset"),
    [("experts", "moe-55b-frontier"), ("long_sequences", "llama-8b-1m-frontier")],
)
def test_recipes_of_other_pages(page, preset, capsys):
    """The recipes on 32 nodes fit, and their pages have the tables that the tool prints."""
    text = (ROOT / f"docs/{page}.md").read_text()
    for table in printed(capsys, f"--preset {preset} --world-size 256 --markdown"):
        assert table in text, f"docs/{page}.md: put this table in again"
    config = plan(preset, 32)
    capacity = load_cluster("frontier").memory_gib * GIB
    assert max(rank.total for rank in memory_of_ranks(config)) < 7 / 8 * capacity
    first = next(iter(rank_rows(config, choose_placement(config, load_cluster("frontier")))))
    assert (first.rank, first.cp, first.ep, first.node) == (0, 0, 0, 0)


def test_the_published_layout_of_experts_is_slower_as_the_page_says():
    result = estimate(plan("moe-55b", 32), load_cluster("frontier"))
    messages = 100 * result.breakdown["layer messages"] / result.seconds
    direct = estimate(plan("moe-55b", 32, "--expert-ranks-per-node", "1"), load_cluster("frontier"))
    text = (ROOT / "docs/experts.md").read_text()
    assert f"takes {result.seconds:.2f} s, {messages:.0f} % of it all-to-alls" in text
    assert f"and {direct.seconds:.2f} s with tokens sent directly" in text


def test_commands_of_the_document_print_what_stands_below_them(capsys):
    text = "".join(page.read_text() for page in DOCUMENTS)
    (command,) = re.findall(r"^python tools/show_recipe\.py ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert printed(capsys, command.replace("\\\n", " "))[2] in text[text.index(command) :]
