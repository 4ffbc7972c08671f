"""Every schedule is complete, ordered by dependencies, free of deadlock, and bounded in memory."""

import doctest
import itertools
import math
from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.parallel import SCHEDULES, V_SHAPED
from megatron.model import stages
from megatron.pipeline import orders
from megatron.pipeline import schedule as schedule_module
from megatron.pipeline.orders import COMPUTE, RECEIVES, SENDS, Instruction, Op, group_sizes
from megatron.pipeline.schedule import build_schedule, planned_latency
from tests.helpers.replay import simulate
from tools.show_schedule import peak_activations, peak_receives

MAKERS = {Op.RECV_FORWARD: {Op.FORWARD}, Op.RECV_BACKWARD: {Op.BACKWARD, Op.BACKWARD_INPUT}}
RECEIVE_OF = {Op.SEND_FORWARD: Op.RECV_FORWARD, Op.SEND_BACKWARD: Op.RECV_BACKWARD}


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(SCHEDULES))
    size = draw(st.integers(1, 8))
    chunks = draw(st.integers(2, 4)) if name == "interleaved" else 1 + (name in V_SHAPED)
    return build_schedule(name, size, chunks, draw(st.integers(1, 20)), draw(st.booleans()))


def owner(schedule, stage):
    size = schedule.pipeline_size
    down = schedule.name not in V_SHAPED or stage < size
    return stage % size if down else 2 * size - 1 - stage


def message(schedule, instruction):
    """Return (sender, receiver, the receiver's name for it) of a SEND or a RECV."""
    op, stage, micro_batch = instruction
    step = 1 if op in (Op.SEND_FORWARD, Op.RECV_FORWARD) else -1
    if op in SENDS:
        return (
            owner(schedule, stage),
            owner(schedule, stage + step),
            Instruction(RECEIVE_OF[op], stage + step, micro_batch),
        )
    return owner(schedule, stage - step), owner(schedule, stage), instruction


def can_compute(schedule, done, instruction, arrived):
    """Check the dependencies, written again and stricter: remote results must have arrived."""
    op, stage, micro_batch = instruction
    last = schedule.num_stages - 1
    before = stage + (-1 if op is Op.FORWARD else 1)
    local = 0 <= before <= last and owner(schedule, before) == owner(schedule, stage)
    if op is Op.BACKWARD_WEIGHT:
        return Instruction(Op.BACKWARD_INPUT, stage, micro_batch) in done
    if op is Op.FORWARD:
        if stage == 0:
            return True
        if local:
            return Instruction(Op.FORWARD, stage - 1, micro_batch) in done
        return Instruction(Op.RECV_FORWARD, stage, micro_batch) in arrived
    if Instruction(Op.FORWARD, stage, micro_batch) not in done:
        return False
    if stage == last:
        return True
    if local:
        return source_done(done, Instruction(Op.SEND_BACKWARD, stage + 1, micro_batch))
    return Instruction(Op.RECV_BACKWARD, stage, micro_batch) in arrived


def source_done(done, instruction):
    _, stage, micro_batch = instruction
    ops = [Op.FORWARD] if instruction.op is Op.SEND_FORWARD else [Op.BACKWARD, Op.BACKWARD_INPUT]
    return any(Instruction(op, stage, micro_batch) in done for op in ops)


def run(schedule, *, rendezvous):
    """Execute the lists; return where each rank stopped, and what was done.

    rendezvous=False: messages are buffered and matched per direction of a pair in order; only a
    computation waits. rendezvous=True: a send and a receive both block the rank until the other end
    has reached the same message.
    """
    position = [0] * len(schedule)
    done = set()
    arrived = set()
    wires = defaultdict(deque)
    posted = defaultdict(deque)

    def step(rank):
        if position[rank] == len(schedule[rank]):
            return False
        instruction = schedule[rank][position[rank]]
        if instruction.op in COMPUTE:
            if not can_compute(schedule, done, instruction, arrived):
                return False
            done.add(instruction)
            position[rank] += 1
            return True
        sender, receiver, name = message(schedule, instruction)
        if instruction.op in SENDS:
            assert source_done(done, instruction), f"{instruction} is sent before it is computed"
        if rendezvous:
            other = receiver if rank == sender else sender
            if position[other] == len(schedule[other]):
                return False
            facing = schedule[other][position[other]]
            if (
                facing.op in COMPUTE
                or message(schedule, facing) != (sender, receiver, name)
                or facing == instruction
            ):
                return False
            arrived.add(name)
            position[rank] += 1
            position[other] += 1
            return True
        (wires if rank == sender else posted)[sender, receiver].append(name)
        position[rank] += 1
        wire = wires[sender, receiver]
        buffers = posted[sender, receiver]
        while wire and buffers:
            sent = wire.popleft()
            expected = buffers.popleft()
            assert sent == expected, f"{expected} would be filled with the message for {sent}"
            arrived.add(sent)
        return True

    while sum(step(rank) for rank in range(len(schedule))):  # a sum, so that every rank steps
        pass
    return position, done


