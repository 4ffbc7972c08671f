"""Published runs of other codes on DGX H100 and MI250X nodes (LUMI; X-MoE on Frontier).

No figure was fitted to them. Each has its complete layout as flags of pretrain_gpt.py, so that the
time model treats it like any other run. `unlike` lists differences that flags cannot express,
because this code does not support them or the source does not give them.
"""

from __future__ import annotations

from dataclasses import dataclass

_DGXC = "github.com/NVIDIA/dgxc-benchmarking"
_GPT3 = f"{_DGXC}, nemo_megatron: README_175b.md, gpt3_175b_hydra.yaml"
_NEMOTRON = f"{_DGXC}, nemotron: README_{{}}.md, nemotron4-{{}}-synth.yaml, configure.sh"
_LLAMA = "arXiv 2407.21783, section 3.3.2 and table 4"

_COMMON = "--bf16 --use-flash-attn --sequence-parallel --zero-stage 1"
_GPT3_175B = (
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 51200 --micro-batch-size 1 "
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "
    f"--num-layers-per-virtual-pipeline-stage 1 --tp-comm-overlap {_COMMON}"
)
_NEMOTRON_4 = (
    "--group-query-attention --num-query-groups 8 --squared-relu --disable-bias-linear "
    "--apply-layernorm-1p --position-embedding-type rope --rotary-percent 0.5 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length "
    f"4096 --max-position-embeddings 4096 --vocab-size 256000 {_COMMON}"
)
_NEMOTRON_15B = (
    "--num-layers 32 --hidden-size 6144 --num-attention-heads 48 --micro-batch-size 4 "
    f"--tensor-model-parallel-size 4 --tp-comm-overlap {_NEMOTRON_4}"
)
_NEMOTRON_340B = (
    "--num-layers 96 --hidden-size 18432 --num-attention-heads 96 --micro-batch-size "
    "1 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
    "--num-layers-per-virtual-pipeline-stage 1 --tp-comm-overlap --recompute-granularity "
    f"selective {_NEMOTRON_4}"
)
_LLAMA_405B = (
    "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 "
    "--group-query-attention --num-query-groups 8 --ffn-hidden-size 53248 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length "
    "8192 --max-position-embeddings 8192 --vocab-size 128256 --micro-batch-size 1 "
    f"--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 {_COMMON}"
)
# Llama 3 was trained with chunks of one layer, but only the embedding in the first and only the
# output layer in the last: 8 chunks per rank. Here each chunk has at least a layer: 4 chunks of two
# layers per rank, with one layer in the first chunk and in the last.
_LLAMA_CHUNKS = "--pipeline-layout 1," + "2," * 62 + "1"
_LLAMA_PARAMETERS = 405e9
_LLAMA_TOKENS = 2048 * 8192


@dataclass(frozen=True)
class PublishedRun:
    """Published run.

    devices   number of devices
    flags     its model and layout, as flags of pretrain_gpt.py
    seconds   seconds of a step
    source    where it is published
    unlike    differences that the flags do not express
    """

    name: str
    devices: int
    flags: str
    seconds: float
    source: str
    unlike: str

    def argv(self) -> list[str]:
        """Return the arguments for `parse_plan`."""
        return [*self.flags.split(), "--world-size", str(self.devices)]


def _llama(devices: int, tflops: float) -> PublishedRun:
    """Convert published TFLOP/s to seconds: 6 FLOPs per parameter and token, none for scores."""
    seconds = 6 * _LLAMA_PARAMETERS * _LLAMA_TOKENS / (devices * tflops * 1e12)
    return PublishedRun(
        "Llama 3 405B",
        devices,
        f"{_LLAMA_405B} {_LLAMA_CHUNKS} --global-batch-size 2048",
        seconds,
        _LLAMA,
        "8 chunks, FSDP instead of ZeRO-1, RoCE of another machine",
    )


def _nemotron(
    size: str, devices: int, batch: int, seconds: float, flags: str, unlike: str
) -> PublishedRun:
    return PublishedRun(
        f"Nemotron-4 {size}",
        devices,
        f"{flags} --global-batch-size {batch}",
        seconds,
        _NEMOTRON.format(size.lower(), size.lower()),
        unlike,
    )


