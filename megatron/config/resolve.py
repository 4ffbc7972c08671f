"""Fill in the settings that follow from others. Tolerates bad ones: what cannot be computed stays
unset.
"""

from __future__ import annotations

from megatron.config.settings import Settings

# What a library user or a test need not say; run_requirements insists on them for a training run.
_STAND_INS = {"micro_batch_size": 1, "lr": 1e-4}
_STAND_IN_ORIGIN = "default; a training run must give it"


def resolve(settings: Settings) -> None:
    """Fill `settings.values` from what was given, the defaults, and what follows from them."""
    settings.fill_defaults()
    # Megatron-LM's examples quote it twice
    settings.values["split"] = settings.values["split"].strip("'\"")
    for name, value in _STAND_INS.items():
        if settings.values[name] is None and name not in settings.bad:
            settings.derive(name, value, _STAND_IN_ORIGIN)
    _tokenizer(settings)
    _model(settings)
    _parallel(settings)
    _batch(settings)
    _learning_rate(settings)
    _rest(settings)


def layout_counts(layout: str) -> list[int] | None:
    """The numbers of a pipeline layout such as '3,4,4,3'; None when it is something else."""
    parts = [part.strip() for part in layout.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) > 0 for part in parts):
        return None
    return [int(part) for part in parts]


def even_counts(number: int, stages: int) -> list[int]:
    """So many layers over the stages: each gets the quotient, and the stages just before the last
    one more each.
    """
    each, left_over = divmod(number, stages)
    before_last = stages - 1
    return [each + (before_last - left_over <= stage < before_last) for stage in range(stages)]


def _tokenizer(s: Settings) -> None:
    v = s.values
    chosen = v["vocab_size"] is not None and not s.origins["vocab_size"].startswith("preset")
    open_kind = v["tokenizer_type"] is None and "tokenizer_type" not in s.bad
    if open_kind and v["vocab_file"] and v["merge_file"] and not chosen:
        s.derive("tokenizer_type", "GPT2BPETokenizer", "derived from vocab-file and merge-file")
    # A preset names the vocabulary of the model's own tokenizer; another tokenizer brings its own.
    kind = v["tokenizer_type"]
    if kind not in (None, "NullTokenizer") and s.origins["vocab_size"].startswith("preset"):
        s.given.pop("vocab_size", None)
        s.derive("vocab_size", None, "default")


def _model(s: Settings) -> None:
    v = s.values
    if v["ffn_hidden_size"] is None and s.usable("hidden_size"):
        if v["swiglu"]:
            # Three matrices instead of two: 2/3 of the width keeps the parameters (Shazeer 2020,
            # arXiv 2002.05202).
            width = int(4 * v["hidden_size"] * 2 / 3 / 64) * 64
            s.derive("ffn_hidden_size", max(64, width), "derived from hidden-size and swiglu")
        else:
            s.derive("ffn_hidden_size", 4 * v["hidden_size"], "derived from hidden-size")
    if v["kv_channels"] is None and s.usable("hidden_size", "num_attention_heads"):
        width, remainder = divmod(v["hidden_size"], v["num_attention_heads"])
        if remainder == 0:
            s.derive("kv_channels", width, "derived from hidden-size and num-attention-heads")
    if v["num_key_value_heads"] is None and s.usable("num_attention_heads"):
        s.derive(
            "num_key_value_heads", v["num_attention_heads"], "derived from num-attention-heads"
        )
    if v["max_position_embeddings"] is None and s.usable("seq_length"):
        s.derive("max_position_embeddings", v["seq_length"], "derived from seq-length")


