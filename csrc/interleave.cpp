// Finds the source and the sample of positions in the order of megatron/data/interleave.py.

#include "index_helpers.hpp"

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace index_helpers {
namespace {

// Walks through the order: the next sample of each source is in a heap, the earliest one on top.
class Order {
 public:
  Order(const double* weights, int64_t num_sources)
      : weights_(weights), num_sources_(num_sources), numbers_(num_sources), heap_(num_sources) {}

  // Returns the source and the number in it of the sample at a position.
  std::pair<int64_t, int64_t> find(int64_t position) {
    // Moving costs about as much as walking over one sample of each source.
    if (position < position_ || position - position_ > num_sources_) move(position);
    while (position_ < position) step();
    const int64_t source = heap_[0].source;
    const int64_t number = numbers_[source];
    step();
    return {source, number};
  }

 private:
  struct Sample {
    double time;
    int64_t source;

    bool operator<(const Sample& other) const {
      return time < other.time || (time == other.time && source < other.source);
    }
  };

  double time(int64_t source, int64_t number) const { return (static_cast<double>(number) + 0.5) / weights_[source]; }

  // Returns how many samples of a source have a time below `end`. The product may be rounded, so it is checked.
  int64_t count_before(int64_t source, double end) const {
    const double estimate = std::ceil(end * weights_[source] - 0.5);
    int64_t count = estimate > 0 ? static_cast<int64_t>(estimate) : 0;
    while (count > 0 && time(source, count - 1) >= end) --count;
    while (time(source, count) < end) ++count;
    return count;
  }

  // Goes to a position at or a little before the given one. About `end` samples have a time below `end`: each source
  // is at most half a sample off, and all of them rarely in the same direction.
  void move(int64_t position) {
    double margin = std::sqrt(static_cast<double>(num_sources_));
    do {
      position_ = 0;
      for (int64_t source = 0; source < num_sources_; ++source) {
        numbers_[source] = count_before(source, static_cast<double>(position) - margin);
        position_ += numbers_[source];
      }
      margin *= 2;
    } while (position_ > position);
    for (int64_t source = 0; source < num_sources_; ++source) {
      heap_[source] = {time(source, numbers_[source]), source};
    }
    for (int64_t place = num_sources_ / 2; place >= 0; --place) sink(place, heap_[place]);
  }

  void step() {
    const int64_t source = heap_[0].source;
    sink(0, {time(source, ++numbers_[source]), source});
    ++position_;
  }

  void sink(int64_t place, const Sample sample) {
    for (int64_t child = 2 * place + 1; child < num_sources_; child = 2 * place + 1) {
      if (child + 1 < num_sources_ && heap_[child + 1] < heap_[child]) ++child;
      if (!(heap_[child] < sample)) break;
      heap_[place] = heap_[child];
      place = child;
    }
    heap_[place] = sample;
  }

  const double* weights_;
  int64_t num_sources_;
  int64_t position_ = INT64_MAX;  // so that the first position is moved to
  std::vector<int64_t> numbers_;
  std::vector<Sample> heap_;
};

// Returns the source of each position and its number there. The weights sum to 1. Ascending positions are fastest.
py::tuple interleave(const Array<double>& weights, const Array<int64_t>& positions) {
  if (weights.ndim() != 1 || weights.shape(0) < 1) throw std::invalid_argument("expected a list of weights");
  if (positions.ndim() != 1) throw std::invalid_argument("expected a list of positions");
  const int64_t num_sources = weights.shape(0);
  const int64_t count = positions.shape(0);
  const int64_t* position = positions.data();
  for (int64_t i = 0; i < num_sources; ++i) {
    if (!(weights.data()[i] > 0 && weights.data()[i] <= 1)) throw std::invalid_argument("expected weights in (0, 1]");
  }
  for (int64_t i = 0; i < count; ++i) {
    // Beyond it, doubles do not tell the middles of neighbouring samples apart.
    if (position[i] < 0 || position[i] >> 51) throw std::invalid_argument("positions out of range");
  }
  Array<int64_t> sources(count);
  Array<int64_t> numbers(count);
  int64_t* source = sources.mutable_data();
  int64_t* number = numbers.mutable_data();
  {
    py::gil_scoped_release release;
    Order order(weights.data(), num_sources);
    for (int64_t i = 0; i < count; ++i) std::tie(source[i], number[i]) = order.find(position[i]);
  }
  return py::make_tuple(sources, numbers);
}

}  // namespace

void bind_interleave(py::module_& module) {
  module.def("interleave", &interleave, py::arg("weights"), py::arg("positions"));
}

}  // namespace index_helpers
