// What the parts of the schedule clock share: the lists of a pipeline's ranks with their messages, and their run.

#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace schedule_clock {

using Ticks = int64_t;

// In this order on both sides of the interface.
enum Op : uint8_t { kForward, kBackward, kBackwardInput, kBackwardWeight };

struct Pass {
  int32_t micro_batch;
  uint16_t stage;
  Op op;
};

// What a rank does next: a pass, or something with the message of this number.
enum Kind : uint32_t { kCompute, kSend, kReceive, kWait };

struct Action {
  uint32_t word;
  Action(Kind kind, uint32_t message = 0) : word(message << 2 | kind) {}
  Kind kind() const { return static_cast<Kind>(word & 3); }
  uint32_t message() const { return word >> 2; }
};

struct Link {
  int32_t ranks[2];
};

struct Message {
  uint32_t link;
  uint16_t sender;  // pipeline rank
  bool forward;
  uint16_t stage;  // that made it
  int32_t micro_batch;
};

struct Costs {
  std::vector<Ticks> occupies, latency;  // by rank that sends
};

// Blocks of so many passes and micro-batches on each rank, alike until its forward pass of this number; `times` more of
// them were left out there.
struct Repeat {
  int64_t forwards, passes, micro_batches, times;
};

struct Result {
  std::vector<Ticks> clocks, message_wait;                 // by rank
  std::vector<Ticks> first_forward, last_start, last_end;  // by stage
  std::vector<std::vector<Ticks>> starts, ends;            // by rank and pass
};

class Plan {
 public:
  // `latency` of messages in the nominal step, in quarters of a forward pass.
  Plan(std::vector<std::vector<Pass>> passes, std::vector<int32_t> owner, int64_t latency, bool duplex,
       int64_t in_flight);

  Result run(const std::vector<std::vector<Ticks>>& durations, const std::vector<Ticks>& first, const Costs& forward,
             const Costs& backward, const std::vector<Repeat>& repeats, bool& extended) const;

  std::vector<std::tuple<int, int, int>> instructions(size_t rank) const;
  std::vector<std::tuple<int, int, int>> computations(size_t rank) const;

 private:
  size_t ranks() const { return passes_.size(); }
  size_t stages() const { return owner_.size(); }
  size_t cell(size_t stage, int64_t micro_batch) const { return stage * micro_batches_ + micro_batch; }
  // The stage whose result a pass needs from another pass than its own forward pass; -1 for none.
  int64_t input_of(const Pass& pass) const {
    if (pass.op == kForward) return static_cast<int64_t>(pass.stage) - 1;
    if (pass.op == kBackwardWeight || pass.stage + 1u == stages()) return -1;
    return pass.stage + 1;
  }
  // The stage that needs what a pass makes; -1 for none.
  int64_t consumer_of(const Pass& pass) const {
    if (pass.op == kForward) return pass.stage + 1u == stages() ? -1 : pass.stage + 1;
    return pass.op == kBackwardWeight ? -1 : static_cast<int64_t>(pass.stage) - 1;
  }
  std::vector<std::vector<int64_t>> nominal_ends(int64_t latency) const;
  void place_messages(const std::vector<std::vector<int64_t>>& ends, bool duplex, size_t in_flight);
  void sum_up_stages(Result& result) const;
  bool extend(Result& result, const std::vector<Ticks>& arrives, const std::vector<std::vector<Ticks>>& waits,
              const Repeat& repeat, Ticks& shift) const;

  std::vector<std::vector<Pass>> passes_;
  std::vector<int32_t> owner_;
  std::vector<std::vector<int64_t>> nominal_;  // by rank and pass: its end in the nominal step
  int64_t micro_batches_ = 0;
  std::vector<std::vector<Action>> actions_;
  std::vector<std::vector<int32_t>> sent_;  // by rank and pass: the message with its result, -1 for none
  std::vector<Message> messages_;
  std::vector<Link> links_;
};

// Plan of a schedule by name for groups of micro-batches (orders.group_sizes), one group where there is one chunk.
Plan plan_schedule(const std::string& name, int64_t size, int64_t chunks, const std::vector<int64_t>& groups,
                   int64_t latency, bool duplex, int64_t in_flight);

// Plan of any lists: of each rank (op, stage, micro-batch) in order, and the rank of each stage.
Plan plan_lists(const std::vector<std::vector<std::tuple<int, int, int>>>& lists, const std::vector<int32_t>& owner,
                int64_t latency, bool duplex, int64_t in_flight);

}  // namespace schedule_clock
