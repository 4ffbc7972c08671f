// Copies many short runs of tokens out of a file into one int64 array, without Python code for each run.

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

struct Runs {
  const uint8_t* bytes;
  int64_t num_bytes;
  const int64_t* starts;
  const int64_t* lengths;
  int64_t count;
};

// Returns the number of the first run that is not within the bytes; -1 if all are. `total` becomes the sum of the
// lengths of the runs before it.
int64_t first_outside(const Runs& runs, int64_t itemsize, int64_t& total) {
  total = 0;
  for (int64_t i = 0; i < runs.count; ++i) {
    const int64_t start = runs.starts[i];
    const int64_t length = runs.lengths[i];
    if (start < 0 || start > runs.num_bytes || length < 0 || length > (runs.num_bytes - start) / itemsize) return i;
    total += length;
  }
  return -1;
}

template <typename Token>
int64_t gather(const Runs& runs, int64_t* out, int64_t out_size) {
  int64_t total = 0;
  const int64_t outside = first_outside(runs, sizeof(Token), total);
  if (outside >= 0) return outside;
  if (total != out_size) return -2;
  for (int64_t i = 0; i < runs.count; ++i) {
    widen<Token>(runs.bytes + runs.starts[i], runs.lengths[i], out);
    out += runs.lengths[i];
  }
  return -1;
}

int64_t dispatch(const Runs& runs, int dtype_code, int64_t* out, int64_t out_size) {
  switch (dtype_code) {
    case 1: return gather<uint8_t>(runs, out, out_size);
    case 2: return gather<int8_t>(runs, out, out_size);
    case 3: return gather<int16_t>(runs, out, out_size);
    case 4: return gather<int32_t>(runs, out, out_size);
    case 5: return gather<int64_t>(runs, out, out_size);
    case 8: return gather<uint16_t>(runs, out, out_size);
    default: return -3;
  }
}

// Copies runs of tokens to `out`, one after the other. Run i has lengths[i] tokens and begins at byte starts[i].
// Returns -1; if a run is not within `bytes`, the number of the first such run, with `out` unchanged. dtype_code is a
// code of the .idx format.
int64_t gather_tokens(const Array<uint8_t>& bytes, int dtype_code, const Array<int64_t>& starts,
                      const Array<int64_t>& lengths, Array<int64_t>& out) {
  if (bytes.ndim() != 1 || starts.ndim() != 1 || lengths.ndim() != 1 || out.ndim() != 1) {
    throw std::invalid_argument("expected one-dimensional arrays");
  }
  if (starts.shape(0) != lengths.shape(0)) throw std::invalid_argument("expected one length for each start");
  const Runs runs{bytes.data(), bytes.shape(0), starts.data(), lengths.data(), starts.shape(0)};
  int64_t* target = out.mutable_data();
  const int64_t out_size = out.shape(0);
  int64_t result;
  {
    py::gil_scoped_release release;
    result = dispatch(runs, dtype_code, target, out_size);
  }
  if (result == -2) throw std::invalid_argument("the size of out is not the total length of the runs");
  if (result == -3) throw std::invalid_argument("dtype_code is not the code of an integer type");
  return result;
}

}  // namespace

void bind_gather(py::module_& module) {
  module.def("gather_tokens", &gather_tokens, py::arg("bytes").noconvert(), py::arg("dtype_code"),
             py::arg("starts").noconvert(), py::arg("lengths").noconvert(), py::arg("out").noconvert());
}

}  // namespace index_helpers
