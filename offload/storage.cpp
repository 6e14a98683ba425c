#include "offload/storage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/device/watched_wait.hpp"
#include "core/ops/update_kernels.hpp"
#include "offload/relocation.hpp"

namespace tandem {
namespace {

template <class T>
T* carve(Arena& arena, std::int64_t elements, std::string_view what) {
  return static_cast<T*>(arena.carve(static_cast<std::size_t>(elements) * sizeof(T), what));
}

StateArrays carve_state(Arena& arena, std::int64_t elements, StateFormat format) {
  return {arena.carve(master_bytes(format, elements), "master"), arena.carve(moment_bytes(format, elements), "m"),
          arena.carve(moment_bytes(format, elements), "v")};
}

std::size_t array_bytes(StateFormat format, StateArray array, std::int64_t elements) {
  return array == StateArray::master ? master_bytes(format, elements) : moment_bytes(format, elements);
}

/// Where an array of a piece of `count` elements begins in the file, or in a buffer for it.
std::size_t array_offset(StateFormat format, StateArray array, std::int64_t count) {
  if (array == StateArray::master) return 0;
  const std::size_t m = align_up(master_bytes(format, count));
  return array == StateArray::m ? m : m + align_up(moment_bytes(format, count));
}

void check_filled(const Arena& arena, std::size_t spare, std::size_t planned, std::string_view where) {
  if (align_up(arena.used()) + spare != planned) {
    throw MisuseError(fmt::format("carving {} memory used {} bytes, {} are spare", where, arena.used(), spare),
                      fmt::format("the plan says {}", planned));
  }
}

void carve_device(Arena& arena, const ParameterLayout& layout, const Plan& plan, Carving& carving) {
  for (int l = 0; l < layout.layer_count(); ++l) {
    if (!plan.layers[static_cast<std::size_t>(l)].resident) continue;
    carving.resident_weights[static_cast<std::size_t>(l)] =
        carve<bf16>(arena, layout.layer(l).elements, "resident weights");
  }
  for (const SizeClass& size : plan.size_classes) {
    for (int i = 0; i < size.weight_buffers; ++i) {
      carving.weight_buffers.push_back(carve<bf16>(arena, size.weight_elements, "weight buffer"));
    }
  }
  for (const SizeClass& size : plan.size_classes) {
    for (int i = 0; i < size.gradient_buffers; ++i) {
      carving.gradient_buffers.push_back(static_cast<std::byte*>(arena.carve(size.gradient_bytes, "gradient buffer")));
    }
  }
  for (const SizeClass& size : plan.size_classes) {
    for (int i = 0; i < size.receive_buffers; ++i) {
      void* const data = arena.carve(size.receive_bytes, "gradients of other ranks");
      carving.receive_buffers.push_back(static_cast<std::byte*>(data));
    }
  }
  for (const SizeClass& size : plan.size_classes) {
    for (int i = 0; i < size.sum_buffers; ++i) {
      carving.sum_buffers.push_back(carve<float>(arena, size.sum_elements, "accumulated gradient"));
    }
  }
  for (int i = 0; i < plan.staging_pieces; ++i) {
    carving.staging.push_back(carve<bf16>(arena, plan.piece_elements, "staging"));
  }
  bool returns_gradient = false;
  for (std::size_t i = 0; i < plan.subgroups.size(); ++i) {
    const Subgroup& s = plan.subgroups[i];
    SubgroupMemory& memory = carving.subgroups[i];
    if (s.tier == Tier::device) memory.state = carve_state(arena, s.count(), plan.state);
    if (!s.gradient_on_device) {
      returns_gradient |= s.updater == Updater::device;
      continue;
    }
    memory.gradient = carve<bf16>(arena, s.count(), "kept gradient");
    memory.device_norm = carve<double>(arena, s.count() / layout_quantum, "gradient norm");
    if (plan.gradients_of_step() > 1) memory.sum = carve<float>(arena, s.count(), "accumulated gradient");
  }
  for (int i = 0; i < plan.state_buffers; ++i) {
    StateBuffer& buffer = carving.state_buffers.emplace_back();
    buffer.state = carve_state(arena, plan.piece_elements, plan.state);
    if (returns_gradient) buffer.gradient = carve<bf16>(arena, plan.piece_elements, "streamed gradient");
  }
  check_filled(arena, plan.spare_device_memory, plan.memory.device_bytes(), "device");
}

/// Of the subgroups whose state is on the host. What travels to the device and back comes first where memory is pinned
/// in part only: the CPU's own updates reach pageable memory as fast. Elsewhere in the plan's order, so that plans that
/// differ in who updates have state in the same places.
std::vector<std::size_t> order_of_states(const Plan& plan, bool streamed_first) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < plan.subgroups.size(); ++i) {
    if (plan.subgroups[i].tier == Tier::host) order.push_back(i);
  }
  if (streamed_first) {
    std::stable_partition(order.begin(), order.end(),
                          [&](std::size_t i) { return plan.subgroups[i].updater == Updater::device; });
  }
  return order;
}

