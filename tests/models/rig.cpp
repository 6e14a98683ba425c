#include "tests/models/rig.hpp"

#include "core/memory/memory.hpp"

namespace tandem::testing {

using namespace tandem::literals;

std::vector<float> values_of(const Fixture& fixture, const Parameter& p) {
  std::vector<float> values;
  const std::int64_t tensors = hf_tensor_count(p);
  for (std::int64_t i = 0; i < tensors; ++i) {
    const HfTensor hf = hf_tensor_of(fixture.config(), p, i);
    const std::vector<float> tensor = fixture[hf.name].floats(hf.transposed);
    const auto first = tensor.begin() + hf.first_row * (p.count / p.shape[0]);
    values.insert(values.end(), first, first + p.count / tensors);
  }
  return values;
}

Rig::Rig(const ModelConfig& config, const RunShape& shape, std::shared_ptr<HostFaults> faults, DType products,
         DType ends)
    : Rig(config, shape, layout_of(config, products, ends), std::move(faults)) {}

Rig::Rig(const ModelConfig& config, const RunShape& shape, ParameterLayout layout, std::shared_ptr<HostFaults> faults)
    : config_(config),
      device_(
          {.capacity = 256_MiB, .threads = 2, .update_threads = 1, .poison_memory = true, .faults = std::move(faults)}),
      stream_(device_.make_stream("compute")),
      parameters_(device_, std::move(layout), shape.micro_batches),
      model_(config, shape) {
  const std::size_t bytes = total_bytes(model_.memory(device_.ops()));
  memory_ = device_.allocate(bytes, "activations");
  Arena arena(memory_.data(), bytes, "activations");
  model_.bind(device_, arena, stream_);
  carved_ = arena.used();
}

Rig::Rig(const Fixture& fixture, const RunShape& shape, DType products)
    : Rig(fixture.config(), shape, nullptr, products) {
  load(fixture);
}

void Rig::load(const Fixture& fixture) {
  for (const Parameter* p : parameters_.layout().owned_parameters()) {
    parameters_.set(*p, values_of(fixture, *p));
  }
}

void Rig::load_random(std::uint64_t seed) {
  for (const Parameter* p : parameters_.layout().owned_parameters()) {
    std::vector<float> values(static_cast<std::size_t>(p->count));
    initialize_parameter(config_, *p, seed, 0, values);
    parameters_.set(*p, values);
  }
}

void Rig::set_batch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets, std::int64_t micro) {
  write(model_.tokens(micro), tokens);
  write(model_.targets(micro), targets);
}

void Rig::set_records(std::span<const std::int32_t> first, std::span<const std::int32_t> end, std::int64_t micro) {
  write(model_.record_first(micro), first);
  write(model_.record_end(micro), end);
}

void Rig::set_reference(std::span<const float> reference, std::int64_t micro) {
  write(model_.reference(micro), reference);
}

template <class T>
void Rig::write(TensorView to, std::span<const T> from) {
  if (from.size_bytes() != to.bytes()) throw MisuseError("batch of another size");
  device_.copy(to.data, from.data(), to.bytes(), CopyKind::host_to_device, stream_);
  device_.synchronize(stream_);
}

std::vector<float> Rig::train(float gradient_scale, std::int64_t n) {
  parameters_.clear_gradients();
  model_.train(parameters_, gradient_scale, stream_, n);
  std::vector<float> losses;
  for (std::int64_t micro = 0; micro < n; ++micro) {
    const std::vector<float> one = read(model_.losses(micro));
    losses.insert(losses.end(), one.begin(), one.end());
  }
  return losses;
}

std::vector<float> Rig::evaluate() {
  model_.evaluate(parameters_, stream_);
  return read(model_.losses());
}

std::vector<float> Rig::logits(std::int64_t position) { return read(model_.logits(parameters_, position, stream_)); }

std::vector<float> Rig::decode(const Decoded& batch, std::span<const CachedPart> parts) {
  const auto write_first = [&](TensorView to, const std::vector<std::int32_t>& from) {
    write(to.reshaped({to.count()}).rows(0, static_cast<std::int64_t>(from.size())), std::span(from));
  };
  write_first(model_.tokens(), batch.tokens);
  write_first(model_.cache_first(), batch.first);
  write_first(model_.cache_rows(), batch.rows);
  return read(model_.decode(parameters_, parts, stream_));
}

std::vector<float> Rig::read(TensorView view) {
  std::vector<float> values(static_cast<std::size_t>(view.count()));
  device_.copy(values.data(), view.as<float>(), view.bytes(), CopyKind::device_to_host, stream_);
  device_.synchronize(stream_);
  return values;
}

Gradients Rig::gradients(std::size_t micro) {
  device_.synchronize(stream_);
  Gradients all;
  for (const Parameter* p : parameters_.layout().owned_parameters()) {
    const std::vector<float> values = parameters_.gradient(*p, micro);
    if (is_adapter(*p)) {
      all[p->full_name] = values;
      continue;
    }
    const std::int64_t tensors = hf_tensor_count(*p), each = p->count / tensors;
    for (std::int64_t i = 0; i < tensors; ++i) {
      std::vector<float>& tensor = all[hf_tensor_of(config_, *p, i).name];
      tensor.insert(tensor.end(), values.begin() + i * each, values.begin() + (i + 1) * each);
    }
  }
  return all;
}

std::size_t total_bytes(const std::vector<ActivationEntry>& entries) {
  std::size_t sum = 0;
  for (const ActivationEntry& entry : entries) {
    if (entry.place == Place::device) sum += entry.bytes;
  }
  return sum;
}

RunShape shape_of(const Fixture& fixture, bool recompute) {
  const std::vector<std::int64_t>& shape = fixture["tokens"].shape;
  return {.batch = shape.at(0), .sequence = shape.at(1), .recomputed_blocks = recompute ? fixture.config().layers : 0};
}

}  // namespace tandem::testing
