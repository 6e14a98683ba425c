#include "python/bindings/guards.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace tandem::python {
namespace {

/// Thrown and caught in place, so that a guard goes as it does when an exception of C++ passes it.
struct PythonException {};

}  // namespace

/// Owner of an array made of a view: keeps the guard, and with it engine and device.
struct GuardCell::Array {
  explicit Array(std::shared_ptr<GuardCell> cell) : guard(std::move(cell)), engine(guard->engine_) { ++guard->arrays_; }
  ~Array() { --guard->arrays_; }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Counted counted{live().arrays};
  std::shared_ptr<GuardCell> guard;
  std::shared_ptr<EngineCell> engine;  ///< its memory stays, also where the guard was released by force
};

GuardCell::GuardCell(std::shared_ptr<EngineCell> engine, std::shared_ptr<StreamCell> stream, int layer, Guard guard)
    : engine_(std::move(engine)),
      streams_{std::move(stream)},
      layer_(engine_->layout().layer(layer).name),
      is_weights_(std::holds_alternative<WeightsGuard>(guard)),
      guard_(std::move(guard)) {
  for (const Parameter& parameter : engine_->layout().layer(layer).parameters) names_.push_back(parameter.name);
  ++engine_->guards;
  if (!engine_->device().is_host()) return;
  Device& device = engine_->device().get();
  filled_ = device.make_event();
  device.record(filled_, streams_.front()->view());
}

GuardCell::~GuardCell() {
  if (process_ != this_process()) {  // the engine's threads are not here
    new Guard(std::move(guard_));
    return;
  }
  drop(false);
}

std::string GuardCell::text() const {
  return fmt::format("{} of layer '{}'", is_weights_ ? "weights" : "gradients", layer_);
}

DeviceCell& GuardCell::device() const {
  require_held("a view");
  return engine_->device();
}

std::shared_ptr<StreamCell> GuardCell::stream() const {
  require_held("a guard");
  return streams_.front();
}

void GuardCell::require_held(const std::string& what) const {
  if (held()) return;
  throw MisuseError(fmt::format("{} is used after the {} were released", what, text()), "",
                    is_weights_ ? "fetch the layer again" : "use it before the commit");
}

TensorView GuardCell::view(const std::string& name) const {
  require_held(fmt::format("'{}'", name));
  return std::visit(
      [&name](const auto& guard) -> TensorView {
        if constexpr (std::is_same_v<std::decay_t<decltype(guard)>, std::monostate>) {
          return {};
        } else {
          return guard[name];
        }
      },
      guard_);
}

void GuardCell::also_used_on(const std::shared_ptr<StreamCell>& stream) {
  require_held("also_used_on");
  engine_->call([&](OffloadEngine&) { std::get<WeightsGuard>(guard_).also_used_on(stream->view()); });
  streams_.push_back(stream);
}

void GuardCell::leave_out(const std::string& name) {
  require_held("leave_out");
  engine_->call([&](OffloadEngine&) { std::get<GradientsGuard>(guard_).leave_out(name); });
}

void GuardCell::copy_in(const std::string& name, const void* from, std::size_t bytes) {
  const TensorView to = view(name);
  if (is_weights_ || !engine_->device().is_host()) {
    throw MisuseError(fmt::format("copy_in of '{}'", name), "it copies into gradients on the host device alone");
  }
  if (to.bytes() != bytes || !to) {
    throw MisuseError(fmt::format("copy_in of '{}': {} bytes given, {} needed", name, bytes, to ? to.bytes() : 0));
  }
  engine_->device().wait_for(filled_);
  const nb::gil_scoped_release released;
  large_copy(to.data, from, bytes);
}

void GuardCell::require_no_arrays(const char* what) const {
  if (arrays_ == 0) return;
  throw MisuseError(fmt::format("{} cannot be {}: {} {} of their memory", text(), what, arrays_.load(),
                                arrays_ == 1 ? "array is" : "arrays are"),
                    "an array would show other values from then on",
                    "delete it first (del NAME), or take a copy() of the view in its place");
}

void GuardCell::release(bool forced) {
  if (!held()) return;
  if (!forced) require_no_arrays("released");
  drop(false);
}

void GuardCell::commit(const std::shared_ptr<StreamCell>& stream, bool forced) {
  if (!held()) throw MisuseError(fmt::format("{} are committed twice", text()));
  if (!forced) require_no_arrays("committed");
  engine_->call([&](OffloadEngine&) { std::get<GradientsGuard>(guard_).commit(stream->view()); });
  drop(false);
}

void GuardCell::release_by_exception() { drop(true); }

void GuardCell::drop(bool unwinding) noexcept {
  if (!held()) return;
  const auto engine = engine_;  // the last to let go of it must not be within a call of it
  engine->let_go([&] {
    try {
      const Guard last = std::exchange(guard_, std::monostate{});
      if (unwinding) throw PythonException();
    } catch (const PythonException&) {  // its way past `last` is what was wanted
    }
  });
  --engine_->guards;
  streams_.clear();
  engine_.reset();
}

void GuardCell::order_for(nb::handle consumer_stream) {
  const DeviceCell& device = engine_->device();
  if (device.is_host()) {
    if (!consumer_stream.is_none()) throw nb::buffer_error("memory of the host has no streams: stream must be None");
    device.wait_for(filled_);
    return;
  }
  const auto asked = consumer_stream.is_none() ? 1 : nb::cast<std::int64_t>(consumer_stream);
  if (asked == no_order) return;
  const auto native = static_cast<std::uintptr_t>(asked);
  if (std::ranges::any_of(streams_, [native](const auto& s) { return s->native() == native; })) return;
  const auto other = engine_->device().wrapped(native);
  if (other == nullptr || !is_weights_) {
    throw nb::buffer_error(fmt::format("{} are ordered on stream {}, not on stream {:#x}: use them on a stream of "
                                       "device.wrap_stream that they were asked for on",
                                       text(), streams_.front()->name(), native)
                               .c_str());
  }
  also_used_on(other);
}

nb::capsule GuardCell::array_owner() {
  return {new Array(shared_from_this()), [](void* array) noexcept { delete static_cast<Array*>(array); }};
}

}  // namespace tandem::python
