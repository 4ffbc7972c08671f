// numpy's RandomState.shuffle, draw for draw: a Mersenne Twister (Matsumoto and Nishimura, "Mersenne Twister", ACM
// TOMACS 8(1), 1998) chooses the partner of each element, from the last to the second.
//
// It is faster than swapping after each draw. Partners do not depend on the array, so those of a block of swaps are
// drawn first and their cache lines are prefetched: the memory's latency is paid once per block.

#include "index_helpers.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace index_helpers {
namespace {

constexpr int kWords = 624;
constexpr int kShift = 397;
// Swaps of a block. The cache lines of two blocks are in flight at once; with this size they fit into any L1 cache
// along with the generator's tables.
constexpr int kBlock = 128;

class MersenneTwister {
 public:
  // `position` is how many words of `state` have been used, as in RandomState.get_state().
  MersenneTwister(const uint32_t* state, int position) : position_(position) {
    std::memcpy(state_, state, sizeof state_);
    temper();
  }

  const uint32_t* state() const { return state_; }
  int position() const { return position_; }

  uint32_t next() {
    if (position_ == kWords) refill();
    return words_[position_++];
  }

  // Returns the words left before the next refill, and sets `count` to their number, which is at least 1.
  const uint32_t* ahead(int& count) {
    if (position_ == kWords) refill();
    count = kWords - position_;
    return words_ + position_;
  }

  void skip(int count) { position_ += count; }

 private:
  static uint32_t twist(uint32_t upper, uint32_t lower) {
    const uint32_t mixed = (upper & 0x80000000u) | (lower & 0x7fffffffu);
    return (mixed >> 1) ^ (-(lower & 1u) & 0x9908b0dfu);
  }

  void refill() {
    for (int i = 0; i < kWords - kShift; ++i) state_[i] = state_[i + kShift] ^ twist(state_[i], state_[i + 1]);
    for (int i = kWords - kShift; i < kWords - 1; ++i) {
      state_[i] = state_[i + kShift - kWords] ^ twist(state_[i], state_[i + 1]);
    }
    state_[kWords - 1] = state_[kShift - 1] ^ twist(state_[kWords - 1], state_[0]);
    temper();
    position_ = 0;
  }

  void temper() {
    for (int i = 0; i < kWords; ++i) {
      uint32_t word = state_[i];
      word ^= word >> 11;
      word ^= (word << 7) & 0x9d2c5680u;
      word ^= (word << 15) & 0xefc60000u;
      words_[i] = word ^ (word >> 18);
    }
  }

  uint32_t state_[kWords];
  uint32_t words_[kWords];
  int position_;
};

// Returns the smallest 2^k - 1 that is not less than `value`.
uint64_t mask_of(uint64_t value) {
  for (int shift = 1; shift < 64; shift *= 2) value |= value >> shift;
  return value;
}

// Draws the partners of elements last, last - 1, ..., 1, but no more than `wanted`: for each element, the first masked
// draw that does not exceed its own place. Returns how many were drawn.
int draw_partners(MersenneTwister& random, uint64_t last, int wanted, uint64_t* partners) {
  int drawn = 0;
  while (drawn < wanted && last > static_cast<uint64_t>(drawn)) {
    const uint64_t place = last - drawn;
    const uint64_t mask = mask_of(place);
    if (place > 0xffffffffu) {
      const uint64_t high = random.next();
      const uint64_t partner = (high << 32 | random.next()) & mask;
      if (partner <= place) partners[drawn++] = partner;
      continue;
    }
    // The mask stays the same for this many elements. A rejected draw is overwritten by the next one, so that there is
    // no branch to predict.
    const uint64_t same_mask = place - (mask >> 1);
    int available;
    const uint32_t* words = random.ahead(available);
    const int tries = static_cast<int>(std::min<uint64_t>({static_cast<uint64_t>(available), same_mask,
                                                           static_cast<uint64_t>(wanted - drawn)}));
    for (int i = 0; i < tries; ++i) {
      const uint64_t partner = words[i] & mask;
      partners[drawn] = partner;
      drawn += partner + drawn <= last;
    }
    random.skip(tries);
  }
  return drawn;
}

template <typename Element>
void shuffle_elements(Element* elements, uint64_t count, MersenneTwister& random) {
  // One more element than a block: the draw after the last accepted one is stored before it is tested.
  uint64_t drawn[2][kBlock + 1];
  uint64_t place = count > 0 ? count - 1 : 0;
  uint64_t* now = drawn[0];
  uint64_t* next = drawn[1];
  int swaps = draw_partners(random, place, kBlock, now);
  while (swaps > 0) {
    const int swaps_after = draw_partners(random, place - swaps, kBlock, next);
    for (int i = 0; i < swaps_after; ++i) __builtin_prefetch(elements + next[i], 1);
    for (int i = 0; i < swaps; ++i) std::swap(elements[place - i], elements[now[i]]);
    place -= swaps;
    swaps = swaps_after;
    std::swap(now, next);
  }
}

MersenneTwister generator(const Array<uint32_t>& state, int position) {
  if (state.ndim() != 1 || state.shape(0) != kWords || position < 0 || position > kWords) {
    throw std::invalid_argument("not the state of a Mersenne Twister");
  }
  return MersenneTwister(state.data(), position);
}

py::tuple state_of(const MersenneTwister& random) {
  return py::make_tuple(Array<uint32_t>(kWords, random.state()), random.position());
}

// Shuffles `elements` in place and returns the generator's state afterwards: (words, position).
template <typename Element>
py::tuple shuffle(Array<Element>& elements, const Array<uint32_t>& state, int position) {
  if (elements.ndim() != 1) throw std::invalid_argument("expected a one-dimensional array");
  MersenneTwister random = generator(state, position);
  Element* data = elements.mutable_data();
  const uint64_t count = elements.shape(0);
  {
    py::gil_scoped_release release;
    shuffle_elements(data, count, random);
  }
  return state_of(random);
}

// Returns `wanted` partners, as `shuffle` draws them for an array of last + 1 elements, and the generator's state
// afterwards. It is for tests: beyond 2^32 elements draws become wider, and such an array would be too large.
py::tuple shuffle_partners(uint64_t last, int wanted, const Array<uint32_t>& state, int position) {
  if (wanted < 0 || last < static_cast<uint64_t>(wanted)) throw std::invalid_argument("expected last >= wanted >= 0");
  MersenneTwister random = generator(state, position);
  Array<uint64_t> partners(wanted + 1);
  draw_partners(random, last, wanted, partners.mutable_data());
  return py::make_tuple(partners[py::slice(0, wanted, 1)], state_of(random));
}

}  // namespace

void bind_shuffle(py::module_& module) {
  module.def("shuffle", &shuffle<uint32_t>, py::arg("elements").noconvert(), py::arg("state"), py::arg("position"));
  module.def("shuffle", &shuffle<uint64_t>, py::arg("elements").noconvert(), py::arg("state"), py::arg("position"));
  module.def("shuffle_partners", &shuffle_partners, py::arg("last"), py::arg("wanted"), py::arg("state"),
             py::arg("position"));
}

}  // namespace index_helpers
