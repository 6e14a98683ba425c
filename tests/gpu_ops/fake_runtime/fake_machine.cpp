#include "tests/gpu_ops/fake_runtime/fake_machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/gpu_ops/fake_runtime/fake_default_streams.hpp"

namespace tandem::fake_cuda {
namespace {

constexpr std::size_t granularity = 512;

std::size_t rounded(std::size_t bytes) { return (bytes + granularity - 1) / granularity * granularity; }

std::size_t page_tables(std::size_t registered) { return (registered + 4095) / 4096 * 8; }

const std::pair<const std::uintptr_t, Range>* range_before(const Ranges& ranges, std::uintptr_t address) {
  const auto next = ranges.upper_bound(address);
  return next == ranges.begin() ? nullptr : &*std::prev(next);
}

/// `device`: where the range is to be; -1: anywhere.
bool inside(const Ranges& ranges, std::uintptr_t address, std::size_t bytes, int device = -1) {
  const auto* range = range_before(ranges, address);
  return range != nullptr && address + bytes <= range->first + range->second.bytes &&
         (device < 0 || range->second.device == device);
}

bool touches(const Ranges& ranges, std::uintptr_t address, std::size_t bytes) {
  const auto* range = range_before(ranges, address + bytes - 1);
  return range != nullptr && range->first + range->second.bytes > address;
}

std::uintptr_t address_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

// -- marks -------------------------------------------------------------------------------------------

void Mark::pass() {
  const std::lock_guard lock(mutex_);
  passed_ = true;
  changed_.notify_all();
}

void Mark::stay(int device) {
  const std::lock_guard lock(mutex_);
  stays_ = device;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return passed_ || stays_; });
}

void Mark::wait_in_stream(int device) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return passed_ || stays_ == device; });
}

bool Mark::passed() {
  const std::lock_guard lock(mutex_);
  return passed_ || stays_;
}

// -- state -------------------------------------------------------------------------------------------

bool loses_device(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
    case cudaErrorInvalidValue:
    case cudaErrorMemoryAllocation:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorPeerAccessAlreadyEnabled:
    case cudaErrorPeerAccessNotEnabled:
    case cudaErrorNotReady:
      return false;
    default:
      return true;
  }
}

ThreadState& this_thread() {
  thread_local ThreadState state;
  return state;
}

int current_device() {
  const ThreadState& thread = this_thread();
  return thread.contexts.empty() ? thread.chosen : thread.contexts.back();
}

State& State::get() {
  static State state;
  return state;
}

