// Parameters and layers.
#include <fmt/format.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "python/bindings/bindings.hpp"
#include "python/bindings/fields.hpp"

namespace tandem::python {
namespace {

using Builder = ParameterLayout::LayerBuilder;

void bind_parameter_options(nb::module_& m) {
  Fields<ParameterOptions>(m, "ParameterOptions", "How a parameter is trained.")
      .value("decay", &ParameterOptions::decay, "bool", "Whether weight decay applies.")
      .value("trainable", &ParameterOptions::trainable, "bool", "False: no gradient, no optimizer state, no decay.")
      .value("lr_scale", &ParameterOptions::lr_scale, "float", "Factor of the learning rate.")
      .value("group", &ParameterOptions::group, "int", "Index of its values in the groups of a step.")
      .text(
          "gradient", &ParameterOptions::gradient, dtype_of_name, [](DType t) { return tandem::name_of(t); },
          "\"f32\": added to a buffer that is zero at first. \"bf16\": written whole, into a buffer that is undefined "
          "at first.")
      .text(
          "weight", &ParameterOptions::weight, dtype_of_name, [](DType t) { return tandem::name_of(t); },
          "\"bf16\", rounded from the fp32 master; or \"f32\": the master itself, never rounded, for norms and biases.")
      .done();
}

void bind_parameter(nb::module_& m) {
  Facts<Parameter>(m, "Parameter", "One parameter of a layer: a copy, with no link to the layout.")
      .fact("name", &Parameter::name, "Name in its layer.")
      .fact("full_name", &Parameter::full_name, "Name with its layer's: \"h.0.w1\".")
      .fact("layer", &Parameter::layer, "Index of its layer.")
      .derived(
          "shape", [](const Parameter& p) { return tuple_of(p.shape); }, "Shape, elements.", "tuple[int, ...]")
      .fact("count", &Parameter::count, "Number of elements, without padding.")
      .fact("offset", &Parameter::offset, "First element in the flat arrays of its layer.")
      .derived("tied", &Parameter::tied, "Whether it uses the storage of another parameter.", "bool")
      .fact("options", &Parameter::options, "How it is trained.")
      .done();
  Facts<Layer>(m, "Layer", "One layer, the unit of fetching: a copy.")
      .fact("name", &Layer::name, "Name of the layer.")
      .fact("parameters", &Layer::parameters, "Parameters in the order of their declaration.")
      .fact("elements", &Layer::elements, "Length of the flat weights, padding included.")
      .fact("state_elements", &Layer::state_elements, "Length of the trained part, padding included.")
      .done();
}

}  // namespace

void bind_layout(nb::module_& m) {
  bind_parameter_options(m);
  bind_parameter(m);
  const std::string add_signature = "def add(self, name: str, shape: int | collections.abc.Sequence[int], *" +
                                    keywords_text<ParameterOptions>() + ") -> LayerBuilder";
  nb::class_<Builder>(m, "LayerBuilder", "Adds parameters to one layer of a layout.")
      .def(
          "add",
          [](nb::handle self, const std::string& name, nb::handle shape, const nb::kwargs& options) {
            nb::cast<Builder&>(self).add(name, shape_of(shape), from_keywords<ParameterOptions>(options, "add"));
            return nb::borrow(self);
          },
          nb::arg("name"), nb::arg("shape"), nb::arg("options"), nb::sig(add_signature.c_str()),
          "Appends a parameter and returns the builder. Weights are bf16 unless `weight` says f32, the master state "
          "fp32.\n\n"
          "Raises MisuseError where its full name is taken, or the shape has no elements or more than eight "
          "dimensions.");
  nb::class_<ParameterLayout>(m, "ParameterLayout",
                              "Parameters of a model, layer by layer, in the order in which forward uses them.")
      .def(nb::init<>())
      .def(
          "add_layer",
          [](ParameterLayout& l, const std::string& name, int uses) { return l.add_layer(name, {.uses = uses}); },
          nb::arg("name"), nb::arg("uses") = 1, nb::keep_alive<0, 1>(),
          "Appends a layer, which commits gradients in so many uses of each backward. Raises MisuseError where the "
          "name "
          "is taken or empty.")
      .def("tie", &ParameterLayout::tie, nb::arg("owner"), nb::arg("shared"),
           "Makes `shared` (\"head.weight\") use the storage of `owner` (\"embedding.tokens\"), both declared, of one "
           "shape. Raises MisuseError otherwise.")
      .def(
          "layer", [](const ParameterLayout& l, int i) { return Layer(l.layer(i)); }, nb::arg("index"),
          "Layer by index. Raises IndexError.")
      .def(
          "parameter", [](const ParameterLayout& l, const std::string& n) { return Parameter(l.parameter(n)); },
          nb::arg("full_name"),
          "Parameter by full name; of a tied one its owner. Raises MisuseError where there is none.")
      .def_prop_ro(
          "layers", [](const ParameterLayout& l) { return std::vector<Layer>(l.layers()); }, "All layers.")
      .def_prop_ro(
          "owned_parameters",
          [](const ParameterLayout& l) {
            std::vector<Parameter> all;
            for (const Parameter* parameter : l.owned_parameters()) all.push_back(*parameter);
            return all;
          },
          "Parameters with storage of their own, in model order: those of initialize, read and write.")
      .def_prop_ro("parameter_count", &ParameterLayout::parameter_count, "Elements of all parameters, tied ones once.")
      .def_prop_ro("group_count", &ParameterLayout::group_count, "One more than the highest group; at least 1.")
      .def("__len__", &ParameterLayout::layer_count)
      .def("__repr__", [](const ParameterLayout& l) {
        return fmt::format("<ParameterLayout: {} layers, {} parameters>", l.layer_count(), l.parameter_count());
      });
}

}  // namespace tandem::python
