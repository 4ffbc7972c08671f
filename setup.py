"""Builds csrc/: the index helpers, the schedule clock and, with megatron/kernels/build.py, the
kernels. All other settings of the package are in pyproject.toml.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import ClassVar

from pybind11.setup_helpers import Pybind11Extension
from setuptools import Command, Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

# Loaded by path, so that no import of the package needs torch: pip's build environment lacks it.
kernels = runpy.run_path(str(Path(__file__).with_name("megatron") / "kernels" / "build.py"))


class Build(build_ext):
    """Build the extensions, which need a C++ compiler, and the kernels that can be built here."""

    def run(self) -> None:
        super().run()
        here = self.inplace or self.editable_mode
        folder = (
            kernels["LIBRARIES"]
            if here
            else Path(self.build_lib, "megatron", "kernels", "lib").absolute()
        )
        kernels["install"](folder, alone=not here)

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:  # every way in which a compiler can fail
            sys.exit(
                f"error: {ext.name} cannot be compiled ({type(error).__name__}: {error}): install "
                "a C++ compiler and Python's headers (Debian: apt-get install g++ python3-dev)"
            )


class BuildKernels(Command):
    """Command `python setup.py build_kernels --target hip|cuda|host`."""

    description = "compile csrc/kernels/ for GPUs or for this processor"
    user_options: ClassVar = [
        (
            "target=",
            None,
            "hip, cuda or host, or several separated by commas; by default all that have a "
            "compiler",
        ),
        (
            "arch=",
            None,
            "e.g. gfx90a,gfx942; by default gfx90a,gfx942,gfx950, sm_90 or this processor",
        ),
        (
            "jobs=",
            None,
            "number of compilers to run at the same time; by default one per processor",
        ),
        ("output-dir=", None, "folder for the libraries; by default megatron/kernels/lib"),
        ("force", None, "build even what is up to date"),
    ]
    boolean_options: ClassVar = ["force"]

    def initialize_options(self) -> None:
        self.target = self.arch = self.jobs = self.output_dir = None
        self.force = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        targets, archs = (
            (given or "").replace(",", " ").split() for given in (self.target, self.arch)
        )
        if self.jobs is not None and not (self.jobs.isdigit() and int(self.jobs)):
            sys.exit(f"error: --jobs {self.jobs} must be a number above 0")
        folder = Path(self.output_dir).absolute() if self.output_dir else kernels["LIBRARIES"]
        try:
            kernels["make"](
                targets, archs, folder=folder, jobs=int(self.jobs or 0) or None, force=self.force
            )
            kernels["make_nodes"](folder, force=self.force)
        except (kernels["BuildError"], OSError) as error:
            sys.exit(f"error: {error}")


helpers = Pybind11Extension(
    "megatron.data._index_helpers",
    [
        f"csrc/{name}.cpp"
        for name in (
            "index_helpers",
            "blend",
            "gather",
            "interleave",
            "packing",
            "permutation",
            "sample_index",
            "shuffle",
        )
    ],
    depends=["csrc/index_helpers.hpp", "csrc/permutation.hpp"],
    cxx_std=17,
    extra_compile_args=["-O3"],
)
schedule_clock = Pybind11Extension(
    "megatron.pipeline._schedule_clock",
    ["csrc/schedule_clock.cpp"],
    cxx_std=17,
    extra_compile_args=["-O3"],
)
setup(
    packages=[
        *find_namespace_packages(include=["megatron", "megatron.*"]),
        "megatron_tools",
        *find_namespace_packages("tools"),
    ],
    package_dir={
        "megatron_tools": "tools",  # the modules of the console scripts
        "megatron_conversion": "tools/megatron_conversion",
        "megatron_inference": "tools/megatron_inference",
        "megatron_inspection": "tools/megatron_inspection",
        "megatron_preparation": "tools/megatron_preparation",
        "megatron_report": "tools/megatron_report",
    },
    ext_modules=[helpers, schedule_clock],
    cmdclass={"build_ext": Build, "build_kernels": BuildKernels},
)
