#include "gpu_ops/cuda_device_numa.hpp"

#include <hwloc.h>

#include <type_traits>
#include <utility>

namespace tandem {
namespace {

struct TopologyCloser {
  void operator()(hwloc_topology_t t) const noexcept { hwloc_topology_destroy(t); }
};
using OwnedTopology = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, TopologyCloser>;

OwnedTopology topology_with_devices() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  OwnedTopology topology(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  return hwloc_topology_load(raw) == 0 ? std::move(topology) : nullptr;
}

}  // namespace

struct NumaNode::Impl {
  hwloc_topology_t topology = nullptr;
  hwloc_const_nodeset_t nodes = nullptr;  ///< of the topology
};

NumaNode::NumaNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
NumaNode::~NumaNode() = default;

std::shared_ptr<const NumaNode> NumaNode::of_pci(const std::string& bus) {
  // Read once: it takes tens of milliseconds, and machines do not change.
  static const OwnedTopology machine = topology_with_devices();
  hwloc_topology_t topology = machine.get();
  if (topology == nullptr || hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE) < 2) return nullptr;
  const hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology, bus.c_str());
  const hwloc_obj_t near = device == nullptr ? nullptr : hwloc_get_non_io_ancestor_obj(topology, device);
  if (near == nullptr || near->nodeset == nullptr) return nullptr;
  auto impl = std::make_unique<Impl>();
  impl->topology = topology;
  impl->nodes = near->nodeset;
  return std::shared_ptr<const NumaNode>(new NumaNode(std::move(impl)));
}

void NumaNode::place(void* data, std::size_t bytes) const noexcept {
  hwloc_set_area_membind(impl_->topology, data, bytes, impl_->nodes, HWLOC_MEMBIND_BIND, HWLOC_MEMBIND_BYNODESET);
}

}  // namespace tandem
