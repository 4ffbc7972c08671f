"""A GPT, split into pipeline stages. Read from top to bottom: embedding, layers, head and loss."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.config.model import ADAPTERS, ModelConfig, matches
from megatron.data.sampler import MicroBatch
from megatron.errors import ConfigError
from megatron.kernels.choose import choose_fusions
from megatron.kernels.library import recompute_later
from megatron.kernels.ops.elementwise import keyed_dropout
from megatron.layers.cache import KeyValueCache
from megatron.layers.context import (
    CallContext,
    Experts,
    LayerContext,
    ParameterFactory,
    weight_fills,
)
from megatron.layers.norm import norm_of
from megatron.layers.positions import Documents
from megatron.layers.transformer import TransformerLayer
from megatron.layers.vocabulary import (
    WORD_EMBEDDINGS,
    PositionEmbedding,
    VocabParallelEmbedding,
    Vocabulary,
    scores,
    token_losses,
    vocabulary_loss,
)
from megatron.model.formulas import ModelSizes
from megatron.model.loss import LossInputs, mean_with_components
from megatron.model.mtp import AddLosses, PredictionDepth, ahead, mask_ahead
from megatron.model.stages import assign_layers, recomputed_groups
from megatron.parallel.keyed_random import DropoutKey, Site
from megatron.parallel.layout import Layout
from megatron.parallel.sharding import kind_of, sharding_of
from megatron.parallel.topology import Topology
from megatron.pipeline.orders import stages_of_rank
from megatron.protocols import Layer, Stage

OUTPUT_LAYER = "output_layer.weight"
EMBEDDING_LAYER = -1  # stands for the embedding among the layer indices of dropout keys


class GPTChunk(nn.Module):
    """The layers of one global pipeline stage, with the embedding (first stage) and head (last).

    forward(batch, hidden) -> hidden [s(/tp), b, h] for the next stage, or on the last stage the
    scalar fp32 loss of the micro-batch: the mean over its unmasked tokens; if the loss has
    components (Config.loss_components), [1 + k] with the loss first. With context parallelism
    each rank returns a term whose mean over the ranks is this loss. `hidden` is None on the first
    stage.

    With a `cache`, which each pass extends, the batch's tokens follow the tokens of earlier passes.

    With late_loss=True, for an executor that needs the loss only after its backward pass, the loss
    is NaN until then, and the logits are computed once instead of twice
    (megatron.layers.vocabulary).
    """

    def __init__(
        self,
        config: Config,
        context: LayerContext,
        stage: int,
        layers: range,
        *,
        last: bool,
        tied_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        model = config.model
        self.config = config
        self.context = context
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = last
        fill, _ = weight_fills(model)

        norm = partial(norm_of, context, model, width=model.hidden_size)

        def vocabulary(name: str = WORD_EMBEDDINGS, tied: bool = False) -> nn.Parameter:
            assert model.vocab_size is not None, (
                "the tokenizer gives the vocabulary size before the model is built"
            )
            padded = model.padded_vocab_size(context.tensor.size)
            shape = model.vocab_size, model.hidden_size
            return context.parameters.create(name, shape, 0, fill, padded=padded, tied=tied)

        tied = not model.untie_embeddings_and_output_weights
        if self.is_first:
            both_ends = model.embeds_on_last_stage
            self.word_embeddings = VocabParallelEmbedding(context, vocabulary(tied=both_ends))
            if model.embedding_layernorm:
                self.embedding_layernorm = norm("embedding_layernorm")
            if model.position_embedding_type == "learned_absolute":
                self.position_embeddings = PositionEmbedding(
                    context, model.max_position_embeddings, model.hidden_size, fill
                )
        make: Layer = config.pieces.layer or TransformerLayer
        self.layers = nn.ModuleList(make(context, config, i) for i in layers)
        if self.is_last:
            self.final_layernorm = norm("final_layernorm")
            if not tied:
                self.output_weight = vocabulary(name=OUTPUT_LAYER)
            elif self.is_first:
                self.output_weight = self.word_embeddings.weight
            elif tied_weight is not None:
                self.output_weight = tied_weight
            else:
                self.output_weight = vocabulary(tied=True)
            depths = range(model.num_layers, model.num_layers + model.mtp_num_layers)
            self.mtp = nn.ModuleList(PredictionDepth(context, config, i) for i in depths)
            if depths:
                here: Any = self.word_embeddings.weight if self.is_first else tied_weight
                table = self.output_weight if tied else here
                self.mtp_embeddings = VocabParallelEmbedding(
                    context, vocabulary(tied=True) if table is None else table
                )
            own_loss = config.pieces.loss
            # A tuple, because a teacher's parameters are not the model's.
            self._own_loss = (own_loss(config, context),) if own_loss is not None else ()

    def forward(
        self,
        batch: MicroBatch,
        hidden: Tensor | None,
        late_loss: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        hidden = self._hidden(batch, hidden, cache)
        if not self.is_last:
            return hidden
        assert batch.labels is not None and batch.loss_mask is not None
        normed = self.final_layernorm(hidden)
        x = self._scaled(normed)
        if self.training and self.mtp:
            return self._with_later_tokens(batch, normed, x, late_loss)
        mask = batch.loss_mask
        count = None
        if (context_parallel := self.context.context_parallel) is not None:
            # The mean over the ranks is then the mean over the tokens of the full sequences.
            count = mask.sum().clamp(min=1.0) / context_parallel.size
        labels, mask = (self.context.cut(y).t() for y in (batch.labels, mask))
        for own_loss in self._own_loss:
            count = batch.loss_mask.sum().clamp(min=1.0) if count is None else count
            inputs = LossInputs(batch, labels, mask, x, self._vocabulary(), self.context.cut)
            losses, components = own_loss(inputs)
            names = self.config.loss_components
            return mean_with_components(losses, components, names, mask, count)
        return vocabulary_loss(x, labels, mask, self._vocabulary(), late_loss, count)

    def _with_later_tokens(
        self, batch: MicroBatch, normed: Tensor, x: Tensor, late_loss: bool
    ) -> Tensor:
        """Return the loss, to whose gradient those of later tokens are added, and these [1 + k]."""
        model = self.config.model
        call = self._call(batch, None)
        vocabulary = self._vocabulary()
        ranks = 1 if self.context.context_parallel is None else self.context.context_parallel.size
        values = x.new_empty(1 + len(self.mtp), dtype=torch.float32)
        losses = []
        for k, depth in enumerate((None, *self.mtp)):
            if depth is not None:
                embedded = self.mtp_embeddings(self.context.cut(ahead(batch.labels, k - 1)))
                normed = depth(self._embedding_scaled(embedded), normed, call)
                x = self._scaled(normed)
            mask = mask_ahead(batch.loss_mask, k, batch.cu_seqlens)
            count = mask.sum().clamp(min=1.0) / ranks
            labels, mask = (self.context.cut(y).t() for y in (ahead(batch.labels, k), mask))
            out = values[k]
            losses.append(vocabulary_loss(x, labels, mask, vocabulary, late_loss, count, out))
        factor = model.mtp_loss_scaling_factor / len(self.mtp)
        return AddLosses.apply(values, [1.0] + [factor] * len(self.mtp), *losses)

    def token_losses(self, batch: MicroBatch, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return, on the last stage, each label's loss and whether the label is greedy, as [b, s].

        A label is greedy if no other token has a higher score. No gradients are computed.
        """
        assert self.is_last, "labels are compared on the last stage"
        x = self._outputs(self._hidden(batch, hidden))
        context_parallel = self.context.context_parallel
        labels = self.context.cut(batch.labels).t()
        losses, greedy = (y.t() for y in token_losses(x, labels, self._vocabulary()))
        return (
            (losses, greedy)
            if context_parallel is None
            else (context_parallel.gather(losses), context_parallel.gather(greedy))
        )

    def weight_users(self) -> list[tuple[nn.Module, list[nn.Parameter]]]:
        """Return the modules that this chunk calls, in order, and the parameters of each call."""
        embeddings = (
            getattr(self, name, None)
            for name in ("word_embeddings", "embedding_layernorm", "position_embeddings")
        )
        calls = [(m, list(m.parameters())) for m in (*embeddings, *self.layers) if m is not None]
        # the norm is called right before the product with the output weight, which no module owns
        if self.is_last:
            later = (m for m in (self.mtp, getattr(self, "mtp_embeddings", None)) if m is not None)
            after = [self.output_weight, *(p for m in later for p in m.parameters())]
            after = list(dict.fromkeys(after))
            calls.append((self.final_layernorm, [*self.final_layernorm.parameters(), *after]))
        return calls

    def logits(
        self,
        batch: MicroBatch,
        hidden: Tensor | None,
        positions: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return, on the last stage, this rank's fp32 scores [s, b, vocab/tp].

        Padding entries are included (-infinity).

        With `positions`, int64 [b], return only the scores at one position of each sample,
        [1, b, vocab/tp], without gradients.
        """
        assert self.is_last, "logits exist on the last stage"
        x = self._outputs(self._hidden(batch, hidden, cache))
        return scores(x, self._vocabulary(), positions)

    def _outputs(self, hidden: Tensor) -> Tensor:
        """Return the output layer's input, multiplied by the factors on the output scores."""
        return self._scaled(self.final_layernorm(hidden))

    def _scaled(self, x: Tensor) -> Tensor:
        model = self.config.model
        scale = (model.mup_output_mult or 1.0) / (model.logits_scaling or 1.0)
        return x if scale == 1.0 else x * scale

    def _hidden(
        self, batch: MicroBatch, hidden: Tensor | None, cache: KeyValueCache | None = None
    ) -> Tensor:
        call = self._call(batch, cache)
        if self.is_first:
            hidden = self._embed(batch, call)
        assert hidden is not None, f"stage {self.stage} needs the previous stage's hidden states"
        return self._run_layers(hidden, call)

    def _call(self, batch: MicroBatch, cache: KeyValueCache | None) -> CallContext:
        dropout = None
        documents = None
        if self.training:
            first = batch.first_sample
            numbers = (0, first) if isinstance(first, Tensor) else (first, None)
            dropout = DropoutKey(self.config.training.seed, *numbers)
        bounds = batch.cu_seqlens
        lengths = batch.document_lengths
        if bounds is not None and lengths is not None and len(lengths) > len(batch.tokens):
            # otherwise each sample is a single document
            documents = Documents(bounds, lengths, len(batch.tokens))
        # Positions that cannot restart are counted by the layers themselves.
        restart = documents is not None or self.config.data.reset_position_ids
        explicit = restart if cache is None else cache.used > 0
        ids = self.context.cut(batch.position_ids) if explicit else None
        return CallContext(ids, documents, dropout, cache, batch.padding)

    def _embed(self, batch: MicroBatch, call: CallContext) -> Tensor:
        assert batch.tokens is not None
        model = self.config.model
        tokens = self.context.cut(batch.tokens)
        ids = call.position_ids
        if (context_parallel := self.context.context_parallel) is not None and ids is None:
            ids = context_parallel.positions(batch.tokens.shape[1], tokens.device).unsqueeze(0)
        hidden = self.word_embeddings(tokens)  # [s(/tp), b, h]
        hidden = self._embedding_scaled(hidden, tokens.shape[1], ids)
        seed, row_layout = call.hidden_mask(hidden, EMBEDDING_LAYER, Site.EMBEDDING, self.context)
        return keyed_dropout(
            hidden, model.hidden_dropout, seed, self.context.fusions.bias_dropout, row_layout
        )

    def _embedding_scaled(
        self, hidden: Tensor, length: int = 0, ids: Tensor | None = None
    ) -> Tensor:
        model = self.config.model
        if model.embedding_scale is not None:
            hidden = hidden * model.embedding_scale
        if model.embedding_layernorm:
            hidden = self.embedding_layernorm(hidden)
        if model.position_embedding_type == "learned_absolute":
            hidden = hidden + self.position_embeddings(length, ids)
        if model.mup_embedding_mult != 1.0:
            hidden = hidden * model.mup_embedding_mult
        return hidden.float() if model.fp32_residual_connection else hidden

    def _run_layers(self, hidden: Tensor, call: CallContext) -> Tensor:
        """Run all layers of the stage; some may be recomputed in the backward pass."""
        layers = list(self.layers)
        groups = list[int]()
        if torch.is_grad_enabled():
            groups = recomputed_groups(len(layers), self.config.recompute)

        def run(x: Tensor, unit: list[nn.Module]) -> Tensor:
            for layer in unit:
                x = layer(x, call)
            return x

        for size in groups:
            unit = layers[:size]
            layers = layers[size:]
            hidden = recompute_later(run, hidden, unit)
        return run(hidden, layers)

    def _vocabulary(self) -> Vocabulary:
        sharding = sharding_of(self.output_weight)
        model = self.config.model
        tokens = self.config.kernels.cross_entropy_chunk_tokens
        shard = self.output_weight, self.context, sharding.offset[0], sharding.extent[0]
        return Vocabulary(*shard, tokens, model.final_logit_softcapping or 0.0, model.logit_z_loss)


def layer_context(
    config: Config, topology: Topology, perform_initialization: bool = True, late: bool = False
) -> LayerContext:
    """Return how this rank's layers are distributed over ranks.

    For `perform_initialization` and `late` see ParameterFactory.
    """
    model = config.model
    base_shapes = dict[str, tuple[int, ...]]()
    if model.use_mup:
        base_shapes = global_shapes(dataclasses.replace(config, model=model.mup_base()))
    context_parallel = None
    if topology.context.size > 1:
        from megatron.layers.context_parallel import ContextParallel
        from megatron.layers.ring import attend

        context_parallel = ContextParallel(topology.context, config.parallel.head_ranks, attend)
    return LayerContext(
        tensor=topology.tensor,
        context_parallel=context_parallel,
        parameters=ParameterFactory(
            config.training.seed,
            topology.tensor.rank,
            topology.tensor.size,
            topology.device,
            perform_initialization,
            late,
            base_shapes,
        ),
        sequence_parallel=config.parallel.sequence_parallel and topology.tensor.size > 1,
        overlap=config.parallel.async_tensor_model_parallel_allreduce,
        chunks=config.parallel.tp_comm_overlap_chunks if config.parallel.tp_comm_overlap else 1,
        fusions=choose_fusions(config.kernels, topology.device, config.precision.dtype_name),
        adapter=model.adapter,
        experts=None
        if model.num_experts is None
        else Experts(
            topology.expert, topology.expert_hops, topology.expert_tensor, topology.expert_inputs
        ),
    )


def build_chunks(
    config: Config, topology: Topology, context: LayerContext | None = None
) -> nn.ModuleDict:
    """Build this rank's stages, keyed by global stage number.

    Parameters are in fp32 on the topology's device.

    The schedule says which stages these are. A tied embedding is a single parameter if
    the first and the last stage share a process, otherwise two copies with the same values. Stages
    or layers may be user-defined (Config.with_pieces).
    """
    context = context or layer_context(config, topology)
    stages = config.parallel.num_stages
    layers = assign_layers(config.model.num_layers, stages, config.parallel.pipeline_layout)
    chunks: dict[str, nn.Module] = {}
    make: Stage = config.pieces.model or GPTChunk
    size = topology.pipeline.size
    for stage in stages_of_rank(config.schedule, size, stages // size, topology.pipeline.rank):
        embeddings: Any = getattr(chunks.get("0"), "word_embeddings", None)
        shared = None if embeddings is None else embeddings.weight
        last = stage == stages - 1
        chunk = make(config, context, stage, layers[stage], last=last, tied_weight=shared)
        for name, p in chunk.named_parameters():
            if not hasattr(p, "sharding"):
                raise ConfigError(
                    f"parameter {name} of stage {stage}, of shape {list(p.shape)}, was not made by "
                    "context.parameters.create, so that nothing can divide or save it: create it "
                    "so, or use ColumnParallelLinear, RowParallelLinear or Norm in place of "
                    "torch.nn's modules (docs/extending.md)"
                )
        freeze(config.model, chunk)
        chunks[str(stage)] = chunk
    return nn.ModuleDict(chunks)


def freeze(model: ModelConfig, chunk: nn.Module) -> None:
    """Freeze the parameters of a chunk that do not train (ModelConfig.trains)."""
    for p in chunk.parameters() if model.trains_in_part else ():
        if not model.trains(sharding_of(p).name):
            p.requires_grad_(False)


def check_patterns(config: Config) -> list[str]:
    """Return the names of the model's parameters; allocates no memory.

    Raises ConfigError for a pattern of --freeze that matches no parameter, or of --lora-target that
    matches no linear layer, and if nothing trains.
    """
    shapes = global_shapes(config)
    names = list(shapes)
    model = config.model
    linear = {n.split(".")[-2] for n, shape in shapes.items() if kind_of(n, shape) == "hidden"}
    for flag, patterns, known, what, like in (
        (
            "--freeze",
            model.freeze,
            names,
            "parameter",
            {".".join(n.split(".")[:end]) for n in names for end in range(1, 9)},
        ),
        (
            "--lora-target",
            model.lora_target if model.lora_rank else (),
            [n.rpartition(".")[0] for n in names if n.endswith(ADAPTERS)],
            "linear layer",
            linear - {"experts", "router"},
        ),
    ):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in known):
                near = difflib.get_close_matches(pattern, sorted(like), 4, 0.0)
                raise ConfigError(
                    f"{flag} {pattern} matches no {what}: names in the model are {', '.join(near)}"
                )
    if not any(map(model.trains, names)):
        raise ConfigError(f"--freeze {' '.join(model.freeze)} leaves no parameter to train")
    return names


def global_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the global shape of each parameter of the model, by name; allocates no memory."""
    return dict(model_sizes(config).shapes)


def model_sizes(config: Config) -> ModelSizes:
    """Return the shapes of the model's parameters and its FLOPs; allocates no memory."""
    chunks = meta_chunks(config)
    shardings = [sharding_of(p) for p in chunks.parameters()]
    first: Any = next(iter(chunks.values()))
    shapes = {s.name: s.global_shape for s in shardings}
    return ModelSizes(config.model, shapes, first.context.core_flops)


def meta_chunks(config: Config) -> nn.ModuleDict:
    """Return all stages, not sharded over tensor ranks, without allocating memory."""
    config = dataclasses.replace(config, pieces=config.pieces.architecture)
    return build_chunks(config, Topology.from_layout(Layout(), 0, device=torch.device("meta")))


def stages_of(
    chunks: nn.ModuleDict,
) -> dict[int, Callable[[MicroBatch, Tensor | None], Tensor]]:
    """Return the functions that an executor runs, by global stage: the chunks with late_loss.

    They compute their loss in the backward pass.
    """
    return {int(stage): partial(chunk, late_loss=True) for stage, chunk in chunks.items()}


def hidden_state(config: Config) -> tuple[tuple[int, int, int], torch.dtype]:
    """Return the shape [s(/tp), b, h] and dtype of messages between stages.

    s is the length of a context-parallel rank's part of the sequence.
    """
    parallel = config.parallel
    model = config.model
    shape = (
        model.seq_length // parallel.sequence_ranks,
        config.batch.micro_batch_size,
        model.hidden_size,
    )
    wide = model.fp32_residual_connection
    return shape, torch.float32 if wide else getattr(torch, config.precision.dtype_name)
