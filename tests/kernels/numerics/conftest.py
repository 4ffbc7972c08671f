"""Every test in this folder computes with a compiled library."""

from __future__ import annotations

import pytest

from megatron.kernels import library


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Skips without a library; on a GPU, one that is missing or stale is a failure, not torch's own
    operators.
    """
    if request.node.get_closest_marker("gpu"):
        found = library.find("cuda")
        assert found.handle is not None, found.reason
    else:
        request.getfixturevalue("kernels")
