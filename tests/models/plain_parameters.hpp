#pragma once
// Parameters that stay where they are: weights and gradients in device memory, fp32 master and moments on
// the host. The simplest `ParameterAccess` there can be, and a witness of how a model uses one.
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/device/device.hpp"
#include "core/numerics/adam.hpp"
#include "core/params/parameter_access.hpp"
#include "core/params/parameter_layout.hpp"

namespace tandem::testing {

class PlainParameters final : public ParameterAccess {
 public:
  /// Calls of a model, in order: "fetch 0", "release 0", "gradients 2", "commit 2".
  using Log = std::vector<std::string>;

  /// Gradients of `micro_batches` are kept apart: a layer's k-th ask since they were zeroed is for micro-batch k,
  /// or for the first again behind the last.
  PlainParameters(Device& device, ParameterLayout layout, std::int64_t micro_batches = 1);

  WeightsGuard fetch(int layer, StreamView stream) override;
  GradientsGuard gradients(int layer, StreamView stream) override;

  const ParameterLayout& layout() const noexcept { return layout_; }
  /// Sets master and weight of one parameter of the layout. Blocks.
  void set(const Parameter& p, std::span<const float> values);
  /// Prepares gradients for a micro-batch: zero where they are added to, NaN where they are written. Blocks.
  void clear_gradients();
  /// Gradient of one parameter in one micro-batch. Blocks.
  std::vector<float> gradient(const Parameter& p, std::size_t micro = 0);
  /// Rounds gradients to bf16, clips by their global norm, and updates. Returns the norm. Blocks.
  double step(const AdamW& adamw, double lr, double clip);

  const Log& log() const noexcept { return log_; }
  void clear_log() { log_.clear(); }
  /// Guards that are alive.
  int held() const noexcept { return held_; }

 private:
  struct State {
    std::vector<float> master, m, v;
    std::vector<bf16> gradient, weight;
  };

  void also_used(std::uint64_t ticket, StreamView stream) override;
  void release(std::uint64_t ticket, StreamView stream) noexcept override;
  void commit(std::uint64_t ticket, StreamView stream) override;
  void abandon(std::uint64_t ticket) noexcept override;

  LayerBases bases(int layer, std::span<const MemoryBlock> blocks) const;
  std::span<const MemoryBlock> gradients_of(std::size_t micro) const;
  std::byte* weight_address(const Parameter& p);
  std::byte* gradient_address(const Parameter& p, std::size_t micro);
  void upload(const Parameter& p, const std::vector<bf16>& weight);

  Device& device_;
  ParameterLayout layout_;
  Stream stream_;
  std::vector<MemoryBlock> weights_;    ///< one a layer, bf16
  std::vector<MemoryBlock> gradients_;  ///< one a layer, as it says, for each micro-batch
  std::size_t micro_batches_;
  std::vector<std::size_t> asked_;  ///< by layer
  std::map<std::string, State> states_;
  Log log_;
  int held_ = 0;
  std::int64_t updates_ = 0;
};

}  // namespace tandem::testing
