"""Library for the tests of kernels, so that torch's own operators are never tested by accident."""

import pytest

from megatron.kernels import build, library


@pytest.fixture(scope="module")
def kernels():
    """Library that serves CPU tensors: the one that MEGATRON_KERNELS_LIBRARY names, or the host's.

    A library that exists but cannot serve, as after a change of csrc/ without `make setup`, is a
    failure.
    """
    library.forget()
    cpu_library = library.find("cpu")
    if cpu_library.handle is None:
        there = any(build.LIBRARIES.glob("libmegatron-host-*.so"))
        (pytest.fail if there else pytest.skip)(cpu_library.line)
    yield cpu_library
    library.forget()
