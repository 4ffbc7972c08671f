// Simulates the timing of a pipeline's training step: thousands of micro-batches on many ranks in milliseconds.
// megatron/pipeline/schedule.py makes the ranks' lists of instructions and is the interface. tests/helpers/replay.py
// implements the same rules in Python, and tests compare the two tick by tick.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// Numbered as in megatron.pipeline.orders.Op.
enum Op : int32_t { kForward, kBackward, kBackwardInput, kBackwardWeight, kSendForward, kRecvForward, kSendBackward,
                    kRecvBackward, kOps };

struct Row {
  int32_t op, stage, micro_batch;
};

// Link on which a stage's results are sent in one direction. receiver is -1 if there is no next stage, or if it is on
// the same rank.
template <typename Ticks>
struct Route {
  int64_t link;
  int32_t sender, receiver;
  Ticks occupies, latency;
};

template <typename Ticks>
struct Result {
  Ticks made = -1, posted = -1, arrives = -1;
};

template <typename Ticks>
struct Rank {
  int64_t next, end;
  Ticks clock = 0, message_wait = 0;
  int64_t blocked = -1;
  bool computing = false, arriving = false;  // used only if ranks share cores
  std::vector<int64_t> sent;
  size_t oldest = 0;
};

// Runs the lists of all ranks on a clock. The ranks share enough cores for `at_once` of them to compute at full speed;
// if more compute at a time, all slow down equally. If `at_once` is infinite, nothing is shared, and a rank runs ahead
// of the others until it needs a message.
template <typename Ticks>
class Step {
  using Rank = ::Rank<Ticks>;
  using Route = ::Route<Ticks>;
  using Result = ::Result<Ticks>;

 public:
  Step(const Row* rows, std::vector<Rank>& ranks, const Array<int32_t>& owner, int64_t micro_batches,
       const Ticks* times, const Ticks* costs, bool posted, bool duplex, int64_t in_flight, Ticks* starts, Ticks* ends,
       double at_once)
      : rows_(rows), ranks_(ranks), stages_(owner.size()), micro_batches_(micro_batches), times_(times),
        posted_(posted), in_flight_(static_cast<size_t>(in_flight)), at_once_(at_once),
        shared_(at_once < std::numeric_limits<double>::infinity()), starts_(starts), ends_(ends),
        routes_(2 * stages_), results_(2 * stages_ * micro_batches), free_(ranks.size() * ranks.size(), 0) {
    const int64_t size = static_cast<int64_t>(ranks.size());
    for (int64_t stage = 0; stage < stages_; ++stage) {
      if (owner.at(stage) < 0 || owner.at(stage) >= size) throw std::invalid_argument("owner of a stage is not a rank");
    }
    for (int64_t back = 0; back < 2; ++back) {
      for (int64_t stage = 0; stage < stages_; ++stage) {
        const int64_t to = back ? stage - 1 : stage + 1;
        const int32_t sender = owner.at(stage);
        const int32_t receiver = to < 0 || to >= stages_ || owner.at(to) == sender ? -1 : owner.at(to);
        const bool in_order = duplex || sender < receiver;
        const int64_t link = in_order ? sender * size + receiver : receiver * size + sender;
        routes_[back * stages_ + stage] = {link, sender, receiver, costs[2 * back * stages_ + stage],
                                           costs[(2 * back + 1) * stages_ + stage]};
      }
    }
  }

  void run() {
    for (size_t rank = ranks_.size(); rank-- > 0;) runnable_.push_back(static_cast<int32_t>(rank));
    do {
      while (!runnable_.empty()) {
        const int32_t rank = runnable_.back();
        runnable_.pop_back();
        go_on(rank);
      }
    } while (advance());
    for (const Rank& rank : ranks_) {
      if (rank.blocked >= 0) throw std::invalid_argument("the lists wait for each other in a cycle");
    }
  }

 private:
  int64_t result(bool back, int64_t stage, int64_t micro_batch) const {
    return (back * stages_ + stage) * micro_batches_ + micro_batch;
  }

