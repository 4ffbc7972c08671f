"""Products in chunks, and weight gradients through autograd, give the training run of one process."""
import pytest

from tests.helpers.processes import run_processes
from tests.helpers.training import train_in_process
from tests.parity.cases import FULL
from tests.parity.test_grid import check_against, reference_of

CHUNKS = dict(tensor_model_parallel_size=2, tp_comm_overlap=True, tp_comm_overlap_chunks=3)
SPLIT = dict(pipeline_model_parallel_size=2, enable_zbh1_pipeline=True, sequence_parallel=True)


def in_chunks(rank, fields):
    from megatron.layers import chunked_products

    chunked_products.LEAST_TOKENS = 1
    return train_in_process(rank, fields)


@pytest.mark.parametrize(("world_size", "fields"), [
    (2, dict(gradient_accumulation_fusion=False, **FULL)),
    (4, SPLIT),
], ids=["autograd-recompute", "split-sequence"])
def test_chunks_equal_one_process(world_size, fields):
    check_against(reference_of({}), run_processes(world_size, in_chunks, {**CHUNKS, **fields}))
