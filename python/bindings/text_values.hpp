#pragma once
// Values that Python writes as text or as numbers: sizes, policies, names of formats, shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "tandem/planning.hpp"

namespace tandem::python {

namespace nb = nanobind;

/// Bytes of an int, or of a text such as "2GiB" or "300MB". `what` names the value in errors. Throws UsageError, and
/// TypeError for any other type.
std::size_t bytes_of(nb::handle value, std::string_view what);

/// Formats of optimizer state by the names of `--state`. Throws UsageError that lists them.
StateFormat state_format_of(std::string_view name);
/// Element types by name: "f32", "bf16". Throws UsageError that lists them.
DType dtype_of_name(std::string_view name);
/// Arrays of the optimizer state by name: "master", "m", "v". Throws UsageError that lists them.
StateArray state_array_of(std::string_view name);
OnNonfinite on_nonfinite_of(std::string_view name);
Speculate speculate_of(std::string_view name);
std::string_view name_of(OnNonfinite value) noexcept;
Absent absent_of(std::string_view name);
std::string_view name_of(Absent value) noexcept;
std::string_view name_of(UpdatePath path) noexcept;

/// Shape of an int or a sequence of ints. Throws MisuseError as Shape does.
Shape shape_of(nb::handle value);
nb::tuple tuple_of(const Shape& shape);

}  // namespace tandem::python
