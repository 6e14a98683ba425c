#include "offload/storage/storage.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/device/watched_wait.hpp"
#include "core/ops/update_kernels.hpp"
#include "offload/storage/relocation.hpp"
#include "scheduler/plan/memory_layout.hpp"

namespace tandem {
namespace {

std::size_t array_bytes(StateFormat format, StateArray array, std::int64_t elements) {
  switch (array) {
    case StateArray::master:
      return master_bytes(format, elements);
    case StateArray::m:
      return m_bytes(format, elements);
    case StateArray::v:
      return v_bytes(format, elements);
  }
  return 0;
}

/// Bytes between the beginning of `count` elements of state and that of one of their arrays.
std::size_t array_offset(StateFormat format, StateArray array, std::int64_t count) {
  if (array == StateArray::master) return 0;
  const std::size_t m = align_up(master_bytes(format, count));
  return array == StateArray::m ? m : m + align_up(m_bytes(format, count));
}

/// The arrays of `count` elements of state, which begin at `begin` and are each aligned.
StateArrays arrays_at(std::byte* begin, StateFormat format, std::int64_t count) {
  const auto at = [&](StateArray array) { return begin + array_offset(format, array, count); };
  return {at(StateArray::master), at(StateArray::m), at(StateArray::v)};
}

template <class T>
T* of(std::byte* data) {
  return reinterpret_cast<T*>(data);
}

/// Gives each buffer of a plan its place: in one of two blocks, or in the file, where places count from 0.
class PlanCarver {
 public:
  PlanCarver(const ParameterLayout& layout, const Plan& plan, const MemoryBlock& device, const MemoryBlock& host)
      : plan_(plan), device_(device.data(), device.bytes(), "device"), host_(host.data(), host.bytes(), "host") {
    carving_.resident_weights.resize(layout.layers().size());
    carving_.host_weights.resize(layout.layers().size());
    carving_.layer_codes.resize(layout.layers().size());
    carving_.subgroups.resize(plan.subgroups.size());
    for (const SubgroupIndex i : subgroups_of(plan)) {
      carving_.subgroups[i].format = plan.format_of(subgroup_at(plan, i));
      carving_.subgroups[i].piece_elements = plan.piece_of(subgroup_at(plan, i));
    }
    carving_.state_buffers.resize(static_cast<std::size_t>(plan.state_buffers));
  }

  void row(std::string_view name, Place place) {
    row_ = name;
    place_ = place;
  }

  void take(Buffer buffer, std::size_t index, std::size_t bytes) {
    if (place_ == Place::file) {
      const SubgroupIndex of = SubgroupIndex::at(index);
      SubgroupMemory& subgroup = carving_.subgroups[of];
      subgroup.file_place = in_file_;
      subgroup.file_count = subgroup_at(plan_, of).count();
      in_file_ += bytes;
      return;
    }
    Arena& arena = place_ == Place::device ? device_ : host_;
    put(buffer, index, static_cast<std::byte*>(arena.carve(bytes, row_)));
  }

  /// Throws MisuseError where the plan's totals are others.
  Carving take() && {
    check_filled(device_, plan_.spare_device_memory, plan_.memory.device_bytes(), "device");
    check_filled(host_, plan_.spare_host_memory, plan_.memory.host_bytes(), "host");
    return std::move(carving_);
  }

 private:
  void put(Buffer buffer, std::size_t index, std::byte* data) {
    const bool on_device = place_ == Place::device;
    const LayerIndex layer = LayerIndex::at(index);
    const SubgroupIndex group = SubgroupIndex::at(index);
    switch (buffer) {
      case Buffer::layer_weights:
        (on_device ? carving_.resident_weights : carving_.host_weights)[layer] = data;
        break;
      case Buffer::weights:
        carving_.weight_buffers.push_back(data);
        break;
      case Buffer::layer_codes:
        carving_.layer_codes[layer] = data;
        break;
      case Buffer::fetched_codes:
        carving_.fetched_codes.push_back(data);
        break;
      case Buffer::decoded:
        carving_.decoded = data;
        break;
      case Buffer::gradient:
        carving_.gradient_buffers.push_back(data);
        break;
      case Buffer::received:
        carving_.receive_buffers.push_back(data);
        break;
      case Buffer::sum:
        carving_.sum_buffers.push_back(of<float>(data));
        break;
      case Buffer::staging:
        carving_.staging.push_back(data);
        break;
      case Buffer::streamed_state:
        carving_.state_buffers[index].state = data;
        break;
      case Buffer::streamed_gradient:
        carving_.state_buffers[index].gradient = data;
        break;
      case Buffer::file_piece:
        carving_.file_buffers.push_back(data);
        break;
      case Buffer::subgroup_gradient:
        carving_.subgroups[group].gradient = data;
        break;
      case Buffer::subgroup_sum:
        carving_.subgroups[group].sum = of<float>(data);
        break;
      case Buffer::subgroup_norm:
        (on_device ? carving_.subgroups[group].device_norm : carving_.subgroups[group].host_norm) = of<double>(data);
        break;
      case Buffer::subgroup_undo:
        carving_.subgroups[group].undo = data;
        break;
      case Buffer::gradient_norm:
        carving_.gradient_norms.push_back(of<double>(data));
        break;
      case Buffer::subgroup_state:
        carving_.subgroups[group].state =
            arrays_at(data, carving_.subgroups[group].format, subgroup_at(plan_, group).count());
        break;
    }
  }

