"""What a process reads about its node."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron.preflight.measure import facts
from megatron.preflight.measure.links import network_name

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


def test_copies_of_the_code_are_told_apart(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name / "megatron").mkdir(parents=True)
        (tmp_path / name / "megatron/x.py").write_text(text)
    one, same, other = (facts.code_version(tmp_path / name) for name in "abc")
    assert one == same != other
    assert facts.code_version(ROOT) == facts.git_revision(ROOT) or not (ROOT / ".git").exists()


def test_memory_is_in_gib(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       526329856 kB\nMemFree: 1 kB\nMemAvailable:   501 kB\n")
    assert facts.memory_facts(str(tmp_path / "meminfo")) == {"MemTotal": 501.95, "MemAvailable": 0.0}
    assert facts.memory_facts(str(tmp_path / "absent")) == {}


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


def until_answered(port: int) -> dict[str, float]:
    """A clock's server that gets no time of its core for a second gives no answer: asked again then."""
    for _ in range(20):
        if found := facts.clock_skew("127.0.0.1", port):
            return found
    raise AssertionError("the server never answers")


def test_the_clocks_difference_is_within_its_bound() -> None:
    """A server whose clock is 5 s ahead, and answers late."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            request, sender = server.recvfrom(64)
            time.sleep(0.005)
            server.sendto(request + b" " + str(time.time_ns() + 5_000_000_000).encode(), sender)
            time.sleep(0.005)

    threading.Thread(target=serve, daemon=True).start()
    found = until_answered(server.getsockname()[1])
    assert found["bound_s"] >= 0.0025
    assert abs(found["skew_s"] + 5) <= found["bound_s"] + 1e-5


def test_our_own_clock_server_and_one_that_is_not_there() -> None:
    server = facts.ClockServer()
    found = until_answered(server.port)
    assert abs(found["skew_s"]) <= found["bound_s"] + 1e-5
    server.close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert facts.clock_skew("127.0.0.1", silent.getsockname()[1], seconds=0.2) == {}


def sleeping(**variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], env={**os.environ, **variables})


def test_what_has_become_of_a_process() -> None:
    with sleeping() as sleeper:
        try:
            text = f"process {sleeper.pid} runs, but does not answer"
            assert facts.process_state(sleeper.pid, 0.1) == (text, 0)
            sleeper.send_signal(signal.SIGSTOP)
            os.waitpid(sleeper.pid, os.WUNTRACED)
            text = f"process {sleeper.pid} is stopped 100% of the time"
            assert facts.process_state(sleeper.pid, 0.1) == (text, 1)
        finally:
            sleeper.kill()
    assert facts.process_state(sleeper.pid, 0.1) == (f"process {sleeper.pid} has ended", 0)
    assert facts.process_state(None) == ("it has no process on its node", 0)


def test_a_process_is_found_by_the_variables_of_its_launcher() -> None:
    step = {"SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "7"}
    with sleeping(**step, SLURM_PROCID="3") as one, sleeping(**step, SLURM_PROCID="33") as other:
        try:
            deadline = time.monotonic() + 200
            # Until each is a process of its own.
            while any(facts.find_process(n, {**step, "SLURM_PROCID": "0"}) is None for n in (3, 33)):
                assert time.monotonic() < deadline
            assert facts.find_process(3, {**step, "SLURM_PROCID": "0"}) == one.pid
            assert facts.find_process(33, {**step, "SLURM_PROCID": "0"}) == other.pid
            assert facts.find_process(3, {**step, "SLURM_STEP_ID": "8", "SLURM_PROCID": "0"}) is None
            assert facts.find_process(3, {}) is None
        finally:
            one.kill()
            other.kill()


def test_versions_name_what_differs_between_installations() -> None:
    found = facts.versions()
    assert found["torch"] == __import__("torch").__version__
    assert found["megatron"] == facts.code_version()
    assert set(found) == {"python", "torch", "rocm or cuda", "GPU driver", "fused kernels", "megatron", "kernel"}


def test_the_digest_tells_libraries_apart(tmp_path: Path) -> None:
    assert facts.library_digests(tmp_path) == "none"
    (tmp_path / "libx.so").write_bytes(b"1")
    one = facts.library_digests(tmp_path)
    (tmp_path / "libx.so").write_bytes(b"2")
    assert "none" != one != facts.library_digests(tmp_path)


def test_the_last_network_that_rccl_names_counts(tmp_path: Path) -> None:
    log = tmp_path / "rccl.log"
    log.write_text("n1:7:9 [0] NCCL INFO NET/OFI x\nn1:7:9 [0] NCCL INFO Using network Socket\n"
                   "n1:7:9 [0] NCCL INFO Using network AWS Libfabric\n")  # fmt: skip
    assert network_name(log) == "AWS Libfabric"
    assert network_name(tmp_path / "absent") == network_name(None) == ""
