// The tasks of a plan: which there are, in which order, and how few each waits for.
#include "scheduler/tasks/lowering.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "core/base/error.hpp"
#include "core/ops/update_kernels.hpp"
#include "tests/scheduler/lowered.hpp"

namespace tandem {
namespace {

using testing::Lowered;
using testing::Order;

TEST(Lower, APieceWaitsForTheUsersOfItsOwnElements) {
  for (const char* policy : {"device", "stream", "interleave:2"}) {
    Lowered run(policy);
    run.plan.piece_elements = layout_quantum;  // a hundred in a subgroup
    run.steps(3, true);
    std::map<TaskKind, std::size_t> most;
    for (std::size_t i = 0; i < run.tasks.size(); ++i) {
      std::size_t& count = most[run.tasks[i].kind];
      count = std::max(count, run.tasks.dependencies(i).size());
    }
    constexpr std::size_t few = 20;  // dependencies by state, gradient, buffer and staging, and some uses of the layer
    for (const TaskKind kind :
         {TaskKind::load_state, TaskKind::update_resident, TaskKind::flush_gradient, TaskKind::round_gradient}) {
      EXPECT_LE(most[kind], few) << policy << ' ' << name_of(kind);
    }
    // A kept gradient depends once on each piece of its subgroup, since pieces may have been updated one by one.
    EXPECT_LE(most[TaskKind::keep_gradient], few + 100) << policy;
  }
}

TEST(Lower, WhatStaysOnTheDeviceGoesBySubgroup) {
  for (const char* policy : {"device", "stream", "interleave:2,resident=0.5"}) {
    Lowered run(policy);
    run.plan.piece_elements = layout_quantum;
    run.steps(2);
    std::map<TaskKind, int> tasks;
    for (const Task& t : run.tasks) {
      if (t.subgroup.none()) continue;
      ++tasks[t.kind];
      const Subgroup& group = subgroup_at(run.plan, t.subgroup);
      if (group.count() == run.plan.piece_elements) continue;
      const bool whole = t.begin == group.begin && t.end == group.end;
      EXPECT_EQ(whole, takes_subgroup_whole(t)) << policy << ' ' << name_of(t.kind);
    }
    EXPECT_GT(tasks[TaskKind::keep_gradient], 0) << policy;
  }
}

TEST(Lower, DependenciesComeBeforeTheirDependents) {
  Lowered run("interleave:2");
  run.steps(2);
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    EXPECT_EQ(run.tasks[i].id, TaskId::at(i));
    for (const TaskId d : run.tasks.dependencies(i)) EXPECT_LT(d, run.tasks[i].id);
  }
}

// New weights behind the state of other pieces would keep their staging from the next update, and the layer from its
// use.
TEST(Lower, WhatUpdatesSendBackGoesPieceByPiece) {
  for (const char* policy : {"stream", "interleave:2"}) {
    Lowered run(policy);
    run.steps(2);
    std::vector<Task> back;
    for (const Task& t : run.tasks) {
      if (t.kind == TaskKind::store_state || t.kind == TaskKind::store_weights) back.push_back(t);
    }
    std::ranges::stable_sort(back, {}, &Task::priority);
    ASSERT_GT(back.size(), 20U) << policy;
    for (std::size_t i = 0; i + 1 < back.size(); i += 2) {
      EXPECT_EQ(back[i].kind, TaskKind::store_weights) << policy;
      EXPECT_EQ(back[i + 1].kind, TaskKind::store_state) << policy;
      EXPECT_EQ(back[i].subgroup, back[i + 1].subgroup) << policy;
      EXPECT_EQ(back[i].begin, back[i + 1].begin) << policy;
    }
  }
}

// Rounded are the vectors alone; what crosses the link is the same.
TEST(Lower, WhatTheCallerWritesInBf16CrossesTheLinkAsItIs) {
  for (const Order order : {Order{1, 1}, Order{3, 1}, Order{3, 3}}) {
    Lowered run("host", 0, 2, StateFormat::fp32, order, DType::bf16);
    run.steps(1);
    std::map<LayerIndex, std::int64_t> rounded, sent;
    for (const Task& t : run.tasks) {
      if (t.kind == TaskKind::round_gradient) rounded[t.layer] += t.count();
      if (t.kind == TaskKind::flush_gradient) sent[t.layer] += t.count();
    }
    const Layer& layer = run.layout.layer(1);
    EXPECT_EQ(layer.summed_elements, 147 * layout_quantum);
    const bool once = order.at_once > 1;
    EXPECT_EQ(sent[LayerIndex(1)], (once ? 1 : order.micro_batches) * layer.state_elements);
    EXPECT_EQ(rounded[LayerIndex(1)], once ? 0 : order.micro_batches * layer.summed_elements);
  }
}

// The host would read all gradients once more. Each norm block crosses the link once, in a copy for each subgroup.
TEST(Lower, TheDeviceMakesTheNormOfWhatLeavesItFinal) {
  for (const DType products : {DType::f32, DType::bf16}) {
    for (const Order order : {Order{1, 1}, Order{3, 1}, Order{3, 3}}) {
      Lowered run("host", 0, 2, StateFormat::fp32, order, products);
      run.steps(1);
      std::int64_t on_host = 0, made = 0;
      std::map<SubgroupIndex, std::uint64_t> fetched;  // bytes
      for (const Task& t : run.tasks) {
        const bool rounds = t.kind == TaskKind::round_gradient || t.kind == TaskKind::sum_gradient;
        if (t.kind == TaskKind::accumulate_gradient && t.last_micro) on_host += t.count();
        if (t.kind == TaskKind::norm_gradient || (rounds && t.last_micro)) made += t.count();
        if (t.kind == TaskKind::fetch_norm) {
          EXPECT_TRUE(fetched.emplace(t.subgroup, t.bytes).second);
        }
      }
      const bool by_device = order.micro_batches == 1 || order.at_once > 1;
      EXPECT_EQ(run.plan.norms_on_device(), by_device);
      EXPECT_EQ(on_host, by_device ? 0 : run.layout.state_elements());
      EXPECT_EQ(fetched.size(), by_device ? run.plan.subgroups.size() : 0);
      if (!by_device) continue;
      EXPECT_EQ(made, run.layout.state_elements());
      for (const auto& [subgroup, bytes] : fetched) {
        const auto count = static_cast<std::uint64_t>(subgroup_at(run.plan, subgroup).count());
        EXPECT_EQ(bytes, count / layout_quantum * sizeof(double));
      }
    }
  }
}

TEST(Lower, ASaveReadsEveryValueOnceInTheOrderOfTheFile) {
  Lowered run("static:0.5");
  Lowering u(run.layout, run.plan);
  u.save(run.tasks);
  std::size_t i = 0;
  for (const Parameter* p : run.layout.owned_parameters()) {
    for (const StateArray array : arrays_of(p->options.trainable, Optimizer::adamw)) {
      std::int64_t at = p->offset;
      for (; i < run.tasks.size() && at < p->offset + p->count; at = run.tasks[i++].end) {
        const Task& t = run.tasks[i];
        EXPECT_EQ(t.lane, Lane::disk);
        EXPECT_EQ(t.layer, layer_of(*p));
        EXPECT_EQ(t.array, array);
        EXPECT_EQ(t.begin, at);
        EXPECT_EQ(t.bytes, 4U * static_cast<std::uint64_t>(t.count()));
        EXPECT_TRUE(i == 0 || run.tasks.dependencies(i).front() == t.id - 1);
      }
      EXPECT_EQ(at, p->offset + p->count) << p->full_name;
    }
  }
  EXPECT_EQ(i, run.tasks.size());
}

// A parameter that lies in several subgroups: each update waits for its own part alone.
TEST(Lower, AnUpdateWaitsForTheStateThatItOverwritesAndNoMore) {
  Lowered run("host");
  Lowering u(run.layout, run.plan);
  u.save(run.tasks);
  std::map<TaskId, Task> saves;
  for (const Task& t : run.tasks) saves[t.id] = t;
  run.tasks.clear();
  u.begin_step({.micro_batches = 1, .may_be_absent = true});
  u.end_gradients(Missing::zeros, run.tasks);
  u.update(run.tasks);
  int updates = 0;
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    const Task& t = run.tasks[i];
    if (t.kind != TaskKind::update_cpu) continue;
    ++updates;
    std::vector<Task> waits_for;
    for (const TaskId id : run.tasks.dependencies(i)) {
      if (saves.contains(id)) waits_for.push_back(saves.at(id));
    }
    ASSERT_EQ(waits_for.size(), 1U);
    const Task& save = waits_for.front();
    EXPECT_EQ(save.array, StateArray::v);
    EXPECT_LT(save.begin, t.end);
    EXPECT_GT(save.end, t.begin);
  }
  EXPECT_EQ(updates, static_cast<int>(run.plan.subgroups.size()));
  EXPECT_GT(updates, 7);
}

