#include "python/bindings/resident_weights.hpp"

#include <fmt/format.h>

#include <cstdint>

namespace tandem::python {

struct ResidentWeights::Array {
  explicit Array(std::shared_ptr<EngineCell> cell) : engine(std::move(cell)) { ++engine->resident_arrays; }
  ~Array() { --engine->resident_arrays; }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Counted counted{live().arrays};
  std::shared_ptr<EngineCell> engine;
};

std::string ResidentWeights::text() const {
  return fmt::format("weights of layer '{}', which stays on the device", engine_->layout().layer(layer_).name);
}

void ResidentWeights::require_held(const std::string& what) const {
  if (engine_->closed()) throw MisuseError(fmt::format("{} is used after the engine was closed", what));
}

void ResidentWeights::order_for(nb::handle consumer_stream) {
  std::shared_ptr<StreamCell> stream;
  if (device().is_host()) {
    if (!consumer_stream.is_none()) throw nb::buffer_error("memory of the host has no streams: stream must be None");
    stream = engine_->waiting_stream();
  } else {
    const auto asked = consumer_stream.is_none() ? std::int64_t{1} : nb::cast<std::int64_t>(consumer_stream);
    if (asked == no_order) return;
    stream = device().wrapped(static_cast<std::uintptr_t>(asked));
    if (!stream) {
      throw nb::buffer_error(
          fmt::format("stream {:#x} cannot wait for {}: wrap it by device.wrap_stream first", asked, text()).c_str());
    }
  }
  engine_->call([&](OffloadEngine& e) { e.wait_for_weights(layer_, stream->view()); });
  if (device().is_host()) stream->synchronize();
}

nb::capsule ResidentWeights::array_owner() {
  return {new Array(engine_), [](void* array) noexcept { delete static_cast<Array*>(array); }};
}

}  // namespace tandem::python
