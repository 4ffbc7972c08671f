// A training step of a pipeline on a clock: the executor's lists and the messages between them, for thousands of
// micro-batches on many ranks in milliseconds. megatron/pipeline/clock.py is the interface. The lists are made in
// schedule_plan.cpp; the rules of time are those of megatron/pipeline/links.py. Tests hold both to the same lists and
// the same ticks.

#include "schedule_clock.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace schedule_clock {

Result Plan::run(const std::vector<std::vector<Ticks>>& durations, const std::vector<Ticks>& first,
                 const Costs& forward, const Costs& backward, const std::vector<Repeat>& repeats,
                 bool& extended) const {
  Result result;
  std::vector<Ticks> posted(messages_.size(), -1), arrives(messages_.size(), -1), made(messages_.size());
  std::vector<Ticks> free(links_.size(), 0);
  std::vector<size_t> at(ranks(), 0), runnable;
  std::vector<int64_t> blocked(ranks(), -1);
  std::vector<std::vector<Ticks>> waits(ranks());  // by rank and pass: time of messages waited for so far
  result.clocks.assign(ranks(), 0);
  result.message_wait.assign(ranks(), 0);
  result.starts.resize(ranks());
  result.ends.resize(ranks());
  for (size_t rank = ranks(); rank-- > 0;) {
    runnable.push_back(rank);
    result.starts[rank].reserve(passes_[rank].size());
    result.ends[rank].reserve(passes_[rank].size());
    if (!repeats.empty()) waits[rank].reserve(passes_[rank].size());
  }
  while (!runnable.empty()) {
    const size_t rank = runnable.back();
    runnable.pop_back();
    const std::vector<Action>& actions = actions_[rank];
    const Pass* passes = passes_[rank].data();
    std::vector<Ticks>&starts = result.starts[rank], &ends = result.ends[rank];
    Ticks clock = result.clocks[rank], waited = result.message_wait[rank];
    size_t next = at[rank];
    for (; next < actions.size(); ++next) {
      const Action action = actions[next];
      const uint32_t message = action.message();
      if (action.kind() == kCompute) {
        const Pass& pass = passes[ends.size()];
        starts.push_back(clock);
        clock += durations[pass.op][pass.stage];
        if (pass.op == kForward && pass.micro_batch == 0) clock += first[pass.stage];
        ends.push_back(clock);
        if (!repeats.empty()) waits[rank].push_back(waited);
      } else if (action.kind() == kWait) {
        const Ticks until = arrives[message];
        if (until < 0) {
          blocked[rank] = message;
          break;
        }
        if (until > clock) {
          waited += until - std::max(clock, made[message]);
          clock = until;
        }
      } else {
        if (action.kind() == kSend) made[message] = ends.back();
        if (posted[message] < 0) {
          posted[message] = clock;
          continue;
        }
        // Both ends post the messages of a link in the same order, so the ones before it are on their way.
        const Message& one = messages_[message];
        const Costs& costs = one.forward ? forward : backward;
        Ticks& until = free[one.link];
        until = std::max(until, std::max(posted[message], clock)) + costs.occupies[one.sender];
        arrives[message] = until + costs.latency[one.sender];
        for (const int32_t end : links_[one.link].ranks) {
          if (blocked[end] != message) continue;
          blocked[end] = -1;
          runnable.push_back(end);
        }
      }
    }
    at[rank] = next;
    result.clocks[rank] = clock;
    result.message_wait[rank] = waited;
  }
  for (size_t rank = 0; rank < ranks(); ++rank) {
    if (at[rank] != actions_[rank].size()) throw std::invalid_argument("the ranks deadlock");
  }
  sum_up_stages(result);
  Ticks shift = 0;
  extended = true;
  for (const Repeat& repeat : repeats) extended = extended && extend(result, arrives, waits, repeat, shift);
  for (Ticks& clock : result.clocks) clock += shift;
  for (Ticks& start : result.last_start) start += shift;
  for (Ticks& end : result.last_end) end += shift;
  return result;
}

void Plan::sum_up_stages(Result& result) const {
  result.first_forward.assign(stages(), 0);
  result.last_start.assign(stages(), 0);
  result.last_end.assign(stages(), 0);
  for (size_t rank = 0; rank < ranks(); ++rank) {
    for (size_t pass = passes_[rank].size(); pass-- > 0;) {
      const Pass& one = passes_[rank][pass];
      if (one.op == kForward) result.first_forward[one.stage] = result.starts[rank][pass];
    }
    for (size_t pass = 0; pass < passes_[rank].size(); ++pass) {
      if (passes_[rank][pass].op == kForward) continue;
      result.last_start[passes_[rank][pass].stage] = result.starts[rank][pass];
      result.last_end[passes_[rank][pass].stage] = result.ends[rank][pass];
    }
  }
}

