// Bytes that ranks in several processes say to each other while they save, or tell the digest: the state of other ranks
// goes to rank 0 once, and to nobody else.
#include <gtest/gtest.h>
#include <unistd.h>

#include <barrier>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "offload/state/state_of_ranks.hpp"
#include "tests/comm/gloo/connect_by_gloo.hpp"
#include "tests/comm/processes/relay.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;

/// Bytes of masters and moments that are not rank 0's.
double bytes_of_others(const ParameterLayout& layout, int ranks) {
  double values = 0.0;
  for (const Parameter* p : layout.owned_parameters()) {
    for (const OwnedPart& part : parts_of(layout, *p, 0, p->count, ranks)) {
      if (part.rank > 0) values += static_cast<double>(part.count) * (p->options.trainable ? 3.0 : 1.0);
    }
  }
  return values * sizeof(float);
}

/// Bytes to rank 0 and from it that `call` of all ranks takes.
struct Said {
  double there = 0.0;
  double back = 0.0;
};

Said said_in(const ToyOptions& o, int ranks, const std::function<void(OffloadEngine&)>& call) {
  testing::Relay relay;
  const testing::Connect connect = [&](std::span<Device* const> devices, double watchdog_seconds) {
    return testing::connect_by_gloo(
        devices, watchdog_seconds,
        [&](RendezvousOptions& options) {
          if (options.rank.index > 0) options.port = relay.port();
        },
        [&](int port) { relay.pass_on_to(port); });
  };
  Said said;
  std::barrier all(ranks);
  const ToyOptions of_rank = testing::share_of(o, ranks);
  testing::expect_no_failure(testing::run_toy_group(
      ranks, [&](int) { return of_rank; },
      [&](ToyTrainer& t, int rank) {
        ToyResult result;
        t.step(0, result);
        t.engine().wait();
        all.arrive_and_wait();
        if (rank == 0) said = {static_cast<double>(relay.bytes_there()), static_cast<double>(relay.bytes_back())};
        all.arrive_and_wait();
        call(t.engine());
        all.arrive_and_wait();
        if (rank > 0) return;
        said = {static_cast<double>(relay.bytes_there()) - said.there,
                static_cast<double>(relay.bytes_back()) - said.back};
      },
      connect));
  return said;
}

class RanksOverGloo : public ::testing::TestWithParam<int> {
 protected:
  void expect_once(const std::function<void(OffloadEngine&)>& call) const {
    ToyOptions o = toy("host");
    o.width = 100'000;
    o.micro_batches = GetParam();
    const double state = bytes_of_others(testing::toy_layout(o), GetParam());
    const Said said = said_in(o, GetParam(), call);
    EXPECT_GE(said.there, state);
    EXPECT_LE(said.there, 1.05 * state) << "names of calls, and signs of life";
    EXPECT_LE(said.back, 0.05 * state) << "that calls have met";
  }
};

TEST_P(RanksOverGloo, SendEachByteOfACheckpointOnce) {
  const auto folder = std::filesystem::temp_directory_path() / ("tandem-bytes-" + std::to_string(::getpid()));
  expect_once([&](OffloadEngine& engine) { engine.save(folder); });
  std::filesystem::remove_all(folder);
}

TEST_P(RanksOverGloo, SendEachByteOfADigestOnce) {
  expect_once([](OffloadEngine& engine) { EXPECT_EQ(engine.state_digest().size(), 32U); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, RanksOverGloo, ::testing::Values(2, 3),
                         [](const auto& each) { return std::to_string(each.param); });

}  // namespace
}  // namespace tandem
