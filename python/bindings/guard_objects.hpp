#pragma once
// Python objects of guards.
#include <memory>

#include "python/bindings/guards.hpp"

namespace tandem::python {

nb::object weights_object(std::shared_ptr<GuardCell> cell);
nb::object gradients_object(std::shared_ptr<GuardCell> cell);
/// View of weights that stay on the device. Throws as OffloadEngine::resident_weights.
nb::object resident_object(const std::shared_ptr<EngineCell>& engine, const Parameter& parameter);

}  // namespace tandem::python
