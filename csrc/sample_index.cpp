// Builds the sample index: the document, and the offset in it, at which each sample starts. Finds the documents of a
// sample without it, if their order is a permutation.

#include "index_helpers.hpp"
#include "permutation.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace index_helpers {
namespace {

// Reading the sizes of documents in shuffled order misses the cache: they are prefetched this many documents ahead.
constexpr int64_t kAhead = 64;

// The sizes as stored in an .idx file, at an address that may not be aligned for int32.
class Sizes {
 public:
  Sizes(const uint8_t* bytes, int64_t count) : bytes_(bytes), count_(count) {}

  bool has(int32_t sequence) const { return sequence >= 0 && sequence < count_; }

  int32_t operator[](int32_t sequence) const {
    int32_t size;
    std::memcpy(&size, bytes_ + int64_t{4} * sequence, sizeof size);
    return size;
  }

  void request(int32_t sequence) const {
    if (has(sequence)) __builtin_prefetch(bytes_ + int64_t{4} * sequence);
  }

 private:
  const uint8_t* bytes_;
  int64_t count_;
};

enum class Outcome { complete, too_few_tokens, unknown_sequence };

template <typename Index>
Outcome fill_rows(const Sizes& sizes, const int32_t* documents, int64_t num_documents, int64_t seq_length,
                  int64_t num_samples, Index* rows) {
  rows[0] = 0;
  rows[1] = 0;
  if (num_samples == 0) return Outcome::complete;
  for (int64_t i = 0; i < std::min(kAhead, num_documents); ++i) sizes.request(documents[i]);
  int64_t sample = 1;
  int64_t offset = seq_length;  // of the sample's first token in the document; may be beyond the document's end
  for (int64_t position = 0; position < num_documents; ++position) {
    if (position + kAhead < num_documents) sizes.request(documents[position + kAhead]);
    if (!sizes.has(documents[position])) return Outcome::unknown_sequence;
    const int64_t size = sizes[documents[position]];
    for (; offset < size; offset += seq_length) {
      rows[2 * sample] = static_cast<Index>(position);
      rows[2 * sample + 1] = static_cast<Index>(offset);
      if (++sample > num_samples) return Outcome::complete;
    }
    offset -= size;
  }
  return Outcome::too_few_tokens;
}

// Returns [num_samples + 1, 2]. Row i holds the position in document_index and the token offset at which sample i
// starts: token i * seq_length of the documents joined in the order of document_index. Row num_samples is where the
// last sample ends. `sizes` holds int32 numbers as bytes.
template <typename Index>
Array<Index> build_sample_index(const Array<uint8_t>& sizes, const Array<int32_t>& document_index, int64_t seq_length,
                                int64_t num_samples) {
  if (sizes.ndim() != 1 || document_index.ndim() != 1) throw std::invalid_argument("expected one-dimensional arrays");
  if (seq_length < 1 || num_samples < 0) throw std::invalid_argument("expected seq_length >= 1 and num_samples >= 0");
  const int64_t num_documents = document_index.shape(0);
  if (num_documents > std::numeric_limits<Index>::max()) throw std::invalid_argument("too many documents for int32");
  const int32_t* documents = document_index.data();
  const Sizes lengths(sizes.data(), sizes.shape(0) / 4);
  Array<Index> result({num_samples + 1, int64_t{2}});
  Index* rows = result.mutable_data();
  Outcome outcome;
  {
    py::gil_scoped_release release;
    outcome = fill_rows(lengths, documents, num_documents, seq_length, num_samples, rows);
  }
  if (outcome == Outcome::unknown_sequence) {
    throw std::invalid_argument("document_index names a sequence that sizes does not have");
  }
  if (outcome == Outcome::too_few_tokens) {
    throw std::invalid_argument("the documents hold too few tokens for num_samples");
  }
  return result;
}

// Documents first .. first + count - 1 in the order of a permutation.
class Shuffled {
 public:
  Shuffled(const Array<uint8_t>& sizes, int64_t first, int64_t count, uint64_t key)
      : sizes_(sizes.data(), sizes.shape(0) / 4), first_(first), count_(count), order_(count, key) {
    if (sizes.ndim() != 1) throw std::invalid_argument("expected a one-dimensional array");
    if (first < 0 || count > sizes.shape(0) / 4 - first) throw std::invalid_argument("documents without a size");
  }

