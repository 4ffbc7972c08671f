"""The planted faults fit the present code: `make prove ONLY=planted-faults` can plant each."""

import shutil
import sys
from pathlib import Path

import pytest

from megatron.kernels.build import SOURCES
from tests.helpers.kernels import NUMERICS, ROOT
from tests.prove import planted_faults
from tests.prove.planted_faults import Fault, faults, outdated, topics


def test_each_fault_can_be_planted():
    planted = faults()
    assert {fault.name: reason for fault in planted if (reason := outdated(fault))} == {}
    assert len({fault.name for fault in planted}) == len(planted)
    assert all(fault.old != fault.new for fault in planted)


def test_every_kernel_has_numerical_tests_and_faults_on_the_simulator():
    assert {topic.tests for topic in topics().values()} == {
        f"{NUMERICS}/{file.name}" for file in (ROOT / NUMERICS).glob("test_*.py")
    }
    kernels = {file.stem for file in SOURCES.glob("*.cpp")} - {"library"}
    assert {name for topic in topics().values() for name in topic.sources} == kernels
    files = [Path(fault.file).name for fault in faults() if fault.topics]
    assert not {name for name in kernels if files.count(f"{name}.cpp") < 2}
    assert {topic for fault in faults() for topic in fault.topics} == set(topics())


@pytest.mark.slow
def test_a_test_that_fails_without_a_fault_finds_none(tmp_path, monkeypatch, capsys):
    (tmp_path / "figures.py").write_text("value = 1\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    for name, value in [("right", 1), ("wrong", 2)]:
        text = f"from figures import value\ndef test():\n    assert value == {value}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(planted_faults, "copy_tree", lambda to: shutil.copytree(tmp_path, to))
    monkeypatch.setattr(planted_faults, "outdated", lambda fault: "")

    def prove(test):
        fault = Fault("some-fault", "figures.py", old="1", new="3", found_by=(test,))
        monkeypatch.setattr(planted_faults, "faults", lambda: [fault])
        monkeypatch.setattr(sys, "argv", ["planted_faults", "--jobs", "1"])
        return planted_faults.main()

    assert prove("test_right.py") == 0
    assert "test_right.py::test" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="test_wrong.py::test"):
        prove("test_wrong.py")
