// Tasks that the graph calls ready, beside a model that looks at every task each time.
#include "scheduler/tasks/task_graph.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr TaskId operator""_id(unsigned long long number) { return TaskId::at(number); }

Task task_of(TaskId id, Lane lane, int priority = 0) {
  Task task;
  task.id = id;
  task.lane = lane;
  task.priority = priority;
  return task;
}

TEST(Ring, KeepsWhatItHoldsWhileItGrowsAndWraps) {
  Ring<std::int64_t> ring(1000);
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    const auto length = static_cast<std::int64_t>(random() % (round < 1000 ? 300 : 3));
    while (ring.end() - ring.begin() < length) {
      const std::int64_t number = ring.end();
      EXPECT_EQ(ring.push(7 * number), 7 * number);
    }
    ring.pop_before(ring.end() - length);
    EXPECT_EQ(ring.empty(), length == 0);
    for (std::int64_t i = ring.begin(); i < ring.end(); ++i) ASSERT_EQ(ring[i], 7 * i);
    EXPECT_TRUE(!ring.holds(ring.begin() - 1) && !ring.holds(ring.end()));
  }
}

TEST(LaneSet, HasWhatWasAddedAndNoMore) {
  LaneSet some(Lane::device);
  some.add(Lane::peers);
  some.add(Lane::caller);
  EXPECT_EQ(some.first(), Lane::caller);
  some.remove(Lane::caller);
  EXPECT_EQ(some.first(), Lane::device);
  EXPECT_FALSE((some & LaneSet(device_lanes)).empty());
  EXPECT_TRUE(some.without(LaneSet(device_lanes)).empty());
  for (int lane = 0; lane < lane_count; ++lane) {
    const Lane one = static_cast<Lane>(lane);
    EXPECT_EQ(some.has(one), one == Lane::device || one == Lane::peers) << name_of(one);
    EXPECT_EQ(LaneSet(device_lanes).has(one), is_of_device(one)) << name_of(one);
  }
}

TEST(TaskGraph, RestartedItIsAsNew) {
  TaskGraph graph;
  graph.add(task_of(0_id, Lane::cpu), {});
  graph.add(task_of(1_id, Lane::peers), {});
  graph.add(task_of(2_id, Lane::device), std::vector<TaskId>{0_id, 1_id});
  graph.restart(10_id);
  EXPECT_TRUE(graph.empty());
  EXPECT_FALSE(graph.known(0_id));
  EXPECT_TRUE(graph.ready_lanes().empty());
  for (int lane = 0; lane < lane_count; ++lane) EXPECT_EQ(graph.ready(static_cast<Lane>(lane)), no_task);
  graph.add(task_of(10_id, Lane::peers), {});
  graph.add(task_of(11_id, Lane::cpu), std::vector<TaskId>{1_id, 10_id});
  EXPECT_EQ(graph.ready(Lane::peers), 10_id);
  EXPECT_EQ(graph.ready(Lane::cpu), no_task);
  graph.mark_done(10_id);
  EXPECT_EQ(graph.ready(Lane::cpu), 11_id);
}

TEST(TaskGraph, DeviceLanesWaitForIssueTheCpuForTheEnd) {
  for (const auto& [first, second, at_issue] : {std::tuple{Lane::host_to_device, Lane::device, true},
                                                {Lane::device, Lane::device, true},
                                                {Lane::caller, Lane::device_to_host, true},
                                                {Lane::caller, Lane::cpu, false},
                                                {Lane::device_to_host, Lane::cpu, false},
                                                {Lane::cpu, Lane::host_to_device, false},
                                                {Lane::cpu, Lane::cpu, false},
                                                {Lane::device, Lane::disk, false},
                                                {Lane::device_to_host, Lane::disk, false},
                                                {Lane::disk, Lane::host_to_device, false}}) {
    TaskGraph graph;
    graph.add(task_of(0_id, first), {});
    graph.add(task_of(1_id, second), std::vector<TaskId>{0_id});
    if (graph.ready(first) == 0_id) graph.take(first);
    EXPECT_EQ(graph.ready(second), no_task);
    graph.mark_issued(0_id);
    EXPECT_EQ(graph.ready(second), at_issue ? 1_id : no_task) << name_of(first) << " before " << name_of(second);
    EXPECT_FALSE(graph.dependencies_done(1_id));
    graph.mark_done(0_id);
    EXPECT_EQ(graph.ready(second), 1_id) << name_of(first) << " before " << name_of(second);
    EXPECT_TRUE(graph.dependencies_done(1_id));
  }
}

TEST(TaskGraph, WhatRanksExchangeKeepsItsOrderWhateverIsUrgent) {
  TaskGraph graph;
  graph.add(task_of(0_id, Lane::cpu), {});
  graph.add(task_of(1_id, Lane::peers, 2), std::vector<TaskId>{0_id});
  graph.add(task_of(2_id, Lane::peers, 0), {});
  EXPECT_EQ(graph.ready(Lane::peers), no_task) << "it would overtake the one before";
  graph.mark_done(0_id);
  EXPECT_EQ(graph.ready(Lane::peers), 1_id) << "the one behind it, which is more urgent, holds it up";
  graph.take(Lane::peers);
  EXPECT_EQ(graph.ready(Lane::peers), 2_id);
  graph.take(Lane::peers);
  EXPECT_EQ(graph.ready(Lane::peers), no_task);
}