_BF16_SUMS = "gradients summed in bf16 between replicas"
RUNS: tuple[PublishedRun, ...] = (
    PublishedRun(
        "GPT-3 175B", 128, f"{_GPT3_175B} --global-batch-size 256", 8.309, _GPT3, _BF16_SUMS
    ),
    PublishedRun(
        "GPT-3 175B", 1024, f"{_GPT3_175B} --global-batch-size 2048", 8.453, _GPT3, _BF16_SUMS
    ),
    PublishedRun(
        "GPT-3 175B", 2048, f"{_GPT3_175B} --global-batch-size 4096", 8.49, _GPT3, _BF16_SUMS
    ),
    _nemotron("15B", 16, 64, 2.812, _NEMOTRON_15B, "nothing known"),
    _nemotron("15B", 256, 1024, 2.852, _NEMOTRON_15B, "nothing known"),
    _nemotron("15B", 2048, 8192, 2.887, _NEMOTRON_15B, "nothing known"),
    _nemotron("340B", 128, 32, 4.61, _NEMOTRON_340B, f"{_BF16_SUMS}, optimizer in bf16"),
    _nemotron("340B", 1024, 256, 4.73, _NEMOTRON_340B, f"{_BF16_SUMS}, optimizer in bf16"),
    _nemotron("340B", 2048, 512, 4.84, _NEMOTRON_340B, f"{_BF16_SUMS}, optimizer in bf16"),
    _llama(8192, 430),
    _llama(16384, 400),
)

# -- X-MoE on Frontier ------------------------------------------------------------------------------

_XMOE = "arXiv 2508.13337, table 3 and figure 9; layouts: its repository, examples_xmoe"
_DROPS = "experts drop beyond 1.25 of their share, ROCm 5.7"


def _xmoe(
    name: str,
    devices: int,
    tflops: float,
    sizes: tuple[int, int, int, int, int],
    experts: tuple[int, int, int],
    batch: tuple[int, int],
    flags: str = "",
    unlike: str = _DROPS,
) -> tuple[PublishedRun, float]:
    """Return a run and its published TFLOP/s of a GCD.

    sizes    layers, width, width of an expert, heads, sequence length
    experts  number of experts, experts per token, expert-parallel size
    batch    sequences of a micro-batch, and of a step

    X-MoE's scripts send tokens directly to the ranks of their experts. FLOPs are counted as in its
    log line: attention with all pairs, chosen experts of two matrices, logits; three times the
    forward pass.
    """
    (layers, h, ffn, heads, s) = sizes
    (number, topk, size) = experts
    (micro, total) = batch
    layer = 4 * h * h + 2 * h * s + 2 * topk * ffn * h
    seconds = 6 * total * s * (layers * layer + 50304 * h) / (devices * tflops * 1e12)
    flags = (
        f"--num-layers {layers} --hidden-size {h} --ffn-hidden-size {ffn} --num-attention-heads "
        f"{heads} --seq-length {s} --max-position-embeddings {s} --num-experts {number} "
        f"--moe-router-topk {topk} --moe-router-pre-softmax --moe-aux-loss-coeff 0.01 "
        f"--expert-model-parallel-size {size} --expert-ranks-per-node 1 --micro-batch-size {micro} "
        f"--global-batch-size {total} --vocab-size 50257 --position-embedding-type rope --fp16 --use-flash-attn "
        f"--zero-stage 1 {flags}"
    )
    return PublishedRun(name, devices, flags, seconds, _XMOE, unlike), tflops


# "Sequence-sharded MoE blocks": with tensor parallelism but without
# --enable-expert-tensor-parallelism, experts are not divided, their groups consist of neighbouring
# ranks (deepspeed/utils/groups.py, _create_expert_and_data_parallel), and each tensor rank
# dispatches its share of the tokens (deepspeed/moe/sharded_moe.py, drop_tokens).
_SHARDED = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
_SMALL = 28, 2048, 1408, 16, 2048
_LARGE = 28, 7168, 2048, 128, 4096
_SUPER = 61, 7168, 2560, 128, 4096
XMOE_RUNS: tuple[tuple[PublishedRun, float], ...] = (
    # The README of the repository says 50 to 55.
    _xmoe("X-MoE Small, 10.1B", 8, 52.5, _SMALL, (64, 6, 8), (4, 256)),
    _xmoe("X-MoE Small, 10.1B", 256, 44.0, _SMALL, (64, 6, 8), (4, 8192)),
    _xmoe("X-MoE Medium, 55.2B", 256, 24.2, (28, 5120, 1536, 128, 4096), (128, 6, 64), (1, 1024)),
    _xmoe(
        "X-MoE Large, 201.4B",
        256,
        24.1,
        _LARGE,
        (256, 8, 64),
        (1, 1024),
        _SHARDED,
    ),
    _xmoe(
        "X-MoE Super, 545.4B",
        1024,
        10.2,
        _SUPER,
        (256, 8, 256),
        (1, 1024),
        _SHARDED,
        f"{_DROPS}; layout not published but for the experts' 256 ranks",
    ),
)

