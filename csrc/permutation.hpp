// The permutation of megatron/data/permutation.py, whose docstring names its sources, number for number.

#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace index_helpers {

inline uint64_t scramble(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

// Divides by a fixed number: a product with its reciprocal is several times faster than the processor's division.
class Divisor {
 public:
  explicit Divisor(uint64_t value) : value_(value), reciprocal_(~uint64_t{0} / value) {}

  uint64_t value() const { return value_; }

  // The reciprocal is at most value / 2^64 of itself too small, so that the product is the quotient or one less.
  uint64_t divide(uint64_t number, uint64_t& remainder) const {
    const auto product = static_cast<unsigned __int128>(number) * reciprocal_;
    const auto quotient = static_cast<uint64_t>(product >> 64);
    remainder = number - quotient * value_;
    const bool less = remainder >= value_;
    remainder -= less ? value_ : 0;
    return quotient + less;
  }

  // Returns (a + b) mod value, where a is below the value.
  uint64_t sum(uint64_t a, uint64_t b) const {
    uint64_t remainder;
    divide(b, remainder);
    const uint64_t total = a + remainder;
    return total - (total >= value_ ? value_ : 0);
  }

 private:
  uint64_t value_;
  uint64_t reciprocal_;
};

inline uint64_t width_of(uint64_t size) {
  auto root = static_cast<uint64_t>(std::sqrt(static_cast<double>(size - 1)));
  while (root * root > size - 1) --root;
  while ((root + 1) * (root + 1) <= size - 1) ++root;
  return root + 1;
}

class Permutation {
 public:
  Permutation(uint64_t size, uint64_t key)
      : size_(size), columns_(width_of(size)), rows_((size - 1) / columns_.value() + 1) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
    const uint64_t number = scramble(key + kGolden);
    for (int i = 0; i < kRounds; ++i) keys_[i] = scramble(number + kGolden * i);
  }

  uint64_t at(uint64_t value) const {
    do {
      pass<1>(&value);
    } while (value >= size_);
    return value;
  }

  // Sets `values` to those at `count` positions. Some are computed at the same time, as each waits only for itself.
  void of(const int64_t* positions, int64_t count, int64_t* values) const {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      uint64_t some[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) some[lane] = positions[i + lane];
      pass<kLanes>(some);
      for (int lane = 0; lane < kLanes; ++lane) values[i + lane] = some[lane] < size_ ? some[lane] : at(some[lane]);
    }
    for (; i < count; ++i) values[i] = at(positions[i]);
  }

 private:
  static constexpr int kRounds = 8;
  static constexpr int kLanes = 4;

  template <int kCount>
  void pass(uint64_t* values) const {
    uint64_t row[kCount];
    uint64_t column[kCount];
    for (int lane = 0; lane < kCount; ++lane) row[lane] = columns_.divide(values[lane], column[lane]);
    for (int i = 0; i < kRounds; i += 2) {
      for (int lane = 0; lane < kCount; ++lane) {
        column[lane] = columns_.sum(column[lane], scramble(row[lane] + keys_[i]));
      }
      for (int lane = 0; lane < kCount; ++lane) {
        row[lane] = rows_.sum(row[lane], scramble(column[lane] + keys_[i + 1]));
      }
    }
    for (int lane = 0; lane < kCount; ++lane) values[lane] = row[lane] * columns_.value() + column[lane];
  }

  uint64_t size_;
  Divisor columns_;
  Divisor rows_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace index_helpers
