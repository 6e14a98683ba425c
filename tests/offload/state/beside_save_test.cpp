// A save beside training, into files: what is written is the state between two steps, whatever the steps do meanwhile,
// and they leave no trace in it, nor it in them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <ostream>
#include <thread>
#include <utility>

#include "offload/engine/state_io.hpp"
#include "tests/offload/toy/trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using SaveScope = OffloadEngine::SaveScope;

/// A checkpoint that a thread of its own writes through a scope, in small pieces and with pauses.
class SlowSave {
 public:
  SlowSave(ToyTrainer& trainer, std::filesystem::path root, std::int64_t step, int seed)
      : scope_(trainer.engine().begin_save()), root_(std::move(root)) {
    manifest_.model_config = "{}";
    manifest_.step = manifest_.adam_step = step;
    manifest_.optimizer = optimizer_of(trainer.engine().plan().state);
    manifest_.parameters = checkpoint_parameters(trainer.layout());
    thread_ = std::thread([this, &trainer, seed] { write(trainer.layout(), seed); });
  }
  ~SlowSave() {
    if (thread_.joinable()) thread_.join();
  }
  SlowSave(const SlowSave&) = delete;
  SlowSave& operator=(const SlowSave&) = delete;

  std::filesystem::path finish() {
    thread_.join();
    if (failure_) std::rethrow_exception(failure_);
    return written_;
  }

 private:
  void write(const ParameterLayout& layout, int seed) {
    std::vector<float> buffer(1500);
    int reads = 0;
    const StateReader reader = state_reader(*scope_, layout);
    const StateReader slow = [&](std::size_t index, StateArray array, std::int64_t first, std::span<float> values) {
      if (reads++ % 7 == seed % 7) std::this_thread::sleep_for(std::chrono::microseconds(300));
      return reader(index, array, first, values);
    };
    try {
      written_ = write_checkpoint(root_, {.manifest = &manifest_, .read = slow, .buffer = buffer});
    } catch (...) {
      failure_ = std::current_exception();
    }
    scope_.reset();
  }

  std::optional<SaveScope> scope_;
  std::filesystem::path root_;
  Manifest manifest_;
  std::filesystem::path written_;
  std::exception_ptr failure_;
  std::thread thread_;
};

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

struct Way {
  const char* policy;
  std::optional<int> resident;
  std::int64_t subgroup_size;
};

void PrintTo(const Way& w, std::ostream* out) {
  *out << w.policy << ", " << w.resident.value_or(-1) << " resident, subgroups of " << w.subgroup_size;
}

class SavingBeside : public ::testing::TestWithParam<Way> {
 protected:
  SavingBeside() : folder_(std::filesystem::temp_directory_path() / ("tandem-beside-" + std::to_string(::getpid()))) {}
  ~SavingBeside() override { std::filesystem::remove_all(folder_); }

