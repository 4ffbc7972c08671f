"""Descriptions of machines: the facts of Frontier, limits, and invalid files."""

from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.planner.cluster import CLUSTERS, known_clusters, load_cluster, write_cluster
from megatron.planner.compute import BASES, MEASURED, Figure
from megatron.planner.timing import estimate
from tests.planner.timing.configs import run

FRONTIER = load_cluster("frontier")


def test_links_of_frontier():
    """Links of OLCF's node diagram: each device by its higher neighbours."""
    neighbours = {
        0: {1: 200, 6: 100, 2: 50},
        1: {3: 50, 5: 50},
        2: {3: 200, 4: 100},
        3: {7: 50},
        4: {5: 200, 6: 50},
        5: {7: 50},
        6: {7: 200},
    }
    links = {(a, b): width for a, ends in neighbours.items() for b, width in ends.items()}
    assert FRONTIER.links == load_cluster("lumi").links == links


def test_cores_and_cards_of_frontier():
    """Local rank i of a full node runs on the L3 region of cores 8i to 8i + 7.

    Cards are attached to the odd devices.
    """
    for local_rank, device in enumerate(FRONTIER.local_order):
        assert FRONTIER.cores_of_device[device] == (8 * local_rank, 8 * local_rank + 7)
    assert FRONTIER.nic_on_device == (1, 3, 5, 7)
    for device, card in enumerate(FRONTIER.nic_of_device):
        holder = FRONTIER.nic_on_device[card]
        assert device == holder or FRONTIER.link_gb_per_s(device, holder) == 200


@pytest.mark.parametrize(
    ("machine", "nodes", "partition", "qos", "hours"),
    [
        ("frontier", 91, None, None, 2),
        ("frontier", 92, None, None, 6),
        ("frontier", 183, None, None, 6),
        ("frontier", 184, None, None, 12),
        ("frontier", 9472, "batch", "normal", 12),
        ("frontier", 64, "extended", None, 24),
        ("frontier", 9, "extended", "debug", 2),
        ("leonardo", 64, None, None, 24),
        ("leonardo", 8, None, "boost_qos_dbg", 0.5),
        ("leonardo", 8, None, "boost_qos_lprod", 96),
        ("leonardo", 256, "boost_usr_prod", "boost_qos_bprod", 24),
    ],
)
def test_wall_limits(machine, nodes, partition, qos, hours):
    """On Leonardo two qos replace the limits of its partition; others can only lower them."""
    cluster = load_cluster(machine)
    assert cluster.wall_limit_hours(nodes, partition, qos) == hours
    cluster.check_nodes(nodes)


