"""Local checkpoints: every number comes back from memory, after losses, damage and kills."""

import fcntl
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist

from megatron.checkpoint.local import LocalSaver, Replication, neighbour_jump
from megatron.checkpoint.local_load import find_local, load_local
from megatron.checkpoint.memory_file import MemoryFile
from megatron.errors import CheckpointError
from tests.checkpoint.saver_cases import spoil
from tests.checkpoint.test_load_layouts import fields_of, job_of, next_loss, state_of
from tests.engine import toy
from tests.helpers.fault_points import strike
from tests.helpers.groups import join
from tests.helpers.processes import SETUP_LIMIT_S, run_processes, run_processes_raw

JUMP = 2  # two nodes of two ranks
NODES = ((0, 1), (2, 3))


def memory():
    return os.memfd_create("state", os.MFD_ALLOW_SEALING)


class Case(NamedTuple):
    """Saves after steps 1 and 2 on four ranks, and what is loaded then.

    lost      ranks whose memory is lost
    flips     (rank, role, iteration) of slots in which a bit flips
    other     layout that loads; None: that of the save
    loaded    iteration that is loaded; None: nothing
    compared  iteration at which copies of weights were last compared, which is to limit the choice
    """

    model: str
    words: str
    lost: tuple[int, ...] = ()
    flips: tuple[tuple[int, str, int], ...] = ()
    other: str | None = None
    loaded: int | None = 2
    jump: int = JUMP
    compared: int | None = None


DAMAGED = ((1, "primary", 2), (3, "copy", 2))  # the shards of rank 1
CASES = [
    Case("split", "tp2 sp pp2"),
    Case("experts, folded", "tp2 sp ep4 etp1 zero2"),
    Case("frozen", "pp2"),
    Case("experts, zero 3", "halves ep2 host", lost=NODES[0]),
    Case("fp16", "pp2 fp16 zb zero0", lost=NODES[1]),
    Case("tied", "bf16 zero3", lost=(1, 2), other="pp2 zero2 bf16"),
    Case("experts", "tp2 ep2", lost=(3,), other="pp2 ep2 zero0 bf16 host"),
    Case("multi-query, dp4", "", flips=DAMAGED[:1], lost=(3,), jump=3),
    Case("tied", "zero0 bf16", flips=DAMAGED, lost=NODES[0], loaded=1),
    Case("multi-query, dp4", "bf16", compared=1, loaded=1),
    # both memories that have the shards of a rank; the only one
    Case("multi-query, dp4", "", lost=(0, 2), loaded=None),
    Case("multi-query, dp4", "", lost=(3,), jump=0, loaded=None),
]


