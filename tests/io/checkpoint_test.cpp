// Checkpoints are read back as saved; one flipped bit is noticed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "core/base/error.hpp"
#include "core/base/hash128.hpp"
#include "core/params/state_digest.hpp"
#include "io/checkpoint.hpp"
#include "io/read_ahead.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class CheckpointFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) / ("tandem_ck_" + std::to_string(::getpid()) + "_" +
                                              ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { fs::remove_all(root_); }
  static Manifest manifest(std::int64_t step) {
    Manifest m;
    m.model_config = "{}";
    m.step = step;
    m.adam_step = step - 1;
    m.seed = 18446744073709551615ULL;
    m.first_loss = 5.5;
    m.parameters = {{"a", {3, 5}, true}, {"frozen", {7}, false}, {"c", {1100000}, true}};
    return m;
  }
  static float value(std::size_t index, StateArray array, std::size_t i) {
    return static_cast<float>(index * 1000 + static_cast<std::size_t>(array) * 100) + static_cast<float>(i) * 0.25F;
  }
  static std::span<const float> reader(std::size_t index, StateArray array, std::int64_t first,
                                       std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = value(index, array, static_cast<std::size_t>(first) + i);
    return values;
  }
  fs::path save(std::int64_t step) {
    Manifest m = manifest(step);
    std::vector<float> buffer(1100000);
    auto path = write_checkpoint(root_, {.manifest = &m, .read = reader, .buffer = buffer});
    digest_ = m.state_digest;
    return path;
  }
  std::string refusal(const fs::path& directory) {
    try {
      Checkpoint checkpoint(directory);
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  }
  fs::path root_;
  std::string digest_;
};

TEST_F(CheckpointFiles, ReadsBackWhatWasSaved) {
  const Checkpoint checkpoint(save(12));
  const Manifest& m = checkpoint.manifest();
  EXPECT_EQ(m.step, 12);
  EXPECT_EQ(m.adam_step, 11);
  EXPECT_EQ(m.seed, 18446744073709551615ULL);
  EXPECT_EQ(m.first_loss, 5.5);
  EXPECT_FALSE(m.last_loss.has_value());
  std::vector<float> values(1100000);
  checkpoint.read(2, StateArray::v, 0, values);
  for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], value(2, StateArray::v, i));
  checkpoint.read(1, StateArray::m, 0, std::span(values).first(7));
  EXPECT_EQ(values[3], 0.0F);  // a frozen parameter has no moments
  EXPECT_EQ(checkpoint.state_digest(), digest_);
  EXPECT_EQ(checkpoint.state_digest(), m.state_digest);
}

