"""Muon's Newton-Schulz steps, whole parameters, rounded moments and QK-clip, each alone.

Whole training runs with them: tests/parity.
"""

import math

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.engine.full_matrices import FullMatrices, work_of
from megatron.engine.gradients import Bucket
from megatron.engine.optimizer_state import OPTIMIZERS, optimizer_state
from megatron.engine.optimizers import Muon, coefficients, newton_schulz
from megatron.errors import ConfigError
from megatron.layers.attention_blocked import update_largest
from megatron.layers.attention_unfused import Scoring
from megatron.layers.positions import Documents
from megatron.parallel.sharding import attach, shard
from tests.engine import lamb_on_cpu
from tests.helpers.groups import join
from tests.helpers.launching import ROOT
from tests.helpers.plain_optimizers import orthogonal
from tests.helpers.processes import run_processes
from tests.helpers.training import assemble, train_plainly
from tests.parity.cases import layout, train


def matrix(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


# -- Newton-Schulz ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "steps", "far"), [("quintic", 5, 0.35), ("polar_express", 8, 0.01)]
)
def test_singular_values_come_near_one(kind, steps, far):
    """The steps come as near to U V^T as their authors say, for values above 0.01."""
    u, s, v = torch.linalg.svd(matrix(16, 32).double(), full_matrices=False)
    x = (u * torch.logspace(-1.5, 0, len(s), dtype=torch.float64)) @ v
    values = torch.linalg.svdvals(newton_schulz(x, coefficients(kind, steps)))
    assert (values - 1.0).abs().max() < far


def muon(**settings):
    config = Config.create(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        seq_length=4,
        vocab_size=8,
        optimizer="muon",
        muon_fp32_matmul_prec="high",
        muon_coefficient_type="simple",
        **settings,
    )
    weights = torch.nn.Parameter(torch.zeros(4))
    return Muon([{"params": [weights], "full_parameters": None}], config), config


@pytest.mark.parametrize(
    ("mode", "scale"),
    [("spectral", 24**0.5), ("shape_scaling", 3**0.5), ("unit_rms_norm", 3**0.5)],
)
def test_scale_of_a_tall_matrix(mode, scale):
    optimizer, _ = muon(muon_scale_mode=mode, muon_extra_scale_factor=0.5)
    x = matrix(24, 8)
    actual = optimizer.orthogonalized("layers.0.mlp.dense_h_to_4h.weight", x)
    torch.testing.assert_close(actual.double(), 0.5 * scale * orthogonal(x), rtol=0, atol=1e-3)


@pytest.mark.parametrize("split", [True, False])
def test_fused_queries_keys_and_values(split):
    """Two groups of two queries, a key and a value, of two rows each."""
    optimizer, _ = muon(muon_split_qkv=split)
    x = matrix(16, 8)
    actual = optimizer.orthogonalized("layers.0.self_attention.query_key_value.weight", x)
    rows = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15])
    for block in rows if split else (list(range(16)),):
        size = max(len(block), 8) ** 0.5
        expected = size * orthogonal(x[block])
        torch.testing.assert_close(actual[block].double(), expected, rtol=0, atol=1e-3)


def test_a_skipped_step_of_muon_leaves_weights_and_momentum():
    """A step before it divides the gradients by their scale. Updates are signs of the momentum."""

    def signs(flats, change, dtype):
        for flat in flats:
            flat.copy_(flat.sign())

    optimizer, _ = muon(muon_momentum=0.5, muon_nesterov=False)
    (group,) = optimizer.param_groups
    group.update(full_parameters=signs, lr=0.125, weight_decay=0.5)
    (p,) = group["params"]
    p.data.fill_(2.0)
    optimizer.grad_scale = torch.tensor(4.0)
    for bad in (False, True):
        p.grad = torch.tensor([8.0, -8.0, math.inf if bad else 16.0, math.nan if bad else -4.0])
        optimizer.found_inf = torch.tensor(float(bad))
        optimizer.step()
        assert optimizer.state[p]["momentum_buffer"].tolist() == [1.0, -1.0, 2.0, -0.5]
        assert p.tolist() == [1.75, 2.0, 1.75, 2.0]


# -- whole parameters ------------------------------------------------------------------------------


