"""Loading of a checkpoint's model and tokenizer, without its optimizer state and data.

torch is imported only when a model is loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config import Config
from megatron.config.io import hugging_face_folder
from megatron.config.pieces import Pieces
from megatron.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.load import LoadedState
    from megatron.data.tokenizer import Tokenizer
    from megatron.parallel.topology import Topology
    from megatron.training.report.events import Event

_AS_TRAINED = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "data_packing")


@dataclass(frozen=True)
class Trained:
    """A checkpoint's model on this rank.

    config     settings of the model, its tokenizer and the separation of documents
    topology   the layout, whose ranks hold the model together
    tokenizer  None if the model was trained without one
    chunks     this rank's stages, without dropout
    loaded     the loaded checkpoint, and why it was chosen
    publish    takes events about the model's use; a tool adds them to --metrics-file on rank 0
    """

    config: Config
    topology: Topology
    tokenizer: Tokenizer | None
    chunks: torch.nn.ModuleDict
    loaded: LoadedState
    publish: Callable[[Event], object] = lambda event: None


def load_model(
    folder: str | os.PathLike[str],
    topology: Topology | None = None,
    *,
    tag: str | int | None = None,
    allow_older: bool = False,
    ema: bool = False,
    pieces: Pieces | str | None = None,
    **settings: object,
) -> Trained:
    """Load the newest checkpoint of a --save folder, or the model of hf:FOLDER.

    folder       a --save folder, or hf:FOLDER for a model in Hugging Face's format; see
                 docs/huggingface.md
    topology     the topology of all processes, made by connect and Topology.create; all of them
                 call this. By default this process alone, on its GPU if it has one. The layout may
                 differ from the one used in training
    tag          an iteration, or the name of a checkpoint's folder
    allow_older  whether to load the previous checkpoint if the newest is damaged; .loaded.rejected
                 lists the damaged ones
    ema          whether to load the average of the weights (--ema-decay) instead of the weights
    pieces       the layer and model of your own with which it was trained: megatron.Pieces, or the
                 file of --pieces
    settings     settings that override the checkpoint's, by their names in the configuration, such
                 as bf16=True (fp32 by default) or tokenizer_model="moved.model"; None: no change

    Warns of tensors that transformers does not read, either; .loaded.notes lists them. Raises
    CheckpointError, ConfigError or DataError for invalid checkpoints, settings or tokenizer
    files, and LaunchError if ranks have different settings or read different files.
    """
    import torch

    from megatron.checkpoint.huggingface_load import fill_shards
    from megatron.checkpoint.load import LoadedState, load_weights
    from megatron.checkpoint.tensors import MASTER, weights_to_load
    from megatron.data.tokenizer import load_tokenizer
    from megatron.engine.optimizer_state import AVERAGE
    from megatron.model.gpt import build_chunks, layer_context
    from megatron.parallel.launch import Launch, select_device
    from megatron.parallel.process_descriptions import compare
    from megatron.parallel.sharding import sharding_of
    from megatron.parallel.topology import Topology
    from megatron.training.run.identity import file_digests, inputs

    if ema and hugging_face_folder(str(folder)) is not None:
        raise ConfigError(f"{folder} has one model and no average of its weights: remove --ema")
    topology = topology or Topology.create(device=select_device(Launch()))
    config = _config(folder, topology, tag, pieces, settings)
    if topology.world.size > 1:
        read = file_digests(inputs(config.replace(load=str(folder))))
        if problem := compare({"settings": config.to_dict(), "files": read}, topology.world):
            raise LaunchError(problem)
    vocab_size = config.model.vocab_size
    if config.tokenizer.tokenizer_type == "NullTokenizer" and vocab_size is not None:
        # the model's vocabulary counts the end token that this tokenizer adds to the given size
        vocab_size -= 1
    tokenizer = load_tokenizer(config.replace(vocab_size=vocab_size))
    empty = layer_context(config, topology, perform_initialization=False)
    chunks = build_chunks(config, topology, empty)
    chunks.to(getattr(torch, config.precision.dtype_name)).eval()
    for p in chunks.parameters():
        if sharding_of(p).fp32:
            p.data = p.data.float()
    source = hugging_face_folder(str(folder))
    if source is None:
        kind = AVERAGE if ema else MASTER
        loaded = load_weights(folder, chunks, topology, tag, allow_older=allow_older, kind=kind)
    else:
        notes = fill_shards(source, weights_to_load(chunks).items(), topology, config)
        for note in notes if topology.world.rank == 0 else ():
            warnings.warn(f"{folder}: {note}", stacklevel=2)
        loaded = LoadedState(0, {}, False, source, (), tuple(notes))
    return Trained(config, topology, tokenizer, chunks, loaded)


def _config(
    folder: str | os.PathLike[str],
    topology: Topology,
    tag: str | int | None,
    pieces: Pieces | str | None,
    settings: dict[str, object],
) -> Config:
    """Return the checkpoint's settings with the topology's layout, in fp32 unless overridden."""
    from megatron.checkpoint.find import find_folder, open_checkpoint
    from megatron.checkpoint.huggingface_config import read_model, tokenizer_settings
    from megatron.checkpoint.settings import pieces_of_model, plain

    source = hugging_face_folder(str(folder))
    if source is None:
        stored = open_checkpoint(find_folder(folder, tag)).config
    else:
        if tag is not None:
            raise ConfigError(f"{folder} has one model: leave --load-tag {tag} out")
        stored = {"model": plain(read_model(source)[1]), "tokenizer": tokenizer_settings(source)}
    data = stored.get("data", {})
    combined = {
        **stored.get("model", {}),
        **stored.get("tokenizer", {}),
        **{name: data[name] for name in _AS_TRAINED if name in data},
        "bf16": False,
        "fp16": False,
        "moe_use_upcycling": False,  # already done
        "preset": None,
        "world_size": topology.world.size,
        "tensor_model_parallel_size": topology.tensor.size,
        "pipeline_model_parallel_size": topology.pipeline.size,
        "expert_model_parallel_size": topology.expert.size,
        "expert_tensor_parallel_size": topology.expert_tensor.size,
        "context_parallel_size": topology.context.size,
        **{name: value for name, value in settings.items() if value is not None},
    }
    known = {name: value for name, value in combined.items() if value is not None}
    of_model = pieces_of_model(stored, pieces, folder)
    return Config.create(**known).with_pieces(layer=of_model.layer, model=of_model.model)
