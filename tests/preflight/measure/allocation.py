"""An allocation of two nodes with four processes each, on this machine, as srun would start them."""
from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from megatron.parallel.launch import detect_launch
from megatron.preflight.measure.conduct import Settings
from megatron.preflight.measure.session import Tasks, measure
from tests.helpers.processes import run_processes_raw

PER_NODE = 4
HOSTS = ("node01", "node02")
_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

# Runs 60 ms of every 200 ms. Says a word, once, when it has stopped it for the first time.
THROTTLE = (
    'while kill -STOP "$1" 2>/dev/null; do echo stopped; exec >/dev/null; sleep 0.14; kill -CONT "$1" 2>/dev/null; '
    "sleep 0.06; done"
)

Act = Callable[[int], "type[Tasks] | None"]
"""What happens to a rank before it takes part: returns the tasks to use, or None for the usual ones."""


def become_task(rank: int, hosts: Sequence[str] = HOSTS, per_node: int = PER_NODE) -> None:
    """Set the variables that srun gives this task."""
    for name in _OTHER_LAUNCHERS:
        os.environ.pop(name, None)
    node, local = divmod(rank, per_node)
    os.environ.update({
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node), "SLURM_NTASKS": str(per_node * len(hosts)),
        "SLURM_STEP_NUM_TASKS": str(per_node * len(hosts)), "SLURM_STEP_NUM_NODES": str(len(hosts)),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{len(hosts)})", "SLURM_STEP_NODELIST": ",".join(hosts),
        "SLURMD_NODENAME": hosts[node], "ROCR_VISIBLE_DEVICES": str(local),
    })  # fmt: skip


def throttle() -> None:
    """Stop this process 70 % of the time from now on, as long as it lives."""
    # Without our pipes: whoever reads them would wait for the throttle, and the throttle for our end.
    command = ["sh", "-c", THROTTLE, "throttle", str(os.getpid())]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert started.stdout is not None
    with started.stdout as word:
        word.readline()


def _take_part(rank: int, seconds: float, act: Act, hosts: Sequence[str], options: dict[str, Any]) -> Any:
    become_task(rank, hosts)
    tasks = act(rank) or Tasks
    settings = Settings(seconds=seconds, backend="gloo", host_s=0.8, **{"disks": ("/tmp",), **options})
    lines: list[str] = []
    results = measure(detect_launch(), settings, lines.append, tasks)
    if results is None:
        return None
    for found in results.ranks.values():  # who was stopped for good would keep the test waiting
        if found.get("pid") != os.getpid():
            subprocess.run(["kill", "-KILL", str(found["pid"])], stderr=subprocess.DEVNULL, check=False)
    return {**results.as_json(options.get("nodes_needed")), "lines": [f.line for f in results.findings], "said": lines}


def healthy(rank: int) -> None:
    """Nothing happens."""


def allocate(
    act: Act = healthy, seconds: float = 15.0, hosts: Sequence[str] = HOSTS, **options: Any
) -> list[tuple[bool, Any]]:
    """(succeeded, what rank 0 found or an error's text) of every rank."""
    return run_processes_raw(
        PER_NODE * len(hosts), _take_part, seconds, act, hosts, options, timeout_s=6 * seconds,
        env={"MASTER_ADDR": "127.0.0.1", "RES_OPTIONS": "timeout:1"},
    )


def found_by_rank_0(*args: Any, **kwargs: Any) -> dict[str, Any]:
    ended, found = allocate(*args, **kwargs)[0]
    assert ended, found
    assert isinstance(found, dict)
    return found
