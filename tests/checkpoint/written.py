"""Checkpoints without a training run: given tensors, cut into rows over several files."""

import json

import torch

from megatron.checkpoint.files import digest, write_manifest, write_text
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.shards import check_complete, merged, totals, write_index, write_piece
from megatron.checkpoint.writer import ShardWriter

PROVENANCE = {
    "layout": {"world": 2, "tensor": 1, "pipeline": 1, "data": 2},
    "versions": {"torch": "1.2"},
}


def tensors(seed=0, optimizer=True):
    """Return the weights and moments of a tiny model, fp32."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding.weight": (10, 3),
        "layers.0.norm.weight": (7,),
        "layers.0.mlp.weight": (4, 2, 3),
    }
    kinds = ("master", "exp_avg", "exp_avg_sq") if optimizer else ("master",)
    return {
        f"{k}.{n}": torch.randn(s, generator=generator) for k in kinds for n, s in shapes.items()
    }


def signed(content):
    """Return a manifest that is valid in itself."""
    checksum = digest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps({**content, "digest": checksum}, indent=1, sort_keys=True) + "\n"


def make(
    root,
    iteration,
    values,
    files=2,
    config=None,
    state=None,
):
    """Write ROOT/iter_NNNNNNN, over `files` data files, and the tracker; return the folder."""
    folder = root / f"iter_{iteration:07d}"
    folder.mkdir(parents=True)
    lists = []
    for rank in range(files):
        with ShardWriter(folder, rank) as writer:
            for name, value in values.items():
                start = len(value) * rank // files
                stop = len(value) * (rank + 1) // files
                if stop > start:
                    writer.add(
                        name,
                        tuple(value.shape),
                        (start, *(0 for _ in value.shape[1:])),
                        value[start:stop],
                    )
            lists.append(writer.finish())
    complete = merged(lists)
    check_complete([totals(complete)])
    names = [write_piece(folder, 0, complete)[0], write_index(folder, [totals(complete)])[0]]
    contents = {
        "format": 3,
        "iteration": iteration,
        "optimizer": any(n.startswith("exp_avg.") for n in values),
        "state": dict(state or {"iteration": iteration}),
        "engine": {"loss_scale": None},
    }
    small = {
        "state.json": contents,
        "config.json": dict(config or {"model": {"num_layers": 1}}),
        "passport.json": PROVENANCE,
    }
    for name, content in small.items():
        write_text(folder / name, json.dumps(content))
        names.append(name)
    write_manifest(folder, names)
    write_text(root / TRACKER, f"{iteration}\n")
    return folder
