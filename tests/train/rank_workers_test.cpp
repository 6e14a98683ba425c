// Devices that train one model together do as one device would.
#include "train/runtime/rank_workers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "cpu_ops/device/host_device.hpp"
#include "tests/train/no_threads.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using ::testing::HasSubstr;

constexpr std::int64_t length = 16;
constexpr std::int64_t micro_batches = 6;

/// The setup of a run on so many host devices, and the devices at work.
struct Team {
  explicit Team(int ranks) : setup(set_up(ranks)), workers(std::make_unique<RankWorkers>(setup, nullptr)) {
    workers->run([](LoadedModel& member, Rank) {
      member.engine().initialize([](const Parameter& p, std::int64_t first, std::span<float> values) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          const auto at = static_cast<std::size_t>(first) + i + static_cast<std::size_t>(p.count);
          values[i] = static_cast<float>(at * 7919 % 1009) / 20000.0F - 0.025F;
        }
      });
    });
  }

  static RunSetup set_up(int ranks) {
    TrainConfig config;
    config.model = "tiny-llama";
    config.device = "host";
    for (int rank = 1; rank < ranks; ++rank) config.device += ",host";
    config.threads = config.update_threads = 1;
    config.seq_len = length;
    config.micro_batch = 2;
    config.grad_accum = micro_batches;
    config.policy = parse_policy("interleave:2");
    config.device_memory = 64_MiB;
    RunSetup setup = set_up_run(config, builtin_model(config.model), {.predicts = false});
    setup.options.watchdog_seconds = 20.0;  // whoever hangs is told so
    for (RunSetup& peer : setup.peers) peer.options.watchdog_seconds = 20.0;
    return setup;
  }

  void begin_step(OffloadEngine& engine) const {
    engine.begin_step({.lr = 1e-3,
                       .max_grad_norm = 1.0,
                       .micro_batches = static_cast<int>(micro_batches) / workers->size(),
                       .gradient_scale = 1.0});
  }

  /// Gradients of the micro-batches are of sizes so different that the order of their sum shows. Returns the losses, in
  /// the order of micro-batches.
  std::vector<float> step() {
    for (std::int64_t micro = 0; micro < micro_batches; ++micro) {
      const HostBatch batch = workers->batch(micro);
      for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
        batch.tokens[i] = static_cast<std::int32_t>((static_cast<std::size_t>(micro) * 31 + i * 7) % 251);
        batch.targets[i] = static_cast<std::int32_t>((static_cast<std::size_t>(micro) * 17 + i * 5) % 251);
      }
    }
    const auto scale_of = [](std::int64_t micro) { return std::ldexp(1.0F, static_cast<int>(micro * 7 % 6) * 4 - 18); };
    workers->run([&](LoadedModel& member, Rank rank) {
      begin_step(member.engine());
      for (std::int64_t i = 0; i < micro_batches / rank.count; ++i) {
        member.train(static_cast<std::size_t>(i), 1, member.engine(), scale_of(i * rank.count + rank.index));
      }
      static_cast<void>(member.engine().end_step());
      member.wait_for_losses();
    });
    std::vector<float> losses;
    for (std::int64_t micro = 0; micro < micro_batches; ++micro) {
      const auto of_micro = workers->batch(micro).losses;
      losses.insert(losses.end(), of_micro.begin(), of_micro.end());
    }
    return losses;
  }

  RunSetup setup;
  std::unique_ptr<RankWorkers> workers;
};

/// A text of so many windows.
class Text {
 public:
  explicit Text(std::int64_t windows) {
    std::string text;
    for (std::int64_t i = 0; i < windows * length + 1; ++i) text += static_cast<char>('a' + i * i * 5 % 23);
    std::ofstream(path_) << text;
    source_ = std::make_unique<TokenSource>(std::vector{path_}, TokenSourceOptions{.vocabulary = 256, .token_width{}});
  }
  ~Text() { std::filesystem::remove(path_); }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  const TokenSource& source() const { return *source_; }

