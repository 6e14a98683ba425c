// The offload engine.
#include <fmt/format.h>
#include <nanobind/stl/shared_ptr.h>

#include <set>
#include <utility>

#include "python/bindings/arrays.hpp"
#include "python/bindings/bindings.hpp"
#include "python/bindings/fields.hpp"
#include "python/bindings/guard_objects.hpp"

namespace tandem::python {
namespace {

using Cell = std::shared_ptr<EngineCell>;

/// A scope for forwards alone, from `__enter__` to `__exit__`.
struct EvaluationScope {
  Cell engine;
  std::unique_ptr<OffloadEngine::Evaluation> scope;
  ~EvaluationScope() { end(); }
  void end() {
    if (scope) engine->let_go([this] { scope.reset(); });
  }
};

/// Checks that a mapping has an array for each owned parameter and nothing else.
void require_all_names(const ParameterLayout& layout, const nb::dict& arrays) {
  std::set<std::string> given;
  for (const auto& entry : arrays) given.insert(nb::cast<std::string>(entry.first));
  std::string missing;
  for (const Parameter* parameter : layout.owned_parameters()) {
    if (given.erase(parameter->full_name) == 0)
      missing += fmt::format("{}'{}'", missing.empty() ? "" : ", ", parameter->full_name);
  }
  if (!missing.empty()) throw MisuseError("initialize: no array for " + missing);
  if (!given.empty()) throw MisuseError(fmt::format("initialize: there is no parameter '{}'", *given.begin()));
}

void copy_values(nb::handle array, std::span<float> values, const std::string& what) {
  const HostValues given(array, static_cast<std::int64_t>(values.size()), what);
  std::copy(given.span().begin(), given.span().end(), values.begin());
}

void initialize(EngineCell& cell, nb::object source) {
  const nb::object arrays = nb::module_::import_("collections.abc").attr("Mapping");
  const bool is_mapping = nb::isinstance(source, arrays);
  if (is_mapping)
    require_all_names(cell.layout(), nb::cast<nb::dict>(nb::module_::import_("builtins").attr("dict")(source)));
  const std::function<void(const Parameter&, std::span<float>)> values = [&](const Parameter& p, std::span<float> to) {
    in_python([&] {
      check_signals();
      const nb::object given =
          is_mapping ? nb::object(source[nb::str(p.full_name.c_str())]) : source(nb::cast(Parameter(p)));
      copy_values(given, to, fmt::format("initialize '{}'", p.full_name));
    });
  };
  cell.call([&](OffloadEngine& engine) { engine.initialize(values); });
}

void initialize_pieces(EngineCell& cell, nb::object source) {
  const std::function<void(const Parameter&, std::int64_t, std::span<float>)> values = [&](const Parameter& p,
                                                                                           std::int64_t first,
                                                                                           std::span<float> to) {
    in_python([&] {
      check_signals();
      copy_values(source(nb::cast(Parameter(p)), first, to.size()), to, fmt::format("initialize '{}'", p.full_name));
    });
  };
  cell.call([&](OffloadEngine& engine) { engine.initialize(values); });
}

template <class Guard, class Ask>
std::shared_ptr<GuardCell> ask_for(const Cell& cell, int layer, const std::shared_ptr<StreamCell>& stream,
                                   const Ask& ask) {
  GuardCell::Guard guard =
      cell->call([&](OffloadEngine& engine) { return GuardCell::Guard(ask(engine, layer, stream->view())); });
  return std::make_shared<GuardCell>(cell, stream, layer, std::move(guard));
}

nb::object fetch(const Cell& cell, int layer, const std::shared_ptr<StreamCell>& stream) {
  return weights_object(
      ask_for<WeightsGuard>(cell, layer, stream, [](OffloadEngine& e, int i, StreamView s) { return e.fetch(i, s); }));
}

nb::object gradients(const Cell& cell, int layer, const std::shared_ptr<StreamCell>& stream) {
  return gradients_object(ask_for<GradientsGuard>(
      cell, layer, stream, [](OffloadEngine& e, int i, StreamView s) { return e.gradients(i, s); }));
}

/// The parameter that a name or a Parameter means, in the engine's own layout.
const Parameter& parameter_of(const EngineCell& cell, nb::handle name) {
  Parameter* given = nullptr;
  if (nb::try_cast(name, given)) return cell.layout().parameter(given->full_name);
  std::string text;
  if (!nb::try_cast(name, text)) throw nb::type_error("a parameter is a full name such as 'h.0.w1', or a Parameter");
  return cell.layout().parameter(text);
}

nb::object read(EngineCell& cell, nb::handle name, const std::string& array) {
  const Parameter& parameter = parameter_of(cell, name);
  const StateArray which = state_array_of(array);
  std::vector<std::size_t> shape;
  for (int i = 0; i < parameter.shape.rank(); ++i) shape.push_back(static_cast<std::size_t>(parameter.shape[i]));
  const NewArray made = new_array(shape);
  cell.call(
      [&](OffloadEngine& engine) { engine.read(engine.layout().parameter(parameter.full_name), which, made.values); });
  return made.array;
}

void write(EngineCell& cell, nb::handle name, nb::handle values, const std::string& array) {
  const Parameter& parameter = parameter_of(cell, name);
  const StateArray which = state_array_of(array);
  const HostValues given(values, parameter.count, fmt::format("write '{}'", parameter.full_name));
  cell.call([&](OffloadEngine& engine) {
    engine.write(engine.layout().parameter(parameter.full_name), which, given.span());
  });
}

using Engine = nb::class_<EngineCell>;

void bind_state(Engine& engine) {
  engine
      .def("initialize", &initialize, nb::arg("values"),
           nb::sig("def initialize(self, values: collections.abc.Mapping[str, typing.Any] | "
                   "collections.abc.Callable[[Parameter], typing.Any]) -> None"),
           "Sets every master, from a mapping of full names to arrays, or from a function that is called with each "
           "owned "
           "Parameter in model order and returns its array: f32, or bf16, of its count. Moments and step become "
           "zero.\n\n"
           "Blocks; Ctrl-C ends it between parameters. What the function raises comes back, and the state is then "
           "neither "
           "read nor trained until `initialize` or `load` completes.")
      .def(
          "initialize_pieces", &initialize_pieces, nb::arg("values"),
          nb::sig("def initialize_pieces(self, values: collections.abc.Callable[[Parameter, int, int], typing.Any]) -> "
                  "None"),
          "As `initialize`, by pieces of at most 4 MiB: the function is called with a Parameter, the first element and "
          "their number.")
      .def("read", &read, nb::arg("parameter"), nb::arg("array") = "master",
           nb::sig("def read(self, parameter: str | Parameter, array: str = 'master') -> "
                   "tandem.types.FloatArray"),
           "A new array of f32 with the \"master\", \"m\" or \"v\" of a parameter, of its shape. Blocks; waits for "
           "updates. "
           "Raises MisuseError where there is no such parameter or a guard is held, TrainingError where the state is "
           "not "
           "that of a whole step.")
      .def("write", &write, nb::arg("parameter"), nb::arg("values"), nb::arg("array") = "master",
           nb::sig("def write(self, parameter: str | Parameter, values: typing.Any, array: str = 'master') -> None"),
           "Writes the \"master\", \"m\" or \"v\" of a parameter; a master also sets the weight. Blocks. Raises as "
           "`read`, and "
           "TypeError for arrays that are not f32 or bf16.")
      .def(
          "missed_updates",
          [](EngineCell& c, nb::handle name) {
            const Parameter& parameter = parameter_of(c, name);
            return c.call([&](OffloadEngine& e) { return e.missed_updates(parameter); });
          },
          nb::arg("parameter"), nb::sig("def missed_updates(self, parameter: str | Parameter) -> int"),
          "Number of updates that left a parameter as it was, as it had no gradient.")
      .def(
          "set_missed_updates",
          [](EngineCell& c, nb::handle name, std::int64_t updates) {
            const Parameter& parameter = parameter_of(c, name);
            c.call([&](OffloadEngine& e) { e.set_missed_updates(parameter, updates); });
          },
          nb::arg("parameter"), nb::arg("updates"),
          nb::sig("def set_missed_updates(self, parameter: str | Parameter, updates: int) -> None"),
          "Part of a load by hand, after `set_step`.")
      .def(
          "set_step", [](EngineCell& c, std::int64_t step) { c.call([&](OffloadEngine& e) { e.set_step(step); }); },
          nb::arg("step"), "Ends a load by hand, after every array has been written.")
      .def(
          "save",
          [](EngineCell& c, const std::filesystem::path& directory, const std::vector<std::filesystem::path>& files) {
            return c.call([&](OffloadEngine& e) { return e.save(directory, files); });
          },
          nb::arg("directory"), nb::arg("files") = nb::list(),
          nb::sig("def save(self, directory: str | os.PathLike[str], files: collections.abc.Sequence[str | "
                  "os.PathLike[str]] = []) -> "
                  "pathlib.Path"),
          "Writes the checkpoint directory/step-XXXXXXXX and returns its path; `files`, the caller's own state, are "
          "copied "
          "into it. Blocks; Ctrl-C waits for its end. Raises WriteError, InputError, MisuseError.")
      .def(
          "load",
          [](EngineCell& c, const std::filesystem::path& directory) {
            return c.call([&](OffloadEngine& e) { return e.load(directory); });
          },
          nb::arg("directory"), nb::sig("def load(self, directory: str | os.PathLike[str]) -> pathlib.Path"),
          "Restores state and step from a checkpoint, or from the newest whole one in a folder, and returns its path. "
          "Blocks; Ctrl-C waits for its end. Raises InputError.")
      .def(
          "state_digest", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.state_digest(); }); },
          "Digest of the state, 32 hexadecimal digits. Blocks; waits for updates.")
      .def(
          "adopt",
          [](EngineCell& c, const Plan& plan) {
            c.require_no_resident_arrays("no other plan can be adopted");
            c.call([&](OffloadEngine& e) { e.adopt(plan); });
          },
          nb::arg("plan"),
          "Changes to another plan for the same layout within the memory already booked. Blocks. Raises PlanError, "
          "MisuseError, also while an array of resident weights is alive.");
}

