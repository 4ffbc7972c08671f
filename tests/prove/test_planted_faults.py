"""The planted faults fit the code of today: `make prove ONLY=planted-faults` can plant each."""

from __future__ import annotations

from pathlib import Path

from megatron.kernels.build import SOURCES
from tests.helpers.kernels import NUMERICS, ROOT
from tests.prove.planted_faults import MOST_BY_CAMPAIGN, faults, outdated, topics


def test_each_fault_can_be_planted() -> None:
    planted = faults()
    assert {fault.name: reason for fault in planted if (reason := outdated(fault))} == {}
    assert len({fault.name for fault in planted}) == len(planted)
    assert all(fault.old != fault.new for fault in planted)
    assert sum(bool(fault.campaign) for fault in planted) <= MOST_BY_CAMPAIGN


def test_every_kernel_has_numerical_tests_and_faults_on_the_simulator() -> None:
    assert {topic.tests for topic in topics().values()} == {
        f"{NUMERICS}/{file.name}" for file in (ROOT / NUMERICS).glob("test_*.py")
    }
    kernels = {file.stem for file in SOURCES.glob("*.cpp")} - {"library"}
    assert {name for topic in topics().values() for name in topic.sources} == kernels
    files = [Path(fault.file).name for fault in faults() if fault.topics]
    assert not {name for name in kernels if files.count(f"{name}.cpp") < 2}
    assert {topic for fault in faults() for topic in fault.topics} == set(topics())
