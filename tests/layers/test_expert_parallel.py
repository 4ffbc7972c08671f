"""Messages of expert parallelism: as few bytes as the routing allows."""

import os
from dataclasses import replace
from itertools import chain, product

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.layers.context import CallContext, Experts, LayerContext
from megatron.layers.experts import ExpertMLP
from megatron.metrics_file import read_records
from megatron.parallel import collectives
from megatron.parallel.collectives import split_first
from tests.helpers.groups import join
from tests.helpers.launching import ROOT, TINY, launch
from tests.helpers.processes import run_processes

S = 6
B = 2
H = 16
E = 8
K = 4
NODES = 2


def messages_body(rank):
    """Return results of a layer with ranks as one node, as two, and without tokens for the second.

    Then the same with two replicas of two tensor-parallel ranks, each with half of the sequences.

    experts   of this rank's tokens
    sent      group, width of a row and bytes of each message
    results   output and gradient of the input; alone: those of one process with all experts
    """
    sent = []
    start = collectives.start

    def recorded(call, group, size, function, x, *rest):
        if call == b"all_to_all" or x.shape[-1] == H:
            sent.append((group.kind, x.shape[-1], size))
        return start(call, group, size, function, x, *rest)

    config = Config.create(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        seq_length=S,
        num_experts=E,
        moe_router_topk=K,
        add_bias_linear=False,
        init_method_std=0.5,
        moe_shared_expert_intermediate_size=H,
        moe_shared_expert_overlap=True,
    )

    def run(topology, empty, alone):
        one = LayerContext.single()
        tensor = topology.tensor
        context = LayerContext(one.tensor, one.parameters, experts=Experts())
        if not alone:
            factory = replace(one.parameters, rank=tensor.rank, size=tensor.size)
            groups = topology.expert, topology.expert_hops, topology.expert_tensor
            context = LayerContext(tensor, factory, tensor.size > 1, experts=Experts(*groups))
        layer = ExpertMLP(context, "layers.0.mlp", config.model, 0)
        x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(topology.data.rank))
        if empty:
            x = x.abs()
            layer.router.weight.data[E // NODES :] = -9.0
        x = (x if alone else split_first(x, tensor).clone()).requires_grad_()
        y = layer(x, CallContext())
        y.square().sum().backward()
        results = [y.detach(), x.grad]
        return layer, x, [split_first(z, tensor).numpy() if alone else z.numpy() for z in results]

    outcomes = []
    for tensor, (each, empty) in product((1, 2), ((1, False), (2, False), (2, True))):
        sizes = dict(expert_model_parallel_size=4, expert_tensor_parallel_size=1)
        topology = join(tensor, **sizes, expert_ranks_per_node=each)
        sent.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectives, "start", recorded)
            layer, x, results = run(topology, empty, False)
            messages = [one for one in sent if one[0] != "tensor"]  # the shared expert's
        experts = split_first(layer.router(x, CallContext())[1], topology.tensor).numpy().copy()
        alone = run(topology, empty, True)[2]
        outcomes.append(dict(experts=experts, sent=messages, results=results, alone=alone))
    return outcomes


@pytest.mark.slow
def test_a_token_is_sent_once_to_each_node_and_rank_of_its_experts():
    """Rows of tokens and of results are those of the routing, in the forward and backward pass.

    Nothing else of their width is sent, but over the tensor-parallel ranks for the shared expert.
    """
    cases = list(zip(*run_processes(4, messages_body), strict=True))
    for result in chain(*cases):
        for mine, alone in zip(result["results"], result["alone"], strict=True):
            np.testing.assert_allclose(mine, alone, rtol=1e-4, atol=1e-6 * abs(alone).max())

    def check(ranks, kind, width, pairs):
        """Compare messages with the rows [4, 4] from each rank to each."""
        np.fill_diagonal(pairs, 0)
        for rank, result in enumerate(ranks):
            sent = [
                size for group, *shape, size in result["sent"] if group == kind and shape == [width]
            ]
            out = 4 * width * pairs[rank].sum()
            back = 4 * width * pairs[:, rank].sum()
            if width == H:  # tokens, results and the gradients of both
                assert sorted(sent) == sorted([out, back, out, back])
            elif width == 2 * K:  # weights and experts of the choices
                assert sent == [out]
            else:  # the gradients of the weights
                assert sent == [back]

    for ranks, over_nodes in zip(cases, (False, True, True) * 2, strict=True):
        direct, between, within = np.zeros((3, 4, 4), dtype=int)
        for source, result in enumerate(ranks):
            for chosen in result["experts"] // (E // 4):
                for target in set(chosen):
                    direct[source, target] += 1
                    # From the rank with this rank's place on the node of the target.
                    within[target // 2 * 2 + source % 2, target] += 1
                for node in set(chosen // 2):
                    between[source, node * 2 + source % 2] += 1
        assert len(ranks[0]["sent"]) == (14 if over_nodes else 7)  # with one or two of numbers
        hops = {"expert_between": between, "expert_within": within} if over_nodes else {}
        for (kind, pairs), width in product((hops or {"expert": direct}).items(), (H, 2 * K, K)):
            check(ranks, kind, width, pairs)
        if over_nodes:
            assert 0 < between.sum() < direct.sum(), (
                "some tokens have experts on two ranks of a node"
            )
    for empty in (cases[2], cases[5]):
        assert not any(result["experts"].max() >= E // 2 for result in empty)


def name_node(name):
    os.environ["SLURMD_NODENAME"] = name


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "each"), [("none", 2), ("two.toml", None)])
def test_tokens_go_over_the_nodes_that_a_run_is_on(tmp_path, machine, each):
    """The launcher's processes are on two nodes. Losses: tests/parity.

    On a machine that is known, a few tokens go directly to ranks.
    """
    file = tmp_path / "metrics.jsonl"
    if machine != "none":
        text = (ROOT / "examples" / "local" / "two-cores.toml").read_text()
        (tmp_path / machine).write_text(text.replace("nodes = 1\n", "nodes = 2\n"))
        machine = str(tmp_path / machine)
    flags = "--num-experts 4 --expert-model-parallel-size 4 --disable-bias-linear --train-iters 1"
    arguments = [*TINY, *flags.split(), "--metrics-file", str(file), "--cluster", machine]
    arm = {rank: (name_node, node) for rank, node in enumerate("aabb")}
    for done in launch(4, arguments, arm=arm):
        assert done is not None and done.code == 0, done
    (start,) = read_records(file, "start")
    assert start["layout"].get("expert_ranks_per_node") == each