 private:
  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) / ("tandem_rank_workers_" + std::to_string(::getpid()) + ".txt");
  std::unique_ptr<TokenSource> source_;
};

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(RankWorkers, MicroBatchesAreDealtInTurn) {
  for (const int ranks : {1, 2, 3}) {
    Team run(ranks);
    ASSERT_EQ(run.workers->size(), ranks);
    for (std::int64_t micro = 0; micro < micro_batches; ++micro) {
      run.workers->batch(micro).tokens[0] = static_cast<std::int32_t>(micro);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      for (std::int64_t i = 0; i < micro_batches / ranks; ++i) {
        EXPECT_EQ(run.workers->member(rank).batch(static_cast<std::size_t>(i)).tokens[0], i * ranks + rank) << ranks;
      }
    }
  }
}

TEST(RankWorkers, TrainsToTheLossesAndTheStateOfOneDevice) {
  Team one(1);
  const std::string before = one.workers->state_digest();
  const std::vector<float> first = one.step();
  const std::vector<float> second = one.step();
  const std::string after = one.workers->state_digest();
  EXPECT_NE(first, second);
  EXPECT_NE(before, after);
  for (const int ranks : {2, 3, 6}) {
    Team run(ranks);
    EXPECT_EQ(run.workers->state_digest(), before) << ranks;
    EXPECT_EQ(run.step(), first) << ranks;
    EXPECT_EQ(run.step(), second) << ranks;
    run.workers->wait();
    EXPECT_EQ(run.workers->state_digest(), after) << ranks;
  }
}

TEST(RankWorkers, CountsWhatAllRanksDo) {
  Team one(1);
  one.step();
  one.workers->wait();
  const EngineCounters of_one = one.workers->totals().counters;
  EXPECT_EQ(of_one.bytes_from_peers, 0U);
  for (const int ranks : {2, 3}) {
    Team run(ranks);
    run.step();
    run.workers->wait();
    const EngineCounters all = run.workers->totals().counters;
    const auto updated = [](const EngineCounters& c) {
      return c.parameters_updated_cpu + c.parameters_updated_streamed + c.parameters_updated_resident;
    };
    EXPECT_EQ(updated(all), static_cast<std::uint64_t>(run.setup.layout.parameter_count())) << ranks;
    EXPECT_EQ(updated(all), updated(of_one)) << ranks;
    EngineCounters sum;
    for (const OffloadEngine* engine : run.workers->engines()) {
      const EngineCounters c = engine->counters();
      EXPECT_LT(updated(c), updated(all));
      EXPECT_GT(c.bytes_from_peers, 0U);
      sum.bytes_host_to_device += c.bytes_host_to_device;
      sum.bytes_device_to_host += c.bytes_device_to_host;
      sum.bytes_from_peers += c.bytes_from_peers;
      sum.parameters_updated_cpu += c.parameters_updated_cpu;
      sum.parameters_updated_streamed += c.parameters_updated_streamed;
      sum.parameters_updated_resident += c.parameters_updated_resident;
      sum.dram_bytes += c.dram_bytes;
    }
    EXPECT_EQ(all.bytes_host_to_device, sum.bytes_host_to_device);
    EXPECT_EQ(all.bytes_device_to_host, sum.bytes_device_to_host);
    EXPECT_EQ(all.bytes_from_peers, sum.bytes_from_peers);
    EXPECT_EQ(all.parameters_updated_cpu, sum.parameters_updated_cpu);
    EXPECT_EQ(all.parameters_updated_streamed, sum.parameters_updated_streamed);
    EXPECT_EQ(all.parameters_updated_resident, sum.parameters_updated_resident);
    EXPECT_EQ(all.dram_bytes, sum.dram_bytes);
  }
}

// Two windows a pass and rank: what is left for the last pass fills some ranks, one in part, or none.
TEST(RankWorkers, EvaluatesAllWindowsToTheLossOfOneDevice) {
  Team one(1);
  Team two(2);
  Team three(3);
  for (const std::int64_t windows : {1, 2, 3, 5, 7, 12, 13}) {
    const Text text(windows);
    const auto expected = one.workers->first().evaluate(text.source());
    ASSERT_TRUE(expected);
    ASSERT_EQ(expected->windows, windows);
    for (Team* team : {&one, &two, &three}) {
      const int ranks = team->workers->size();
      const auto result = team->workers->evaluate(text.source());
      ASSERT_TRUE(result) << ranks;
      EXPECT_EQ(result->loss, expected->loss) << windows << " windows, ranks: " << ranks;
      EXPECT_EQ(result->tokens, expected->tokens) << windows << " windows, ranks: " << ranks;
      EXPECT_EQ(result->windows, windows) << ranks;
    }
  }
}

