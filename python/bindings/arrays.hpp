#pragma once
// Arrays of fp32 values between Python and the host's memory.
#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tandem::python {

namespace nb = nanobind;

/// Values of an array of the caller's, held while this lives: an object with DLPack or the buffer protocol, on the
/// host, dense and row-major, of f32 or of bf16, which is widened exactly. Needs the interpreter's lock.
class HostValues {
 public:
  /// `what` names the array in errors. Throws TypeError for another object, type or layout, and MisuseError where it
  /// has not `count` elements.
  HostValues(nb::handle array, std::int64_t count, const std::string& what);
  std::span<const float> span() const noexcept { return values_; }

 private:
  nb::object held_;
  std::vector<float> widened_;
  std::span<const float> values_;
};

/// A new NumPy array of f32 of this shape, and its memory.
struct NewArray {
  nb::object array;
  std::span<float> values;
};
NewArray new_array(std::span<const std::size_t> shape);

}  // namespace tandem::python
