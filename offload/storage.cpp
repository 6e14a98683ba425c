#include "offload/storage.hpp"

#include <fmt/format.h>

#include <cstring>

#include "core/error.hpp"
#include "core/update_kernels.hpp"

namespace tandem {
namespace {

template <class T>
T* carve(Arena& arena, std::int64_t elements, std::string_view what) {
  return static_cast<T*>(arena.carve(static_cast<std::size_t>(elements) * sizeof(T), what));
}

StateArrays carve_state(Arena& arena, std::int64_t elements, StateFormat format) {
  const auto n = static_cast<std::size_t>(elements);
  return {arena.carve(n * master_bytes(format), "master"), arena.carve(n * moment_bytes(format), "m"),
          arena.carve(n * moment_bytes(format), "v")};
}

void check_filled(const Arena& arena, std::size_t planned, std::string_view where) {
  if (align_up(arena.used()) != planned) {
    throw MisuseError(fmt::format("carving {} memory used {} bytes", where, arena.used()),
                      fmt::format("the plan says {}", planned));
  }
}

}  // namespace

Storage::Storage(Device& device, const ParameterLayout& layout, const Plan& plan) {
  const auto layers = static_cast<std::size_t>(layout.layer_count());
  resident_weights_.resize(layers);
  host_weights_.resize(layers);
  subgroups_.resize(plan.subgroups.size());
  if (plan.memory.device_bytes() > 0) device_block_ = device.allocate(plan.memory.device_bytes(), "offload engine");
  if (plan.memory.host_bytes() > 0) host_block_ = device.allocate_pinned(plan.memory.host_bytes(), "offload engine");
  carve_device(layout, plan);
  carve_host(layout, plan);
  if (host_block_) std::memset(host_block_.data(), 0, host_block_.bytes());
  const Stream stream = device.make_stream("setup");
  if (device_block_) device.fill_zero(device_block_.data(), device_block_.bytes(), stream);
  device.synchronize(stream);
}

void Storage::carve_device(const ParameterLayout& layout, const Plan& plan) {
  Arena arena(device_block_.data(), device_block_.bytes(), "device");
  for (int l = 0; l < layout.layer_count(); ++l) {
    if (!plan.layers[static_cast<std::size_t>(l)].resident) continue;
    resident_weights_[static_cast<std::size_t>(l)] = carve<bf16>(arena, layout.layer(l).elements, "resident weights");
  }
  for (const SizeClass& size : plan.size_classes) {
    for (int i = 0; i < size.weight_buffers; ++i) {
      weight_buffers_.push_back(carve<bf16>(arena, size.weight_elements, "weight buffer"));
    }
  }
  for (const SizeClass& size : plan.size_classes) {
    for (int i = 0; i < size.gradient_buffers; ++i) {
      gradient_buffers_.push_back(carve<float>(arena, size.gradient_elements, "gradient buffer"));
    }
  }
  for (int i = 0; i < plan.staging_pieces; ++i) staging_.push_back(carve<bf16>(arena, plan.piece_elements, "staging"));
  bool returns_gradient = false;
  for (std::size_t i = 0; i < plan.subgroups.size(); ++i) {
    const Subgroup& s = plan.subgroups[i];
    SubgroupMemory& memory = subgroups_[i];
    if (s.tier == Tier::device) memory.state = carve_state(arena, s.count(), plan.state);
    if (!s.gradient_on_device) {
      returns_gradient |= s.updater == Updater::device;
      continue;
    }
    memory.gradient = carve<bf16>(arena, s.count(), "kept gradient");
    memory.device_norm = carve<double>(arena, s.count() / layout_quantum, "gradient norm");
    if (plan.max_micro_batches > 1) memory.sum = carve<float>(arena, s.count(), "accumulated gradient");
  }
  for (int i = 0; i < plan.state_buffers; ++i) {
    StateBuffer& buffer = state_buffers_.emplace_back();
    buffer.state = carve_state(arena, plan.piece_elements, plan.state);
    if (returns_gradient) buffer.gradient = carve<bf16>(arena, plan.piece_elements, "streamed gradient");
  }
  check_filled(arena, plan.memory.device_bytes(), "device");
}

void Storage::carve_host(const ParameterLayout& layout, const Plan& plan) {
  Arena arena(host_block_.data(), host_block_.bytes(), "host");
  for (int l = 0; l < layout.layer_count(); ++l) {
    if (!plan.layers[static_cast<std::size_t>(l)].host_copy) continue;
    host_weights_[static_cast<std::size_t>(l)] = carve<bf16>(arena, layout.layer(l).elements, "weights");
  }
  for (std::size_t i = 0; i < plan.subgroups.size(); ++i) {
    const Subgroup& s = plan.subgroups[i];
    SubgroupMemory& memory = subgroups_[i];
    memory.host_norm = carve<double>(arena, s.count() / layout_quantum, "gradient norm");
    if (s.tier == Tier::host) memory.state = carve_state(arena, s.count(), plan.state);
    if (s.gradient_on_device) continue;
    memory.gradient = carve<bf16>(arena, s.count(), "gradient");
    if (plan.max_micro_batches > 1) memory.sum = carve<float>(arena, s.count(), "accumulated gradient");
  }
  check_filled(arena, plan.memory.host_bytes(), "host");
}

}  // namespace tandem
