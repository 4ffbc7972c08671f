"""Number of times that the host waits for its device.

It is counted in passes and optimizer without data, and in whole runs on the CPU.
"""

import pytest

from benchmarks.host_waits import HostWaits
from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.pipeline.executor import Executor
from megatron.planner.dryrun.rank import run_rank
from megatron.training.run import loop
from tests.helpers.processes import run_processes
from tests.helpers.tiny import run
from tests.parity.cases import LLAMA

pytestmark = pytest.mark.slow

MODEL = dict(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    vocab_size=250,
    micro_batch_size=2,
    global_batch_size=4,
    hidden_dropout=0.1,
    attention_dropout=0.1,
)
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
PP2 = dict(pipeline_model_parallel_size=2)
LLAMA = dict(LLAMA, hidden_dropout=0.0, attention_dropout=0.0)


def counting(plain, counts):
    """Do the same, and record under its name the waits of its last call."""

    def counted(*args, **kwargs):
        with HostWaits("meta") as waits:
            out = plain(*args, **kwargs)
        counts[plain.__name__] = waits.recorded
        return out

    return counted


def count(config, rank):
    """Count the waits of the last step of a rank whose device has no data."""
    counts = {}
    with pytest.MonkeyPatch.context() as patch:
        for of, name in ((Executor, "train"), (Engine, "start_step"), (Engine, "finish_step")):
            patch.setattr(of, name, counting(getattr(of, name), counts))
        run_rank(config, rank, "meta", config.num_micro_batches())
    return counts


def on_meta(rank, cases):
    return [count(Config.create(**{**MODEL, **fields}), one) for one, fields in cases]


MOE = dict(bf16=True, num_experts=8, moe_aux_loss_coeff=(0.01,), moe_z_loss_coeff=0.01)
SHARED = dict(moe_shared_expert_intermediate_size=32, add_bias_linear=False)
RING = dict(context_parallel_size=2, seq_length=128)
CASES = [
    (0, dict(world_size=2, zero_stage=0, log_num_zeros_in_grad=True, log_params_norm=True)),
    (
        5,
        dict(
            world_size=8,
            fp16=True,
            **TP2,
            **PP2,
            num_layers_per_virtual_pipeline_stage=1,
            recompute_granularity="full",
            recompute_method="block",
        ),
    ),
    (0, dict(world_size=4, **PP2, pipeline_schedule="zb-h1", recompute_granularity="selective")),
    (0, dict(world_size=2, bf16=True, **TP2, **LLAMA, optimizer_implementation="torch")),
    (1, dict(world_size=4, bf16=True, **LLAMA, **RING, zero_stage=3, optimizer="lion")),
    (
        0,
        dict(
            world_size=2,
            fp16=True,
            context_parallel_size=2,
            cp_comm_type="a2a",
            qk_clip=True,
            attention_backend="unfused",
        ),
    ),
    (1, dict(world_size=2, bf16=True, optimizer="muon", cpu_offload=True, zero_stage=2)),
    (
        1,
        dict(
            world_size=4,
            **MOE,
            **TP2,
            expert_model_parallel_size=2,
            moe_router_load_balancing_type=("global_aux_loss",),
            moe_expert_capacity_factor=1.0,
            moe_layer_freq=(2,),
        ),
    ),
    (
        3,
        dict(
            world_size=4,
            **MOE,
            **SHARED,
            **RING,
            expert_model_parallel_size=4,
            expert_ranks_per_node=2,
            moe_shared_expert_overlap=True,
            moe_router_load_balancing_type=("seq_aux_loss",),
            moe_router_enable_expert_bias=True,
            moe_router_score_function="sigmoid",
            recompute_granularity="selective",
            recompute_modules=("moe",),
        ),
    ),
]


def reads(fields):
    """Return the waits for numbers of rows in the passes: one a layer with experts, once."""
    config = Config.create(**{**MODEL, **fields})
    layers = filter(config.model.has_experts, range(config.model.num_layers))
    return config.num_micro_batches() * len(list(layers))


def test_a_step_has_no_wait_before_its_figures_are_read():
    (waits_of_cases,) = run_processes(1, on_meta, CASES)
    for case, waits in zip(CASES, waits_of_cases, strict=True):
        assert (len(waits["train"]), waits["start_step"]) == (reads(case[1]), []), (case, waits)
        assert len(waits["finish_step"]) == 1, (case, waits)


def run_and_count(rank, fields):
    """Count the waits of each step of the training loop; CPU tensors stand for a device's."""
    waits = HostWaits("cpu")
    steps = []
    plain = loop.train_steps
    after = loop.between_steps

    def train_steps(run):
        with waits:
            return plain(run)

    def between_steps(run):
        stop = after(run)
        steps.append(waits.recorded[:])
        waits.recorded.clear()
        return stop

    loop.train_steps = train_steps
    loop.between_steps = between_steps
    run(rank, fields)
    return steps


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        (
            2,
            dict(
                bf16=True,
                calculate_per_token_loss=True,
                pipeline_model_parallel_size=2,
                log_num_zeros_in_grad=True,
            ),
        ),
        (1, dict(fp16=True, initial_loss_scale=1024.0, log_interval=1)),
        (
            1,
            dict(
                loss_spike_factor=3.0,
                reset_attention_mask=True,
                reset_position_ids=True,
                tokenizer_type="NullTokenizer",
                vocab_size=23,
            ),
        ),
    ],
    ids=["late", "fp16", "spikes"],
)
def test_a_step_of_the_loop_waits_once(tmp_path, ranks, fields):
    """A step of the loop waits once, for the figures of one step.

    They are its own, or, if not needed so soon, those of the step before, after its passes. The
    first steps also compare copies. With --save the ranks agree in every step, without involving
    the device.
    """
    rare = dict(log_interval=100, eval_interval=100, eval_iters=2, train_iters=7)
    fields = dict(rare, save=str(tmp_path), load=str(tmp_path)) | fields
    for steps in run_processes(ranks, run_and_count, fields):
        assert len(steps) == 7
        for waits in steps[2:]:
            assert len(waits) == 1, waits
