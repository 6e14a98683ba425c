#pragma once
// Types of DLPack and NumPy for tensors of tandem's.
#include <nanobind/ndarray.h>

#include <array>
#include <cstddef>

#include "python/bindings/cells.hpp"

namespace tandem::python {

/// Element type in arrays; NumPy, which has no bf16, gets uint16 in its place.
nb::dlpack::dtype dtype_for(DType dtype, bool as_numpy);

/// An array of nanobind's over the memory of a view, kept by `owner`. NumPy's is `as_numpy`.
template <class Array>
Array array_over(const TensorView& view, const DeviceCell& device, nb::handle owner, bool as_numpy) {
  std::array<std::size_t, Shape::max_rank> dims{};
  for (int i = 0; i < view.shape.rank(); ++i)
    dims[static_cast<std::size_t>(i)] = static_cast<std::size_t>(view.shape[i]);
  return Array(view.data, static_cast<std::size_t>(view.shape.rank()), dims.data(), owner, nullptr,
               dtype_for(view.dtype, as_numpy), device.is_host() ? nb::device::cpu::value : nb::device::cuda::value,
               device.index());
}

}  // namespace tandem::python