void State::wait_for_ending_streams() const {
  while (ending_streams > 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void State::install(Machine machine) {
  forget_legacy_streams();
  wait_for_ending_streams();
  const std::lock_guard lock(mutex_);
  machine_ = std::move(machine);
  machine_.guarded |= std::getenv("TANDEM_FAKE_GUARD") != nullptr;
  lost_.assign(machine_.cards.size(), cudaSuccess);
  complaints_.clear();
  armed_position_ = -1;
  hook_ = nullptr;
  stream_seeds_ = machine_.seed;
  priorities_.clear();
  largest_registration_ = 0;
  copies_ = {};
  calls_ = 0;
  contexts_.clear();
  peers_.clear();
  loaded_.clear();
  this_thread() = {};
}

void State::make_context(int device) {
  const std::lock_guard lock(mutex_);
  contexts_.insert(device);
}

bool State::has_context(int device) const {
  const std::lock_guard lock(mutex_);
  return contexts_.contains(device);
}

std::vector<int> State::contexts() const {
  const std::lock_guard lock(mutex_);
  return {contexts_.begin(), contexts_.end()};
}

void State::enter_context() {
  ThreadState& thread = this_thread();
  if (!thread.contexts.empty()) return;
  make_context(thread.chosen);
  thread.contexts.push_back(thread.chosen);
}

cudaError_t State::enter(std::string_view function) {
  const int device = current_device();
  const std::lock_guard lock(mutex_);
  if (!has_driver() || machine_.driver_version < CUDART_VERSION) return cudaErrorInsufficientDriver;
  const bool counts = armed_function_.empty() || armed_function_ == function;
  const std::int64_t position = counts ? calls_++ : -1;
  if (counts && position == armed_position_) {
    armed_position_ = -1;
    if (loses_device(armed_code_) && has_card(device)) lost_[static_cast<std::size_t>(device)] = armed_code_;
    return armed_code_;
  }
  return has_card(device) ? lost_[static_cast<std::size_t>(device)] : cudaSuccess;
}

void State::arm(std::string_view function, std::int64_t position, cudaError_t code) {
  const std::lock_guard lock(mutex_);
  armed_function_ = function;
  armed_position_ = position;
  armed_code_ = code;
  calls_ = 0;
}

void State::lose(int device, cudaError_t code) {
  const std::lock_guard lock(mutex_);
  lost_[static_cast<std::size_t>(device)] = code;
}

cudaError_t State::lost(int device) const {
  const std::lock_guard lock(mutex_);
  return lost_[static_cast<std::size_t>(device)];
}

void State::complain(std::string text) {
  const std::lock_guard lock(mutex_);
  complaints_.push_back(std::move(text));
}

std::vector<std::string> State::complaints() {
  wait_for_ending_streams();
  const std::lock_guard lock(mutex_);
  return complaints_;
}

std::size_t State::free_bytes(int device) {
  const std::lock_guard lock(mutex_);
  return free_on(device);
}

std::size_t State::free_on(int device) const {
  const Card& card = machine_.cards[static_cast<std::size_t>(device)];
  std::size_t used = card.taken + (loaded_.contains(device) ? card.code : 0);
  for (const auto& [begin, range] : allocations_) used += range.device == device ? rounded(range.bytes) : 0;
  for (const auto& [begin, range] : registrations_) used += contexts_.contains(device) ? page_tables(range.bytes) : 0;
  return card.memory - std::min(card.memory, used);
}

cudaError_t State::allocate(int device, std::size_t bytes, void** data) {
  if (bytes == 0 || rounded(bytes) > free_bytes(device)) return bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
  void* mapped = ::mmap(nullptr, rounded(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::memset(mapped, 0xFF, bytes);
  const std::lock_guard lock(mutex_);
  allocations_[address_of(mapped)] = {bytes, device};
  protect(mapped, bytes, touching_ > 0);
  *data = mapped;
  return cudaSuccess;
}

cudaError_t State::load_code(int device) {
  const std::size_t free = free_bytes(device);
  const std::lock_guard lock(mutex_);
  if (loaded_.contains(device)) return cudaSuccess;
  if (machine_.cards[static_cast<std::size_t>(device)].code > free) return cudaErrorMemoryAllocation;
  loaded_.insert(device);
  return cudaSuccess;
}

void State::protect(void* data, std::size_t bytes, bool open) const {
  if (machine_.guarded) ::mprotect(data, rounded(bytes), open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void State::open_device_memory() {
  const std::lock_guard lock(mutex_);
  if (touching_++ > 0) return;
  for (const auto& [begin, range] : allocations_) protect(reinterpret_cast<void*>(begin), range.bytes, true);
}

void State::close_device_memory() {
  const std::lock_guard lock(mutex_);
  if (--touching_ > 0) return;
  for (const auto& [begin, range] : allocations_) protect(reinterpret_cast<void*>(begin), range.bytes, false);
}

bool State::free(void* data) {
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = allocations_.find(address_of(data));
    if (found == allocations_.end()) return false;
    bytes = found->second.bytes;
    allocations_.erase(found);
  }
  ::munmap(data, rounded(bytes));
  return true;
}

bool State::on_device(const void* data, std::size_t bytes, int device) {
  const std::lock_guard lock(mutex_);
  return inside(allocations_, address_of(data), bytes, device);
}

bool State::touches_device(const void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  return touches(allocations_, address_of(data), bytes);
}

cudaError_t State::enable_peer(int device, int peer) {
  const std::lock_guard lock(mutex_);
  if (!has_card(peer) || peer == device) return cudaErrorInvalidDevice;
  if (!machine_.peers) return cudaErrorPeerAccessUnsupported;
  contexts_.insert(peer);
  return peers_.insert({device, peer}).second ? cudaSuccess : cudaErrorPeerAccessAlreadyEnabled;
}

cudaError_t State::disable_peer(int device, int peer) {
  const std::lock_guard lock(mutex_);
  return peers_.erase({device, peer}) == 1 ? cudaSuccess : cudaErrorPeerAccessNotEnabled;
}

bool State::breaks_copy(int device, int peer) const {
  const std::lock_guard lock(mutex_);
  return peers_.contains({device, peer}) ? machine_.breaks_straight_copies : machine_.breaks_copies_between_cards;
}

std::vector<std::pair<int, int>> State::peers() const {
  const std::lock_guard lock(mutex_);
  return {peers_.begin(), peers_.end()};
}

cudaError_t State::register_host(void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (address_of(data) % 4096 != 0 || touches(registrations_, address_of(data), bytes)) return cudaErrorInvalidValue;
  std::size_t registered = bytes;
  for (const auto& [begin, range] : registrations_) registered += range.bytes;
  const bool mapped = std::ranges::all_of(contexts_, [&](int device) { return page_tables(bytes) <= free_on(device); });
  if (!mapped || registered > machine_.pinnable) return cudaErrorMemoryAllocation;
  registrations_[address_of(data)] = {.bytes = bytes};
  largest_registration_ = std::max(largest_registration_, bytes);
  return cudaSuccess;
}

bool State::unregister_host(void* data) {
  const std::lock_guard lock(mutex_);
  return registrations_.erase(address_of(data)) == 1;
}

State::HostKind State::kind_of(const void* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (inside(registrations_, address_of(data), bytes)) return HostKind::registered;
  return touches(registrations_, address_of(data), bytes) ? HostKind::mixed : HostKind::pageable;
}

void State::count_copy(bool to_device, std::size_t pageable_bytes) {
  const std::lock_guard lock(mutex_);
  ++(to_device ? copies_.to_device : copies_.to_host);
  copies_.pageable_bytes += pageable_bytes;
}

CopyCount State::copies() const {
  const std::lock_guard lock(mutex_);
  return copies_;
}

void State::set_hook(std::function<void(std::string_view, std::string_view)> hook) {
  const std::lock_guard lock(mutex_);
  hook_ =
      hook ? std::make_shared<const std::function<void(std::string_view, std::string_view)>>(std::move(hook)) : nullptr;
}

std::shared_ptr<const std::function<void(std::string_view, std::string_view)>> State::hook() {
  const std::lock_guard lock(mutex_);
  return hook_;
}

std::uint64_t State::next_stream_seed() {
  const std::lock_guard lock(mutex_);
  return stream_seeds_++;
}

void State::note_priority(const std::string& stream, int priority) {
  const std::lock_guard lock(mutex_);
  priorities_[stream] = priority;
}

std::map<std::string, int> State::priorities() const {
  const std::lock_guard lock(mutex_);
  return priorities_;
}

Census State::census() {
  wait_for_ending_streams();
  const std::lock_guard lock(mutex_);
  return {streams, events, static_cast<int>(allocations_.size()), static_cast<int>(registrations_.size())};
}

// -- what tests call -----------------------------------------------------------------------------------

void install(Machine machine) { State::get().install(std::move(machine)); }
void fail_call(std::int64_t position, cudaError_t code) { State::get().arm("", position, code); }
void fail_call(std::string_view function, std::int64_t position, cudaError_t code) {
  State::get().arm(function, position, code);
}
std::int64_t calls() { return State::get().calls(); }
void set_before_work(std::function<void(std::string_view, std::string_view)> hook) {
  State::get().set_hook(std::move(hook));
}
std::map<std::string, int> priorities() { return State::get().priorities(); }
Census census() { return State::get().census(); }
std::vector<int> contexts() { return State::get().contexts(); }
std::vector<std::pair<int, int>> peers() { return State::get().peers(); }
int current_context() { return this_thread().contexts.empty() ? -1 : this_thread().contexts.back(); }
std::vector<std::string> complaints() { return State::get().complaints(); }
bool tell_complaints() {
  const std::vector<std::string> all = complaints();
  for (const std::string& complaint : all) std::fprintf(stderr, "fake CUDA: %s\n", complaint.c_str());
  return !all.empty();
}
CopyCount copies() { return State::get().copies(); }
std::size_t largest_registration() { return State::get().largest_registration(); }

}  // namespace tandem::fake_cuda

// -- streams -----------------------------------------------------------------------------------------

using tandem::fake_cuda::State;
using tandem::fake_cuda::Work;

namespace {

/// Opens device memory for as long as it lives.
class DeviceMemoryInReach {
 public:
  explicit DeviceMemoryInReach(bool needed) : needed_(needed) {
    if (needed_) State::get().open_device_memory();
  }
  ~DeviceMemoryInReach() {
    if (needed_) State::get().close_device_memory();
  }
  DeviceMemoryInReach(const DeviceMemoryInReach&) = delete;
  DeviceMemoryInReach& operator=(const DeviceMemoryInReach&) = delete;

 private:
  bool needed_;
};

}  // namespace

CUstream_st::CUstream_st(int device, int priority)
    : device_(device), priority_(priority), random_(State::get().next_stream_seed()) {
  const int longest = State::get().machine().longest_delay_us;
  longest_delay_us_ = random_() % 4 == 0 ? 10 * longest : longest;
  worker_ = std::thread([this] { serve(); });
}

CUstream_st::~CUstream_st() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_one();
  }
  worker_.join();
}

void CUstream_st::push(Work work) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(work));
  changed_.notify_one();
}

