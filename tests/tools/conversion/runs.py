"""Processes in which DeepSpeed trains a model and saves it; they return its state."""

import functools
from pathlib import Path

import torch

from megatron.checkpoint.find import find_folder, open_checkpoint
from megatron.checkpoint.load import load
from megatron.config import Config
from megatron.data.sampler import make_micro_batch
from megatron.engine.deepspeed_engine import (
    ModelParallelUnit,
    ensure_process_group,
    import_deepspeed,
    start_engine,
)
from megatron.model.gpt import build_chunks
from megatron.parallel.topology import Topology
from tests.helpers.groups import join
from tests.helpers.training import TrainingJob
from tests.tools.conversion import megatron_deepspeed

PRECISION = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2}
    },
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def configuration(precision, data, rows, micro=1):
    return {
        "train_batch_size": rows * data * micro,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": micro,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5000},
        **PRECISION[precision],
    }


def start(topology, model, config, **more):
    deepspeed = import_deepspeed("cpu")
    # torch computes fp16 on every CPU, only more slowly
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    ensure_process_group()
    optimizer = torch.optim.AdamW(
        megatron_deepspeed.groups(model), foreach=False, **megatron_deepspeed.RATES
    )
    return start_engine(
        deepspeed, topology, model=model, optimizer=optimizer, config=config, **more
    )


def link_again(engine):
    """Make DeepSpeed link its parameters to the optimizer's state at the next step too.

    It does so once, after the step of the first group, when AdamW has not yet created the state of
    the second.
    """
    engine.optimizer._hp_optimizer_states_linked = False


