"""Messages of expert parallelism: as few bytes as the routing allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.layers.context import CallContext, Experts, LayerContext
from megatron.layers.experts import ExpertMLP
from megatron.layers.transformer import MLP, weight_fills
from megatron.parallel import collectives
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

S, B, H, E, K = 6, 2, 16, 8, 4


def messages_body(rank: int) -> dict[str, Any]:
    """Return the experts of this rank's tokens, and the bytes of each message, by its shape."""
    topology = join(expert_model_parallel_size=4)
    config = Config.create(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        seq_length=S,
        num_experts=E,
        moe_router_topk=K,
        add_bias_linear=False,
        init_method_std=0.5,
        world_size=4,
        expert_model_parallel_size=4,
    )
    fill, output = weight_fills(config.model)
    context = LayerContext.single()
    context = LayerContext(context.tensor, context.parameters, experts=Experts(topology.expert))
    layer = ExpertMLP(context, "layers.0.mlp", config.model, 0, fill, output, MLP)
    sent: list[tuple[int, int]] = []
    start = collectives.start

    def recorded(call: bytes, group: Any, size: int, function: Any, x: Any, *rest: Any) -> Any:
        if call == b"all_to_all":
            sent.append((x.shape[-1], size))
        return start(call, group, size, function, x, *rest)

    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(rank))
    _, experts = layer.router(x, CallContext())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "start", recorded)
        layer(x.requires_grad_(), CallContext()).sum().backward()
    return {"experts": experts.numpy().copy(), "sent": sent}


@pytest.mark.slow
def test_a_token_is_sent_once_to_each_rank_of_its_experts() -> None:
    """Rows of tokens and of results are those of the routing, in the forward and backward pass."""
    ranks = run_processes(4, messages_body)
    pairs = np.zeros((4, 4), dtype=int)  # tokens of one rank with experts on another
    for source, found in enumerate(ranks):
        for chosen in found["experts"] // (E // 4):
            for target in set(chosen) - {source}:
                pairs[source, target] += 1
    assert 0 < pairs.sum() < sum(found["experts"].size for found in ranks)
    for rank, found in enumerate(ranks):
        out, back = pairs[rank].sum(), pairs[:, rank].sum()
        assert len(found["sent"]) == 7
        sent = found["sent"][1:]  # after one message of numbers
        rows = [size for width, size in sent if width == H]
        assert rows == [4 * H * n for n in (out, back, out, back)]
        # weights and experts of the choices, and the gradients of the weights
        assert [size for width, size in sent if width == 2 * K] == [4 * 2 * K * out]
        assert [size for width, size in sent if width == K] == [4 * K * back]