TEST(TaskGraph, ACallersTaskIsNeverReadyButCountsWhatItWaitsFor) {
  TaskGraph graph;
  graph.add(task_of(0_id, Lane::host_to_device), {});
  graph.add(task_of(1_id, Lane::cpu), {});
  graph.add(task_of(2_id, Lane::caller), std::vector<TaskId>{0_id, 1_id});
  EXPECT_EQ(graph.node(2_id).waiting_for, 2);
  graph.mark_issued(0_id);
  EXPECT_EQ(graph.node(2_id).waiting_for, 1);
  graph.mark_done(1_id);
  EXPECT_EQ(graph.node(2_id).waiting_for, 0);
  EXPECT_EQ(graph.ready(Lane::caller), no_task);
}

TEST(TaskGraph, RefusesATaskOutOfTurn) {
  TaskGraph graph(3_id);
  EXPECT_THROW(graph.add(task_of(4_id, Lane::cpu), {}), MisuseError);
}

/// Everything about every task there ever was.
class Model {
 public:
  struct Record {
    Task task;
    std::vector<TaskId> dependencies;
    bool issued = false;
    bool done = false;
    bool taken = false;
  };
  bool met(TaskId first, const Task& second) const {
    const Record& f = records[first];
    return f.task.lane == Lane::cpu || second.lane == Lane::cpu ? f.done : f.issued;
  }
  TaskId ready(Lane lane) const {
    const Record* best = nullptr;
    for (const Record& r : records) {
      if (r.task.lane != lane || r.taken) continue;
      const bool all_met =
          std::all_of(r.dependencies.begin(), r.dependencies.end(), [&](TaskId d) { return met(d, r.task); });
      if (lane == Lane::peers) return all_met ? r.task.id : no_task;
      if (!all_met) continue;
      if (best == nullptr || r.task.priority < best->task.priority) best = &r;
    }
    return best == nullptr ? no_task : best->task.id;
  }
  TaskId oldest() const {
    const auto undone = std::find_if(records.begin(), records.end(), [](const Record& r) { return !r.done; });
    return TaskId(undone - records.begin());
  }
  IndexedVector<TaskId, Record> records;
};

class RandomGraph {
 public:
  explicit RandomGraph(unsigned seed) : random_(seed) {}

  void add() {
    constexpr std::size_t reach = 40;
    const auto id = TaskId::at(model_.records.size());
    Model::Record record;
    record.task = task_of(id, lanes[random_() % lanes.size()], static_cast<int>(random_() % 3));
    for (std::size_t n = random_() % 6; n > 0 && id > 0_id; --n) {  // some of them twice
      record.dependencies.push_back(
          id - 1 - static_cast<std::int64_t>(random_() % std::min<std::size_t>(reach, model_.records.size())));
    }
    graph_.add(record.task, record.dependencies);
    model_.records.push_back(std::move(record));
  }
  /// Takes the readiest of some lane, and issues or ends something in flight.
  void advance() {
    const Lane lane = lanes[random_() % lanes.size()];
    if (const TaskId id = graph_.ready(lane); id != no_task && random_() % 2 == 0) {
      graph_.take(lane);
      model_.records[id].taken = true;
      flying_.push_back(id);
    }
    if (flying_.empty()) return;
    const std::size_t i = random_() % flying_.size();
    Model::Record& record = model_.records[flying_[i]];
    if (random_() % 2 == 0 && record.task.lane != Lane::cpu) {
      graph_.mark_issued(flying_[i]);
      record.issued = true;
    } else {
      graph_.mark_done(flying_[i]);
      record.issued = record.done = true;
      flying_.erase(flying_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  void compare() const {
    for (const Lane lane : lanes) {
      ASSERT_EQ(graph_.ready(lane), model_.ready(lane)) << name_of(lane);
      ASSERT_EQ(graph_.ready_lanes().has(lane), model_.ready(lane) != no_task) << name_of(lane);
    }
    ASSERT_EQ(graph_.begin(), model_.oldest());
    for (TaskId id = graph_.begin(); id < graph_.end(); ++id) compare_dependencies(id);
  }
  void finish() {
    for (int i = 0; i < 100000 && !graph_.empty(); ++i) advance();
    EXPECT_TRUE(graph_.empty());
  }

 private:
  void compare_dependencies(TaskId id) const {
    std::multiset<TaskId> expected, seen;
    for (const TaskId d : model_.records[id].dependencies) {
      if (!model_.records[d].done) expected.insert(d);
    }
    graph_.for_unfinished(id, [&](const TaskNode& first) { seen.insert(first.task.id); });
    ASSERT_EQ(seen, expected);
  }

  static constexpr std::array lanes{Lane::host_to_device, Lane::device_to_host, Lane::device, Lane::cpu, Lane::peers};
  std::mt19937 random_;
  TaskGraph graph_;
  Model model_;
  std::vector<TaskId> flying_;
};

TEST(TaskGraph, AgreesWithAModelOnRandomTasks) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    RandomGraph both(seed);
    for (int i = 0; i < 300; ++i) {
      both.add();
      for (unsigned n = 0; n < 1 + seed % 5; ++n) both.advance();
      both.compare();
      if (HasFatalFailure()) return;
    }
    both.finish();
  }
}

}  // namespace
}  // namespace tandem