void bind_step(Engine& engine) {
  engine
      .def(
          "begin_step",
          [](EngineCell& c, const nb::kwargs& keywords) {
            const auto options = from_keywords<StepOptions>(keywords, "begin_step");
            c.call([&](OffloadEngine& e) { e.begin_step(options); });
          },
          nb::sig(("def begin_step(self, *" + keywords_text<StepOptions>() + ") -> None").c_str()),
          "Opens a step, with the fields of StepOptions. Raises MisuseError inside a step, TrainingError where the "
          "state is "
          "not that of a whole step.")
      .def(
          "end_step", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.end_step(); }); },
          "Ends a step: waits for the gradients, takes the norm, decides, and starts the updates, which may run on. "
          "Raises "
          "MisuseError while a guard is held and before every layer has committed.")
      .def(
          "end_gradients", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.end_gradients(); }); },
          "First half of end_step: the norm of the added gradients. `update`, `skip` or `abort_step` ends the step.")
      .def(
          "update",
          [](EngineCell& c, const nb::kwargs& keywords) {
            const auto values = from_keywords<UpdateValues>(keywords, "update");
            return c.call([&](OffloadEngine& e) { return e.update(values); });
          },
          nb::sig(("def update(self, *" + keywords_text<UpdateValues>() + ") -> StepReport").c_str()),
          "Starts the updates after end_gradients, with the fields of UpdateValues.")
      .def(
          "skip", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.skip(); }); },
          "Ends the step after end_gradients without an update: no bit of the state changes.")
      .def(
          "abort_step", [](EngineCell& c) { c.call([](OffloadEngine& e) { e.abort_step(); }); },
          "Drops the open step: all state is as before begin_step. Guards that are held are empty from then on.")
      .def(
          "begin_micro_batch",
          [](EngineCell& c, bool last) { c.call([&](OffloadEngine& e) { e.begin_micro_batch(last); }); },
          nb::arg("last") = false,
          "Begins the step's next micro-batch, or, where no gradients were asked for yet, stays in the present one. "
          "`last`: no other follows. Needed where layers may be absent; else the next begins by itself.")
      .def("fetch", &fetch, nb::arg("layer"), nb::arg("stream"),
           nb::sig("def fetch(self, layer: int, stream: Stream) -> Weights"),
           "Makes `stream` wait for a layer's weights. Blocks while what they wait for has not been queued, an update "
           "on the "
           "CPU above all. Raises MisuseError outside of a step and an evaluation, and where guards hold all buffers.")
      .def("gradients", &gradients, nb::arg("layer"), nb::arg("stream"),
           nb::sig("def gradients(self, layer: int, stream: Stream) -> Gradients"),
           "Makes `stream` wait for the layer's gradient buffer. Blocks and raises as `fetch`.")
      .def(
          "resident_weights", [](const Cell& c, nb::handle name) { return resident_object(c, parameter_of(*c, name)); },
          nb::arg("parameter"), nb::sig("def resident_weights(self, parameter: str | Parameter) -> Tensor"),
          "View of weights whose layer stays on the device, at one address until `adopt` or `close`, which are refused "
          "while an array made of it is alive. An array made on the host has the last update; later ones show in it "
          "after `wait_for_weights`. Not to be written, but by `write`. Raises MisuseError where the plan does not "
          "keep "
          "the layer there (`resident_layers`).")
      .def(
          "wait_for_weights",
          [](EngineCell& c, int layer, const std::shared_ptr<StreamCell>& s) {
            c.call([&](OffloadEngine& e) { e.wait_for_weights(layer, s->view()); });
          },
          nb::arg("layer"), nb::arg("stream"),
          "Makes `stream` wait until a layer's weights that stay on the device are those of the last update. Blocks "
          "and raises as `fetch`; also outside a step.")
      .def(
          "evaluation",
          [](const Cell& c) {
            return new EvaluationScope{c, nullptr};
          },
          nb::rv_policy::take_ownership, nb::sig("def evaluation(self) -> Evaluation"),
          "A scope, for `with`, of forwards alone: any number of fetches, no gradients.")
      .def(
          "wait", [](EngineCell& c) { c.call([](OffloadEngine& e) { e.wait(); }); },
          "Blocks until every update in flight is done. Raises what failed.");
}

