// The lists of a pipeline's ranks: passes in the order of megatron/pipeline/orders.py, and messages in the places of
// messages.py.

#include "schedule_clock.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>

namespace schedule_clock {
namespace {

// Times of the passes in the nominal step (simulate.py), in quarters of a forward pass.
constexpr int64_t kNominal[] = {4, 8, 4, 4};

std::vector<Pass> one_forward_one_backward(int64_t rank, int64_t size, int64_t micro_batches, bool split) {
  std::vector<Pass> order;
  auto add = [&](Op op, int64_t micro_batch) {
    order.push_back({static_cast<int32_t>(micro_batch), static_cast<uint16_t>(rank), op});
  };
  const int64_t warm_up = std::min(micro_batches, size - rank - 1);
  for (int64_t i = 0; i < warm_up; ++i) add(kForward, i);
  for (int64_t i = 0; i < micro_batches; ++i) {
    if (warm_up + i < micro_batches) add(kForward, warm_up + i);
    add(split ? kBackwardInput : kBackward, i);
    if (split && i >= rank) add(kBackwardWeight, i - rank);
  }
  for (int64_t i = std::max<int64_t>(0, micro_batches - rank); split && i < micro_batches; ++i) add(kBackwardWeight, i);
  return order;
}

std::vector<Pass> by_groups(int64_t rank, int64_t size, int64_t chunks, const std::vector<int64_t>& groups, Op op) {
  std::vector<Pass> order;
  int64_t first = 0;
  for (const int64_t group : groups) {
    for (int64_t turn = 0; turn < chunks; ++turn) {
      const int64_t chunk = op == kForward ? turn : chunks - 1 - turn;
      for (int64_t i = 0; i < group; ++i) {
        order.push_back({static_cast<int32_t>(first + i), static_cast<uint16_t>(chunk * size + rank), op});
      }
    }
    first += group;
  }
  return order;
}

std::vector<Pass> interleaved(int64_t rank, int64_t size, int64_t chunks, const std::vector<int64_t>& groups) {
  const std::vector<Pass> forward = by_groups(rank, size, chunks, groups, kForward);
  const std::vector<Pass> backward = by_groups(rank, size, chunks, groups, kBackward);
  const size_t total = forward.size();
  const size_t warm_up = std::min<size_t>(total, 2 * (size - rank - 1) + (chunks - 1) * groups.front());
  std::vector<Pass> order(forward.begin(), forward.begin() + warm_up);
  order.reserve(2 * total);
  for (size_t i = 0; i < total; ++i) {
    if (warm_up + i < total) order.push_back(forward[warm_up + i]);
    order.push_back(backward[i]);
  }
  return order;
}

}  // namespace

Plan::Plan(std::vector<std::vector<Pass>> passes, std::vector<int32_t> owner, int64_t latency, bool duplex,
           int64_t in_flight)
    : passes_(std::move(passes)), owner_(std::move(owner)) {
  if (owner_.size() > 0xffff || passes_.size() > 0xffff) throw std::invalid_argument("too many stages");
  for (const auto& rank : passes_) {
    for (const Pass& pass : rank) micro_batches_ = std::max<int64_t>(micro_batches_, pass.micro_batch + 1);
  }
  nominal_ = nominal_ends(latency);
  place_messages(nominal_, duplex, static_cast<size_t>(in_flight));
}

// When each pass of the nominal step ends, where messages travel by themselves.
std::vector<std::vector<int64_t>> Plan::nominal_ends(int64_t latency) const {
  const size_t cells = stages() * micro_batches_;
  std::vector<int64_t> made[2] = {std::vector<int64_t>(cells, -1), std::vector<int64_t>(cells, -1)};
  std::vector<std::vector<int64_t>> ends(ranks());
  std::vector<std::pair<int, int64_t>> blocked(ranks(), {-1, -1});  // (forward, cell) that a rank waits for
  std::vector<size_t> runnable;
  size_t done = 0, all = 0;
  for (size_t rank = ranks(); rank-- > 0;) {
    runnable.push_back(rank);
    all += passes_[rank].size();
    ends[rank].reserve(passes_[rank].size());
  }
  while (!runnable.empty()) {
    const size_t rank = runnable.back();
    runnable.pop_back();
    int64_t clock = ends[rank].empty() ? 0 : ends[rank].back();
    for (size_t at = ends[rank].size(); at < passes_[rank].size(); ++at) {
      const Pass& pass = passes_[rank][at];
      const bool forward = pass.op == kForward;
      const size_t own = cell(pass.stage, pass.micro_batch);
      if (!forward && made[pass.op != kBackwardWeight][own] < 0) break;  // its own first half is not behind it
      const int64_t input = input_of(pass);
      if (input >= 0) {
        const size_t needed = cell(input, pass.micro_batch);
        if (made[forward][needed] < 0) {
          blocked[rank] = {forward, static_cast<int64_t>(needed)};
          break;
        }
        const bool remote = owner_[input] != static_cast<int32_t>(rank);
        clock = std::max(clock, made[forward][needed] + (remote ? latency : 0));
      }
      clock += kNominal[pass.op];
      ends[rank].push_back(clock);
      ++done;
      if (pass.op == kBackwardWeight) continue;
      made[forward][own] = clock;
      const int64_t consumer = consumer_of(pass);
      if (consumer < 0) continue;
      const size_t other = owner_[consumer];
      if (blocked[other] == std::make_pair(static_cast<int>(forward), static_cast<int64_t>(own))) {
        blocked[other] = {-1, -1};
        runnable.push_back(other);
      }
    }
  }
  if (done != all) throw std::invalid_argument("the lists wait for each other in a circle");
  return ends;
}

// All messages in one sequence, by the time of being made; each rank posts its own in that sequence: sends behind the
// pass that made them, receives before the pass behind which their message is made.
void Plan::place_messages(const std::vector<std::vector<int64_t>>& ends, bool duplex, size_t in_flight) {
  struct Made {
    int64_t time;
    uint32_t rank, pass;
  };
  int64_t last = 0;
  for (const auto& rank : ends) last = std::max(last, rank.empty() ? 0 : rank.back());
  std::vector<uint32_t> place(last + 2, 0);
  auto leaves = [&](size_t rank, const Pass& pass) {
    const int64_t consumer = consumer_of(pass);
    return consumer >= 0 && owner_[consumer] != static_cast<int32_t>(rank);
  };
  for (size_t rank = 0; rank < ranks(); ++rank) {
    for (size_t at = 0; at < ends[rank].size(); ++at) {
      if (leaves(rank, passes_[rank][at])) ++place[ends[rank][at] + 1];
    }
  }
  for (size_t time = 1; time < place.size(); ++time) place[time] += place[time - 1];
  std::vector<Made> made(place.back());
  for (size_t rank = 0; rank < ranks(); ++rank) {  // lower ranks first at equal times
    for (size_t at = 0; at < ends[rank].size(); ++at) {
      if (!leaves(rank, passes_[rank][at])) continue;
      made[place[ends[rank][at]]++] = {ends[rank][at], static_cast<uint32_t>(rank), static_cast<uint32_t>(at)};
    }
  }
  std::map<std::pair<int32_t, int32_t>, uint32_t> link_of;
  struct Post {
    int64_t time;
    Action action;
  };
  std::vector<std::vector<Post>> queues(ranks());
  sent_.resize(ranks());
  for (size_t rank = 0; rank < ranks(); ++rank) sent_[rank].assign(passes_[rank].size(), -1);
  const size_t cells = stages() * micro_batches_;
  std::vector<int32_t> carries[2] = {std::vector<int32_t>(cells, -1), std::vector<int32_t>(cells, -1)};
  messages_.reserve(made.size());
  for (const Made& one : made) {
    const Pass& pass = passes_[one.rank][one.pass];
    const int32_t from = static_cast<int32_t>(one.rank), to = owner_[consumer_of(pass)];
    const bool in_order = duplex || from < to;
    const std::pair<int32_t, int32_t> ends_of(in_order ? from : to, in_order ? to : from);
    const auto [found, fresh] = link_of.try_emplace(ends_of, static_cast<uint32_t>(links_.size()));
    if (fresh) links_.push_back({{ends_of.first, ends_of.second}});
    const uint32_t number = static_cast<uint32_t>(messages_.size());
    const bool forward = pass.op == kForward;
    messages_.push_back({found->second, static_cast<uint16_t>(from), forward, pass.stage, pass.micro_batch});
    sent_[one.rank][one.pass] = static_cast<int32_t>(number);
    carries[forward][cell(pass.stage, pass.micro_batch)] = static_cast<int32_t>(number);
    queues[from].push_back({one.time, Action(kSend, number)});
    queues[to].push_back({one.time, Action(kReceive, number)});
  }
  actions_.resize(ranks());
  for (size_t rank = 0; rank < ranks(); ++rank) {
    std::vector<Action>& actions = actions_[rank];
    const std::vector<Post>& queue = queues[rank];
    actions.reserve(passes_[rank].size() + 2 * queue.size());
    std::vector<uint32_t> sent;
    size_t head = 0, oldest = 0;
    auto post = [&](const Post& one) {
      if (one.action.kind() == kSend) {
        if (sent.size() - oldest >= in_flight) actions.emplace_back(kWait, sent[oldest++]);
        sent.push_back(one.action.message());
      }
      actions.push_back(one.action);
    };
    for (size_t at = 0; at < passes_[rank].size(); ++at) {
      const int64_t end = ends[rank][at];
      while (head < queue.size() && queue[head].time <= end && queue[head].action.kind() != kSend) post(queue[head++]);
      const Pass& pass = passes_[rank][at];
      const int64_t input = input_of(pass);
      if (input >= 0 && owner_[input] != static_cast<int32_t>(rank)) {
        actions.emplace_back(kWait, carries[pass.op == kForward][cell(input, pass.micro_batch)]);
      }
      actions.emplace_back(kCompute);
      while (head < queue.size() && queue[head].time <= end) post(queue[head++]);
    }
    if (head != queue.size()) throw std::invalid_argument("a message is made after its receiver has finished");
    for (; oldest < sent.size(); ++oldest) actions.emplace_back(kWait, sent[oldest]);
  }
}

// Instructions with messages: (number of the op in instructions.py's order, stage, micro-batch).
std::vector<std::tuple<int, int, int>> Plan::instructions(size_t rank) const {
  std::vector<std::tuple<int, int, int>> list;
  size_t pass = 0;
  for (const Action& action : actions_.at(rank)) {
    const bool send = action.kind() == kSend;
    if (action.kind() == kCompute) {
      const Pass& one = passes_[rank][pass++];
      list.emplace_back(one.op, one.stage, one.micro_batch);
    } else if (send || action.kind() == kReceive) {
      const Message& one = messages_[action.message()];
      const int stage = send ? one.stage : one.forward ? one.stage + 1 : one.stage - 1;
      list.emplace_back((one.forward ? 4 : 6) + (send ? 0 : 1), stage, one.micro_batch);
    }
  }
  return list;
}

std::vector<std::tuple<int, int, int>> Plan::computations(size_t rank) const {
  std::vector<std::tuple<int, int, int>> list;
  for (const Pass& one : passes_.at(rank)) list.emplace_back(one.op, one.stage, one.micro_batch);
  return list;
}

Plan plan_schedule(const std::string& name, int64_t size, int64_t chunks, const std::vector<int64_t>& groups,
                   int64_t latency, bool duplex, int64_t in_flight) {
  if (size < 1 || chunks < 1 || groups.empty()) throw std::invalid_argument("expected sizes from 1 on");
  int64_t micro_batches = 0;
  for (const int64_t group : groups) micro_batches += group;
  std::vector<std::vector<Pass>> passes;
  for (int64_t rank = 0; rank < size; ++rank) {
    passes.push_back(name == "interleaved" ? interleaved(rank, size, chunks, groups)
                                           : one_forward_one_backward(rank, size, micro_batches, name == "zb-h1"));
  }
  std::vector<int32_t> owner;
  for (int64_t stage = 0; stage < size * chunks; ++stage) owner.push_back(static_cast<int32_t>(stage % size));
  return Plan(std::move(passes), std::move(owner), latency, duplex, in_flight);
}

Plan plan_lists(const std::vector<std::vector<std::tuple<int, int, int>>>& lists, const std::vector<int32_t>& owner,
                int64_t latency, bool duplex, int64_t in_flight) {
  const int stages = static_cast<int>(owner.size());
  for (const int32_t rank : owner) {
    if (rank < 0 || rank >= static_cast<int32_t>(lists.size())) throw std::invalid_argument("a stage without a rank");
  }
  std::vector<std::vector<Pass>> passes(lists.size());
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    for (const auto& [op, stage, micro_batch] : lists[rank]) {
      if (op < kForward || op > kBackwardWeight || stage < 0 || stage >= stages || micro_batch < 0 ||
          owner[stage] != static_cast<int32_t>(rank)) {
        throw std::invalid_argument("a pass that its rank cannot have");
      }
      passes[rank].push_back({micro_batch, static_cast<uint16_t>(stage), static_cast<Op>(op)});
    }
  }
  return Plan(std::move(passes), owner, latency, duplex, in_flight);
}

}  // namespace schedule_clock
