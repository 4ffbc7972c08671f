"""Memory of a machine, and the limits of the groups that a job is in."""

import pytest

from megatron.parallel.host_memory import available_bytes, memory_limit_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("line", "limit", "available"),
    [
        ("0::/job/step", 3, 1.5),
        ("4:memory:/job/step", 2, 0.5),
        ("3:cpuset:/job", None, 7),
    ],
)
def test_a_limit_of_the_job_is_the_memory(tmp_path, line, limit, available):
    """A group without a limit of its own has that of the group around it."""
    for name, value in {
        "job/step/memory.max": "max",
        "job/memory.max": 3 * GIB,
        "job/memory.current": 2 * GIB,
        "job/memory.stat": f"anon 1\ninactive_file {GIB // 2}",
        "memory/job/memory.limit_in_bytes": 2 * GIB,
        "memory/job/memory.usage_in_bytes": 2 * GIB,
        "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    membership = tmp_path / "cgroup"
    membership.write_text(f"9:name=systemd:/\n{line}\n")
    information = tmp_path / "meminfo"
    information.write_text(f"MemTotal: {9 << 20} kB\nMemAvailable: {7 << 20} kB\n")
    everything = memory_limit_bytes(tmp_path / "none", tmp_path)
    assert memory_limit_bytes(membership, tmp_path) == (limit * GIB if limit else everything)
    assert available_bytes(membership, tmp_path, information) == available * GIB