@pytest.mark.parametrize(
    ("machine", "nodes", "partition", "qos", "message"),
    [
        ("frontier", 65, "extended", None, "65 .*64 .*extended"),
        ("frontier", 9473, None, None, "9472"),
        ("frontier", 1, "gpu", None, "'gpu'.*batch, extended"),
        ("frontier", 1, None, "fast", "'fast'.*normal, debug"),
        ("leonardo", 65, None, None, "65 .*64 .*boost_usr_prod.*boost_qos_bprod"),
        ("leonardo", 9, None, "boost_qos_lprod", "9 .*8 .*boost_qos_lprod"),
    ],
)
def test_no_such_job(machine, nodes, partition, qos, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster(machine).wall_limit_hours(nodes, partition, qos)


def test_no_queue_has_so_many_nodes():
    with pytest.raises(ConfigError, match="257.*256"):
        load_cluster("leonardo").check_nodes(257)


COPY = '[compute.memory.copy]\nvalue = 1250.0\nbasis = "published"\nrange = [0.8, 1.05]'
NARROW = "[0, 2, 50.0], [1, 3, 50.0], [4, 6, 50.0], [5, 7, 50.0], [1, 5, 50.0], [3, 7, 50.0],"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('name = "frontier"\n', "", "name"),
        ("of_device = [0, 0, 1, 1, 2, 2, 3, 3]", "of_device = [0, 1]", "of_device"),
        ("per_node = 8", 'per_node = "8"', "device.per_node"),
        ("[0, 6, 100.0]", "[0, 8, 100.0]", "links.gb_per_s.*0 to 7"),
        ("local_order = [4, 5,", "local_order = [4, 4,", "local_order"),
        ("neighbour_gb_per_s = 4.0", "neighbour_gb_per_s = 0.0", "bands.*neighbour_gb_per_s"),
        ("nodes = 9472", "nodes = 9472\nshared_coers = 2", "shared_coers"),
        (NARROW.replace(" [", "\n    ["), "", "links"),
        (COPY, COPY.replace("published", "guessed"), "memory.copy.basis"),
        ("value = 1000.0", "value = 0", "update_gb_per_s.value"),
        (COPY, COPY.replace("value = 1250.0", "points = [[1.0]]"), "memory.copy.points"),
        (COPY, COPY.replace("copy", "coppy"), "memory.coppy"),
        (COPY, COPY.replace("0.8, 1.05", "1.1, 1.2"), "memory.copy.range"),
        ("[4096.0, 4096.0, 4096.0, 101.5]", "[4096, 4096, 101.5]", "products.float16.points"),
        ("nodes = 9472", 'nodes = 9472\nshared_cores = "two"', "shared_cores"),
        ('type = "cuda"', 'type = "gpu"', "device.type.*'gpu'"),
        ("nodes = 9472", f"nodes = {'[' * 5000}{']' * 5000}", "machine.toml"),
        ("memory_gib = 64.0", f"memory_gib = {'9' * 400}", "device.memory_gib"),
        (
            "peak_tflops = { float32 = 47.9, float16 = 191.5, bfloat16 = 191.5 }",
            "peak_tflops = 5",
            "peak_tflops",
        ),
        ("neighbour_gb_per_s = 4.0", 'neighbour_gb_per_s = "fast"', "bands"),
        ("[1, 2, 129.0]", "[0, 2, 129.0]", "collectives.gb_per_s"),
        ("[1, 2, 129.0]", "[]", "collectives.gb_per_s"),
        ('name = "frontier"', 'include = "frontier"\nname = "frontier"', "include.*'frontier'"),
        (
            'name = "frontier"',
            'include = ["clusters/lumi", "clusters/lumi"]\nname = "frontier"',
            "include.*clusters/lumi",
        ),
        ('name = "frontier"', 'include = [["lumi"]]\nname = "frontier"', "include.*'lumi'"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, old, new, named):
    path = tmp_path / "machine.toml"
    write_cluster(FRONTIER, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=named) as caught:
        load_cluster(path)
    assert str(path) in str(caught.value)


# -- files that include others ---------------------------------------------------------------------

FASTER = """
include = ["clusters/lumi", "devices/mi300a"]
nodes = 5

[device]
memory_gib = 32.0

[compute.products.bfloat16]
points = [[2048, 2048, 2048, 80.0]]
basis = "measured"

[compute.memory]
norm = { value = 1000.0, basis = "assumed" }

[sources]
compute_products = "measured: here"
compute_memory = "assumed: a guess"
"""


def test_a_file_over_those_that_it_includes(tmp_path):
    """Tables are merged key by key, and the last file that has a value decides.

    A figure is replaced as a whole, with its range, basis and source.
    """
    path = tmp_path / "machine.toml"
    path.write_text(FASTER)
    made = load_cluster(path)
    lumi = load_cluster("lumi")
    mi300a = load_cluster("mi300a")
    assert (made.nodes, made.memory_gib, made.name, made.device) == (5, 32.0, "lumi", mi300a.device)
    assert made.devices_per_node == 8 and made.links == FRONTIER.links
    assert made.peak_tflops == {**lumi.peak_tflops, **mi300a.peak_tflops}
    assert made.wall_limits == lumi.wall_limits != FRONTIER.wall_limits
    products = made.compute["products.bfloat16"]
    assert products == Figure(
        "products.bfloat16", ((2048.0, 2048.0, 2048.0, 80.0),), MEASURED, "measured: here"
    )
    assert made.compute["memory.norm"].source == "assumed: a guess"
    for name in ("memory.copy", "products.float16", "kernel_s"):
        assert made.compute[name] == mi300a.compute[name] != lumi.compute[name]
    assert made.compute["hop_within_s"] == lumi.compute["hop_within_s"]


FIGURE = "[compute]\nkernel_s = {{ {} }}"
ROWS = "[compute.products]\nfloat16 = {{ points = {}, basis = 'measured' }}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("compute = 5", ["compute:", "5", "[compute]"]),
        ("[compute]\nmemory = 3", ["compute.memory:", "3", "[compute.memory]"]),
        ("[compute]\nkernel_s = 5e-6", ["compute.kernel_s:", "5e-06", "value", "seconds", "basis"]),
        (FIGURE.format("value = '5'"), ["compute.kernel_s.value:", "'5'", "seconds", "quotation"]),
        (FIGURE.format("value = -5"), ["compute.kernel_s.value:", "-5", "at least 0"]),
        (FIGURE.format("basis = 'measured'"), ["compute.kernel_s:", "value", "seconds"]),
        (FIGURE.format("value = 5"), ["compute.kernel_s.basis:", *map('"{}"'.format, BASES)]),
        (FIGURE.format("value = 5, points = [[5]]"), ["compute.kernel_s:", "value", "points"]),
        (FIGURE.format("value = 5, bassis = 'measured'"), ["kernel_s.bassis:", "'measured'"]),
        (
            FIGURE.format("value = 5, basis = 'measured', range = 2"),
            ["compute.kernel_s.range:", "2", "[0.9, 1.2]"],
        ),
        ("[compute]\nkernels_s = 5", ["compute.kernels_s:", "5", "kernel_s?"]),
        ('"compute.kernel_s" = 5', ["compute.kernel_s:", "[compute]", "kernel_s below"]),
        (ROWS.format(5), ["compute.products.float16.points:", "5", "4 numbers", "TFLOP/s"]),
        (ROWS.format([]), ["compute.products.float16.points:", "4 numbers", "TFLOP/s"]),
        (ROWS.format([[8, 8, 8, "9"]]), ["float16.points[0][3]:", "'9'", "quotation"]),
        ("sources = 5", ["sources:", "5"]),
        ("[sources]\ncompute_products = 5", ["sources.compute_products:", "5"]),
    ],
)
def test_a_malformed_figure_is_refused_with_what_to_write(tmp_path, text, named):
    """The file itself is named, and none that it includes."""
    path = tmp_path / "machine.toml"
    path.write_text(f'include = ["clusters/lumi"]\n{text}\n')
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    for fragment in (str(path), *named):
        assert fragment in str(caught.value)
    assert "lumi" not in str(caught.value) and "mi250x" not in str(caught.value)


