// A save beside training: what is read is the state between two steps, whatever the steps do meanwhile, and they do not
// notice but for their updates, which wait for what they overwrite.
#include <fmt/format.h>
#include <gmock/gmock.h>
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

#include "api/state_io.hpp"
#include "core/error.hpp"
#include "tests/offload/toy_trainer.hpp"

namespace tandem {
namespace {

using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using SaveScope = OffloadEngine::SaveScope;

constexpr StateArray arrays[] = {StateArray::master, StateArray::m, StateArray::v};

/// Calls call(parameter, array) for all that a save reads, in its order.
template <class Call>
void for_saved(const ParameterLayout& layout, Call call) {
  for (const Parameter* p : layout.owned_parameters()) {
    for (const StateArray array : arrays) {
      if (p->options.trainable || array == StateArray::master) call(*p, array);
    }
  }
}

void read_all(SaveScope& scope, const ParameterLayout& layout) {
  std::vector<float> values;
  for_saved(layout, [&](const Parameter& p, StateArray array) {
    values.resize(static_cast<std::size_t>(p.count));
    scope.read(p, array, 0, values);
  });
}

/// A checkpoint that a thread of its own writes through a scope, in small pieces and with pauses.
class SlowSave {
 public:
  SlowSave(ToyTrainer& trainer, std::filesystem::path root, std::int64_t step, int seed)
      : scope_(trainer.engine().begin_save()), root_(std::move(root)) {
    manifest_.model_config = "{}";
    manifest_.step = manifest_.adam_step = step;
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
    const StateReader slow = [&](std::size_t index, StatePart part, std::int64_t first, std::span<float> values) {
      if (reads++ % 7 == seed % 7) std::this_thread::sleep_for(std::chrono::microseconds(300));
      return reader(index, part, first, values);
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

std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

struct Way {
  const char* policy;
  int resident;
  std::int64_t subgroup_size;
};

void PrintTo(const Way& w, std::ostream* out) {
  *out << w.policy << ", " << w.resident << " resident, subgroups of " << w.subgroup_size;
}

class SavingBeside : public ::testing::TestWithParam<Way> {
 protected:
  SavingBeside() : folder_(std::filesystem::temp_directory_path() / ("tandem-beside-" + std::to_string(::getpid()))) {}
  ~SavingBeside() override { std::filesystem::remove_all(folder_); }

  static ToyOptions options(StateFormat state) {
    ToyOptions o = toy(GetParam().policy);
    o.offload.state = state;
    if (std::string(GetParam().policy) != "device") o.offload.resident_layers = GetParam().resident;
    o.offload.subgroup_size = GetParam().subgroup_size;
    o.frozen_ends = true;
    o.steps = 6;
    // What updates write arrives late: a save that did not wait for it would read what was there before.
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
      EXPECT_TRUE(bytes_of(beside / "state.safetensors") == bytes_of(standing / "state.safetensors")) << beside;
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
    m.parameters = checkpoint_parameters(trainer.layout());
    std::vector<float> whole;
    const StateReader read = [&](std::size_t index, StatePart part, std::int64_t, std::span<float>) {
      const Parameter& p = *trainer.layout().owned_parameters().at(index);
      whole.resize(static_cast<std::size_t>(p.count));
      trainer.engine().read(p, static_cast<StateArray>(part), whole);
      return std::span<const float>(whole);
    };
    write_checkpoint(folder_ / "standing", {.manifest = &m, .read = read});
  }

  std::filesystem::path folder_;
};

TEST_P(SavingBeside, WritesTheBytesOfAStandingSaveAndLeavesNoTrace) {
  for (const StateFormat state : {StateFormat::fp32, StateFormat::split, StateFormat::bf16_moments}) {
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
                         ::testing::Values(Way{"device", -1, 0}, Way{"device", -1, 2048}, Way{"host", 0, 2048},
                                           Way{"host", 7, 1}, Way{"stream", 0, 4097}, Way{"stream", 7, 1024},
                                           Way{"interleave:2,resident=0.4", 0, 2048}, Way{"static:0.5", 3, 3000}));

/// Every subgroup updated on the CPU, no layer shared, nothing but what the test does.
ToyOptions on_host() {
  ToyOptions o = toy("host");
  o.offload.subgroup_size = 1024;
  o.tied = false;
  return o;
}

std::uint64_t updated(ToyTrainer& t) { return t.engine().counters().parameters_updated_cpu; }

void wait_until_updated(ToyTrainer& t, std::uint64_t parameters) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);  // only ends a test that has failed
  while (updated(t) < parameters && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
}

// No thread reads but this one, so that a step which comes back has not waited for the save.
TEST(SaveScope, ForwardAndBackwardGoOnAndEachUpdateWaitsForItsOwnState) {
  ToyTrainer t(on_host());
  ToyResult result;
  t.step(0, result);
  t.engine().wait();
  const std::uint64_t first_step = updated(t);
  std::optional<SaveScope> scope(t.engine().begin_save());
  std::vector<std::vector<float>> before;
  ToyTrainer still(on_host());  // the same state in an engine that stands still
  ToyResult ignored;
  still.step(0, ignored);
  for_saved(t.layout(), [&](const Parameter& p, StateArray array) {
    before.emplace_back(static_cast<std::size_t>(p.count));
    still.engine().read(p, array, before.back());
  });
  t.step(1, result);
  EXPECT_EQ(updated(t), first_step);
  std::size_t at = 0;
  std::uint64_t expected = first_step;
  for_saved(t.layout(), [&](const Parameter& p, StateArray array) {
    std::vector<float> values(static_cast<std::size_t>(p.count));
    scope->read(p, array, 0, values);
    EXPECT_EQ(values, before[at++]) << p.full_name;
    if (!p.options.trainable || array != StateArray::v) return;
    expected += static_cast<std::uint64_t>(p.count);  // padding apart, its subgroups hold nothing else
    if (HasFailure()) return;
    wait_until_updated(t, expected);
    EXPECT_EQ(updated(t), expected) << p.full_name;
  });
  scope.reset();
  t.engine().wait();
  EXPECT_GT(t.engine().counters().save_wait_seconds, 0.0);
}

TEST(SaveScope, PartsOfAParameterLetGoOfTheirOwnSubgroups) {
  ToyTrainer t(on_host());
  ToyResult result;
  t.step(0, result);
  SaveScope scope = t.engine().begin_save();
  t.step(1, result);
  const Parameter& table = t.layout().parameter("first.table");  // 6307 values: seven subgroups
  std::vector<float> values(static_cast<std::size_t>(table.count));
  scope.read(table, StateArray::master, 0, values);
  scope.read(table, StateArray::m, 0, values);
  const std::uint64_t before = updated(t);
  for (std::int64_t first = 0; first < table.count; first += 512) {
    const std::int64_t count = std::min<std::int64_t>(512, table.count - first);
    scope.read(table, StateArray::v, first, std::span(values).first(static_cast<std::size_t>(count)));
    const std::int64_t end = first + count;
    const std::int64_t released = end == table.count ? end : end / 1024 * 1024;
    wait_until_updated(t, before + static_cast<std::uint64_t>(released));
    ASSERT_EQ(updated(t), before + static_cast<std::uint64_t>(released));
  }
}

TEST(SaveScope, ThatGoesUnreadLetsUpdatesGo) {
  for (const int read : {0, 1, 3}) {
    ToyOptions o = on_host();
    ToyTrainer t(o);
    ToyResult result;
    t.step(0, result);
    {
      SaveScope scope = t.engine().begin_save();
      t.step(1, result);
      std::vector<float> values(6307);
      const Parameter& table = t.layout().parameter("first.table");
      for (int i = 0; i < read; ++i) scope.read(table, arrays[i], 0, std::span(values).first(i < 2 ? 6307 : 100));
    }
    t.step(2, result);
    SaveScope again = t.engine().begin_save();
    read_all(again, t.layout());
    EXPECT_EQ(t.engine().state_digest(), testing::train_toy(o).digest);
  }
}

TEST(SaveScope, FailedReadingReachesTheReaderAndTrainingGoesOn) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  ToyOptions o = toy("device");
  const std::vector<float> expected = testing::train_toy(o).losses;
  auto armed = std::make_shared<std::atomic<bool>>(false);
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [armed](std::string_view stream, std::string_view) {
    if (*armed && stream == "state access") throw DeviceError("injected failure");
  };
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  *armed = true;
  {
    SaveScope scope = t.engine().begin_save();
    t.step(1, result);
    EXPECT_THROW(read_all(scope, t.layout()), DeviceError);
  }
  t.step(2, result);
  t.engine().wait();
  EXPECT_EQ(result.losses, expected);
}

TEST(SaveScope, HearsOfAFailureElsewhere) {
  if (!testing::takes_faults()) GTEST_SKIP() << "this device cannot be made to fail";
  ToyOptions o = toy("stream");
  auto armed = std::make_shared<std::atomic<bool>>(false);
  o.device.faults = std::make_shared<HostFaults>();
  o.device.faults->before_task = [armed](std::string_view stream, std::string_view) {
    if (*armed && stream == "device update") throw DeviceError("injected failure");
  };
  ToyTrainer t(o);
  ToyResult result;
  t.step(0, result);
  t.engine().wait();
  t.engine().begin_step({});
  for (int l = 0; l < t.layout().layer_count(); ++l) t.forward(l);
  for (int l = t.layout().layer_count() - 1; l >= 0; --l) t.backward(l, 1, 0);
  t.engine().end_step();
  *armed = true;
  SaveScope scope = t.engine().begin_save();
  EXPECT_THROW(
      {
        read_all(scope, t.layout());
        t.step(2, result);
        t.engine().wait();
      },
      DeviceError);
}

TEST(SaveScope, IsOneAtATimeAndReadInOrder) {
  ToyTrainer t(on_host());
  {
    SaveScope scope = t.engine().begin_save();
    EXPECT_THROW((void)t.engine().begin_save(), MisuseError);
    std::vector<float> values(13);
    EXPECT_THROW(scope.read(t.layout().parameter("first.bias"), StateArray::master, 0, values), MisuseError);
    const Parameter& table = t.layout().parameter("first.table");
    EXPECT_THROW(scope.read(table, StateArray::m, 0, values), MisuseError);
    EXPECT_THROW(scope.read(table, StateArray::master, 1, values), MisuseError);
    scope.read(table, StateArray::master, 0, values);
    EXPECT_THROW(scope.read(table, StateArray::master, 0, values), MisuseError);
    scope.read(table, StateArray::master, 13, values);
  }
  t.engine().begin_step({});
  EXPECT_THROW((void)t.engine().begin_save(), MisuseError);
  t.engine().abort_step();
}

// Whoever would change state by other means waits until the save has read it.
TEST(SaveScope, ChangesFromOutsideWait) {
  ToyOptions o = on_host();
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

TEST(SaveScope, AStalledDiskIsNamedAndASlowOneIsNot) {
  ToyOptions o = on_host();
  o.offload.watchdog_seconds = 2.0;
  {
    ToyTrainer t(o);
    ToyResult result;
    SaveScope scope = t.engine().begin_save();
    std::thread slow([&] {  // longer than the watchdog waits, but not without a sign of life
      std::vector<float> values(6307);
      const Parameter& table = t.layout().parameter("first.table");
      for (std::size_t first = 0; first < values.size(); first += 400) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        scope.read(table, StateArray::master, static_cast<std::int64_t>(first),
                   std::span(values).subspan(first, std::min<std::size_t>(400, values.size() - first)));
      }
      SaveScope gone = std::move(scope);
    });
    t.step(0, result);
    t.step(1, result);
    slow.join();
  }
  o.offload.watchdog_seconds = 0.5;
  ToyTrainer t(o);
  ToyResult result;
  SaveScope scope = t.engine().begin_save();
  t.step(0, result);
  try {
    t.step(1, result);
    ADD_FAILURE() << "the stall went unnoticed";
  } catch (const StalledError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("save_state first"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("fetching layer"));
  }
}

TEST(SaveScope, HasALaneInTheTrace) {
  Trace trace;
  ToyOptions o = on_host();
  o.trace = &trace;
  ToyTrainer t(o);
  SaveScope scope = t.engine().begin_save();
  read_all(scope, t.layout());
  const auto file = std::filesystem::temp_directory_path() / ("tandem-beside-" + std::to_string(::getpid()) + ".json");
  trace.write(file);
  const std::string text = bytes_of(file);
  std::filesystem::remove(file);
  EXPECT_THAT(text, ::testing::HasSubstr("\"disk\""));
  EXPECT_THAT(text, ::testing::HasSubstr("save_state h.3 [0, 3000)"));
}

}  // namespace
}  // namespace tandem
