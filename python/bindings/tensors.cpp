// Guards and views of their tensors.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <array>

#include "python/bindings/bindings.hpp"
#include "python/bindings/guard_objects.hpp"
#include "python/bindings/resident_weights.hpp"
#include "python/bindings/text_values.hpp"

namespace tandem::python {
namespace {

/// Weights, or gradients, of a layer: two Python classes over one cell.
struct Weights {
  std::shared_ptr<GuardCell> cell;
};
struct Gradients {
  std::shared_ptr<GuardCell> cell;
};

nb::dlpack::dtype dtype_for(DType dtype, bool as_numpy) {
  using Code = nb::dlpack::dtype_code;
  switch (dtype) {
    case DType::f32:
      return {static_cast<std::uint8_t>(Code::Float), 32, 1};
    case DType::i32:
      return {static_cast<std::uint8_t>(Code::Int), 32, 1};
    case DType::bf16:
      return {static_cast<std::uint8_t>(as_numpy ? Code::UInt : Code::Bfloat), 16, 1};
  }
  return {};
}

/// The view's memory as an array of nanobind's, owned as the view is.
template <class Array>
Array array_of(const Tensor& tensor, bool as_numpy) {
  std::array<std::size_t, Shape::max_rank> dims{};
  const Shape& shape = tensor.view.shape;
  for (int i = 0; i < shape.rank(); ++i) dims[static_cast<std::size_t>(i)] = static_cast<std::size_t>(shape[i]);
  const DeviceCell& device = tensor.owner->device();
  return Array(tensor.view.data, static_cast<std::size_t>(shape.rank()), dims.data(), tensor.owner->array_owner(),
               nullptr, dtype_for(tensor.view.dtype, as_numpy),
               device.is_host() ? nb::device::cpu::value : nb::device::cuda::value, device.index());
}

void require_held(const Tensor& tensor) { tensor.owner->require_held(fmt::format("'{}'", tensor.name)); }

nb::object dlpack(const Tensor& tensor, nb::handle stream, nb::handle max_version, nb::handle dl_device,
                  nb::handle copy) {
  require_held(tensor);
  tensor.owner->order_for(stream);
  const nb::object array = nb::cast(array_of<nb::ndarray<nb::array_api>>(tensor, false));
  return array.attr("__dlpack__")(nb::arg("max_version") = max_version, nb::arg("dl_device") = dl_device,
                                  nb::arg("copy") = copy);
}

nb::object numpy(const Tensor& tensor) {
  require_held(tensor);
  if (!tensor.owner->device().is_host()) {
    throw nb::type_error("NumPy cannot reach the memory of a GPU: take the view by DLPack, as with torch.from_dlpack");
  }
  tensor.owner->order_for(nb::none());
  if (tensor.owner->is_weights()) return nb::cast(array_of<nb::ndarray<nb::numpy, nb::ro>>(tensor, true));
  return nb::cast(array_of<nb::ndarray<nb::numpy>>(tensor, true));
}

nb::object as_array(const Tensor& tensor, nb::handle dtype, nb::handle copy) {
  nb::object array = numpy(tensor);
  if (!dtype.is_none()) array = array.attr("astype")(dtype, nb::arg("copy") = false);
  return copy.is_none() || !nb::cast<bool>(copy) ? array : array.attr("copy")();
}

nb::object tensor_of(const std::shared_ptr<GuardCell>& guard, const std::string& name) {
  const TensorView view = guard->view(name);
  if (!view) return nb::none();
  return nb::cast(Tensor{guard, name, view});
}

/// DLPack capsules of all weights of a guard, in the layer's order.
nb::list capsules(const std::shared_ptr<GuardCell>& guard, nb::handle stream) {
  nb::list made;
  for (const std::string& name : guard->names())
    made.append(dlpack({guard, name, guard->view(name)}, stream, nb::none(), nb::none(), nb::none()));
  return made;
}

/// Methods of both classes of guards.
template <class Guard>
nb::class_<Guard> bind_guard(nb::module_& m, const char* name, const char* doc) {
  return nb::class_<Guard>(m, name, doc)
      .def(
          "keys", [](const Guard& g) { return g.cell->names(); }, "Names of the layer's parameters.")
      .def_prop_ro(
          "held", [](const Guard& g) { return g.cell->held(); }, "Whether it is neither released nor committed.")
      .def(
          "__enter__", [](nb::object self) { return self; },
          nb::sig((std::string("def __enter__(self) -> ") + name).c_str()))
      .def("__len__", [](const Guard& g) { return g.cell->names().size(); })
      .def(
          "__iter__", [](const Guard& g) { return nb::iter(nb::cast(g.cell->names())); },
          nb::sig("def __iter__(self) -> collections.abc.Iterator[str]"))
      .def("__repr__",
           [](const Guard& g) { return fmt::format("<{}{}>", g.cell->text(), g.cell->held() ? "" : ", released"); });
}

void bind_guards(nb::module_& m) {
  constexpr const char* exit = "def __exit__(self, exception: object, value: object, traceback: object, /) -> None";
  bind_guard<Weights>(
      m, "Weights",
      "A layer's weights on the device, until they are released: by `release`, at the end of a `with`, or "
      "when neither the object nor a view nor an array of it is left.")
      .def(
          "__getitem__", [](const Weights& g, const std::string& name) { return tensor_of(g.cell, name); },
          nb::arg("name"), nb::sig("def __getitem__(self, name: str, /) -> Tensor"),
          "Weights of one parameter, bf16, read only. Raises MisuseError where the layer has no such parameter, or "
          "after "
          "the release.")
      .def(
          "capsules", [](const Weights& g, nb::handle stream) { return capsules(g.cell, stream); }, nb::kw_only(),
          nb::arg("stream").none() = nb::none(),
          nb::sig("def capsules(self, *, stream: typing.Any = None) -> list[typing.Any]"),
          "DLPack capsules of all weights, in the order of `keys`, each as `__dlpack__` of its view gives it, to be "
          "taken "
          "once. Raises as that does.")
      .def(
          "also_used_on", [](const Weights& g, const std::shared_ptr<StreamCell>& s) { g.cell->also_used_on(s); },
          nb::arg("stream"), "Makes another stream wait for the weights too, and keeps them for the work queued there.")
      .def(
          "release", [](const Weights& g, bool force) { g.cell->release(force); }, nb::arg("force") = false,
          "Releases the buffer after the work queued so far. Raises MisuseError while an array made of a view is "
          "alive; "
          "with `force` such arrays have undefined contents from then on.")
      .def(
          "__exit__",
          [](const Weights& g, nb::handle exception, nb::handle, nb::handle) {
            exception.is_none() ? g.cell->release(false) : g.cell->release_by_exception();
          },
          nb::arg("exception").none(), nb::arg("value").none(), nb::arg("traceback").none(), nb::sig(exit));
  bind_guard<Gradients>(
      m, "Gradients",
      "A layer's gradients for one micro-batch, to be committed once: by `commit`, or at the end of a "
      "`with`. Released without, they abandon the step.")
      .def(
          "__getitem__", [](const Gradients& g, const std::string& name) { return tensor_of(g.cell, name); },
          nb::arg("name"), nb::sig("def __getitem__(self, name: str, /) -> Tensor | None"),
          "Gradient of one parameter: f32 to be added to, or bf16 to be written whole, as its options say; None for a "
          "frozen one. Raises MisuseError where the layer has no such parameter, or after the commit.")
      .def(
          "leave_out", [](const Gradients& g, const std::string& name) { g.cell->leave_out(name); }, nb::arg("name"),
          "Says that one parameter has no gradient in this micro-batch, in a step that allows it (`absent`).")
      .def(
          "copy_in",
          [](const Gradients& g, const std::string& name, std::uintptr_t address, std::size_t nbytes) {
            g.cell->copy_in(name, reinterpret_cast<const void*>(address), nbytes);
          },
          nb::arg("name"), nb::arg("address"), nb::arg("nbytes"),
          "Copies a gradient from memory of the caller's into the buffer of one parameter, on the host device alone: "
          "dense, "
          "row-major, of the view's type. Blocks until it is copied. Raises MisuseError for a frozen parameter and for "
          "another size.")
      .def(
          "commit",
          [](const Gradients& g, const std::shared_ptr<StreamCell>& stream, bool force) {
            g.cell->commit(stream ? stream : g.cell->held() ? g.cell->stream() : nullptr, force);
          },
          nb::arg("stream").none() = nb::none(), nb::arg("force") = false,
          nb::sig("def commit(self, stream: Stream | None = None, force: bool = False) -> None"),
          "Commits the gradients: all work that fills them is queued, and `stream` (None: that of the request) is the "
          "last "
          "to run it. Raises MisuseError while an array made of a view is alive, unless forced.")
      .def(
          "__exit__",
          [](const Gradients& g, nb::handle exception, nb::handle, nb::handle) {
            if (!exception.is_none()) return g.cell->release_by_exception();
            if (g.cell->held()) g.cell->commit(g.cell->stream(), false);
          },
          nb::arg("exception").none(), nb::arg("value").none(), nb::arg("traceback").none(), nb::sig(exit));
}

}  // namespace

nb::object weights_object(std::shared_ptr<GuardCell> cell) { return nb::cast(Weights{std::move(cell)}); }
nb::object gradients_object(std::shared_ptr<GuardCell> cell) { return nb::cast(Gradients{std::move(cell)}); }
nb::object resident_object(const std::shared_ptr<EngineCell>& engine, const Parameter& parameter) {
  const TensorView view = engine->call([&](OffloadEngine& e) { return e.resident_weights(parameter); });
  return nb::cast(Tensor{std::make_shared<ResidentWeights>(engine, parameter.layer), parameter.full_name, view});
}

void bind_tensors(nb::module_& m) {
  nb::class_<Tensor>(
      m, "Tensor",
      "View of one tensor of a guard, or of weights that stay on the device: dense, row-major, in the memory of the "
      "engine. It keeps the guard or the engine, and is refused once that is released or closed. Arrays come out of it "
      "by DLPack (numpy.from_dlpack for f32, "
      "torch.from_dlpack) or `numpy()`.")
      .def_prop_ro(
          "name", [](const Tensor& t) { return t.name; }, "Name of the parameter in its layer.")
      .def_prop_ro(
          "shape", [](const Tensor& t) { return tuple_of(t.view.shape); },
          nb::for_getter(nb::sig("def shape(self, /) -> tuple[int, ...]")), "Shape, elements.")
      .def_prop_ro(
          "dtype", [](const Tensor& t) { return std::string(tandem::name_of(t.view.dtype)); }, "\"bf16\" or \"f32\".")
      .def_prop_ro(
          "nbytes", [](const Tensor& t) { return t.view.bytes(); }, "Bytes.")
      .def_prop_ro(
          "pointer",
          [](const Tensor& t) {
            require_held(t);
            return reinterpret_cast<std::uintptr_t>(t.view.data);
          },
          "Address, for kernels of your own. It keeps nothing. Raises MisuseError after the release.")
      .def("__dlpack__", &dlpack, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
           nb::arg("copy").none() = nb::none(),
           nb::sig("def __dlpack__(self, *, stream: typing.Any = None, max_version: tuple[int, int] | None = None, "
                   "dl_device: "
                   "tuple[int, int] | None = None, copy: bool | None = None) -> typing.Any"),
           "A DLPack capsule; bf16 as kDLBfloat. On the host it blocks until the memory has its contents; Ctrl-C ends "
           "it.")
      .def("__dlpack_device__",
           [](const Tensor& t) {
             const DeviceCell& device = t.owner->device();
             return std::pair<int, int>(device.is_host() ? nb::device::cpu::value : nb::device::cuda::value,
                                        device.index());
           })
      .def("numpy", &numpy, nb::sig("def numpy(self) -> tandem.types.Array"),
           "The memory as a NumPy array, on the host device alone; bf16 as uint16, weights read only. Blocks until it "
           "has "
           "its contents; Ctrl-C ends it. The guard is not released while the array is alive.")
      .def(
          "copy", [](const Tensor& t) { return numpy(t).attr("copy")(); },
          nb::sig("def copy(self) -> tandem.types.Array"), "A copy of the memory as `numpy` shows it.")
      .def("__array__", &as_array, nb::arg("dtype").none() = nb::none(), nb::arg("copy").none() = nb::none(),
           nb::sig("def __array__(self, dtype: typing.Any = None, copy: bool | None = None) -> tandem.types.Array"))
      .def("__repr__", [](const Tensor& t) {
        return fmt::format("<Tensor '{}' {} {} of {}>", t.name, t.view.shape.text(), tandem::name_of(t.view.dtype),
                           t.owner->text());
      });
  bind_guards(m);
}

}  // namespace tandem::python
