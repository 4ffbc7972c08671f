"""Settings of what is read and written: data, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.option import MOST_PROCESSES, option

_NO_WANDB = "Weights & Biases is not used: figures go to --metrics-file and --tensorboard-dir"
_NO_RANDOM_STATES = (
    "checkpoints hold no random states: data order and masks follow from --seed and the counters"
)


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    title: ClassVar[str] = "data"

    data_path: tuple[str, ...] | None = option(
        None,
        "Prefixes of .bin and .idx files: one, or WEIGHT PREFIX pairs.",
        metavar="[WEIGHT] PREFIX ...",
    )
    data_file_list: str | None = option(
        None, "File of lines 'weight prefix corpus' instead of --data-path.", metavar="FILE"
    )
    split: str = option("969, 30, 1", "Parts for training, validation and test.")
    train_data_path: tuple[str, ...] | None = option(
        None, "Prefixes for training alone.", metavar="[WEIGHT] PREFIX ..."
    )
    valid_data_path: tuple[str, ...] | None = option(
        None, "Prefixes for validation alone.", metavar="[WEIGHT] PREFIX ..."
    )
    test_data_path: tuple[str, ...] | None = option(
        None, "Prefixes for test alone.", metavar="[WEIGHT] PREFIX ..."
    )
    train_data_exact_num_epochs: int | None = option(
        None,
        "Repeat the training data so often, shuffled together, whatever the length of the run.",
        at_least=1,
        at_most=10**5,
    )
    mock_data: bool = option(False, "Made-up tokens instead of files.")
    data_cache_path: str | None = option(
        None,
        "Folder that index files are written to, needed where the data's cannot be written; "
        "without it they go "
        "to index-cache beside the data.",
        metavar="FOLDER",
    )
    stage_data_to: str | None = option(
        None,
        "Folder on a disk of each node that the data are copied to before training, as far as they "
        "fit; $NAME "
        "stands for an environment variable.",
        metavar="FOLDER",
    )
    data_packing: str = option(
        "concat",
        "How documents fill samples: concat joins and cuts them; best-fit keeps them whole and "
        "apart, as "
        "--reset-position-ids and --reset-attention-mask do, and pads.",
        choices=("concat", "best-fit"),
    )
    num_workers: int = option(
        2, "Threads that read data ahead; 0 reads when a step begins.", at_least=0, at_most=512
    )
    dataloader_type: str = option(
        None,
        "single goes through the samples once, cyclic again and again, in another order each time.",
        choices=("single", "cyclic"),
        derived="single",
    )
    data_sharding: bool = option(
        True,
        "With --dataloader-type cyclic, draw from the whole data set on every rank instead of from "
        "a part each.",
        flags=(),
        off_flags=("--no-data-sharding",),
        inert="every rank always draws from the whole data set, so that the order does not depend "
        "on their number",
    )
    reset_position_ids: bool = option(False, "Positions start at 0 after each end of document.")
    reset_attention_mask: bool = option(
        False,
        "Attention stays within a document.",
        flags=("--reset-attention-mask", "--dataloader-inter-document-masking"),
    )
    eod_mask_loss: bool = option(False, "No loss on end-of-document tokens.")
    mmap_bin_files: bool = option(
        True,
        "Map .bin files into memory instead of reading them by position.",
        flags=(),
        off_flags=("--no-mmap-bin-files",),
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, where, and what is loaded."""

    title: ClassVar[str] = "checkpoints"

    save: str | None = option(None, "Folder that checkpoints go to.", metavar="FOLDER")
    save_interval: int | None = option(
        None,
        "Iterations between checkpoints.",
        at_least=1,
        flags=("--save-interval", "--persistent-save-interval"),
    )
    save_interval_minutes: float | None = option(
        None,
        "Minutes between checkpoints, beside --save-interval or instead of it.",
        above=0,
        metavar="MINUTES",
    )
    async_save: bool = option(
        False,
        "Training stops only until the state is copied; threads write the copy while it goes on.",
    )
    keep_last: int | None = option(
        None,
        "Keep the newest so many checkpoints and remove older ones; without it none is removed.",
        at_least=1,
    )
    keep_every: int | None = option(
        None,
        "With --keep-last, also keep those of iterations that are multiples of this.",
        at_least=1,
        flags=("--keep-every", "--save-retain-interval"),
    )
    no_save_optim: bool = option(False, "Leave the optimizer state out.")
    no_save_rng: bool = option(False, "Leave the random states out.", inert=_NO_RANDOM_STATES)
    load: str | None = option(None, "Folder to load the last checkpoint from.", metavar="FOLDER")
    load_tag: str | None = option(
        None,
        "Name or iteration of the checkpoint to load instead of the last.",
        flags=("--load-tag", "--ckpt-step", "--load-iteration"),
    )
    no_load_optim: bool = option(False, "Do not load the optimizer state.")
    no_load_rng: bool = option(False, "Do not load the random states.", inert=_NO_RANDOM_STATES)
    finetune: bool = option(False, "Load weights only and start at iteration 0.")
    reset_iteration: bool = option(False, "Load everything, but start at iteration 0.")
    use_checkpoint_args: bool = option(False, "Take the model's sizes from the checkpoint.")
    exit_on_missing_checkpoint: bool = option(
        False, "End when --load holds no checkpoint, instead of starting anew."
    )
    override_opt_param_scheduler: bool = option(
        False,
        "The learning-rate settings given here win over the checkpoint's.",
        flags=(
            "--override-opt_param-scheduler",
            "--override-opt-param-scheduler",
            "--override-lr-scheduler",
        ),
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        "The checkpoint's learning-rate settings win over those given here.",
        flags=(
            "--use-checkpoint-opt_param-scheduler",
            "--use-checkpoint-opt-param-scheduler",
            "--use-checkpoint-lr-scheduler",
        ),
    )
    ckpt_format: str = option(
        "torch_dist",
        "Format of saved checkpoints.",
        choices=("torch_dist",),
        value_names=dict.fromkeys(("torch", "torch_dcp", "zarr", "fsdp_dtensor"), "torch_dist"),
        flags=("--ckpt-format", "--dist-ckpt-format"),
        inert="checkpoints have one format, in which each loads on any layout; --load reads "
        "others' as well",
    )


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported, where, and how often."""

    title: ClassVar[str] = "logging"

    log_interval: int = option(100, "Iterations between log lines.", at_least=1)
    metrics_file: str | None = option(
        None,
        "JSON-lines file of all figures, unrounded.",
        metavar="FILE",
        derived="metrics.jsonl in the --save folder",
    )
    tensorboard_dir: str | None = option(None, "Folder of TensorBoard events.", metavar="FOLDER")
    tensorboard_log_interval: int = option(1, "Iterations between TensorBoard entries.", at_least=1)
    tensorboard_queue_size: int = option(
        1000, "Entries kept before they are written.", at_least=1, at_most=10**6
    )
    log_timers_to_tensorboard: bool = option(False, "Timers to TensorBoard.")
    log_batch_size_to_tensorboard: bool = option(False, "Batch size to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = option(False, "Validation perplexity to TensorBoard.")
    log_optimizer_states_to_tensorboard: bool = option(
        False,
        "Norms of the optimizer state to TensorBoard.",
        inert="they are not computed: grad-norm is always written, params-norm with "
        "--log-params-norm",
    )
    log_learning_rate_to_tensorboard: bool = option(
        True,
        "Learning rate to TensorBoard.",
        flags=(),
        off_flags=("--no-log-learning-rate-to-tensorboard", "--no-log-learnig-rate-to-tensorboard"),
    )
    log_loss_scale_to_tensorboard: bool = option(
        True,
        "Loss scale to TensorBoard.",
        flags=(),
        off_flags=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
    )
    log_memory_to_tensorboard: bool = option(False, "Most memory of a rank to TensorBoard.")
    log_world_size_to_tensorboard: bool = option(False, "Number of processes to TensorBoard.")
    log_params_norm: bool = option(False, "Norm of the parameters in the log line.")
    log_num_zeros_in_grad: bool = option(False, "Zeros in the gradient in the log line.")
    timing_log_level: int = option(
        0,
        "Detail of the timers: 0 none, 1 the parts of a step (2 gives the same).",
        choices=(0, 1, 2),
    )
    timing_log_option: str = option(
        "minmax", "Timers over ranks.", choices=("max", "minmax", "all")
    )
    straggler_report: bool = option(
        False,
        "Each rank's own computing time at every log interval, and the ranks that are slow.",
        flags=("--straggler-report", "--log-straggler"),
    )
    wandb_project: str = option("", "Weights & Biases project.", inert=_NO_WANDB)
    wandb_exp_name: str = option("", "Weights & Biases run.", inert=_NO_WANDB)
    wandb_save_dir: str = option("", "Weights & Biases folder.", inert=_NO_WANDB, metavar="FOLDER")
    profile: str | None = option(
        None,
        "torch profiler; pt-full also records shapes and stacks.",
        choices=("pt", "pt-full"),
        implied="pt",
    )
    profile_step_start: int = option(10, "First iteration that is profiled.", at_least=0)
    profile_step_end: int = option(12, "Iteration at which profiling ends.", at_least=1)
    profile_ranks: tuple[int, ...] = option(
        (0,), "Ranks that are profiled.", at_least=0, at_most=MOST_PROCESSES, metavar="RANK ..."
    )
    trace_dir: str | None = option(
        None, "Folder of profiler traces.", metavar="FOLDER", derived="--tensorboard-dir"
    )