  static ToyOptions options(StateFormat state) {
    ToyOptions o = toy(GetParam().policy);
    o.offload.state = state;
    if (std::string(GetParam().policy) != "device") o.offload.resident_layers = GetParam().resident;
    if (GetParam().subgroup_size > 0) o.offload.subgroup_size = GetParam().subgroup_size;
    o.frozen_ends = true;
    o.steps = 6;
    // Writes of updates arrive late: a save that did not wait for them would read the old values.
    o.device.faults = std::make_shared<HostFaults>();
    o.device.faults->before_task = [tasks = std::make_shared<std::atomic<int>>(0)](std::string_view stream,
                                                                                   std::string_view) {
      const bool late = stream == "device to host" || stream == "device update";
      if (late && (*tasks)++ % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    };
    return o;
  }

  /// A save begins behind each step, and only the next one waits for it.
  void expect_no_trace(const ToyOptions& o) {
    ToyTrainer plain(o);
    ToyTrainer saving(o);
    ToyResult expected, result;
    std::optional<SlowSave> save;
    std::filesystem::path standing;
    const auto check = [&] {
      const auto beside = save->finish();
      save.reset();
      EXPECT_TRUE(text_of(beside / "state.safetensors") == text_of(standing / "state.safetensors")) << beside;
      EXPECT_EQ(Checkpoint(beside).manifest().state_digest, Checkpoint(standing).manifest().state_digest);
    };
    for (int s = 0; s < o.steps; ++s) {
      plain.step(s, expected);
      saving.step(s, result);
      if (o.evaluate_between) saving.evaluate();
      if (save) check();
      save.emplace(saving, folder_ / "beside", s + 1, s);
      standing = folder_ / "standing" / ("step-0000000" + std::to_string(s + 1));
      write_standing(plain, s + 1);
    }
    check();
    EXPECT_EQ(saving.engine().state_digest(), plain.engine().state_digest());
    EXPECT_EQ(fmt::format("{}", fmt::join(result.norms, " ")), fmt::format("{}", fmt::join(expected.norms, " ")));
    EXPECT_EQ(result.losses, expected.losses);
    EXPECT_EQ(result.skipped, expected.skipped);
  }

  /// Out of an engine that stands still, whole arrays at a time.
  void write_standing(ToyTrainer& trainer, std::int64_t step) {
    Manifest m;
    m.model_config = "{}";
    m.step = m.adam_step = step;
    m.optimizer = optimizer_of(trainer.engine().plan().state);
    m.parameters = checkpoint_parameters(trainer.layout());
    std::vector<float> whole;
    const StateReader read = [&](std::size_t index, StateArray array, std::int64_t, std::span<float>) {
      const Parameter& p = *trainer.layout().owned_parameters().at(index);
      whole.resize(static_cast<std::size_t>(p.count));
      trainer.engine().read(p, array, whole);
      return std::span<const float>(whole);
    };
    write_checkpoint(folder_ / "standing", {.manifest = &m, .read = read});
  }

  std::filesystem::path folder_;
};

TEST_P(SavingBeside, WritesTheBytesOfAStandingSaveAndLeavesNoTrace) {
  for (const StateFormat state : state_formats) {
    expect_no_trace(options(state));
  }
}

TEST_P(SavingBeside, WithAccumulationEvaluationsAndASkippedStep) {
  ToyOptions o = options(StateFormat::split);
  o.micro_batches = 3;
  o.evaluate_between = true;
  o.nan_at_step = 2;
  expect_no_trace(o);
}

TEST_P(SavingBeside, WithUpdatesDuringBackward) {
  ToyOptions o = options(StateFormat::split);
  o.max_grad_norm = 0.0;
  o.offload.on_nonfinite = OnNonfinite::stop;
  expect_no_trace(o);
}

TEST_P(SavingBeside, WithoutOverlap) {
  ToyOptions o = options(StateFormat::fp32);
  o.offload.overlap = false;
  expect_no_trace(o);
}

INSTANTIATE_TEST_SUITE_P(Plans, SavingBeside,
                         ::testing::Values(Way{"device", std::nullopt, 0}, Way{"device", std::nullopt, 2048},
                                           Way{"host", 0, 2048}, Way{"host", 7, 1}, Way{"stream", 0, 4097},
                                           Way{"stream", 7, 1024}, Way{"interleave:2,resident=0.4", 0, 2048},
                                           Way{"static:0.5", 3, 3000}));

// Whoever would change state by other means waits until the save has read it.
TEST(SavingBesideTraining, HoldsUpChangesFromOutside) {
  ToyOptions o = toy("host");
  o.offload.subgroup_size = 1024;
  o.offload.spare_host_memory = std::size_t{1} << 20;
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  std::vector<float> values(13, 5.0F);
  const Parameter& bias = t.layout().parameter("first.bias");
  const auto change = {0, 1, 2, 3};
  for (const int which : change) {
    const std::string before = t.engine().state_digest();
    SlowSave save(t, std::filesystem::temp_directory_path() / ("tandem-beside-" + std::to_string(::getpid())), 1,
                  which);
    if (which == 0) t.engine().write(bias, StateArray::m, values);
    if (which == 1)
      t.engine().initialize([](const Parameter&, std::span<float> v) { std::fill(v.begin(), v.end(), 1.F); });
    if (which == 2) t.engine().adopt(t.engine().plan());
    if (which == 3) {
      t.engine().begin_step({});
      t.forward(0);
      t.engine().abort_step();
    }
    const auto written = save.finish();
    EXPECT_EQ(Checkpoint(written).manifest().state_digest, before) << which;
    std::filesystem::remove_all(written.parent_path());
  }
}

}  // namespace
}  // namespace tandem
