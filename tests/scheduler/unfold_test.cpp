// The tasks of a plan, and that every hazard between them is a dependency.
#include "scheduler/unfold.hpp"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "core/error.hpp"
#include "core/update_kernels.hpp"

namespace tandem {
namespace {

ParameterLayout small_layout() {
  ParameterLayout layout;
  layout.add_layer("embedding").add("t", {9, 1024}).add("still", {700}, {.trainable = false});
  for (int i = 0; i < 5; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {300'000});
  layout.add_layer("head").add("t", {9, 1024}).add("n", {10});
  layout.tie("embedding.t", "head.t");
  return layout;
}

/// How many micro-batches a step has, and how many of them pass through a layer in one visit.
struct Order {
  int micro_batches = 2;
  int at_once = 1;
};

struct Unfolded {
  ParameterLayout layout = small_layout();
  Order order;
  Plan plan;
  TaskList tasks;
  std::map<TaskId, GradientVisit> commits;  ///< by task

  explicit Unfolded(const std::string& policy, int resident = 0, int prefetch = 2,
                    StateFormat state = StateFormat::fp32, Order o = {})
      : order(o) {
    OffloadOptions options;
    options.state = state;
    options.policy = parse_policy(policy);
    options.resident_layers = options.policy.kind == Policy::Kind::device ? -1 : resident;
    options.prefetch_layers = prefetch;
    options.max_micro_batches = order.micro_batches;
    options.micro_batches_at_once = order.at_once;
    options.subgroup_size = 100'000;
    plan = make_plan(layout, options, {std::size_t{1} << 34, 0});
  }

  void pass(Unfolder& u, int l, int gradients) {
    const Visit visit = u.visit(l, tasks);
    u.prefetch(tasks);
    for (int micro = 0; micro < gradients; ++micro) {
      const GradientVisit g = u.gradients(l, tasks);
      commits[g.id] = g;
      u.commit(g, tasks);
    }
    u.release(visit);
    u.prefetch(tasks);
  }

  void steps(int count, bool saving = false) {
    Unfolder u(layout, plan);
    for (int s = 0; s < count; ++s) {
      u.begin_step(order.micro_batches);
      u.prefetch(tasks);
      for (int first = 0; first < order.micro_batches; first += order.at_once) {
        const int at_once = std::min(order.at_once, order.micro_batches - first);
        for (int l = 0; l < layout.layer_count(); ++l) pass(u, l, 0);
        for (int l = layout.layer_count() - 1; l >= 0; --l) pass(u, l, at_once);
      }
      EXPECT_TRUE(u.gradients_complete());
      u.update(tasks);
      u.end_pass();
      if (saving) u.save(tasks);
    }
  }
};

/// For each pair of tasks of which one writes what the other touches, in order of emission, there must be
/// a path of dependencies. The caller's own stream orders its tasks among themselves.
class HazardCheck {
 public:
  explicit HazardCheck(const Unfolded& run) : run_(run), reach_(run.tasks.size()) {
    std::size_t last_caller = run.tasks.size();
    for (std::size_t i = 0; i < run.tasks.size(); ++i) {
      auto& reach = reach_[i];
      reach.resize(run.tasks.size() / 64 + 1);
      const auto join = [&](std::size_t d) {
        for (std::size_t w = 0; w < reach.size(); ++w) reach[w] |= reach_[d].empty() ? 0 : reach_[d][w];
        reach[d / 64] |= std::uint64_t{1} << (d % 64);
      };
      for (const TaskId d : run.tasks.dependencies(i)) join(static_cast<std::size_t>(d));
      if (run.tasks[i].lane == Lane::caller) {
        if (last_caller < i) join(last_caller);
        last_caller = i;
      }
    }
  }

  void touch(std::size_t task, const std::string& what, bool write) {
    auto& record = memory_[what];
    if (record.writer != task && record.writer < run_.tasks.size()) require(record.writer, task, what);
    if (write) {
      for (const std::size_t reader : record.readers) require(reader, task, what);
      record.readers.clear();
      record.writer = task;
    } else {
      record.readers.push_back(task);
    }
  }

  int missing = 0;

 private:
  void require(std::size_t first, std::size_t second, const std::string& what) {
    if (first == second || (reach_[second][first / 64] >> (first % 64) & 1) != 0) return;
    ++missing;
    ADD_FAILURE() << name_of(run_.tasks[second].kind) << " " << second << " does not wait for "
                  << name_of(run_.tasks[first].kind) << " " << first << " over " << what;
  }
  struct Record {
    std::size_t writer = SIZE_MAX;
    std::vector<std::size_t> readers;
  };
  const Unfolded& run_;
  std::vector<std::vector<std::uint64_t>> reach_;
  std::map<std::string, Record> memory_;
};

std::string key(const char* what, std::int64_t a, std::int64_t b = 0) {
  return std::string(what) + " " + std::to_string(a) + " " + std::to_string(b);
}

/// What each task reads and writes, from the meaning of its kind alone.
int check_hazards(const Unfolded& run) {
  HazardCheck check(run);
  std::map<int, int> buffer_of;  // layer to the weight buffer it was fetched into last
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    const Task& t = run.tasks[i];
    const bool resident = t.layer >= 0 && run.plan.layers[static_cast<std::size_t>(t.layer)].resident;
    const auto weights_home = [&](bool write) {  // by subgroup, so that two of a layer do not conflict
      for (std::size_t s = 0; s < run.plan.subgroups.size(); ++s) {
        const Subgroup& g = run.plan.subgroups[s];
        if (g.layer != t.layer || (t.subgroup >= 0 && static_cast<int>(s) != t.subgroup)) continue;
        for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
          if (t.count() > 0 && (b < t.begin || b >= t.end)) continue;
          check.touch(i, key(resident ? "resident weights" : "host weights", t.layer, b), write);
        }
      }
    };
    const auto pieces = [&](const char* what, bool write) {
      for (std::int64_t b = t.begin; b < t.end; b += run.plan.piece_elements)
        check.touch(i, key(what, t.layer, b), write);
    };
    switch (t.kind) {
      case TaskKind::visit: {
        std::vector<int> used{t.layer};
        for (const int owner : run.layout.layer(t.layer).borrows) used.push_back(owner);
        for (const int l : used) {
          const bool stays = run.plan.layers[static_cast<std::size_t>(l)].resident;
          if (!stays) check.touch(i, key("weight buffer", buffer_of.at(l)), false);
          for (const Subgroup& g : run.plan.subgroups) {
            if (!stays || g.layer != l) continue;
            for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
              check.touch(i, key("resident weights", l, b), false);
            }
          }
        }
        break;
      }
      case TaskKind::commit:
        for (const GradientPlace& place : run.commits.at(t.id).gradients) {
          for (const Subgroup& g : run.plan.subgroups) {
            for (std::int64_t b = g.begin; g.layer == place.layer && b < g.end; b += run.plan.piece_elements) {
              check.touch(i, key("gradient buffer", place.buffer, b), true);
            }
          }
        }
        break;
      case TaskKind::fetch_weights:
        check.touch(i, key("weight buffer", t.buffer), true);
        buffer_of[t.layer] = t.buffer;
        weights_home(false);
        break;
      case TaskKind::round_gradient:
        check.touch(i, key("gradient buffer", t.buffer, t.begin), false);
        check.touch(i, key("staging", t.staging), true);
        break;
      case TaskKind::sum_gradient:
        check.touch(i, key("gradient buffer", t.buffer, t.begin), false);
        check.touch(i, key("staging", t.staging), true);
        for (std::int64_t b = t.begin; b < t.end; b += layout_quantum) check.touch(i, key("sum", t.sum, b), true);
        break;
      case TaskKind::keep_gradient:
        check.touch(i, key("gradient buffer", t.buffer, t.begin), false);
        pieces("gradient", true);
        break;
      case TaskKind::flush_gradient:
        check.touch(i, key("staging", t.staging), false);
        pieces("gradient", true);
        break;
      case TaskKind::fold_gradient:
        pieces("gradient", true);
        break;
      case TaskKind::fetch_norm:
        break;
      case TaskKind::load_state:
        if (t.buffer >= 0) {
          check.touch(i, key("state buffer", t.buffer), true);
          pieces("state", false);
          pieces("gradient", false);
        }
        if (run.plan.state != StateFormat::fp32 && t.staging >= 0) {
          check.touch(i, key("staging", t.staging), true);
          weights_home(false);
        }
        break;
      case TaskKind::update_streamed:
        check.touch(i, key("state buffer", t.buffer), true);
        if (t.staging >= 0) check.touch(i, key("staging", t.staging), true);
        if (resident) weights_home(true);
        break;
      case TaskKind::store_state:
        check.touch(i, key("state buffer", t.buffer), false);
        pieces("state", true);
        break;
      case TaskKind::update_resident:
        pieces("state", true);
        pieces("gradient", false);
        if (t.staging >= 0) check.touch(i, key("staging", t.staging), true);
        if (resident) weights_home(true);
        break;
      case TaskKind::store_weights:
        check.touch(i, key("staging", t.staging), false);
        weights_home(true);
        break;
      case TaskKind::update_cpu:
        pieces("state", true);
        pieces("gradient", false);
        if (!resident) weights_home(true);
        break;
      case TaskKind::push_weights:
        weights_home(true);
        break;
      case TaskKind::save_state:
        for (const Subgroup& g : run.plan.subgroups) {
          if (g.layer != t.layer) continue;
          const bool with_weights = t.buffer == 0 && run.plan.state != StateFormat::fp32;
          for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
            if (b >= t.end || std::min(b + run.plan.piece_elements, g.end) <= t.begin) continue;
            check.touch(i, key("state", t.layer, b), false);
            if (!with_weights || (resident && g.updater == Updater::cpu)) continue;
            check.touch(i, key(resident ? "resident weights" : "host weights", t.layer, b), false);
          }
        }
        break;
    }
  }
  return check.missing;
}

