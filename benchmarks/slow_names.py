"""Measure the time of joining with a slow name server, and count its queries.

    python benchmarks/slow_names.py [--ms 50] [--processes 64]

Needs root: it runs in a separate network namespace, with a name server that delays its answers.
--processes addresses connect to a store such as that of rank 0, once each, as a joining rank does.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

FULL = 9408 * 8
_ALONE = 'ip link set lo up && mount --bind "$0" /etc/resolv.conf && exec "$@"'


def serve_names(late_s: float, asked: list[bytes]) -> None:
    """Answer every question with "no such name", so late."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    while True:
        question, client = server.recvfrom(4096)
        asked.append(question)
        answer = question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12:]
        threading.Timer(late_s, server.sendto, (answer, client)).start()


def join(processes: int, without: bool) -> float:
    """Measure the seconds until the store responds after this many processes have connected."""
    import torch.distributed as dist

    from megatron.parallel.store import without_dns

    limit = timedelta(minutes=30)
    store = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, timeout=limit, wait_for_workers=False
    )
    with without_dns() if without else nullcontext():
        start, kept = time.perf_counter(), []
        for number in range(processes):
            client = socket.socket()
            client.bind((f"127.1.{number // 250}.{1 + number % 250}", 0))
            client.connect(("127.0.0.1", store.port))
            kept.append(client)
        last = dist.TCPStore(
            "127.0.0.1", store.port, None, is_master=False, timeout=limit, wait_for_workers=False
        )
        last.check(["anything"])
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", type=float, default=50.0, help="delay of the name server")
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.alone:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("nameserver 127.0.0.1\n")
            file.flush()
            os.chmod(file.name, 0o644)
            alone = ["unshare", "--mount", "--net", "sh", "-c", _ALONE, file.name]
            raise SystemExit(
                subprocess.run(
                    [*alone, sys.executable, *sys.argv, "--alone"], check=False
                ).returncode
            )
    asked: list[bytes] = []
    threading.Thread(target=serve_names, args=(args.ms / 1000, asked), daemon=True).start()
    for without in (False, True):
        asked.clear()
        seconds = join(args.processes, without)
        said = "no names asked for" if without else f"names after {args.ms:g} ms"
        print(
            f"{said}: {args.processes} processes in {seconds:.2f} s, {len(asked)} questions; at "
            f"this rate {FULL} in {seconds / args.processes * FULL:.0f} s"
        )


if __name__ == "__main__":
    main()
