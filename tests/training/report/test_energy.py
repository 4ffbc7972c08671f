"""Energy of a node, from files and libraries that stand for the system's."""

import math
from types import SimpleNamespace

import pytest

from megatron.training.report.energy import EnergyMeter


def no_library(name):
    raise ImportError(name)


def only(name, library):
    """Return a loader that finds this library alone."""
    return lambda asked: library if asked == name else no_library(asked)


def zone(root, location, name, microjoules, largest=10**9):
    folder = root / "class" / "powercap" / location
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{largest}\n")
    return folder / "energy_uj"


def cray(root, text):
    file = root / "cray" / "pm_counters" / "energy"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_cray_node_is_counted_as_a_whole(tmp_path):
    zone(tmp_path, "intel-rapl:0", "package-0", 5)  # a part of the node's
    file = cray(tmp_path, "3000 J 1668157513361422 us\n")
    meter = EnergyMeter(root=tmp_path, load=no_library)
    assert "Cray" in meter.source
    file.write_text("3450 J 1668157514361422 us\n")
    assert meter.used_j() == 450.0
    file.write_text("3460 J 1668157515361422 us\n")
    assert meter.used_j() == 10.0
    file.write_text("7 J 1668157515361422 us\n")  # the node's controller has started again
    assert math.isnan(meter.used_j())
    file.write_text("9 J 1668157515361422 us\n")
    assert meter.used_j() == 2.0
    file.unlink()
    assert math.isnan(meter.used_j()) and math.isnan(meter.used_j())


def test_processors_and_memory_are_summed_and_their_counters_begin_again(tmp_path):
    packages = [zone(tmp_path, f"intel-rapl:{i}", f"package-{i}", 999_000_000) for i in range(2)]
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 0)  # a part of the package
    zone(tmp_path, "intel-rapl:2", "psys", 0)  # contains the package
    meter = EnergyMeter(root=tmp_path, load=no_library)
    assert meter.source == "RAPL"
    packages[0].write_text("999500000\n")
    packages[1].write_text("2000000\n")
    memory.write_text("1250000\n")
    assert meter.used_j() == pytest.approx(0.5 + (1000 - 999 + 2) + 0.25)


def test_without_a_counter_or_permission_energy_is_unknown(tmp_path):
    meter = EnergyMeter(root=tmp_path, load=no_library)
    assert meter.source == "" and math.isnan(meter.used_j())
    file = zone(tmp_path, "intel-rapl:0", "package-0", 5)
    file.unlink()
    file.mkdir()  # which cannot be read by root either
    assert EnergyMeter(root=tmp_path, load=no_library).source == ""
    cray(tmp_path, "out of order\n")
    assert EnergyMeter(root=tmp_path, load=no_library).source == ""


def test_other_ranks_of_a_node_have_no_part(tmp_path):
    cray(tmp_path, "3000 J 1668157513361422 us\n")
    meter = EnergyMeter(False, tmp_path, no_library)
    assert (meter.source, meter.used_j(), meter.used_j()) == ("", 0.0, 0.0)


def test_gpus_are_added_to_processors(tmp_path):
    file = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    used = {"a": 100, "b": 200}
    amd = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: list(used),
        # 15.3 microjoules are a count of the MI200 series
        amdsmi_get_energy_count=lambda gpu: {
            "energy_accumulator": used[gpu],
            "counter_resolution": 15.3,
        },
    )

    meter = EnergyMeter(root=tmp_path, load=only("amdsmi", amd))
    assert "RAPL" in meter.source and "amdsmi" in meter.source
    file.write_text("3000000\n")
    used |= {"a": 1_000_100, "b": 2_000_200}
    assert meter.used_j() == pytest.approx(3.0 + 3 * 15.3)
