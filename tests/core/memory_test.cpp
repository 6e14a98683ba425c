// Owned blocks of memory, arenas and tables of memory.
#include "core/memory/memory.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using namespace literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

MemoryBlock counted(void* data, int& freed) {
  return {data, 8, [&freed](void*, std::size_t) { ++freed; }};
}

TEST(MemoryBlock, FreesOnceWithItsAddressAndSize) {
  int object = 0;
  std::pair<void*, std::size_t> seen;
  {
    MemoryBlock block(&object, 22, [&](void* p, std::size_t n) { seen = {p, n}; });
  }
  EXPECT_EQ(seen.first, &object);
  EXPECT_EQ(seen.second, 22U);
}

TEST(MemoryBlock, MovingHandsOverTheDutyToFree) {
  int object = 0;
  int freed = 0;
  {
    MemoryBlock a = counted(&object, freed);
    MemoryBlock b = std::move(a);
    EXPECT_FALSE(a);  // NOLINT: a moved-from block is empty, by contract
    EXPECT_EQ(a.bytes(), 0U);
    EXPECT_EQ(b.data(), &object);
    a = std::move(b);
    EXPECT_EQ(freed, 0);
    EXPECT_TRUE(a);
  }
  EXPECT_EQ(freed, 1);
}

TEST(MemoryBlock, AssigningFreesTheOldBlockAtOnce) {
  std::array<int, 2> objects{};
  int first = 0;
  int second = 0;
  MemoryBlock a = counted(&objects[0], first);
  a = counted(&objects[1], second);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 0);
  a = MemoryBlock();
  EXPECT_EQ(second, 1);
}

TEST(MemoryBlock, AssigningToItselfKeepsIt) {
  int object = 0;
  int freed = 0;
  MemoryBlock a = counted(&object, freed);
  MemoryBlock& same = a;
  a = std::move(same);
  EXPECT_EQ(freed, 0);
  EXPECT_EQ(a.data(), &object);
}

TEST(MemoryBlock, NeedsNoDeleter) {
  int object = 0;
  const MemoryBlock block(&object, 4, nullptr);
  EXPECT_TRUE(block);
}

struct alignas(arena_alignment) Storage {
  std::array<std::byte, 2048> bytes{};
};

TEST(Arena, CarvesAlignedPartsOneAfterAnother) {
  Storage storage;
  Arena arena(storage.bytes.data(), sizeof storage, "test");
  EXPECT_EQ(arena.carve(1, "a"), storage.bytes.data());
  EXPECT_EQ(arena.carve(256, "b"), storage.bytes.data() + 256);
  EXPECT_EQ(arena.carve(257, "c"), storage.bytes.data() + 512);
  EXPECT_EQ(arena.used(), 1024U);
  EXPECT_EQ(arena.carve(1024, "rest"), storage.bytes.data() + 1024);
  EXPECT_EQ(arena.used(), arena.bytes());
}

TEST(Arena, ExhaustionNamesBothAndTakesNothing) {
  Storage storage;
  Arena arena(storage.bytes.data(), 512, "weights");
  arena.carve(256, "a");
  EXPECT_THAT([&] { arena.carve(257, "layer 3"); },
              ThrowsMessage<MisuseError>(AllOf(HasSubstr("'weights'"), HasSubstr("'layer 3'"), HasSubstr("257"))));
  EXPECT_EQ(arena.used(), 256U);
  EXPECT_THROW(arena.carve(std::numeric_limits<std::size_t>::max(), "wraps around"), MisuseError);
  EXPECT_NO_THROW(arena.carve(0, "nothing"));
}

TEST(Arena, RefusesMisalignedOrMissingMemory) {
  Storage storage;
  EXPECT_THROW(Arena(storage.bytes.data() + 1, 256, "odd"), MisuseError);
  EXPECT_THROW(Arena(nullptr, 256, "none"), MisuseError);
  EXPECT_NO_THROW(Arena(nullptr, 0, "empty"));
}

TEST(MemoryPlan, RoundsUpAndDropsWhatIsEmpty) {
  MemoryPlan plan;
  plan.add("a", "run", Place::device, 1);
  plan.add("b", "run", Place::device, 0);
  plan.add("c", "run", Place::device, 256);
  ASSERT_EQ(plan.entries.size(), 2U);
  EXPECT_EQ(plan.entries[0].bytes, 256U);
  EXPECT_EQ(plan.device_bytes(), 512U);
}

