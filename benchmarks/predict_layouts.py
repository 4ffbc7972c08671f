"""Layouts of benchmarks/predict.py: small models in many layouts of equal tokens per step."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = (
    "--mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --log-interval "
    "1 --lr 1e-4 --clip-grad 1 --attention-dropout 0 --hidden-dropout 0"
)
CALIBRATED = (
    "--num-layers 4 --hidden-size 384 --num-attention-heads 6 --seq-length 384 "
    "--vocab-size 6143 --micro-batch-size 1"
)
"""The model whose shapes calibration measures; it is none of the predicted ones."""
MODELS = {
    "wide": "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--vocab-size 8191 --global-batch-size 4",
    "deep": "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 512 "
    "--vocab-size 4095 --global-batch-size 8",
    "gated": "--num-layers 4 --hidden-size 384 --num-attention-heads 6 --num-key-value-heads 2 "
    "--seq-length 1024 --ffn-hidden-size 1024 --vocab-size 4095 --swiglu --normalization rmsnorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--global-batch-size 4",
    "124M": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--vocab-size 50303 --bf16 --global-batch-size 32",
    "tiny": "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size "
    "511 --global-batch-size 2",
}


@dataclass(frozen=True)
class PredictedLayout:
    """Command line of pretrain_gpt.py: a model of MODELS, a number of processes, and flags."""

    name: str
    model: str
    processes: int
    flags: str

    @property
    def slug(self) -> str:
        """Return the layout as part of a file name."""
        return "".join(
            c if c.isalnum() else "-" for c in f"{self.model}-{self.processes}-{self.name}"
        )

    @property
    def arguments(self) -> list[str]:
        """All flags but those for the length of the run and the output."""
        return f"{MODELS[self.model]} {COMMON} {self.flags}".split()


_TP = "--tensor-model-parallel-size"
_PP = "--pipeline-model-parallel-size"
_SP = "--sequence-parallel"
_ZB = "--enable-zbh1-pipeline"
_CHUNKS = "--num-layers-per-virtual-pipeline-stage"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mlp_act"
_MBS = "--micro-batch-size"

LAYOUTS = [
    PredictedLayout("mbs 1", "wide", 1, f"{_MBS} 1"),
    PredictedLayout("mbs 4", "wide", 1, f"{_MBS} 4"),
    PredictedLayout("mbs 2, full recompute", "wide", 1, f"{_MBS} 2 {_FULL}"),
    PredictedLayout("tp 2, mbs 2", "wide", 2, f"{_TP} 2 {_MBS} 2"),
    PredictedLayout("tp 2, sp, mbs 4", "wide", 2, f"{_TP} 2 {_SP} {_MBS} 4"),
    PredictedLayout("pp 2, mbs 1", "wide", 2, f"{_PP} 2 {_MBS} 1"),
    PredictedLayout("pp 2, 2 chunks, mbs 1", "wide", 2, f"{_PP} 2 {_CHUNKS} 1 {_MBS} 1"),
    PredictedLayout("pp 2, zb-h1, mbs 1", "wide", 2, f"{_PP} 2 {_ZB} {_MBS} 1"),
    PredictedLayout("dp 2, mbs 2", "wide", 2, f"{_MBS} 2"),
    PredictedLayout("tp 2, pp 2, mbs 1", "wide", 4, f"{_TP} 2 {_PP} 2 {_MBS} 1"),
    PredictedLayout("pp 4, mbs 1", "wide", 4, f"{_PP} 4 {_MBS} 1"),
    PredictedLayout("tp 4, mbs 4", "wide", 4, f"{_TP} 4 {_MBS} 4"),
    PredictedLayout("mbs 2", "deep", 1, f"{_MBS} 2"),
    PredictedLayout("mbs 1, selective recompute", "deep", 1, f"{_MBS} 1 {_SELECTIVE}"),
    PredictedLayout("tp 2, mbs 1", "deep", 2, f"{_TP} 2 {_MBS} 1"),
    PredictedLayout("pp 2, mbs 2", "deep", 2, f"{_PP} 2 {_MBS} 2"),
    PredictedLayout("pp 2, 4 chunks, mbs 2", "deep", 2, f"{_PP} 2 {_CHUNKS} 1 {_MBS} 2"),
    PredictedLayout(
        "pp 2, 5+3 layers, mbs 1", "deep", 2, f"{_PP} 2 --pipeline-layout 5,3 {_MBS} 1"
    ),
    PredictedLayout(
        "pp 2, zb-h1, full recompute, mbs 1", "deep", 2, f"{_PP} 2 {_ZB} {_FULL} {_MBS} 1"
    ),
    PredictedLayout("dp 2, mbs 1, full recompute", "deep", 2, f"{_MBS} 1 {_FULL}"),
    PredictedLayout("pp 2, dp 2, mbs 1", "deep", 4, f"{_PP} 2 {_MBS} 1"),
    PredictedLayout("pp 4, 2 chunks, mbs 1", "deep", 4, f"{_PP} 4 {_CHUNKS} 1 {_MBS} 1"),
    PredictedLayout(
        "pp 4, v-half, mbs 1", "deep", 4, f"{_PP} 4 {_MBS} 1 --pipeline-schedule v-half"
    ),
    PredictedLayout("mbs 1", "gated", 1, f"{_MBS} 1"),
    PredictedLayout("tp 2, sp, mbs 1", "gated", 2, f"{_TP} 2 {_SP} {_MBS} 1"),
    PredictedLayout("pp 2, mbs 1", "gated", 2, f"{_PP} 2 {_MBS} 1"),
    PredictedLayout("dp 2, mbs 2, full recompute", "gated", 2, f"{_MBS} 2 {_FULL}"),
    PredictedLayout("tp 2, dp 2, mbs 1", "gated", 4, f"{_TP} 2 {_MBS} 1"),
    PredictedLayout("pp 4, zb-h1, mbs 1", "gated", 4, f"{_PP} 4 {_ZB} {_MBS} 1"),
]

GPU_CALIBRATED = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 "
    "--vocab-size 32767 --micro-batch-size 4 --bf16"
)
GPU_LAYOUTS = [
    PredictedLayout("mbs 16", "124M", 1, f"{_MBS} 16"),
    PredictedLayout("mbs 4", "124M", 1, f"{_MBS} 4"),
    PredictedLayout("mbs 8, full recompute", "124M", 1, f"{_MBS} 8 {_FULL}"),
    PredictedLayout("tp 2, sp, mbs 16", "124M", 2, f"{_TP} 2 {_SP} {_MBS} 16"),
    PredictedLayout("pp 2, mbs 4", "124M", 2, f"{_PP} 2 {_MBS} 4"),
    PredictedLayout("dp 2, mbs 16", "124M", 2, f"{_MBS} 16"),
]
TINY = [PredictedLayout("mbs 1", "tiny", 1, f"{_MBS} 1")]
