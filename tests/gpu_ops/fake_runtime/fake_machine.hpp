#pragma once
// Parts of the fake runtime. Internal to it.
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tests/gpu_ops/fake_runtime/fake_cuda.hpp"

namespace tandem::fake_cuda {

/// A point in a stream, passed once.
class Mark {
 public:
  void pass();
  /// Keeps the mark from passing, as its card is lost: calls are told so, and no stream of another card goes on.
  void stay(int device);
  void wait();
  void wait_in_stream(int device);
  bool passed();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  std::optional<int> stays_;  ///< on this card
};

struct Work {
  std::string_view kind;
  std::function<void()> run;
  bool always = false;  ///< also once the device is lost: marks pass
};

/// One range of memory that has been given out or registered.
struct Range {
  std::size_t bytes = 0;
  int device = 0;  ///< ordinal of the card, for memory that has been given out
};
using Ranges = std::map<std::uintptr_t, Range>;

/// State that calls and streams share. Locks are held for look-ups only.
class State {
 public:
  static State& get();
  /// A program does not end before its streams have.
  ~State() { wait_for_ending_streams(); }

  void install(Machine machine);
  /// The failure that this call is to return; counts it.
  cudaError_t enter(std::string_view function);
  void arm(std::string_view function, std::int64_t position, cudaError_t code);
  std::int64_t calls() const { return calls_; }

  bool has_driver() const { return machine_.driver_version > 0; }
  const Machine& machine() const { return machine_; }
  bool has_card(int ordinal) const { return ordinal >= 0 && ordinal < static_cast<int>(machine_.cards.size()); }

  void lose(int device, cudaError_t code);
  cudaError_t lost(int device) const;
  void complain(std::string text);
  std::vector<std::string> complaints();

  void make_context(int device);
  bool has_context(int device) const;
  std::vector<int> contexts() const;
  /// Beginning of every call that needs a context: makes one current where none is.
  void enter_context();

  cudaError_t allocate(int device, std::size_t bytes, void** data);
  /// Loads the card's code, which every launch needs; it stays from the first call on.
  cudaError_t load_code(int device);
  bool free(void* data);
  /// Around work that touches device memory.
  void open_device_memory();
  void close_device_memory();
  std::size_t free_bytes(int device);
  /// Whether [data, data + bytes) lies in one device allocation, of this device where one is named; touches any.
  bool on_device(const void* data, std::size_t bytes, int device = -1);
  bool touches_device(const void* data, std::size_t bytes);
  cudaError_t enable_peer(int device, int peer);
  cudaError_t disable_peer(int device, int peer);
  /// Whether a copy between two cards arrives changed.
  bool breaks_copy(int device, int peer) const;
  std::vector<std::pair<int, int>> peers() const;
  /// Takes an entry of 8 bytes for each page of 4 KiB of every device that has a context.
  cudaError_t register_host(void* data, std::size_t bytes);
  bool unregister_host(void* data);
  enum class HostKind { pageable, registered, mixed };
  HostKind kind_of(const void* data, std::size_t bytes);

  void set_hook(std::function<void(std::string_view, std::string_view)> hook);
  std::shared_ptr<const std::function<void(std::string_view, std::string_view)>> hook();
  std::uint64_t next_stream_seed();
  void note_priority(const std::string& stream, int priority);
  std::map<std::string, int> priorities() const;
  Census census();
  void count_copy(bool to_device, std::size_t pageable_bytes);
  CopyCount copies() const;
  std::size_t largest_registration() const { return largest_registration_; }

  std::atomic<int> streams{0};
  std::atomic<int> ending_streams{0};  ///< destroyed, and still running what was queued
  std::atomic<int> events{0};

 private:
  void wait_for_ending_streams() const;
  std::size_t free_on(int device) const;
  void protect(void* data, std::size_t bytes, bool open) const;

  mutable std::mutex mutex_;
  Machine machine_;
  std::vector<cudaError_t> lost_;
  std::set<int> contexts_;  ///< by device
  std::set<std::pair<int, int>> peers_;
  std::set<int> loaded_;  ///< devices that have their code
  Ranges allocations_;
  Ranges registrations_;
  int touching_ = 0;  ///< pieces of work that touch device memory now
  std::vector<std::string> complaints_;
  std::string armed_function_;
  std::int64_t armed_position_ = -1;
  cudaError_t armed_code_ = cudaSuccess;
  std::shared_ptr<const std::function<void(std::string_view, std::string_view)>> hook_;
  std::uint64_t stream_seeds_ = 0;
  std::map<std::string, int> priorities_;  ///< priorities of streams, by name
  std::size_t largest_registration_ = 0;
  CopyCount copies_;
  std::atomic<std::int64_t> calls_{0};
};

bool loses_device(cudaError_t code);

/// Facts that CUDA keeps for a thread.
struct ThreadState {
  int chosen = 0;             ///< the device that the runtime takes where no context is current
  std::vector<int> contexts;  ///< the driver's stack of them, by device
};
ThreadState& this_thread();
/// The calling thread's, whether it has a context or not.
int current_device();

}  // namespace tandem::fake_cuda

/// A stream: work in order, on a thread of its own that takes its time.
struct CUstream_st {
 public:
  CUstream_st(int device, int priority);
  /// Runs what is queued to its end.
  ~CUstream_st();
  CUstream_st(const CUstream_st&) = delete;
  CUstream_st& operator=(const CUstream_st&) = delete;

  int device() const { return device_; }
  int priority() const { return priority_; }
  void push(tandem::fake_cuda::Work work);
  void rename(std::string name);
  bool idle();

 private:
  void serve();
  void delay();
  void run(tandem::fake_cuda::Work& work, const std::string& name);

  const int device_;
  const int priority_;
  std::mt19937_64 random_;
  int longest_delay_us_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<tandem::fake_cuda::Work> queue_;
  std::string name_;
  bool busy_ = false;
  bool ending_ = false;
  std::thread worker_;
};

struct CUevent_st {
  explicit CUevent_st(int of_device) : device(of_device) {}
  const int device;
  std::mutex mutex;
  std::shared_ptr<tandem::fake_cuda::Mark> latest;
};