TEST(MemoryPlan, CountsTheRunAndTheLargestPhase) {
  MemoryPlan plan;
  plan.add("weights", "run", Place::device, 1024);
  plan.add("load a", "load", Place::device, 512);
  plan.add("load b", "load", Place::device, 512);
  plan.add("save", "save", Place::device, 768);
  EXPECT_EQ(plan.device_bytes(), 1024U + 1024U);

  plan.add("state", "run", Place::pinned, 256);
  plan.add("file buffer", "load", Place::pageable, 512);
  plan.add("copy", "save", Place::pinned, 256);
  EXPECT_EQ(plan.bytes_in(Place::pinned), 512U);
  EXPECT_EQ(plan.bytes_in(Place::pageable), 512U);
  EXPECT_EQ(plan.host_bytes(), 256U + 512U) << "load and save are never at one time";
}

TEST(MemoryPlan, UnpinsItsLastPinnedBytes) {
  MemoryPlan plan;
  plan.add("weights", "run", Place::pinned, 1024);
  plan.add("streamed", "run", Place::device, 512);
  plan.add("state", "run", Place::pinned, 2048);
  plan.add("file buffer", "load", Place::pageable, 256);
  const auto bytes = [](const MemoryPlan& p) {
    return std::array{p.bytes_in(Place::device), p.bytes_in(Place::pinned), p.bytes_in(Place::pageable)};
  };
  MemoryPlan none = plan;
  none.unpin(0);
  EXPECT_EQ(bytes(none), bytes(plan));
  MemoryPlan part = plan;
  part.unpin(257);  // rounded up to 512, by the alignment of the arena
  EXPECT_EQ(bytes(part), (std::array<std::size_t, 3>{512, 2560, 768}));
  ASSERT_EQ(part.entries.size(), 5U);
  EXPECT_EQ(part.entries[2].name, "state");
  EXPECT_EQ(part.entries[3].name, "state");
  EXPECT_EQ(part.entries[2].bytes, 1536U);
  EXPECT_EQ(part.entries[3].place, Place::pageable);
  MemoryPlan whole_row = plan;
  whole_row.unpin(2048);
  EXPECT_EQ(whole_row.entries.size(), 4U);
  EXPECT_EQ(whole_row.entries[0].place, Place::pinned);
  EXPECT_EQ(whole_row.entries[2].place, Place::pageable);
  MemoryPlan all = plan;
  all.unpin(std::numeric_limits<std::size_t>::max() / 2);
  EXPECT_EQ(bytes(all), (std::array<std::size_t, 3>{512, 0, 3328}));
  EXPECT_EQ(all.host_bytes(), plan.host_bytes());
}

TEST(MemoryPlan, RefusesNamelessAndRepeatedEntries) {
  MemoryPlan plan;
  plan.add("a", "run", Place::device, 1);
  EXPECT_THROW(plan.add("a", "load", Place::device, 1), MisuseError);
  EXPECT_NO_THROW(plan.add("a", "run", Place::pinned, 1));
  EXPECT_THROW(plan.add("", "run", Place::device, 1), MisuseError);
  EXPECT_THROW(plan.add("b", "", Place::device, 1), MisuseError);
}

TEST(FormatBytes, ChoosesTheUnit) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(100), "100 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1_KiB), "1.0 KiB");
  EXPECT_EQ(format_bytes(512_MiB), "512.0 MiB");
  EXPECT_EQ(format_bytes(1_MiB - 1), "1.0 MiB") << "never 1024.0 KiB";
  EXPECT_EQ(format_bytes(1_GiB + 512_MiB), "1.50 GiB");
  EXPECT_EQ(format_bytes(2048_GiB), "2.00 TiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::size_t>::max()), "16777216.00 TiB");
}

TEST(Place, HasNames) {
  EXPECT_EQ(name_of(Place::device), "device");
  EXPECT_EQ(name_of(Place::pinned), "pinned");
  EXPECT_EQ(name_of(Place::pageable), "pageable");
}

TEST(Error, IsOneLineWithItsExitCode) {
  const UsageError error("bad\nflag", "why", "try");
  EXPECT_STREQ(error.what(), "bad flag: why; try");
  EXPECT_EQ(error.exit_code(), ExitCode::usage);
  EXPECT_STREQ(MisuseError("what").what(), "what");
  const PlanError plan("a", "b", "c", "row\nrow");
  EXPECT_EQ(plan.table(), "row\nrow");
  EXPECT_EQ(static_cast<int>(plan.exit_code()), 3);
}

}  // namespace
}  // namespace tandem