def flip(fd, role, iteration):
    for slot in MemoryFile(fd).slots:
        header = slot.read()
        if slot.role == role and header.key.iteration == iteration and header.size_bytes:
            slot.memory.tensor[header.size_bytes // 2] ^= 4
            return
    raise AssertionError("no such slot")


def saver_of(job, fd, jump, keep=None):
    replication = Replication.between(job.topology, jump)
    return LocalSaver(MemoryFile(fd), job.engine, job.topology, replication, keep=keep)


def saved(saver, job, *iterations):
    """Take a step and save, for each iteration; return the state after each."""
    states = {}
    for iteration in iterations:
        job.train(iteration)
        job.step()
        saver.start(iteration, {"steps": iteration})
        states[iteration] = state_of(job)
        dist.barrier()  # all have begun when a test kills one that waits for others
    saver.finish()
    return states


def on_four(rank, case):
    """Save, lose, load; return what was saved, what was loaded, and the next loss of each."""
    fields = fields_of(case.words)
    job = job_of(case.model, fields, 4)
    fd = memory()
    saver = saver_of(job, fd, case.jump)
    states = saved(saver, job, 1)
    if case.compared is not None:
        saver.copies_compared(case.compared)
    states |= saved(saver, job, 2)
    expected = next_loss(job) if case.loaded == 2 else None
    for holder, role, iteration in case.flips:
        if rank == holder:
            flip(fd, role, iteration)
    if rank in case.lost:
        os.close(fd)
        fd = memory()
    if case.other is not None:
        fields = fields_of(case.other)
    job = job_of(case.model, fields, 4)
    spoil(job.engine)
    lines: list[str] = []
    memories = MemoryFile(fd)
    compared = case.compared is not None
    loaded = find_local(memories, job.topology, say=lines.append, compared=compared)
    out: dict[str, Any] = {"lines": lines, "loss": expected}
    if loaded is None:
        return out
    out["from_peers"] = load_local(loaded, memories, job.engine, job.topology, job.config)
    job.engine.wait_for_weights()
    out |= {
        "saved": states[loaded.iteration],
        "found": state_of(job),
        "taken": (loaded.iteration, loaded.state),
    }
    # the next job saves beside what it has loaded, and then in its place
    saver = saver_of(job, fd, case.jump, keep=loaded.key)
    assert find_local(MemoryFile(fd), job.topology).key == loaded.key
    assert find_local(MemoryFile(fd), job.topology, at_least=loaded.iteration) is None
    out["next"] = next_loss(job)
    saver.start(9, {})
    saver.finish()
    assert find_local(MemoryFile(fd), job.topology).iteration == 9
    assert len(MemoryFile(fd).slots) == 4
    os.close(fd)
    return out


def all_on_four(rank, cases):
    return [on_four(rank, case) for case in cases]


@pytest.fixture(scope="module")
def results():
    of_ranks = run_processes(4, all_on_four, CASES, timeout_s=SETUP_LIMIT_S)
    return dict(zip(CASES, zip(*of_ranks, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_number_comes_back_from_memory(results, case):
    ranks = results[case]
    limited = bool(case.flips) or case.compared is not None
    assert bool(ranks[0]["lines"]) == (limited or case.loaded is None)
    if case.loaded is None:
        assert not any("found" in rank for rank in ranks)
        return
    for rank in ranks:
        assert rank["taken"] == (case.loaded, {"steps": case.loaded})
    compare(ranks, [rank["saved"] for rank in ranks])
    if case.model.startswith("multi"):  # with ZeRO over all ranks, none has what another saves
        assert bool(ranks[0]["from_peers"]) == bool(case.lost)
    if case.other is None and case.loaded == 2:
        assert [rank["next"] for rank in ranks] == [rank["loss"] for rank in ranks]


def compare(found, saved):
    shapes = {name: shape for rank in saved for name, shape in rank["shapes"].items()}
    expected = toy.assemble([rank["state"] for rank in saved], shapes)
    actual = toy.assemble([rank["found"]["state"] for rank in found], shapes)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)
    for rank in found:
        assert rank["found"]["scalars"]["optimizer_step"] == saved[0]["scalars"]["optimizer_step"]


# -- fewer ranks -----------------------------------------------------------------------------------


def a_node_less(rank, folder):
    """Lose the second node, and go on with one replica of two on the ranks of the first."""
    job = job_of("split", fields_of("tp2 zero2"), 4)
    fd = memory()
    states = saved(saver_of(job, fd, JUMP), job, 1, 2)
    dist.barrier()
    dist.destroy_process_group()
    if rank in NODES[1]:
        return {"saved": states[2]}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    job = job_of("split", fields_of("tp2 zero0"), 2, join(2))
    spoil(job.engine)
    memories = MemoryFile(fd)
    loaded = find_local(memories, job.topology)
    assert load_local(loaded, memories, job.engine, job.topology, job.config) > 0
    return {"saved": states[2], "found": state_of(job)}


@pytest.mark.slow
def test_with_fewer_ranks(tmp_path):
    ranks = run_processes(4, a_node_less, str(tmp_path))
    compare(ranks[:2], [rank["saved"] for rank in ranks])


# -- copies of weights that differ after the run has gone back --------------------------------------


def gone_back(rank, rolls_back):
    """Compare after step 2, go back to a state on disk, take step 1 again; then copies differ."""
    job = job_of("tied", fields_of("pp2"), 2)
    fd = memory()
    saver = saver_of(job, fd, 1)
    saved(saver, job, 1, 2)
    saver.copies_compared(2)
    if rolls_back:
        saver.clear()
    else:  # a restart
        saver = saver_of(job, fd, 1)
    saved(saver, job, 1)
    return find_local(MemoryFile(fd), job.topology, compared=True)


@pytest.mark.slow
@pytest.mark.parametrize("rolls_back", [True, False])
def test_a_state_that_was_not_compared_again_is_not_loaded(rolls_back):
    assert run_processes(2, gone_back, rolls_back) == [None] * 2


# -- kills, and memory that is not there -----------------------------------------------------------


def killed(rank, moment, descriptors):
    """Save after steps 1 and 2; rank 0 is killed at a moment of the second save."""
    fd = os.open(descriptors[rank], os.O_RDWR)
    job = job_of("tied", fields_of("pp2"), 2)
    saver = saver_of(job, fd, 1)
    saved(saver, job, 1)
    if rank == 0:
        strike("megatron.checkpoint.local", 1, "kill", moment)
    saved(saver, job, 2)


def after_a_kill(rank, descriptors):
    job = job_of("tied", fields_of("pp2"), 2)
    memories = MemoryFile(os.open(descriptors[rank], os.O_RDWR))
    loaded = find_local(memories, job.topology)
    load_local(loaded, memories, job.engine, job.topology, job.config)
    return loaded.iteration


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "iteration"),
    [("copying", 1), ("copied", 1), ("hashed", 1), ("sending", 2), ("committed", 2)],
)
def test_a_kill_leaves_a_whole_save(moment, iteration):
    own = [memory() for _ in range(2)]
    descriptors = [f"/proc/{os.getpid()}/fd/{fd}" for fd in own]
    outcomes = run_processes_raw(2, killed, moment, descriptors)
    assert "exit code -9" in outcomes[0][1]
    assert run_processes(2, after_a_kill, descriptors) == [iteration] * 2


def too_long(rank):
    """Save with a header that does not fit, again, and after a restart; return what is loaded."""
    job = job_of("tied", fields_of("pp2"), 2)
    fd = memory()
    saver = saver_of(job, fd, 1)
    saved(saver, job, 1)
    loaded = []
    for iteration in (2, 3, 4):
        if iteration == 4:
            saver = saver_of(job, fd, 1, keep=saver.last)
        saver.start(iteration, {}, lambda: {"data": "x" * (4 << 20)})
        saver.finish()
        loaded.append((saver.last.iteration, find_local(MemoryFile(fd), job.topology).iteration))
    assert len(MemoryFile(fd).slots) == 4
    return loaded


@pytest.mark.slow
def test_a_header_that_does_not_fit_gets_room():
    assert run_processes(2, too_long) == [[(1, 1), (3, 3), (4, 4)]] * 2


def no_memory(rank):
    job = job_of("tied", fields_of("pp2"), 2)
    fd = memory()
    MemoryFile(fd)
    if rank == 1:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(CheckpointError, match="rank 1: "):
        saver_of(job, fd, 1)


@pytest.mark.slow
def test_too_little_memory_is_an_error_on_every_rank():
    run_processes(2, no_memory)


def test_neighbours_are_on_other_nodes():
    assert neighbour_jump(["a"] * 4 + ["b"] * 4) == 4
    assert neighbour_jump(["a"] * 3 + ["b"] * 3 + ["c"] * 2) == 3
    assert neighbour_jump(["a", "b"] * 3) == 1
    assert neighbour_jump(["a"] * 3) == 0