class Hazards : public ::testing::TestWithParam<const char*> {};

TEST_P(Hazards, AreAllDependencies) {
  for (const int resident : {0, 2, 7}) {
    for (const int prefetch : {1, 2, 4}) {
      for (const StateFormat state : {StateFormat::fp32, StateFormat::split}) {
        Unfolded run(GetParam(), resident, prefetch, state);
        run.steps(3);
        check_hazards(run);
        Unfolded saving(GetParam(), resident, prefetch, state);
        saving.steps(3, true);
        check_hazards(saving);
      }
    }
  }
}

TEST_P(Hazards, AreAllDependenciesWhereMicroBatchesPassThroughALayerAtOnce) {
  for (const int resident : {0, 2}) {
    for (const Order order : {Order{1, 1}, Order{2, 2}, Order{5, 5}, Order{5, 2}}) {
      Unfolded run(GetParam(), resident, 2, StateFormat::fp32, order);
      run.steps(2);
      check_hazards(run);
    }
  }
}

TEST_P(Hazards, AreAllDependenciesOfSubgroupsInPieces) {
  for (const StateFormat state : {StateFormat::fp32, StateFormat::split}) {
    for (const Order order : {Order{2, 1}, Order{2, 2}}) {
      Unfolded run(GetParam(), 2, 2, state, order);
      run.plan.piece_elements = 32 * layout_quantum;  // several pieces in a subgroup, the last one shorter
      run.steps(3, true);
      check_hazards(run);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Hazards,
                         ::testing::Values("device", "host", "static:0.5", "interleave:2", "interleave:2,resident=0.4",
                                           "stream"));

TEST(Unfold, APieceWaitsForTheUsersOfItsOwnElements) {
  for (const char* policy : {"device", "stream", "interleave:2"}) {
    Unfolded run(policy);
    run.plan.piece_elements = layout_quantum;  // a hundred in a subgroup
    run.steps(3, true);
    std::map<TaskKind, std::size_t> most;
    for (std::size_t i = 0; i < run.tasks.size(); ++i) {
      std::size_t& count = most[run.tasks[i].kind];
      count = std::max(count, run.tasks.dependencies(i).size());
    }
    constexpr std::size_t few = 20;  // of state, gradient, buffer and staging, and some visits of the layer
    for (const TaskKind kind : {TaskKind::load_state, TaskKind::update_resident, TaskKind::flush_gradient,
                                TaskKind::keep_gradient, TaskKind::round_gradient}) {
      EXPECT_LE(most[kind], few) << policy << ' ' << name_of(kind);
    }
  }
}

TEST(Unfold, DependenciesComeBeforeTheirDependents) {
  Unfolded run("interleave:2");
  run.steps(2);
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    EXPECT_EQ(run.tasks[i].id, static_cast<TaskId>(i));
    for (const TaskId d : run.tasks.dependencies(i)) EXPECT_LT(d, run.tasks[i].id);
  }
}

/// Failures of the check where tasks of one kind wait for nothing.
int failures_without(const Unfolded& run, TaskKind victim) {
  Unfolded broken = run;
  broken.tasks.clear();
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    broken.tasks.add(run.tasks[i]);
    if (run.tasks[i].kind != victim) broken.tasks.depends_on(run.tasks.dependencies(i));
  }
  ::testing::TestPartResultArray failures;
  ::testing::ScopedFakeTestPartResultReporter reporter(
      ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
  check_hazards(broken);
  return failures.size();
}

TEST(Unfold, TheHazardCheckFindsADroppedDependency) {
  Unfolded run("interleave:2");
  run.steps(3, true);
  for (const TaskKind victim :
       {TaskKind::visit, TaskKind::commit, TaskKind::fetch_weights, TaskKind::round_gradient, TaskKind::flush_gradient,
        TaskKind::load_state, TaskKind::store_state, TaskKind::update_streamed, TaskKind::update_cpu,
        TaskKind::store_weights, TaskKind::save_state}) {
    EXPECT_GT(failures_without(run, victim), 0) << name_of(victim);
  }
}

TEST(Unfold, ASaveReadsEveryValueOnceInTheOrderOfTheFile) {
  Unfolded run("static:0.5");
  Unfolder u(run.layout, run.plan);
  u.save(run.tasks);
  std::size_t i = 0;
  for (const Parameter* p : run.layout.owned_parameters()) {
    for (int array = 0; array < (p->options.trainable ? 3 : 1); ++array) {
      std::int64_t at = p->offset;
      for (; i < run.tasks.size() && at < p->offset + p->count; at = run.tasks[i++].end) {
        const Task& t = run.tasks[i];
        EXPECT_EQ(t.lane, Lane::disk);
        EXPECT_EQ(t.layer, p->layer);
        EXPECT_EQ(t.buffer, array);
        EXPECT_EQ(t.begin, at);
        EXPECT_EQ(t.bytes, 4U * static_cast<std::uint64_t>(t.count()));
        EXPECT_TRUE(i == 0 || run.tasks.dependencies(i).front() == t.id - 1);
      }
      EXPECT_EQ(at, p->offset + p->count) << p->full_name;
    }
  }
  EXPECT_EQ(i, run.tasks.size());
}

// Of a parameter that lies in several subgroups, each update waits for its own part alone.
TEST(Unfold, AnUpdateWaitsForTheStateThatItOverwritesAndNoMore) {
  Unfolded run("host");
  Unfolder u(run.layout, run.plan);
  u.save(run.tasks);
  std::map<TaskId, Task> saves;
  for (const Task& t : run.tasks) saves[t.id] = t;
  run.tasks.clear();
  u.begin_step(1);
  u.update(run.tasks);
  int updates = 0;
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    const Task& t = run.tasks[i];
    if (t.kind != TaskKind::update_cpu) continue;
    ++updates;
    ASSERT_EQ(run.tasks.dependencies(i).size(), 1U);
    const Task& save = saves.at(run.tasks.dependencies(i).front());
    EXPECT_EQ(save.buffer, 2);
    EXPECT_LT(save.begin, t.end);
    EXPECT_GT(save.end, t.begin);
  }
  EXPECT_EQ(updates, static_cast<int>(run.plan.subgroups.size()));
  EXPECT_GT(updates, 7);
}

