"""Random configurations for the tests of the time model, and machines for them."""

from hypothesis import strategies as st

from megatron.planner.compute import Figure
from tests.planner.layouts import planned


def with_figures(cluster, **values):
    """Replace some of a machine's single figures."""
    figures = [Figure(name, ((value,),), "assumed", "for a test") for name, value in values.items()]
    return cluster.with_figures(figures)


def undisturbed(cluster):
    """Return a machine whose computations neither hosts nor messages nor slow devices delay."""
    return with_figures(
        cluster,
        launch_s=0.0,
        speed_beside_messages=1.0,
        device_variation=0.0,
        pass_variation=0.0,
    )


SIZES = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --vocab-size 3000"
)
_KINDS = """
--swiglu
--disable-bias-linear --hidden-dropout 0
--num-key-value-heads 4
--num-key-value-heads 1
--window-size 99 0
--position-embedding-type rope --normalization rmsnorm
--untie-embeddings-and-output-weights
--attention-backend unfused
--attention-backend blocked
--fp32-residual-connection
--apply-residual-connection-post-layernorm
--position-embedding-type alibi
--no-bias-dropout-fusion --no-persist-layer-norm --no-bias-gelu-fusion --no-cross-entropy-loss-fusion
--cross-entropy-chunk-tokens 100
--no-gradient-accumulation-fusion
--zero-stage 0
--no-overlap-grad-reduce --no-overlap-param-gather
--no-async-tensor-model-parallel-allreduce
""".splitlines()
RECOMPUTE = """
--recompute-granularity selective
--recompute-granularity full
--recompute-granularity full --recompute-num-layers 3
--recompute-granularity full --recompute-method block --recompute-num-layers 1
--recompute-granularity selective --recompute-modules mlp_act layernorm
""".splitlines()


@st.composite
def configs(draw):
    """Draw a run on up to 64 devices."""
    t = draw(st.sampled_from([1, 2, 4]))
    p = draw(st.sampled_from([1, 2, 4]))
    d = draw(st.sampled_from([1, 2, 4]))
    b = draw(st.sampled_from([1, 2, 3]))
    m = draw(st.integers(1, 9))
    schedules = [""]
    tensor = [""]
    if p > 1:
        schedules += [
            f"--num-layers-per-virtual-pipeline-stage {8 // (2 * p)}",
            "--enable-zbh1-pipeline",
            f"--pipeline-layout {'5,3' if p == 2 else '1,3,3,1'}",
        ]
    if t > 1:
        tensor += [
            "--sequence-parallel",
            "--tp-comm-overlap",
            "--sequence-parallel --tp-comm-overlap",
        ]
    lists = (schedules, tensor, _KINDS, RECOMPUTE, ["--fp16", "--bf16"])
    return planned(
        SIZES,
        *(draw(st.sampled_from(flags)) for flags in lists),
        f"--tensor-model-parallel-size {t} --pipeline-model-parallel-size {p}",
        f"--world-size {t * p * d} --micro-batch-size {b} --global-batch-size {b * d * m}",
    )


def run(*flags):
    """Return a small run in bf16 on as many devices as its layout needs."""
    return planned(SIZES, "--bf16", *flags)