def whole_state(named):
    """Return {kind: {parameter: values}} from DeepSpeed's own functions.

    All data-parallel ranks must call it.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    out = {"master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    for name, p in named:
        out["master"][name] = safe_get_full_fp32_param(p).view(p.shape).numpy().copy()
        for kind in MOMENTS:
            out[kind][name] = safe_get_full_optimizer_state(p, kind).view(p.shape).numpy().copy()
    return out


def one_step(engine, rows, seed, topology, vocab):
    t = megatron_deepspeed.tokens(seed, rows * topology.data.size, vocab)[
        topology.data.rank * rows :
    ][:rows]
    engine.backward(megatron_deepspeed.loss_of(engine(t[:, :-1]), t[:, 1:]))
    engine.step()
    link_again(engine)


def on_two(rank, root):
    """Write checkpoints of three models on two ranks; return {folder: results of this rank}."""
    topology = join()
    return {
        "llama": without_pipeline(topology, f"{root}/llama", "llama", "fp32"),
        "gpt": without_pipeline(topology, f"{root}/gpt", "gpt", "bf16"),
        "mixed": over_tensor_ranks(Topology.create(2, 1), f"{root}/mixed", "mixed", "bf16"),
    }


def without_pipeline(topology, root, style, precision):
    """Take two steps, write a checkpoint, and take a third step.

    There are as many data-parallel ranks as processes. Return the state at the checkpoint, and the
    weights after the third step.
    """
    a = megatron_deepspeed.arguments(style, iteration=2)
    model = megatron_deepspeed.drawn(a)
    engine = start(topology, model, configuration(precision, topology.data.size, 2))
    for step in range(2):
        one_step(engine, 2, step, topology, a.vocab_size)
    client = {
        "iteration": 2,
        "args": a,
        "checkpoint_version": 3.0,
        "tokens": 12 * megatron_deepspeed.S,
    }
    engine.save_checkpoint(root, tag="global_step2", client_state=client)
    out = {"state": whole_state(model.named_parameters())}
    one_step(engine, 2, 2, topology, a.vocab_size)
    return out | {"next": whole_state(model.named_parameters())["master"]}


def over_tensor_ranks(topology, root, style, precision):
    """Train the shards of a model on two ranks, with its weights as gradients; return the state.

    Such gradients are not rounded, as the weights are bf16.
    """
    a = megatron_deepspeed.arguments(
        style, iteration=2, tensor_model_parallel_size=2, padded_vocab_size=64
    )
    model = megatron_deepspeed.drawn(a)
    megatron_deepspeed.cut(model, a, topology.tensor.rank, 2)
    engine = start(
        topology,
        model,
        configuration(precision, 1, 1),
        mpu=ModelParallelUnit(topology),
    )
    for _ in range(2):
        engine.backward(megatron_deepspeed.push(model, 0.0))
        engine.step()
        link_again(engine)
    client = {"iteration": 2, "args": a, "checkpoint_version": 3.0}
    engine.save_checkpoint(root, tag="global_step2", client_state=client)
    return {"state": whole_state(model.named_parameters())}


def of_our_own_names(rank, root):
    """Train our own model, tied and with SwiGLU, for two steps by plain DeepSpeed.

    The checkpoint has no arguments.
    """
    topology = join()
    config = Config.create(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=megatron_deepspeed.S,
        vocab_size=50,
        swiglu=True,
        ffn_hidden_size=48,
        make_vocab_size_divisible_by=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = build_chunks(config, topology)["0"]
    engine = start(topology, model, configuration("fp32", 1, 1))
    for step in range(2):
        engine.backward(
            engine(make_micro_batch(megatron_deepspeed.tokens(step, 1, 50).numpy()), None)
        )
        engine.step()
        link_again(engine)
    engine.save_checkpoint(root)
    return {"state": whole_state(model.named_parameters())}


def over_stages(rank, root, precision):
    """Train two stages of two tensor ranks by DeepSpeed's PipelineModule.

    It writes a file for each layer and tensor rank. Return this rank's state and the names of all
    files.
    """
    topology = join(tensor=2, pipeline=2)
    t = topology.tensor.rank
    import_deepspeed("cpu")
    ensure_process_group()
    import deepspeed.comm
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    a = megatron_deepspeed.arguments(
        "gpt", iteration=2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2
    )
    model = PipelineModule(
        layers=megatron_deepspeed.pipeline_layers(a),
        loss_fn=lambda x, labels: x.mean(),
        partition_method="uniform",
        topology=PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1),
        activation_checkpoint_interval=0,
    )
    for layer in model.forward_funcs:
        if isinstance(layer, torch.nn.Module):
            layer.forward = functools.partial(megatron_deepspeed.push, layer)
    full_model = megatron_deepspeed.drawn(a)
    values = dict(full_model.named_parameters())
    for name, p in model.named_parameters():
        p.data = megatron_deepspeed.shard_of(
            name, values[pipe_name(name)].detach(), a, t, 2
        ).clone()
        p.tensor_model_parallel = p.shape != values[pipe_name(name)].shape
    engine = start(topology, model, configuration(precision, 1, 2, micro=2))
    for step in range(2):
        rows = megatron_deepspeed.tokens(step, 4, a.vocab_size).split(2)
        engine.train_batch(iter([(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows]))
        link_again(engine)
    client = {"iteration": 2, "args": a, "checkpoint_version": 3.0}
    engine.save_checkpoint(root, tag="global_step2", client_state=client)
    # On the last stage the positions belong to a copy of the embedding of which only the tied
    # weight is used.
    first = topology.pipeline.is_first
    local = [
        (pipe_name(n), p)
        for n, p in model.named_parameters()
        if first or not n.startswith("tied_modules")
    ]
    return {
        "state": whole_state(local),
        "files": sorted(path.name for path in (Path(root) / "global_step2").iterdir()),
    }


def pipe_name(name):
    """Return the name in GPTModel of a parameter of the pipeline module."""
    if name.startswith("tied_modules.embed."):
        return "language_model.embedding." + name.removeprefix("tied_modules.embed.")
    number, _, rest = name.partition(".")
    layer = int(number) - 2
    section = f"layers.{layer}" if layer < megatron_deepspeed.LAYERS else "final_layernorm"
    return f"language_model.encoder.{section}.{rest}"


def ours_after(rank, directories):
    """Load converted checkpoints into our own engine; return the result of `one_after` for each."""
    topology = join()
    return [one_after(topology, directory) for directory in directories]


def one_after(topology, directory):
    """Load a converted checkpoint; return logits, what was loaded, and weights after one step."""
    stored = open_checkpoint(find_folder(directory)).config["model"]
    training = dict(
        micro_batch_size=2,
        global_batch_size=4,
        lr=megatron_deepspeed.RATES["lr"],
        adam_beta2=0.95,
        adam_eps=1e-3,
        weight_decay=megatron_deepspeed.WEIGHT_DECAY,
        clip_grad=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        world_size=1,
        make_vocab_size_divisible_by=8,
    )
    config = Config.create(**{**stored, **training})
    job = TrainingJob(config, topology)
    loaded = load(directory, job.engine, topology, config)
    job.engine.wait_for_weights()

    def batch(t):
        return make_micro_batch(t.numpy())

    vocab = stored["vocab_size"]
    with torch.no_grad():
        logits = job.chunks["0"].logits(batch(megatron_deepspeed.tokens(77, 2, vocab)), None)[
            ..., :vocab
        ]
    out = {
        "logits": logits.transpose(0, 1).numpy().copy(),
        "iteration": loaded.iteration,
        "state": loaded.state,
        "optimizer": loaded.optimizer,
        "scalars": job.engine.scalars(),
    }
    micro_batches = [batch(t) for t in megatron_deepspeed.tokens(2, 4, vocab).split(2)]
    job.executor.train(micro_batches, loss_scale=job.engine.loss_scale)
    job.step()
    following = {name: value for name, (_, value) in job.parameters().items()}
    return out | {"next": following}
