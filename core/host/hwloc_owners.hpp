#pragma once
// Owners of hwloc's objects. Included by sources of this module alone, so that nobody else depends on hwloc.
#include <hwloc.h>

#include <memory>
#include <type_traits>

namespace tandem {

struct TopologyCloser {
  void operator()(hwloc_topology_t t) const noexcept { hwloc_topology_destroy(t); }
};
struct BitmapCloser {
  void operator()(hwloc_bitmap_t b) const noexcept { hwloc_bitmap_free(b); }
};
/// Null where there is none.
using OwnedTopology = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, TopologyCloser>;
using OwnedBitmap = std::unique_ptr<std::remove_pointer_t<hwloc_bitmap_t>, BitmapCloser>;

}  // namespace tandem
