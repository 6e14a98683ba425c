#include "core/host/numa_node.hpp"

#include <fmt/format.h>

#include <new>
#include <utility>

#include "core/base/error.hpp"
#include "core/host/hwloc_owners.hpp"

namespace tandem {
namespace {

OwnedTopology read_machine() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  OwnedTopology topology(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  return hwloc_topology_load(raw) == 0 ? std::move(topology) : nullptr;
}

/// Read once: it takes tens of milliseconds, and machines do not change. Null where the system tells nothing. Never
/// destroyed: threads that outlive `main` may still be let go from their nodes.
hwloc_topology_t machine() {
  static const hwloc_topology_t topology = read_machine().release();
  return topology;
}

}  // namespace

struct NumaNode::Impl {
  int index = 0;
  hwloc_const_nodeset_t nodes = nullptr;  ///< NUMA nodes of the topology
  OwnedBitmap processors;                 ///< processors that this process may run on
};

NumaNode::NumaNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NumaNode::~NumaNode() = default;

std::shared_ptr<const NumaNode> NumaNode::of_pci(const std::string& bus) {
  const hwloc_topology_t topology = machine();
  if (topology == nullptr || hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) < 2) return nullptr;
  const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology, bus.c_str());
  const hwloc_obj_t near = device == nullptr ? nullptr : hwloc_get_non_io_ancestor_obj(topology, device);
  if (near == nullptr || near->nodeset == nullptr) return nullptr;
  try {
    return at(hwloc_bitmap_first(near->nodeset));
  } catch (const UsageError&) {  // bound elsewhere, by whoever started the process: that counts
    return nullptr;
  }
}

std::shared_ptr<const NumaNode> NumaNode::at(int index) {
  const std::string what = fmt::format("NUMA node {}", index);
  const hwloc_topology_t topology = machine();
  if (topology == nullptr) throw UsageError(what, "the system does not tell its nodes", "leave it out");
  const hwloc_obj_t node =
      index < 0 ? nullptr : hwloc_get_numanode_obj_by_os_index(topology, static_cast<unsigned>(index));
  if (node == nullptr) {
    const int count = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE);
    throw UsageError(what, fmt::format("this machine has {}", count), "name one that there is, the first is 0");
  }
  auto impl = std::make_unique<Impl>();
  impl->index = index;
  impl->nodes = node->nodeset;
  impl->processors.reset(hwloc_bitmap_dup(node->cpuset));
  const OwnedBitmap allowed(hwloc_bitmap_alloc());
  if (!impl->processors || !allowed) throw std::bad_alloc();
  if (hwloc_get_cpubind(topology, allowed.get(), HWLOC_CPUBIND_PROCESS) == 0) {
    hwloc_bitmap_and(impl->processors.get(), impl->processors.get(), allowed.get());
  }
  if (hwloc_bitmap_iszero(impl->processors.get()) != 0) {
    throw UsageError(what, "this process may use none of its processors", "name another one, or start it elsewhere");
  }
  return std::shared_ptr<const NumaNode>(new NumaNode(std::move(impl)));
}

int NumaNode::index() const noexcept { return impl_->index; }
int NumaNode::processors() const noexcept { return hwloc_bitmap_weight(impl_->processors.get()); }

void NumaNode::place(void* data, std::size_t bytes) const noexcept {
  hwloc_set_area_membind(machine(), data, bytes, impl_->nodes, HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET);
}

struct NumaNode::Bound::Before {
  OwnedBitmap processors{hwloc_bitmap_alloc()};
};

NumaNode::Bound::Bound(const NumaNode* node) noexcept {
  if (node == nullptr) return;
  try {
    auto before = std::make_unique<Before>();
    if (!before->processors || hwloc_get_cpubind(machine(), before->processors.get(), HWLOC_CPUBIND_THREAD) != 0 ||
        hwloc_set_cpubind(machine(), node->impl_->processors.get(), HWLOC_CPUBIND_THREAD) != 0) {
      return;
    }
    before_ = std::move(before);
  } catch (const std::bad_alloc&) {
    return;  // not bound: slower, no more
  }
}

NumaNode::Bound::~Bound() {
  if (before_) hwloc_set_cpubind(machine(), before_->processors.get(), HWLOC_CPUBIND_THREAD);
}

}  // namespace tandem