  void go_on(int32_t number) {
    Rank& rank = ranks_[number];
    for (; rank.next < rank.end; ++rank.next) {
      const Row& row = rows_[rank.next];
      if (row.op < 0 || row.op >= kOps || row.stage < 0 || row.stage >= stages_ || row.micro_batch < 0 ||
          row.micro_batch >= micro_batches_) {
        throw std::invalid_argument("invalid instruction: no such operation, stage or micro-batch");
      }
      if (!(row.op <= kBackwardWeight ? compute(rank, number, row) : post(rank, number, row))) return;
    }
    for (; rank.oldest < rank.sent.size(); ++rank.oldest) {
      if (!wait(rank, rank.sent[rank.oldest])) return;
    }
  }

  bool compute(Rank& rank, int32_t number, const Row& row) {
    const bool back = row.op != kForward;
    if (row.op != kBackwardWeight && !rank.computing) {
      const int64_t from = back ? row.stage + 1 : row.stage - 1;
      if (from >= 0 && from < stages_ && routes_[back * stages_ + from].receiver == number &&
          !wait(rank, result(back, from, row.micro_batch))) {
        return false;
      }
    }
    if (!rank.computing) {
      Ticks time = times_[row.op * stages_ + row.stage];
      if (!back && row.micro_batch == 0) time += times_[4 * stages_ + row.stage];
      starts_[rank.next] = rank.clock;
      if (shared_) {
        rank.computing = true;
        computing_.emplace(work_ + time, number);
        return false;
      }
      rank.clock += time;
    }
    rank.computing = false;
    ends_[rank.next] = rank.clock;
    if (row.op == kBackwardWeight) return true;
    const int64_t made = result(back, row.stage, row.micro_batch);
    results_[made].made = rank.clock;
    const Route& route = routes_[back * stages_ + row.stage];
    if (!posted_ && route.receiver >= 0) arrive(made, route, rank.clock);
    return true;
  }

  bool post(Rank& rank, int32_t number, const Row& row) {
    const bool back = row.op >= kSendBackward, send = row.op == kSendForward || row.op == kSendBackward;
    const int64_t stage = send ? row.stage : back ? row.stage + 1 : row.stage - 1;
    if (stage < 0 || stage >= stages_) throw std::invalid_argument("a message comes from a stage that does not exist");
    const Route& route = routes_[back * stages_ + stage];
    if (route.receiver < 0 || (send ? route.sender : route.receiver) != number) {
      throw std::invalid_argument("a rank posts a message that it neither sends nor receives");
    }
    const int64_t message = result(back, stage, row.micro_batch);
    if (send) {
      if (rank.sent.size() - rank.oldest >= in_flight_) {
        if (!wait(rank, rank.sent[rank.oldest])) return false;
        ++rank.oldest;
      }
      rank.sent.push_back(message);
    }
    starts_[rank.next] = ends_[rank.next] = rank.clock;
    Ticks& posted = results_[message].posted;
    if (posted < 0) {
      posted = rank.clock;
    } else {  // both ranks post a link's messages in the same order, so earlier ones are already on their way
      arrive(message, route, std::max(posted, rank.clock));
    }
    return true;
  }

  void arrive(int64_t message, const Route& route, Ticks begun) {
    Ticks& free = free_[route.link];
    free = std::max(free, begun) + route.occupies;
    results_[message].arrives = free + route.latency;
    for (const int32_t end : {route.sender, route.receiver}) {
      if (ranks_[end].blocked != message) continue;
      ranks_[end].blocked = -1;
      if (shared_) {
        ranks_[end].arriving = true;
        arrivals_.emplace(results_[message].arrives, end);
      } else {
        runnable_.push_back(end);
      }
    }
  }

  // Advances to the next time at which a computation ends or a message arrives; returns false if there is none.
  bool advance() {
    if (computing_.empty() && arrivals_.empty()) return false;
    const double slower = std::max(1.0, computing_.size() / at_once_);
    const double end = computing_.empty() ? std::numeric_limits<double>::infinity()
                                          : now_ + (computing_.top().first - work_) * slower;
    int32_t number;
    if (!arrivals_.empty() && arrivals_.top().first <= end) {
      double time;
      std::tie(time, number) = arrivals_.top();
      arrivals_.pop();
      work_ += (time - now_) / slower;
      now_ = time;
    } else {
      std::tie(work_, number) = computing_.top();
      computing_.pop();
      now_ = end;
      ranks_[number].clock = static_cast<Ticks>(end);
    }
    runnable_.push_back(number);
    return true;
  }

