// The module `tandem._core`: tandem's public C++ interface in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>

#include "python/bindings/bindings.hpp"
#include "python/bindings/cells.hpp"
#include "python/bindings/errors.hpp"

namespace tandem::python {

NB_MODULE(_core, m) {
  m.doc() = "tandem's C++ interface: see the package tandem.";
  nb::set_leak_warnings(false);  // an interpreter that ends in a hurry leaves objects behind
  m.attr("version") = std::string(version);
  translate_errors();
  bind_layout(m);
  bind_options(m);
  bind_device(m);
  bind_plan(m);
  bind_tensors(m);
  bind_engine(m);
  bind_planning(m);
  m.def("_live", [] {
    const LiveCounts& counts = live();
    return std::map<std::string, int>{{"devices", counts.devices},
                                      {"streams", counts.streams},
                                      {"engines", counts.engines},
                                      {"guards", counts.guards},
                                      {"arrays", counts.arrays}};
  });
  // A worker that calls Python while the interpreter ends would end with it.
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&drain_queued_functions));
}

}  // namespace tandem::python
