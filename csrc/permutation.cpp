// Permutations for Python.

#include "permutation.hpp"

#include "index_helpers.hpp"

#include <cstdint>
#include <stdexcept>

namespace index_helpers {
namespace {

Array<int64_t> permute(const Array<int64_t>& positions, int64_t size, uint64_t key) {
  if (positions.ndim() != 1 || size < 1) throw std::invalid_argument("expected a list of positions and size >= 1");
  const int64_t count = positions.shape(0);
  const int64_t* position = positions.data();
  Array<int64_t> values(count);
  int64_t* value = values.mutable_data();
  bool inside = true;
  {
    py::gil_scoped_release release;
    const Permutation permutation(size, key);
    for (int64_t i = 0; i < count; ++i) inside &= position[i] >= 0 && position[i] < size;
    if (inside) permutation.of(position, count, value);
  }
  if (!inside) throw std::invalid_argument("positions out of range");
  return values;
}

}  // namespace

void bind_permutation(py::module_& module) {
  module.def("permute", &permute, py::arg("positions"), py::arg("size"), py::arg("key"));
}

}  // namespace index_helpers
