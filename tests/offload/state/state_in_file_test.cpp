// State that memory has no room for lives in a file, which changes time, and no bit of the result.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "offload/storage/state_file.hpp"
#include "tests/offload/toy/trainer.hpp"
#include "tests/scheduler/in_file.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using testing::reference_of;
using ::testing::ThrowsMessage;
using testing::toy;
using testing::ToyOptions;
using testing::ToyResult;
using testing::ToyTrainer;
using testing::train_toy;
using testing::with_state_in_file;

/// Options with enough state that buffers for some of it are little beside it.
ToyOptions wide(const char* policy) {
  ToyOptions o = toy(policy);
  o.width = 30'000;
  return o;
}

void expect_result_of_memory(const ToyResult& result, const ToyResult& expected) {
  EXPECT_EQ(result.digest, expected.digest);
  EXPECT_EQ(result.norms, expected.norms);
  EXPECT_EQ(result.losses, expected.losses);
}

class InAFile : public ::testing::TestWithParam<const char*> {};

TEST_P(InAFile, StateGivesTheSameBits) {
  const ToyResult& expected = reference_of(wide(GetParam()));
  for (const double share : {0.5, 1.0}) {
    for (const std::int64_t size : {std::int64_t{1024}, std::int64_t{3072}}) {
      ToyOptions o = wide(GetParam());
      o.offload.subgroup_size = size;
      if (size == 1024) o.offload.resident_layers = 1;
      const ToyResult result = train_toy(with_state_in_file(o, share));
      expect_result_of_memory(result, expected);
      EXPECT_GT(testing::parameters_in_file(result.plan), 0);
      const std::uint64_t moved = 3 * result.plan.file_bytes_of_step();
      EXPECT_EQ(result.counters.bytes_from_file, moved);
      EXPECT_EQ(result.counters.bytes_to_file, moved);
      EXPECT_LE(result.plan.memory.host_bytes(), with_state_in_file(o, share).offload.host_memory);
    }
  }
}

TEST_P(InAFile, StateOfEveryFormatGivesTheSameBits) {
  for (const StateFormat state : state_formats) {
    ToyOptions o = wide(GetParam());
    o.offload.state = state;
    o.micro_batches = 3;
    const ToyResult& expected = reference_of(o);
    o.at_once = 3;
    o.evaluate_between = true;
    o.offload.overlap = state != StateFormat::split;
    expect_result_of_memory(train_toy(with_state_in_file(o, 0.7)), expected);
  }
}

TEST_P(InAFile, StateIsUpdatedInBackward) {
  ToyOptions o = wide(GetParam());
  o.max_grad_norm = 0.0;
  o.offload.on_nonfinite = OnNonfinite::stop;
  o.offload.resident_layers = 0;
  expect_result_of_memory(train_toy(with_state_in_file(o, 1.0)), reference_of(o));
}

TEST_P(InAFile, StateIsLeftAloneByASkippedStep) {
  ToyOptions o = wide(GetParam());
  o.steps = 2;
  const ToyResult& expected = reference_of(o);
  o.steps = 3;
  o.nan_at_step = 2;
  const ToyResult result = train_toy(with_state_in_file(o, 1.0));
  EXPECT_EQ(result.skipped, 1);
  EXPECT_EQ(result.digest, expected.digest);
  EXPECT_EQ(result.counters.bytes_to_file, 2 * result.plan.file_bytes_of_step());
}

/// Reading by a save, beside later steps.
TEST_P(InAFile, StateIsReadAsItWasWhenASaveBegan) {
  ToyOptions o = wide(GetParam());
  const auto read_all = [](ToyTrainer& t, OffloadEngine::SaveScope& scope, std::vector<float>& values) {
    for (const Parameter* p : t.layout().owned_parameters()) {
      for (const StateArray array : state_arrays) {
        if (!p->options.trainable && array != StateArray::master) continue;
        for (std::int64_t at = 0; at < p->count; at += 777) {
          std::vector<float> part(static_cast<std::size_t>(std::min<std::int64_t>(777, p->count - at)));
          scope.read(*p, array, at, part);
          values.insert(values.end(), part.begin(), part.end());
        }
      }
    }
  };
  std::vector<float> seen[2];
  for (const bool in_file : {false, true}) {
    ToyTrainer t(in_file ? with_state_in_file(o, 0.5) : o);
    ToyResult result;
    t.step(0, result);
    OffloadEngine::SaveScope scope = t.engine().begin_save();
    std::thread reader([&] { read_all(t, scope, seen[in_file ? 1 : 0]); });
    t.step(1, result);
    t.step(2, result);
    reader.join();
  }
  EXPECT_FALSE(seen[0].empty());
  EXPECT_EQ(seen[0], seen[1]);
}

INSTANTIATE_TEST_SUITE_P(Policies, InAFile,
                         ::testing::Values("host", "stream", "static:0.5", "interleave:2,resident=0.3"));

