"""Folders of Megatron core: written by torch's own checkpoints in its names, and by itself."""

import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import megatron
from megatron.checkpoint.find import find_folder
from megatron.checkpoint.folder import TRACKER
from megatron.data.sampler import make_micro_batch
from megatron.errors import CheckpointError
from megatron_conversion.convert import find_source, read_source
from megatron_conversion.names import ours
from tests.data.test_megatron_core import core as core
from tests.tools.conversion import megatron_deepspeed
from tests.tools.conversion.core_peer import TOKENS
from tests.tools.conversion.full_tensors import check_tensors, converted, refused, whole_tensors
from tests.tools.conversion.test_megatron import whole_model

# Megatron core's names: with norms of their own, and as parts of TransformerEngine's linear layers.
LOCAL = {
    "encoder.": "decoder.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".query_key_value.": ".linear_qkv.",
    ".self_attention.dense.": ".self_attention.linear_proj.",
    ".dense_h_to_4h.": ".linear_fc1.",
    ".dense_4h_to_h.": ".linear_fc2.",
}
FUSED = {
    **LOCAL,
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


class ShardedTensor(torch.Tensor):
    """Tensor that torch's checkpoints write in shards, as ranks do."""

    def cuts(self):
        """Return the slices of the shards: halves of the first and of the last dimension."""
        each = [[slice(0, size)] for size in self.shape]
        for dim in (-1, 0):
            size = self.shape[dim]
            step = -(-self.shape[dim] // 2)
            each[dim] = [slice(i, min(i + step, size)) for i in range(0, size, step)]
        return list(itertools.product(*each))

    def shard(self, cut):
        return self.as_subclass(torch.Tensor)[cut].clone()

    def offsets(self, cut):
        return torch.Size([extent.start for extent in cut])

    def __create_write_items__(self, key, _):
        properties = Properties(self.dtype)
        items = []
        for number, cut in enumerate(self.cuts()):
            offset = self.offsets(cut)
            size = self.shard(cut).shape
            data = TensorWriteData(ChunkStorageMetadata(offset, size), properties, self.shape)
            index = MetadataIndex(key, offset, number)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self):
        each = ((self.offsets(cut), self.shard(cut).shape) for cut in self.cuts())
        return [ChunkStorageMetadata(*one) for one in each]

    def __get_tensor_shard__(self, index):
        return next(self.shard(c) for c in self.cuts() if self.offsets(c) == index.offset)


def in_core(flat, names, stacked, gated):
    """Return tensors as Megatron core names and stacks them."""
    tensors = {}
    for name, tensor in flat.items():
        for old, new in names.items():
            name = name.replace(old, new)
        _, _, rest = name.partition("decoder.layers.")
        if stacked and rest:
            number, _, suffix = rest.partition(".")
            tensors.setdefault(f"decoder.layers.{suffix}", []).append((int(number), tensor))
        elif gated and "linear_fc1" in name and "layer_norm" not in name:
            tensors |= dict(zip((f"{name}_w", f"{name}_v"), tensor.chunk(2), strict=True))
        else:
            tensors[name] = tensor
    return {
        name: torch.stack([tensor for _, tensor in sorted(value, key=lambda one: one[0])])
        if isinstance(value, list)
        else value
        for name, value in tensors.items()
    }


def write(root, style, stacked=True, fused=False, half=True):
    """Write a folder as Megatron does; return its arguments and whole tensors."""
    a = megatron_deepspeed.arguments(style, num_layers=2, tensor_model_parallel_size=2)
    seeds = {"master": 3, "exp_avg": 4, "exp_avg_sq": 5}
    kinds = {kind: whole_model(a, seed) for kind, seed in seeds.items()}
    names = FUSED if fused else LOCAL
    gated = a.swiglu and not stacked
    content = {"rng_state/shard_0_1": [1, 2]}
    for kind, flat in kinds.items():
        core_names = in_core(flat, names, stacked, gated)
        master = "param" if fused else "fp32_param"  # of its distributed optimizer, and without it
        prefix = f"optimizer.state.{master if kind == 'master' else kind}."
        if kind == "master":
            weights = {n: x.half() if half else x for n, x in core_names.items()}
            content |= weights | {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_4": [b""]}
        if half or kind != "master":
            content |= {f"{prefix}{name}": x for name, x in core_names.items()}
    folder = root / "iter_0000005"
    folder.mkdir(parents=True)
    sharded = {
        n: x.as_subclass(ShardedTensor) if isinstance(x, torch.Tensor) else x
        for n, x in content.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process without a group is intended
        dcp.save(sharded, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    step = torch.tensor(5.0)
    adam = {"state": {"common_step": step}, "param_groups": [{"lr": 1e-3}]}
    if fused:
        adam = {"state": {}, "param_groups": [{"step": 5}, {"step": 5}]}
    common = {"args": a, "checkpoint_version": 3.0, "iteration": 5}
    common |= {"optimizer": {"optimizer": adam, "grad_scaler": scaler} if half else adam}
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (root / TRACKER).write_text("5")
    return a, kinds


@pytest.mark.parametrize(
    ("style", "stacked", "fused", "half"),
    [
        ("gpt", True, False, True),
        ("mixed", True, True, True),
        ("llama", False, True, False),
    ],
)
def test_all_of_it_is_converted(tmp_path, style, stacked, fused, half):
    a, kinds = write(tmp_path / "old", style, stacked, fused, half)
    plan = converted(tmp_path / "old", tmp_path / "new")
    assert (plan.source.iteration, plan.source.optimizer_step) == (5, 5)
    scale = {"scale": 512.0, "good_steps": 3, "allowance": 2}
    assert plan.source.loss_scale == (scale if half else None)
    check_tensors(tmp_path / "new", a, kinds)
    with pytest.raises(CheckpointError, match="--load"):
        read_source(find_source(tmp_path / "new"))  # that one is of this program


def rewrite(edit):
    """Return a function that changes the list of the shards."""

    def action(folder):
        path = folder / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        edit(metadata)
        path.write_bytes(pickle.dumps(metadata))

    return action


def other_optimizer(metadata):
    listed = metadata.state_dict_metadata
    for key in [key for key in listed if "exp_avg_sq" in key]:
        del listed[key]


def test_an_optimizer_in_another_layout_is_left_out(tmp_path):
    a, kinds = write(tmp_path / "old", "gpt")
    rewrite(other_optimizer)(tmp_path / "old" / "iter_0000005")
    source = converted(tmp_path / "old", tmp_path / "new").source
    assert source.optimizer_step is None and "fully-reshardable" in source.notes[-1]
    weights = {name: x.half().float() for name, x in kinds["master"].items()}
    check_tensors(tmp_path / "new", a, {"master": weights})


def cut_data(folder):
    os.truncate(folder / "__0_0.distcp", 9000)


def lose_a_piece(metadata):
    metadata.storage_data.pop(
        next(i for i in metadata.storage_data if i.fqn.endswith("fc1.weight"))
    )


def lead_outside(metadata):
    for location in metadata.storage_data.values():
        location.relative_path = "../elsewhere"


def claim_layers(metadata):
    tensor = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    tensor.size = torch.Size([10**15, *tensor.size[1:]])


BAD = {
    "cut": (cut_data, "__0_0.distcp"),
    "a piece": (rewrite(lose_a_piece), "linear_fc1"),
    "outside": (rewrite(lead_outside), ".metadata"),
    "layers": (rewrite(claim_layers), "layers"),
}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    root = tmp_path_factory.mktemp("torch_dist")
    write(root, "gpt")
    return root


@pytest.mark.parametrize("case", BAD)
def test_damage_is_named_and_nothing_is_written(old, tmp_path, case):
    shutil.copytree(old, tmp_path / "bad")
    damage, named = BAD[case]
    damage(tmp_path / "bad" / "iter_0000005")
    refused(tmp_path / "bad", tmp_path / "new", named)


@pytest.mark.campaign("peers")
def test_what_megatron_core_writes(core, tmp_path):
    """From one process, and from 2 x 2 ranks in both of its layouts: the same tensors and logits."""
    peer = Path(__file__).with_name("core_peer.py")
    places = [str(tmp_path / name) for name in ("one", "four", "truth.pt")]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for size in (1, 4):
        words = [sys.executable, "-W", "ignore", str(peer), str(core)]
        running = [
            subprocess.Popen(
                [*words, str(rank), str(size), str(tmp_path / f"store{size}"), *places],
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                env={**clean, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        errors = [one.communicate()[1] for one in running]
        assert not any(one.returncode for one in running), errors
    truth = torch.load(tmp_path / "truth.pt", weights_only=True)
    for folder in ("one", "four0", "four1"):
        target = tmp_path / f"{folder}-new"
        assert converted(tmp_path / folder, target).source.optimizer_step == 1
        tensors = whole_tensors(find_folder(target))
        assert len(tensors) == len(truth["tensors"])
        for key, value in truth["tensors"].items():
            kind, _, name = key.partition(".")
            our_name = ours(name)
            assert our_name is not None
            vocabulary = our_name in ("embedding.word_embeddings.weight", "output_layer.weight")
            expected = value[:60] if vocabulary else value
            expected = torch.stack(value.chunk(2)) if "dense_h_to_4h" in our_name else expected
            assert torch.equal(tensors[f"{kind}.{our_name}"], expected), (folder, key)
    tokens = torch.tensor([[*row, 0] for row in TOKENS])
    chunk = megatron.load_model(tmp_path / "one-new").chunks["0"]
    with torch.no_grad():
        logits = chunk.logits(make_micro_batch(tokens.numpy()), None)[..., :60]
    expected = truth["logits"][..., :60].transpose(0, 1)
    # four layers in fp32 by other kernels: some rounding errors of 1e-7 of values up to 5
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    assert expected.abs().max() > 0.5