/// Fetches by layer.
std::map<int, int> fetches_of(const Unfolded& run) {
  std::map<int, int> fetches;
  for (const Task& t : run.tasks) fetches[t.layer] += t.kind == TaskKind::fetch_weights ? 1 : 0;
  return fetches;
}

TEST(Unfold, TheHazardCheckFindsADroppedDependencyOfASum) {
  Unfolded run("host", 0, 2, StateFormat::fp32, {3, 3});
  run.steps(2);
  EXPECT_EQ(check_hazards(run), 0);
  EXPECT_GT(failures_without(run, TaskKind::sum_gradient), 0);
}

TEST(Unfold, TheLastLayersOfForwardAreNotFetchedTwice) {
  Unfolded run("host", 0, 3);
  run.steps(1);
  std::map<int, int> fetches = fetches_of(run);
  EXPECT_EQ(fetches[5], 2);  // once a micro-batch, not twice
  EXPECT_EQ(fetches[4], 2);
  EXPECT_GT(fetches[2], 2);
}

// Forward and backward; the last ones of forward are the first of backward.
TEST(Unfold, OneVisitServesAllMicroBatchesThatPassThroughAtOnce) {
  for (const int micro_batches : {1, 2, 5}) {
    Unfolded run("host", 0, 2, StateFormat::fp32, {micro_batches, micro_batches});
    run.steps(1);
    for (const auto& [layer, fetches] : fetches_of(run)) EXPECT_LE(fetches, 2) << layer;
    EXPECT_EQ(fetches_of(run).at(5), 1);
    EXPECT_EQ(fetches_of(run).at(3), 2);
  }
  Unfolded some("host", 0, 2, StateFormat::fp32, {5, 2});
  some.steps(1);
  EXPECT_EQ(fetches_of(some).at(3), 2 * 3);
  Unfolded none("host", 0, 2, StateFormat::fp32, {5, 1});
  none.steps(1);
  EXPECT_EQ(fetches_of(none).at(3), 2 * 5);
}

