"""Builds csrc/*.cpp; everything else is in pyproject.toml."""
from __future__ import annotations

import sys

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class OptionalBuild(build_ext):
    """Goes on without the extension where there is no working compiler: megatron.data has the same loops in numpy."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # every way in which a compiler can fail
            print(
                f"warning: {ext.name} was not built ({type(error).__name__}: {error}); index building uses numpy, "
                f"several times slower. Install a C++ compiler and run this again.",
                file=sys.stderr,
            )


helpers = Pybind11Extension(
    "megatron.data._index_helpers",
    [f"csrc/{name}.cpp" for name in ("index_helpers", "blend", "gather", "packing", "sample_index", "shuffle")],
    depends=["csrc/index_helpers.hpp"],
    cxx_std=17,
    extra_compile_args=["-O3"],
)
# Lets setuptools copy the others when this one is missing.
helpers.optional = True

setup(ext_modules=[helpers], cmdclass={"build_ext": OptionalBuild})
