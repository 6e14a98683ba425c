#pragma once
// Owners of tandem's objects, shared by Python objects: they keep each other alive in the order in which C++ wants it.
// A stream keeps its device, an engine its device, a guard its engine and streams, an array made of a view its guard.
// Owners are counted by shared_ptr, not by Python, so any thread may let go of the last one. They let go of the
// interpreter's lock while they wait for work, and a child process made by fork leaves them alone: their threads are
// not there.
#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <variant>
#include <vector>

#include "python/bindings/errors.hpp"
#include "tandem/tandem.hpp"

/// Whether this thread holds the interpreter's lock. Every CPython has it since 3.4; the headers of the limited API, in
/// which one wheel is made for all versions, leave it out.
extern "C" int PyGILState_Check(void);

namespace tandem::python {

namespace nb = nanobind;

/// Numbers of owners that are alive, by kind: what a test of leaks counts.
struct LiveCounts {
  std::atomic<int> devices{0};
  std::atomic<int> streams{0};
  std::atomic<int> engines{0};
  std::atomic<int> guards{0};
  std::atomic<int> arrays{0};
};
LiveCounts& live();

/// Counts an owner while it lives.
class Counted {
 public:
  explicit Counted(std::atomic<int>& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  std::atomic<int>& count_;
};

/// Number of the process, another one in a child made by fork.
long this_process() noexcept;

/// Owner of `Value`, which is destroyed without the interpreter's lock, and not at all in a child process made by fork.
template <class Value>
class Owned {
 public:
  Owned() = default;
  explicit Owned(std::unique_ptr<Value> value) : value_(std::move(value)) {}
  ~Owned() { reset(); }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned(Owned&&) = delete;
  Owned& operator=(Owned&& other) = delete;

  Value* get() const noexcept { return value_.get(); }
  void reset() noexcept;

 private:
  std::unique_ptr<Value> value_;
  long process_ = this_process();
};

/// Runs `body` without the interpreter's lock where this thread holds it.
template <class Body>
void without_lock(const Body& body) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const nb::gil_scoped_release released;
    body();
  } else {
    body();
  }
}

template <class Value>
void Owned<Value>::reset() noexcept {
  if (!value_) return;
  if (process_ != this_process()) {
    static_cast<void>(value_.release());
    return;
  }
  without_lock([this] { value_.reset(); });
}

class StreamCell;

class DeviceCell : public std::enable_shared_from_this<DeviceCell> {
 public:
  explicit DeviceCell(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  Device& get() const noexcept { return *device_.get(); }
  bool is_host() const { return get().info().kind == "host"; }
  /// Number of the GPU as DLPack counts them; 0 on the host.
  int index() const;
  std::shared_ptr<StreamCell> make_stream(std::string_view name, StreamPriority priority);
  /// The stream around a native handle; the same one for each call while it lives.
  std::shared_ptr<StreamCell> wrap_stream(std::uintptr_t native);
  /// The stream that wraps a native handle, or null.
  std::shared_ptr<StreamCell> wrapped(std::uintptr_t native);
  /// Blocks without the interpreter's lock until the event has passed; Ctrl-C ends it. Throws as Device::wait_for.
  void wait_for(EventView event) const;

 private:
  Counted counted_{live().devices};
  Owned<Device> device_;
  std::mutex mutex_;
  std::map<std::uintptr_t, std::weak_ptr<StreamCell>> wrapped_;
};

class StreamCell : public std::enable_shared_from_this<StreamCell> {
 public:
  StreamCell(std::shared_ptr<DeviceCell> device, Stream stream, std::string name, std::uintptr_t native);

  StreamView view() const noexcept { return *stream_.get(); }
  DeviceCell& device() const noexcept { return *device_; }
  const std::shared_ptr<DeviceCell>& shared_device() const noexcept { return device_; }
  const std::string& name() const noexcept { return name_; }
  std::uintptr_t native() const noexcept { return native_; }
  void synchronize() const;
  /// Queues a Python function, which a worker of the device calls with the interpreter's lock.
  void enqueue(const std::string& what, nb::object function) const;

 private:
  Counted counted_{live().streams};
  std::shared_ptr<DeviceCell> device_;
  Owned<Stream> stream_;
  std::string name_;
  std::uintptr_t native_;
};

/// Waits until no Python function is queued on any stream: before the interpreter ends.
void drain_queued_functions();

/// An engine, whose calls take turns: C++ wants them from one thread at a time.
class EngineCell : public std::enable_shared_from_this<EngineCell> {
 public:
  EngineCell(std::shared_ptr<DeviceCell> device, const ParameterLayout& layout, const OffloadOptions& options,
             const Plan& plan);

  /// Calls `body(OffloadEngine&)` without the interpreter's lock, once no other thread is in a call. Throws MisuseError
  /// where the engine is closed, or this thread is in a call of it, as a function that `initialize` calls is.
  template <class Body>
  auto call(const Body& body) {
    const nb::gil_scoped_release released;
    const Turn turn(*this);
    return body(open());
  }
  /// Lets a guard go, on any thread, also in a call of the engine.
  template <class Body>
  void let_go(const Body& body) {
    without_lock([&] {
      std::optional<Turn> turn;
      if (caller_ != std::this_thread::get_id()) turn.emplace(*this);
      body();
    });
  }

  DeviceCell& device() const noexcept { return *device_; }
  const std::shared_ptr<DeviceCell>& shared_device() const noexcept { return device_; }
  const ParameterLayout& layout() const noexcept { return layout_; }
  bool closed() const noexcept { return engine_.get() == nullptr; }
  /// Destroys the engine. Throws MisuseError while a guard is held.
  void close();
  std::atomic<int> guards{0};           ///< guards that are held
  std::atomic<int> resident_arrays{0};  ///< arrays over weights that stay on the device
  /// Throws MisuseError while such an array is alive: `what` would change what it shows.
  void require_no_resident_arrays(const char* what) const;
  /// A stream of the engine's own, on which the host waits for weights.
  std::shared_ptr<StreamCell> waiting_stream();

 private:
  class Turn {
   public:
    explicit Turn(EngineCell& cell);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    EngineCell& cell_;
  };
  OffloadEngine& open() const;

  Counted counted_{live().engines};
  std::shared_ptr<DeviceCell> device_;
  ParameterLayout layout_;
  std::mutex mutex_;
  std::atomic<std::thread::id> caller_{};
  Owned<OffloadEngine> engine_;
  std::mutex stream_mutex_;
  std::shared_ptr<StreamCell> waiting_stream_;
};

}  // namespace tandem::python
