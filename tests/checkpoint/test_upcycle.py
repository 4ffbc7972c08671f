"""Experts from a dense checkpoint: the first logits are those of the dense model."""

import numpy as np
import pytest
import torch

from megatron.checkpoint.load import load
from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.model.gpt import build_chunks
from tests.checkpoint.saver_cases import save
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.training import BASE, batches

MODEL = dict(BASE, num_layers=2, seed=3)
GATED = dict(MODEL, swiglu=True, add_bias_linear=False, ffn_hidden_size=48)
EIGHT = dict(num_experts=8, moe_router_topk=2)
CASES = {
    "biases": (2, MODEL, EIGHT | dict(moe_router_topk_scaling_factor=2.5)),
    "sigmoid": (1, GATED, EIGHT | dict(moe_router_score_function="sigmoid", moe_layer_freq=(0, 1))),
    "halves": (2, GATED, EIGHT | dict(moe_ffn_hidden_size=24)),
    "halves with biases": (1, MODEL, EIGHT | dict(moe_ffn_hidden_size=64, moe_router_topk=4)),
}
"""Tensor-parallel size, a dense model, and its experts: their weights add up to the scaling factor."""


def built(fields, topology):
    layout = dict(world_size=topology.world.size, tensor_model_parallel_size=topology.tensor.size)
    config = Config.create(**fields, **layout)
    chunks = build_chunks(config, topology)
    return config, chunks, Engine(config, topology, chunks)


def logits(config, chunks):
    with torch.no_grad():
        scores = chunks["0"].eval().logits(batches(config, 0)[0], None)
    return scores[scores.isfinite()].numpy()  # without the padding of the vocabulary


def upcycled(folder, tensor, dense, experts):
    topology = join(tensor)
    config, chunks, engine = built(dense, topology)
    with torch.no_grad():  # values that are not initial ones, biases included
        for f in engine.fragments():
            f.master.add_(0.05 * torch.sin(torch.arange(f.numel, dtype=torch.float32) + f.start))
    engine.update_working_weights()
    engine.wait_for_weights()
    expected = logits(config, chunks)
    save(folder, 7, engine, topology, config, {"consumed_samples": 56})
    config, chunks, engine = built(
        dense | experts | dict(load=folder, moe_use_upcycling=True), topology
    )
    first = load(folder, engine, topology, config)
    engine.wait_for_weights()
    actual = logits(config, chunks)
    plain, _, without = built(dense | experts, topology)
    with pytest.raises(CheckpointError, match="num-experts"):
        load(folder, without, topology, plain)
    # a checkpoint that has experts is loaded as usual
    save(folder, 8, engine, topology, config, {"consumed_samples": 64})
    reloaded = load(folder, engine, topology, config)
    restored = [(one.iteration, one.state, one.optimizer) for one in (first, reloaded)]
    return {"expected": expected, "found": actual, "taken": restored}


def all_cases(rank, folder):
    return {name: upcycled(f"{folder}/{name}", *case) for name, case in CASES.items()}


@pytest.mark.slow
def test_the_first_logits_are_those_of_the_dense_model(tmp_path):
    for rank in run_processes(2, all_cases, str(tmp_path)):
        for case, result in rank.items():
            expected = result["expected"]
            actual = result["found"]
            assert expected.std() > 0.05
            assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max(), case
            assert result["taken"] == [(0, {}, False), (8, {"consumed_samples": 64}, True)]
