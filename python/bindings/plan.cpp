// Plans, and the facts that they are made of.
#include <fmt/format.h>
#include <nanobind/stl/shared_ptr.h>

#include "python/bindings/bindings.hpp"
#include "python/bindings/cells.hpp"
#include "python/bindings/fields.hpp"

namespace tandem::python {
namespace {

void bind_facts(nb::module_& m) {
  using F = PlanningFacts;
  Fields<F>(m, "PlanningFacts", "Facts about device and machine that planning needs: of a device by Device.facts().")
      .bytes("device_capacity", &F::device_capacity, "Bytes of the device.")
      .bytes("host_available", &F::host_available, "Bytes of free host memory; 0: unknown, not checked.")
      .bytes("device_reserved", &F::device_reserved, "Bytes that context and libraries take under the ceiling.")
      .bytes("host_limit", &F::host_limit, "Bytes that a ceiling of host memory may reach; 0: none above what is free.")
      .bytes("file_room", &F::file_room, "Bytes that the state's file may take; 0: unknown, not checked.")
      .value("device_is_host", &F::device_is_host, "bool", "Whether the device's memory is the host's.")
      .bytes("pinned_per_page_table", &F::pinned_per_page_table, "Bytes of pinned memory per byte of page table.")
      .done();
}

void bind_parts(nb::module_& m) {
  Facts<MemoryEntry>(m, "MemoryEntry", "One row of a memory plan.")
      .fact("name", &MemoryEntry::name, "What it is: \"weights, streamed\".")
      .fact("phase", &MemoryEntry::phase, "\"run\", or the phase in which alone it is needed.")
      .derived(
          "place", [](const MemoryEntry& e) { return std::string(tandem::name_of(e.place)); },
          "\"device\", \"pinned\", \"pageable\" or \"file\".")
      .fact("bytes", &MemoryEntry::bytes, "Bytes, alignment included.")
      .done();
  Facts<Subgroup>(m, "Subgroup", "A slice of one layer's state.")
      .fact("layer", &Subgroup::layer, "Index of its layer.")
      .fact("begin", &Subgroup::begin, "First element in the layer's state.")
      .fact("end", &Subgroup::end, "One past the last.")
      .derived(
          "tier", [](const Subgroup& s) { return std::string(tandem::name_of(s.tier)); },
          "Where its state lives: \"device\", \"host\" or \"file\".")
      .derived(
          "path", [](const Subgroup& s) { return std::string(name_of(s.path())); },
          "How it is updated: \"cpu\", \"streamed\" or \"resident\".")
      .done();
  Facts<Plan::Shares>(m, "Shares", "Parameters updated in a step on each path, padding included.")
      .fact("cpu", &Plan::Shares::cpu, "Parameters updated on the CPU.")
      .fact("streamed", &Plan::Shares::streamed, "Parameters streamed through the device.")
      .fact("resident", &Plan::Shares::resident, "Parameters that live on the device.")
      .done();
}

std::string repr_of(const Plan& plan) {
  const MemoryPlan needs = plan.needs();
  return fmt::format("<Plan {}: device {}, host {}>", plan.policy_text(), format_bytes(needs.device_bytes()),
                     format_bytes(needs.host_bytes()));
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_facts(m);
  bind_parts(m);
  nb::class_<Plan>(m, "Plan", "Where every layer and subgroup lives, who updates it, and every byte by name.")
      .def_prop_ro("policy", &Plan::policy_text, "Policy of this division: \"interleave:4, auto\".")
      .def_ro("chosen_by_auto", &Plan::chosen_by_auto, "Whether `auto` chose it.")
      .def_prop_ro(
          "state", [](const Plan& p) { return std::string(tandem::name_of(p.state)); }, "State format.")
      .def_prop_ro(
          "entries", [](const Plan& p) { return p.needs().entries; }, "Rows of the memory table.")
      .def_prop_ro(
          "device_bytes", [](const Plan& p) { return p.needs().device_bytes(); }, "Bytes on the device, at most.")
      .def_prop_ro(
          "host_bytes", [](const Plan& p) { return p.needs().host_bytes(); }, "Bytes on the host, at most.")
      .def_prop_ro(
          "file_bytes", [](const Plan& p) { return p.needs().bytes_in(Place::file); }, "Bytes in the state's file.")
      .def_prop_ro("shares", &Plan::shares, "Parameters updated on each path.")
      .def_ro("subgroups", &Plan::subgroups, "Subgroups in the order of their updates: a list, copied.")
      .def_prop_ro(
          "resident_layers",
          [](const Plan& p) {
            std::vector<int> layers;
            for (std::size_t i = 0; i < p.layers.size(); ++i) {
              if (p.layers[i].resident) layers.push_back(static_cast<int>(i));
            }
            return layers;
          },
          "Layers whose weights stay on the device.")
      .def_ro("subgroup_size", &Plan::subgroup_size, "Parameters in a subgroup.")
      .def_ro("max_micro_batches", &Plan::max_micro_batches, "Micro-batches that a step may have.")
      .def_prop_ro("speculating_parameters", &Plan::speculating_parameters,
                   "Parameters (padded) whose update may run before the gradient norm is known.")
      .def_ro("updates_in_backward", &Plan::updates_in_backward, "Whether updates run in backward.")
      .def_prop_ro("order", &Plan::order, "Order of a step's micro-batches in a few words.")
      .def("table", &Plan::table, "The memory table and its notes, for people.")
      .def("notes", &Plan::notes, "The notes below the table.")
      .def("json", &Plan::json, "JSON text of every field.")
      .def("outline_json", &Plan::outline_json, "JSON text with the number of subgroups in place of each.")
      .def("_repr_html_",
           [](nb::handle self) {
             return nb::cast<std::string>(nb::module_::import_("tandem.display").attr("plan_html")(self));
           })
      .def(
          "plot",
          [](nb::handle self, nb::handle axes) {
            return nb::module_::import_("tandem.plotting").attr("plot_plan")(self, axes);
          },
          nb::arg("axes").none() = nb::none(), nb::sig("def plot(self, axes: typing.Any = None) -> typing.Any"),
          "Draws the bytes of device and host by name (matplotlib, the extra [plot]). Returns the axes.")
      .def("__str__", &Plan::table)
      .def("__repr__", &repr_of);
  m.def(
      "make_plan",
      [](const ParameterLayout& layout, const OffloadOptions& options, const DeviceCell& device) {
        const nb::gil_scoped_release released;
        return make_plan(layout, options, profile_of(device.get()));
      },
      nb::arg("layout"), nb::arg("options"), nb::arg("device"),
      "The plan for these options on this device; allocates nothing. Blocks, mostly for milliseconds.\n\n"
      "`auto` is as much on the device as fits; tandem.plan chooses by the performance model. Raises PlanError, with "
      "the "
      "table and with what would fit, UsageError on options out of range.");
  m.def(
      "make_plan",
      [](const ParameterLayout& l, const OffloadOptions& o, const PlanningFacts& f) { return make_plan(l, o, f); },
      nb::arg("layout"), nb::arg("options"), nb::arg("facts"), nb::call_guard<nb::gil_scoped_release>(),
      "The plan for a machine of these facts.");
  m.def("smallest_device_memory", &smallest_device_memory, nb::arg("layout"), nb::arg("options"),
        nb::call_guard<nb::gil_scoped_release>(), "Smallest device_memory in bytes for which make_plan would succeed.");
}

}  // namespace tandem::python
