#pragma once
// Weights of a layer that stays on the device, as views show them: at one address while the engine has its plan.
#include "python/bindings/guards.hpp"

namespace tandem::python {

/// Keeps the engine. Arrays made of its views are counted: while one is alive the engine is neither closed nor given
/// another plan.
class ResidentWeights final : public ViewOwner {
 public:
  ResidentWeights(std::shared_ptr<EngineCell> engine, int layer) : engine_(std::move(engine)), layer_(layer) {}

  std::string text() const override;
  /// Throws MisuseError once the engine is closed.
  void require_held(const std::string& what) const override;
  bool is_weights() const noexcept override { return true; }
  DeviceCell& device() const override { return engine_->device(); }
  /// Orders a consumer behind the last update: waits for it on the host; on a GPU makes the consumer's stream wait for
  /// it, where Device::wrap_stream knows that stream (else BufferError).
  void order_for(nb::handle consumer_stream) override;
  nb::capsule array_owner() override;

 private:
  struct Array;
  std::shared_ptr<EngineCell> engine_;
  int layer_;
};

}  // namespace tandem::python