TEST(Lower, ALayerWithoutAGradientIsNotUpdatedUnlessThatIsZero) {
  for (const Missing missing : {Missing::left, Missing::zeros}) {
    Lowered run("host");
    Lowering u(run.layout, run.plan);
    u.begin_step({.micro_batches = 1, .may_be_absent = true});
    for (const LayerIndex l : {LayerIndex(5), LayerIndex(2)}) u.commit(u.gradients(l, run.tasks), run.tasks);
    u.end_gradients(missing, run.tasks);
    u.update(run.tasks);
    std::set<LayerIndex> updated;
    for (const Task& t : run.tasks) {
      if (t.kind == TaskKind::update_cpu) updated.insert(t.layer);
    }
    EXPECT_EQ(updated.contains(LayerIndex(2)), true);
    EXPECT_EQ(updated.contains(LayerIndex(3)), missing == Missing::zeros);
    EXPECT_EQ(u.has_gradient(LayerIndex(3)), missing == Missing::zeros);
  }
}

TEST(Lower, ASumIsFinishedWhereNoLastMicroBatchWasKnown) {
  for (const bool known : {false, true}) {
    Lowered run("host", 0, 2, StateFormat::fp32, {4, 1});
    Lowering u(run.layout, run.plan);
    u.begin_step({.micro_batches = 4, .open_ended = true});
    for (int micro = 0; micro < 2; ++micro) {
      u.begin_micro_batch(known && micro == 1, run.tasks);
      for (LayerIndex l(run.layout.layer_count() - 1); !l.none(); --l) u.commit(u.gradients(l, run.tasks), run.tasks);
    }
    EXPECT_TRUE(u.gradients_complete());
    const std::size_t before = run.tasks.size();
    u.end_gradients(Missing::left, run.tasks);
    EXPECT_EQ(run.tasks.size() == before, known);
    for (std::size_t i = before; i < run.tasks.size(); ++i) {
      EXPECT_EQ(run.tasks[i].kind, TaskKind::finish_gradient);
      EXPECT_FALSE(run.tasks[i].first_micro);
    }
  }
}

