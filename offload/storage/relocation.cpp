#include "offload/storage/relocation.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/device/watched_wait.hpp"
#include "core/memory/memory.hpp"
#include "core/numerics/adam_state.hpp"
#include "offload/storage/copy_order.hpp"
#include "offload/storage/storage.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {
namespace {

using namespace literals;
constexpr std::size_t scratch_bytes = 4_MiB;

struct Location {
  Space space = Space::host;
  const void* address = nullptr;
};

class Relocation {
 public:
  Relocation(Device& device, const ParameterLayout& layout, const BlockAddresses& blocks, double watchdog_seconds)
      : device_(device),
        layout_(layout),
        blocks_(blocks),
        watchdog_seconds_(watchdog_seconds),
        stream_(device.make_stream("relocation")) {}

  void want_state(const CarvedPlan& from, const CarvedPlan& to);
  void want_weights(const CarvedPlan& from, const CarvedPlan& to);
  void perform();
  void fill_second_copies(const CarvedPlan& plan);

 private:
  void want(const Location& from, const Location& to, std::size_t bytes);
  std::size_t offset_of(const Location& location) const;
  std::byte* address_of(Space space, std::size_t offset);
  void wait() { wait_to_the_end(device_, stream_, {"state on its way", watchdog_seconds_}); }

  Device& device_;
  const ParameterLayout& layout_;
  BlockAddresses blocks_;
  double watchdog_seconds_;
  std::vector<PlacedCopy> wanted_;
  std::vector<std::byte> scratch_;
  Stream stream_;
};

std::size_t Relocation::offset_of(const Location& location) const {
  const std::byte* const begin = location.space == Space::device ? blocks_.device : blocks_.host;
  return static_cast<std::size_t>(static_cast<const std::byte*>(location.address) - begin);
}

std::byte* Relocation::address_of(Space space, std::size_t offset) {
  std::byte* const begin = space == Space::device ? blocks_.device
                           : space == Space::host ? blocks_.host
                                                  : scratch_.data();
  return begin + offset;
}

void Relocation::want(const Location& from, const Location& to, std::size_t bytes) {
  if (bytes == 0) return;
  wanted_.push_back({from.space, to.space, offset_of(from), offset_of(to), bytes});
}

/// Plans the moves of state. Both plans list subgroups by layer, then offset, but may cut them differently: state moves
/// in the ranges that a subgroup of one and a subgroup of the other have in common.
void Relocation::want_state(const CarvedPlan& from, const CarvedPlan& to) {
  const auto space = [](const Subgroup& s) { return s.tier == Tier::device ? Space::device : Space::host; };
  const SubgroupIndex old_end = subgroups_of(from.plan).past;
  const SubgroupIndex fresh_end = subgroups_of(to.plan).past;
  for (SubgroupIndex i(0), j(0); i < old_end && j < fresh_end;) {
    const Subgroup& old = subgroup_at(from.plan, i);
    const Subgroup& fresh = subgroup_at(to.plan, j);
    const std::int64_t begin = std::max(old.begin, fresh.begin);
    const std::int64_t end = std::min(old.end, fresh.end);
    const std::int64_t count = end - begin;
    const StateFormat format = from.plan.format_of(old);
    const StateArrays a = from.carving.subgroups[i].state.from(begin - old.begin, format);
    const StateArrays b = to.carving.subgroups[j].state.from(begin - fresh.begin, format);
    want({space(old), a.master}, {space(fresh), b.master}, master_bytes(format, count));
    want({space(old), a.m}, {space(fresh), b.m}, m_bytes(format, count));
    want({space(old), a.v}, {space(fresh), b.v}, v_bytes(format, count));
    if (old.end == end) ++i;
    if (fresh.end == end) ++j;
  }
}

/// Asks for copies of the rank's own weights. The device's weights of a resident layer are always the newest; the
/// host's may lack updates by the device.
void Relocation::want_weights(const CarvedPlan& from, const CarvedPlan& to) {
  for (const LayerIndex l : layers_of(layout_)) {
    const Layer& layer = layer_at(layout_, l);
    const LayerSlice slice = slice_of(layer, from.plan.rank);
    const auto place = [&](const CarvedPlan& plan, std::int64_t element) {
      return placement_at(plan.plan, l).resident
                 ? Location{Space::device, plan.carving.resident_weights[l] + layer.weight_offset(element)}
                 : Location{Space::host, plan.carving.host_weights[l] + weight_place(layer, slice, element)};
    };
    slice.for_runs([&](std::int64_t begin, std::int64_t count) {
      want(place(from, begin), place(to, begin), layer.weight_offset(begin + count) - layer.weight_offset(begin));
    });
  }
}

void Relocation::perform() {
  scratch_.resize(scratch_bytes);
  for (const PlacedCopy& c : order_copies(wanted_, scratch_bytes)) {
    std::byte* const target = address_of(c.to, c.target);
    const std::byte* const source = address_of(c.from, c.source);
    if (c.from != Space::device && c.to != Space::device) {
      std::memcpy(target, source, c.bytes);
      continue;
    }
    const CopyKind kind = c.from != Space::device ? CopyKind::host_to_device
                          : c.to != Space::device ? CopyKind::device_to_host
                                                  : CopyKind::device_to_device;
    device_.copy(target, source, c.bytes, kind, stream_);
    // The next copy may be the processor's own, and needs this one done.
    wait();
  }
}

/// Weights that the new plan has both on the device and on the host went to the device.
void Relocation::fill_second_copies(const CarvedPlan& plan) {
  for (const LayerIndex l : layers_of(layout_)) {
    if (!placement_at(plan.plan, l).resident || !placement_at(plan.plan, l).host_copy) continue;
    const Layer& layer = layer_at(layout_, l);
    const LayerSlice slice = slice_of(layer, plan.plan.rank);
    slice.for_runs([&](std::int64_t begin, std::int64_t count) {
      device_.copy(plan.carving.host_weights[l] + weight_place(layer, slice, begin),
                   plan.carving.resident_weights[l] + layer.weight_offset(begin),
                   layer.weight_offset(begin + count) - layer.weight_offset(begin), CopyKind::device_to_host, stream_);
    });
  }
  wait();
}

}  // namespace

void relocate(Device& device, const ParameterLayout& layout, const BlockAddresses& blocks, const CarvedPlan& from,
              const CarvedPlan& to, double watchdog_seconds) {
  Relocation relocation(device, layout, blocks, watchdog_seconds);
  relocation.want_state(from, to);
  relocation.want_weights(from, to);
  relocation.perform();
  relocation.fill_second_copies(to);
}

}  // namespace tandem
