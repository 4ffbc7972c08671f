"""What a process tells about itself and its host when ranks meet or part."""
from __future__ import annotations

import contextlib
import ctypes
import re
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch


def list_places(places: Sequence[tuple[int, str]]) -> str:
    """Ranks and their places, the first sixteen."""
    shown = "; ".join(f"rank {rank} on {place}" for rank, place in places[:16])
    return shown + (f"; {len(places) - 16} more" if len(places) > 16 else "")


def show_duration(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    return f"{seconds / 60:g} minutes" if seconds >= 120 else f"{seconds:g} s"


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index}"


def device_identity(device: torch.device) -> str:
    """What tells this device from the others of its node; "" for the CPU or where torch does not know."""
    if device.type == "cpu":
        return ""
    if not torch.version.hip:
        # Parts of one card share its bus address but not the uuid.
        return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    # The dies of an MI250X have one bus address each. The parts of a divided MI300 share theirs; where a process sees
    # several of them, the number tells them apart.
    address = bus_address(device)
    return f"{address}:{device.index}" if address else ""


def bus_address(device: torch.device) -> tuple[int, ...]:
    """PCI domain, bus and device; empty for the CPU or where torch does not know."""
    if device.type == "cpu":
        return ()
    properties = torch.cuda.get_device_properties(device)
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return tuple(int(part or 0) for part in address) if address[1] is not None else ()


def host_name_is_local() -> bool:
    """Whether this host's own name resolves to an address that it can bind; gloo needs that without an interface."""
    try:
        with socket.socket() as probe:
            probe.bind((socket.gethostbyname(socket.gethostname()), 0))
    except OSError:
        return False
    return True


def plain(text: str) -> str:
    """A text as the store takes it: bytes of the environment that are no characters are written out."""
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def without_dns() -> Iterator[None]:
    """Let this process look for names of hosts in /etc/hosts alone (under glibc; elsewhere nothing changes).

    For the process whose store others join: torch asks for the name of every address that connects, in the store's only
    thread and for its log. Where an answer takes 50 ms, those of 75,264 ranks would take an hour.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", lambda database, services: None)
    try:
        text = Path("/etc/nsswitch.conf").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    usual = re.search(r"^\s*hosts:([^#\n]*)", text, re.MULTILINE)
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", (usual[1].strip() if usual else "files dns").encode())


def raise_file_limit() -> None:
    """Allow as many open connections as this user may have: the store keeps one per rank."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
