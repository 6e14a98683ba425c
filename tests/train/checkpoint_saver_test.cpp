// Saving beside training: its rests, its end and its failures.
#include "train/saving/checkpoint_saver.hpp"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "api/open_device.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "tests/train/no_threads.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

/// Files of this process have room for this much.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    ignored_ = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, ignored_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
  void (*ignored_)(int) = nullptr;
};

/// An engine that could save 12 MB, on a clock on which each look takes a second: a rest follows each write, and lasts
/// until somebody ends it.
class SaverTest : public ::testing::Test {
 protected:
  SaverTest() : device_(open_device("host", {.memory = std::size_t{1} << 26, .threads = 1, .update_threads = 1})) {
    layout_.add_layer("h").add("w", {1024, 1024});
    OffloadOptions options;
    options.policy = parse_policy("host");
    engine_ =
        std::make_unique<OffloadEngine>(*device_, layout_, options, make_plan(layout_, options, profile_of(*device_)));
    engine_->initialize([](const Parameter&, std::int64_t, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000) / 1000.0F;
    });
  }
  ~SaverTest() override { fs::remove_all(root_); }

  SaverOptions options(bool copies) {
    SaverOptions o{.root = root_, .copies = copies};
    o.clock = {[this] { return static_cast<double>(++seconds_); },
               [this](std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double) {
                 if (rests_++ == 0) rests_now_.set_value();
                 if (rests_ > rests_that_end_) changed.wait(lock);
               }};
    return o;
  }
  std::unique_ptr<CheckpointSaver> saver(const SaverOptions& options) {
    auto saver = std::make_unique<CheckpointSaver>(std::vector{engine_.get()}, options,
                                                   [this](const std::string& text) { said_.push_back(text); });
    saver->note_step(1e6);
    return saver;
  }
  static Manifest manifest(std::int64_t step) {
    Manifest m;
    m.step = step;
    m.model_config = m.plan = "{}";
    return m;
  }
  void expect_saved(std::int64_t step) const {
    EXPECT_EQ(Checkpoint(root_ / checkpoint_name(step)).state_digest(), engine_->state_digest()) << step;
  }

  const fs::path root_ = fs::path(::testing::TempDir()) / ("tandem_saver_" + std::to_string(::getpid()));
  std::unique_ptr<Device> device_;
  ParameterLayout layout_;
  std::unique_ptr<OffloadEngine> engine_;
  std::vector<std::string> said_;
  std::atomic<int> seconds_{0};
  std::atomic<int> rests_{0};
  int rests_that_end_ = 0;
  std::promise<void> rests_now_;
};

TEST_F(SaverTest, RestsBesideStepsUntilSomebodyWaitsForIt) {
  const auto saver = this->saver(options(true));
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  rests_now_.get_future().wait();
  saver->note_step(1e6);  // time enough: it rests on
  EXPECT_TRUE(saver->poll());
  ASSERT_TRUE(saver->progress());
  EXPECT_LT(*saver->progress(), 0.5);
  EXPECT_FALSE(fs::exists(root_ / checkpoint_name(3)));
  EXPECT_TRUE(saver->finish(true));  // and does not rest again: nobody would end that
  EXPECT_EQ(said_.size(), 1U);
  expect_saved(3);
}

TEST_F(SaverTest, TheNextSaveEndsTheRestsOfTheOneBefore) {
  const auto saver = this->saver(options(true));
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  rests_now_.get_future().wait();
  EXPECT_TRUE(saver->save(manifest(4), 1000));
  expect_saved(3);
  EXPECT_TRUE(saver->finish(true));
  expect_saved(4);
}

