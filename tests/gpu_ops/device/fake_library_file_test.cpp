// Numbers that a library's file exports, read from the file: whole, cut and damaged.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "gpu_ops/device/library_file.hpp"

namespace tandem::gpu {
namespace {

constexpr std::uint32_t number = 0x090e00;

class ExportedNumber : public ::testing::Test {
 protected:
  ~ExportedNumber() override { static_cast<void>(std::remove(copy_.c_str())); }
  std::optional<std::uint32_t> of(const std::string& bytes) {
    std::ofstream(copy_, std::ios::binary) << bytes;
    return exported_number(copy_, "fake_nvml_number");
  }
  const std::string file_ = TANDEM_FAKE_NVML_FOLDER "/libnvidia-ml.so.1";
  std::ifstream in_{file_, std::ios::binary};
  const std::string whole_{std::istreambuf_iterator<char>(in_), {}};
  const std::string copy_ = ::testing::TempDir() + "tandem-exported-number-" + std::to_string(::getpid());
  const std::size_t step_ = std::max<std::size_t>(1, whole_.size() / 1000) | 1U;
};

TEST_F(ExportedNumber, IsReadFromTheFile) {
  EXPECT_EQ(exported_number(file_, "fake_nvml_number"), number);
  EXPECT_EQ(exported_number(file_, "fake_nvml_numbers"), std::nullopt);
  EXPECT_EQ(exported_number(file_, "malloc"), std::nullopt) << "what another library has";
  EXPECT_EQ(exported_number("/nonexistent", "fake_nvml_number"), std::nullopt);
  EXPECT_EQ(exported_number("/", "fake_nvml_number"), std::nullopt);
}

TEST_F(ExportedNumber, IsItOrNoneOfAFileThatIsCut) {
  ASSERT_EQ(of(whole_), number);
  for (std::size_t bytes = 0; bytes < whole_.size(); bytes += step_) {
    EXPECT_EQ(of(whole_.substr(0, bytes)).value_or(number), number) << bytes;
  }
  EXPECT_EQ(of(whole_.substr(0, whole_.size() / 2)), std::nullopt);
}

TEST_F(ExportedNumber, OfADamagedFileIsReadWithinIt) {
  for (std::size_t at = 0; at < whole_.size(); at += at < 64 ? 1 : step_) {
    std::string damaged = whole_;
    damaged.replace(at, 8, 8, '\xff');
    static_cast<void>(of(damaged));  // whatever it is: AddressSanitizer looks on
  }
}

}  // namespace
}  // namespace tandem::gpu
