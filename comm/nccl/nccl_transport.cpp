#include "comm/nccl/nccl_transport.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/group_call.hpp"
#include "comm/nccl/communicator.hpp"
#include "comm/nccl/nccl_library.hpp"
#include "comm/nccl/nccl_network.hpp"
#include "core/base/error.hpp"
#include "core/base/stall.hpp"
#include "core/base/start_thread.hpp"
#include "core/device/watched_wait.hpp"
#include "gpu_ops/device/cuda_device.hpp"
#include "gpu_ops/device/native_stream.hpp"
#include "gpu_ops/device/runtime.hpp"

namespace tandem {
namespace {

/// Exchanges that may be queued: many fewer than launches that CUDA queues before it makes the caller wait, which
/// nothing could end where another rank is gone.
constexpr std::size_t most_queued = 64;
constexpr std::size_t probe_bytes = 4096;  // bytes that each rank sends to each other
constexpr std::chrono::milliseconds until_told(2000);

/// Range of bytes that one rank sends to, or receives from, another in a call.
struct Piece {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

/// Facts that a rank brings to the start: its version of NCCL, or why it has none; rank 0's also the communicator's id.
struct Hello {
  std::string version;
  std::string why_none;
  std::string id;
};

class NcclTransport final : public PeerTransport {
 public:
  NcclTransport(Rendezvous& rendezvous, CudaDevice& device, double watchdog_seconds);
  ~NcclTransport() override;
  NcclTransport(const NcclTransport&) = delete;
  NcclTransport& operator=(const NcclTransport&) = delete;

  void all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) override;
  void all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to, StreamView stream) override;
  void require_memory(const void* data, std::size_t bytes, std::string_view action) const override {
    device_.require_inside(data, bytes, action);
  }
  void stop() noexcept override;
  void drain() noexcept override;
  std::size_t device_bytes() const noexcept override { return device_bytes_; }

 private:
  struct Call {
    std::string_view name;
    StreamView stream;
  };

  void connect();
  void connect_ranks(const nccl::UniqueId& id);
  void probe();
  template <class Pieces>
  void among_all(const Call& call, const Pieces& pieces);
  template <class Pieces>
  std::vector<nccl::Transfer> transfers(const Pieces& pieces) const;
  void wait_for_room(const Call& call, const Event& mark);
  void require_going() const;
  void break_off() noexcept;
  void watch() noexcept;
  void report(const std::string& failure) noexcept;
  void end_watch() noexcept;

