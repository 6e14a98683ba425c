// Files written behind, past the cache or through it; each failure is reported.
#include "io/write_behind.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.hpp"
#include "io/atomic_file.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t piece = WriteBehind::piece_bytes;

std::string some_bytes(std::size_t count) {
  std::mt19937 random(7);
  std::string bytes(count, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

std::string content_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// The system's calls without waiting for a disk; write number `fails_at` takes no byte, or half of them.
class CountedFiles final : public FileOps {
 public:
  int fails_at = -1;
  int error = ENOSPC;  ///< 0: half of the bytes
  bool refuses_direct = false;
  bool direct_fails_late = false;  ///< some file systems refuse with the first write only
  int writes = 0;
  int direct_writes = 0;

  int write(int fd, const void* data, std::size_t bytes, std::size_t& written) override {
    const bool direct = (::fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    if (direct && direct_fails_late) return EINVAL;
    direct_writes += direct ? 1 : 0;
    if (writes++ == fails_at) {
      if (error != 0) return error;
      bytes = bytes / 2 - 1;  // no whole block
      if (direct) FileOps::set_direct(fd, false);
      const int result = FileOps::write(fd, data, bytes, written);
      if (direct) FileOps::set_direct(fd, true);
      return result;
    }
    return FileOps::write(fd, data, bytes, written);
  }
  bool set_direct(int fd, bool direct) noexcept override {
    return !(direct && refuses_direct) && FileOps::set_direct(fd, direct);
  }
  void start_flush(int) noexcept override {}
  int flush(int) override { return 0; }
};

class Written : public ::testing::Test {
 protected:
  fs::path file_ = fs::path(::testing::TempDir()) / ("tandem_write_behind_" + std::to_string(::getpid()));
  void TearDown() override { fs::remove(file_); }

  /// Writes in parts of odd sizes. Returns the hash.
  std::string write(const std::string& bytes, FileOps& ops, FileWay way = FileWay::direct) {
    FileWriter writer(file_, ops, way);
    std::size_t part = 1;
    for (std::size_t at = 0; at < bytes.size(); at += part, part = part * 3 + 1) {
      writer.write(bytes.data() + at, std::min(part, bytes.size() - at));
    }
    writer.finish();
    EXPECT_EQ(writer.bytes(), bytes.size());
    return writer.hash();
  }
};

TEST_F(Written, HasTheSameBytesAndHashEitherWay) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{4096},
                                 std::size_t{4097}, piece - 1, piece, piece + 1, 2 * piece, 3 * piece + 12345}) {
    const std::string bytes = some_bytes(size);
    CountedFiles ops;
    const std::string cached = write(bytes, ops, FileWay::cached);
    EXPECT_EQ(write(bytes, ops), cached) << size;
    EXPECT_TRUE(content_of(file_) == bytes) << size;
  }
}

TEST_F(Written, FallsBackWhereTheCacheCannotBePassedBy) {
  const std::string bytes = some_bytes(2 * piece + 100);
  for (const bool late : {false, true}) {
    CountedFiles ops;
    ops.refuses_direct = !late;
    ops.direct_fails_late = late;
    write(bytes, ops);
    EXPECT_TRUE(content_of(file_) == bytes);
    EXPECT_EQ(ops.direct_writes, 0);
  }
}

TEST_F(Written, GoesOnAfterAShortWrite) {
  const std::string bytes = some_bytes(3 * piece + 100);
  for (int at = 0; at < 4; ++at) {
    CountedFiles ops;
    ops.fails_at = at;
    ops.error = 0;
    write(bytes, ops);
    EXPECT_TRUE(content_of(file_) == bytes) << "write " << at;
  }
}

TEST_F(Written, EveryFailedWriteIsReported) {
  const std::string bytes = some_bytes(3 * piece + 100);
  for (int at = 0; at < 4; ++at) {
    CountedFiles ops;
    ops.fails_at = at;
    EXPECT_THAT([&] { write(bytes, ops); },
                ::testing::ThrowsMessage<WriteError>(::testing::HasSubstr("No space left on device")))
        << "write " << at;
  }
}

TEST_F(Written, AnErrorStays) {
  CountedFiles ops;
  ops.fails_at = 0;
  int fd = -1;
  ASSERT_EQ(ops.create(file_, fd), 0);
  {
    WriteBehind behind(fd, ops);
    const std::string bytes = some_bytes(piece);
    EXPECT_EQ(behind.append(bytes.data(), bytes.size()), 0) << "handed over, not written yet";
    EXPECT_EQ(behind.append(bytes.data(), bytes.size()), ENOSPC);
    EXPECT_EQ(behind.finish(), ENOSPC);
    EXPECT_EQ(ops.writes, 1);
  }
  ops.close(fd);
}

TEST(FileWay, LargeFilesGoPastTheCache) {
  EXPECT_EQ(way_of_file(0), FileWay::cached);
  EXPECT_EQ(way_of_file((std::uint64_t{64} << 20) - 1), FileWay::cached);
  EXPECT_EQ(way_of_file(std::uint64_t{64} << 20), FileWay::direct);
}

}  // namespace
}  // namespace tandem