@given(schedules())
def test_complete(schedule):
    size = schedule.pipeline_size
    done = Counter(i for rank in schedule for i in rank if i.op in COMPUTE)
    expected = Counter[Instruction]()
    for at in itertools.product(range(schedule.num_stages), range(schedule.micro_batches)):
        passes = {Op.FORWARD}
        if not schedule.forward_only:
            split = schedule.name not in ("1f1b", "interleaved") and size > 1
            if schedule.name == "dualpipev":  # splits some of them
                split = Instruction(Op.BACKWARD_INPUT, *at) in done
            passes |= {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT} if split else {Op.BACKWARD}
        expected.update(Instruction(op, *at) for op in passes)
    assert done == expected
    assert all(owner(schedule, i.stage) == rank for rank in range(size) for i in schedule[rank])


@given(schedules(), st.booleans())
def test_runs_in_dependency_order_without_deadlock(schedule, rendezvous):
    position, done = run(schedule, rendezvous=rendezvous)
    stuck = [str(rank[at]) for rank, at in zip(schedule, position, strict=True) if at < len(rank)]
    assert not stuck
    assert len(done) == sum(i.op in COMPUTE for rank in schedule for i in rank)


@given(schedules())
def test_messages_are_the_lower_bound(schedule):
    pairs = itertools.pairwise(owner(schedule, stage) for stage in range(schedule.num_stages))
    crossing = sum(a != b for a, b in pairs)
    directions = 1 if schedule.forward_only else 2
    messages = crossing * schedule.micro_batches * directions
    for posts in (SENDS, RECEIVES):
        assert sum(i.op in posts for rank in schedule for i in rank) == messages


@given(schedules())
def test_memory_is_bounded(schedule):
    p = schedule.pipeline_size
    v = schedule.chunks
    m = schedule.micro_batches
    largest_group = group_sizes(p, m)[0]
    for rank in range(p):
        if schedule.forward_only:
            limit = 1
        elif p == 1:
            limit = v
        elif schedule.name in V_SHAPED:
            # section 3 of arXiv 2405.15362, in activations of one chunk: 2 p, half and a third of
            # it, and constants; DeepSeek's table for DualPipeV
            bounds = 2 * p, p + 2, math.ceil(2 * p / 3) + 2, 2 * p + 1
            most = dict(zip(V_SHAPED, bounds, strict=True))[schedule.name]
            assert peak_activations(schedule)[rank] <= min(2 * m, most)
            continue
        elif schedule.name == "interleaved":
            limit = min(v * m, 2 * (p - rank - 1) + (v - 1) * largest_group + 1)
        else:
            limit = min(m, p - rank)
        awaiting_input_gradient = peak_activations(schedule, until_weights=False)[rank]
        assert awaiting_input_gradient == limit
        if schedule.name == "zb-h1" and p > 1 and not schedule.forward_only:
            assert peak_activations(schedule)[rank] == min(m, p)
        else:
            assert peak_activations(schedule)[rank] == limit


@given(schedules())
def test_receive_buffers_are_bounded(schedule):
    limit = (
        2
        if schedule.chunks == 1
        else group_sizes(schedule.pipeline_size, schedule.micro_batches)[0] + 3
    )
    assert max(peak_receives(schedule)) <= limit


@given(schedules())
def test_receives_are_posted_while_the_message_is_made(schedule):
    """Receives are posted no later than the message is computed.

    A sender never waits for its receiver; receives follow the last computation that ends earlier.
    """
    timeline = simulate(schedule, latency=planned_latency(schedule.chunks))
    ends = {span.instruction: span.end for spans in timeline.ranks for span in spans}
    for instructions in schedule:
        end_before = 0.0
        sent_since = False
        following = [ends[i] if i.op in COMPUTE else None for i in instructions]
        for position, instruction in enumerate(instructions):
            if instruction.op in COMPUTE:
                end_before = ends[instruction]
                sent_since = False
            elif instruction.op in SENDS:
                sent_since = True
            else:
                peer = instruction.stage + (1 if instruction.op is Op.RECV_BACKWARD else -1)
                made = [Instruction(op, peer, instruction.micro_batch) for op in Op]
                produced = max(
                    ends[i] for i in made if i in ends and i.op in MAKERS[instruction.op]
                )
                assert end_before < produced or (end_before == produced and sent_since)
                assert next(end for end in following[position:] if end is not None) >= produced


@pytest.mark.parametrize("module", [orders, schedule_module, stages])
def test_examples_in_docstrings(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
