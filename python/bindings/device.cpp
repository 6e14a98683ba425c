// Devices and streams.
#include <fmt/format.h>
#include <nanobind/stl/shared_ptr.h>

#include "python/bindings/bindings.hpp"
#include "python/bindings/cells.hpp"
#include "python/bindings/fields.hpp"

namespace tandem::python {
namespace {

/// Gives lines of tandem's to the logger "tandem". Called by any thread.
Notice log_as(const char* level) {
  return [level](const std::string& line) {
    in_python([&] { nb::module_::import_("logging").attr("getLogger")("tandem").attr(level)(line); });
  };
}

std::shared_ptr<DeviceCell> open(const std::string& name, const nb::kwargs& keywords) {
  auto options = from_keywords<DeviceOptions>(keywords, "open_device");
  options.notice = log_as("info");
  options.warning = log_as("warning");
  const nb::gil_scoped_release released;
  return std::make_shared<DeviceCell>(open_device(name, options));
}

void bind_device_options(nb::module_& m) {
  using O = DeviceOptions;
  Fields<O>(m, "DeviceOptions", "How a device is opened.")
      .bytes("memory", &O::memory, "Ceiling in bytes, of context and libraries too; 0: what is free, less a margin.")
      .value("threads", &O::threads, "int", "Threads of the host device's kernels; 0: all cores.")
      .value("update_threads", &O::update_threads, "int", "Threads of the CPU update; 0: all cores.")
      .value("numa_node", &O::numa_node, "int",
             "NUMA node of pinned memory and update threads; -1: the GPU's, else any.")
      .value("link_bytes_per_second", &O::link_bytes_per_second, "float", "Host device: emulated link; 0: none.")
      .value("update_parameters_per_second", &O::update_parameters_per_second, "float",
             "Host device: emulated rate of the CPU update; 0: its own.")
      .value("strict", &O::strict, "bool", "Whether memory that cannot be pinned is an error.")
      .done();
  using I = DeviceInfo;
  Facts<I>(m, "DeviceInfo", "Facts about a device.")
      .fact("kind", &I::kind, "\"host\" or \"cuda\".")
      .fact("name", &I::name, "\"host\", \"cuda:0 NVIDIA H200\".")
      .fact("capacity", &I::capacity, "Bytes that may be allocated on it.")
      .fact("reserved", &I::reserved, "Bytes that context and libraries take.")
      .fact("cache_bytes", &I::cache_bytes, "Bytes of its last-level caches; 0: the host's.")
      .fact("threads", &I::threads, "Threads of the host device's kernels; 0 elsewhere.")
      .fact("compute_key", &I::compute_key, "All about the device that may change a bit.")
      .done();
}

}  // namespace

void bind_device(nb::module_& m) {
  bind_device_options(m);
  nb::class_<StreamCell>(m, "Stream", "An ordered queue of work on a device. Keeps its device.")
      .def("synchronize", &StreamCell::synchronize,
           "Blocks until all work queued so far is done; Ctrl-C ends it. Raises what failed the stream.")
      .def("enqueue", &StreamCell::enqueue, nb::arg("name"), nb::arg("function"),
           nb::sig("def enqueue(self, name: str, function: collections.abc.Callable[[], object]) -> None"),
           "Queues a Python function on a stream of the host device, and returns at once. What it raises fails the "
           "stream: whoever waits for it gets that exception. Raises MisuseError on a GPU.")
      .def_prop_ro("name", &StreamCell::name, "Name in traces and errors.")
      .def_prop_ro("native", &StreamCell::native, "The wrapped native handle; 0 where tandem made the stream.")
      .def_prop_ro(
          "device", [](const StreamCell& s) { return s.shared_device(); }, "Its device.")
      .def("__repr__", [](const StreamCell& s) { return fmt::format("<Stream {}>", s.name()); });
  nb::class_<DeviceCell>(m, "Device", "An accelerator and the host memory that belongs to it. See open_device.")
      .def_prop_ro(
          "info", [](const DeviceCell& d) { return DeviceInfo(d.get().info()); }, "Facts about it.")
      .def_prop_ro(
          "name", [](const DeviceCell& d) { return d.get().info().name; }, "Its name.")
      .def_prop_ro(
          "kind", [](const DeviceCell& d) { return d.get().info().kind; }, "\"host\" or \"cuda\".")
      .def_prop_ro(
          "capacity", [](const DeviceCell& d) { return d.get().info().capacity; }, "Bytes that may be allocated.")
      .def_prop_ro(
          "allocated_bytes", [](const DeviceCell& d) { return d.get().allocated_bytes(); }, "Bytes allocated now.")
      .def_prop_ro(
          "peak_bytes", [](const DeviceCell& d) { return d.get().peak_bytes(); }, "Most bytes allocated so far.")
      .def_prop_ro(
          "pageable_bytes", [](const DeviceCell& d) { return d.get().pageable_bytes(); },
          "Bytes of host memory that could not be pinned.")
      .def(
          "make_stream",
          [](DeviceCell& d, const std::string& name, bool first) {
            return d.make_stream(name, first ? StreamPriority::first : StreamPriority::usual);
          },
          nb::arg("name") = "caller", nb::arg("first") = false, nb::call_guard<nb::gil_scoped_release>(),
          "A new stream. `first`: a hint that others wait for its short kernels.")
      .def(
          "wrap_stream", &DeviceCell::wrap_stream, nb::arg("native"), nb::call_guard<nb::gil_scoped_release>(),
          "A stream around a native handle (cudaStream_t as int), which must outlive it; 0 and 1 are the legacy "
          "default "
          "stream, 2 is the calling thread's own, which no other thread may use. The same handle gives the same object "
          "while that lives, but 2. Raises MisuseError on the host device.")
      .def(
          "facts", [](const DeviceCell& d) { return profile_of(d.get()); }, nb::call_guard<nb::gil_scoped_release>(),
          "Facts that planning needs: the device's whole ceiling, and the host memory that is free now.")
      .def("__repr__", [](const DeviceCell& d) {
        return fmt::format("<Device {}, {}>", d.get().info().name, format_bytes(d.get().info().capacity));
      });
  m.def("open_device", &open, nb::arg("name") = "auto", nb::arg("options"),
        nb::sig(("def open_device(name: str = 'auto', *" + keywords_text<DeviceOptions>() + ") -> Device").c_str()),
        "Opens \"host\", \"cuda\", \"cuda:N\", or \"auto\": a GPU where a driver shows one, else the host.\n\n"
        "Blocks. What is worth knowing goes to the logger \"tandem\". Raises UsageError for another name, DeviceError "
        "for "
        "a device that is not there, PlanError where it has less memory free than `memory`.");
}

}  // namespace tandem::python
