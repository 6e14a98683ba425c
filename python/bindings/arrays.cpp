#include "python/bindings/arrays.hpp"

#include <fmt/format.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <vector>

#include "tandem/tandem.hpp"

namespace tandem::python {
namespace {

using Given = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

constexpr nb::dlpack::dtype fp32{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 32, 1};
constexpr nb::dlpack::dtype bfloat{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

}  // namespace

HostValues::HostValues(nb::handle array, std::int64_t count, const std::string& what) {
  Given given;
  if (!nb::try_cast(array, given, false) || (given.dtype() != fp32 && given.dtype() != bfloat)) {
    throw nb::type_error(
        fmt::format("{}: a dense, row-major array of f32 or bf16 on the host is needed, with DLPack or the "
                    "buffer protocol; with NumPy give numpy.ascontiguousarray(values, dtype='float32')",
                    what)
            .c_str());
  }
  const auto size = static_cast<std::int64_t>(given.size());
  if (size != count) throw MisuseError(fmt::format("{}: {} elements given, {} needed", what, size, count));
  const auto elements = static_cast<std::size_t>(size);
  if (given.dtype() == fp32) {
    values_ = {static_cast<const float*>(given.data()), elements};
  } else {
    widened_.resize(elements);
    const auto* const from = static_cast<const bf16*>(given.data());
    for (std::size_t i = 0; i < elements; ++i) widened_[i] = numerics::bf16_to_float(from[i]);
    values_ = widened_;
  }
  held_ = nb::cast(std::move(given));
}

NewArray new_array(std::span<const std::size_t> shape) {
  std::size_t count = 1;
  for (const std::size_t n : shape) count *= n;
  auto* const memory = new float[count];
  const nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  nb::ndarray<nb::numpy, float> array(memory, shape.size(), shape.data(), owner);
  return {nb::cast(array), {memory, count}};
}

}  // namespace tandem::python
