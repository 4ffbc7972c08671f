"""Checks of the settings of io.py."""

from __future__ import annotations

from megatron.config.checks import Problems, check
from megatron.config.io import (
    hugging_face_folder,
    is_same_folder,
    parse_blend,
    parse_blend_schedule,
)
from megatron.config.settings import Sections, all_options

CONFLICTS = """
    data_path data_file_list mock_data train_data_path
    data_path data_file_list mock_data valid_data_path
    data_path data_file_list mock_data test_data_path
    blend_schedule mock_data
    train_data_exact_num_epochs data_order=stream: a stream shuffles each epoch for itself
    dataloader_type=cyclic data_order=stream: a stream repeats its sources anyway
    data_packing=best-fit reset_position_ids=false: positions begin anew in each document
    data_packing=best-fit reset_attention_mask=false: attention begins anew in each document
    train_data_exact_num_epochs data_packing=best-fit: it reads as many epochs as the run needs
    loss_mask=required calculate_per_token_loss=false: each token that counts has to count equally
    loss_mask=optional calculate_per_token_loss=false: each token that counts has to count equally
    fim_rate mock_data: these have no text
    fim_rate tokenizer_type=NullTokenizer: its tokens have no text
    fim_rate data_packing=best-fit: documents would change their lengths
    fim_rate loss_mask=required: masks are those of the documents' own tokens
    fim_rate loss_mask=optional: masks are those of the documents' own tokens
"""
NEEDED = """
    save_hf  save_hf_ema
    save  save_interval_minutes async_save keep_last requeue max_restarts save_trigger_file
    load  finetune reset_iteration load_tag use_checkpoint_args exit_on_missing_checkpoint
    load  moe_use_upcycling load_missing allow_data_changes
    keep_last  keep_every
    max_restarts  non_persistent_save_interval
    non_persistent_save_interval  replication replication_factor replication_jump
    replication=true  replication_factor replication_jump
    replication_factor=2  replication_jump
    tokenizer_type  fim_rate
    fim_rate  fim_spm_rate fim_split_sample fim_no_prefix fim_prefix_token fim_middle_token
    fim_rate  fim_suffix_token fim_pad_token fim_eod_token
    fim_split_sample  fim_fragment_rate
    goldfish_loss=true  goldfish_k goldfish_h
"""


@check("split")
def _split(config: Sections) -> Problems:
    text = config.data.split
    try:
        shares = [float(share) for share in text.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if (
        not 1 <= len(shares) <= 3
        or any(not 0 <= p < float("inf") for p in shares)
        or sum(shares) <= 0
    ):
        yield (
            f"--split '{text}': give one to three numbers, none negative and not all 0, such as "
            "969,30,1"
        )


TOKENIZER_NEEDS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "NullTokenizer": ("vocab_size",),
    **dict.fromkeys(
        "SentencePieceTokenizer GPTSentencePieceTokenizer Llama2Tokenizer HFTokenizer "
        "TikTokenizer".split(),
        ("tokenizer_model",),
    ),
}


@check()
def _data(config: Sections) -> Problems:
    kind = config.tokenizer.tokenizer_type
    for name in TOKENIZER_NEEDS.get(kind or "", ()):
        if config.get(name) is None:
            yield f"--tokenizer-type {kind} needs {all_options()[name].flag}"


@check()
def _parts_of_files(config: Sections) -> Problems:
    data = config.data
    blends = [("--data-path", parse_blend(data.data_path or ()))]
    if data.blend_schedule and data.uses_split:
        phases = parse_blend_schedule(data.blend_schedule)
        blends += [("--blend-schedule", blend) for _, blend in phases]
    for flag, source in [(flag, source) for flag, blend in blends for source in blend]:
        if source.documents:
            yield (
                f"{flag} {source.prefix}@{source.documents}: --split already divides the documents: "
                "use --train-data-path and --valid-data-path for parts of files"
            )
    if data.data_order == "stream":
        return
    sources = parse_blend(data.train_data_path or ())
    files = {source.prefix: source.documents for source in sources}
    if several := {s.prefix for s in sources if files[s.prefix] != s.documents}:
        yield (
            f"--train-data-path has several parts of {', '.join(several)}, whose epochs could not be "
            "told apart with --data-order megatron: use one part, or separate files"
        )


@check("blend_schedule")
def _blend_schedule(config: Sections) -> Problems:
    data = config.data
    first, _ = parse_blend_schedule(data.blend_schedule or "")[0]
    if first and not (data.data_path or data.data_file_list or data.train_data_path):
        yield (
            f"--blend-schedule begins at {first:,} tokens, and no flag says what the run reads "
            "before: begin it with 0:, or give --data-path or --train-data-path"
        )
    if data.data_order == "megatron":
        usual_values = {"train_data_exact_num_epochs": None, "dataloader_type": "single"}
        causes = [name for name, usual in usual_values.items() if config.get(name) != usual]
        yield (
            f"--blend-schedule needs --data-order stream, and {config.written([*causes, 'data_order'][0])} "
            "is Megatron's order, which has one blend: leave one of them out"
        )


@check("goldfish_h", "seq_length")
def _goldfish(config: Sections) -> Problems:
    data, length = config.data, config.model.seq_length
    if data.goldfish_loss and data.goldfish_h > length:
        yield (
            f"--goldfish-h {data.goldfish_h} is more than --seq-length {length}, so that no token "
            "would be excluded: lower it"
        )


@check()
def _checkpoints(config: Sections) -> Problems:
    save = config.checkpoint.save
    load = config.checkpoint.load
    tag = config.checkpoint.load_tag
    resumes = is_same_folder(save, load)
    if config.training.loss_spike_factor is not None and not resumes:
        yield (
            "--loss-spike-factor rolls back to checkpoints of this run: give --save and --load the "
            "same FOLDER"
        )
    for name in ("finetune", "reset_iteration"):
        if config.get(name) and resumes:
            yield (
                f"{all_options()[name].flag} would start at iteration 0 after each restart, from "
                f"the run's own checkpoints: give --save another FOLDER than --load {load}, "
                "and resume from the --save folder without the flag"
            )
    if hugging_face_folder(load) is not None and tag is not None:
        yield (
            f"--load-tag {tag} names a checkpoint, but --load {load} is a Hugging Face model: "
            "leave --load-tag out"
        )


@check("profile_step_start", "profile_step_end")
def _profile(config: Sections) -> Problems:
    logging = config.logging
    if logging.profile and logging.profile_step_end <= logging.profile_step_start:
        yield (
            f"--profile-step-end {logging.profile_step_end} is not after --profile-step-start "
            f"{logging.profile_step_start}: give a larger one"
        )
