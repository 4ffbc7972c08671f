"""Configurations on a layout, for tests of placement and messages."""

from megatron.config import Config
from megatron.config.command_line import parse_plan


def made(tensor, pipeline, data, chunks=1, **fields):
    """Return a GPT-3 of 13B on this layout, with 2 layers a chunk and sequence parallelism."""
    layers = max(8, 2 * pipeline * chunks)
    virtual = (
        {"num_layers_per_virtual_pipeline_stage": layers // pipeline // chunks}
        if chunks > 1
        else {}
    )
    settings = dict(
        num_layers=layers,
        hidden_size=5120,
        num_attention_heads=40,
        seq_length=2048,
        vocab_size=51200,
        bf16=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        world_size=tensor * pipeline * data,
        global_batch_size=8 * pipeline * data,
        sequence_parallel=tensor > 1,
        **virtual,
    )
    return Config.create(**settings | fields)


def planned(*flags):
    """Return the configuration of a command line for planning.

    The last of equal flags counts, and --no-bf16 takes a --bf16 away.
    """
    words = " ".join(flags).split()
    dropped = ("--bf16", "--no-bf16") if "--no-bf16" in words else ()
    return parse_plan([word for word in words if word not in dropped])


def table(rows):
    """Return {name: flags} of lines "name | flags"."""
    pairs = (line.split(" | ") for line in rows.strip().splitlines())
    return {name.strip(): flags for name, flags in pairs}
