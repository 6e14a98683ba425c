#include "gpu_ops/emulation/grid.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "gpu_ops/emulation/fiber.hpp"
#include "gpu_ops/emulation/races.hpp"

namespace tandem::emulation {
namespace {

/// Kernels keep their arrays in registers, so that they need little stack; sanitizers need several times that.
constexpr std::size_t stack_bytes = 256 * 1024;
/// A NaN in every floating-point type, -1 in every integer.
constexpr int poison = 0xFF;

std::atomic<std::uint64_t> seed{1};
std::atomic<std::int64_t> dropped_barrier{no_barrier};
std::atomic<std::int64_t> most_barriers{0};

/// Unwinds the threads of a block that has failed.
struct Abandoned {};

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

struct Thread {
  Position position;
  std::vector<Copy> copies;         ///< under way
  std::vector<std::size_t> groups;  ///< ends of the groups within `copies`
  std::size_t shared_arrays = 0;    ///< shared arrays that it has asked for
  std::int64_t barriers = 0;        ///< barriers that it has come to
  bool started = false;
  bool ended = false;
};

/// Meeting points of threads that wait for each other, two in turn: one thread may come to the next while others have
/// yet to leave the last, and cannot get further ahead than that.
class Meetings {
 public:
  int turn() const { return turn_; }
  OrderedBy& next() { return order_[turn_]; }
  /// Whether the thread that comes is the last of `all`.
  bool complete(int all) {
    if (++waiting_ < all) return false;
    waiting_ = 0;
    turn_ = 1 - turn_;
    return true;
  }
  bool none_waits() const { return waiting_ == 0; }
  void reset() { waiting_ = turn_ = 0; }

 private:
  OrderedBy order_[2]{};
  int waiting_ = 0;
  int turn_ = 0;
};

struct Warp {
  std::vector<int> ready;  ///< threads that may run
  Meetings meetings;
  bool exchanging = false;                        ///< whether the lanes that wait are in an exchange
  std::uint64_t values[2][gpu::warp_lanes] = {};  ///< values that lanes exchange, by turns
};

struct SharedArray {
  std::unique_ptr<std::byte[]> memory;
  std::size_t bytes = 0;
};

thread_local const Position* here = nullptr;

/// Runs grids on one thread of the program; keeps the fibers from one to the next.
class Runner {
 public:
  void run(const char* name, const gpu::Geometry& geometry, const std::function<void()>& kernel);
  void barrier();
  void warp_barrier();
  const std::uint64_t* exchange(std::uint64_t bits);
  void start_copy(const Copy& copy);
  void close_copies();
  void await_copies(std::size_t left);
  void* shared_array(std::size_t bytes);
  void* dynamic_shared() const { return dynamic_.memory.get(); }

 private:
  void prepare(const gpu::Geometry& geometry);
  void run_block(std::int64_t block);
  void reset_block(std::int64_t block);
  void release(int first, int count);
  bool take_ready(int& thread);
  void run_ready();
  void resume(int thread);
  void abandon();
  void suspend();
  Warp& own_warp() { return warps_[static_cast<std::size_t>(running_ / gpu::warp_lanes)]; }
  void wait_in_warp(Warp& warp, bool exchanging);
  bool dropped();
  [[noreturn]] void misused(std::string_view why) const;
  int block_size() const { return static_cast<int>(threads_.size()); }

