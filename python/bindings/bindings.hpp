#pragma once
// Parts of the module `tandem._core`, each in a source file of its name.
#include <nanobind/nanobind.h>

namespace tandem::python {

void bind_layout(nanobind::module_& m);    ///< parameters, layers
void bind_options(nanobind::module_& m);   ///< options, values and reports of steps
void bind_device(nanobind::module_& m);    ///< devices, streams
void bind_plan(nanobind::module_& m);      ///< plans, facts that they are made of
void bind_tensors(nanobind::module_& m);   ///< guards and views
void bind_engine(nanobind::module_& m);    ///< the engine
void bind_planning(nanobind::module_& m);  ///< profiles, simulations, choices

}  // namespace tandem::python