# -- MI250X, all on LUMI ---------------------------------------------------------------------------

_TURKU = "github.com/spyysalo/lumi-llm-scaling, 2023"
PLAIN_ORDER = "--rank-order tp-dp-pp --device-order 0,1,2,3,4,5,6,7"
_UNFUSED = (
    f"{PLAIN_ORDER} --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 "
    "--attention-backend unfused --recompute-granularity full"
)
_ALIBI = (
    "--micro-batch-size 2 --bf16 --zero-stage 0 --position-embedding-type alibi --embed-layernorm "
    f"{_UNFUSED}"
)
_33B = "--num-layers 60 --hidden-size 6656 --num-attention-heads 52"
_BLOCKING = "messages between stages that block"


def _turku(
    name: str,
    folder: str,
    devices: int,
    batch: int,
    seconds: float,
    flags: str,
    unlike: str = _BLOCKING,
) -> PublishedRun:
    flags = f"{flags} --global-batch-size {batch}"
    return PublishedRun(name, devices, flags, seconds, f"{_TURKU}: {folder}", unlike)


def _175b(nodes: int, seconds: float) -> PublishedRun:
    flags = (
        "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 "
        f"--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 {_ALIBI}"
    )
    folder = f"meg-ds/experiments/175B-scaling-comms/{nodes}-node.out"
    return _turku("175B, 2023, ROCm 5.2", folder, 8 * nodes, 1024, seconds, flags)


def _llama_2(devices: int, tokens_per_s: float) -> PublishedRun:
    """Return a run with the tokens/s per GCD that a regression test of the machine expects."""
    flags = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
        "--vocab-size 32000 --swiglu --disable-bias-linear --normalization RMSNorm "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout "
        "0 --hidden-dropout 0 --bf16 --micro-batch-size 2 --tensor-model-parallel-size 2 "
        "--sequence-parallel --no-async-tensor-model-parallel-allreduce "
        f"--no-gradient-accumulation-fusion --zero-stage 1 {PLAIN_ORDER} --seq-length 4096 "
        "--max-position-embeddings 4096 --global-batch-size 256"
    )
    source = "github.com/Lumi-supercomputer/lumi-reframe-tests, checks/apps/megatron-lm, 2025"
    return PublishedRun(
        "Llama 2 7B, 2025, ROCm 6.2",
        devices,
        flags,
        256 * 4096 / (devices * tokens_per_s),
        source,
        "products tuned at the start",
    )


MI250X_RUNS: tuple[PublishedRun, ...] = (
    _llama_2(16, 1950),
    _llama_2(64, 1880),
    _llama_2(128, 1820),
    _turku(
        "7B, 2023, ROCm 5.2",
        "meg-ds/README.md",
        32,
        2048,
        2048 / 19.4,
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
        f"--pipeline-model-parallel-size 2 {_ALIBI}",
    ),
    _turku(
        "33B, 2023, ROCm 5.2",
        "meg-ds/README.md",
        64,
        1024,
        1024 / 8.4,
        f"{_33B} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 {_ALIBI}",
    ),
    _turku(
        "33B, 2023, ROCm 5.5",
        "meg-ds-sing/README.md",
        64,
        1024,
        1024 / 7.5,
        f"{_33B} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 {_ALIBI}",
    ),
    _turku(
        "65B, 2023, ROCm 5.2",
        "meg-ds/README.md",
        64,
        1024,
        1024 / 4.0,
        "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --tensor-model-parallel-size "
        f"2 --pipeline-model-parallel-size 8 {_ALIBI}",
    ),
    _175b(16, 346.67),
    _175b(64, 97.50),
    _175b(256, 36.07),
    _turku(
        "6.7B, GPT-NeoX, 2023, ROCm 5.2",
        "gpt-neox/README.md, 6-7B.yml",
        8,
        128,
        128 / 4.6,
        "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --fp16 --micro-batch-size 4 "
        "--zero-stage 1 --position-embedding-type rope --untie-embeddings-and-output-weights "
        f"--hidden-dropout 0 --attention-dropout 0 --no-bias-gelu-fusion {_UNFUSED}",
        "activations divided over ranks",
    ),
    _turku(
        "33B, Megatron-LM, 2023",
        "bc-meg-lm/README.md",
        64,
        1024,
        1024 * 2048 / (64 * 182.8),
        f"{_33B} --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 4 "
        "--bf16 --pipeline-model-parallel-size 4 --sequence-parallel --micro-batch-size 2 "
        f"--zero-stage 0 --no-gradient-accumulation-fusion {_UNFUSED}",
        "",
    ),
)
