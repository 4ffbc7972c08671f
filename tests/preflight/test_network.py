"""Versions that hang together, by what modules, paths and RCCL's log say."""
from __future__ import annotations

import pytest

from megatron.preflight.network import known_hangs, versions_in

LUMI_LOG = "\n".join([
    "RCCL version : 2.26.6-HEAD:64f48b6", "ROCm version : 7.0.2.0-56", "NET/OFI Initializing aws-ofi-nccl 1.20.0",
    "NET/OFI Using Libfabric version 2.1",
])  # fmt: skip


@pytest.mark.parametrize(("texts", "named"), [
    ([LUMI_LOG], ["ROCm 7.0.2.0", "aws-ofi-nccl 1.20.0", "libfabric 2.1"]),
    ([LUMI_LOG.replace("7.0.2", "7.1.2")], []),
    (["libfabric/1.22.0", "/home/me/aws-ofi-rccl/lib"], ["libfabric 1.22.0", "aws-ofi-rccl"]),
    (["libfabric/1.22.0", "rocm/6.2.4", "aws-ofi-nccl/1.19.0"], []),  # HPE's own recipe
    (["libfabric/1.220.0", "aws-ofi-rccl"], []), (["aws-ofi-rccl"], []),
    (["libfabric/2.3.1", "aws-ofi-nccl-1.19.2", "rocm/7.1.1"], []),  # Frontier since May 2026
])  # fmt: skip
def test_known_hangs(texts: list[str], named: list[str]) -> None:
    found = known_hangs(versions_in(texts), {})
    assert len(found) == bool(named) and all(name in found[0] for name in named)


def test_a_setting_with_which_they_do_not_hang() -> None:
    assert known_hangs(versions_in([LUMI_LOG]), {"FI_MR_CACHE_MONITOR": "userfaultfd"}) == []