std::string manifest_file(const fs::path& checkpoint) {
  std::ifstream in(checkpoint / "manifest.json");
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST_F(CheckpointFiles, OfLionHoldNoSecondMomentAndNameIt) {
  const fs::path of_adamw = save(1);
  EXPECT_EQ(manifest_file(of_adamw).find("optimizer"), std::string::npos) << "as ever";
  Manifest m = manifest(2);
  m.optimizer = Optimizer::lion;
  std::vector<float> buffer(1100000);
  const Checkpoint checkpoint(write_checkpoint(root_, {.manifest = &m, .read = reader, .buffer = buffer}));
  EXPECT_EQ(checkpoint.manifest().optimizer, Optimizer::lion);
  EXPECT_LT(fs::file_size(checkpoint.directory() / "state.safetensors"), fs::file_size(of_adamw / "state.safetensors"));
  checkpoint.read(2, StateArray::m, 0, buffer);
  EXPECT_EQ(buffer[7], value(2, StateArray::m, 7));
  checkpoint.read(2, StateArray::v, 0, buffer);
  EXPECT_EQ(buffer[7], 0.0F);
  EXPECT_EQ(checkpoint.state_digest(), m.state_digest);
  // Without the name it lacks tensors, and a name that is not known is a later version's.
  const std::string text = manifest_file(checkpoint.directory()), named = "\"optimizer\": \"Lion\"";
  ASSERT_NE(text.find(named), std::string::npos);
  const auto with_name = [&](const std::string& name) {
    std::ofstream(checkpoint.directory() / "manifest.json")
        << std::string(text).replace(text.find(named), named.size(), "\"optimizer\": " + name);
    return refusal(checkpoint.directory());
  };
  EXPECT_THAT(with_name("\"AdamW\""), HasSubstr("tensor v.a is missing"));
  EXPECT_THAT(with_name("\"Sophia\""), HasSubstr("its optimizer is Sophia; use the newer tandem"));
  EXPECT_THAT(with_name("7"), HasSubstr("wrong type"));
}

TEST_F(CheckpointFiles, NoticesOneFlippedBit) {
  const fs::path directory = save(1);
  std::fstream stream(directory / "state.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(5000);
  stream.put('\x5a');
  stream.close();
  EXPECT_THAT(refusal(directory), HasSubstr("another content"));
}

/// Arrays that `stream` hands out, checked to have each value once, in pieces that follow each other.
std::vector<std::vector<float>> streamed(const Checkpoint& checkpoint) {
  std::vector<std::vector<float>> arrays(3 * checkpoint.manifest().parameters.size());
  checkpoint.stream([&](std::size_t index, StateArray array, std::int64_t first, std::span<const float> values) {
    auto& so_far = arrays[3 * index + static_cast<std::size_t>(array)];
    EXPECT_EQ(static_cast<std::size_t>(first), so_far.size());
    EXPECT_LE(values.size_bytes(), ReadAhead::piece_bytes);
    so_far.insert(so_far.end(), values.begin(), values.end());
  });
  return arrays;
}

TEST_F(CheckpointFiles, StreamsEveryValueOnce) {
  const Checkpoint checkpoint(save(12), CheckpointCheck::all_but_state);
  const auto arrays = streamed(checkpoint);
  const auto& parameters = checkpoint.manifest().parameters;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    for (const StateArray array : state_arrays) {
      const auto& values = arrays[state_arrays.size() * i + static_cast<std::size_t>(array)];
      const bool stored = parameters[i].trainable || array == StateArray::master;
      ASSERT_EQ(values.size(), stored ? static_cast<std::size_t>(parameters[i].count()) : 0u);
      for (std::size_t k = 0; k < values.size(); ++k) ASSERT_EQ(values[k], value(i, array, k));
    }
  }
}

TEST_F(CheckpointFiles, StreamingNoticesOneFlippedBitWhereverItIs) {
  const fs::path file = save(1) / "state.safetensors";
  for (const std::uintmax_t at : {std::uintmax_t{5000}, std::uintmax_t{1} << 20, fs::file_size(file) - 1}) {
    const auto flip = [&] {
      std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
      stream.seekg(static_cast<std::streamoff>(at));
      const int byte = stream.get();
      stream.seekp(static_cast<std::streamoff>(at));
      stream.put(static_cast<char>(byte ^ 1));
    };
    flip();
    const Checkpoint checkpoint(file.parent_path(), CheckpointCheck::all_but_state);
    EXPECT_THROW((void)streamed(checkpoint), InputError) << at;
    flip();
    EXPECT_NO_THROW((void)streamed(checkpoint));
  }
}

TEST_F(CheckpointFiles, WhatIsCheckedLaterIsCheckedForItsSizeAtOnce) {
  const fs::path directory = save(1);
  fs::resize_file(directory / "state.safetensors", fs::file_size(directory / "state.safetensors") - 1);
  EXPECT_THROW(Checkpoint(directory, CheckpointCheck::all_but_state), InputError);
}

TEST_F(CheckpointFiles, RefusesBrokenManifests) {
  const fs::path directory = save(1);
  std::ifstream in(directory / "manifest.json");
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const auto write = [&](const std::string& text) { std::ofstream(directory / "manifest.json") << text; };
  write("{\"format\": 1");
  EXPECT_THAT(refusal(directory), HasSubstr("no JSON object"));
  write("{\"format\": 3}");
  EXPECT_THAT(refusal(directory), HasSubstr("format is 3"));
  EXPECT_THAT(refusal(directory), HasSubstr("newer tandem"));
  write(std::string(100000, '[') + std::string(100000, ']'));
  EXPECT_THAT(refusal(directory), HasSubstr("nested too deep"));
  write("{\"format\": 1}");
  EXPECT_THAT(refusal(directory), HasSubstr("lacks an entry"));
  const auto with_number = [](std::string text, const std::string& key, const std::string& number) {
    const std::size_t begin = text.find('"' + key + "\": ") + key.size() + 4;
    return text.replace(begin, text.find_first_of(",\n}", begin) - begin, number);
  };
  for (const char* const key : {"bytes", "seed", "step", "tokens", "windows"}) {
    for (const char* const number : {"5e24", "-1", "1.5", "18446744073709551616", "\"1\"", "null"}) {
      write(with_number(whole, key, number));
      EXPECT_THAT(refusal(directory), HasSubstr("one of the wrong type")) << key << ' ' << number;
    }
  }
  fs::remove(directory / "manifest.json");
  EXPECT_THAT(refusal(directory), HasSubstr("manifest.json"));
}

TEST_F(CheckpointFiles, PassesOverTheNewestWhereItIsDamaged) {
  save(1);
  const fs::path newest = save(2);
  fs::resize_file(newest / "state.safetensors", 100);
  int passed = 0;
  const auto found = newest_checkpoint(root_, [&](const fs::path& path, const std::string&) {
    ++passed;
    EXPECT_EQ(path, newest);
  });
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->manifest().step, 1);
  EXPECT_EQ(passed, 1);
}

