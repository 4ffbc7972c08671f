"""The planted faults fit the code of today: `make prove ONLY=planted-faults` can plant each."""

from __future__ import annotations

from tests.prove.planted_faults import MOST_BY_CAMPAIGN, faults, outdated


def test_each_fault_can_be_planted() -> None:
    planted = faults()
    assert {fault.name: reason for fault in planted if (reason := outdated(fault))} == {}
    assert len({fault.name for fault in planted}) == len(planted)
    assert all(fault.old != fault.new for fault in planted)
    assert sum(bool(fault.campaign) for fault in planted) <= MOST_BY_CAMPAIGN