TEST(Unfold, GradientsAreSummedInTheOrderOfMicroBatchesWhateverTheOrderOfVisits) {
  for (const Order order : {Order{5, 1}, Order{5, 2}, Order{5, 5}}) {
    Unfolded run("interleave:2,resident=0.4", 0, 2, StateFormat::fp32, order);
    run.steps(1);
    std::map<std::pair<int, std::int64_t>, std::vector<std::size_t>> sums;  // by subgroup and piece
    for (std::size_t i = 0; i < run.tasks.size(); ++i) {
      const Task& t = run.tasks[i];
      const bool folds = t.kind == TaskKind::fold_gradient && !run.plan.sends_sums;
      if (!folds && t.kind != TaskKind::sum_gradient && t.kind != TaskKind::keep_gradient) continue;
      std::vector<std::size_t>& tasks = sums[{t.subgroup, t.begin}];
      EXPECT_EQ(t.first_micro, tasks.empty());
      EXPECT_EQ(t.last_micro, tasks.size() == 4);
      tasks.push_back(i);
    }
    EXPECT_FALSE(sums.empty());
    for (const auto& [piece, tasks] : sums) EXPECT_EQ(tasks.size(), 5U);
  }
}

TEST(Unfold, SumsLeaveTheDeviceOnceWhereAllMicroBatchesPassThroughALayerAtOnce) {
  for (const Order order : {Order{1, 1}, Order{5, 1}, Order{5, 2}, Order{5, 5}}) {
    Unfolded run("host", 0, 2, StateFormat::fp32, order);
    run.steps(1);
    EXPECT_EQ(run.plan.sends_sums, order.at_once == 5);
    std::uint64_t bytes = 0;
    for (const Task& t : run.tasks) bytes += t.kind == TaskKind::flush_gradient ? t.bytes : 0;
    const auto times = static_cast<std::uint64_t>(run.plan.sends_sums ? 1 : order.micro_batches);
    EXPECT_EQ(bytes, times * 2 * static_cast<std::uint64_t>(run.layout.state_elements()));
  }
}

