"""--stage-data-to: the processes that read data read copies on a disk of their own node."""
from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron.config import Config
from megatron.data.datasets import data_prefixes
from megatron.data.staging import stage
from megatron.errors import LaunchError
from megatron.parallel.topology import Topology
from megatron.training.streams import reads_data

# A node copies what fits on its disk, at the speed of a file system that all nodes ask at once.
WAIT_S = 4 * 3600.0


def staged_locations(config: Config, topology: Topology, say: Callable[[str], None]) -> dict[str, str]:
    """Where this process reads each prefix from: {} where nothing is staged. All ranks call it.

    Nobody goes on before all copies are made: ranks that have none to wait for would meet the others in a collective
    whose timeout is much shorter.
    """
    target = config.data.stage_data_to
    if target is None:
        return {}
    prefixes = data_prefixes(config)
    if not prefixes:
        return {}
    folder = os.path.expandvars(os.path.expanduser(target))
    if "$" in folder:
        say(f" note: --stage-data-to {target} names a variable that is not set: data are read where they are")
        return {}
    locations: dict[str, str] = {}
    if reads_data(config, topology):
        locations = stage(prefixes, folder, say=lambda line: say(f" {line}"), wait_s=WAIT_S)
    elsewhere = sum(prefix == location for prefix, location in locations.items())
    processes = wait_for_all(topology, incomplete=elsewhere > 0)
    if processes:
        say(f" note: --stage-data-to {folder}: {processes} of {topology.world.size} processes read some data elsewhere")
    return locations


def wait_for_all(
    topology: Topology, *, incomplete: bool, store: dist.Store | None = None,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Wait, by the store and not by a collective, until every rank has come here; how many were `incomplete`."""
    if topology.world.size == 1:
        return int(incomplete)
    store = store or dist.distributed_c10d._get_default_store()
    store.add("staging/incomplete", int(incomplete))
    if store.add("staging/done", 1) == topology.world.size:
        store.set("staging/all", "")
    deadline, pause_s = clock() + WAIT_S, 0.01
    while not store.check(["staging/all"]):  # in steps, so that a signal can end it
        if clock() > deadline:
            raise LaunchError(
                f"--stage-data-to: {store.add('staging/done', 0)} of {topology.world.size} processes had their data "
                f"after {WAIT_S / 3600:g} hours: look at the nodes' disks, or leave the flag out"
            )
        sleep(pause_s)
        pause_s = min(2 * pause_s, max(1.0, topology.world.size / 4000))
    return int(store.add("staging/incomplete", 0))