TEST(StateInAFile, IsWrittenAndReadInPartsOfAnyLength) {
  constexpr std::int64_t elements = 1'000'007;
  for (const StateFormat state : state_formats) {
    ToyOptions o = toy("host");
    o.offload.state = state;
    o.width = elements;
    o.layers = 1;
    o.offload.subgroup_size = 200'000;
    const ToyOptions in_file = with_state_in_file(o, 1.0);
    ToyTrainer t(in_file);
    EXPECT_GT(testing::parameters_in_file(t.engine().plan()), elements / 2);
    const Parameter& w = t.layout().parameter("h.0.w");
    for (const StateArray array : state_arrays) {
      std::vector<float> written(elements), read(elements);
      for (std::size_t i = 0; i < written.size(); ++i) written[i] = static_cast<float>(1 << i % 3);
      for (std::int64_t at = 0, part = 1; at < elements; at += part, part = std::min(part * 3 + 1, elements - at)) {
        t.engine().write(w, array, at,
                         std::span(written).subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(part)));
      }
      t.engine().read(w, array, read);
      if (is_lion(state) && array == StateArray::v) std::ranges::fill(written, 0.0F);  // Lion has no v
      EXPECT_EQ(read, written);
    }
  }
}

TEST(StateInAFile, StaysWhereItIs) {
  ToyTrainer t(with_state_in_file(wide("host"), 0.5));
  const Plan same = t.engine().plan();
  EXPECT_THAT([&] { t.engine().adopt(same); }, ThrowsMessage<PlanError>(HasSubstr("stays where it is")));
  ToyResult result;
  t.step(0, result);
}

TEST(StateInAFile, NeedsAFolder) {
  ToyOptions o = with_state_in_file(wide("host"), 0.5);
  const ParameterLayout layout = testing::toy_layout(o);
  const std::unique_ptr<testing::ToyDevice> device = o.make_device(o.device);
  const Plan plan = make_plan(layout, o.offload, {o.device.capacity, 0});
  o.offload.state_folder = "/nonexistent/folder";
  EXPECT_THAT([&] { OffloadEngine(device->device(), layout, o.offload, plan); },
              ThrowsMessage<WriteError>(HasSubstr("/nonexistent/folder")));
  o.offload.state_folder.reset();
  EXPECT_THROW(OffloadEngine(device->device(), layout, o.offload, plan), MisuseError);
}

/// Limit on the size of all files that the process writes, while the object lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    std::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(StateInAFile, ThatCannotBeWrittenReachesTheCallerAndLeavesNoState) {
  for (const char* policy : {"host", "stream"}) {
    ToyTrainer t(with_state_in_file(wide(policy), 1.0));
    ToyResult result;
    t.step(0, result);
    t.engine().wait();
    const FileSizeLimit limit(20000);
    const auto train = [&] {
      for (int s = 1; s < 3; ++s) t.step(s, result);
      t.engine().wait();
    };
    EXPECT_THAT(train, ThrowsMessage<WriteError>(HasSubstr("cannot write the optimizer state")));
    EXPECT_THROW((void)t.engine().state_digest(), WriteError);
    EXPECT_THROW(t.engine().begin_step({}), WriteError);
  }
}

// -- the file alone ------------------------------------------------------------------------------------------

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((i * 31 + seed) % 251);
  return values;
}

TEST(StateFile, KeepsRangesOfAnyLengthAndPlace) {
  constexpr std::uint64_t bytes = 5 << 20;
  StateFile file(::testing::TempDir(), bytes);
  std::vector<std::byte> expected(bytes);
  std::uint64_t at = 1;
  for (const std::size_t length : {1UL, 4095UL, 4096UL, 4097UL, 12288UL, 100003UL, StateFile::buffer_bytes,
                                   StateFile::buffer_bytes + 1, 2 * StateFile::buffer_bytes + 4096}) {
    const auto values = pattern(length, static_cast<unsigned>(length));
    file.write(at, values);
    std::copy(values.begin(), values.end(), expected.begin() + static_cast<std::ptrdiff_t>(at));
    at += length;
  }
  std::vector<std::byte> read(bytes);
  file.read(0, read);
  EXPECT_EQ(read, expected);
  std::vector<std::byte> part(70'000);
  file.read(12'345, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + 12'345));
}

TEST(StateFile, KeepsWhatThreadsWriteBesideEachOther) {
  constexpr std::size_t length = 1001;
  constexpr std::size_t count = 256;
  StateFile file(::testing::TempDir(), length * count);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&file, t] {
      for (std::size_t i = t; i < count; i += 4) file.write(i * length, pattern(length, static_cast<unsigned>(i)));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<std::byte> read(length);
  for (std::size_t i = 0; i < count; ++i) {
    file.read(i * length, read);
    ASSERT_EQ(read, pattern(length, static_cast<unsigned>(i))) << i;
  }
}

TEST(StateFile, HasNoName) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "state-file-without-a-name";
  std::filesystem::create_directories(folder);
  const StateFile file(folder, 1 << 20);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(StateFile, SaysWhereItCannotBe) {
  EXPECT_THAT([] { StateFile("/nonexistent/folder", 4096); },
              ThrowsMessage<WriteError>(HasSubstr("/nonexistent/folder")));
  EXPECT_THAT([] { StateFile(::testing::TempDir(), std::uint64_t{1} << 60); },
              ThrowsMessage<WriteError>(HasSubstr("cannot keep the optimizer state")));
}

TEST(StateFile, SaysWhereItEnds) {
  StateFile file(::testing::TempDir(), 8192);
  std::vector<std::byte> beyond(4096);
  EXPECT_THAT([&] { file.read(8192, beyond); },
              ThrowsMessage<InputError>(HasSubstr("cannot read the optimizer state")));
}

}  // namespace
}  // namespace tandem
