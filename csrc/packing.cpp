// Packs pieces of documents into bins of one sample each: by best fit, the longest pieces first.

#include "index_helpers.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

namespace index_helpers {
namespace {

// Random writes and reads are prefetched this many pieces ahead.
constexpr int64_t kAhead = 32;

// A set of numbers below `size` that finds the smallest member from a given number on. Each number has one bit. Above
// each level of 64-bit words is a level with one bit per word, which is set if the word is not zero.
class SortedBits {
 public:
  explicit SortedBits(int64_t size) {
    do {
      size = (size + 63) / 64;
      levels_.emplace_back(size, 0);
    } while (size > 1);
  }

  void insert(int64_t number) {
    for (auto& level : levels_) {
      level[number >> 6] |= uint64_t{1} << (number & 63);
      number >>= 6;
    }
  }

  void remove(int64_t number) {
    for (auto& level : levels_) {
      level[number >> 6] &= ~(uint64_t{1} << (number & 63));
      if (level[number >> 6]) return;
      number >>= 6;
    }
  }

  // Returns the smallest member that is not less than `number`, or -1 if there is none.
  int64_t at_least(int64_t number) const {
    for (size_t height = 0; height < levels_.size(); ++height) {
      const int64_t place = number >> 6;
      if (place >= static_cast<int64_t>(levels_[height].size())) return -1;
      const uint64_t word = levels_[height][place] >> (number & 63) << (number & 63);
      if (word) return descend(height, place * 64 + __builtin_ctzll(word));
      number = place + 1;
    }
    return -1;
  }

 private:
  int64_t descend(size_t height, int64_t number) const {
    while (height-- > 0) number = number * 64 + __builtin_ctzll(levels_[height][number]);
    return number;
  }

  std::vector<std::vector<uint64_t>> levels_;
};

// Returns the numbers of the pieces, longest first, and of pieces of equal length in order. Throws invalid_argument if
// a length is not within 1..capacity.
template <typename Number>
std::vector<Number> by_falling_length(const int32_t* lengths, int64_t num_pieces, int64_t capacity) {
  std::vector<int64_t> place(capacity + 2, 0);
  for (int64_t i = 0; i < num_pieces; ++i) {
    if (lengths[i] < 1 || lengths[i] > capacity) throw std::invalid_argument("a length is not within 1..capacity");
    ++place[lengths[i]];
  }
  int64_t before = 0;
  for (int64_t length = capacity; length > 0; --length) {
    const int64_t count = place[length];
    place[length] = before;
    before += count;
  }
  std::vector<Number> order(num_pieces);
  for (int64_t i = 0; i < num_pieces; ++i) order[place[lengths[i]]++] = static_cast<Number>(i);
  return order;
}

// Bins to be filled. Those with the same room left form a stack, linked through `below_`, which has one number per bin.
template <typename Number>
class Bins {
 public:
  // No two bins are half empty, since the pieces of the later one would have fitted into the earlier one: this limits
  // how many bins there are.
  Bins(int64_t capacity, int64_t num_pieces, int64_t num_tokens)
      : capacity_(capacity), rooms_(capacity + 1), top_(capacity + 1, Number{-1}) {
    below_.reserve(std::min(num_pieces, 2 * (num_tokens / capacity) + 2));
  }

  // Puts a piece into the bin in which it leaves the least room; of several such bins, into the one that reached its
  // room last. Returns the number of the bin.
  Number put(int64_t length) {
    int64_t room = rooms_.at_least(length);
    Number bin;
    if (room < 0) {
      bin = static_cast<Number>(below_.size());
      below_.push_back(-1);
      room = capacity_;
    } else {
      bin = top_[room];
      top_[room] = below_[bin];
      if (top_[room] < 0) rooms_.remove(room);
    }
    room -= length;
    if (room > 0) {
      if (top_[room] < 0) rooms_.insert(room);
      below_[bin] = top_[room];
      top_[room] = bin;
    }
    return bin;
  }

  int64_t size() const { return static_cast<int64_t>(below_.size()); }