  std::string name_;
  const std::function<void()>* kernel_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<std::size_t> order_;  ///< the warps, the most favoured first
  bool favour_ = false;             ///< whether one warp runs as far as it can, or all at about the same pace
  bool late_ = false;               ///< whether copies are made where they are waited for
  std::vector<SharedArray> shared_;
  SharedArray dynamic_;
  std::mt19937_64 engine_;
  int running_ = 0;
  Meetings barriers_;
  OrderedBy begin_, end_;  ///< order of the block's threads and the thread that runs the grid
  OrderedBy arrays_;       ///< shared ones are there
  bool abandoning_ = false;
  std::exception_ptr failure_;
};

void Runner::misused(std::string_view why) const { throw MisuseError("kernel " + name_, why); }

void Runner::prepare(const gpu::Geometry& geometry) {
  if (geometry.block <= 0 || geometry.block % gpu::warp_lanes != 0 || geometry.block > gpu::most_threads) {
    misused("a block of " + std::to_string(geometry.block) + " threads");
  }
  threads_.assign(static_cast<std::size_t>(geometry.block), {});
  warps_.assign(threads_.size() / gpu::warp_lanes, {});
  order_.resize(warps_.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  while (fibers_.size() < threads_.size()) fibers_.push_back(std::make_unique<Fiber>(stack_bytes));
  shared_.clear();
  dynamic_ = {};
  if (geometry.shared_bytes + gpu::static_beside_dynamic > gpu::most_shared) {
    misused("dynamic shared memory of " + std::to_string(geometry.shared_bytes) + " bytes");
  }
  if (geometry.shared_bytes > 0) {
    dynamic_ = {std::make_unique_for_overwrite<std::byte[]>(geometry.shared_bytes), geometry.shared_bytes};
  }
}

void Runner::run(const char* name, const gpu::Geometry& geometry, const std::function<void()>& kernel) {
  name_ = name;
  kernel_ = &kernel;
  prepare(geometry);
  engine_.seed(seed.load());
  favour_ = seed.load() % 2 == 0;
  late_ = seed.load() / 2 % 2 == 1;
  failure_ = nullptr;
  for (int i = 0; i < block_size(); ++i) {
    threads_[static_cast<std::size_t>(i)].position = {.thread = i, .block_size = block_size(), .grid = geometry.grid};
  }
  std::vector<std::int64_t> blocks(static_cast<std::size_t>(geometry.grid));
  std::iota(blocks.begin(), blocks.end(), std::int64_t{0});
  std::shuffle(blocks.begin(), blocks.end(), engine_);
  for (const std::int64_t block : blocks) run_block(block);
}

void Runner::reset_block(std::int64_t block) {
  for (Thread& t : threads_) {
    t.position.block = block;
    t.shared_arrays = 0;
    t.barriers = 0;
    t.copies.clear();
    t.groups.clear();
    t.started = t.ended = false;
  }
  for (Warp& w : warps_) {
    w.meetings.reset();
    w.ready.clear();
  }
  barriers_.reset();
  for (const SharedArray& array : shared_) std::memset(array.memory.get(), poison, array.bytes);
  if (dynamic_.bytes > 0) std::memset(dynamic_.memory.get(), poison, dynamic_.bytes);
}

void Runner::run_block(std::int64_t block) {
  reset_block(block);
  release(0, block_size());
  begin_.reached();
  run_ready();
  end_.passed();
  if (failure_) {
    abandon();
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  const auto ended = std::count_if(threads_.begin(), threads_.end(), [](const Thread& t) { return t.ended; });
  if (ended < block_size()) {
    abandon();
    misused("threads wait for others of their block that have ended or wait elsewhere");
  }
}

void Runner::release(int first, int count) {
  for (int thread = first; thread < first + count; ++thread) {
    warps_[static_cast<std::size_t>(thread / gpu::warp_lanes)].ready.push_back(thread);
  }
  if (count == block_size()) std::shuffle(order_.begin(), order_.end(), engine_);
}

/// Takes a thread that may run, of the first warp that has one; false where all wait or have ended.
bool Runner::take_ready(int& thread) {
  const std::size_t first = favour_ ? 0 : static_cast<std::size_t>(engine_() % order_.size());
  for (std::size_t i = 0; i < order_.size(); ++i) {
    std::vector<int>& ready = warps_[order_[(first + i) % order_.size()]].ready;
    if (ready.empty()) continue;
    std::swap(ready[static_cast<std::size_t>(engine_() % ready.size())], ready.back());
    thread = ready.back();
    ready.pop_back();
    return true;
  }
  return false;
}

void Runner::run_ready() {
  for (int thread = 0; !failure_ && take_ready(thread);) resume(thread);
}

void Runner::resume(int thread) {
  Thread& t = threads_[static_cast<std::size_t>(thread)];
  Fiber& fiber = *fibers_[static_cast<std::size_t>(thread)];
  if (!t.started) {
    t.started = true;
    fiber.start([this] {
      begin_.passed();
      try {
        (*kernel_)();
      } catch (const Abandoned&) {
        // The exception that failed the block is on its way to the caller.
      } catch (...) {
        failure_ = std::current_exception();
      }
      end_.reached();
    });
  }
  running_ = thread;
  here = &t.position;
  t.ended = fiber.resume();
  if (!t.ended) return;
  for (std::int64_t most = most_barriers.load(); most < t.barriers;) {
    if (most_barriers.compare_exchange_weak(most, t.barriers)) break;
  }
}

void Runner::abandon() {
  abandoning_ = true;
  for (int thread = 0; thread < block_size(); ++thread) {
    const Thread& t = threads_[static_cast<std::size_t>(thread)];
    if (t.started && !t.ended) resume(thread);
  }
  abandoning_ = false;
}

void Runner::suspend() {
  fibers_[static_cast<std::size_t>(running_)]->suspend();
  if (abandoning_) throw Abandoned{};
}

bool Runner::dropped() { return threads_[static_cast<std::size_t>(running_)].barriers++ == dropped_barrier.load(); }

void Runner::barrier() {
  const Unseen unseen;
  if (dropped()) return;
  OrderedBy& order = barriers_.next();
  order.reached();
  if (barriers_.complete(block_size())) release(0, block_size());
  suspend();
  order.passed();
}

void Runner::wait_in_warp(Warp& warp, bool exchanging) {
  if (!warp.meetings.none_waits() && warp.exchanging != exchanging) misused("lanes of a warp wait in different calls");
  warp.exchanging = exchanging;
  if (warp.meetings.complete(gpu::warp_lanes)) release(running_ / gpu::warp_lanes * gpu::warp_lanes, gpu::warp_lanes);
  suspend();
}

void Runner::warp_barrier() {
  const Unseen unseen;
  if (dropped()) return;
  Warp& warp = own_warp();
  OrderedBy& order = warp.meetings.next();
  order.reached();
  wait_in_warp(warp, false);
  order.passed();
}

const std::uint64_t* Runner::exchange(std::uint64_t bits) {
  const Unseen unseen;
  Warp& warp = own_warp();
  auto& values = warp.values[warp.meetings.turn()];
  values[running_ % gpu::warp_lanes] = bits;
  wait_in_warp(warp, true);
  return values;
}

void Runner::start_copy(const Copy& copy) {
  if (!late_) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    return;
  }
  const Unseen unseen;
  threads_[static_cast<std::size_t>(running_)].copies.push_back(copy);
}

void Runner::close_copies() {
  const Unseen unseen;
  Thread& t = threads_[static_cast<std::size_t>(running_)];
  t.groups.push_back(t.copies.size());
}

void Runner::await_copies(std::size_t left) {
  Thread& t = threads_[static_cast<std::size_t>(running_)];
  if (t.groups.size() <= left) return;
  const auto last = t.groups.end() - static_cast<std::ptrdiff_t>(left) - 1;
  const std::size_t made = *last;
  for (std::size_t i = 0; i < made; ++i) std::memcpy(t.copies[i].to, t.copies[i].from, t.copies[i].bytes);
  const Unseen unseen;
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(made));
  t.groups.erase(t.groups.begin(), last + 1);
  for (std::size_t& end : t.groups) end -= made;
}

void* Runner::shared_array(std::size_t bytes) {
  const Unseen unseen;
  const std::size_t index = threads_[static_cast<std::size_t>(running_)].shared_arrays++;
  if (index == shared_.size()) {
    shared_.push_back({std::make_unique_for_overwrite<std::byte[]>(bytes), bytes});
    std::memset(shared_.back().memory.get(), poison, bytes);
    arrays_.reached();
  }
  arrays_.passed();
  if (shared_[index].bytes != bytes) misused("threads of a block declare different shared arrays");
  std::size_t arrays = 0;
  for (const SharedArray& array : shared_) arrays += array.bytes;
  if (arrays > (dynamic_.bytes > 0 ? gpu::static_beside_dynamic : gpu::shared_without_asking)) {
    misused("static shared arrays of " + std::to_string(arrays) + " bytes");
  }
  return shared_[index].memory.get();
}

thread_local Runner runner;

}  // namespace

void set_schedule(const Schedule& schedule) {
  seed = schedule.seed;
  dropped_barrier = schedule.dropped_barrier;
  most_barriers = 0;
}
std::int64_t barriers_passed() { return most_barriers; }

void run_grid(const char* name, const gpu::Geometry& geometry, const std::function<void()>& kernel) {
  runner.run(name, geometry, kernel);
}

const Position& position() { return *here; }
void barrier() { runner.barrier(); }
void warp_barrier() { runner.warp_barrier(); }
const std::uint64_t* exchange(std::uint64_t bits) { return runner.exchange(bits); }
void see_read(const void* from, std::size_t bytes) {
  if (__tsan_read_range != nullptr) __tsan_read_range(const_cast<void*>(from), bytes);
}
void start_copy(void* to, const void* from, std::size_t bytes) { runner.start_copy({to, from, bytes}); }
void close_copies() { runner.close_copies(); }
void await_copies(int left) { runner.await_copies(static_cast<std::size_t>(left)); }
void* shared_array(std::size_t bytes) { return runner.shared_array(bytes); }
void* dynamic_shared() { return runner.dynamic_shared(); }
void require_aligned(const void* address, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(address) % static_cast<std::uintptr_t>(bytes) == 0) return;
  throw MisuseError("kernel: a " + std::to_string(bytes) + "-byte access is not aligned");
}

}  // namespace tandem::emulation