  int64_t count() const { return count_; }
  int32_t at(int64_t place) const { return static_cast<int32_t>(first_ + order_.at(place)); }
  int32_t numbered(int64_t number) const { return static_cast<int32_t>(first_ + number); }
  const Permutation& order() const { return order_; }
  const Sizes& sizes() const { return sizes_; }

 private:
  Sizes sizes_;
  int64_t first_;
  int64_t count_;
  Permutation order_;
};

void check_shuffled(int64_t count, int64_t stride) {
  if (count < 1 || stride < 1) throw std::invalid_argument("expected count >= 1 and stride >= 1");
}

// Returns the number of tokens before every stride-th document of an order, and of all.
Array<int64_t> token_starts(const Array<uint8_t>& sizes, int64_t first, int64_t count, uint64_t key, int64_t stride) {
  check_shuffled(count, stride);
  const Shuffled documents(sizes, first, count, key);
  Array<int64_t> result((count - 1) / stride + 2);
  int64_t* start = result.mutable_data();
  {
    py::gil_scoped_release release;
    std::array<int64_t, kAhead> some;
    int64_t tokens = 0;
    for (int64_t at = 0; at < count; at += kAhead) {
      const int64_t number = std::min(kAhead, count - at);
      std::iota(some.begin(), some.end(), at);
      documents.order().of(some.data(), number, some.data());
      for (int64_t i = 0; i < number; ++i) documents.sizes().request(documents.numbered(some[i]));
      for (int64_t i = 0; i < number; ++i) {
        if ((at + i) % stride == 0) *start++ = tokens;
        tokens += documents.sizes()[documents.numbered(some[i])];
      }
    }
    *start = tokens;
  }
  return result;
}

template <typename Number>
Array<Number> array_of(const std::vector<Number>& numbers) {
  return Array<Number>(numbers.size(), numbers.data());
}

// Returns the sequences that have tokens begin .. end - 1 of the documents joined in an order, and the offset of the
// first token and the number of tokens in each of them; less than asked for if there are no more. `starts` is what
// token_starts returns.
py::tuple documents_between(const Array<uint8_t>& sizes, int64_t first, int64_t count, uint64_t key,
                            const Array<int64_t>& starts, int64_t stride, int64_t begin, int64_t end) {
  check_shuffled(count, stride);
  if (starts.ndim() != 1 || starts.shape(0) < 1 || begin < 0 || starts.data()[0] > begin) {
    throw std::invalid_argument("expected begin >= starts[0]");
  }
  const Shuffled documents(sizes, first, count, key);
  const int64_t* start = starts.data();
  const int64_t num_starts = starts.shape(0);
  std::vector<int32_t> sequences;
  std::vector<int64_t> offsets;
  std::vector<int64_t> counts;
  {
    py::gil_scoped_release release;
    const int64_t block = std::upper_bound(start, start + num_starts, begin) - start - 1;
    int64_t at = start[block];
    for (int64_t i = block * stride; i < count && at < end; ++i) {
      const int32_t document = documents.at(i);
      const int64_t next = at + documents.sizes()[document];
      const int64_t low = std::max(at, begin);
      const int64_t stop = std::min(next, end);
      if (stop > low) {
        sequences.push_back(document);
        offsets.push_back(low - at);
        counts.push_back(stop - low);
      }
      at = next;
    }
  }
  return py::make_tuple(array_of(sequences), array_of(offsets), array_of(counts));
}

}  // namespace

void bind_sample_index(py::module_& module) {
  module.def("build_sample_index_int32", &build_sample_index<int32_t>, py::arg("sizes").noconvert(),
             py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
  module.def("build_sample_index_int64", &build_sample_index<int64_t>, py::arg("sizes").noconvert(),
             py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"));
  module.def("token_starts", &token_starts, py::arg("sizes").noconvert(), py::arg("first"), py::arg("count"),
             py::arg("key"), py::arg("stride"));
  module.def("documents_between", &documents_between, py::arg("sizes").noconvert(), py::arg("first"),
             py::arg("count"), py::arg("key"), py::arg("starts").noconvert(), py::arg("stride"), py::arg("begin"),
             py::arg("end"));
}

}  // namespace index_helpers
