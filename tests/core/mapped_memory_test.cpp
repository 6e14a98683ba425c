// Mapped memory is populated by all threads to its last page.
#include "core/host/mapped_memory.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

#include "core/host/parallel.hpp"
#include "core/memory/memory.hpp"
#include "tests/core/pages.hpp"

namespace tandem {
namespace {

using namespace literals;
using testing::pages_missing;

/// A thread for each index.
class ThreadForEach final : public Parallel {
 public:
  int threads() const noexcept override { return 4; }
  void run(std::int64_t count, IndexFunction body) override {
    count_ = count;
    std::vector<std::jthread> threads;
    for (std::int64_t i = 0; i < count; ++i) threads.emplace_back([&, i] { body(i); });
  }
  std::int64_t count() const noexcept { return count_; }

 private:
  std::int64_t count_ = 0;
};

TEST(MappedMemory, IsPopulatedToTheLastPageByAllThreads) {
  for (const std::size_t bytes : {std::size_t{1}, 4_KiB + 1, 2_MiB + 1, 64_MiB, 128_MiB + 8_KiB + 1}) {
    ThreadForEach threads;
    auto* const data = static_cast<std::byte*>(MappedMemory::map(bytes));
    EXPECT_GT(pages_missing(data, bytes), 0);
    MappedMemory::populate(data, bytes, threads);
    EXPECT_EQ(pages_missing(data, bytes), 0) << bytes;
    EXPECT_EQ(threads.count(), static_cast<std::int64_t>((bytes + 64_MiB - 1) / 64_MiB));
    EXPECT_TRUE(std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{0}; }));
    MappedMemory::unmap(data, bytes);
  }
}

TEST(MappedMemory, NothingIsPopulatedOfNothing) {
  ThreadForEach threads;
  MappedMemory::populate(nullptr, 0, threads);
  EXPECT_EQ(threads.count(), 0);
}

}  // namespace
}  // namespace tandem