TEST_F(CheckpointFiles, FindsTheNewestBeforeAStep) {
  for (std::int64_t step = 1; step <= 3; ++step) save(step);
  const auto nothing = [](const fs::path&, const std::string&) {};
  EXPECT_EQ(newest_checkpoint(root_, nothing, {.before = 3})->manifest().step, 2);
  EXPECT_EQ(newest_checkpoint(root_, nothing, {.before = 4})->manifest().step, 3);
  EXPECT_EQ(newest_checkpoint(root_, nothing, {.before = 1}), nullptr);
}

TEST_F(CheckpointFiles, KeepsTheNewestAndClearsWhatWasInterrupted) {
  for (std::int64_t step = 1; step <= 4; ++step) save(step);
  fs::create_directories(root_ / ".step-00000009.tmp");
  prune_checkpoints(root_, {.keep = 2, .written = root_ / "step-00000004"});
  std::vector<std::string> left;
  for (const auto& entry : fs::directory_iterator(root_)) left.push_back(entry.path().filename().string());
  EXPECT_THAT(left, ::testing::UnorderedElementsAre("step-00000003", "step-00000004"));
}

TEST_F(CheckpointFiles, AFailedSaveLeavesNothingAndTheOldOneWhole) {
  const fs::path old = save(5);
  Manifest m = manifest(5);
  std::vector<float> buffer(1100000);
  const StateReader failing = [](std::size_t index, StateArray array, std::int64_t first, std::span<float> values) {
    if (index == 2) throw DeviceError("planted");
    return reader(index, array, first, values);
  };
  const CheckpointContent content{.manifest = &m, .read = failing, .buffer = buffer};
  EXPECT_THROW(write_checkpoint(root_, content), DeviceError);
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
  EXPECT_EQ(refusal(old), "accepted");
}

// The smaller the buffer, the smaller the pieces in which state passes: the files and what they say do not change.
TEST_F(CheckpointFiles, TheSizeOfTheBufferDoesNotShow) {
  const auto bytes_of = [](const fs::path& directory) {
    std::string bytes;
    for (const char* name : {"state.safetensors", "manifest.json"}) {
      std::ifstream file(directory / name, std::ios::binary);
      bytes.append(std::istreambuf_iterator<char>(file), {});
    }
    return bytes;
  };
  const std::string whole = bytes_of(save(1));
  for (const std::size_t size : {std::size_t{1000}, std::size_t{1} << 20, std::size_t{1099999}}) {
    Manifest m = manifest(1);
    std::vector<float> buffer(size);
    EXPECT_TRUE(bytes_of(write_checkpoint(root_, {.manifest = &m, .read = reader, .buffer = buffer})) == whole) << size;
  }
  Manifest m = manifest(1);
  EXPECT_THROW(write_checkpoint(root_, {.manifest = &m, .read = reader}), MisuseError);  // no room for a single value
}

