"""What a process reads about its node."""
from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron.preflight.measure import facts
from megatron.preflight.measure.links import network_of

ROOT = Path(__file__).resolve().parents[3]


def test_the_revision_is_gits(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert facts.git_revision(tmp_path) == ""
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    assert facts.git_revision(tmp_path) == git("rev-parse", "HEAD")
    git("pack-refs", "--all")
    assert facts.git_revision(tmp_path) == git("rev-parse", "HEAD")
    git("checkout", "-q", "--detach")
    assert facts.git_revision(tmp_path) == git("rev-parse", "HEAD")


def test_only_uncorrected_errors_count(tmp_path: Path) -> None:
    for card, text in (("card0", "ue: 0\nce: 5\n"), ("card1", "ue: 2\nce: 0\nde: 0\n")):
        folder = tmp_path / "class/drm" / card / "device/ras"
        folder.mkdir(parents=True)
        (folder / "umc_err_count").write_text(text)
    (tmp_path / "devices/system/edac/mc/mc0").mkdir(parents=True)
    (tmp_path / "devices/system/edac/mc/mc0/ue_count").write_text("1\n")
    assert facts.error_counters(str(tmp_path)) == {"card1": 2, "mc0": 1}
    assert facts.error_counters(str(tmp_path / "absent")) == {}


def test_a_disk_is_written_and_left_as_it_was(tmp_path: Path) -> None:
    found = facts.disk_facts(str(tmp_path), file_bytes=2**24)
    assert found["write_gb_per_s"] > 0
    disk = os.statvfs(tmp_path)
    assert found["free_gib"] == pytest.approx(disk.f_bavail * disk.f_frsize / 2**30, rel=0.1)
    assert list(tmp_path.iterdir()) == []
    assert "FileNotFoundError" in facts.disk_facts(str(tmp_path / "absent"))["error"]


def asked(port: int, seconds: float = 50.0) -> dict[str, float]:
    return facts.clock_skew("127.0.0.1", port, seconds)


def test_the_clocks_difference_is_within_its_bound() -> None:
    """A server whose clock is 5 s ahead, our own, and one that is silent."""
    ahead = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    ahead.bind(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            request, sender = ahead.recvfrom(64)
            ahead.sendto(request + b" " + str(time.time_ns() + 5_000_000_000).encode(), sender)

    threading.Thread(target=serve, daemon=True).start()
    own = facts.ClockServer()
    for port, skew in ((ahead.getsockname()[1], -5), (own.port, 0)):
        found = asked(port)
        assert found["bound_s"] >= 0 and abs(found["skew_s"] - skew) <= found["bound_s"] + 1e-5
    own.close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert asked(silent.getsockname()[1], 0.05) == {}


def test_what_has_become_of_a_process(tmp_path: Path) -> None:
    def state(looks: str) -> tuple[str, float]:
        """Of a process that is found in these states, one after the other."""
        left = iter(looks)
        (tmp_path / "7").mkdir(exist_ok=True)

        def look(_: float = 0.0) -> None:
            (tmp_path / "7/stat").write_text(f"7 (a ) b) {next(left, 'R')} 1 7")

        look()
        return facts.process_state(7, 1.0, str(tmp_path), look)

    assert [state(looks)[1] for looks in ("R" * 20, "T" * 20, "TTTTtRRRRR" * 2)] == [0, 1, 0.5]
    assert "50%" in state("TTTTtRRRRR" * 2)[0]
    assert len({state(letter * 20)[0] for letter in "DZS"}) == 3
    assert facts.process_state(8, 1.0, str(tmp_path))[1] == 0
    assert facts.process_state(os.getpid(), 0.0)[1] == 0


def test_a_process_is_found_by_the_variables_of_its_launcher(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "7"}
    for process, rank in ((40, 3), (41, 33), (42, 3), (5, 3)):
        (tmp_path / str(process)).mkdir()
        text = "".join(f"{name}={value}\0" for name, value in {**step, "SLURM_PROCID": rank, "A": 1}.items())
        (tmp_path / str(process) / "environ").write_text(text)

    def found(rank: int, **environ: str) -> int | None:
        return facts.find_process(rank, environ, str(tmp_path))

    assert (found(3, **step, SLURM_PROCID="0"), found(33, **step, SLURM_PROCID="0")) == (42, 41)
    assert found(4, **step, SLURM_PROCID="0") is found(3, **{**step, "SLURM_STEP_ID": "8"}, SLURM_PROCID="0") is None
    assert found(3) is None
    assert facts.find_process(0, {}) is None


def test_the_last_network_that_rccl_names_counts(tmp_path: Path) -> None:
    log = tmp_path / "rccl.log"
    log.write_text("n1:7:9 [0] NCCL INFO NET/OFI Using aws-ofi-rccl 1.4.0\nn1:7:9 [0] NCCL INFO Using network Socket\n"
                   "n1:7:9 [0] NCCL INFO Using network AWS Libfabric\n")  # fmt: skip
    found = network_of(log)
    assert (found["network"], found["versions"]["aws-ofi-rccl"]) == ("AWS Libfabric", "1.4.0")
    assert network_of(tmp_path / "absent")["network"] == network_of(None)["network"] == ""
