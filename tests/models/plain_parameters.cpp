#include "tests/models/plain_parameters.hpp"

#include <algorithm>
#include <cmath>

#include "core/ops/update_kernels.hpp"

namespace tandem::testing {
namespace {

/// Offset of an element's gradient. Frozen ones have a place, too, that nobody should write to.
std::size_t gradient_offset(const Layer& layer, std::int64_t element) {
  const std::int64_t trained = std::min(element, layer.state_elements);
  return layer.gradient_offset(trained) + static_cast<std::size_t>(element - trained) * sizeof(float);
}

}  // namespace

PlainParameters::PlainParameters(Device& device, ParameterLayout layout, std::int64_t micro_batches)
    : device_(device),
      layout_(std::move(layout)),
      stream_(device.make_stream("parameters")),
      micro_batches_(static_cast<std::size_t>(micro_batches)),
      asked_(layout_.layers().size()) {
  for (const Layer& layer : layout_.layers()) {
    const auto elements = static_cast<std::size_t>(layer.elements);
    weights_.push_back(device_.allocate(elements * sizeof(bf16), layer.name + " weights"));
  }
  for (std::size_t i = 0; i < micro_batches_ * layout_.layers().size(); ++i) {
    const Layer& layer = layout_.layers()[i % layout_.layers().size()];
    gradients_.push_back(device_.allocate(gradient_offset(layer, layer.elements), layer.name + " gradients"));
  }
}

std::span<const MemoryBlock> PlainParameters::gradients_of(std::size_t micro) const {
  const std::size_t layers = layout_.layers().size();
  return std::span(gradients_).subspan(micro * layers, layers);
}

LayerBases PlainParameters::bases(int layer, std::span<const MemoryBlock> blocks) const {
  LayerBases all;
  all.add(layer, blocks[static_cast<std::size_t>(layer)].data());
  for (const int borrowed : layout_.layer(layer).borrows) {
    all.add(borrowed, blocks[static_cast<std::size_t>(borrowed)].data());
  }
  return all;
}

WeightsGuard PlainParameters::fetch(int layer, StreamView stream) {
  log_.push_back("fetch " + std::to_string(layer));
  ++held_;
  return {this, &layout_, layer, static_cast<std::uint64_t>(layer), bases(layer, weights_), stream};
}

GradientsGuard PlainParameters::gradients(int layer, StreamView) {
  log_.push_back("gradients " + std::to_string(layer));
  ++held_;
  const std::size_t micro = asked_[static_cast<std::size_t>(layer)]++ % micro_batches_;
  return {this, &layout_, layer, static_cast<std::uint64_t>(layer), bases(layer, gradients_of(micro))};
}

void PlainParameters::also_used(std::uint64_t, StreamView) {}

void PlainParameters::release(std::uint64_t ticket, StreamView) noexcept {
  log_.push_back("release " + std::to_string(ticket));
  --held_;
}

void PlainParameters::commit(std::uint64_t ticket, StreamView) {
  log_.push_back("commit " + std::to_string(ticket));
  --held_;
}

void PlainParameters::abandon(std::uint64_t ticket) noexcept {
  log_.push_back("abandon " + std::to_string(ticket));
  --held_;
}

std::byte* PlainParameters::weight_address(const Parameter& p) {
  auto* base = static_cast<std::byte*>(weights_[static_cast<std::size_t>(p.layer)].data());
  return base + static_cast<std::size_t>(p.offset) * sizeof(bf16);
}

std::byte* PlainParameters::gradient_address(const Parameter& p, std::size_t micro) {
  auto* base = static_cast<std::byte*>(gradients_of(micro)[static_cast<std::size_t>(p.layer)].data());
  return base + gradient_offset(layout_.layer(p.layer), p.offset);
}

void PlainParameters::upload(const Parameter& p, const std::vector<bf16>& weight) {
  device_.copy(weight_address(p), weight.data(), weight.size() * sizeof(bf16), CopyKind::host_to_device, stream_);
  device_.synchronize(stream_);
}

void PlainParameters::set(const Parameter& p, std::span<const float> values) {
  const auto count = static_cast<std::size_t>(p.count);
  State& state = states_[p.full_name];
  state = {.master = {values.begin(), values.end()},
           .m = std::vector<float>(count),
           .v = std::vector<float>(count),
           .gradient = std::vector<bf16>(count),
           .weight = std::vector<bf16>(count)};
  device_.host_kernels().weights_of_master(state.master.data(), state.weight.data(), p.count);
  upload(p, state.weight);
}

void PlainParameters::clear_gradients() {
  std::ranges::fill(asked_, 0U);
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const Layer& layer = layout_.layers()[i % layout_.layers().size()];
    const std::size_t summed = layer.gradient_offset(layer.summed_elements);
    const std::vector<std::byte> nans(layer.gradient_offset(layer.state_elements) - summed, std::byte{0xFF});
    auto* const block = static_cast<std::byte*>(gradients_[i].data());
    device_.fill_zero(block, gradients_[i].bytes(), stream_);
    device_.copy(block + summed, nans.data(), nans.size(), CopyKind::host_to_device, stream_);
    device_.synchronize(stream_);
  }
}

std::vector<float> PlainParameters::gradient(const Parameter& p, std::size_t micro) {
  const auto count = static_cast<std::size_t>(p.count);
  std::vector<float> values(count);
  std::vector<bf16> rounded(p.options.gradient == DType::bf16 ? count : 0);
  const std::byte* const from = gradient_address(p, micro);
  if (rounded.empty()) {
    device_.copy(values.data(), from, count * sizeof(float), CopyKind::device_to_host, stream_);
  } else {
    device_.copy(rounded.data(), from, count * sizeof(bf16), CopyKind::device_to_host, stream_);
  }
  device_.synchronize(stream_);
  if (!rounded.empty()) std::ranges::transform(rounded, values.begin(), numerics::bf16_to_float);
  return values;
}

double PlainParameters::step(const AdamW& adamw, double lr, double clip) {
  UpdateKernels& kernels = device_.host_kernels();
  double squares = 0.0;
  for (const Parameter* p : layout_.owned_parameters()) {
    if (!p->options.trainable) continue;
    State& state = states_.at(p->full_name);
    const std::vector<float> exact = gradient(*p);
    kernels.round(exact.data(), state.gradient.data(), p->count);
    std::vector<double> blocks(static_cast<std::size_t>((p->count + layout_quantum - 1) / layout_quantum));
    kernels.norm_blocks(state.gradient.data(), p->count, blocks.data());
    for (const double block : blocks) squares += block;
  }
  const double norm = std::sqrt(squares);
  const double scale = std::min(1.0, clip / norm);
  ++updates_;
  for (const Parameter* p : layout_.owned_parameters()) {
    if (!p->options.trainable) continue;
    State& s = states_.at(p->full_name);
    const auto c = numerics::adam_coefficients(adamw, updates_, lr, scale, p->options.decay);
    kernels.adamw({{s.master.data(), s.m.data(), s.v.data()}, s.gradient.data(), s.weight.data(), p->count}, c);
    upload(*p, s.weight);
  }
  return norm;
}

}  // namespace tandem::testing
