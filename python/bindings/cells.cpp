#include "python/bindings/cells.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <utility>

namespace tandem::python {
namespace {

/// CUDA's handles of default streams, which DLPack counts alike.
constexpr std::uintptr_t legacy_stream = 1, stream_of_the_thread = 2;

/// Time between two looks at pending signals.
constexpr std::chrono::milliseconds signal_tick(50);

/// Number of Python functions that are queued on streams.
class QueuedFunctions {
 public:
  void begin() {
    const std::scoped_lock lock(mutex_);
    ++count_;
  }
  void end() {
    const std::scoped_lock lock(mutex_);
    --count_;
    changed_.notify_all();
  }
  /// Whether none is left after at most `time`.
  bool none_after(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int count_ = 0;
};

QueuedFunctions& queued_functions() {
  static auto* const functions = new QueuedFunctions;  // workers may outlive static objects
  return *functions;
}

/// A queued function, counted until the stream drops it, called or not.
struct QueuedFunction {
  explicit QueuedFunction(nb::object object) : function(share(std::move(object))) { queued_functions().begin(); }
  ~QueuedFunction() {
    function.reset();
    queued_functions().end();
  }
  QueuedFunction(const QueuedFunction&) = delete;
  QueuedFunction& operator=(const QueuedFunction&) = delete;
  SharedObject function;
};

}  // namespace

LiveCounts& live() {
  static auto* const counts = new LiveCounts;
  return *counts;
}

long this_process() noexcept { return ::getpid(); }

int DeviceCell::index() const {
  const std::string& name = get().info().name;
  const std::size_t colon = name.find(':');
  return is_host() || colon == std::string::npos ? 0 : std::stoi(name.substr(colon + 1));
}

std::shared_ptr<StreamCell> DeviceCell::make_stream(std::string_view name, StreamPriority priority) {
  return std::make_shared<StreamCell>(shared_from_this(), get().make_stream(name, priority), std::string(name), 0);
}

std::shared_ptr<StreamCell> DeviceCell::wrapped(std::uintptr_t native) {
  const std::scoped_lock lock(mutex_);
  const auto found = wrapped_.find(native);
  return found == wrapped_.end() ? nullptr : found->second.lock();
}

std::shared_ptr<StreamCell> DeviceCell::wrap_stream(std::uintptr_t native) {
  if (native == 0) native = legacy_stream;
  if (auto known = wrapped(native)) return known;
  auto made = std::make_shared<StreamCell>(shared_from_this(), get().wrap_stream(reinterpret_cast<void*>(native)),
                                           fmt::format("{:#x}", native), native);
  if (native == stream_of_the_thread) return made;  // another one in each thread
  const std::scoped_lock lock(mutex_);
  std::erase_if(wrapped_, [](const auto& entry) { return entry.second.expired(); });
  wrapped_[native] = made;
  return made;
}

void DeviceCell::wait_for(EventView event) const {
  for (;;) {
    {
      const nb::gil_scoped_release released;
      if (get().wait_for(event, signal_tick)) return;
    }
    check_signals();
  }
}

StreamCell::StreamCell(std::shared_ptr<DeviceCell> device, Stream stream, std::string name, std::uintptr_t native)
    : device_(std::move(device)),
      stream_(std::make_unique<Stream>(std::move(stream))),
      name_(std::move(name)),
      native_(native) {}

void StreamCell::synchronize() const {
  Device& device = device_->get();
  const Event event = device.make_event();
  device.record(event, view());
  device_->wait_for(event);
}

void StreamCell::enqueue(const std::string& what, nb::object function) const {
  auto queued = std::make_shared<QueuedFunction>(std::move(function));
  const nb::gil_scoped_release released;
  enqueue_host(device_->get(), view(), what, [queued = std::move(queued)]() mutable {
    in_python([&] { (*queued->function)(); });
    queued.reset();
  });
}

void drain_queued_functions() {
  for (;;) {
    {
      const nb::gil_scoped_release released;
      if (queued_functions().none_after(signal_tick)) return;
    }
    check_signals();
  }
}

EngineCell::EngineCell(std::shared_ptr<DeviceCell> device, const ParameterLayout& layout, const OffloadOptions& options,
                       const Plan& plan)
    : device_(std::move(device)),
      layout_(layout),
      engine_(std::make_unique<OffloadEngine>(device_->get(), layout_, options, plan)) {}

OffloadEngine& EngineCell::open() const {
  if (engine_.get() == nullptr) throw MisuseError("the engine is closed");
  return *engine_.get();
}

void EngineCell::close() {
  const nb::gil_scoped_release released;
  const Turn turn(*this);
  if (guards > 0) {
    throw MisuseError(fmt::format("the engine cannot be closed: {} guards are held", guards.load()), "",
                      "release them, and delete the arrays made of their views");
  }
  require_no_resident_arrays("the engine cannot be closed");
  engine_.reset();
}

void EngineCell::require_no_resident_arrays(const char* what) const {
  if (resident_arrays == 0) return;
  throw MisuseError(fmt::format("{}: {} {} over its weights", what, resident_arrays.load(),
                                resident_arrays == 1 ? "array is" : "arrays are"),
                    "", "delete what was made of resident_weights first");
}

std::shared_ptr<StreamCell> EngineCell::waiting_stream() {
  const std::scoped_lock lock(stream_mutex_);
  if (!waiting_stream_) waiting_stream_ = device_->make_stream("weights", StreamPriority::usual);
  return waiting_stream_;
}

EngineCell::Turn::Turn(EngineCell& cell) : cell_(cell) {
  if (cell.caller_ == std::this_thread::get_id()) {
    throw MisuseError("the engine is called by a function that it calls itself");
  }
  cell.mutex_.lock();
  cell.caller_ = std::this_thread::get_id();
}

EngineCell::Turn::~Turn() {
  cell_.caller_ = std::thread::id{};
  cell_.mutex_.unlock();
}

}  // namespace tandem::python
