#pragma once
// A model on a host device, with a fixture's weights in plain memory.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cpu_ops/device/host_device.hpp"
#include "models/transformer/transformer.hpp"
#include "tests/models/fixture.hpp"
#include "tests/models/plain_parameters.hpp"

namespace tandem::testing {

/// Gradients by Hugging Face name, (O, I); those of parameters that share a tensor one behind the other.
using Gradients = std::map<std::string, std::vector<float>>;
/// A parameter's values.
std::vector<float> values_of(const Fixture& fixture, const Parameter& parameter);

class Rig {
 public:
  /// Fresh device memory is full of NaN, so that what is read before it is written shows.
  /// `products`, `ends`: of layout_of; not rounded, so that gradients can be compared with exact ones.
  Rig(const ModelConfig& config, const RunShape& shape, std::shared_ptr<HostFaults> faults = nullptr,
      DType products = DType::f32, DType ends = DType::f32);
  Rig(const Fixture& fixture, const RunShape& shape, DType products = DType::f32);
  /// Makes a rig with a layout of its own.
  Rig(const ModelConfig& config, const RunShape& shape, ParameterLayout layout,
      std::shared_ptr<HostFaults> faults = nullptr);

  void load(const Fixture& fixture);
  void load_random(std::uint64_t seed);
  /// (B, T) each.
  void set_batch(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets, std::int64_t micro = 0);
  /// (B, T) each, of a packed shape.
  void set_records(std::span<const std::int32_t> first, std::span<const std::int32_t> end, std::int64_t micro = 0);
  /// (B), of a shape of preferences.
  void set_reference(std::span<const float> reference, std::int64_t micro = 0);
  std::vector<float> reference(std::int64_t micro = 0) { return read(model_.reference(micro)); }
  /// Loss and rewards of each pair, (B / 2, 3).
  std::vector<float> pairs(std::int64_t micro = 0) { return read(model_.pairs(micro)); }
  /// Losses of `n` micro-batches at once, one behind the other; leaves gradients.
  std::vector<float> train(float gradient_scale, std::int64_t n = 1);
  std::vector<float> evaluate();
  std::vector<float> logits(std::int64_t position);
  /// Tokens that decode() takes, at most (B, T), of a cached shape.
  struct Decoded {
    std::vector<std::int32_t> tokens, first, rows;
  };
  /// Logits of the parts, one behind the other.
  std::vector<float> decode(const Decoded& batch, std::span<const CachedPart> parts);
  Gradients gradients(std::size_t micro = 0);

  PlainParameters& parameters() { return parameters_; }
  Transformer& model() { return model_; }
  Device& device() { return device_; }
  StreamView stream() { return stream_; }
  /// Bytes that `bind` took from the arena.
  std::size_t carved() const { return carved_; }

 private:
  std::vector<float> read(TensorView view);
  template <class T>
  void write(TensorView to, std::span<const T> from);

  ModelConfig config_;
  HostDevice device_;
  Stream stream_;
  PlainParameters parameters_;
  Transformer model_;
  MemoryBlock memory_;
  std::size_t carved_ = 0;
};

/// Bytes of the rows that lie on the device.
std::size_t total_bytes(const std::vector<ActivationEntry>& entries);
/// The run shape of a fixture's batch, with all blocks computed again or none.
RunShape shape_of(const Fixture& fixture, bool recompute);

/// A built-in shape of two blocks.
inline ModelConfig tiny(std::string_view name) {
  ModelConfig c = builtin_model(name);
  c.layers = 2;
  return c;
}

/// Tokens below 251.
inline std::vector<std::int32_t> ramp(std::int64_t count, std::int32_t first) {
  std::vector<std::int32_t> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<std::int32_t>((first + 7 * i) % 251));
  return values;
}

}  // namespace tandem::testing
