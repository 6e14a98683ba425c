#pragma once
// Small files of data that a test writes, and what TokenSource says of them.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "data/token_source.hpp"

namespace tandem {

/// Files of data in a folder of the test.
class DataFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ =
        std::filesystem::path(::testing::TempDir()) / ("tandem_data_" + std::to_string(::getpid()) + "_" +
                                                       ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }
  template <class T>
  std::filesystem::path file(const std::string& name, const std::vector<T>& values) {
    const std::filesystem::path path = root_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
    return path;
  }
  std::filesystem::path text(const std::string& name, const std::string& content) {
    return file(name, std::vector<char>(content.begin(), content.end()));
  }
  static std::vector<std::int32_t> all(const TokenSource& source) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(source.size()));
    source.read(0, tokens);
    return tokens;
  }
  static std::string refusal(const std::vector<std::filesystem::path>& names, const TokenSourceOptions& options) {
    try {
      TokenSource source(names, options);
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  }
  std::filesystem::path root_;
};

}  // namespace tandem
