// Checkpoints of a group: the bytes of one rank's, written by the first, read by any number; and what becomes of all
// where the first cannot write.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "io/checkpoint.hpp"
#include "offload/engine/state_io.hpp"
#include "tests/offload/ranks/toy_group.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using testing::with_toy_group;
using SaveScope = OffloadEngine::SaveScope;

std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string state_of(const std::filesystem::path& checkpoint) { return bytes_of(checkpoint / "state.safetensors"); }

/// Six micro-batches a step, however many ranks share them.
ToyOptions options(const std::string& policy, StateFormat state = StateFormat::fp32) {
  ToyOptions o = toy(policy);
  o.micro_batches = 6;
  o.frozen_ends = true;
  o.offload.state = state;
  o.offload.subgroup_size = 2048;
  return o;
}

using Body = std::function<void(ToyTrainer&, int rank)>;

/// One rank, too.
void with_ranks(const ToyOptions& o, int ranks, const Body& body) {
  if (ranks > 1) return with_toy_group(o, ranks, body);
  ToyTrainer t(o);
  body(t, 0);
}

void train(ToyTrainer& t, int from, int to) {
  ToyResult result;
  for (int s = from; s < to; ++s) t.step(s, result);
}

class SavingRanks : public ::testing::Test {
 protected:
  SavingRanks()
      : folder_(std::filesystem::temp_directory_path() / ("tandem-ranks-save-" + std::to_string(::getpid()))) {}
  ~SavingRanks() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path saved_by(int ranks, const ToyOptions& o, int steps) {
    const auto folder = folder_ / ("by-" + std::to_string(ranks));
    std::filesystem::path written;
    with_ranks(o, ranks, [&](ToyTrainer& t, int rank) {
      train(t, 0, steps);
      const std::filesystem::path path = t.engine().save(folder);
      EXPECT_EQ(path, folder / ("step-0000000" + std::to_string(steps))) << "rank " << rank;
      if (rank == 0) written = path;
    });
    return written;
  }

  std::filesystem::path folder_;
};

TEST_F(SavingRanks, WritesTheBytesThatOneRankWritesAndAnyNumberGoesOnFromThem) {
  for (const StateFormat state : state_formats) {
    const auto one = saved_by(1, options("host", state), 2);
    std::string expected;
    with_ranks(options("host", state), 1, [&](ToyTrainer& t, int) {
      train(t, 0, 4);
      expected = t.engine().state_digest();
    });
    for (const int ranks : {2, 3}) {
      const auto several = saved_by(ranks, options("interleave:2,resident=0.4", state), 2);
      EXPECT_TRUE(state_of(several) == state_of(one)) << ranks << " ranks, " << name_of(state);
      EXPECT_EQ(Checkpoint(several).manifest().state_digest, Checkpoint(one).manifest().state_digest);
      for (const int readers : {1, 2, 3}) {
        with_ranks(options(readers == 2 ? "device" : "stream", state), readers, [&](ToyTrainer& t, int rank) {
          train(t, 5, 6);  // other weights, all of them replaced
          EXPECT_EQ(t.engine().load(several.parent_path()), several);
          EXPECT_EQ(t.engine().step(), 2);
          train(t, 2, 4);
          EXPECT_EQ(t.engine().state_digest(), expected) << several << " to " << readers << ", rank " << rank;
        });
      }
    }
    std::filesystem::remove_all(folder_);
  }
}

/// The files of this process end after so many bytes while it lives.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_{};
};

/// Runs a save that fails on every rank; after it training goes on, and the next save is as if the failed one had not
/// been.
void expect_refusal(const std::filesystem::path& folder, const std::function<void(OffloadEngine&, int rank)>& save) {
  const ToyOptions o = options("interleave:2");
  std::string expected;
  with_ranks(o, 1, [&](ToyTrainer& t, int) {
    train(t, 0, 3);
    expected = t.engine().state_digest();
  });
  with_ranks(o, 3, [&](ToyTrainer& t, int rank) {
    train(t, 0, 2);
    save(t.engine(), rank);
    train(t, 2, 3);
    EXPECT_EQ(t.engine().state_digest(), expected) << "rank " << rank;
    EXPECT_EQ(Checkpoint(t.engine().save(folder / "good")).manifest().state_digest, expected);
  });
}

TEST_F(SavingRanks, WhereTheFirstCannotWriteAllAreToldAndGoOn) {
  std::filesystem::create_directories(folder_);
  std::ofstream(folder_ / "a file") << "x";
  expect_refusal(folder_, [&](OffloadEngine& engine, int rank) {
    try {
      engine.save(folder_ / "a file");
      ADD_FAILURE() << "rank " << rank << " has written into a file";
    } catch (const WriteError& error) {
      const bool told = std::string(error.what()).find("rank 0") != std::string::npos;
      EXPECT_EQ(told, rank > 0) << error.what();
    }
  });
}

