// Files read ahead in pieces, with their hash.
#include "io/read_ahead.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "io/file_hash.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t large = 64 * mib;  // and more go past the page cache

class ReadAheadFiles : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(root_); }
  void TearDown() override { fs::remove_all(root_); }
  static std::string some_bytes(std::size_t count) {
    std::mt19937_64 random(11);
    std::string bytes(count + 8, '\0');
    for (std::size_t i = 0; i < count; i += 8) {
      const std::uint64_t word = random();
      std::copy_n(reinterpret_cast<const char*>(&word), 8, bytes.data() + i);
    }
    bytes.resize(count);
    return bytes;
  }
  fs::path write(const std::string& bytes, const fs::path& folder) {
    const fs::path file = folder / ("tandem_read_ahead_" + std::to_string(::getpid()));
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }
  /// All bytes; pieces are aligned, and as long as each other but the last.
  static std::string read_all(const fs::path& file) {
    ReadAhead reader(file);
    std::string all;
    std::size_t length = 0;
    bool last = false;
    for (auto piece = reader.next(); !piece.empty(); piece = reader.next()) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece.data()) % 4096, 0u);
      EXPECT_FALSE(last) << "a short piece was followed by another";
      if (length == 0) length = piece.size();
      last = piece.size() != length;
      EXPECT_LE(piece.size(), ReadAhead::piece_bytes);
      all.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    }
    EXPECT_TRUE(reader.next().empty()) << "the end stays the end";
    return all;
  }
  const fs::path root_ = fs::path(::testing::TempDir()) / ("tandem_read_ahead_" + std::to_string(::getpid()));
};

TEST_F(ReadAheadFiles, GivesAllBytesInOrder) {
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{4097}, mib - 1, mib, mib + 1,
        7 * mib + 55, large, large + 1, large + 5 * mib + 4097}) {
    const std::string bytes = some_bytes(size);
    EXPECT_TRUE(read_all(write(bytes, root_)) == bytes) << size << " bytes";
  }
}

TEST_F(ReadAheadFiles, ReadsWhereTheFileSystemHasNothingButItsCache) {
  if (!fs::is_directory("/dev/shm")) GTEST_SKIP() << "no file system in memory";
  const std::string bytes = some_bytes(large + 55);
  const fs::path file = write(bytes, "/dev/shm");
  const bool same = read_all(file) == bytes;
  fs::remove(file);
  EXPECT_TRUE(same);
}

TEST_F(ReadAheadFiles, HashesAsXxh128sumDoes) {
  EXPECT_EQ(file_hash(write("", root_)), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(file_hash(write("tandem\n", root_)), "f5c17c2e73c023c2eab7f7070755c36b");
}

TEST_F(ReadAheadFiles, CanBeLeftAtAnyPiece) {
  const std::string bytes = some_bytes(large);
  const fs::path file = write(bytes, root_);
  for (int pieces = 0; pieces <= ReadAhead::buffers + 1; ++pieces) {
    ReadAhead reader(file);
    for (int i = 0; i < pieces; ++i) {
      const auto piece = reader.next();
      ASSERT_EQ(piece.size(), ReadAhead::piece_bytes);
      EXPECT_EQ(static_cast<char>(piece[5]), bytes[static_cast<std::size_t>(i) * ReadAhead::piece_bytes + 5]);
    }
  }
}

TEST_F(ReadAheadFiles, AFileThatBecomesShorterIsNamed) {
  for (const std::size_t size : {20 * mib, large + 20 * mib}) {
    const fs::path file = write(some_bytes(size), root_);
    ReadAhead reader(file);
    ASSERT_FALSE(reader.next().empty());
    fs::resize_file(file, 3000);
    try {
      while (!reader.next().empty()) {
      }
      ADD_FAILURE() << "the end came early and unnoticed";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(file.string()));
    }
  }
}

TEST_F(ReadAheadFiles, WhatCannotBeReadIsNamed) {
  EXPECT_THROW(ReadAhead(root_ / "missing"), InputError);
  EXPECT_THROW(ReadAhead reader(root_), InputError) << "a folder";
}

}  // namespace
}  // namespace tandem
