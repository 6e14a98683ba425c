#include "tests/models/plain_parameters.hpp"

#include <algorithm>
#include <cmath>

#include "core/update_kernels.hpp"

namespace tandem::testing {

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
    const auto elements = static_cast<std::size_t>(layer.elements);
    gradients_.push_back(device_.allocate(elements * sizeof(float), layer.name + " gradients"));
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
  return base + static_cast<std::size_t>(p.offset) * sizeof(float);
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

void PlainParameters::zero_gradients() {
  std::ranges::fill(asked_, 0U);
  for (const MemoryBlock& block : gradients_) device_.fill_zero(block.data(), block.bytes(), stream_);
  device_.synchronize(stream_);
}

std::vector<float> PlainParameters::gradient(const Parameter& p, std::size_t micro) {
  std::vector<float> values(static_cast<std::size_t>(p.count));
  device_.copy(values.data(), gradient_address(p, micro), values.size() * sizeof(float), CopyKind::device_to_host,
               stream_);
  device_.synchronize(stream_);
  return values;
}

double PlainParameters::step(const AdamW& adamw, double lr, double clip) {
  UpdateKernels& kernels = device_.host_kernels();
  double squares = 0.0;
  for (const Parameter* p : layout_.owned_parameters()) {
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
    State& s = states_.at(p->full_name);
    const auto c = numerics::adam_coefficients(adamw, updates_, lr, scale, p->options.decay);
    kernels.adamw({s.master.data(), s.m.data(), s.v.data(), s.gradient.data(), s.weight.data(), p->count}, c);
    upload(*p, s.weight);
  }
  return norm;
}

}  // namespace tandem::testing