TEST_F(SaverTest, ADiskThatTakesNothingIsReportedAndNotWaitedForInSilence) {
  static std::atomic<int> reported{0};
  set_stall_handler([](const StalledError&) { ++reported; });
  SaverOptions options = this->options(false);
  options.watchdog_seconds = 0.5;
  std::promise<void> disk;  // asked at the end of a save, in the place of a disk that takes nothing any more
  options.predict = [taken = disk.get_future().share()](const Plan&, double) -> std::optional<SaveSlowdown> {
    taken.wait();
    return {};
  };
  auto saver = this->saver(options);
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  try {
    saver->save(manifest(4), 1000);
    ADD_FAILURE() << "the stall went unnoticed";
  } catch (const StalledError& error) {
    EXPECT_NE(std::string(error.what()).find("checkpoint of step 3: nothing written"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(reported, 1);
  // At the end of a run, too, and then it is waited for: its thread uses the saver's memory.
  set_stall_handler([](const StalledError&) { ++reported; });
  std::thread end([&] { saver.reset(); });
  while (reported < 2) std::this_thread::yield();
  disk.set_value();
  end.join();
  set_stall_handler(nullptr);
  expect_saved(3);
}

TEST_F(SaverTest, TheEndOfARunEndsTheRests) {
  auto saver = this->saver(options(true));
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  rests_now_.get_future().wait();
  saver.reset();
  expect_saved(3);
}

TEST_F(SaverTest, DoesNotRestOnceASignalHasCome) {
  SaverOptions urgent = options(true);
  std::atomic<int> asked{0};
  urgent.urgent = [&] { return asked++ > 0; };  // not yet when the save begins
  const auto saver = this->saver(urgent);
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  while (saver->progress()) std::this_thread::yield();
  EXPECT_EQ(rests_, 0);
  EXPECT_TRUE(saver->finish(true));
  expect_saved(3);
}

TEST_F(SaverTest, DoesNotRestWhereUpdatesWaitForIt) {
  const auto saver = this->saver(options(false));
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  while (saver->progress()) std::this_thread::yield();
  EXPECT_EQ(rests_, 0);
  EXPECT_TRUE(saver->poll());
  expect_saved(3);
}

// A copy would make whoever ends a run wait for longer. What is copied is written by the clock.
TEST_F(SaverTest, CopiesNothingWhereNoStepFollows) {
  SaverOptions options = this->options(true);
  std::atomic<bool> signal{false};
  options.urgent = [&] { return signal.load(); };
  const auto saver = this->saver(options);
  const int seconds = seconds_;
  EXPECT_TRUE(saver->save(manifest(3), 0));
  EXPECT_TRUE(saver->finish(true));
  expect_saved(3);
  signal = true;
  EXPECT_TRUE(saver->save(manifest(4), 1000));
  EXPECT_TRUE(saver->finish(true));
  EXPECT_EQ(seconds_, seconds);
  expect_saved(4);
  signal = false;
  EXPECT_TRUE(saver->save(manifest(5), 1000));
  EXPECT_TRUE(saver->finish(true));
  EXPECT_GT(seconds_, seconds);
  expect_saved(5);
}

TEST_F(SaverTest, WhereNoThreadCanBeHadThereIsNoSave) {
  const auto saver = this->saver(options(false));
  {
    const NoThreads none;
    EXPECT_THROW(saver->save(manifest(3), 1000), DeviceError);
  }
  EXPECT_FALSE(saver->progress());
  EXPECT_TRUE(saver->finish(true));
  EXPECT_TRUE(said_.empty()) << said_[0];
  engine_->wait();  // nothing waits for the state to be read
  EXPECT_TRUE(saver->save(manifest(4), 1000));
  EXPECT_TRUE(saver->finish(true));
  expect_saved(4);
}

TEST_F(SaverTest, AFullDiskIsReportedFromBetweenRests) {
  rests_that_end_ = 1000;
  const auto saver = this->saver(options(true));
  EXPECT_TRUE(saver->save(manifest(3), 1000));
  EXPECT_TRUE(saver->finish(true));
  const int rests_before = rests_;
  {
    const FullDisk full(1 << 20);
    EXPECT_TRUE(saver->save(manifest(4), 1000));
    while (saver->progress()) std::this_thread::yield();
    EXPECT_THROW(saver->poll(), WriteError);
  }
  EXPECT_GT(rests_, rests_before);
  expect_saved(3);
  EXPECT_FALSE(fs::exists(root_ / checkpoint_name(4)));
  EXPECT_TRUE(saver->save(manifest(5), 1000));
  EXPECT_TRUE(saver->finish(true));
  expect_saved(5);
}

}  // namespace
}  // namespace tandem