def _parallel(s: Settings) -> None:
    v = s.values
    v["data_parallel_size"] = None
    v["virtual_pipeline_model_parallel_size"] = 1
    if s.usable("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        replica = v["tensor_model_parallel_size"] * v["pipeline_model_parallel_size"]
        if v["world_size"] is None and "world_size" not in s.bad:
            s.derive("world_size", replica, "derived: one replica")
        if s.usable("world_size") and v["world_size"] % replica == 0:
            s.derive(
                "data_parallel_size",
                v["world_size"] // replica,
                "derived from world size, tensor and pipeline size",
            )
    _chunks(s)
    if (
        v["sequence_parallel"]
        and v["tensor_model_parallel_size"] == 1
        and s.usable("tensor_model_parallel_size")
    ):
        s.derive("sequence_parallel", False, "derived from tensor-model-parallel-size 1")
        s.notices.append(
            "--sequence-parallel is off: it has no effect with --tensor-model-parallel-size 1"
        )
    if (
        v["tp_comm_overlap"]
        and v["tensor_model_parallel_size"] == 1
        and s.usable("tensor_model_parallel_size")
    ):
        s.derive("tp_comm_overlap", False, "derived from tensor-model-parallel-size 1")
        s.notices.append(
            "--tp-comm-overlap is off: it has no effect with --tensor-model-parallel-size 1"
        )
    elif "tp_comm_overlap_chunks" in s.given and not v["tp_comm_overlap"]:
        s.notices.append("--tp-comm-overlap-chunks has no effect: --tp-comm-overlap is off")
    if v["enable_zbh1_pipeline"] and v["pipeline_model_parallel_size"] == 1:
        s.derive("enable_zbh1_pipeline", False, "derived from pipeline-model-parallel-size 1")
        s.notices.append(
            "--enable-zbh1-pipeline is off: it has no effect with --pipeline-model-parallel-size 1"
        )


def _chunks(s: Settings) -> None:
    v = s.values
    pipeline, per_chunk = (
        v["pipeline_model_parallel_size"],
        v["num_layers_per_virtual_pipeline_stage"],
    )
    origin = "virtual_pipeline_model_parallel_size"
    if v["pipeline_layout"] is not None and s.usable(
        "pipeline_layout", "pipeline_model_parallel_size"
    ):
        counts = layout_counts(v["pipeline_layout"])
        if counts and len(counts) % pipeline == 0:
            s.derive(origin, len(counts) // pipeline, "derived from pipeline-layout")
    elif s.usable(
        "num_layers_per_virtual_pipeline_stage", "num_layers", "pipeline_model_parallel_size"
    ):
        chunks, remainder = divmod(v["num_layers"], pipeline * per_chunk)
        if remainder == 0:
            s.derive(origin, chunks, "derived from num-layers-per-virtual-pipeline-stage")


def _batch(s: Settings) -> None:
    v = s.values
    open_size = v["global_batch_size"] is None and "global_batch_size" not in s.bad
    if open_size and s.usable("micro_batch_size", "data_parallel_size"):
        size = v["micro_batch_size"] * v["data_parallel_size"]
        s.derive("global_batch_size", size, "derived from micro-batch-size and data-parallel size")
    lengths = ("train_iters", "train_samples", "train_tokens")
    if all(v[n] is None and n not in s.bad for n in lengths):
        # Long enough for a warm-up and a final decay that were given, in their unit.
        unit = (
            "samples"
            if any(v[f"lr_{what}_samples"] for what in ("decay", "warmup", "wsd_decay"))
            else "iters"
        )
        length = 1 + (v[f"lr_warmup_{unit}"] or 0) + (v[f"lr_wsd_decay_{unit}"] or 0)
        s.derive(f"train_{unit}", length, _STAND_IN_ORIGIN)


def _learning_rate(s: Settings) -> None:
    v = s.values
    decays = ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
    if all(v[n] is None and n not in s.bad for n in decays):
        for unit in ("iters", "samples", "tokens"):
            if s.usable(f"train_{unit}"):
                s.derive(f"lr_decay_{unit}", v[f"train_{unit}"], f"derived from train-{unit}")
                break
    for end in ("start_weight_decay", "end_weight_decay"):
        if v[end] is None and s.usable("weight_decay"):
            s.derive(end, v["weight_decay"], "derived from weight-decay")


def _rest(s: Settings) -> None:
    v = s.values
    if (
        v["recompute_granularity"] == "full"
        and v["recompute_method"] is None
        and "recompute_method" not in s.bad
    ):
        s.derive("recompute_method", "uniform", "derived from recompute-granularity full")
    if v["recompute_modules"] is None and "recompute_modules" not in s.bad:
        s.derive("recompute_modules", ("core_attn",), "default")
    if v["loss_scale"] == 0:
        s.derive("loss_scale", None, s.origins["loss_scale"])
    if v["zero_allgather_bucket_size"] == 0:
        s.derive("zero_allgather_bucket_size", 50_000_000, "derived: 0 means the default")
    if v["exit_signal_handler"] is None and "exit_signal_handler" not in s.bad:
        s.derive("exit_signal_handler", v["save"] is not None, "derived from save")
    if v["max_consecutive_skips"] is None and "max_consecutive_skips" not in s.bad:
        s.derive("max_consecutive_skips", 100 if v["fp16"] else 10, "derived from fp16")
    if v["save_interval"] is not None and v["save"] is None:
        s.notices.append(
            f"--save-interval {v['save_interval']} has no effect: nothing is saved without --save "
            "FOLDER"
        )
        s.derive("save_interval", None, "derived: there is no --save FOLDER")
    if v["dataloader_type"] is None and "dataloader_type" not in s.bad:
        s.derive("dataloader_type", "single", "default")
    if v["data_packing"] == "best-fit" and v["mock_data"]:
        s.notices.append(
            "--data-packing best-fit has no effect: --mock-data has no documents to pack"
        )
    elif v["data_packing"] == "best-fit":
        for name in ("reset_position_ids", "reset_attention_mask"):
            if name not in s.given:
                s.derive(name, True, "derived from data-packing best-fit")
