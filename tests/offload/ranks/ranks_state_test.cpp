// The state of a group between steps: read alike by all ranks, written by each where it is its own.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using testing::with_toy_group;

using Values = std::map<std::pair<std::string, StateArray>, std::vector<float>>;

Values all_values(ToyTrainer& t) {
  Values all;
  for (const Parameter* p : t.layout().owned_parameters()) {
    for (const StateArray array : state_arrays) {
      std::vector<float>& values = all[{p->full_name, array}];
      values.resize(static_cast<std::size_t>(p->count));
      t.engine().read(*p, array, values);
    }
  }
  return all;
}

/// Writes in pieces whose bounds are nobody's.
void write_all(ToyTrainer& t, const Values& all, std::int64_t step) {
  constexpr std::int64_t piece = 1237;
  for (const Parameter* p : t.layout().owned_parameters()) {
    for (const StateArray array : state_arrays) {
      const std::span<const float> values = all.at({p->full_name, array});
      for (std::int64_t first = 0; first < p->count; first += piece) {
        const auto count = static_cast<std::size_t>(std::min(piece, p->count - first));
        t.engine().write(*p, array, first, values.subspan(static_cast<std::size_t>(first), count));
      }
    }
  }
  t.engine().set_step(step);
}

ToyOptions options(const char* policy, int micro_batches, StateFormat state = StateFormat::fp32) {
  ToyOptions o = toy(policy);
  o.frozen_ends = true;
  o.micro_batches = micro_batches;
  o.offload.state = state;
  o.offload.subgroup_size = 2048;
  o.offload.seed = 5;
  return o;
}

/// One rank that has taken so many steps of all micro-batches.
struct One {
  explicit One(const ToyOptions& o, int steps) : trainer(o) { train(0, steps); }
  void train(int from, int to) {
    for (int s = from; s < to; ++s) trainer.step(s, result);
  }
  ToyTrainer trainer;
  ToyResult result;
};

class StateOfRanks : public ::testing::TestWithParam<const char*> {};

TEST_P(StateOfRanks, IsReadAlikeByAll) {
  for (const StateFormat state : state_formats) {
    for (const int ranks : {2, 3}) {
      const ToyOptions o = options(GetParam(), ranks, state);
      One one(o, 2);
      const Values expected = all_values(one.trainer);
      const std::string digest = one.trainer.engine().state_digest();
      with_toy_group(o, ranks, [&](ToyTrainer& t, int rank) {
        ToyResult result;
        for (int s = 0; s < 2; ++s) t.step(s, result);
        EXPECT_TRUE(all_values(t) == expected) << "rank " << rank << " of " << ranks;
        EXPECT_EQ(t.engine().state_digest(), digest) << "rank " << rank << " of " << ranks;
      });
    }
  }
}

TEST_P(StateOfRanks, GoesOnFromWhatAllHaveWritten) {
  int ranks = 2;
  for (const StateFormat state : state_formats) {
    const ToyOptions o = options(GetParam(), 6, state);
    One one(o, 2);
    const Values written = all_values(one.trainer);
    one.train(2, 4);
    const std::string expected = one.trainer.engine().state_digest();
    with_toy_group(o, ranks, [&](ToyTrainer& t, int rank) {
      ToyResult result;
      t.step(7, result);  // leaves weights on the devices that are then no longer so
      write_all(t, written, 2);
      EXPECT_TRUE(all_values(t) == written) << "rank " << rank << " of " << ranks;
      for (int s = 2; s < 4; ++s) t.step(s, result);
      EXPECT_EQ(t.engine().state_digest(), expected) << "rank " << rank << " of " << ranks;
    });
    ranks = 5 - ranks;
  }
}

// Moments are written by themselves, too: of what is frozen they stay zero.
TEST_P(StateOfRanks, TakesMomentsOfWhatIsTrainedAlone) {
  const ToyOptions o = options(GetParam(), 2);
  with_toy_group(o, 2, [&](ToyTrainer& t, int) {
    for (const Parameter* p : t.layout().owned_parameters()) {
      std::vector<float> values(static_cast<std::size_t>(p->count), 0.25F);
      t.engine().write(*p, StateArray::m, values);
      std::fill(values.begin(), values.end(), -1.0F);
      t.engine().read(*p, StateArray::m, values);
      const std::vector<float> expected(values.size(), p->options.trainable ? 0.25F : 0.0F);
      EXPECT_EQ(values, expected) << p->full_name;
    }
  });
}

TEST_P(StateOfRanks, IsInitializedInPieces) {
  ToyOptions o = toy(GetParam());
  o.layers = 1;
  o.width = (std::int64_t{1} << 20) + 70'001;  // as long as more than one piece
  o.micro_batches = 2;
  const auto initialize = [](ToyTrainer& t) {
    t.engine().initialize([](const Parameter& p, std::int64_t first, std::span<float> values) {
      const auto key = static_cast<std::uint64_t>(p.count);
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = testing::noise(key, static_cast<std::uint64_t>(first) + i);
      }
    });
  };
  One one(o, 1);
  initialize(one.trainer);
  const std::string expected = one.trainer.engine().state_digest();
  with_toy_group(o, 2, [&](ToyTrainer& t, int rank) {
    ToyResult result;
    t.step(0, result);
    initialize(t);
    EXPECT_EQ(t.engine().state_digest(), expected) << "rank " << rank;
  });
}

/// Point at which a step is dropped: so many layers into its forward, or into its backward.
struct Point {
  int forward = 0;
  int backward = 0;
};

void abort_at(ToyTrainer& t, const Point& point) {
  const int layers = t.layout().layer_count();
  t.begin_step();
  for (int l = 0; l < std::min(point.forward, layers); ++l) t.forward(l);
  for (int i = 0; i < std::min(point.backward, layers); ++i) t.backward(layers - 1 - i, 9, 0);
  t.engine().abort_step();
}

TEST_P(StateOfRanks, IsAsBeforeAStepThatAllDrop) {
  for (const int ranks : {2, 3}) {
    const ToyOptions o = options(GetParam(), ranks);
    One one(o, 1);
    const std::string before = one.trainer.engine().state_digest();
    one.train(1, 3);
    const std::string after = one.trainer.engine().state_digest();
    with_toy_group(o, ranks, [&](ToyTrainer& t, int rank) {
      ToyResult result;
      t.step(0, result);
      for (const Point point : {Point{0, 0}, Point{2, 0}, Point{100, 0}, Point{100, 1}, Point{100, 3}, Point{100, 100}})
        abort_at(t, point);
      EXPECT_EQ(t.engine().state_digest(), before) << "rank " << rank << " of " << ranks;
      for (int s = 1; s < 3; ++s) t.step(s, result);
      EXPECT_EQ(t.engine().state_digest(), after) << "rank " << rank << " of " << ranks;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, StateOfRanks,
                         ::testing::Values("device", "host", "interleave:2,resident=0.4", "stream"));

}  // namespace
}  // namespace tandem