TEST(Unfold, WhereSumsLeaveALayerAfterTheOtherIsCommitted) {
  Unfolded run("host", 0, 2, StateFormat::fp32, {2, 2});
  ASSERT_TRUE(run.plan.sends_sums);
  Unfolder u(run.layout, run.plan);
  u.begin_step(2);
  u.commit(u.gradients(3, run.tasks), run.tasks);
  EXPECT_THROW(u.gradients(2, run.tasks), MisuseError);
  u.commit(u.gradients(3, run.tasks), run.tasks);
  EXPECT_NO_THROW(u.gradients(2, run.tasks));
}

// The last layer owns what the first borrows: backward of the first completes the gradients of both.
TEST(Unfold, TwoSumsAreOpenAtOnceWhereALayerCompletesAnothersGradient) {
  ParameterLayout layout;
  layout.add_layer("first").add("t", {9, 1024}).add("b", {5000});
  layout.add_layer("middle").add("w", {9, 1024});
  layout.add_layer("last").add("t", {9, 1024});
  layout.tie("last.t", "first.t");
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.max_micro_batches = options.micro_batches_at_once = 3;
  const Plan plan = make_plan(layout, options, {std::size_t{1} << 30, 0});
  ASSERT_TRUE(plan.sends_sums);
  Unfolder u(layout, plan);
  TaskList tasks;
  for (int step = 0; step < 2; ++step) {
    u.begin_step(3);
    for (int l = 2; l >= 0; --l) {
      for (int micro = 0; micro < 3; ++micro) u.commit(u.gradients(l, tasks), tasks);
    }
    EXPECT_TRUE(u.gradients_complete());
    u.update(tasks);
    u.end_pass();
  }
  std::map<int, std::set<int>> buffers;  // by layer
  for (const Task& t : tasks) {
    if (t.kind == TaskKind::sum_gradient) buffers[t.layer].insert(t.sum);
  }
  EXPECT_EQ(buffers.size(), 3U);
  for (const int sum : buffers[2]) EXPECT_FALSE(buffers[0].contains(sum));
}

