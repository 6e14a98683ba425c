// Threads and pages that are kept on a NUMA node.
#include "core/host/numa_node.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>

#include <cstring>
#include <thread>

#include "core/base/error.hpp"
#include "core/host/mapped_memory.hpp"
#include "core/host/topology.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

cpu_set_t affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  return set;
}

bool same(const cpu_set_t& a, const cpu_set_t& b) { return CPU_EQUAL(&a, &b) != 0; }

TEST(NumaNode, RefusesNodesThatAreNotThere) {
  EXPECT_THAT([] { NumaNode::at(-1); }, ThrowsMessage<UsageError>(HasSubstr("NUMA node -1")));
  EXPECT_THAT([] { NumaNode::at(999); }, ThrowsMessage<UsageError>(HasSubstr("this machine has")));
}

TEST(NumaNode, IsNotChosenWhereThereIsNoChoice) {
  EXPECT_EQ(NumaNode::of_pci("nonsense"), nullptr);
  if (read_topology().numa_nodes < 2) {
    EXPECT_EQ(NumaNode::of_pci("0000:00:00.0"), nullptr);
  }
}

TEST(NumaNode, KeepsAThreadThereAndLetsItGoAgain) {
  const auto node = NumaNode::at(0);
  EXPECT_EQ(node->index(), 0);
  EXPECT_GE(node->processors(), 1);
  std::thread([&] {  // a thread of its own: its processors are narrowed
    cpu_set_t narrow = affinity();
    for (int cpu = CPU_SETSIZE - 1; CPU_COUNT(&narrow) > 1; --cpu) CPU_CLR(cpu, &narrow);
    ASSERT_EQ(sched_setaffinity(0, sizeof narrow, &narrow), 0);
    {
      const NumaNode::Bound bound(node.get());
      const cpu_set_t now = affinity();
      EXPECT_EQ(CPU_COUNT(&now), node->processors());
    }
    EXPECT_TRUE(same(affinity(), narrow));
    {
      const NumaNode::Bound nowhere(nullptr);
      EXPECT_TRUE(same(affinity(), narrow));
    }
  })
      .join();
}

TEST(NumaNode, PagesComeFromIt) {
  const auto node = NumaNode::at(0);
  constexpr std::size_t bytes = std::size_t{1} << 20;
  void* const data = MappedMemory::map(bytes);
  node->place(data, bytes);
  std::memset(data, 1, bytes);
  hwloc_topology_t topology = nullptr;
  ASSERT_EQ(hwloc_topology_init(&topology), 0);
  ASSERT_EQ(hwloc_topology_load(topology), 0);
  hwloc_bitmap_t nodes = hwloc_bitmap_alloc();
  hwloc_membind_policy_t policy = HWLOC_MEMBIND_DEFAULT;
  if (hwloc_get_area_membind(topology, data, bytes, nodes, &policy, HWLOC_MEMBIND_BYNODESET) == 0) {
    EXPECT_EQ(policy, HWLOC_MEMBIND_BIND) << "the area has a policy of its own";
    EXPECT_EQ(hwloc_bitmap_first(nodes), 0);
    EXPECT_EQ(hwloc_bitmap_weight(nodes), 1);
  }
  hwloc_bitmap_free(nodes);
  hwloc_topology_destroy(topology);
  MappedMemory::unmap(data, bytes);
}

}  // namespace
}  // namespace tandem