TEST_F(SavingRanks, WhereTheDiskIsFullHalfWayAllAreToldAndGoOn) {
  expect_refusal(folder_, [&](OffloadEngine& engine, int rank) {
    std::optional<FullDisk> full;
    if (rank == 0) full.emplace(100'000);
    EXPECT_THROW(engine.save(folder_ / "full"), WriteError) << "rank " << rank;
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "full"));
}

TEST_F(SavingRanks, WhereAFileOfTheCallersIsMissingAllAreToldAndGoOn) {
  expect_refusal(folder_, [&](OffloadEngine& engine, int rank) {
    const auto save = [&] { engine.save(folder_, {folder_ / "missing"}); };
    if (rank == 0) {
      EXPECT_THROW(save(), InputError);
    } else {
      EXPECT_THROW(save(), WriteError);
    }
  });
}

/// A rank's part in a save that goes on beside its steps: the first writes what the others only read.
class SaveBeside {
 public:
  SaveBeside(ToyTrainer& t, int rank, std::filesystem::path root, std::int64_t step)
      : scope_(t.engine().begin_save()), root_(std::move(root)) {
    manifest_.model_config = "{}";
    manifest_.step = manifest_.adam_step = step;
    manifest_.optimizer = optimizer_of(t.engine().plan().state);
    manifest_.parameters = checkpoint_parameters(t.layout());
    thread_ = std::thread([this, &t, rank] {
      try {
        rank == 0 ? write(t.layout()) : read(t.layout());
      } catch (...) {
        failure_ = std::current_exception();
      }
      scope_.reset();
    });
  }
  ~SaveBeside() {
    if (thread_.joinable()) thread_.join();
  }
  SaveBeside(const SaveBeside&) = delete;
  SaveBeside& operator=(const SaveBeside&) = delete;

  std::filesystem::path finish() {
    thread_.join();
    if (failure_) std::rethrow_exception(failure_);
    return written_;
  }

 private:
  static constexpr std::int64_t piece = 1500;

  void write(const ParameterLayout& layout) {
    std::vector<float> buffer(piece);
    int reads = 0;
    const StateReader reader = state_reader(*scope_, layout);
    const StateReader slow = [&](std::size_t index, StateArray array, std::int64_t first, std::span<float> values) {
      if (reads++ % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      return reader(index, array, first, values);
    };
    written_ = write_checkpoint(root_, {.manifest = &manifest_, .read = slow, .buffer = buffer});
  }

  void read(const ParameterLayout& layout) {
    std::vector<float> buffer(piece);
    for (const Parameter* p : layout.owned_parameters()) {
      for (const StateArray array : arrays_of(p->options.trainable, manifest_.optimizer)) {
        for (std::int64_t first = 0; first < p->count; first += piece) {
          const auto count = static_cast<std::size_t>(std::min(piece, p->count - first));
          scope_->read(*p, array, first, std::span(buffer).first(count));
        }
      }
    }
  }

  std::optional<SaveScope> scope_;
  std::filesystem::path root_;
  Manifest manifest_;
  std::filesystem::path written_;
  std::exception_ptr failure_;
  std::thread thread_;
};

/// State of one rank after each of so many steps, saved while it stands still.
std::vector<std::string> standing_saves(const ToyOptions& o, const std::filesystem::path& folder) {
  std::vector<std::string> saves;
  ToyTrainer t(o);
  for (int s = 0; s < o.steps; ++s) {
    train(t, s, s + 1);
    saves.push_back(state_of(t.engine().save(folder)));
  }
  return saves;
}

// A save begins behind each step, and only the next one waits for it.
TEST_F(SavingRanks, BesideTheirStepsWritesTheBytesOfASaveThatStandsStill) {
  int ranks = 2;
  for (const char* policy : {"device", "host", "stream", "interleave:2,resident=0.4"}) {
    for (const StateFormat state : {StateFormat::fp32, StateFormat::byte_moments}) {
      ToyOptions o = options(policy, state);
      const std::vector<std::string> expected = standing_saves(o, folder_ / "standing");
      const std::string digest = testing::train_toy(o).digest;
      with_ranks(o, ranks, [&](ToyTrainer& t, int rank) {
        std::optional<SaveBeside> save;
        const auto check = [&](int step) {
          const auto written = save->finish();
          if (rank > 0) return;
          EXPECT_TRUE(state_of(written) == expected.at(static_cast<std::size_t>(step))) << policy << ", " << step;
        };
        for (int s = 0; s < o.steps; ++s) {
          train(t, s, s + 1);
          if (save) check(s - 1);
          save.emplace(t, rank, folder_ / "beside", s + 1);
        }
        check(o.steps - 1);
        EXPECT_EQ(t.engine().state_digest(), digest) << policy << ", rank " << rank;
      });
      std::filesystem::remove_all(folder_);
      ranks = 5 - ranks;
    }
  }
}

// A scope that nobody reads to its end holds nobody up.
TEST_F(SavingRanks, AScopeThatAllLetGoHalfReadIsForgotten) {
  const ToyOptions o = options("host");
  const std::string digest = testing::train_toy(o).digest;
  with_ranks(o, 3, [&](ToyTrainer& t, int rank) {
    for (int s = 0; s < o.steps; ++s) {
      {
        SaveScope scope = t.engine().begin_save();
        std::vector<float> some(700);
        const Parameter& first = *t.layout().owned_parameters().front();
        if (s > 0) scope.read(first, StateArray::master, 0, some);
      }
      train(t, s, s + 1);
    }
    EXPECT_EQ(t.engine().state_digest(), digest) << "rank " << rank;
  });
}

}  // namespace
}  // namespace tandem
