// Shared by the parts of the extension: the array type, and the function with which each part adds itself to the
// module.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

namespace index_helpers {

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

void bind_blend(py::module_& module);
void bind_gather(py::module_& module);
void bind_interleave(py::module_& module);
void bind_packing(py::module_& module);
void bind_permutation(py::module_& module);
void bind_sample_index(py::module_& module);
void bind_shuffle(py::module_& module);

}  // namespace index_helpers
