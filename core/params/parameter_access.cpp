#include "core/params/parameter_access.hpp"

#include <fmt/format.h>

#include <utility>

namespace tandem {
namespace {

/// The parameter as its layer declares it, or that of its owner where it is tied.
const Parameter& storage_of(const ParameterLayout& layout, int layer, std::string_view name) {
  const Layer& declared = layout.layer(layer);
  const int index = declared.find(name);
  if (index < 0) throw MisuseError(fmt::format("layer '{}' has no parameter '{}'", declared.name, name));
  const Parameter& p = declared.parameters[static_cast<std::size_t>(index)];
  if (!p.tied()) return p;
  return layout.layer(p.tied_layer).parameters.at(static_cast<std::size_t>(p.tied_index));
}

TensorView view_of(const Parameter& p, void* base, std::size_t offset, DType dtype) {
  if (base == nullptr) throw MisuseError(fmt::format("memory of '{}' is not covered by this guard", p.full_name));
  return {static_cast<std::byte*>(base) + offset, dtype, p.shape};
}

}  // namespace

void LayerBases::add(int layer, void* base) {
  if (of(layer) != nullptr) throw MisuseError(fmt::format("base of layer {} given twice", layer));
  if (count == capacity) throw MisuseError(fmt::format("base of layer {} is one too many", layer));
  entries[static_cast<std::size_t>(count++)] = {layer, base};
}

void* LayerBases::of(int layer) const noexcept {
  for (int i = 0; i < count; ++i) {
    const Entry& entry = entries[static_cast<std::size_t>(i)];
    if (entry.layer == layer) return entry.base;
  }
  return nullptr;
}

ParameterAccess* WeightsGuard::access() const noexcept {
  return access_ && *access_ != nullptr && (*access_)->holds(ticket_) ? *access_ : nullptr;
}

ParameterAccess* GradientsGuard::access() const noexcept {
  return access_ && *access_ != nullptr && (*access_)->holds(ticket_) ? *access_ : nullptr;
}

WeightsGuard::WeightsGuard(ParameterAccess* access, const ParameterLayout* layout, int layer, std::uint64_t ticket,
                           LayerBases bases, StreamView stream)
    : access_(access->link_), layout_(layout), layer_(layer), ticket_(ticket), bases_(bases), stream_(stream) {}

WeightsGuard::WeightsGuard(WeightsGuard&& other) noexcept
    : access_(std::exchange(other.access_, nullptr)),
      layout_(other.layout_),
      layer_(other.layer_),
      ticket_(other.ticket_),
      bases_(other.bases_),
      stream_(other.stream_) {}

WeightsGuard& WeightsGuard::operator=(WeightsGuard&& other) noexcept {
  if (this == &other) return *this;
  release();
  access_ = std::exchange(other.access_, nullptr);
  layout_ = other.layout_;
  layer_ = other.layer_;
  ticket_ = other.ticket_;
  bases_ = other.bases_;
  stream_ = other.stream_;
  return *this;
}

WeightsGuard::~WeightsGuard() { release(); }

TensorView WeightsGuard::operator[](std::string_view name) const& {
  if (access() == nullptr) throw MisuseError(fmt::format("weights of '{}' read through an empty guard", name));
  const Parameter& p = storage_of(*layout_, layer_, name);
  if (p.coded()) {
    return view_of(p, bases_.decoded, static_cast<std::size_t>(p.decoded_offset) * sizeof(bf16), DType::bf16);
  }
  return view_of(p, bases_.of(p.layer), layout_->layer(p.layer).weight_offset(p.offset), p.options.weight);
}

void WeightsGuard::also_used_on(StreamView stream) {
  if (access() == nullptr) throw MisuseError("an empty weights guard is used on a stream");
  access()->also_used(ticket_, stream);
}

void WeightsGuard::release() noexcept {
  ParameterAccess* const origin = access();
  access_ = nullptr;
  if (origin != nullptr) origin->release(ticket_, stream_);
}

GradientsGuard::GradientsGuard(ParameterAccess* access, const ParameterLayout* layout, int layer, std::uint64_t ticket,
                               LayerBases bases)
    : access_(access->link_), layout_(layout), layer_(layer), ticket_(ticket), bases_(bases) {}

GradientsGuard::GradientsGuard(GradientsGuard&& other) noexcept
    : access_(std::exchange(other.access_, nullptr)),
      layout_(other.layout_),
      layer_(other.layer_),
      ticket_(other.ticket_),
      bases_(other.bases_) {}

GradientsGuard& GradientsGuard::operator=(GradientsGuard&& other) noexcept {
  if (this == &other) return *this;
  if (access() != nullptr) access()->abandon(ticket_);
  access_ = std::exchange(other.access_, nullptr);
  layout_ = other.layout_;
  layer_ = other.layer_;
  ticket_ = other.ticket_;
  bases_ = other.bases_;
  return *this;
}

GradientsGuard::~GradientsGuard() {
  if (access() != nullptr) access()->abandon(ticket_);
}

TensorView GradientsGuard::operator[](std::string_view name) const& {
  if (access() == nullptr) {
    throw MisuseError(fmt::format("gradient of '{}' reached through an empty or committed guard", name));
  }
  const Parameter& p = storage_of(*layout_, layer_, name);
  if (!p.options.trainable) return {};
  return view_of(p, bases_.of(p.layer), layout_->layer(p.layer).gradient_offset(p.offset), p.options.gradient);
}

void GradientsGuard::leave_out(std::string_view name) {
  if (access() == nullptr) throw MisuseError(fmt::format("'{}' left out of an empty or committed guard", name));
  const Layer& layer = layout_->layer(layer_);
  const int index = layer.find(name);
  if (index < 0 || !storage_of(*layout_, layer_, name).options.trainable) {
    throw MisuseError(fmt::format("layer '{}' has no trained parameter '{}' to leave out", layer.name, name));
  }
  access()->leave_out(ticket_, static_cast<std::size_t>(index));
}

void ParameterAccess::leave_out(std::uint64_t, std::size_t) {
  throw MisuseError("a gradient was left out of a step in which none may be absent", {}, "set StepOptions::absent");
}

void GradientsGuard::commit(StreamView stream) {
  if (access() == nullptr) throw MisuseError("gradients committed twice, or through an empty guard");
  // Where this throws, the guard keeps its ticket and abandons the step when it goes.
  access()->commit(ticket_, stream);
  access_ = nullptr;
}

}  // namespace tandem
