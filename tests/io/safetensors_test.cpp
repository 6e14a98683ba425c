// Safetensors files, read back and refused where they lie.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>
#include <bit>
#include <cmath>
#include <cstring>

#include <filesystem>
#include <fstream>

#include "core/base/error.hpp"
#include "io/file_hash.hpp"
#include "io/safetensors.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = fs::path(::testing::TempDir()) / ("tandem_st_" + std::to_string(::getpid()) + "_" +
                                              ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { fs::remove(file_); }
  void raw(const std::string& bytes) { std::ofstream(file_, std::ios::binary) << bytes; }
  void with_header(const std::string& header, std::size_t data) {
    std::uint64_t length = header.size();
    std::string text(reinterpret_cast<const char*>(&length), 8);
    raw(text + header + std::string(data, 'x'));
  }
  std::string refusal() {
    try {
      SafetensorsReader reader(file_);
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  }
  fs::path file_;
};

TEST_F(Safetensors, ReadsBackWhatItWrote) {
  const std::vector<float> a{1.0F, -2.5F, 3e-40F, INFINITY, 0.0F, -0.0F};
  const std::vector<std::uint16_t> b{0x3f80, 0xc000, 0x0001};
  SafetensorsWriter writer(file_, {{"a", "F32", {2, 3}}, {"b", "BF16", {3}}}, {{"format", "pt"}});
  writer.write(a.data(), 8);
  writer.write(a.data() + 2, 16);
  writer.write(b.data(), 6);
  writer.finish();
  const SafetensorsReader reader(file_);
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  std::vector<float> read(6);
  widen(*reader.find("a"), 0, read);
  EXPECT_EQ(std::memcmp(read.data(), a.data(), 24), 0);
  EXPECT_EQ(reader.find("a")->shape, (std::vector<std::int64_t>{2, 3}));
  std::vector<float> widened(2);
  widen(*reader.find("b"), 1, widened);
  EXPECT_EQ(widened[0], -2.0F);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(widened[1]), 0x00010000U);
  EXPECT_EQ(reader.find("c"), nullptr);
  EXPECT_EQ(writer.hash(), file_hash(file_));
  EXPECT_THROW(widen(*reader.find("b"), 2, widened), MisuseError);
}

TEST_F(Safetensors, WidensEveryHalfExactly) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  SafetensorsWriter writer(file_, {{"h", "F16", {65536}}});
  writer.write(halves.data(), halves.size() * 2);
  writer.finish();
  const SafetensorsReader reader(file_);
  std::vector<float> values(65536);
  widen(*reader.find("h"), 0, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto exponent = static_cast<int>((i >> 10) & 31);
    const auto fraction = static_cast<double>(i & 1023);
    const double sign = i >= 32768 ? -1.0 : 1.0;
    if (exponent == 31) {
      ASSERT_EQ(std::isnan(values[i]), fraction != 0.0) << i;
      if (fraction == 0.0) {
        ASSERT_EQ(values[i], sign * INFINITY);
      }
      continue;
    }
    const double expected = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0 + fraction, exponent - 25);
    ASSERT_EQ(values[i], sign * expected) << i;
    ASSERT_EQ(std::signbit(values[i]), i >= 32768) << i;
  }
}

TEST_F(Safetensors, RefusesCutFiles) {
  raw("");
  EXPECT_THAT(refusal(), HasSubstr("shorter than its own header"));
  raw("1234567");
  EXPECT_THAT(refusal(), HasSubstr("shorter than its own header"));
  raw(std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8) + "{}");
  EXPECT_THAT(refusal(), HasSubstr("promises a header"));
  raw(std::string("\x40\0\0\0\0\0\0\0", 8) + "{}");
  EXPECT_THAT(refusal(), HasSubstr("promises a header"));
  with_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7);
  EXPECT_THAT(refusal(), HasSubstr("outside"));
}

TEST_F(Safetensors, RefusesHeadersThatLie) {
  const auto refused = [&](const std::string& header, std::size_t data, const char* why) {
    with_header(header, data);
    EXPECT_THAT(refusal(), HasSubstr(why)) << header;
  };
  refused("[1]", 0, "not a JSON object");
  refused("{\"a\":", 0, "not a JSON object");
  refused(R"({"a":5})", 0, "no proper");
  refused(R"({"a":{"dtype":"F31","shape":[],"data_offsets":[0,4]}})", 4, "is of type F31, which is not known");
  refused(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1, "ends within a byte");
  refused(R"({"a":{"dtype":"F6_E2M3","shape":[8],"data_offsets":[0,8]}})", 8, "needs 6 bytes");
  refused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "needs 12 bytes");
  refused(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "no natural number");
  refused(R"({"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}})", 4, "no natural number");
  refused(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4, "overflows");
  refused(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,4]}})", 4, "overflows");
  refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "outside");
  refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4, "no pair");
  refused(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
      8, "overlaps");
  refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8, "gap");
  refused(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 8, "longer than its tensors, by 4 B");
  refused(
      R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
      4, "twice");
}

TEST_F(Safetensors, AcceptsEmptyTensorsAndFiles) {
  with_header(R"({"a":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]}})", 0);
  EXPECT_EQ(refusal(), "accepted");
  with_header("{}", 0);
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(Safetensors, ToldAboutTooFewBytesThrows) {
  SafetensorsWriter writer(file_, {{"a", "F32", {2}}});
  const float one = 1.0F;
  writer.write(&one, 4);
  EXPECT_THROW(writer.finish(), MisuseError);
}

}  // namespace
}  // namespace tandem
