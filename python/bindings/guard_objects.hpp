#pragma once
// Python objects of guards.
#include <memory>

#include "python/bindings/guards.hpp"

namespace tandem::python {

nb::object weights_object(std::shared_ptr<GuardCell> cell);
nb::object gradients_object(std::shared_ptr<GuardCell> cell);

}  // namespace tandem::python