  Rendezvous& rendezvous_;
  const Rank rank_;
  CudaDevice& device_;
  const double watchdog_seconds_;
  std::size_t device_bytes_ = 0;
  Stream stream_;
  Event ready_;                            ///< the caller's stream has what is sent
  std::array<Event, most_queued> passed_;  ///< ends of exchanges, used in turn
  std::size_t calls_ = 0;
  std::unique_ptr<nccl::Communicator> communicator_;  ///< null in a group of one
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false;  ///< under mutex_
  std::thread watcher_;  ///< uses all of the above
};

NcclTransport::NcclTransport(Rendezvous& rendezvous, CudaDevice& device, double watchdog_seconds)
    : rendezvous_(rendezvous), rank_(rendezvous.rank()), device_(device), watchdog_seconds_(watchdog_seconds) {
  if (rank_.count == 1) return;
  stream_ = device.make_stream("nccl", StreamPriority::first);
  ready_ = device.make_event();
  for (Event& event : passed_) event = device.make_event();
  try {
    connect();
  } catch (...) {
    end_watch();
    throw;
  }
}

NcclTransport::~NcclTransport() {
  drain();
  end_watch();
  if (communicator_ && !stopped_) communicator_->finish();
}

// -- the start ----------------------------------------------------------------------------------------

Hello hello_of(Rank rank) {
  Hello hello;
  try {
    const nccl::Library& library = nccl::load();
    hello.version = nccl::version_text(library.version);
    nccl::UniqueId id{};
    if (rank.index > 0) return hello;
    if (const int result = library.get_unique_id(&id); result != nccl::success) {
      hello.why_none = fmt::format("NCCL cannot start: {}", library.describe(result));
    }
    hello.id.assign(id.bytes.data(), id.bytes.size());
  } catch (const DeviceError& error) {
    hello.why_none = error.what();
  }
  return hello;
}

/// Values of all ranks at a meeting of the start.
std::vector<std::string> gathered(Rendezvous& rendezvous, const std::string& call, const std::string& value) {
  return rendezvous.meet(Rendezvous::of_others, call, value.substr(0, value_limit));
}

void require_none(const std::vector<std::string>& errors) {
  const auto failed = std::ranges::find_if(errors, [](const std::string& each) { return !each.empty(); });
  if (failed != errors.end()) throw DeviceError(fmt::format("rank {}: {}", failed - errors.begin(), *failed));
}

/// NCCL's own protocol is that of one version.
void require_one_version(const std::vector<std::string>& versions) {
  const auto other = std::ranges::find_if(versions, [&](const std::string& each) { return each != versions[0]; });
  if (other == versions.end()) return;
  throw DeviceError("ranks have different versions of NCCL",
                    fmt::format("rank 0 has {}, rank {} has {}", versions[0], other - versions.begin(), *other),
                    "install one version on all machines");
}

void NcclTransport::connect() {
  nccl::use_interface_of(rendezvous_.address());
  const Hello hello = hello_of(rank_);
  require_none(gathered(rendezvous_, "libraries of ranks", hello.why_none));
  require_one_version(gathered(rendezvous_, "versions of ranks", hello.version));
  const std::string id = gathered(rendezvous_, "id of the communicator", hello.id)[0];
  nccl::UniqueId unique{};
  if (id.size() != unique.bytes.size()) throw DeviceError("rank 0 brought no id of a communicator");
  std::ranges::copy(id, unique.bytes.begin());
  communicator_ = std::make_unique<nccl::Communicator>(nccl::load(), watchdog_seconds_);
  watcher_ = start_thread("nccl watch", [this] { watch(); });
  const StopWhenBroken stopping(rendezvous_, *this);
  try {
    connect_ranks(unique);
  } catch (const PeerError&) {
    if (const std::exception_ptr failure = rendezvous_.failure()) std::rethrow_exception(failure);
    throw;
  } catch (...) {  // the others wait for this one
    rendezvous_.fail(std::current_exception());
    throw;
  }
  gathered(rendezvous_, "connections of ranks", "");
}

void NcclTransport::connect_ranks(const nccl::UniqueId& id) {
  native_stream(stream_);  // makes the device current
  const std::size_t before = gpu::runtime::free_memory().free;
  communicator_->connect(id, rank_);
  probe();
  device_bytes_ = before - std::min(before, gpu::runtime::free_memory().free);
}

/// Byte that rank `from` sends to rank `to` as a probe.
std::byte probe_value(int from, int to, std::size_t at) {
  return static_cast<std::byte>((static_cast<std::size_t>(from * 31 + to * 57) + at * 7 + at / 251) & 0xFF);
}

/// Moves bytes between each two ranks, which NCCL connects when they first exchange something: so at the start. Throws
/// DeviceError where others arrive, as they do on machines whose PCIe switches send them astray.
void NcclTransport::probe() {
  const auto count = static_cast<std::size_t>(rank_.count);
  const MemoryBlock memory = device_.allocate(2 * count * probe_bytes, "probe of NCCL");
  const MemoryBlock host = device_.allocate_pinned(2 * count * probe_bytes, "probe of NCCL");
  auto* const values = static_cast<std::byte*>(host.data());
  auto* const bytes = static_cast<std::byte*>(memory.data());
  const std::size_t half = count * probe_bytes;
  for (std::size_t i = 0; i < half; ++i) {
    values[i] = probe_value(rank_.index, static_cast<int>(i / probe_bytes), i % probe_bytes);
    values[half + i] = ~probe_value(static_cast<int>(i / probe_bytes), rank_.index, i % probe_bytes);
  }
  Stream stream = device_.make_stream("probe");
  const Call call{.name = "connecting", .stream = stream};
  device_.copy(bytes, values, 2 * half, CopyKind::host_to_device, stream);
  try {
    among_all(call, [&](int to, int from) {
      return std::pair(Piece{bytes + static_cast<std::size_t>(to) * probe_bytes, probe_bytes},
                       Piece{bytes + half + static_cast<std::size_t>(from) * probe_bytes, probe_bytes});
    });
    device_.copy(values + half, bytes + half, half, CopyKind::device_to_host, stream);
    wait_or_give_up(device_, stream, {.what = call.name, .limit_seconds = watchdog_seconds_});
  } catch (...) {  // the memory goes: nothing may use it any more
    break_off();
    throw;
  }
  require_going();
  for (std::size_t i = 0; i < half; ++i) {
    const int from = static_cast<int>(i / probe_bytes);
    if (from == rank_.index || values[half + i] == probe_value(from, rank_.index, i % probe_bytes)) continue;
    throw DeviceError(fmt::format("NCCL moved wrong bytes from rank {} to rank {}", from, rank_.index),
                      "the machine's PCIe or its driver breaks copies between GPUs", "try NCCL_P2P_DISABLE=1");
  }
}

// -- calls --------------------------------------------------------------------------------------------

/// `pieces(to, from)` are what is sent and received. At each distance all ranks send to one and receive from another.
template <class Pieces>
std::vector<nccl::Transfer> NcclTransport::transfers(const Pieces& pieces) const {
  std::vector<nccl::Transfer> all;
  for (int distance = 1; distance < rank_.count; ++distance) {
    const int to = (rank_.index + distance) % rank_.count;
    const int from = (rank_.index - distance + rank_.count) % rank_.count;
    const auto [sent, received] = pieces(to, from);
    if (sent.size + received.size == 0) continue;
    all.push_back({.to = to,
                   .sent = sent.data,
                   .sent_bytes = sent.size,
                   .from = from,
                   .received = received.data,
                   .received_bytes = received.size});
  }
  return all;
}

/// Queues one exchange, behind what the caller's stream has and before what it gets later. Once it has passed, NCCL has
/// also taken all that is sent from here.
template <class Pieces>
void NcclTransport::among_all(const Call& call, const Pieces& pieces) {
  if (rank_.count == 1) return;
  require_going();
  try {
    const std::vector<nccl::Transfer> all = transfers(pieces);
    if (all.empty()) return;
    const Event& end = passed_[calls_++ % most_queued];
    wait_for_room(call, end);
    device_.record(ready_, call.stream);
    device_.wait(stream_, ready_);
    communicator_->exchange(all, native_stream(stream_), call.name);
    device_.record(end, stream_);
    device_.wait(call.stream, end);
  } catch (...) {
    break_off();
    throw;
  }
}

void NcclTransport::wait_for_room(const Call& call, const Event& mark) {
  ProgressWatch progress(watchdog_seconds_, 0);
  while (!device_.wait_for(mark, watch_tick)) {
    require_going();
    if (const auto seconds = progress.stalled(0)) {
      const StalledError error = stalled(fmt::format("{} of the group", call.name), *seconds, device_.info().name);
      report_stall(error);
      throw error;
    }
  }
}

void NcclTransport::all_gather(std::byte* buffer, std::span<const ByteRange> parts, StreamView stream) {
  const auto piece_of = [&](int rank) {
    const ByteRange part = parts[static_cast<std::size_t>(rank)];
    return Piece{buffer + part.begin, part.size()};
  };
  among_all({.name = "all_gather", .stream = stream},
            [&](int, int from) { return std::pair(piece_of(rank_.index), piece_of(from)); });
}

void NcclTransport::all_to_all(const std::byte* from, std::span<const ByteRange> parts, std::byte* to,
                               StreamView stream) {
  among_all({.name = "all_to_all", .stream = stream}, [&](int receiver, int sender) {
    const ByteRange given = parts[static_cast<std::size_t>(receiver)];
    const std::size_t taken = parts[static_cast<std::size_t>(rank_.index)].size();
    const auto slot = static_cast<std::size_t>(sender < rank_.index ? sender : sender - 1);
    // Only read from.
    return std::pair(Piece{const_cast<std::byte*>(from) + given.begin, given.size()}, Piece{to + slot * taken, taken});
  });
}

// -- the end ------------------------------------------------------------------------------------------

void NcclTransport::require_going() const {
  if (stopped_) throw PeerError("the ranks' connections are no longer used");
}

void NcclTransport::stop() noexcept {
  stopped_ = true;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

/// Ends what is queued. Once it returns, nothing uses memory any more, but where streams get nowhere.
void NcclTransport::break_off() noexcept {
  stopped_ = true;
  communicator_->abort();
  drain();
}

// Nobody is told of an error: it is that of a caller's stream, or of a stall, which has been reported.
void NcclTransport::drain() noexcept {
  if (rank_.count == 1) return;
  try {
    wait_or_give_up(device_, stream_, {.what = "copies between ranks", .limit_seconds = watchdog_seconds_});
  } catch (...) {
  }
}

/// Aborts what is queued where the group has ended, and ends the group where NCCL has met an error. Whoever waits for a
/// stream is in no call, so nobody else would.
void NcclTransport::watch() noexcept {
  try {
    native_stream(stream_);  // NCCL makes the device that is current so again when it aborts
  } catch (...) {
  }
  std::unique_lock lock(mutex_);
  while (!ending_ && !stopped_) {
    changed_.wait_for(lock, watch_tick, [this] { return ending_ || stopped_; });
    if (ending_ || stopped_) break;
    lock.unlock();
    if (const auto failure = communicator_->failure()) report(*failure);
    lock.lock();
  }
  lock.unlock();
  if (stopped_) communicator_->abort();
}

/// Returns once every later call of the group throws, so that nothing is made of bytes that have not come.
void NcclTransport::report(const std::string& failure) noexcept {
  try {
    rendezvous_.fail(std::make_exception_ptr(DeviceError("NCCL failed", failure)));
    const auto limit = std::chrono::steady_clock::now() + until_told;
    while (!rendezvous_.failure() && std::chrono::steady_clock::now() < limit) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  } catch (...) {  // no memory for words
  }
  stopped_ = true;
}

void NcclTransport::end_watch() noexcept {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (watcher_.joinable()) watcher_.join();
}

CudaDevice& own_kind(Device& device) {
  auto* const cuda = dynamic_cast<CudaDevice*>(&device);
  if (cuda == nullptr) throw MisuseError("NCCL is given a device of another kind", device.info().name);
  return *cuda;
}

}  // namespace

std::unique_ptr<PeerTransport> make_nccl_transport(Rendezvous& rendezvous, Device& device, double watchdog_seconds) {
  return std::make_unique<NcclTransport>(rendezvous, own_kind(device), watchdog_seconds);
}

}  // namespace tandem
