#pragma once
// Weights that stay on the device, as Python objects.
#include <memory>
#include <string>

#include "python/bindings/cells.hpp"

namespace tandem::python {

/// Object for the weights of one parameter, which has this full name. Throws MisuseError where the plan does not keep
/// its layer on the device.
nb::object resident_object(const std::shared_ptr<EngineCell>& engine, const std::string& name);
void bind_resident(nb::module_& m);

}  // namespace tandem::python
