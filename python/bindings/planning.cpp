// The performance model: profiles of machines, simulated steps, plans chosen by them.
#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>

#include <map>

#include "python/bindings/bindings.hpp"
#include "python/bindings/cells.hpp"
#include "python/bindings/fields.hpp"

namespace tandem::python {
namespace {

std::string key_of(const ProfileField& field) { return fmt::format("{}.{}", field.section, field.key); }

const ProfileField& field_named(const std::string& key) {
  for (const ProfileField& field : profile_fields()) {
    if (key_of(field) == key) return field;
  }
  throw nb::key_error(key.c_str());
}

using Profile = nb::class_<MachineProfile>;

void bind_profile(nb::module_& m) {
  Facts<Figure>(m, "Figure", "One figure of a machine.")
      .fact("value", &Figure::value, "Value in the unit of its field; 0: unknown.")
      .fact("spread", &Figure::spread, "(largest - smallest) / median of the samples; 0 where there is one.")
      .fact("source", &Figure::source, "\"measured\", \"assumed\", or where it was read.")
      .done();
  Profile(m, "MachineProfile", "Figures of a machine, all that the performance model knows of it.")
      .def_ro("name", &MachineProfile::name, "Name of the machine.")
      .def_ro("cpu", &MachineProfile::cpu, "Model of the CPU.")
      .def_ro("device", &MachineProfile::device, "Name of the device.")
      .def_ro("device_kind", &MachineProfile::device_kind, "\"host\" or \"cuda\".")
      .def_prop_ro(
          "figures",
          [](const MachineProfile& p) {
            std::map<std::string, Figure> all;
            for (const ProfileField& field : profile_fields()) all.emplace(key_of(field), p.*field.figure);
            return all;
          },
          "All figures by \"section.key\".")
      .def(
          "__getitem__",
          [](const MachineProfile& p, const std::string& key) { return Figure(p.*field_named(key).figure); },
          nb::arg("key"), "The figure \"section.key\". Raises KeyError.")
      .def(
          "with_figure",
          [](MachineProfile p, const std::string& key, double value) {
            p.*field_named(key).figure = Figure{value, 0.0, "assumed"};
            return p;
          },
          nb::arg("key"), nb::arg("value"), "A copy with another value of one figure, in its unit.")
      .def("with_link", &with_link, nb::arg("bytes_per_second"), "A copy with a link of at most this rate each way.")
      .def("with_update_rate", &with_update_rate, nb::arg("parameters_per_second"),
           "A copy with a CPU that updates at most so many parameters a second.")
      .def("with_update_threads", &with_update_threads, nb::arg("threads"),
           "A copy with updates on at most so many threads.")
      .def("shared_by", &shared_by, nb::arg("devices"), "A copy with so many of its devices at work together.")
      .def("without_overhead", &without_overhead, "A copy in which nothing but the work itself takes time.")
      .def("knows_file", &MachineProfile::knows_file, "Whether it is known how fast state passes through a file.")
      .def("doubts", &doubts, "Doubts about the machine or the measurement, one line each.")
      .def("difference", &difference, nb::arg("other"), "Differences between two machines; empty where there are none.")
      .def("check", &MachineProfile::check,
           "Raises UsageError that names the first figure that is missing or not credible.")
      .def("toml", &profile_toml, "Commented TOML that reads back as the same profile.")
      .def("_repr_html_",
           [](nb::handle self) {
             return nb::cast<std::string>(nb::module_::import_("tandem.display").attr("profile_html")(self));
           })
      .def("__repr__",
           [](const MachineProfile& p) { return fmt::format("<MachineProfile {}: {}>", p.name, p.device); });
  m.def(
      "profile_units",
      [] {
        std::map<std::string, std::pair<std::string, std::string>> all;
        for (const ProfileField& f : profile_fields())
          all.emplace(key_of(f), std::pair(std::string(f.unit), std::string(f.help)));
        return all;
      },
      "Unit and meaning of each figure by \"section.key\".");
  m.def(
      "parse_profile", [](const std::string& toml, const std::string& origin) { return parse_profile(toml, origin); },
      nb::arg("toml"), nb::arg("origin") = "profile", "The profile of a TOML text. Raises UsageError.");
  m.def("read_profile", &read_profile, nb::arg("file"),
        nb::sig("def read_profile(file: str | os.PathLike[str]) -> MachineProfile"),
        "The profile in a file. Raises InputError, UsageError.");
}

void bind_measuring(nb::module_& m) {
  m.def(
      "identify", [](const DeviceCell& d) { return identify(d.get()); }, nb::arg("device"),
      nb::call_guard<nb::gil_scoped_release>(), "Name and version of machine and device, without figures.");
  m.def(
      "cached_profile_path", [](const DeviceCell& d) { return cached_profile_path(d.get()); }, nb::arg("device"),
      "Where the profile of a device is kept between runs.");
  m.def("cache_profile", &cache_profile, nb::arg("profile"), nb::arg("file"),
        nb::sig("def cache_profile(profile: MachineProfile, file: str | os.PathLike[str]) -> None"),
        "Writes a profile, whole or not at all. Raises WriteError.");
  m.def(
      "calibrate",
      [](const DeviceCell& device, double seconds, nb::handle working_set, nb::object progress,
         const std::optional<std::filesystem::path>& disk, const std::optional<std::filesystem::path>& state) {
        CalibrationOptions options;
        options.seconds_per_figure = seconds;
        options.working_set = bytes_of(working_set, "working_set");
        options.disk_folder = disk.value_or("");
        options.state_folder = state.value_or("");
        options.progress = [&progress](std::string_view what) {
          in_python([&] {
            check_signals();
            if (!progress.is_none()) progress(std::string(what));
          });
        };
        const nb::gil_scoped_release released;
        return calibrate(device.get(), options);
      },
      nb::arg("device"), nb::kw_only(), nb::arg("seconds_per_figure") = 0.4, nb::arg("working_set") = 0,
      nb::arg("progress").none() = nb::none(), nb::arg("disk_folder").none() = nb::none(),
      nb::arg("state_folder").none() = nb::none(),
      nb::sig(
          "def calibrate(device: Device, *, seconds_per_figure: float = 0.4, working_set: int | str = 0, progress: "
          "collections.abc.Callable[[str], object] | None = None, disk_folder: str | os.PathLike[str] | None = None, "
          "state_folder: str | os.PathLike[str] | None = None) -> MachineProfile"),
      "Measures a device, its link and its host: some 10 to 30 seconds by default, in which nothing else should run. "
      "`progress` is told before each figure; what it raises ends the measurement, as Ctrl-C does. Raises DeviceError, "
      "WriteError, PlanError.");
}

/// Shares of a Simulation by the names of the resources.
std::map<std::string, double> use_of(const Simulation& simulation) {
  std::map<std::string, double> shares;
  for (int i = 0; i < resource_count; ++i) {
    shares.emplace(std::string(tandem::name_of(static_cast<Resource>(i))), simulation.use[static_cast<std::size_t>(i)]);
  }
  return shares;
}

void bind_simulation(nb::module_& m) {
  Fields<LayerSeconds>(m, "LayerSeconds", "Seconds of a layer for one micro-batch, with nothing else on the device.")
      .value("forward", &LayerSeconds::forward, "float", "Seconds of its forward.")
      .value("backward", &LayerSeconds::backward, "float", "Seconds of its backward, recomputation included.")
      .done();
  using O = SimulationOptions;
  Fields<O>(m, "SimulationOptions", "How a step is simulated.")
      .value("micro_batches", &O::micro_batches, "int", "Micro-batches of the step.")
      .value("overlap_updates", &O::overlap_updates, "bool", "Whether the next forward starts while updates run.")
      .value("save", &O::save, "bool", "Whether a save begins with the updates: the profile must know the disk.")
      .value("disk_share", &O::disk_share, "float", "Share of the time in which the disk writes beside the step.")
      .value("coarse_pieces", &O::coarse_pieces, "int", "About so many pieces of state are simulated; 0: all.")
      .done();
  auto simulation =
      Facts<Simulation>(m, "Simulation", "One step in the steady state, as predicted.")
          .fact("step_seconds", &Simulation::step_seconds, "Seconds of a step.")
          .fact("forward_seconds", &Simulation::forward_seconds, "Seconds of forward, waits included.")
          .fact("backward_seconds", &Simulation::backward_seconds, "Seconds of backward, waits included.")
          .fact("update_seconds", &Simulation::update_seconds, "Seconds from the first update to the last.")
          .fact("exposed_update_seconds", &Simulation::exposed_update_seconds,
                "Part of update_seconds in which forward stands still.")
          .derived(
              "bound_by", [](const Simulation& s) { return std::string(tandem::name_of(s.bound_by())); },
              "The resource that is used most.")
          .derived("use", &use_of, "Mean share of each resource over the step, by name.", "dict[str, float]")
          .fact("given_up", &Simulation::given_up, "Whether a step takes longer, and all else is unknown.")
          .fact("tasks", &Simulation::tasks, "Tasks that were simulated.")
          .done();
  simulation
      .def("_repr_html_",
           [](nb::handle self) {
             return nb::cast<std::string>(nb::module_::import_("tandem.display").attr("simulation_html")(self));
           })
      .def(
          "plot",
          [](nb::handle self, nb::handle axes) {
            return nb::module_::import_("tandem.plotting").attr("plot_simulation")(self, axes);
          },
          nb::arg("axes").none() = nb::none(), nb::sig("def plot(self, axes: typing.Any = None) -> typing.Any"),
          "Draws the shares of the resources (matplotlib, the extra [plot]). Returns the axes.");
  m.def(
      "matrix_seconds",
      [](const MachineProfile& profile, const ParameterLayout& layout, double tokens, bool recompute) {
        return compute_seconds(profile, matrix_work(layout, tokens, recompute));
      },
      nb::arg("profile"), nb::arg("layout"), nb::arg("tokens"), nb::arg("recompute") = false,
      "Seconds of each layer, estimated as nothing but products of `tokens`, those of a micro-batch, with its "
      "matrices.");
  m.def(
      "simulate",
      [](const ParameterLayout& layout, const Plan& plan, const MachineProfile& profile,
         const std::vector<LayerSeconds>& compute,
         const SimulationOptions& options) { return simulate(layout, plan, profile, compute, options); },
      nb::arg("layout"), nb::arg("plan"), nb::arg("profile"), nb::arg("compute"),
      nb::arg("options") = SimulationOptions{}, nb::call_guard<nb::gil_scoped_release>(),
      nb::sig("def simulate(layout: ParameterLayout, plan: Plan, profile: MachineProfile, compute: list[LayerSeconds], "
              "options: SimulationOptions = ...) -> Simulation"),
      "One step of a plan in virtual time; `compute` has one entry for each layer. Raises MisuseError.");
}

void bind_choice(nb::module_& m) {
  Facts<Candidate>(m, "Candidate", "One policy that was looked at.")
      .derived(
          "policy", [](const Candidate& c) { return c.policy.text(); }, "Its name.")
      .fact("fits", &Candidate::fits, "Whether it fits.")
      .fact("improved", &Candidate::improved, "Whether it is a division of its own, which no policy names.")
      .fact("shares", &Candidate::shares, "Parameters updated on each path.")
      .fact("device_bytes", &Candidate::device_bytes, "Bytes on the device.")
      .fact("simulation", &Candidate::simulation, "Its step, where it fits.")
      .done();
  nb::class_<Choice>(m, "Choice", "The predicted best plan, and what it was compared with.")
      .def_ro("plan", &Choice::plan, "The plan.")
      .def_ro("simulation", &Choice::simulation, "Its step.")
      .def_ro("candidates", &Choice::candidates, "Policies by step time; those that do not fit last.")
      .def_ro("closed_form_cpu_share", &Choice::closed_form_cpu_share, "The CPU's share by the closed form.")
      .def_ro("simulations", &Choice::simulations, "Simulations that the search took.")
      .def("_repr_html_",
           [](nb::handle self) {
             return nb::cast<std::string>(nb::module_::import_("tandem.display").attr("choice_html")(self));
           })
      .def(
          "plot",
          [](nb::handle self, nb::handle axes) {
            return nb::module_::import_("tandem.plotting").attr("plot_choice")(self, axes);
          },
          nb::arg("axes").none() = nb::none(), nb::sig("def plot(self, axes: typing.Any = None) -> typing.Any"),
          "Draws the step time of each policy (matplotlib, the extra [plot]). Returns the axes.")
      .def("__repr__", [](const Choice& c) {
        return fmt::format("<Choice {}: {:.3g} s a step, bound by {}>", c.plan.policy_text(), c.simulation.step_seconds,
                           tandem::name_of(c.simulation.bound_by()));
      });
  m.def(
      "choose_plan",
      [](const ParameterLayout& layout, const OffloadOptions& options, const PlanningFacts& facts,
         const MachineProfile& profile,
         const std::vector<LayerSeconds>& compute) { return choose_plan(layout, options, facts, profile, compute); },
      nb::arg("layout"), nb::arg("options"), nb::arg("facts"), nb::arg("profile"), nb::arg("compute"),
      nb::call_guard<nb::gil_scoped_release>(),
      "The predicted best of all policies that fit. Blocks for tenths of a second to several. Raises PlanError where "
      "nothing fits, MisuseError.");
}

}  // namespace

void bind_planning(nb::module_& m) {
  bind_profile(m);
  bind_measuring(m);
  bind_simulation(m);
  bind_choice(m);
}

}  // namespace tandem::python
