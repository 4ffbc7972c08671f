"""megatron-core's own writer of torch_dist, in processes of its own: its package is named as ours.

    python core_peer.py FOLDER RANK SIZE STORE ONE FOUR TRUTH

FOLDER is where megatron-core was installed with `pip install --no-deps --target FOLDER`. One process
builds a GPT with Adam, in bf16 with fp32 masters, saves it to ONE, and writes its tensors and logits
to TRUTH. Four processes load that as 2 tensor x 2 pipeline ranks and save it again, to FOUR0 with
tensors of all layers and to FOUR1 with tensors of each.
"""

import argparse
import contextlib
import os
import sys

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]]


def build(core, tensor, pipeline):
    """Return the model's part on this rank: gated, grouped queries, norms of queries and keys."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_qkv_bias=True,
        qk_layernorm=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True),
        vocab_size=64,
        max_sequence_length=16,
        pre_process=core.is_pipeline_first_stage(),
        post_process=core.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def sharded(model, masters, adam, metadata):
    """Return what Megatron saves: model and optimizer, as its Float16Optimizer describes them."""
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        make_sharded_optimizer_tensor,
        optim_state_to_sharding_state,
    )

    state = model.sharded_state_dict(metadata=metadata)
    parameters = get_param_id_to_sharded_param_map(state, model.parameters())
    optimizer = adam.state_dict()
    step = optimizer["state"][0]["step"]
    optim_state_to_sharding_state(optimizer, parameters, exclude_keys=("step",))
    optimizer["state"]["common_step"] = step
    copies = [
        make_sharded_optimizer_tensor(parameters[i], master, "optimizer.state.fp32_param")
        for i, master in enumerate(masters)
    ]
    return {
        "model": state,
        "optimizer": {"optimizer": optimizer, "fp32_from_fp16_params": [copies]},
    }


def main():
    folder, rank, size, store, first, second, truth = sys.argv[1:]
    sys.path.insert(0, folder)
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    # Without a GPU: its attention takes memory, and the generator of a dropout that is off, from
    # one, and its writer waits for it.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    get_cuda_rng_tracker().fork = contextlib.nullcontext

    tensor = pipeline = 1 if size == "1" else 2
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size)
    )
    parallel_state.initialize_model_parallel(tensor, pipeline)
    torch.manual_seed(1)
    model = build(parallel_state, tensor, pipeline)
    for parameter in model.parameters():  # norms and biases too
        parameter.data += 0.1 * torch.randn(parameter.shape)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    adam = torch.optim.Adam(masters)
    for master in masters:
        master.grad = torch.randn(master.shape)
    adam.step()
    adam.zero_grad()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data = master.clone()
    logits = None
    if size == "1":
        tokens = torch.tensor(TOKENS)
        length = tokens.shape[1]
        places = torch.arange(length).expand_as(tokens)
        mask = torch.ones(length, length).triu(1).bool()[None, None]
        logits = model(tokens, places, mask).detach()
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.data = master.to(torch.bfloat16)

    def save(target, metadata, **common):
        os.makedirs(target, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save({**sharded(model, masters, adam, metadata), **common}, target)

    arguments = argparse.Namespace(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        ffn_hidden_size=48,
        swiglu=True,
        add_bias_linear=True,
        add_qkv_bias=True,
        qk_layernorm=True,
        normalization="LayerNorm",
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=True,
        seq_length=16,
        max_position_embeddings=16,
        vocab_size=60,
        padded_vocab_size=64,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
    )
    common = {"args": arguments, "iteration": 7, "checkpoint_version": 3.0}
    if size == "1":
        save(first, {}, **common)
        moments = [adam.state[master] for master in masters]
        names = [name for name, _ in model.named_parameters()]
        values = {
            f"{kind}.{name}": value
            for name, master, state in zip(names, masters, moments, strict=True)
            for kind, value in (("master", master), *state.items())
            if kind != "step"
        }
        torch.save({"tensors": values, "logits": logits}, truth)
    else:
        for master in masters:  # wrong, to be replaced by those that are loaded
            master.zero_()
        target = sharded(model, masters, adam, {})
        loaded = dist_checkpointing.load(target, first)
        model.load_state_dict(loaded["model"])
        loaded_states = loaded["optimizer"]["optimizer"]["state"]
        for i, (master, copy) in enumerate(
            zip(masters, loaded["optimizer"]["fp32_from_fp16_params"][0], strict=True)
        ):
            master.copy_(copy)
            for kind in ("exp_avg", "exp_avg_sq"):
                adam.state[master][kind] = loaded_states[i][kind]
        for metadata in ({}, {"singleton_local_shards": True}):
            save(f"{second}{len(metadata)}", metadata, **common)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