  static void check_filled(const Arena& arena, std::size_t spare, std::size_t planned, std::string_view where) {
    if (align_up(arena.used()) + spare == planned) return;
    throw MisuseError(fmt::format("carving {} memory used {} bytes, {} are spare", where, arena.used(), spare),
                      fmt::format("the plan says {}", planned));
  }

  const Plan& plan_;
  Arena device_, host_;
  std::uint64_t in_file_ = 0;
  std::string_view row_;
  Place place_ = Place::device;
  Carving carving_;
};

void require_room(std::size_t needed, std::size_t booked, std::string_view where) {
  if (needed <= booked) return;
  throw PlanError(fmt::format("the plan needs {} of {} memory", format_bytes(needed), where),
                  fmt::format("the engine has booked {}", format_bytes(booked)),
                  "make the plan under the ceiling of what is booked");
}

}  // namespace

Storage::Storage(Device& device, const ParameterLayout& layout, const Plan& plan, const std::filesystem::path& folder,
                 double watchdog_seconds)
    : layout_(layout), watchdog_seconds_(watchdog_seconds) {
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

/// Carves the blocks. State that travels to the device and back comes first where the system refused to pin the end of
/// the host's block: the CPU's own updates reach pageable memory as fast.
Carving Storage::carve(const ParameterLayout& layout, const Plan& plan) const {
  PlanCarver carver(layout, plan, device_block_, host_block_);
  MemoryLayout buffers(layout, plan, carver);
  buffers.on_device();
  buffers.on_host(pageable_bytes_ > 0 ? HostStates::streamed_first : HostStates::by_subgroup);
  Carving carving = std::move(carver).take();
  for (const SubgroupIndex i : subgroups_of(plan)) {
    const Subgroup& group = subgroup_at(plan, i);
    const LayerIndex l = layer_of(group);
    const Layer& layer = layer_at(layout, l);
    SubgroupMemory& memory = carving.subgroups[i];
    if (std::byte* weights = carving.host_weights[l])
      memory.host_weights = weights + weight_place(layer, slices_[l], group.begin);
    if (std::byte* weights = carving.resident_weights[l])
      memory.resident_weights = weights + layer.weight_offset(group.begin);
  }
  return carving;
}

StateArrays Storage::state_buffer(int i, SubgroupIndex subgroup, std::int64_t count) const {
  return arrays_at(carving_.state_buffers[static_cast<std::size_t>(i)].state, this->subgroup(subgroup).format, count);
}

StateArrays Storage::file_buffer(int i, SubgroupIndex subgroup, std::int64_t count) const {
  return arrays_at(carving_.file_buffers[static_cast<std::size_t>(i)], this->subgroup(subgroup).format, count);
}

/// Place in the file of the piece that begins with element `at` of a subgroup.
std::uint64_t Storage::place_in_file(SubgroupIndex subgroup, std::int64_t at) const {
  const SubgroupMemory& of = this->subgroup(subgroup);
  const auto pieces = static_cast<std::uint64_t>(at / of.piece_elements);
  return of.file_place + pieces * file_state_bytes(of.piece_elements, of.format);
}

void Storage::read_file(SubgroupIndex subgroup, std::int64_t at, std::int64_t count, int buffer) const {
  std::byte* const begin = carving_.file_buffers[static_cast<std::size_t>(buffer)];
  file_->read_blocks(place_in_file(subgroup, at), {begin, file_state_bytes(count, this->subgroup(subgroup).format)});
}

void Storage::write_file(SubgroupIndex subgroup, std::int64_t at, std::int64_t count, int buffer) const {
  const std::byte* const begin = carving_.file_buffers[static_cast<std::size_t>(buffer)];
  file_->write_blocks(place_in_file(subgroup, at), {begin, file_state_bytes(count, this->subgroup(subgroup).format)});
}

/// Calls move(place, part) for the parts of an array that lie in the file one after another: a piece's.
template <class Byte, class Move>
void Storage::for_file_ranges(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<Byte> bytes,
                              const Move& move) const {
  const SubgroupMemory& of = this->subgroup(subgroup);
  for (std::int64_t piece = at / of.piece_elements * of.piece_elements; !bytes.empty(); piece += of.piece_elements) {
    const std::int64_t count = std::min(of.piece_elements, of.file_count - piece);
    const std::size_t before = array_bytes(of.format, array, std::max<std::int64_t>(0, at - piece));
    const std::size_t part = std::min(bytes.size(), array_bytes(of.format, array, count) - before);
    move(place_in_file(subgroup, piece) + array_offset(of.format, array, count) + before, bytes.first(part));
    bytes = bytes.subspan(part);
  }
}

void Storage::read_file(SubgroupIndex subgroup, StateArray array, std::int64_t at, std::span<std::byte> bytes) const {
  for_file_ranges(subgroup, array, at, bytes,
                  [this](std::uint64_t place, std::span<std::byte> part) { file_->read(place, part); });
}

void Storage::write_file(SubgroupIndex subgroup, StateArray array, std::int64_t at,
                         std::span<const std::byte> bytes) const {
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