/// The rows of the plan in its order: what is copied most comes first, for the system may pin the first part alone.
void carve_host(Arena& arena, const ParameterLayout& layout, const Plan& plan, bool streamed_first, Carving& carving) {
  // At the beginning of the block, which is one of a page: only whole blocks of memory go past the page cache.
  for (int i = 0; i < plan.file_buffers; ++i) {
    const std::size_t bytes = file_state_bytes(plan.piece_elements, plan.state);
    carving.file_buffers.push_back(static_cast<std::byte*>(arena.carve(bytes, "state from a file")));
  }
  for (int l = 0; l < layout.layer_count(); ++l) {
    if (!plan.layers[static_cast<std::size_t>(l)].host_copy) continue;
    const std::int64_t owned = slice_of(layout.layer(l), plan.rank).count();
    carving.host_weights[static_cast<std::size_t>(l)] = carve<bf16>(arena, owned, "weights");
  }
  const auto for_subgroups = [&](auto call) {
    for (std::size_t i = 0; i < plan.subgroups.size(); ++i) call(plan.subgroups[i], carving.subgroups[i]);
  };
  for_subgroups([&](const Subgroup& s, SubgroupMemory& memory) {
    if (!s.gradient_on_device) memory.gradient = carve<bf16>(arena, s.count(), "gradient");
  });
  for_subgroups([&](const Subgroup& s, SubgroupMemory& memory) {
    memory.host_norm = carve<double>(arena, s.count() / layout_quantum, "gradient norm");
  });
  for (const std::size_t i : order_of_states(plan, streamed_first)) {
    carving.subgroups[i].state = carve_state(arena, plan.subgroups[i].count(), plan.state);
  }
  for_subgroups([&](const Subgroup& s, SubgroupMemory& memory) {
    if (!s.gradient_on_device && plan.gradients_of_step() > 1 && !plan.sends_sums) {
      memory.sum = carve<float>(arena, s.count(), "accumulated gradient");
    }
  });
  check_filled(arena, plan.spare_host_memory, plan.memory.host_bytes(), "host");
}

void require_room(std::size_t needed, std::size_t booked, std::string_view where) {
  if (needed <= booked) return;
  throw PlanError(fmt::format("the plan needs {} of {} memory", format_bytes(needed), where),
                  fmt::format("the engine has booked {}", format_bytes(booked)),
                  "make the plan under the ceiling of what is booked");
}

}  // namespace

Storage::Storage(Device& device, const ParameterLayout& layout, const Plan& plan, const std::filesystem::path& folder,
                 double watchdog_seconds)
    : watchdog_seconds_(watchdog_seconds), format_(plan.state), piece_elements_(plan.piece_elements) {
  if (plan.file_buffers > 0) {
    if (folder.empty()) throw MisuseError("the plan has state in a file", "the options name no folder for it");
    file_ = std::make_unique<StateFile>(folder, plan.file_bytes_of_step());
  }
  if (plan.memory.device_bytes() > 0) device_block_ = device.allocate(plan.memory.device_bytes(), "offload engine");
  const std::size_t pageable_before = device.pageable_bytes();
  if (plan.memory.host_bytes() > 0) host_block_ = device.allocate_pinned(plan.memory.host_bytes(), "offload engine");
  pageable_bytes_ = device.pageable_bytes() - std::min(pageable_before, device.pageable_bytes());
  for (const Layer& layer : layout.layers()) slices_.push_back(slice_of(layer, plan.rank));
  carving_ = carve(layout, plan);
  const Stream stream = device.make_stream("setup");
  if (device_block_) device.fill_zero(device_block_.data(), device_block_.bytes(), stream);
  wait_to_the_end(device, stream, {"zeroed memory", watchdog_seconds});
}

