// Loops over tokens and samples that are too slow in Python: which document and offset each sample starts at, and which
// data set of a blend each sample comes from. megatron/data/index_helpers.py has the same functions in numpy; the
// tests hold both to the same bytes.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

// A fused multiply-add would round differently on some machines, and a blend must not depend on the machine.
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// Row i holds the position in document_index and the token offset at which sample i starts: token i * seq_length of
// the documents joined in the order of document_index. Row num_samples is where the last sample ends.
template <typename Index>
Array<Index> build_sample_index(const Array<int32_t>& sizes, const Array<int32_t>& document_index, int64_t seq_length,
                                int64_t num_samples) {
  if (sizes.ndim() != 1 || document_index.ndim() != 1) throw std::invalid_argument("expected one-dimensional arrays");
  if (seq_length < 1 || num_samples < 0) throw std::invalid_argument("expected seq_length >= 1 and num_samples >= 0");
  const int32_t* size_of = sizes.data();
  const int32_t* documents = document_index.data();
  const int64_t num_sequences = sizes.shape(0);
  const int64_t num_documents = document_index.shape(0);
  if (num_documents > std::numeric_limits<Index>::max()) throw std::invalid_argument("too many documents for int32");

  Array<Index> result({num_samples + 1, int64_t{2}});
  Index* rows = result.mutable_data();
  bool exhausted = false;
  bool unknown = false;
  {
    py::gil_scoped_release release;
    rows[0] = 0;
    rows[1] = 0;
    int64_t position = 0;  // in document_index
    int64_t offset = 0;    // of the sample's first token in its document; may run past the document's end
    for (int64_t sample = 1; sample <= num_samples; ++sample) {
      offset += seq_length;
      while (position < num_documents) {
        const int32_t document = documents[position];
        if (document < 0 || document >= num_sequences) {
          unknown = true;
          break;
        }
        if (offset < size_of[document]) break;
        offset -= size_of[document];
        ++position;
      }
      exhausted = position >= num_documents;
      if (exhausted || unknown) break;
      rows[2 * sample] = static_cast<Index>(position);
      rows[2 * sample + 1] = static_cast<Index>(offset);
    }
  }
  if (unknown) throw std::invalid_argument("document_index names a sequence that sizes does not have");
  if (exhausted) throw std::invalid_argument("the documents hold too few tokens for num_samples");
  return result;
}

// For each of `size` samples, the data set whose share is furthest behind its weight (ties to the lower number), and
// how many samples that data set has given before.
template <typename Which>
py::tuple build_blend_index(const Array<double>& weights, int64_t size) {
  if (weights.ndim() != 1 || weights.shape(0) < 1) throw std::invalid_argument("expected a list of weights");
  if (weights.shape(0) - 1 > std::numeric_limits<Which>::max()) throw std::invalid_argument("too many data sets");
  if (size < 0) throw std::invalid_argument("expected size >= 0");
  const double* weight = weights.data();
  const int64_t num_datasets = weights.shape(0);
  Array<Which> which(size);
  Array<int64_t> sample(size);
  Which* which_data = which.mutable_data();
  int64_t* sample_data = sample.mutable_data();
  {
    py::gil_scoped_release release;
    std::vector<int64_t> taken(num_datasets, 0);
    for (int64_t k = 0; k < size; ++k) {
      const double drawn = static_cast<double>(std::max<int64_t>(k, 1));
      int64_t best = 0;
      double largest = weight[0] * drawn - static_cast<double>(taken[0]);
      for (int64_t i = 1; i < num_datasets; ++i) {
        const double error = weight[i] * drawn - static_cast<double>(taken[i]);
        if (error > largest) {
          largest = error;
          best = i;
        }
      }
      which_data[k] = static_cast<Which>(best);
      sample_data[k] = taken[best]++;
    }
  }
  return py::make_tuple(which, sample);
}

}  // namespace

PYBIND11_MODULE(_index_helpers, module) {
  module.doc() = "Index loops of megatron.data in C++; megatron.data.index_helpers is the interface.";
  module.def("build_sample_index_int32", &build_sample_index<int32_t>, py::arg("sizes").noconvert(),
             py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
  module.def("build_sample_index_int64", &build_sample_index<int64_t>, py::arg("sizes").noconvert(),
             py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
  module.def("build_blend_index_uint8", &build_blend_index<uint8_t>, py::arg("weights").noconvert(), py::arg("size"));
  module.def("build_blend_index_int32", &build_blend_index<int32_t>, py::arg("weights").noconvert(), py::arg("size"));
}