def test_the_file_that_holds_an_inherited_value_is_named(tmp_path):
    """LUMI's file includes Frontier's, which has the links of eight devices."""
    path = tmp_path / "machine.toml"
    path.write_text('include = ["clusters/lumi"]\n[device]\nper_node = 4\n')
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    for fragment in (str(path), "links.gb_per_s", str(CLUSTERS / "frontier.toml"), "0 to 3"):
        assert fragment in str(caught.value)


def test_a_figure_does_not_take_the_source_of_the_one_that_it_replaces(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(FASTER.replace('compute_products = "measured: here"\n', ""))
    with pytest.raises(ConfigError, match=r"machine.toml.*compute_products_bfloat16"):
        load_cluster(path)


# -- the machines of this package ------------------------------------------------------------------


@pytest.mark.parametrize("name", known_clusters())
def test_products_of_each_machine_are_below_its_peak(name):
    """Clocks and power leave no device more than 95 % of its peak in 16 bits, 99 % in fp32."""
    machine = load_cluster(name)
    products = {
        key.removeprefix("products."): figure
        for key, figure in machine.compute.items()
        if key.startswith("products.")
    }
    assert products
    for dtype, figure in products.items():
        assert figure.source
        most = 0.99 if dtype == "float32" else 0.95
        assert max(rate for *_, rate in figure.points) <= most * machine.peak_tflops[dtype]


def test_the_measured_example_plans():
    cluster = load_cluster(Path(__file__).parents[2] / "examples" / "local" / "two-cores.toml")
    plan = estimate(run("--no-bf16 --world-size 2 --global-batch-size 8"), cluster)
    assert 0.01 < plan.seconds < 10
    used = {basis for basis, figures in plan.confidence.by_basis.items() if figures}
    assert used == {"measured", "assumed"}
