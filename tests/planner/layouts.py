"""Configurations on a layout, for tests of placement and messages."""

from megatron.config.command_line import parse_plan
from megatron.planner.search.find import GIB, LayoutSearch
from megatron.planner.search.space import LayoutSpace, make_config


def made(tensor, pipeline, data, chunks=1, more=""):
    """Return a GPT-3 of 13B on this layout, with 2 layers a chunk and sequence parallelism."""
    layers = max(8, 2 * pipeline * chunks)
    return planned(
        "--hidden-size 5120 --num-attention-heads 40 --seq-length 2048 --vocab-size 51200 --bf16",
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}",
        f"--world-size {tensor * pipeline * data} --global-batch-size {8 * pipeline * data}",
        f"--num-layers {layers}",
        f"--num-layers-per-virtual-pipeline-stage {layers // pipeline // chunks}" * (chunks > 1),
        "--sequence-parallel" * (tensor > 1),
        more,
    )


def planned(*flags):
    """Return the configuration of a command line for planning.

    The last of equal flags counts, and --no-FLAG takes a --FLAG away.
    """
    words = " ".join(flags).split()
    taken_away = {word.replace("--no-", "--") for word in words if word.startswith("--no-")}
    return parse_plan([word for word in words if word not in taken_away])


def layout_search(cluster, gib=57.6, worlds=(8,), batches=(8,), **choices):
    """Return a search for layouts of a model of a billion parameters in memory of this size."""
    flags = "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16"
    base = make_config(None, [*flags.split(), "--vocab-size", "50257"], max(batches))
    space = LayoutSpace(base, "a model", cluster, worlds, {"gbs": batches, **choices})
    return LayoutSearch(space, gib * GIB)


def table(rows):
    """Return {name: flags} of lines "name | flags"."""
    pairs = (line.split(" | ") for line in rows.strip().splitlines())
    return {name.strip(): flags for name, flags in pairs}
