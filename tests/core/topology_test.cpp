// Processors and memory of the machine, within the limits of its control groups.
#include "core/host/topology.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "core/host/cgroup.hpp"

namespace tandem {
namespace {

namespace fs = std::filesystem;

TEST(Topology, KnowsThisMachineWithinItsLimits) {
  const Topology t = read_topology();
  EXPECT_GE(t.logical_cpus, 1);
  EXPECT_LE(t.logical_cpus, static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_GE(t.cores, 0);
  EXPECT_GT(t.memory_bytes, 0U);
  EXPECT_LT(t.cache_bytes, t.memory_bytes);
  EXPECT_GT(t.available_memory_bytes, 0U);
  EXPECT_LE(t.available_memory_bytes, t.memory_room_bytes);
  EXPECT_LE(t.memory_room_bytes, t.memory_bytes);
}

TEST(Topology, RespectsTheAffinityOfTheProcess) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const Topology t = read_topology();
  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(t.logical_cpus, 1);
  EXPECT_LE(t.cores, 1);
}

TEST(ProcessMemory, SeesAnonymousMemoryComeAndKeepsThePeak) {
  const ProcessMemory before = sample_process_memory();
  ASSERT_GT(before.anonymous, 0U);
  constexpr std::size_t size = std::size_t{64} << 20;
  // Mapped, not allocated: a sanitizer's allocator keeps what is freed.
  void* block = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(block, MAP_FAILED);
  std::memset(block, 1, size);
  const ProcessMemory during = sample_process_memory();
  ASSERT_EQ(::munmap(block, size), 0);
  const ProcessMemory after = sample_process_memory();
  EXPECT_GE(during.anonymous, before.anonymous + size / 2);
  EXPECT_GE(after.peak_anonymous, during.anonymous);
  EXPECT_LT(after.anonymous, during.anonymous);
}

/// A made-up file system of proc and control groups.
class FakeRoot : public ::testing::Test {
 protected:
  FakeRoot() : root_(fs::temp_directory_path() / ("tandem_cgroup_" + std::to_string(::getpid()))) {
    fs::remove_all(root_);
  }
  ~FakeRoot() override { fs::remove_all(root_); }
  void file(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  CgroupLimits read() { return read_cgroup_limits(root_); }

  static constexpr const char* mount2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
  fs::path root_;
};

TEST_F(FakeRoot, WithoutFilesNothingIsLimited) {
  const CgroupLimits limits = read();
  EXPECT_FALSE(limits.memory_limit);
  EXPECT_FALSE(limits.memory_room);
  EXPECT_FALSE(limits.cpus);
}

TEST_F(FakeRoot, Version2TakesTheLowestOfTheGroupAndItsAncestors) {
  file("proc/self/mountinfo", mount2);
  file("proc/self/cgroup", "0::/a/b\n");
  file("sys/fs/cgroup/a/memory.max", "4000\n");
  file("sys/fs/cgroup/a/memory.current", "3500\n");
  file("sys/fs/cgroup/a/memory.stat", "anon 3000\ninactive_file 300\nfile 500\n");
  file("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
  file("sys/fs/cgroup/a/b/memory.max", "max\n");
  file("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  const CgroupLimits limits = read();
  EXPECT_EQ(limits.memory_limit, 4000U);
  EXPECT_EQ(limits.memory_room, 4000U - (3500U - 300U));
  EXPECT_EQ(limits.cpus, 1.5);
}

TEST_F(FakeRoot, Version2HeedsTheSoftLimitAndFullGroups) {
  file("proc/self/mountinfo", mount2);
  file("proc/self/cgroup", "0::/\n");
  file("sys/fs/cgroup/memory.max", "9000\n");
  file("sys/fs/cgroup/memory.high", "8000\n");
  file("sys/fs/cgroup/memory.current", "8500\n");
  const CgroupLimits limits = read();
  EXPECT_EQ(limits.memory_limit, 8000U);
  EXPECT_EQ(limits.memory_room, 0U);
}

TEST_F(FakeRoot, AGroupOutsideOfTheMountIsTheMount) {
  file("proc/self/mountinfo", "30 23 0:26 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  file("proc/self/cgroup", "0::/../elsewhere\n");
  file("sys/fs/cgroup/memory.max", "77\n");
  EXPECT_EQ(read().memory_limit, 77U);
}

TEST_F(FakeRoot, Version1ReadsEachControllersHierarchy) {
  file("proc/self/mountinfo",
       "31 23 0:27 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
       "32 23 0:28 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n");
  file("proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n3:cpuset:/docker/x\n");
  file("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  file("sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n");
  file("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 100000\n");
  file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n");
  file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  const CgroupLimits limits = read();
  EXPECT_EQ(limits.memory_limit, 1000000U);
  EXPECT_EQ(limits.memory_room, 700000U);
  EXPECT_EQ(limits.cpus, 0.5);
}

TEST_F(FakeRoot, Version1UnlimitedIsNoLimit) {
  file("proc/self/mountinfo",
       "31 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
       "32 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
  file("proc/self/cgroup", "5:memory:/\n4:cpu:/\n");
  file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  const CgroupLimits limits = read();
  EXPECT_FALSE(limits.memory_limit);
  EXPECT_FALSE(limits.cpus);
}

TEST_F(FakeRoot, MalformedFilesAreNoLimit) {
  file("proc/self/mountinfo", "nonsense\n- cgroup2\n\n");
  file("proc/self/cgroup", "no colons\n0::\n::\n");
  file("sys/fs/cgroup/memory.max", "many\n");
  EXPECT_FALSE(read().memory_limit);
  file("proc/self/mountinfo", mount2);
  file("sys/fs/cgroup/cpu.max", "100000 0\n");
  EXPECT_FALSE(read().memory_limit);
  EXPECT_FALSE(read().cpus);
}

/// A machine of 64,000 KiB with 40,000 free, whose process is in a group.
class GroupOnAMachine : public FakeRoot {
 protected:
  GroupOnAMachine() {
    file("proc/meminfo", "MemTotal:       64000 kB\nMemFree:         1000 kB\nMemAvailable:   40000 kB\n");
    file("proc/self/mountinfo", mount2);
    file("proc/self/cgroup", "0::/job\n");
  }
  void limit(std::size_t most, std::size_t used) {
    file("sys/fs/cgroup/job/memory.max", std::to_string(most) + "\n");
    file("sys/fs/cgroup/job/memory.current", std::to_string(used) + "\n");
  }
  void expect(std::size_t memory, std::size_t available, std::size_t room) {
    const Topology t = read_topology(root_);
    EXPECT_EQ(t.memory_bytes, memory);
    EXPECT_EQ(t.available_memory_bytes, available);
    EXPECT_EQ(t.memory_room_bytes, room);
  }
  static constexpr std::size_t installed = std::size_t{64000} * 1024;
  static constexpr std::size_t free = std::size_t{40000} * 1024;
};

TEST_F(GroupOnAMachine, WithoutALimitMemoryIsTheMachines) { expect(installed, free, installed); }

TEST_F(GroupOnAMachine, ALimitBelowTheMachinesLowersAll) {
  limit(30'000'000, 10'000'000);
  expect(30'000'000, 20'000'000, 20'000'000);
}

TEST_F(GroupOnAMachine, RoomMayBeLessThanInstalledAndMoreThanIsFree) {
  limit(60'000'000, 10'000'000);
  expect(60'000'000, free, 50'000'000);
}

TEST_F(GroupOnAMachine, ALimitBeyondTheMachineChangesNothing) {
  limit(800'000'000, 10'000'000);
  expect(installed, free, installed);
}

TEST_F(GroupOnAMachine, NoRoomAtAllIsKnownAndNotZero) {
  limit(20'000'000, 25'000'000);
  expect(20'000'000, 1, 1);
}

TEST_F(GroupOnAMachine, TheLimitIsTheMemoryWhereTheMachinesIsUnknown) {
  file("proc/meminfo", "");
  limit(20'000'000, 5'000'000);
  expect(20'000'000, 0, 0);
}

TEST_F(GroupOnAMachine, AQuotaIsRoundedUpToWholeProcessors) {
  file("sys/fs/cgroup/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(read_topology(root_).logical_cpus, 1);
}

}  // namespace
}  // namespace tandem
