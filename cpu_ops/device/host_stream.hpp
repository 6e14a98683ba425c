#pragma once
// Streams of the host device: an ordered queue of work with a worker thread of its own. Internal to cpu_ops.
#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "core/device/device.hpp"
#include "cpu_ops/device/host_event.hpp"

namespace tandem {

/// Called by a stream's worker before each queued task: (stream, task).
using TaskHook = std::function<void(std::string_view, std::string_view)>;

/// A task's name, kept without allocating; what is too long is cut.
class TaskName {
 public:
  explicit TaskName(std::string_view name) noexcept;
  std::string_view text() const noexcept { return {text_.data(), size_}; }

 private:
  std::array<char, 39> text_{};
  std::uint8_t size_ = 0;
};

/// Tasks run one after another in the order of the calls. What a task throws fails the stream for
/// good: later tasks are dropped unrun (their closures destroyed), later records pass with the
/// exception, and a stream that waits for such a record fails with it too. Methods may be called from
/// any thread, and do not block where not stated.
/// Marks, waits for marks that have passed, and calls are done within the call that queues them where all that was
/// queued before is done: waking the worker would take longer than they do. With a hook the worker does all.
class HostStream final : public StreamImpl {
 public:
  /// `owner` tells the streams of one device from those of another. `hook` may be null; an exception it
  /// throws counts as the task's. Throws DeviceError when no thread can be had.
  HostStream(std::string_view name, const void* owner, std::shared_ptr<const TaskHook> hook);
  /// Runs what is queued to its end, then ends the worker. Never throws.
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  const std::string& name() const noexcept override { return name_; }
  const void* owner() const noexcept { return owner_; }

  void enqueue(std::string_view name, std::function<void()> work);
  void enqueue_record(std::shared_ptr<EventRecord> record);
  void enqueue_wait(std::shared_ptr<EventRecord> record);
  /// `then` gets null or what failed the stream: it is called in any case.
  void enqueue_call(std::function<void(std::exception_ptr)> then);
  /// Blocks until all that was queued before the call is done. Rethrows what failed the stream. Throws
  /// MisuseError when called by a task of this stream, which would wait for itself.
  void synchronize();

 private:
  /// One of four, by the member that is set.
  struct Task {
    TaskName name;
    std::function<void()> work{};
    std::function<void(std::exception_ptr)> then{};
    std::shared_ptr<EventRecord> record{};  ///< event record that the task passes
    std::shared_ptr<EventRecord> awaited{};
  };

  void push(Task task);
  bool all_done();
  void serve() noexcept;
  void run(Task& task) noexcept;
  void attempt(Task& task) noexcept;

  const std::string name_;
  const void* const owner_;
  const std::shared_ptr<const TaskHook> hook_;

  std::mutex mutex_;
  std::condition_variable work_;  ///< the worker's
  std::condition_variable done_;  ///< notifies the threads in synchronize()
  std::deque<Task> queue_;
  std::uint64_t queued_ = 0;
  std::uint64_t finished_ = 0;
  int synchronizing_ = 0;
  bool idle_ = false;  ///< the worker sleeps: only then is it worth a wake-up call
  bool ending_ = false;
  std::exception_ptr error_;  ///< written by the worker only, under the mutex
  std::thread worker_;        ///< last: it uses all of the above
};

}  // namespace tandem
