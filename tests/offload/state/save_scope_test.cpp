// A save beside training, read by hand: which updates wait for what, and what becomes of a save that does not end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "tests/offload/toy/trainer.hpp"

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

std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

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
  ToyTrainer still(on_host());  // engine with the same state, which stands still
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
  try {
    t.step(2, result);
    EXPECT_EQ(result.losses, expected);
  } catch (const DeviceError&) {
    EXPECT_EQ(t.device().info().kind,
              "cuda");  // one failed stream loses the whole device: what matters is that it ends
  }
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
  EXPECT_THROW(
      {
        SaveScope scope = t.engine().begin_save();  // this call may be the first to hear of the failure
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
  EXPECT_THAT(text, ::testing::HasSubstr("save_state h.3 [1024, 4024)"));
}

}  // namespace
}  // namespace tandem
