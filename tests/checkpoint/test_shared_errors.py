"""Message of a rank's error on all ranks."""

from types import SimpleNamespace

import pytest

from megatron.checkpoint.shared_errors import decided_by_first
from megatron.errors import CheckpointError
from megatron.parallel.topology import Group


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "run"), OSError(5, "Input/output error")]
)
def test_any_error_of_the_first_rank_is_told_to_all(error):
    """Any error of the first rank, such as a failing file system, reaches all ranks.

    The first rank must not end alone, because the others wait for its answer.
    """
    topology = SimpleNamespace(world=Group([0], 0))

    def decide():
        raise error

    with pytest.raises(CheckpointError, match=str(error.args[1])) as caught:
        decided_by_first(topology, decide)
    assert caught.value.__cause__ is error
