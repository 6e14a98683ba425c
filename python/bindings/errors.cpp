#include "python/bindings/errors.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

namespace tandem::python {
namespace {

/// The class of tandem/errors.py that mirrors the type of an exception.
const char* class_of(const Error& error) {
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "UsageError";
  if (dynamic_cast<const PlanError*>(&error) != nullptr) return "PlanError";
  if (dynamic_cast<const InputError*>(&error) != nullptr) return "InputError";
  if (dynamic_cast<const PeerError*>(&error) != nullptr) return "PeerError";
  if (dynamic_cast<const DeviceError*>(&error) != nullptr) return "DeviceError";
  if (dynamic_cast<const TrainingError*>(&error) != nullptr) return "TrainingError";
  if (dynamic_cast<const WriteError*>(&error) != nullptr) return "WriteError";
  if (dynamic_cast<const MisuseError*>(&error) != nullptr) return "MisuseError";
  if (dynamic_cast<const StalledError*>(&error) != nullptr) return "StalledError";
  return "Error";
}

void raise(const Error& error) {
  const nb::object type = nb::module_::import_("tandem.errors").attr(class_of(error));
  const nb::object value = type(error.what());
  value.attr("exit_code") = static_cast<int>(error.exit_code());
  if (const auto* plan = dynamic_cast<const PlanError*>(&error)) {
    value.attr("table") = plan->table();
    if (plan->needs() != nullptr) value.attr("entries") = nb::cast(plan->needs()->entries);
  }
  PyErr_SetObject(type.ptr(), value.ptr());
}

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const CarriedException& error) {
    error.raise();
  } catch (const Error& error) {
    raise(error);
  }
}

}  // namespace

SharedObject share(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            if (Py_IsInitialized() == 0) return;  // its memory ends with the process
            const nb::gil_scoped_acquire acquired;
            delete held;
          }};
}

CarriedException::CarriedException(nb::python_error& error)
    : value_(share(nb::borrow(error.value()))), text_(nb::cast<std::string>(nb::str(error.value()))) {}

void CarriedException::raise() const {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value_->ptr())), value_->ptr());
}

void check_signals() {
  if (PyErr_CheckSignals() == 0) return;
  nb::python_error error;
  throw CarriedException(error);
}

void translate_errors() { nb::register_exception_translator(translate); }

}  // namespace tandem::python