// Adds to `shift` what blocks left out of the lists would have taken, if the last ones before them came in equal
// distances: if every pass ended, and every message arrived, later than its like one block before by the same time on
// all ranks. All times follow from earlier ones by maxima and sums, so that whatever comes next is later by that time
// too. The lists are looked at up to one nominal time, before which nothing depends on what is left out.
bool Plan::extend(Result& result, const std::vector<Ticks>& arrives, const std::vector<std::vector<Ticks>>& waits,
                  const Repeat& repeat, Ticks& shift) const {
  int64_t until = INT64_MAX;
  for (size_t rank = 0; rank < ranks(); ++rank) {
    int64_t forwards = repeat.forwards;
    for (size_t pass = 0; forwards > 0 && pass < passes_[rank].size(); ++pass) {
      if (passes_[rank][pass].op == kForward && --forwards == 0) until = std::min(until, nominal_[rank][pass]);
    }
    if (forwards > 0) return false;
  }
  Ticks period = -1;
  std::vector<Ticks> waited(ranks());
  const size_t block = repeat.passes;
  for (size_t rank = 0; rank < ranks(); ++rank) {
    const std::vector<Pass>& passes = passes_[rank];
    const std::vector<int64_t>& nominal = nominal_[rank];
    const size_t cut = std::upper_bound(nominal.begin(), nominal.end(), until) - nominal.begin();
    if (cut < 3 * block) return false;
    const std::vector<Ticks>& ends = result.ends[rank];
    if (period < 0) period = ends[cut - 1] - ends[cut - 1 - block];
    waited[rank] = waits[rank][cut - 1] - waits[rank][cut - 1 - block];
    for (size_t pass = cut - 2 * block; pass < cut; ++pass) {
      const Pass &now = passes[pass], &before = passes[pass - block];
      if (now.op != before.op || now.stage != before.stage) return false;
      if (now.micro_batch - before.micro_batch != repeat.micro_batches) return false;
      if (ends[pass] - ends[pass - block] != period) return false;
      const int32_t sent = sent_[rank][pass];
      if (sent >= 0 && arrives[sent] - arrives[sent_[rank][pass - block]] != period) return false;
    }
  }
  shift += repeat.times * period;
  for (size_t rank = 0; rank < ranks(); ++rank) result.message_wait[rank] += repeat.times * waited[rank];
  return true;
}

namespace {

py::object run(const Plan& plan, const std::vector<std::vector<Ticks>>& durations, const std::vector<Ticks>& first,
               const std::vector<std::vector<Ticks>>& costs,
               const std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>>& repeats, bool spans) {
  std::vector<Repeat> wanted;
  for (const auto& [forwards, passes, micro_batches, times] : repeats) {
    wanted.push_back({forwards, passes, micro_batches, times});
  }
  bool extended = true;
  Result result;
  {
    py::gil_scoped_release release;
    result = plan.run(durations, first, {costs.at(0), costs.at(1)}, {costs.at(2), costs.at(3)}, wanted, extended);
  }
  if (!extended) return py::none();
  py::object times = py::none();
  if (spans) times = py::cast(std::make_pair(result.starts, result.ends));
  return py::make_tuple(result.clocks, result.message_wait, result.first_forward, result.last_start, result.last_end,
                        times);
}

}  // namespace
}  // namespace schedule_clock

PYBIND11_MODULE(_schedule_clock, module) {
  namespace clock = schedule_clock;
  module.doc() = "Pipeline schedules on a clock, in C++; megatron.pipeline.clock is the interface.";
  // Counts the changes to names and arguments: a library from an older build is then left aside.
  module.attr("interface") = 1;
  py::class_<clock::Plan>(module, "Plan")
      .def("run", &clock::run, py::arg("durations"), py::arg("first"), py::arg("costs"), py::arg("repeats"),
           py::arg("spans"))
      .def("instructions", &clock::Plan::instructions, py::arg("rank"))
      .def("computations", &clock::Plan::computations, py::arg("rank"));
  module.def("plan_schedule", &clock::plan_schedule, py::arg("name"), py::arg("size"), py::arg("chunks"),
             py::arg("groups"), py::arg("latency"), py::arg("duplex"), py::arg("in_flight"));
  module.def("plan_lists", &clock::plan_lists, py::arg("lists"), py::arg("owner"), py::arg("latency"),
             py::arg("duplex"), py::arg("in_flight"));
}