TEST(RankWorkers, AnEvaluationThatIsBrokenOffLeavesAllRanksAtWork) {
  const Text text(13);
  Team one(1);
  const std::string digest = one.workers->state_digest();
  const double loss = one.workers->first().evaluate(text.source())->loss;
  for (const int ranks : {2, 3}) {
    Team run(ranks);
    for (const int passes : {0, 1, 2}) {
      int asked = 0;
      EXPECT_FALSE(run.workers->evaluate(text.source(), [&] { return asked++ == passes; })) << ranks;
      EXPECT_EQ(asked, passes + 1);
    }
    int asked = 0;
    const auto whole = run.workers->evaluate(text.source(), [&] { return asked++ > 13; });
    ASSERT_TRUE(whole);
    EXPECT_EQ(whole->loss, loss);
    EXPECT_EQ(asked, ranks == 2 ? 4 : 3);
    EXPECT_EQ(run.workers->state_digest(), digest);
  }
}

// The others wait in a call of the group, and hear of it there.
TEST(RankWorkers, ThrowsWhatARankFailedByItself) {
  for (const int ranks : {1, 2, 3}) {
    for (int failing = 0; failing < ranks; ++failing) {
      Team run(ranks);
      const auto body = [&](LoadedModel& member, Rank rank) {
        if (rank.index == failing) throw InputError("what one rank alone has met");
        static_cast<void>(member.engine().state_digest());
      };
      EXPECT_THROW(run.workers->run(body), InputError) << failing << " of " << ranks;
      if (ranks == 1) continue;
      const std::string word = message_of([&] { static_cast<void>(run.workers->state_digest()); });
      EXPECT_THAT(word, HasSubstr("rank " + std::to_string(failing) + " failed"));
      EXPECT_THAT(word, HasSubstr("what one rank alone has met"));
      EXPECT_THROW(static_cast<void>(run.workers->state_digest()), PeerError);
    }
  }
}

TEST(RankWorkers, EndsWhereARankFailsInsideAStep) {
  for (int failing = 0; failing < 3; ++failing) {
    for (const bool trained : {false, true}) {
      Team run(3);
      run.step();
      const auto body = [&](LoadedModel& member, Rank rank) {
        run.begin_step(member.engine());
        if (rank.index != failing || trained) member.train(0, 1, member.engine(), 1.0F);
        if (rank.index == failing) throw TrainingError("in the middle of a step");
        member.train(1, 1, member.engine(), 1.0F);
        static_cast<void>(member.engine().end_step());
      };
      EXPECT_THROW(run.workers->run(body), TrainingError) << failing;
      EXPECT_ANY_THROW(run.workers->run([&](LoadedModel& member, Rank) { run.begin_step(member.engine()); }))
          << failing;
      run.workers.reset();
    }
  }
}

// For activations, or for the engine, where the others wait for its.
TEST(RankWorkers, EndsWhereADeviceOfOneRankHasTooLittle) {
  for (const std::size_t capacity : {64_KiB, 2_MiB}) {
    for (const std::size_t poor : {0U, 1U}) {
      RunSetup setup = Team::set_up(3);
      ASSERT_GT(setup.peers[poor].planned_device_bytes(), 3_MiB);
      setup.peers[poor].device =
          std::make_unique<HostDevice>(HostDeviceOptions{.capacity = capacity, .threads = 1, .update_threads = 1});
      const std::string why = message_of([&] { const RankWorkers workers(setup, nullptr); });
      EXPECT_THAT(why, ::testing::StartsWith("device memory is full")) << poor;
      EXPECT_THAT(why, HasSubstr(std::to_string(capacity) + " bytes")) << poor;
    }
  }
}

TEST(RankWorkers, EndsWhereThereIsNoThreadForARank) {
  RunSetup setup = Team::set_up(2);
  const NoThreads none;
  EXPECT_THROW(const RankWorkers workers(setup, nullptr), DeviceError);
}

}  // namespace
}  // namespace tandem