TEST_F(CheckpointFiles, NeverRemovesTheLastGoodOne) {
  const auto left = [&] {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_)) names.push_back(entry.path().filename().string());
    return names;
  };
  for (std::int64_t step = 1; step <= 3; ++step) save(step);
  fs::resize_file(root_ / "step-00000003" / "state.safetensors", 100);  // a damaged checkpoint, which resuming has
                                                                        // passed over
  fs::remove(root_ / "step-00000002" / "manifest.json");
  prune_checkpoints(root_, {.keep = 2, .written = {}});
  EXPECT_THAT(left(), ::testing::IsSupersetOf({"step-00000001"}));  // damaged ones do not count
  const fs::path written = save(2);
  prune_checkpoints(root_, {.keep = 1, .written = written});
  EXPECT_THAT(left(), ::testing::UnorderedElementsAre("step-00000002"));  // 3 is of a course that was left
  prune_checkpoints(root_, {.keep = 1, .written = save(4), .best = root_ / "step-00000002"});
  EXPECT_THAT(left(), ::testing::UnorderedElementsAre("step-00000002", "step-00000004"));
}

TEST_F(CheckpointFiles, NewestIsByNumberAlsoBeyondEightDigits) {
  save(99999999);
  save(100000000);
  const auto found = newest_checkpoint(root_, [](const fs::path&, const std::string&) {});
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->manifest().step, 100000000);
}

// A course that an older tandem begins afresh would end with the removal of what a newer one saved.
TEST_F(CheckpointFiles, OneOfANewerVersionIsNotPassedOver) {
  save(1);
  const fs::path newer = save(2);
  std::ifstream file(newer / "manifest.json");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::string format = "\"format\": 1";
  ASSERT_NE(text.find(format), std::string::npos);
  std::ofstream(newer / "manifest.json") << text.replace(text.find(format), format.size(), "\"format\": 3");
  EXPECT_THAT(refusal(newer), HasSubstr("use the newer tandem"));
  EXPECT_THROW((void)newest_checkpoint(root_, [](const fs::path&, const std::string&) {}), NewerFormat);
  std::ofstream(newer / "manifest.json") << text.replace(text.find("\"format\": 3"), format.size(), "\"format\": 0");
  const auto found = newest_checkpoint(root_, [](const fs::path&, const std::string&) {});
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->manifest().step, 1);
}

TEST_F(CheckpointFiles, CarriesFilesBesideTheState) {
  fs::create_directories(root_);
  std::ofstream(root_ / "tokenizer.json") << "{\"a\": 1}";
  Manifest m = manifest(1);
  std::vector<float> buffer(1100000);
  const auto path =
      write_checkpoint(root_, {.manifest = &m, .read = reader, .buffer = buffer, .beside = {root_ / "tokenizer.json"}});
  EXPECT_THAT(Checkpoint(path).files_beside(), ::testing::ElementsAre(path / "tokenizer.json"));
  std::ofstream(path / "tokenizer.json") << "{\"a\": 2}";
  EXPECT_THAT(refusal(path), HasSubstr("tokenizer.json has another content"));
}

TEST_F(CheckpointFiles, WithoutFrozenParametersNameTheModelThatHasThem) {
  Manifest m = manifest(1);
  m.base = "/models/base";
  m.base_format = "nf4";
  m.parameters[1].elsewhere = std::string(32, 'a');
  m.parameters[1].original = std::string(32, 'b');
  std::vector<float> buffer(1100000);
  const auto path = write_checkpoint(root_, {.manifest = &m, .read = reader, .buffer = buffer});
  const Checkpoint checkpoint(path);
  EXPECT_EQ(checkpoint.manifest().base, m.base);
  EXPECT_EQ(checkpoint.manifest().base_format, m.base_format);
  EXPECT_EQ(checkpoint.manifest().parameters[1].elsewhere, m.parameters[1].elsewhere);
  EXPECT_EQ(checkpoint.manifest().parameters[1].original, m.parameters[1].original);
  EXPECT_EQ(checkpoint.state_digest(), m.state_digest);
  std::vector<float> values(7);
  EXPECT_THROW(checkpoint.read(1, StateArray::master, 0, values), InputError);
  m.base_format.clear();
  std::ofstream(path / "manifest.json") << manifest_text(m);
  EXPECT_THAT(refusal(path), HasSubstr("names no base"));
}

