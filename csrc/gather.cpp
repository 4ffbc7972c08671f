// Copies many short slices of sequences out of a token file into one int64 array, without Python code for each slice.

#include "index_helpers.hpp"

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace index_helpers {
namespace {

// The source may start at any byte; memcpy loads elements that are not aligned.
template <typename Token>
void widen(const uint8_t* source, int64_t count, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    Token token;
    std::memcpy(&token, source + i * sizeof(Token), sizeof(Token));
    out[i] = static_cast<int64_t>(token);
  }
}

// The arrays of an .idx file start at any byte, too.
template <typename Number>
Number load(const Number* numbers, int64_t i) {
  Number number;
  std::memcpy(&number, reinterpret_cast<const char*>(numbers) + i * sizeof(Number), sizeof(Number));
  return number;
}

struct File {
  const uint8_t* bytes;
  int64_t num_bytes;
  const int32_t* sizes;
  const int64_t* pointers;
  int64_t num_sequences;
};

struct Slices {
  const int64_t* sequences;
  const int64_t* offsets;
  const int64_t* lengths;
  int64_t count;
};

// Returns the byte at which slice i starts; -1 if it is not within its sequence, or if the index entry of the sequence
// is damaged: sequences are contiguous, so that each ends where the next one starts.
int64_t start_of(const File& file, const Slices& slices, int64_t i, int64_t itemsize) {
  const int64_t sequence = slices.sequences[i];
  if (sequence < 0 || sequence >= file.num_sequences) return -1;
  const int64_t size = load(file.sizes, sequence);
  const int64_t begin = load(file.pointers, sequence);
  const int64_t end = sequence + 1 < file.num_sequences ? load(file.pointers, sequence + 1) : file.num_bytes;
  if (size < 0 || begin < 0 || end < begin || end > file.num_bytes) return -1;
  if (end - begin != size * itemsize || begin % itemsize) return -1;
  const int64_t offset = slices.offsets[i];
  const int64_t length = slices.lengths[i];
  if (offset < 0 || length < 0 || offset > size - length) return -1;
  return begin + offset * itemsize;
}

template <typename Token>
bool gather(const File& file, const Slices& slices, int64_t* out, int64_t out_size) {
  int64_t total = 0;
  for (int64_t i = 0; i < slices.count; ++i) {
    if (start_of(file, slices, i, sizeof(Token)) < 0) return false;
    total += slices.lengths[i];
  }
  if (total != out_size) return false;
  for (int64_t i = 0; i < slices.count; ++i) {
    widen<Token>(file.bytes + start_of(file, slices, i, sizeof(Token)), slices.lengths[i], out);
    out += slices.lengths[i];
  }
  return true;
}

bool dispatch(const File& file, const Slices& slices, int dtype_code, int64_t* out, int64_t out_size) {
  switch (dtype_code) {
    case 1: return gather<uint8_t>(file, slices, out, out_size);
    case 2: return gather<int8_t>(file, slices, out, out_size);
    case 3: return gather<int16_t>(file, slices, out, out_size);
    case 4: return gather<int32_t>(file, slices, out, out_size);
    case 5: return gather<int64_t>(file, slices, out, out_size);
    case 8: return gather<uint16_t>(file, slices, out, out_size);
    default: return false;
  }
}

// Copies slices of sequences to `out`, one after the other: lengths[i] tokens from token offsets[i] of a sequence on.
// `bytes` is the .bin file; `dtype_code`, `sizes` and `pointers` are from the .idx file. Returns false, with `out`
// unchanged, if a slice or the index entry of its sequence is wrong, if `out` does not have their total length, or if
// tokens are not integers.
bool gather_slices(const Array<uint8_t>& bytes, int dtype_code, const Array<int32_t>& sizes,
                   const Array<int64_t>& pointers, const Array<int64_t>& sequences, const Array<int64_t>& offsets,
                   const Array<int64_t>& lengths, Array<int64_t>& out) {
  if (bytes.ndim() != 1 || sizes.ndim() != 1 || pointers.ndim() != 1 || sequences.ndim() != 1 || offsets.ndim() != 1 ||
      lengths.ndim() != 1 || out.ndim() != 1) {
    throw std::invalid_argument("expected one-dimensional arrays");
  }
  const int64_t count = sequences.shape(0);
  if (sizes.shape(0) != pointers.shape(0)) throw std::invalid_argument("expected one pointer for each size");
  if (offsets.shape(0) != count || lengths.shape(0) != count) {
    throw std::invalid_argument("expected one offset and length for each sequence");
  }
  const File file{bytes.data(), bytes.shape(0), sizes.data(), pointers.data(), sizes.shape(0)};
  const Slices slices{sequences.data(), offsets.data(), lengths.data(), count};
  int64_t* target = out.mutable_data();
  const int64_t out_size = out.shape(0);
  py::gil_scoped_release release;
  return dispatch(file, slices, dtype_code, target, out_size);
}

}  // namespace

void bind_gather(py::module_& module) {
  module.def("gather_slices", &gather_slices, py::arg("bytes").noconvert(), py::arg("dtype_code"),
             py::arg("sizes").noconvert(), py::arg("pointers").noconvert(), py::arg("sequences"), py::arg("offsets"),
             py::arg("lengths"), py::arg("out").noconvert());
}

}  // namespace index_helpers
