"""What is known to work, and to hang, with RCCL over libfabric on Slingshot. Sources: docs/frontier.md."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.planning.cluster import Cluster

# Variable -> values that are known to work, the one to take first. They are those of examples/frontier/env.sh.
_WORKS: Mapping[str, tuple[str, ...]] = {
    "NCCL_NET": ("OFI", "AWS Libfabric", "Libfabric"),
    "NCCL_SOCKET_IFNAME": ("hsn0,hsn1,hsn2,hsn3",),
    "NCCL_CROSS_NIC": ("1",),
    "NCCL_NET_GDR_LEVEL": ("PHB",),
    "FI_MR_CACHE_MONITOR": ("kdreg2", "userfaultfd"),
    "FI_CXI_DISABLE_HOST_REGISTER": ("1",),
    "FI_CXI_DEFAULT_CQ_SIZE": ("131072",),
    "FI_CXI_DEFAULT_TX_SIZE": ("2048",),
    "FI_CXI_RX_MATCH_MODE": ("hybrid",),
    "FI_CXI_RDZV_PROTO": ("alt_read",),
}
# By machine what is otherwise; without a value it is to be left unset.
_ELSEWHERE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "lumi": {"NCCL_NET_GDR_LEVEL": (), "FI_MR_CACHE_MONITOR": ("userfaultfd",), "FI_CXI_RDZV_PROTO": ("default",)},
}
STRICT = ("NCCL_NET", "FI_MR_CACHE_MONITOR", "FI_CXI_DISABLE_HOST_REGISTER")
"""Those of which other values are worth a word."""
GDR_LEVEL = (
    "OLCF and HPE advise PHB on Frontier; with LUMI's ROCm 7 container PHB and SYS hang jobs of several nodes "
    "(github.com/lumi-ai-factory/laifs-container-recipes/issues/30)"
)


def works_on(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Variable -> values that are known to work on this machine, the one to take first; () is to be left unset."""
    return {**_WORKS, **_ELSEWHERE.get(cluster.name.lower(), {})}


@dataclass(frozen=True)
class _Hang:
    """Versions that were reported to hang together, each by its beginning ("": any), and a variable with which not."""

    versions: Mapping[str, str]
    what: str
    source: str
    unless: tuple[str, str] = ("", "")


_HANGS = (
    _Hang({"aws-ofi-rccl": "", "libfabric": "1.22"}, "PyTorch on several nodes",
          "github.com/ROCm/aws-ofi-rccl/issues/16"),
    _Hang({"ROCm": "7.0", "aws-ofi-nccl": "", "libfabric": "2.1"}, "the first collective of a second group",
          "github.com/lumi-ai-factory/laifs-container-recipes/issues/44", ("FI_MR_CACHE_MONITOR", "userfaultfd")),
)  # fmt: skip
_NAMES = {name.lower(): name for hang in _HANGS for name in hang.versions}
_VERSION = re.compile(rf"\b({'|'.join(_NAMES)})(?: version)?[ :/-]*v?(\d+(?:\.\d+)+)?", re.IGNORECASE)


def versions_in(texts: Iterable[str]) -> dict[str, str]:
    """Which of ROCm, libfabric and the plugins are named by modules, paths or RCCL's log; the versions ("": not told).

    >>> versions_in(["/opt/cray/libfabric/1.22.0/lib64:/home/me/aws-ofi-rccl/lib", "NET/OFI Using aws-ofi-rccl 1.4.0"])
    {'libfabric': '1.22.0', 'aws-ofi-rccl': '1.4.0'}
    """
    found: dict[str, str] = {}
    for text in texts:
        for name, version in _VERSION.findall(text):
            found[_NAMES[name.lower()]] = version or found.get(_NAMES[name.lower()], "")
    return found


def known_hangs(versions: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """What is to be said of versions that were reported to hang together."""
    lines = []
    for hang in _HANGS:
        if environ.get(hang.unless[0]) == hang.unless[1] or not all(
            name in versions and f"{versions[name]}.".startswith(f"{wanted}." if wanted else "")
            for name, wanted in hang.versions.items()
        ):
            continue
        named = ", ".join(f"{name} {versions[name]}".strip() for name in hang.versions)
        unless = f"; not with {'='.join(hang.unless)}" if hang.unless[0] else ""
        lines.append(f"{named}: reported to hang in {hang.what}{unless} ({hang.source})")
    return lines


def hints(versions: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """What to look at where a group hangs."""
    level = environ.get("NCCL_NET_GDR_LEVEL")
    return known_hangs(versions, environ) + ([] if level is None else [f"NCCL_NET_GDR_LEVEL={level}: {GDR_LEVEL}"])