void CUstream_st::rename(std::string name) {
  const std::lock_guard lock(mutex_);
  name_ = std::move(name);
}

bool CUstream_st::idle() {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !busy_;
}

void CUstream_st::serve() {
  tandem::fake_cuda::this_thread().contexts = {device_};
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty() || ending_; });
    if (queue_.empty()) return;
    Work work = std::move(queue_.front());
    queue_.pop_front();
    const std::string name = name_;
    busy_ = true;
    lock.unlock();
    delay();
    run(work, name);
    work = Work();
    lock.lock();
    busy_ = false;
  }
}

// Half of the work starts at once: order shows where some streams run ahead while others lag.
void CUstream_st::delay() {
  if (longest_delay_us_ == 0 || random_() % 2 == 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % static_cast<std::uint64_t>(longest_delay_us_)));
}

void CUstream_st::run(Work& work, const std::string& name) {
  State& state = State::get();
  if (state.lost(device_) == cudaSuccess) {
    try {
      if (const auto hook = state.hook()) (*hook)(name, work.kind);
      // Waiting holds nothing open.
      const DeviceMemoryInReach reach(work.kind != "record" && work.kind != "wait");
      work.run();
      return;
    } catch (const std::exception& error) {
      // An exception of an emulated kernel is a fault that a GPU would answer by ending the context.
      if (work.kind == "kernel") state.complain(error.what());
      state.lose(device_, cudaErrorLaunchFailure);
    }
  }
  if (work.always) work.run();
}