/// Fetches by layer.
std::map<int, int> fetches_of(const Lowered& run) {
  std::map<int, int> fetches;
  for (const Task& t : run.tasks) fetches[t.layer.number()] += t.kind == TaskKind::fetch_weights ? 1 : 0;
  return fetches;
}

TEST(Lower, TheLastLayersOfForwardAreNotFetchedTwice) {
  Lowered run("host", 0, 3);
  run.steps(1);
  std::map<int, int> fetches = fetches_of(run);
  EXPECT_EQ(fetches[5], 2);  // once a micro-batch, not twice
  EXPECT_EQ(fetches[4], 2);
  EXPECT_GT(fetches[2], 2);
}

/// Fetches of the first layer in each of three steps of a model without shared weights, and whether backward has to
/// wait for them.
struct FirstLayer {
  std::vector<std::ptrdiff_t> fetches;
  bool waits_in_backward = false;
};

FirstLayer first_layer_of(bool trained, bool used_in_backward) {
  constexpr int blocks = 10;
  ParameterLayout layout;
  layout.add_layer("embedding").add("t", {200'000}, {.trainable = trained});
  for (int i = 0; i < blocks; ++i) layout.add_layer("h." + std::to_string(i)).add("w", {50'000});
  layout.add_layer("head").add("t", {200'000});
  OffloadOptions options;
  options.policy = parse_policy("host");
  options.resident_layers = 0;
  const Plan plan = make_plan(layout, options, {std::size_t{1} << 34, 0});
  Lowering lowering(layout, plan);
  FirstLayer first;
  TaskList tasks;
  const auto fetches = [&] {
    return std::ranges::count_if(
        tasks, [](const Task& t) { return t.kind == TaskKind::fetch_weights && t.layer == LayerIndex(0); });
  };
  const auto use = [&](int layer) {
    const LayerUse of_layer = lowering.use(LayerIndex(layer), tasks);
    lowering.prefetch(tasks);
    lowering.release(of_layer);
    lowering.prefetch(tasks);
  };
  const auto fill = [&](int layer) {
    if (layout.layer(layer).state_elements > 0) lowering.commit(lowering.gradients(LayerIndex(layer), tasks), tasks);
  };
  for (int step = 0; step < 3; ++step) {
    tasks.clear();
    lowering.begin_step({.micro_batches = 1});  // one that is abandoned in forward
    use(0);
    lowering.end_pass();
    lowering.begin_step({.micro_batches = 1});
    for (int l = 0; l <= blocks + 1; ++l) use(l);
    fill(blocks + 1);
    for (int l = blocks; l > 0; --l) {
      use(l);
      fill(l);
    }
    const std::ptrdiff_t before = fetches();
    if (used_in_backward) use(0);
    first.waits_in_backward = fetches() > before;
    fill(0);
    lowering.update(tasks);
    lowering.end_pass();
    first.fetches.push_back(fetches());
  }
  return first;
}

// A first layer that backward does not use, like the embedding: it would lie on the device until its update made it
// stale. The first step shows that it is not fetched.
TEST(Lower, WeightsThatBackwardDoesWithoutAreNotFetchedForIt) {
  EXPECT_EQ(first_layer_of(/*trained=*/true, /*used_in_backward=*/false).fetches,
            (std::vector<std::ptrdiff_t>{2, 1, 1}));
}

TEST(Lower, WeightsThatBackwardVisitsAreThereBefore) {
  for (const bool trained : {false, true}) {
    const FirstLayer first = first_layer_of(trained, /*used_in_backward=*/true);
    EXPECT_FALSE(first.waits_in_backward) << trained;
    EXPECT_EQ(first.fetches.back(), trained ? 2 : 1) << trained;  // frozen weights are still there in the next forward
  }
}

// Forward and backward; the last ones of forward are the first of backward.
TEST(Lower, OneVisitServesAllMicroBatchesThatPassThroughAtOnce) {
  for (const int micro_batches : {1, 2, 5}) {
    Lowered run("host", 0, 2, StateFormat::fp32, {micro_batches, micro_batches});
    run.steps(1);
    for (const auto& [layer, fetches] : fetches_of(run)) EXPECT_LE(fetches, 2) << layer;
    EXPECT_EQ(fetches_of(run).at(5), 1);
    EXPECT_EQ(fetches_of(run).at(3), 2);
  }
  Lowered some("host", 0, 2, StateFormat::fp32, {5, 2});
  some.steps(1);
  EXPECT_EQ(fetches_of(some).at(3), 2 * 3);
  Lowered none("host", 0, 2, StateFormat::fp32, {5, 1});
  none.steps(1);
  EXPECT_EQ(fetches_of(none).at(3), 2 * 5);
}

TEST(Lower, GradientsAreSummedInTheOrderOfMicroBatchesWhateverTheOrderOfVisits) {
  for (const Order order : {Order{5, 1}, Order{5, 2}, Order{5, 5}}) {
    Lowered run("interleave:2,resident=0.4", 0, 2, StateFormat::fp32, order);
    run.steps(1);
    std::map<std::pair<SubgroupIndex, std::int64_t>, std::vector<std::size_t>> sums;  // by subgroup and piece
    for (std::size_t i = 0; i < run.tasks.size(); ++i) {
      const Task& t = run.tasks[i];
      const bool folds = t.kind == TaskKind::accumulate_gradient && !run.plan.sends_sums;
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

TEST(Lower, SumsLeaveTheDeviceOnceWhereAllMicroBatchesPassThroughALayerAtOnce) {
  for (const Order order : {Order{1, 1}, Order{5, 1}, Order{5, 2}, Order{5, 5}}) {
    Lowered run("host", 0, 2, StateFormat::fp32, order);
    run.steps(1);
    EXPECT_EQ(run.plan.sends_sums, order.at_once == 5);
    std::uint64_t bytes = 0;
    for (const Task& t : run.tasks) bytes += t.kind == TaskKind::flush_gradient ? t.bytes : 0;
    const auto times = static_cast<std::uint64_t>(run.plan.sends_sums ? 1 : order.micro_batches);
    EXPECT_EQ(bytes, times * 2 * static_cast<std::uint64_t>(run.layout.state_elements()));
  }
}

TEST(Lower, WhereSumsLeaveALayerAfterTheOtherIsCommitted) {
  Lowered run("host", 0, 2, StateFormat::fp32, {2, 2});
  ASSERT_TRUE(run.plan.sends_sums);
  Lowering u(run.layout, run.plan);
  u.begin_step({.micro_batches = 2});
  u.commit(u.gradients(LayerIndex(3), run.tasks), run.tasks);
  EXPECT_THROW(u.gradients(LayerIndex(2), run.tasks), MisuseError);
  u.commit(u.gradients(LayerIndex(3), run.tasks), run.tasks);
  EXPECT_NO_THROW(u.gradients(LayerIndex(2), run.tasks));
}

// The last layer owns what the first borrows: backward of the first completes the gradients of both.
TEST(Lower, TwoSumsAreOpenAtOnceWhereALayerCompletesAnothersGradient) {
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
  Lowering u(layout, plan);
  TaskList tasks;
  for (int step = 0; step < 2; ++step) {
    u.begin_step({.micro_batches = 3});
    for (LayerIndex l(2); !l.none(); --l) {
      for (int micro = 0; micro < 3; ++micro) u.commit(u.gradients(l, tasks), tasks);
    }
    EXPECT_TRUE(u.gradients_complete());
    u.update(tasks);
    u.end_pass();
  }
  std::map<LayerIndex, std::set<int>> buffers;
  for (const Task& t : tasks) {
    if (t.kind == TaskKind::sum_gradient) buffers[t.layer].insert(t.sum);
  }
  EXPECT_EQ(buffers.size(), 3U);
  for (const int sum : buffers[LayerIndex(2)]) EXPECT_FALSE(buffers[LayerIndex(0)].contains(sum));
}

TEST(Lower, ATiedLayerHasAGradientBufferForEachMicroBatchAtOnce) {
  for (const Order order : {Order{5, 1}, Order{5, 2}, Order{5, 5}}) {
    const Lowered run("host", 0, 2, StateFormat::fp32, order);
    const Lowering u(run.layout, run.plan);
    int buffers = 0;
    for (int b = 0; b < u.gradient_buffer_count(); ++b) {
      buffers += u.gradient_buffer_elements(b) == run.layout.layer(0).state_elements ? 1 : 0;
    }
    EXPECT_EQ(buffers, order.at_once);
  }
}

TEST(Lower, AnOwnerThatMakesAllOfATiedGradientOpensItInItsOwnVisit) {
  Lowered run("host", 0, 2, StateFormat::fp32, {5, 5, true});
  run.steps(2);
  const LayerIndex head(run.layout.layer_count() - 1);
  std::map<LayerIndex, int> commits;
  for (const auto& [task, use] : run.commits) {
    ++commits[use.layer];
    for (const GradientPlace& place : use.gradients) {
      EXPECT_EQ(place.layer, use.layer);
      EXPECT_TRUE(place.fresh);
    }
  }
  EXPECT_EQ(commits[LayerIndex(0)], 10);
  EXPECT_EQ(commits[head], 10);
}

TEST(Lower, GradientsAskedForOutOfTurnAreRefused) {
  for (const int at_once : {1, 2}) {
    Lowered run("host", 0, 2, StateFormat::fp32, {4, at_once});
    Lowering u(run.layout, run.plan);
    u.begin_step({.micro_batches = 4});
    const GradientUse first = u.gradients(LayerIndex(3), run.tasks);
    EXPECT_THROW(u.gradients(LayerIndex(3), run.tasks), MisuseError);  // the first is not committed
    u.commit(first, run.tasks);
    for (int micro = 1; micro < at_once; ++micro) u.commit(u.gradients(LayerIndex(3), run.tasks), run.tasks);
    EXPECT_THROW(u.gradients(LayerIndex(3), run.tasks), MisuseError);  // the other layers have not come so far
  }
}

TEST(Lower, AnAbandonedStepLeavesNoGradientOpen) {
  Lowered run("host", 0, 2, StateFormat::fp32, {3, 3});
  Lowering u(run.layout, run.plan);
  for (int attempt = 0; attempt < 4; ++attempt) {
    u.begin_step({.micro_batches = 3});
    for (int micro = 0; micro < 2; ++micro) {  // uses of the head: the embedding's stay open
      const GradientUse use = u.gradients(LayerIndex(6), run.tasks);
      for (const GradientPlace& place : use.gradients) EXPECT_TRUE(place.fresh) << place.layer.number();
      u.commit(use, run.tasks);
    }
    u.abandon(u.gradients(LayerIndex(6), run.tasks));
    u.end_pass();
  }
  run.tasks.clear();
  u.begin_step({.micro_batches = 3});
  for (LayerIndex l(6); !l.none(); --l) {
    for (int micro = 0; micro < 3; ++micro) u.commit(u.gradients(l, run.tasks), run.tasks);
  }
  EXPECT_TRUE(u.gradients_complete());
}

TEST(Lower, AResidentLayerIsNeverFetched) {
  Lowered run("host", 7);
  run.steps(2);
  EXPECT_EQ(std::count_if(run.tasks.begin(), run.tasks.end(),
                          [](const Task& t) { return t.kind == TaskKind::fetch_weights; }),
            0);
}

}  // namespace
}  // namespace tandem
