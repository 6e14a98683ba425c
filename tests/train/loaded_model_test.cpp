// Evaluation and logits on a device that stands still end.
#include "train/runtime/loaded_model.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "cpu_ops/device/host_device.hpp"

namespace tandem {
namespace {

using namespace literals;  // NOLINT: sizes
using namespace std::chrono_literals;

/// A small model, all of it on a device whose compute stream can be made to stand still. After a while it goes on
/// by itself: whoever waits for it without an end shows as one that noticed nothing.
class LoadedModelTest : public ::testing::Test {
 protected:
  LoadedModelTest() {
    std::ofstream(text_) << std::string(256, 'a');
    TrainConfig config;
    config.model = "tiny-llama";
    config.device = "host";
    config.threads = config.update_threads = 1;
    config.seq_len = 64;
    config.policy = parse_policy("device");
    config.device_memory = 1_GiB;
    const ModelConfig model = builtin_model(config.model);
    setup_ = set_up_run(config, model, {.training = false, .predicts = false});
    setup_.options.watchdog_seconds = 0.5;
    auto faults = std::make_shared<HostFaults>();
    faults->before_task = [this](std::string_view stream, std::string_view) {
      if (stream != "compute" || !stands_still_) return;
      if (told_.wait_for(20s) == std::future_status::timeout) stands_still_ = false;
    };
    setup_.device = std::make_unique<HostDevice>(
        HostDeviceOptions{.capacity = 1_GiB, .threads = 1, .update_threads = 1, .faults = faults});
    source_ = std::make_unique<TokenSource>(std::vector{text_},
                                            TokenSourceOptions{.vocabulary = model.vocabulary, .token_width{}});
    loaded_ = std::make_unique<LoadedModel>(setup_, nullptr);
    loaded_->engine().initialize([](const Parameter&, std::int64_t, std::span<float>) {});
  }
  ~LoadedModelTest() override {
    go_on_.set_value();
    loaded_.reset();
    std::filesystem::remove(text_);
  }

  void expect_stall(const std::function<void()>& call) {
    stands_still_ = true;
    try {
      call();
      ADD_FAILURE() << "nobody noticed";
    } catch (const StalledError& error) {
      EXPECT_NE(std::string(error.what()).find("no progress"), std::string::npos) << error.what();
    }
  }

  const std::filesystem::path text_ =
      std::filesystem::path(::testing::TempDir()) / ("tandem_loaded_" + std::to_string(::getpid()) + ".txt");
  std::promise<void> go_on_;
  const std::shared_future<void> told_ = go_on_.get_future().share();
  std::atomic<bool> stands_still_{false};
  RunSetup setup_;
  std::unique_ptr<TokenSource> source_;
  std::unique_ptr<LoadedModel> loaded_;
};

TEST_F(LoadedModelTest, AnEvaluationOnADeviceThatStandsStillEnds) {
  EXPECT_TRUE(loaded_->evaluate(*source_));
  expect_stall([&] { loaded_->evaluate(*source_); });
}

TEST_F(LoadedModelTest, LogitsOfADeviceThatStandsStillAreNotWaitedForWithoutEnd) {
  std::vector<float> logits(static_cast<std::size_t>(setup_.model_config.vocabulary));
  const std::vector<std::int32_t> prompt{1, 2, 3};
  loaded_->logits(prompt, 2, logits);
  expect_stall([&] { loaded_->logits(prompt, 2, logits); });
}

}  // namespace
}  // namespace tandem
