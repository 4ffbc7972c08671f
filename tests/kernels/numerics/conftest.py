"""Fixture that makes every test in this folder compute with a compiled library."""

import pytest

from megatron.kernels import library


@pytest.fixture(autouse=True)
def _compiled(request):
    """Skip without a library; on a GPU, fail if it is missing or stale."""
    if request.node.get_closest_marker("gpu"):
        cuda_library = library.find("cuda")
        assert cuda_library.handle is not None, cuda_library.reason
    else:
        request.getfixturevalue("kernels")
