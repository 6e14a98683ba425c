// How a group's ranks share a model, and that their plans are of one kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/ops/update_kernels.hpp"
#include "core/tensor/dtype.hpp"
#include "scheduler/plan/plan_builder.hpp"
#include "scheduler/plan/rank_slice.hpp"
#include "scheduler/simulation/simulator.hpp"
#include "scheduler/tasks/traffic.hpp"
#include "tests/scheduler/machines.hpp"

namespace tandem {
namespace {

constexpr std::int64_t quantum = layout_quantum;

/// Layers of odd sizes; with much, little and nothing frozen, of fp32 and bf16 gradients, down to a single parameter.
ParameterLayout odd_layout() {
  ParameterLayout layout;
  layout.add_layer("table").add("t", {7, 901}).add("still", {2000}, {.trainable = false});
  layout.add_layer("one").add("w", {1});
  layout.add_layer("two").add("w", {22}).add("still", {55}, {.trainable = false});
  layout.add_layer("large").add("b", {33}).add("w", {100'003}, {.gradient = DType::bf16});
  layout.add_layer("frozen").add("still", {100'003}, {.trainable = false});
  layout.add_layer("last").add("n", {65}).add("t", {7, 901});
  layout.tie("table.t", "last.t");
  return layout;
}

constexpr int counts[] = {1, 2, 3, 5, 8, 13, 200};

/// Checks that ranges follow each other from `begin` to `end`, as equal as can be, those of the first ranks the
/// largest.
void expect_shares(const std::vector<ElementRange>& ranges, std::int64_t begin, std::int64_t end) {
  std::int64_t at = begin;
  for (const ElementRange& range : ranges) {
    EXPECT_EQ(range.begin, at);
    EXPECT_EQ(range.count() % quantum, 0);
    EXPECT_GE(range.count(), 0);
    EXPECT_LE(range.count(), ranges.front().count());
    EXPECT_GE(range.count() + quantum, ranges.front().count());
    at = range.end;
  }
  EXPECT_EQ(at, end);
}

TEST(SlicesOfRanks, CoverEveryLayerOnce) {
  const ParameterLayout layout = odd_layout();
  for (const Layer& layer : layout.layers()) {
    for (const int ranks : counts) {
      std::vector<ElementRange> trained, frozen;
      for (int r = 0; r < ranks; ++r) {
        const LayerSlice slice = slice_of(layer, {r, ranks});
        trained.push_back(slice.trained);
        frozen.push_back(slice.frozen);
      }
      expect_shares(trained, 0, layer.state_elements);
      expect_shares(frozen, layer.state_elements, layer.elements);
    }
  }
}

TEST(SlicesOfRanks, AreRunsThatLieOneAfterAnother) {
  const ParameterLayout layout = odd_layout();
  int of_one = 0, of_two = 0, of_none = 0;
  for (const Layer& layer : layout.layers()) {
    for (const int ranks : counts) {
      for (int r = 0; r < ranks; ++r) {
        const LayerSlice slice = slice_of(layer, {r, ranks});
        std::vector<ElementRange> runs;
        slice.for_runs([&](std::int64_t begin, std::int64_t count) { runs.push_back({begin, begin + count}); });
        std::int64_t passed = 0;
        for (const ElementRange& run : runs) {
          EXPECT_GT(run.count(), 0);
          for (std::int64_t e = run.begin; e < run.end; e += quantum) {
            EXPECT_EQ(slice.place_of(e), passed);
            EXPECT_TRUE((e >= slice.trained.begin && e < slice.trained.end) ||
                        (e >= slice.frozen.begin && e < slice.frozen.end));
            passed += quantum;
          }
        }
        EXPECT_EQ(passed, slice.count());
        if (runs.size() == 2) {
          EXPECT_LT(runs[0].end, runs[1].begin) << "neighbours are one run";
        }
        ++(runs.empty() ? of_none : runs.size() == 1 ? of_one : of_two);
      }
    }
  }
  EXPECT_TRUE(of_none > 0 && of_one > 0 && of_two > 0);
}

TEST(PartsOfRanks, AreTheBytesOfTheirSlices) {
  const ParameterLayout layout = odd_layout();
  for (const Layer& layer : layout.layers()) {
    for (const int ranks : counts) {
      const auto gradients = gradient_parts(layer, ranks);
      const auto weights = weight_parts(layer, ranks);
      ASSERT_EQ(gradients.size(), static_cast<std::size_t>(ranks));
      std::size_t gradient = 0, weight = 0;
      for (const ByteRange& part : gradients) {
        EXPECT_EQ(part.begin, gradient);
        gradient = part.end;
      }
      EXPECT_EQ(gradient, layer.gradient_offset(layer.state_elements));
      for (const std::vector<ByteRange>& parts : weights) {
        ASSERT_EQ(parts.size(), static_cast<std::size_t>(ranks));
        for (int r = 0; r < ranks; ++r) {
          const ByteRange& part = parts[static_cast<std::size_t>(r)];
          const LayerSlice slice = slice_of(layer, {r, ranks});
          const ElementRange& own = &parts == &weights[0] ? slice.trained : slice.frozen;
          EXPECT_EQ(part.size(), static_cast<std::size_t>(own.count()) * size_of(DType::bf16));
          EXPECT_EQ(part.begin, weight);
          weight = part.end;
        }
      }
      EXPECT_EQ(weight, static_cast<std::size_t>(layer.elements) * size_of(DType::bf16));
    }
  }
}

OffloadOptions options_of(const std::string& policy, Rank rank) {
  OffloadOptions o;
  o.policy = parse_policy(policy);
  o.rank = rank;
  o.subgroup_size = 4 * quantum;
  o.max_micro_batches = 2;
  return o;
}

constexpr PlanningFacts rank_facts{.device_capacity = std::size_t{1} << 34, .host_available = 0};

constexpr const char* policies[] = {"device", "host", "static:0.3", "interleave:2", "interleave:2,resident=0.4",
                                    "stream", "auto"};

/// Checks that all but the slices of `plan` is as in the first rank's plan, and that it takes no more memory.
void expect_same_structure(const Plan& plan, const Plan& first) {
  EXPECT_EQ(plan.common_text(), first.common_text());
  EXPECT_EQ(plan.piece_elements, first.piece_elements);
  EXPECT_EQ(plan.sends_sums, first.sends_sums);
  EXPECT_EQ(plan.staging_pieces, first.staging_pieces);
  EXPECT_EQ(plan.state_buffers, first.state_buffers);
  EXPECT_EQ(plan.storage_hash, first.storage_hash);
  ASSERT_EQ(plan.subgroups.size(), first.subgroups.size());
  for (std::size_t s = 0; s < plan.subgroups.size(); ++s) {
    const Subgroup &own = plan.subgroups[s], &of_first = first.subgroups[s];
    EXPECT_EQ(own.layer, of_first.layer);
    EXPECT_EQ(own.tier, of_first.tier);
    EXPECT_EQ(own.updater, of_first.updater);
    EXPECT_EQ(own.gradient_on_device, of_first.gradient_on_device);
    EXPECT_LE(own.count(), plan.subgroup_size);
  }
  for (const Place place : {Place::device, Place::pinned}) {
    EXPECT_LE(plan.memory.bytes_in(place), first.memory.bytes_in(place));
  }
  for (const MemoryEntry& entry : plan.memory.entries) {
    const auto same = std::ranges::find_if(
        first.memory.entries, [&](const MemoryEntry& e) { return e.name == entry.name && e.place == entry.place; });
    ASSERT_NE(same, first.memory.entries.end()) << entry.name;
    EXPECT_LE(entry.bytes, same->bytes) << entry.name;
  }
}

TEST(PlansOfRanks, AreOfOneKindAndHaveEveryElementOnce) {
  const ParameterLayout layout = odd_layout();
  for (const char* policy : policies) {
    for (const int ranks : {1, 2, 3, 9}) {
      const Plan first = make_plan(layout, options_of(policy, {0, ranks}), rank_facts);
      EXPECT_EQ(std::ssize(first.subgroups), subgroup_count(layout, options_of(policy, {0, ranks})));
      std::vector<std::int64_t> owned(static_cast<std::size_t>(layout.layer_count()));
      for (int r = 0; r < ranks; ++r) {
        const Plan plan = make_plan(layout, options_of(policy, {r, ranks}), rank_facts);
        EXPECT_EQ(plan.rank, (Rank{r, ranks}));
        expect_same_structure(plan, first);
        for (const Subgroup& s : plan.subgroups) {
          std::int64_t& at = owned[static_cast<std::size_t>(s.layer)];
          const LayerSlice slice = slice_of(layout.layer(s.layer), plan.rank);
          EXPECT_TRUE(s.begin >= slice.trained.begin && s.end <= slice.trained.end);
          if (s.count() == 0) continue;
          EXPECT_EQ(s.begin, at) << layout.layer(s.layer).name << ", rank " << r << " of " << ranks;
          at = s.end;
        }
      }
      for (int l = 0; l < layout.layer_count(); ++l) {
        EXPECT_EQ(owned[static_cast<std::size_t>(l)], layout.layer(l).state_elements);
      }
    }
  }
}

TEST(PlansOfRanks, TakeLessMemoryThanThatOfOne) {
  const ParameterLayout layout = testing::equal_layers(4, 1 << 20);
  for (const char* policy : {"device", "host", "stream"}) {
    const auto bytes = [&](int ranks) {
      const MemoryPlan memory = make_plan(layout, options_of(policy, {0, ranks}), rank_facts).memory;
      return memory.device_bytes() + memory.host_bytes();
    };
    EXPECT_LT(bytes(2), bytes(1)) << policy;
    EXPECT_LT(bytes(4), bytes(2)) << policy;
  }
}

// Memory that one rank pins is mapped on the devices of all.
TEST(PlansOfRanks, CountPageTablesOfWhatAllPin) {
  const ParameterLayout layout = testing::equal_layers(8, 1 << 20);
  constexpr std::size_t step = 20 << 20, granule = 2 << 20;
  for (const char* policy : {"host", "static:0.5", "stream"}) {
    for (const int ranks : {1, 2, 5}) {
      int planned = 0;
      for (PlanningFacts tight{.device_capacity = step, .pinned_per_page_table = 64}; tight.device_capacity < 15 * step;
           tight.device_capacity += step) {
        const auto plan_of = [&](int rank) { return find_plan(layout, options_of(policy, {rank, ranks}), tight); };
        if (!plan_of(0)) continue;
        ++planned;
        std::size_t pinned = 0;
        for (int r = 0; r < ranks; ++r) pinned += plan_of(r)->memory.bytes_in(Place::pinned);
        for (int r = 0; r < ranks; ++r) {
          const Plan plan = *plan_of(r);
          EXPECT_GE(plan.page_tables * 64, pinned) << policy << ", rank " << r << " of " << ranks;
          EXPECT_LE(plan.memory.device_bytes() + plan.page_tables, tight.device_capacity) << policy;
          EXPECT_EQ(plan.page_tables, plan_of(0)->page_tables) << "of the largest";
        }
        EXPECT_LT(plan_of(0)->page_tables * 64,
                  of_all_ranks(plan_of(0)->memory.bytes_in(Place::pinned), {0, ranks}) + 64 * granule);
      }
      EXPECT_GT(planned, 0) << policy;
    }
  }
}

TEST(PlansOfRanks, SayWhatMustBeCommon) {
  const ParameterLayout layout = odd_layout();
  const auto text = [&](const OffloadOptions& o) { return make_plan(layout, o, rank_facts).common_text(); };
  OffloadOptions base = options_of("host", {0, 3});
  base.resident_layers = 2;
  base.prefetch_layers = 2;
  const auto with = [&](auto change) {
    OffloadOptions o = base;
    change(o);
    return text(o);
  };
  const std::string expected = text(base);
  EXPECT_EQ(with([](OffloadOptions& o) { o.rank.index = 2; }), expected);
  const auto streaming_all = [&](const char* policy) {
    return with([&](OffloadOptions& o) {
      o.policy = parse_policy(policy);
      o.resident_layers = 0;
    });
  };
  EXPECT_EQ(streaming_all("static:0.6"), streaming_all("interleave:2"));
  EXPECT_EQ(with([](OffloadOptions& o) { o.subgroup_size = quantum; }), expected);
  EXPECT_EQ(with([](OffloadOptions& o) { o.update_threads = 3; }), expected);
  EXPECT_NE(with([](OffloadOptions& o) { o.rank.count = 2; }), expected);
  EXPECT_NE(with([](OffloadOptions& o) { o.resident_layers = 3; }), expected);
  EXPECT_NE(with([](OffloadOptions& o) { o.prefetch_layers = 1; }), expected);
  EXPECT_NE(with([](OffloadOptions& o) { o.max_micro_batches = 3; }), expected);
  EXPECT_NE(with([](OffloadOptions& o) { o.micro_batches_at_once = 2; }), expected);
  EXPECT_NE(with([](OffloadOptions& o) { o.owners_make_gradients = true; }), expected);
  ParameterLayout other = odd_layout();
  other.add_layer("more").add("w", {5});
  EXPECT_NE(make_plan(other, base, rank_facts).common_text(), expected);
}

class SimulatedRanks : public ::testing::TestWithParam<const char*> {
 protected:
  static constexpr int layers = 6;
  const ParameterLayout layout_ = testing::equal_layers(layers, std::int64_t{4} << 20);
  const std::vector<LayerSeconds> compute_ =
      std::vector<LayerSeconds>(static_cast<std::size_t>(layers), LayerSeconds{0.01, 0.02});
  static constexpr double compute_seconds = layers * 0.03;

  Plan plan(Rank rank, int micro_batches = 1, int at_once = 1) const {
    OffloadOptions o = options_of(GetParam(), rank);
    o.subgroup_size.reset();
    o.max_micro_batches = micro_batches;
    o.micro_batches_at_once = at_once;
    return make_plan(layout_, o, rank_facts);
  }
};

TEST_P(SimulatedRanks, ComeToAnEndAndTakeNoLessThanTheirCompute) {
  for (const int ranks : {1, 2, 3, 8}) {
    for (int r = 0; r<ranks; r += ranks - 1> 0 ? ranks - 1 : 1) {
      for (const auto& [micro_batches, at_once] : {std::pair{1, 1}, {4, 1}, {4, 4}}) {
        for (const std::int64_t coarse_pieces : {0, 40}) {
          const Plan of_rank = plan({r, ranks}, micro_batches, at_once);
          const Simulation s = simulate(layout_, of_rank, testing::desktop(), compute_,
                                        {.micro_batches = micro_batches, .coarse_pieces = coarse_pieces});
          EXPECT_GE(s.step_seconds, micro_batches * compute_seconds * 0.999) << of_rank.policy_text();
          EXPECT_LT(s.step_seconds, 100.0 * micro_batches * compute_seconds) << of_rank.policy_text();
        }
      }
    }
  }
}

TEST_P(SimulatedRanks, GetMoreBytesFromMorePeers) {
  const auto from_peers = [&](int ranks) { return traffic_of_step(layout_, plan({0, ranks}), 1).from_peers; };
  EXPECT_EQ(from_peers(1), 0U);
  EXPECT_GT(from_peers(2), 0U);
  EXPECT_GT(from_peers(4), from_peers(2));
}

// Nothing else crosses it where all stays on the devices.
TEST_P(SimulatedRanks, WaitForTheLinkBetweenThem) {
  MachineProfile slow = testing::desktop();
  slow.to_device.value = slow.to_host.value = slow.both_ways.value = 0.2e9;
  const auto seconds = [&](const MachineProfile& machine, int ranks) {
    return simulate(layout_, plan({0, ranks}), machine, compute_).step_seconds;
  };
  const auto bytes = static_cast<double>(traffic_of_step(layout_, plan({0, 2}), 1).from_peers);
  EXPECT_GE(seconds(slow, 2), 2.0 * bytes / slow.both_ways.value);
  EXPECT_GT(seconds(slow, 2), seconds(testing::desktop(), 2));
  if (std::string(GetParam()) != "device") return;
  EXPECT_GT(seconds(slow, 2), seconds(slow, 1));
}

INSTANTIATE_TEST_SUITE_P(Policies, SimulatedRanks,
                         ::testing::Values("device", "host", "interleave:2,resident=0.4", "stream"));

}  // namespace
}  // namespace tandem