TEST_F(CheckpointFiles, ManifestsCannotLeaveTheirFolderOrLieAboutSizes) {
  const fs::path directory = save(1);
  std::ifstream stream(directory / "manifest.json");
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  const auto refused_with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    std::ofstream(directory / "manifest.json") << changed.replace(at, from.size(), to);
    return refusal(directory);
  };
  EXPECT_THAT(refused_with("\"state.safetensors\"", "\"../../etc/passwd\""), HasSubstr("elsewhere"));
  EXPECT_THAT(refused_with("\"state.safetensors\"", "\"..\""), HasSubstr("elsewhere"));
  EXPECT_THAT(refused_with("\"state.safetensors\"", "\"other\""), HasSubstr("other"));
  EXPECT_THAT(refused_with("1100000", "9223372036854775807, 3"), HasSubstr("impossible shape"));
  EXPECT_THAT(refused_with("1100000", "9223372036854775808"), HasSubstr("wrong type"));
  EXPECT_THAT(refused_with("1100000", "-1100000"), HasSubstr("wrong type"));
  EXPECT_THAT(refused_with("1100000", "1100001"), HasSubstr("missing or of another shape"));
  EXPECT_THAT(refused_with("\"step\": 1", "\"step\": -1"), HasSubstr("wrong type"));
  EXPECT_THAT(refused_with("\"step\": 1", "\"step\": 1e300"), HasSubstr("wrong type"));
}

TEST(AtomicFile, IsNotWorldWritable) {
  const fs::path file = fs::path(::testing::TempDir()) / ("tandem_mode_" + std::to_string(::getpid()));
  const auto before = ::umask(0);
  write_file_atomically(file, "x");
  ::umask(before);
  EXPECT_EQ(fs::status(file).permissions() & fs::perms::others_write, fs::perms::none);
  fs::remove(file);
}

TEST(AtomicFile, SaysWhereItCannotWrite) {
  EXPECT_THROW(write_file_atomically("/proc/none/file", "x"), WriteError);
  EXPECT_THROW(create_directories_or_throw("/proc/none"), WriteError);
}

TEST(AtomicFile, WhetherItCanBeWrittenIsKnownBefore) {
  const fs::path folder = fs::path(::testing::TempDir()) / "tandem_require_writable";
  fs::create_directories(folder);
  EXPECT_THROW(require_writable(folder), WriteError);
  EXPECT_THROW(require_writable(folder / "missing" / "file"), WriteError);
  write_file_atomically(folder / "file", "old");
  EXPECT_NO_THROW(require_writable(folder / "file"));
  EXPECT_EQ(fs::file_size(folder / "file"), 3U);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1) << "nothing is left beside";
  fs::remove_all(folder);
}

TEST(StateDigestText, DoesNotDependOnHowArraysArePassed) {
  std::vector<float> values(static_cast<std::size_t>(state_digest_block) + 777);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 0.5F;
  const auto digest = [&](std::int64_t piece) {
    StateDigest d;
    d.begin_parameter("p");
    for (int array = 0; array < 3; ++array) {
      const auto total = static_cast<std::int64_t>(values.size());
      for (std::int64_t at = 0; at < total; at += piece) d.add(values.data() + at, std::min(piece, total - at));
      d.end_array();
    }
    d.end_parameter();
    return d.text();
  };
  const std::string whole = digest(1 << 30);
  EXPECT_EQ(whole.size(), 32U);
  EXPECT_EQ(digest(1000), whole);
  EXPECT_EQ(digest(4097), whole);

  Hash128 first, last;
  first.add(values.data(), static_cast<std::size_t>(state_digest_block) * sizeof(float));
  last.add(values.data() + state_digest_block, 777 * sizeof(float));
  StateDigest of_blocks;
  of_blocks.begin_parameter("p");
  for (int array = 0; array < 3; ++array) {
    of_blocks.add_block(first.bytes());
    if (array == 1) {
      of_blocks.add(values.data() + state_digest_block, 777);
    } else {
      of_blocks.add_block(last.bytes());
    }
    of_blocks.end_array();
  }
  of_blocks.end_parameter();
  EXPECT_EQ(of_blocks.text(), whole);
  values[3] += 1.0F;
  EXPECT_NE(digest(1 << 30), whole);
}

TEST(StateDigestText, RefusesCallsOutOfOrder) {
  StateDigest d;
  const float x = 1.0F;
  EXPECT_THROW(d.add(&x, 1), MisuseError);
  EXPECT_THROW(d.add_block({}), MisuseError);
  d.begin_parameter("p");
  EXPECT_THROW(d.begin_parameter("q"), MisuseError);
  d.add(&x, 1);
  EXPECT_THROW(d.add_block({}), MisuseError);
  d.end_array();
  EXPECT_THROW(d.end_parameter(), MisuseError);
}

}  // namespace
}  // namespace tandem
