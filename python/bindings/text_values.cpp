#include "python/bindings/text_values.hpp"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <span>
#include <utility>

namespace tandem::python {
namespace {

template <class Value>
using Names = std::span<const std::pair<std::string_view, Value>>;

template <class Value>
Value find_name(std::string_view what, std::string_view name, Names<Value> names) {
  std::string all;
  for (const auto& [text, value] : names) {
    if (text == name) return value;
    all += fmt::format("{}'{}'", all.empty() ? "" : ", ", text);
  }
  throw UsageError(fmt::format("{} '{}'", what, name), "is none that tandem knows", fmt::format("use one of {}", all));
}

constexpr std::array<std::pair<std::string_view, StateFormat>, 5> formats{{{"fp32", StateFormat::fp32},
                                                                           {"split", StateFormat::split},
                                                                           {"bf16-moments", StateFormat::bf16_moments},
                                                                           {"8bit-moments", StateFormat::byte_moments},
                                                                           {"lion", StateFormat::lion}}};
constexpr std::array<std::pair<std::string_view, DType>, 2> dtypes{{{"f32", DType::f32}, {"bf16", DType::bf16}}};
constexpr std::array<std::pair<std::string_view, StateArray>, 3> arrays{
    {{"master", StateArray::master}, {"m", StateArray::m}, {"v", StateArray::v}}};
constexpr std::array<std::pair<std::string_view, OnNonfinite>, 2> nonfinite{
    {{"skip", OnNonfinite::skip}, {"stop", OnNonfinite::stop}}};

constexpr std::array<std::pair<std::string_view, Speculate>, 3> speculations{
    {{"off", Speculate::off}, {"auto", Speculate::automatic}, {"on", Speculate::on}}};

constexpr std::array<std::pair<std::string_view, Absent>, 3> absences{
    {{"refuse", Absent::refuse}, {"zero", Absent::zero}, {"skip", Absent::skip}}};

constexpr std::array<std::pair<std::string_view, double>, 8> units{{{"KiB", 0x1p10},
                                                                    {"MiB", 0x1p20},
                                                                    {"GiB", 0x1p30},
                                                                    {"TiB", 0x1p40},
                                                                    {"kB", 1e3},
                                                                    {"MB", 1e6},
                                                                    {"GB", 1e9},
                                                                    {"TB", 1e12}}};

std::size_t bytes_of_text(std::string_view text, std::string_view what) {
  std::string_view number = text;
  double factor = 1.0;
  for (const auto& [unit, bytes] : units) {
    if (!number.ends_with(unit)) continue;
    number.remove_suffix(unit.size());
    factor = bytes;
    break;
  }
  while (number.ends_with(' ')) number.remove_suffix(1);
  double value = 0.0;
  const char* const last = number.data() + number.size();
  const auto [end, error] = std::from_chars(number.data(), last, value);
  const double bytes = value * factor;
  if (error != std::errc() || end != last || !std::isfinite(bytes) || bytes < 0.0 || bytes > 9e18) {
    throw UsageError(fmt::format("{} '{}'", what, text), "is no size in bytes", "write it as 2GiB, 512MiB or 300MB");
  }
  return static_cast<std::size_t>(bytes);
}

}  // namespace

std::size_t bytes_of(nb::handle value, std::string_view what) {
  if (nb::isinstance<nb::str>(value)) return bytes_of_text(nb::cast<std::string>(value), what);
  if (!PyLong_Check(value.ptr())) {
    throw nb::type_error(fmt::format("{}: bytes are an int or a text such as '2GiB'", what).c_str());
  }
  std::size_t bytes = 0;
  if (!nb::try_cast(value, bytes))
    throw UsageError(fmt::format("{}", what), "a size is at least 0 and below 2^64 bytes");
  return bytes;
}

StateFormat state_format_of(std::string_view name) { return find_name<StateFormat>("state format", name, formats); }
DType dtype_of_name(std::string_view name) { return find_name<DType>("element type", name, dtypes); }
StateArray state_array_of(std::string_view name) { return find_name<StateArray>("state array", name, arrays); }
OnNonfinite on_nonfinite_of(std::string_view name) { return find_name<OnNonfinite>("on_nonfinite", name, nonfinite); }
Speculate speculate_of(std::string_view name) { return find_name<Speculate>("speculate", name, speculations); }

Absent absent_of(std::string_view name) { return find_name<Absent>("absent", name, absences); }

std::string_view name_of(Absent value) noexcept {
  switch (value) {
    case Absent::refuse:
      return "refuse";
    case Absent::zero:
      return "zero";
    case Absent::skip:
      return "skip";
  }
  return "unknown";
}

std::string_view name_of(OnNonfinite value) noexcept { return value == OnNonfinite::skip ? "skip" : "stop"; }

std::string_view name_of(UpdatePath path) noexcept {
  switch (path) {
    case UpdatePath::cpu:
      return "cpu";
    case UpdatePath::streamed:
      return "streamed";
    case UpdatePath::resident:
      return "resident";
  }
  return "unknown";
}

Shape shape_of(nb::handle value) {
  std::vector<std::int64_t> d;
  if (PyLong_Check(value.ptr())) {
    d.push_back(nb::cast<std::int64_t>(value));
  } else if (!nb::try_cast(value, d)) {
    throw nb::type_error("a shape is an int or a sequence of ints");
  }
  return Shape(d);
}

nb::tuple tuple_of(const Shape& shape) {
  nb::list dims;
  for (int i = 0; i < shape.rank(); ++i) dims.append(shape[i]);
  return nb::tuple(dims);
}

}  // namespace tandem::python