void bind_facts(Engine& engine) {
  engine
      .def_prop_ro(
          "step", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.step(); }); },
          "Number of updates applied so far.")
      .def_prop_ro(
          "plan", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return Plan(e.plan()); }); },
          "Its plan, a copy.")
      .def_prop_ro(
          "layout", [](const EngineCell& c) { return ParameterLayout(c.layout()); }, "Its layout, a copy.")
      .def_prop_ro(
          "device", [](const EngineCell& c) { return c.shared_device(); }, "Its device.")
      .def_prop_ro(
          "counters", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.counters(); }); },
          "Totals since it was made.")
      .def_prop_ro(
          "device_bytes", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.device_bytes(); }); },
          "Bytes of device memory that it holds.")
      .def_prop_ro(
          "host_bytes", [](EngineCell& c) { return c.call([](OffloadEngine& e) { return e.host_bytes(); }); },
          "Bytes of host memory that it holds.")
      .def_prop_ro(
          "guards", [](const EngineCell& c) { return c.guards.load(); }, "Guards that are held.")
      .def_prop_ro("closed", &EngineCell::closed, "Whether `close` was called.")
      .def("close", &EngineCell::close,
           "Gives all memory back now, and not when nothing refers to the engine any more. Raises MisuseError while a "
           "guard "
           "is held.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> OffloadEngine"))
      .def(
          "__exit__",
          [](EngineCell& c, nb::handle exception, nb::handle, nb::handle) {
            if (exception.is_none() || c.guards == 0) c.close();
          },
          nb::arg("exception").none(), nb::arg("value").none(), nb::arg("traceback").none(),
          nb::sig("def __exit__(self, exception: object, value: object, traceback: object, /) -> None"))
      .def("__repr__", [](EngineCell& c) {
        return fmt::format("<OffloadEngine on {}: {} layers{}>", c.device().get().info().name, c.layout().layer_count(),
                           c.closed() ? ", closed" : "");
      });
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<EvaluationScope>(m, "Evaluation", "A scope of forwards alone, for `with`.")
      .def("__enter__",
           [](EvaluationScope& s) {
             s.engine->call([&](OffloadEngine& e) { s.scope = std::make_unique<OffloadEngine::Evaluation>(e); });
           })
      .def(
          "__exit__", [](EvaluationScope& s, nb::handle, nb::handle, nb::handle) { s.end(); },
          nb::arg("exception").none(), nb::arg("value").none(), nb::arg("traceback").none(),
          nb::sig("def __exit__(self, exception: object, value: object, traceback: object, /) -> None"));
  Engine engine(
      m, "OffloadEngine",
      "Keeps weights, gradients and Adam state of a layered model where a plan says, and updates them there.\n\n"
      "Calls take turns where several threads make them. It keeps its device; guards, views and arrays of its "
      "memory keep it.");
  engine.def(
      nb::new_([](std::shared_ptr<DeviceCell> device, const ParameterLayout& layout, const OffloadOptions& options,
                  const Plan& plan) {
        const nb::gil_scoped_release released;
        return std::make_shared<EngineCell>(std::move(device), layout, options, plan);
      }),
      nb::arg("device"), nb::arg("layout"), nb::arg("options"), nb::arg("plan"),
      "Books all memory of the plan; layout, options and plan are copied. There is no state before `initialize` or "
      "`load`. Blocks. Raises PlanError, DeviceError, WriteError, UsageError, MisuseError where the plan belongs to "
      "another layout.");
  bind_step(engine);
  bind_state(engine);
  bind_facts(engine);
  static_cast<void>(engine);
}

}  // namespace tandem::python
