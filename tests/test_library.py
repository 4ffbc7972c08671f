"""Library without pretrain_gpt.py: a user's own loop, on two processes and without DeepSpeed."""

import inspect

import pytest
import torch

import megatron
from megatron.parallel.layout import Layout
from tests.helpers.processes import run_processes
from tests.helpers.tiny import INTERLEAVED, MODEL

FIELDS = dict(
    **MODEL | {"num_layers": 4},
    micro_batch_size=2,
    global_batch_size=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)


def micro_batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 24, (count, 2, 9), generator=generator)
    return [megatron.make_micro_batch(t.numpy(), first_sample=2 * i) for i, t in enumerate(tokens)]


def own_loop(rank):
    config = megatron.Config.create(**FIELDS | INTERLEAVED, world_size=2)
    with megatron.connect(megatron.detect_launch()):
        topology = megatron.Topology.create(pipeline_model_parallel_size=2)
        chunks = megatron.build_chunks(config, topology)
        engine = megatron.Engine(config, topology, chunks)
        executor = megatron.build_executor(config, topology, chunks, engine)
        history = []
        for _ in range(2):
            losses = executor.train(micro_batches(4), loss_scale=engine.loss_scale)
            result = engine.step(lr=1e-2)
            history.append(
                (sum(x.item() for x in losses) / 4 if losses else None, result.grad_norm)
            )
    return history


@pytest.mark.slow
def test_two_steps_in_a_users_own_loop():
    first, last = run_processes(2, own_loop)
    assert [loss for loss, _ in first] == [None, None]
    assert last[1][0] < last[0][0], "the same batch twice: the loss falls"
    assert [n for _, n in first] == [n for _, n in last]

    # The same steps by hand, in one process, with torch's optimizer.
    topology = megatron.Topology.create()
    (model,) = megatron.build_chunks(megatron.Config.create(**FIELDS), topology).values()
    loss = sum(model(b, None) for b in micro_batches(4)) / 4
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert last[0][0] == pytest.approx(loss.item(), rel=1e-6)
    assert last[0][1] == pytest.approx(norm.item(), rel=1e-5)


def test_everything_offered_is_there_and_documented():
    assert len(megatron.__all__) > 10 and set(megatron.__all__) <= set(dir(megatron))
    for name in megatron.__all__:
        piece = getattr(megatron, name)
        assert isinstance(piece, str) or (
            callable(piece) and (inspect.getdoc(piece) or "").strip()
        ), name
    assert megatron.Layout is Layout
    with pytest.raises(AttributeError, match="no_such_piece"):
        megatron.no_such_piece  # noqa: B018