def gather(rank):
    """Change matrices on tensor 2 x data 2 ranks into twice themselves, which every rank checks."""
    topology = join(2, 1)
    t = topology.tensor.rank
    shapes = {f"w{i}": (8, 2 + 3 * i) for i in range(5)}
    shapes["stack"] = (2, 6, 4)
    values = {name: matrix(*shape) for name, shape in shapes.items()}
    buckets = []
    flats = []
    for names in (list(shapes)[:2], list(shapes)[2:]):
        parameters = []
        for name in names:
            # the middle dimension of a stack, the first one of others; w1 is padded at its end
            dim = len(shapes[name]) - 2
            padded = 12 if name == "w1" else None
            sharding = shard(name, shapes[name], dim, t, 2, padded=padded)
            local = list(shapes[name])
            local[dim] = (padded or local[dim]) // 2
            shape = torch.zeros(local)
            real = tuple(slice(n) for n in sharding.extent)
            ends = zip(sharding.offset, sharding.extent, strict=True)
            shape[real] = values[name][tuple(slice(o, o + n) for o, n in ends)]
            parameters.append(attach(torch.nn.Parameter(shape), sharding, 2))
        flat = torch.cat([p.detach().flatten() for p in parameters])
        flat = torch.cat([flat, torch.zeros(-len(flat) % 4)])
        buckets.append(Bucket(parameters, torch.zeros_like(flat), flat, topology.shards))
        flats.append(buckets[-1].owned_weights)
    before = [x.clone() for x in flats]
    seen = {}

    def twice(name, x):
        assert torch.equal(x, values[name])
        seen[name] = work_of(x.shape)
        return 2 * x

    FullMatrices(buckets, topology)(flats, twice)
    return seen, all(torch.equal(x, 2 * y) for x, y in zip(flats, before, strict=True))


@pytest.mark.slow
def test_each_matrix_is_whole_on_one_rank_and_work_is_shared():
    ranks = run_processes(4, gather)
    assert all(same for _, same in ranks)
    names = [name for seen, _ in ranks for name in seen]
    assert sorted(names) == ["stack", "w0", "w1", "w2", "w3", "w4"]
    loads = [sum(seen.values()) for seen, _ in ranks]
    largest = max(work for seen, _ in ranks for work in seen.values())
    assert max(loads) <= largest + sum(loads) / 4


# -- QK-clip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("window", [1 << 20, 5])
def test_largest_logits_are_those_of_all_scores(packed, window):
    """Grouped heads, several blocks of queries, two samples, against all scores in float64."""
    s = 150
    b = 2
    groups = 2
    share = 3
    d = 8
    q = matrix(s, b, groups * share, d)
    k = matrix(s, b, groups, d).flip(0)
    lengths = [70, 80, 10, 140]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    documents = Documents(starts, torch.tensor(lengths).numpy(), b) if packed else None
    padding = None
    if packed:  # the last document
        q[-140:, 1] = 9.0
        k[-140:, 1] = 9.0
        padding = torch.arange(s) >= torch.tensor([s, 10]).unsqueeze(1)
    actual = torch.zeros(groups * share)
    scoring = Scoring(scale=0.3, window=window, documents=documents)
    update_largest(actual, (q, k, k), scoring, padding)
    scores = torch.einsum("sbhd,tbhd->bhst", q.double(), k.double().repeat_interleave(share, 2))
    behind = torch.arange(s).unsqueeze(1) - torch.arange(s)
    seen = ((behind >= 0) & (behind <= window)).expand(b, s, s)
    if packed:
        of = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).view(b, s)
        seen = seen & (of.unsqueeze(2) == of.unsqueeze(1)) & (of != 3).unsqueeze(2)
    expected = scores.masked_fill(~seen.unsqueeze(1), -math.inf).amax((0, 2, 3)) * 0.3
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)


# -- LAMB ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lamb_of_whole_parameters_is_that_of_one_process(tmp_path):
    """Its trust ratios are those of parameters, not of ZeRO's parts of a bucket or of shards."""
    fields = layout(tp=2, dp=2, lr=1e-2, weight_decay=0.1, add_bias_linear=False)[2]
    file = str(ROOT / "tests/engine/lamb_on_cpu.py")
    ranks = run_processes(4, train, [{**fields, "pieces": file}])
    plain = tmp_path / "plain.py"
    plain.write_text(
        "from tests.engine import lamb_on_cpu\nPIECES = {'optimizer': lamb_on_cpu.plain}"
    )
    expected = train_plainly({**fields, "pieces": str(plain)})
    parameters = assemble([rank["parameters"] for (rank,) in ranks])
    assert parameters.keys() == expected["parameters"].keys()
    for name, values in expected["parameters"].items():
        np.testing.assert_allclose(parameters[name], values, rtol=0, atol=5e-6, err_msg=name)


def test_an_optimizer_that_is_given_parts_updates_each_weight_by_itself():
    config = Config.create(
        num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=8
    )
    with pytest.raises(ConfigError, match=r"Lamb.*lamb\.py"):
        optimizer_state(config.with_pieces(optimizer=lamb_on_cpu.plain))
    state = optimizer_state(config.with_pieces(optimizer=lamb_on_cpu.Whole))
    assert state.full_parameters == OPTIMIZERS["adam"]._replace(step=int)
