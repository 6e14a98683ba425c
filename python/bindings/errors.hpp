#pragma once
// Exceptions between C++ and Python, in both directions.
#include <nanobind/nanobind.h>

#include <exception>
#include <memory>

#include "tandem/tandem.hpp"

namespace tandem::python {

namespace nb = nanobind;

/// A Python object that is released with the interpreter's lock held, whatever thread lets go of it last; without a
/// release once the interpreter ends.
using SharedObject = std::shared_ptr<nb::object>;
SharedObject share(nb::object object);

/// A Python exception on its way through C++: copied, kept and thrown again by any thread, any number of times.
class CarriedException : public std::exception {
 public:
  /// Takes the exception that `error` holds. Needs the interpreter's lock.
  explicit CarriedException(nb::python_error& error);
  const char* what() const noexcept override { return text_.c_str(); }
  /// Raises it in Python again. Needs the interpreter's lock.
  void raise() const;

 private:
  SharedObject value_;
  std::string text_;
};

/// Throws CarriedException where a signal, such as Ctrl-C, waits to be handled. Needs the interpreter's lock.
void check_signals();

/// Runs `body` with the interpreter's lock; its Python exceptions leave as CarriedException.
template <class Body>
auto in_python(const Body& body) {
  const nb::gil_scoped_acquire held;
  try {
    return body();
  } catch (nb::python_error& error) {
    throw CarriedException(error);
  }
}

/// Maps tandem's exceptions to the classes of tandem/errors.py.
void translate_errors();

}  // namespace tandem::python