TEST(Unfold, ATiedLayerHasAGradientBufferForEachMicroBatchAtOnce) {
  for (const Order order : {Order{5, 1}, Order{5, 2}, Order{5, 5}}) {
    const Unfolded run("host", 0, 2, StateFormat::fp32, order);
    const Unfolder u(run.layout, run.plan);
    int buffers = 0;
    for (int b = 0; b < u.gradient_buffer_count(); ++b) {
      buffers += u.gradient_buffer_elements(b) == run.layout.layer(0).state_elements ? 1 : 0;
    }
    EXPECT_EQ(buffers, order.at_once);
  }
}

TEST(Unfold, GradientsAskedForOutOfTurnAreRefused) {
  for (const int at_once : {1, 2}) {
    Unfolded run("host", 0, 2, StateFormat::fp32, {4, at_once});
    Unfolder u(run.layout, run.plan);
    u.begin_step(4);
    const GradientVisit first = u.gradients(3, run.tasks);
    EXPECT_THROW(u.gradients(3, run.tasks), MisuseError);  // the first is not committed
    u.commit(first, run.tasks);
    for (int micro = 1; micro < at_once; ++micro) u.commit(u.gradients(3, run.tasks), run.tasks);
    EXPECT_THROW(u.gradients(3, run.tasks), MisuseError);  // the other layers have not come so far
  }
}

TEST(Unfold, AnAbandonedStepLeavesNoGradientOpen) {
  Unfolded run("host", 0, 2, StateFormat::fp32, {3, 3});
  Unfolder u(run.layout, run.plan);
  for (int attempt = 0; attempt < 4; ++attempt) {
    u.begin_step(3);
    for (int micro = 0; micro < 2; ++micro) {  // of the head: the embedding's stay open
      const GradientVisit visit = u.gradients(6, run.tasks);
      for (const GradientPlace& place : visit.gradients) EXPECT_TRUE(place.fresh) << place.layer;
      u.commit(visit, run.tasks);
    }
    u.abandon(u.gradients(6, run.tasks));
    u.end_pass();
  }
  run.tasks.clear();
  u.begin_step(3);
  for (int l = 6; l >= 0; --l) {
    for (int micro = 0; micro < 3; ++micro) u.commit(u.gradients(l, run.tasks), run.tasks);
  }
  EXPECT_TRUE(u.gradients_complete());
}

TEST(Unfold, AResidentLayerIsNeverFetched) {
  Unfolded run("host", 7);
  run.steps(2);
  EXPECT_EQ(std::count_if(run.tasks.begin(), run.tasks.end(),
                          [](const Task& t) { return t.kind == TaskKind::fetch_weights; }),
            0);
}

}  // namespace
}  // namespace tandem
