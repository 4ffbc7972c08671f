// Loops over tokens, pieces and samples that are too slow in Python, one file for each.
// megatron/data/indexed_dataset.py is their interface; the tests compare them with the definitions, written out in
// Python.

#include "index_helpers.hpp"

PYBIND11_MODULE(_index_helpers, module) {
  module.doc() = "Index loops of megatron.data in C++; megatron.data.indexed_dataset is the interface.";
  // Increased whenever names or arguments change, so that a library from an older build is not used.
  module.attr("interface") = 6;
  index_helpers::bind_blend(module);
  index_helpers::bind_gather(module);
  index_helpers::bind_interleave(module);
  index_helpers::bind_packing(module);
  index_helpers::bind_permutation(module);
  index_helpers::bind_sample_index(module);
  index_helpers::bind_shuffle(module);
}