 private:
  int64_t capacity_;
  SortedBits rooms_;
  std::vector<Number> top_;
  std::vector<Number> below_;
};

// Returns the bin of each piece, and the number of bins.
template <typename Number>
py::tuple best_fit_pack(const Array<int32_t>& lengths, int64_t capacity) {
  if (lengths.ndim() != 1) throw std::invalid_argument("expected one-dimensional lengths");
  if (capacity < 1 || capacity > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("expected 1 <= capacity < 2^31");
  }
  const int64_t num_pieces = lengths.shape(0);
  if (num_pieces > std::numeric_limits<Number>::max()) throw std::invalid_argument("too many pieces for int32");
  const int32_t* length_of = lengths.data();
  Array<Number> result(num_pieces);
  Number* bin_of = result.mutable_data();
  int64_t num_bins;
  {
    py::gil_scoped_release release;
    const std::vector<Number> order = by_falling_length<Number>(length_of, num_pieces, capacity);
    int64_t num_tokens = 0;
    for (int64_t i = 0; i < num_pieces; ++i) num_tokens += length_of[i];
    Bins<Number> bins(capacity, num_pieces, num_tokens);
    for (int64_t i = 0; i < num_pieces; ++i) {
      if (i + kAhead < num_pieces) {
        __builtin_prefetch(length_of + order[i + kAhead]);
        __builtin_prefetch(bin_of + order[i + kAhead], 1);
      }
      bin_of[order[i]] = bins.put(length_of[order[i]]);
    }
    num_bins = bins.size();
  }
  return py::make_tuple(result, num_bins);
}

// Returns (starts, order): the pieces of bin b are order[starts[b]] to order[starts[b + 1] - 1], in ascending order.
template <typename Number>
py::tuple group_by_bin(const Array<Number>& bins, int64_t num_bins) {
  if (bins.ndim() != 1 || num_bins < 0) throw std::invalid_argument("expected one-dimensional bins and num_bins >= 0");
  const int64_t num_pieces = bins.shape(0);
  const Number* bin_of = bins.data();
  Array<int64_t> starts(num_bins + 1);
  Array<Number> order(num_pieces);
  int64_t* start = starts.mutable_data();
  Number* numbers = order.mutable_data();
  bool outside = false;
  {
    py::gil_scoped_release release;
    std::fill_n(start, num_bins + 1, int64_t{0});
    for (int64_t i = 0; i < num_pieces && !outside; ++i) {
      outside = bin_of[i] < 0 || bin_of[i] >= num_bins;
      if (!outside) ++start[bin_of[i]];
      if (i + kAhead < num_pieces) __builtin_prefetch(start + std::clamp<int64_t>(bin_of[i + kAhead], 0, num_bins), 1);
    }
    // Counts become ends; each end then moves down to its bin's start as the pieces are placed in reverse order.
    for (int64_t bin = 1; bin <= num_bins; ++bin) start[bin] += start[bin - 1];
    for (int64_t i = num_pieces - 1; i >= 0 && !outside; --i) {
      numbers[--start[bin_of[i]]] = static_cast<Number>(i);
      if (i >= kAhead) __builtin_prefetch(start + bin_of[i - kAhead], 1);
    }
  }
  if (outside) throw std::invalid_argument("a bin is not within 0..num_bins-1");
  return py::make_tuple(starts, order);
}

}  // namespace

void bind_packing(py::module_& module) {
  module.def("best_fit_pack_int32", &best_fit_pack<int32_t>, py::arg("lengths").noconvert(), py::arg("capacity"));
  module.def("best_fit_pack_int64", &best_fit_pack<int64_t>, py::arg("lengths").noconvert(), py::arg("capacity"));
  module.def("group_by_bin", &group_by_bin<int32_t>, py::arg("bins").noconvert(), py::arg("num_bins"));
  module.def("group_by_bin", &group_by_bin<int64_t>, py::arg("bins").noconvert(), py::arg("num_bins"));
}

}  // namespace index_helpers
