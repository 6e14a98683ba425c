#include "python/bindings/resident.hpp"

#include <fmt/format.h>

#include <utility>

#include "python/bindings/array_types.hpp"
#include "python/bindings/bindings.hpp"
#include "python/bindings/text_values.hpp"

namespace tandem::python {
namespace {

/// Weights of one parameter, asked for anew at each use, as `adopt` moves them.
struct Resident {
  std::shared_ptr<EngineCell> engine;
  std::string name;

  TensorView view() const {
    return engine->call([this](OffloadEngine& e) { return e.resident_weights(e.layout().parameter(name)); });
  }
};

/// Owner of an array of resident weights: keeps the engine, which is not closed and adopts no plan meanwhile.
struct ResidentArray {
  explicit ResidentArray(std::shared_ptr<EngineCell> cell) : engine(std::move(cell)) { ++engine->resident_arrays; }
  ~ResidentArray() { --engine->resident_arrays; }
  ResidentArray(const ResidentArray&) = delete;
  ResidentArray& operator=(const ResidentArray&) = delete;
  Counted counted{live().arrays};
  std::shared_ptr<EngineCell> engine;
};

template <class Array>
nb::object array_of(const Resident& weights, bool as_numpy) {
  const TensorView view = weights.view();
  const nb::capsule owner(new ResidentArray(weights.engine),
                          [](void* array) noexcept { delete static_cast<ResidentArray*>(array); });
  return nb::cast(array_over<Array>(view, weights.engine->device(), owner, as_numpy));
}

nb::object dlpack(const Resident& weights, nb::handle, nb::handle max_version, nb::handle dl_device, nb::handle copy) {
  const nb::object array = array_of<nb::ndarray<nb::array_api>>(weights, false);
  return array.attr("__dlpack__")(nb::arg("max_version") = max_version, nb::arg("dl_device") = dl_device,
                                  nb::arg("copy") = copy);
}

nb::object numpy(const Resident& weights) {
  if (!weights.engine->device().is_host()) {
    throw nb::type_error("NumPy cannot reach the memory of a GPU: take the weights by DLPack");
  }
  return array_of<nb::ndarray<nb::numpy, nb::ro>>(weights, true);
}

}  // namespace

nb::object resident_object(const std::shared_ptr<EngineCell>& engine, const std::string& name) {
  Resident weights{engine, name};
  static_cast<void>(weights.view());
  return nb::cast(std::move(weights));
}

void bind_resident(nb::module_& m) {
  nb::class_<Resident>(
      m, "ResidentWeights",
      "Weights of a parameter whose layer stays on the device, without a guard. It keeps the engine. Its contents are "
      "those of the last update for work on a stream behind `wait_for_weights`; nothing here waits for them.")
      .def_prop_ro(
          "name", [](const Resident& w) { return w.name; }, "Full name of the parameter.")
      .def_prop_ro(
          "shape", [](const Resident& w) { return tuple_of(w.view().shape); },
          nb::for_getter(nb::sig("def shape(self, /) -> tuple[int, ...]")), "Shape, elements.")
      .def_prop_ro(
          "dtype", [](const Resident& w) { return std::string(tandem::name_of(w.view().dtype)); },
          "\"bf16\" or \"f32\".")
      .def_prop_ro(
          "pointer", [](const Resident& w) { return reinterpret_cast<std::uintptr_t>(w.view().data); },
          "Address, for kernels of your own: the same until `adopt`. It keeps nothing.")
      .def("__dlpack__", &dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
           nb::arg("copy").none() = nb::none(),
           nb::sig("def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[int, int] | None = None, "
                   "dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> typing.Any"),
           "A DLPack capsule; bf16 as kDLBfloat. `stream` is not looked at: work is ordered by `wait_for_weights`. An "
           "array made of it is not to be written.")
      .def("__dlpack_device__",
           [](const Resident& w) {
             const DeviceCell& device = w.engine->device();
             return std::pair<int, int>(device.is_host() ? nb::device::cpu::value : nb::device::cuda::value,
                                        device.index());
           })
      .def("numpy", &numpy, nb::sig("def numpy(self) -> tandem.types.Array"),
           "The memory as a NumPy array, read only, on the host device alone; bf16 as uint16. While one is alive the "
           "engine neither closes nor adopts a plan (MisuseError).")
      .def("__repr__", [](const Resident& w) { return fmt::format("<ResidentWeights '{}'>", w.name); });
}

}  // namespace tandem::python