  bool wait(Rank& rank, int64_t message) {
    const Result& waited = results_[message];
    if (waited.arrives < 0) {
      rank.blocked = message;
      return false;
    }
    if (shared_ && waited.arrives > now_ && !rank.arriving) {
      rank.arriving = true;
      arrivals_.emplace(waited.arrives, static_cast<int32_t>(&rank - ranks_.data()));
      return false;
    }
    rank.arriving = false;
    if (waited.arrives > rank.clock) {
      rank.message_wait += waited.arrives - std::max(rank.clock, waited.made);
      rank.clock = waited.arrives;
    }
    return true;
  }

  const Row* rows_;
  std::vector<Rank>& ranks_;
  const int64_t stages_, micro_batches_;
  const Ticks* times_;
  const bool posted_;
  const size_t in_flight_;
  const double at_once_;
  const bool shared_;
  Ticks *starts_, *ends_;
  std::vector<Route> routes_;
  std::vector<Result> results_;
  std::vector<Ticks> free_;  // time at which the link between two ranks becomes free
  std::vector<int32_t> runnable_;

  // Used only if ranks share cores:
  using Event = std::pair<double, int32_t>;  // time and rank
  using Events = std::priority_queue<Event, std::vector<Event>, std::greater<Event>>;
  double now_ = 0;
  double work_ = 0;  // done by a rank that has computed all the time
  Events computing_;  // values of work_ at which ranks finish their passes
  Events arrivals_;
};

template <typename Ticks>
py::tuple run(const Array<int32_t>& rows, const Array<int64_t>& offsets, const Array<int32_t>& owner,
              int64_t micro_batches, const Array<Ticks>& times, const Array<Ticks>& costs, bool posted, bool duplex,
              int64_t in_flight, double at_once) {
  const int64_t size = offsets.size() - 1, count = rows.ndim() == 2 && rows.shape(1) == 3 ? rows.shape(0) : -1;
  if (count < 0 || size < 1 || times.size() != 5 * owner.size() || costs.size() != 4 * owner.size() ||
      micro_batches < 1 || in_flight < 1 || !(at_once > 0)) {
    throw std::invalid_argument("the sizes of the arrays do not match, or a number is not positive");
  }
  std::vector<Rank<Ticks>> ranks(size);
  for (int64_t rank = 0; rank < size; ++rank) {
    ranks[rank].next = offsets.at(rank);
    ranks[rank].end = offsets.at(rank + 1);
    if (ranks[rank].next < 0 || ranks[rank].next > ranks[rank].end || ranks[rank].end > count) {
      throw std::invalid_argument("the offset of a list is not within the rows");
    }
  }
  Array<Ticks> starts(count), ends(count), clocks(size), message_wait(size);
  Ticks *start = starts.mutable_data(), *end = ends.mutable_data();
  {
    py::gil_scoped_release release;
    Step<Ticks>(reinterpret_cast<const Row*>(rows.data()), ranks, owner, micro_batches, times.data(), costs.data(), posted,
         duplex, in_flight, start, end, at_once)
        .run();
  }
  for (int64_t rank = 0; rank < size; ++rank) {
    clocks.mutable_at(rank) = ranks[rank].clock;
    message_wait.mutable_at(rank) = ranks[rank].message_wait;
  }
  return py::make_tuple(starts, ends, clocks, message_wait);
}

}  // namespace

PYBIND11_MODULE(_schedule_clock, module) {
  module.doc() = "Simulates the timing of a pipeline's step in C++; megatron.pipeline.schedule is the interface.";
  // Increased whenever names or arguments change, so that a library from an older build is not used.
  module.attr("interface") = 3;
  const auto define = [&module](const char* name, auto function) {
    module.def(name, function, py::arg("rows"), py::arg("offsets"), py::arg("owner"), py::arg("micro_batches"),
               py::arg("times"), py::arg("costs"), py::arg("posted"), py::arg("duplex"), py::arg("in_flight"),
               py::arg("at_once"));
  };
  define("run", &run<int64_t>);
  define("run_shared", &run<double>);
}
