// Chooses the data set of a blend from which each sample comes.

#include "index_helpers.hpp"

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

// Where the dynamic loader can choose between versions of a function, the loop is also compiled for AVX2, but not for
// AVX-512, which would imply fused multiply-add.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_WIDER_REGISTERS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_WIDER_REGISTERS
#endif

namespace index_helpers {
namespace {

// kWide: numbers in an AVX2 register (without AVX2, compilers use two registers for them). kLanes: numbers that one
// pass of the loop reads.
constexpr int64_t kWide = 4;
constexpr int64_t kLanes = 2 * kWide;
constexpr int64_t kFew = 16;
typedef double Doubles __attribute__((vector_size(8 * kWide)));
typedef int64_t Numbers __attribute__((vector_size(8 * kWide)));

// The largest weight * drawn - taken in each lane, and the number of its data set.
struct Lanes {
  Doubles largest;
  Numbers number;

  void meet(const Doubles& behind, const Numbers& numbers) {
    const Numbers further = behind > largest;  // not for equal ones: the first stays
    largest = further ? behind : largest;
    number = further ? numbers : number;
  }
};

// Returns the i with the largest weight[i] * drawn - taken[i]; in a tie, the lowest. `count` is a multiple of kLanes.
FOR_WIDER_REGISTERS int64_t furthest_behind(const double* weight, const double* taken, int64_t count, double drawn) {
  const auto* weights = reinterpret_cast<const Doubles*>(weight);
  const auto* takens = reinterpret_cast<const Doubles*>(taken);
  Numbers number = {0, 1, 2, 3};
  Lanes even{weights[0] * drawn - takens[0], number};
  Lanes odd{weights[1] * drawn - takens[1], number + kWide};
  for (int64_t pair = 2; pair < count / kWide; pair += 2) {
    number += kLanes;
    even.meet(weights[pair] * drawn - takens[pair], number);
    odd.meet(weights[pair + 1] * drawn - takens[pair + 1], number + kWide);
  }
  const Numbers first = (odd.largest > even.largest) | ((odd.largest == even.largest) & (odd.number < even.number));
  const Doubles largest = first ? odd.largest : even.largest;
  number = first ? odd.number : even.number;
  int64_t found = 0;
  for (int64_t lane = 1; lane < kWide; ++lane) {
    const bool further = (largest[lane] > largest[found]) |
                         ((largest[lane] == largest[found]) & (number[lane] < number[found]));
    found = further ? lane : found;
  }
  return number[found];
}

// The same for few data sets, without vectors: a vector load right after a store to one of its lanes must wait for the
// store.
int64_t furthest_behind_of_few(const double* weight, const double* taken, int64_t count, double drawn) {
  double largest = weight[0] * drawn - taken[0];
  int64_t found = 0;
  for (int64_t i = 1; i < count; ++i) {
    const double behind = weight[i] * drawn - taken[i];
    found = behind > largest ? i : found;
    largest = behind > largest ? behind : largest;
  }
  return found;
}

// Doubles, aligned so that registers can be loaded from them.
struct alignas(8 * kWide) Group {
  double lane[kLanes];
};

// Returns, for each of `size` samples, the data set whose share is furthest behind its weight (in a tie, the one with
// the lowest number), and how many samples have been taken from that data set before.
template <typename Which>
py::tuple build_blend_index(const Array<double>& weights, int64_t size) {
  if (weights.ndim() != 1 || weights.shape(0) < 1) throw std::invalid_argument("expected a list of weights");
  if (weights.shape(0) - 1 > std::numeric_limits<Which>::max()) throw std::invalid_argument("too many data sets");
  if (size < 0) throw std::invalid_argument("expected size >= 0");
  const int64_t num_datasets = weights.shape(0);
  const int64_t num_groups = (num_datasets + kLanes - 1) / kLanes;
  std::vector<Group> weight_groups(num_groups, Group{});
  std::vector<Group> taken_groups(num_groups, Group{});
  double* weight = weight_groups.front().lane;
  double* taken = taken_groups.front().lane;
  std::copy_n(weights.data(), num_datasets, weight);
  // Counts are whole numbers far below 2^53, which doubles hold exactly. Counts of padding are infinite, so that it is
  // never chosen.
  std::fill(taken + num_datasets, taken + num_groups * kLanes, std::numeric_limits<double>::infinity());
  Array<Which> which(size);
  Array<int64_t> sample(size);
  Which* which_data = which.mutable_data();
  int64_t* sample_data = sample.mutable_data();
  {
    py::gil_scoped_release release;
    for (int64_t k = 0; k < size; ++k) {
      const double drawn = static_cast<double>(std::max<int64_t>(k, 1));
      const int64_t chosen = num_datasets <= kFew ? furthest_behind_of_few(weight, taken, num_datasets, drawn)
                                                  : furthest_behind(weight, taken, num_groups * kLanes, drawn);
      which_data[k] = static_cast<Which>(chosen);
      sample_data[k] = static_cast<int64_t>(taken[chosen]);
      taken[chosen] += 1.0;
    }
  }
  return py::make_tuple(which, sample);
}

}  // namespace

void bind_blend(py::module_& module) {
  module.def("build_blend_index_uint8", &build_blend_index<uint8_t>, py::arg("weights").noconvert(), py::arg("size"));
  module.def("build_blend_index_int32", &build_blend_index<int32_t>, py::arg("weights").noconvert(), py::arg("size"));
}

}  // namespace index_helpers
