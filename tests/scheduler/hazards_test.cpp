// Every hazard between the tasks of a plan is a dependency.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/ops/update_kernels.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "tests/scheduler/lowered.hpp"

namespace tandem {
namespace {

using testing::Lowered;
using testing::Order;

/// Check of dependencies. For each pair of tasks of which one writes what the other touches, in order of emission,
/// there must be a path of dependencies. The caller's own stream orders its tasks among themselves.
class HazardCheck {
 public:
  explicit HazardCheck(const Lowered& run) : run_(run), reach_(run.tasks.size()) {
    std::size_t last_caller = run.tasks.size();
    for (std::size_t i = 0; i < run.tasks.size(); ++i) {
      auto& reach = reach_[i];
      reach.resize(run.tasks.size() / 64 + 1);
      const auto join = [&](std::size_t d) {
        for (std::size_t w = 0; w < reach.size(); ++w) reach[w] |= reach_[d].empty() ? 0 : reach_[d][w];
        reach[d / 64] |= std::uint64_t{1} << (d % 64);
      };
      for (const TaskId d : run.tasks.dependencies(i)) join(d.position());
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
  const Lowered& run_;
  std::vector<std::vector<std::uint64_t>> reach_;
  std::map<std::string, Record> memory_;
};

std::string key(const char* what, std::int64_t a, std::int64_t b = 0) {
  return std::string(what) + " " + std::to_string(a) + " " + std::to_string(b);
}
std::string key(const char* what, LayerIndex layer, std::int64_t b = 0) { return key(what, layer.number(), b); }

/// Calls body(first) for each piece of a layer's gradient with elements in [begin, end).
template <class Body>
void for_gradients(const Lowered& run, LayerIndex layer, std::int64_t begin, std::int64_t end, Body body) {
  const std::int64_t border = layer_at(run.layout, layer).summed_elements;
  for (const Subgroup& g : run.plan.subgroups) {
    if (layer_of(g) != layer) continue;
    for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
      const std::int64_t after = std::min(b + run.plan.piece_elements, g.end);
      const bool cut = b < border && border < after;
      if (b < end && begin < (cut ? border : after)) body(b);
      if (cut && border < end && begin < after) body(border);
    }
  }
}

/// Reads and writes of each task, by the meaning of its kind alone.
int check_hazards(const Lowered& run) {
  HazardCheck check(run);
  std::set<LayerIndex> speculated;      // layers whose updates have run and are not decided about
  std::map<LayerIndex, int> buffer_of;  // layer to the weight buffer it was fetched into last
  for (std::size_t i = 0; i < run.tasks.size(); ++i) {
    const Task& t = run.tasks[i];
    const bool resident = !t.layer.none() && placement_at(run.plan, t.layer).resident;
    const auto weights_home = [&](bool write) {  // by subgroup, so that two of a layer do not conflict
      for (const SubgroupIndex s : subgroups_of(run.plan)) {
        const Subgroup& g = subgroup_at(run.plan, s);
        if (layer_of(g) != t.layer || (!t.subgroup.none() && s != t.subgroup)) continue;
        for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
          if (t.count() > 0 && (b < t.begin || b >= t.end)) continue;
          check.touch(i, key(resident ? "resident weights" : "host weights", t.layer, b), write);
        }
      }
    };
    const auto state = [&](bool write) {
      if (t.file_buffer >= 0) return check.touch(i, key("file buffer", t.file_buffer), write);
      for (std::int64_t b = t.begin; b < t.end; b += run.plan.piece_elements)
        check.touch(i, key("state", t.layer, b), write);
    };
    const auto gradient = [&](bool write) {
      for_gradients(run, t.layer, t.begin, t.end,
                    [&](std::int64_t b) { check.touch(i, key("gradient", t.layer, b), write); });
    };
    // Gradient that the caller or another rank has filled.
    const auto caller_gradient = [&] {
      if (t.receive_buffer < 0) return check.touch(i, key("gradient buffer", t.buffer, t.begin), false);
      EXPECT_NE(t.from_rank, run.plan.rank.index);
      check.touch(i, key("receive buffer", t.receive_buffer), false);
    };
    const auto host_norm = [&](bool write) {
      for_gradients(run, t.layer, t.begin, t.end,
                    [&](std::int64_t b) { check.touch(i, key("host norm", t.layer, b), write); });
    };
    // Norm blocks of what leaves the device, beside the gradient buffer.
    const auto norm_blocks = [&](bool write) {
      for_gradients(run, t.layer, t.begin, t.end,
                    [&](std::int64_t b) { check.touch(i, key("norm blocks", t.buffer, b), write); });
    };
    switch (t.kind) {
      case TaskKind::layer_use: {
        std::vector<LayerIndex> used{t.layer};
        for (const int owner : layer_at(run.layout, t.layer).borrows) used.push_back(LayerIndex(owner));
        for (const LayerIndex l : used) {
          const bool stays = placement_at(run.plan, l).resident;
          if (!stays) check.touch(i, key("weight buffer", buffer_of.at(l)), false);
          if (stays) check.touch(i, key("resident weights of others", l), false);
          for (const Subgroup& g : run.plan.subgroups) {
            if (!stays || layer_of(g) != l) continue;
            for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
              check.touch(i, key("resident weights", l, b), false);
            }
          }
        }
        break;
      }
      case TaskKind::commit:
        for (const GradientPlace& place : run.commits.at(t.id).gradients) {
          for_gradients(run, place.layer, 0, layer_at(run.layout, place.layer).state_elements,
                        [&](std::int64_t b) { check.touch(i, key("gradient buffer", place.buffer, b), true); });
          check.touch(i, key("others' part of a gradient buffer", place.buffer), true);
        }
        break;
      case TaskKind::fetch_weights:
        check.touch(i, key("weight buffer", t.buffer), true);
        buffer_of[t.layer] = t.buffer;
        weights_home(false);
        EXPECT_FALSE(speculated.contains(t.layer)) << "fetches weights that may be taken back";
        if (t.code_buffer < 0) break;
        check.touch(i, key("layer's codes", t.layer), false);
        check.touch(i, key("code buffer", t.code_buffer), true);
        break;
      case TaskKind::encode_weights:
        weights_home(false);
        check.touch(i, key("layer's codes", t.layer), true);
        EXPECT_FALSE(speculated.contains(t.layer)) << "encodes weights that may be taken back";
        break;
      case TaskKind::decode_weights:
        check.touch(i, key("code buffer", t.code_buffer), false);
        check.touch(i, key("weight buffer", t.buffer), true);
        break;
      case TaskKind::round_gradient:
        caller_gradient();
        check.touch(i, key("staging", t.staging), true);
        if (run.plan.norms_on_device()) norm_blocks(true);
        break;
      case TaskKind::gather_weights:
        if (t.buffer >= 0) {
          check.touch(i, key("weight buffer", t.buffer), true);
        } else {
          check.touch(i, key("resident weights of others", t.layer), true);
          weights_home(false);  // others read this rank's
        }
        break;
      case TaskKind::all_to_all_gradient:
        check.touch(i, key("others' part of a gradient buffer", t.buffer), false);
        check.touch(i, key("receive buffer", t.receive_buffer), true);
        break;
      case TaskKind::sum_gradient:
        caller_gradient();
        if (t.staging >= 0) check.touch(i, key("staging", t.staging), true);
        EXPECT_TRUE(t.staging >= 0 || (t.in_bf16 && !t.last_micro));
        if (t.last_micro) norm_blocks(true);
        for (std::int64_t b = t.begin; b < t.end; b += layout_quantum) {
          check.touch(i, key("sum", t.sum, b - slice_of(layer_at(run.layout, t.layer), run.plan.rank).trained.begin),
                      true);
        }
        break;
      case TaskKind::keep_gradient:
        caller_gradient();
        gradient(true);
        break;
      case TaskKind::flush_gradient:
        if (t.staging >= 0) {
          check.touch(i, key("staging", t.staging), false);
        } else {
          EXPECT_TRUE(t.in_bf16);
          caller_gradient();
        }
        gradient(true);
        break;
      case TaskKind::accumulate_gradient:
      case TaskKind::finish_gradient:
        gradient(true);
        if (t.last_micro && t.lane == Lane::cpu) host_norm(true);
        break;
      case TaskKind::norm_gradient:
        for_gradients(run, t.layer, t.begin, t.end,
                      [&](std::int64_t b) { check.touch(i, key("gradient buffer", t.buffer, b), false); });
        norm_blocks(true);
        break;
      case TaskKind::fetch_norm:
        if (!subgroup_at(run.plan, t.subgroup).gradient_on_device) norm_blocks(false);
        host_norm(true);
        break;
      case TaskKind::read_state:
        check.touch(i, key("file buffer", t.file_buffer), true);
        check.touch(i, key("state in the file", t.layer, t.begin), false);
        break;
      case TaskKind::write_state:
        check.touch(i, key("file buffer", t.file_buffer), false);
        check.touch(i, key("state in the file", t.layer, t.begin), true);
        break;
      case TaskKind::load_state:
        if (t.buffer >= 0) {
          check.touch(i, key("state buffer", t.buffer), true);
          state(false);
          gradient(false);
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
        state(true);
        break;
      case TaskKind::update_resident:
        state(true);
        gradient(false);
        if (t.staging >= 0) check.touch(i, key("staging", t.staging), true);
        if (resident) weights_home(true);
        break;
      case TaskKind::store_weights:
        check.touch(i, key("staging", t.staging), false);
        weights_home(true);
        break;
      case TaskKind::speculate:
      case TaskKind::retract:
      case TaskKind::update_cpu:
        state(true);
        gradient(false);
        if (!resident) weights_home(true);
        if (t.kind == TaskKind::speculate) host_norm(false);
        if (t.kind == TaskKind::speculate) speculated.insert(t.layer);
        if (t.kind != TaskKind::speculate) speculated.erase(t.layer);
        break;
      case TaskKind::push_weights:
        weights_home(true);
        break;
      case TaskKind::save_state:
        for (const Subgroup& g : run.plan.subgroups) {
          if (layer_of(g) != t.layer) continue;
          const bool with_weights = t.buffer == 0 && run.plan.state != StateFormat::fp32;
          for (std::int64_t b = g.begin; b < g.end; b += run.plan.piece_elements) {
            if (b >= t.end || std::min(b + run.plan.piece_elements, g.end) <= t.begin) continue;
            check.touch(i, key(g.tier == Tier::file ? "state in the file" : "state", t.layer, b), false);
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
        Lowered run(GetParam(), resident, prefetch, state);
        run.steps(3);
        check_hazards(run);
        Lowered saving(GetParam(), resident, prefetch, state);
        saving.steps(3, true);
        check_hazards(saving);
      }
    }
  }
}

TEST_P(Hazards, AreAllDependenciesWhereUpdatesRunBeforeTheNormIsKnown) {
  for (const int resident : {0, 2, 7}) {
    for (const Order order : {Order{1, 1}, Order{2, 1}, Order{2, 2}}) {
      Lowered run(GetParam(), resident, 2, StateFormat::split, order);
      run.speculate();
      run.steps(5, true);
      EXPECT_EQ(check_hazards(run), 0);
    }
  }
}

TEST_P(Hazards, AreAllDependenciesWhereWeightsCrossInCodes) {
  for (const int resident : {0, 2}) {
    for (const Order order : {Order{1, 1}, Order{2, 1}, Order{2, 2}}) {
      for (const bool ahead : {false, true}) {
        Lowered run(GetParam(), resident, 2, StateFormat::split, order, DType::bf16, {}, true);
        if (ahead) run.speculate();
        run.steps(5, true);
        EXPECT_EQ(check_hazards(run), 0);
        const bool streams = run.plan.streams_weights();
        EXPECT_EQ(std::ranges::count(run.tasks, TaskKind::encode_weights, &Task::kind) > 0, streams);
      }
    }
  }
}

TEST_P(Hazards, AreAllDependenciesWhereMicroBatchesPassThroughALayerAtOnce) {
  for (const int resident : {0, 2}) {
    for (const Order order : {Order{1, 1}, Order{2, 2}, Order{5, 5}, Order{5, 2}, Order{5, 2, true}}) {
      Lowered run(GetParam(), resident, 2, StateFormat::fp32, order);
      run.steps(2);
      check_hazards(run);
    }
  }
}

TEST_P(Hazards, AreAllDependenciesOfSubgroupsInPieces) {
  for (const StateFormat state : {StateFormat::fp32, StateFormat::split}) {
    for (const Order order : {Order{2, 1}, Order{2, 2}}) {
      Lowered run(GetParam(), 2, 2, state, order);
      run.plan.piece_elements = 32 * layout_quantum;  // several pieces in a subgroup, the last one shorter
      run.steps(3, true);
      check_hazards(run);
    }
  }
}

TEST_P(Hazards, AreAllDependenciesOfStateInAFile) {
  for (const int every : {1, 2}) {
    for (const int resident : {0, 2, 7}) {
      for (const StateFormat state : {StateFormat::fp32, StateFormat::split}) {
        for (const int buffers : {1, 2, 6}) {
          Lowered run(GetParam(), resident, 2, state, {2, 1 + resident % 2});
          run.plan.piece_elements = 32 * layout_quantum;
          run.put_in_file(every, buffers);
          run.steps(3, true);
          check_hazards(run);
        }
      }
    }
  }
}

TEST_P(Hazards, AreAllDependenciesOfGradientsThatTheCallerWritesInBf16) {
  for (const int resident : {0, 2}) {
    for (const Order order : {Order{1, 1}, Order{3, 1}, Order{3, 3}}) {
      for (const std::int64_t piece : {0, 32}) {
        Lowered run(GetParam(), resident, 2, StateFormat::fp32, order, DType::bf16);
        if (piece > 0) run.plan.piece_elements = piece * layout_quantum;
        run.steps(2, true);
        check_hazards(run);
      }
    }
  }
}

TEST_P(Hazards, AreAllDependenciesOfEveryRank) {
  for (const int ranks : {2, 3}) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (const int resident : {0, 2, 7}) {
        for (const Order order : {Order{1, 1}, Order{2, 1}, Order{3, 3}}) {
          const DType gradient = resident == 2 ? DType::bf16 : DType::f32;
          Lowered run(GetParam(), resident, 2, StateFormat::split, order, gradient, {rank, ranks});
          if (rank == 1) run.plan.piece_elements = 32 * layout_quantum;
          run.steps(3, true);
          check_hazards(run);
        }
      }
    }
  }
}

// Weights of a rank that others read ahead of a use that does not come are not overwritten either.
TEST_P(Hazards, AreAllDependenciesOfARankThatLeavesOutALayer) {
  for (const int resident : {0, 7}) {
    Lowered run(GetParam(), resident, 2, StateFormat::fp32, {}, DType::f32, {1, 2});
    run.unused = LayerIndex(3);
    run.steps(3);
    check_hazards(run);
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, Hazards,
                         ::testing::Values("device", "host", "static:0.5", "interleave:2", "interleave:2,resident=0.4",
                                           "stream"));

/// Failures of the check where tasks of one kind wait for nothing.
int failures_without(const Lowered& run, TaskKind victim) {
  Lowered broken = run;
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

TEST(HazardCheck, FindsADroppedDependency) {
  Lowered run("interleave:2");
  run.steps(3, true);
  for (const TaskKind victim :
       {TaskKind::layer_use, TaskKind::commit, TaskKind::fetch_weights, TaskKind::round_gradient,
        TaskKind::flush_gradient, TaskKind::load_state, TaskKind::store_state, TaskKind::update_streamed,
        TaskKind::update_cpu, TaskKind::store_weights, TaskKind::save_state}) {
    EXPECT_GT(failures_without(run, victim), 0) << name_of(victim);
  }
}

TEST(HazardCheck, FindsADroppedDependencyOfSpeculation) {
  Lowered run("host");
  run.speculate();
  run.steps(5, true);
  for (const TaskKind victim : {TaskKind::speculate, TaskKind::retract, TaskKind::update_cpu}) {
    EXPECT_GT(failures_without(run, victim), 0) << name_of(victim);
  }
}

TEST(HazardCheck, FindsADroppedDependencyOfStateInAFile) {
  for (const char* policy : {"host", "stream"}) {
    Lowered run(policy);
    run.put_in_file(2, 2);
    run.steps(3, true);
    EXPECT_EQ(check_hazards(run), 0);
    const TaskKind update = policy == std::string("host") ? TaskKind::update_cpu : TaskKind::load_state;
    for (const TaskKind victim : {TaskKind::read_state, TaskKind::write_state, update, TaskKind::save_state}) {
      EXPECT_GT(failures_without(run, victim), 0) << policy << ' ' << name_of(victim);
    }
  }
}

TEST(HazardCheck, FindsADroppedDependencyOfAGradientInBf16) {
  for (const auto& [policy, reader] :
       {std::pair("host", TaskKind::flush_gradient), std::pair("host", TaskKind::norm_gradient),
        std::pair("host", TaskKind::fetch_norm), std::pair("device", TaskKind::keep_gradient)}) {
    Lowered run(policy, 0, 2, StateFormat::fp32, {1, 1}, DType::bf16);
    run.steps(2);
    EXPECT_EQ(check_hazards(run), 0);
    for (const TaskKind victim : {reader, TaskKind::commit}) {
      EXPECT_GT(failures_without(run, victim), 0) << policy << ' ' << name_of(victim);
    }
  }
}

TEST(HazardCheck, FindsADroppedDependencyOfWhatRanksExchange) {
  for (const int resident : {0, 7}) {
    Lowered run("host", resident, 2, StateFormat::fp32, {2, 1}, DType::f32, {1, 2});
    run.steps(3);
    EXPECT_EQ(check_hazards(run), 0);
    for (const TaskKind victim : {TaskKind::gather_weights, TaskKind::all_to_all_gradient, TaskKind::round_gradient}) {
      EXPECT_GT(failures_without(run, victim), 0) << resident << ' ' << name_of(victim);
    }
  }
}

TEST(HazardCheck, FindsADroppedDependencyOfASum) {
  Lowered run("host", 0, 2, StateFormat::fp32, {3, 3});
  run.steps(2);
  EXPECT_EQ(check_hazards(run), 0);
  EXPECT_GT(failures_without(run, TaskKind::sum_gradient), 0);
  EXPECT_GT(failures_without(run, TaskKind::fetch_norm), 0);
}

}  // namespace
}  // namespace tandem