Carving Storage::carve(const ParameterLayout& layout, const Plan& plan) const {
  Carving carving;
  carving.resident_weights.resize(static_cast<std::size_t>(layout.layer_count()));
  carving.host_weights.resize(static_cast<std::size_t>(layout.layer_count()));
  carving.subgroups.resize(plan.subgroups.size());
  std::uint64_t place = 0;
  for (std::size_t i = 0; i < plan.subgroups.size(); ++i) {
    if (plan.subgroups[i].tier != Tier::file) continue;
    carving.subgroups[i].file_place = place;
    carving.subgroups[i].file_count = plan.subgroups[i].count();
    place += plan.file_bytes(plan.subgroups[i]);
  }
  Arena on_device(device_block_.data(), device_block_.bytes(), "device");
  carve_device(on_device, layout, plan, carving);
  Arena on_host(host_block_.data(), host_block_.bytes(), "host");
  carve_host(on_host, layout, plan, pageable_bytes_ > 0, carving);
  return carving;
}

StateArrays Storage::file_buffer(int i, std::int64_t count) const {
  std::byte* const begin = carving_.file_buffers[static_cast<std::size_t>(i)];
  const auto at = [&](StateArray array) { return begin + array_offset(format_, array, count); };
  return {at(StateArray::master), at(StateArray::m), at(StateArray::v)};
}

/// Of the piece that begins with element `at` of a subgroup.
std::uint64_t Storage::place_in_file(int subgroup, std::int64_t at) const {
  const auto pieces = static_cast<std::uint64_t>(at / piece_elements_);
  return this->subgroup(subgroup).file_place + pieces * file_state_bytes(piece_elements_, format_);
}

void Storage::read_file(int subgroup, std::int64_t at, std::int64_t count, int buffer) const {
  std::byte* const begin = carving_.file_buffers[static_cast<std::size_t>(buffer)];
  file_->read_blocks(place_in_file(subgroup, at), {begin, file_state_bytes(count, format_)});
}

void Storage::write_file(int subgroup, std::int64_t at, std::int64_t count, int buffer) const {
  const std::byte* const begin = carving_.file_buffers[static_cast<std::size_t>(buffer)];
  file_->write_blocks(place_in_file(subgroup, at), {begin, file_state_bytes(count, format_)});
}

/// Calls move(place, part) for the parts of an array that lie in the file one after another: a piece's.
template <class Byte, class Move>
void Storage::for_file_ranges(int subgroup, StateArray array, std::int64_t at, std::span<Byte> bytes,
                              const Move& move) const {
  const std::int64_t elements = this->subgroup(subgroup).file_count;
  for (std::int64_t piece = at / piece_elements_ * piece_elements_; !bytes.empty(); piece += piece_elements_) {
    const std::int64_t count = std::min(piece_elements_, elements - piece);
    const std::size_t before = array_bytes(format_, array, std::max<std::int64_t>(0, at - piece));
    const std::size_t part = std::min(bytes.size(), array_bytes(format_, array, count) - before);
    move(place_in_file(subgroup, piece) + array_offset(format_, array, count) + before, bytes.first(part));
    bytes = bytes.subspan(part);
  }
}

void Storage::read_file(int subgroup, StateArray array, std::int64_t at, std::span<std::byte> bytes) const {
  for_file_ranges(subgroup, array, at, bytes,
                  [this](std::uint64_t place, std::span<std::byte> part) { file_->read(place, part); });
}

void Storage::write_file(int subgroup, StateArray array, std::int64_t at, std::span<const std::byte> bytes) const {
  for_file_ranges(subgroup, array, at, bytes,
                  [this](std::uint64_t place, std::span<const std::byte> part) { file_->write(place, part); });
}

void Storage::require_room_for(const Plan& plan) const {
  require_room(plan.memory.device_bytes() - plan.spare_device_memory, device_block_.bytes(), "device");
  require_room(plan.memory.host_bytes() - plan.spare_host_memory, host_block_.bytes(), "host");
}

void Storage::carve_anew(Device& device, const ParameterLayout& layout, const Plan& from, const Plan& to) {
  Carving carving = carve(layout, to);
  const BlockAddresses blocks{static_cast<std::byte*>(device_block_.data()),
                              static_cast<std::byte*>(host_block_.data())};
  relocate(device, layout, blocks, {from, carving_}, {to, carving}, watchdog_seconds_);
  carving_ = std::move(carving);
}

}  // namespace tandem
