#include "tests/gpu_ops/fake_nccl/fake_nccl.hpp"

#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>

#include "comm/nccl/nccl_library.hpp"
#include "tests/gpu_ops/fake_nccl/exchange.hpp"
#include "tests/gpu_ops/fake_runtime/fake_default_streams.hpp"

namespace fake = tandem::fake_nccl;
using fake::Operation;
using fake::Shared;
using tandem::fake_cuda::State;
using tandem::nccl::Config;
using tandem::nccl::UniqueId;

namespace {

constexpr std::size_t device_bytes = std::size_t{1} << 20;  // device memory of a communicator
constexpr int own_version = 22703;

}  // namespace

struct ncclComm {
  ncclComm(const std::string& id, fake::Place own, int count)
      : shared(std::make_shared<Shared>(id, own, count)),
        delays(std::make_shared<fake::Delays>(State::get().machine().seed * 1000 +
                                              static_cast<std::uint64_t>(own.rank))) {}
  const std::shared_ptr<Shared> shared;
  const std::shared_ptr<fake::Delays> delays;
  std::atomic<int> callers{0};
  std::thread job;  ///< thread of the work that goes on while the state is "in progress"
  void* memory = nullptr;
};

namespace {

/// State that all communicators of the process share.
struct Process {
  std::mutex mutex;
  std::set<ncclComm*> alive;
  fake::Behaviour behaviour;
  std::string failing;
  std::int64_t position = -1;
  int code = fake::success;
  std::int64_t calls = 0;
  std::string last_error;

  Process() {
    const char* plan = std::getenv("TANDEM_FAKE_NCCL_FAIL");
    if (plan == nullptr) return;
    char* rest = nullptr;
    position = std::strtoll(plan, &rest, 10);
    code = *rest == ':' ? std::atoi(rest + 1) : fake::system_error;
  }
  static Process& get() {
    static Process process;
    return process;
  }
  fake::Behaviour now() {
    const std::lock_guard lock(mutex);
    return behaviour;
  }
  /// Counts the call; what it is to fail with.
  int enter(std::string_view function) {
    const std::lock_guard lock(mutex);
    if (!failing.empty() && failing != function) return fake::success;
    if (calls++ != position) return fake::success;
    last_error = "planted in " + std::string(function);
    return code;
  }
};

int misuse(const std::string& text) {
  State::get().complain("NCCL: " + text);
  return fake::invalid_usage;
}

/// Runs `body` for a communicator that is there, unless the call is to fail.
template <class Body>
int call(const char* function, ncclComm* comm, Body body) {
  {
    const std::lock_guard lock(Process::get().mutex);
    if (!Process::get().alive.contains(comm)) {
      State::get().complain(std::string("NCCL: ") + function + " of a communicator that is gone");
      return fake::invalid_argument;
    }
    if (comm->callers++ > 0) misuse(std::string(function) + " while another thread uses the communicator");
  }
  const int planted = Process::get().enter(function);
  const int result = planted != fake::success ? planted : body();
  --comm->callers;
  return result;
}

/// Begins what takes its time. `job` is over soon once the communicator is aborted.
void begin(ncclComm* comm, std::function<void()> job) {
  if (comm->job.joinable()) comm->job.join();
  comm->shared->state = fake::in_progress;
  comm->job = std::thread(std::move(job));
}

void connect(ncclComm* comm) {
  begin(comm, [shared = comm->shared, delays = comm->delays, memory = &comm->memory] {
    const bool connected = shared->wires.connect([&] { return shared->aborted.load(); });
    delays->take();
    const bool has_room = State::get().allocate(shared->own.card, device_bytes, memory) == cudaSuccess;
    shared->state = !connected                    ? fake::system_error
                    : shared->wires.share_cards() ? fake::invalid_usage
                    : !has_room                   ? fake::unhandled_cuda_error
                                                  : fake::success;
  });
}

/// Counts a group until its stream has passed it, or dropped it.
class Queued {
 public:
  explicit Queued(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) { ++shared_->queued; }
  ~Queued() { --shared_->queued; }
  Queued(const Queued&) = delete;
  Queued& operator=(const Queued&) = delete;
  const std::shared_ptr<Shared>& shared() const { return shared_; }

 private:
  const std::shared_ptr<Shared> shared_;
};

void queue(const std::shared_ptr<Shared>& shared, const std::shared_ptr<fake::Delays>& delays,
           const std::vector<Operation>& operations, CUstream_st* stream) {
  const auto run = [queued = std::make_shared<Queued>(shared), delays, operations] {
    if (!fake::on_card(*queued->shared(), operations, "uses memory that was freed meanwhile")) return;
    delays->take();
    fake::Exchange(queued->shared(), operations).run();
  };
  tandem::fake_cuda::issue(stream, {.kind = "nccl", .run = run});
}

/// The group that a thread has begun.
struct Group {
  int depth = 0;
  ncclComm* comm = nullptr;
  CUstream_st* stream = nullptr;
  std::vector<Operation> operations;
  int error = fake::success;
};

/// Groups by thread. (Storage of threads in a library that is loaded late is freed unseen by ThreadSanitizer.)
class Groups {
 public:
  static Groups& get() {
    static Groups all;
    return all;
  }
  /// The calling thread's alone.
  Group& of_this_thread() {
    const std::lock_guard lock(mutex_);
    return groups_[std::this_thread::get_id()];
  }
  /// Ends the calling thread's.
  Group take() {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(std::this_thread::get_id());
    Group group = std::move(found->second);
    groups_.erase(found);
    return group;
  }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, Group> groups_;
};

int launch(const Group& group) {
  if (group.error != fake::success || group.operations.empty()) return group.error;
  return call("group", group.comm, [&]() -> int {
    const std::shared_ptr<Shared> shared = group.comm->shared;
    if (const int state = shared->state; state == fake::in_progress)
      return misuse("a communicator that is not ready");
    else if (state != fake::success)
      return state;
    if (!fake::on_card(*shared, group.operations, "is given memory that is not its card's"))
      return fake::invalid_argument;
    CUstream_st* const stream = tandem::fake_cuda::stream_of(group.stream);
    if (stream->device() != shared->own.card) return misuse("a stream of another card");
    if (group.comm->delays->at_once()) {
      queue(shared, group.comm->delays, group.operations, stream);
      return fake::success;
    }
    begin(group.comm, [shared, delays = group.comm->delays, operations = group.operations, stream] {
      delays->take();
      if (shared->aborted) return;
      queue(shared, delays, operations, stream);
      shared->state = fake::success;
    });
    return fake::in_progress;
  });
}

int add(ncclComm* comm, const Operation& operation, int type, CUstream_st* stream) {
  Group& group = Groups::get().of_this_thread();
  const auto added = [&]() -> int {
    if (type != tandem::nccl::byte_type) return misuse("a type that is not bytes");
    if (operation.peer < 0 || operation.peer >= comm->shared->count) return misuse("a peer that is none");
    if (group.comm != nullptr && group.comm != comm) return misuse("a group of several communicators");
    if (!group.operations.empty() && group.stream != stream) return misuse("a group on several streams");
    group.comm = comm;
    group.stream = stream;
    group.operations.push_back(operation);
    return fake::success;
  };
  const int result = call(operation.sends ? "ncclSend" : "ncclRecv", comm, added);
  if (result != fake::success) group.error = result;
  return group.depth > 0 ? result : launch(Groups::get().take());
}

/// Ends a communicator, whatever the call says.
int end(const char* function, ncclComm* comm) {
  const int result = call(function, comm, [] { return fake::success; });
  {
    const std::lock_guard lock(Process::get().mutex);
    if (Process::get().alive.erase(comm) == 0) return result;
  }
  comm->shared->aborted = true;
  if (comm->job.joinable()) comm->job.join();
  if (comm->memory != nullptr) State::get().free(comm->memory);
  delete comm;
  return result;
}

/// Waits until all bytes are out. By then each rank has received all that it was sent.
void flush(ncclComm* comm) {
  begin(comm, [shared = comm->shared] {
    while (shared->queued > 0 && !shared->aborted) std::this_thread::sleep_for(std::chrono::microseconds(100));
    for (int peer = 0; peer < shared->count && !shared->aborted; ++peer) {
      if (shared->wires.has_more(peer)) misuse("rank " + std::to_string(peer) + " has sent what nobody receives");
    }
    shared->state = fake::success;
  });
}

}  // namespace

namespace tandem::fake_nccl {

bool breaks_bytes() { return Process::get().now().breaks_bytes; }
int longest_delay_us() { return Process::get().now().longest_delay_us; }
bool tells_lost_ranks() { return Process::get().now().tells_lost_ranks; }

}  // namespace tandem::fake_nccl

extern "C" {

void fake_nccl_behave(const fake::Behaviour* behaviour) {
  const std::lock_guard lock(Process::get().mutex);
  Process::get().behaviour = *behaviour;
}

void fake_nccl_fail(const char* function, std::int64_t position, int code) {
  Process& process = Process::get();
  const std::lock_guard lock(process.mutex);
  process.failing = function == nullptr ? "" : function;
  process.position = position;
  process.code = code;
  process.calls = 0;
}

std::int64_t fake_nccl_calls() {
  const std::lock_guard lock(Process::get().mutex);
  return Process::get().calls;
}

int fake_nccl_alive() {
  const std::lock_guard lock(Process::get().mutex);
  return static_cast<int>(Process::get().alive.size());
}

void fake_nccl_fail_outside_calls(int code) {
  const std::lock_guard lock(Process::get().mutex);
  for (ncclComm* comm : Process::get().alive) comm->shared->state = code;
}

int ncclGetVersion(int* version) {
  const char* asked = std::getenv("TANDEM_FAKE_NCCL_VERSION");
  *version = asked == nullptr ? own_version : std::atoi(asked);
  return fake::success;
}

int ncclGetUniqueId(UniqueId* id) {
  if (const int planted = Process::get().enter("ncclGetUniqueId")) return planted;
  static std::atomic<int> made{0};
  const std::string text = std::to_string(::getpid()) + "-" + std::to_string(made++);
  id->bytes = {};
  std::copy(text.begin(), text.end(), id->bytes.begin());
  return fake::success;
}

int ncclCommInitRankConfig(ncclComm** comm, int count, UniqueId id, int rank, Config* config) {
  if (const int planted = Process::get().enter("ncclCommInitRankConfig")) return planted;
  if (config->magic != 0xcafebeef || config->size < sizeof(Config)) return misuse("a configuration that is none");
  if (config->blocking != 0) return misuse("a communicator that blocks, which nobody can end");
  const int card = tandem::fake_cuda::current_device();
  *comm = new ncclComm(id.bytes.data(), {.rank = rank, .process = ::getpid(), .card = card}, count);
  {
    const std::lock_guard lock(Process::get().mutex);
    Process::get().alive.insert(*comm);
  }
  connect(*comm);
  return fake::in_progress;
}

int ncclCommGetAsyncError(ncclComm* comm, int* state) {
  return call("ncclCommGetAsyncError", comm, [&] {
    *state = comm->shared->state;
    return fake::success;
  });
}

int ncclCommFinalize(ncclComm* comm) {
  return call("ncclCommFinalize", comm, [&]() -> int {
    if (comm->shared->state == fake::in_progress) return misuse("a communicator that is not ready");
    flush(comm);
    return fake::in_progress;
  });
}

int ncclCommDestroy(ncclComm* comm) { return end("ncclCommDestroy", comm); }
int ncclCommAbort(ncclComm* comm) { return end("ncclCommAbort", comm); }

int ncclGroupStart() {
  if (const int planted = Process::get().enter("ncclGroupStart")) return planted;
  ++Groups::get().of_this_thread().depth;
  return fake::success;
}

// The group is over even where the call fails.
int ncclGroupEnd() {
  Group& group = Groups::get().of_this_thread();
  const int planted = Process::get().enter("ncclGroupEnd");
  if (group.depth == 0) return misuse("the end of a group that was not begun");
  if (--group.depth > 0) return planted;
  const Group ended = Groups::get().take();
  return planted != fake::success ? planted : launch(ended);
}

int ncclSend(const void* from, std::size_t count, int type, int peer, ncclComm* comm, CUstream_st* stream) {
  auto* const data = static_cast<std::byte*>(const_cast<void*>(from));
  return add(comm, {.sends = true, .peer = peer, .data = data, .bytes = count}, type, stream);
}

int ncclRecv(void* to, std::size_t count, int type, int peer, ncclComm* comm, CUstream_st* stream) {
  return add(comm, {.sends = false, .peer = peer, .data = static_cast<std::byte*>(to), .bytes = count}, type, stream);
}

const char* ncclGetErrorString(int result) {
  switch (result) {
    case fake::success:
      return "no error";
    case fake::system_error:
      return "unhandled system error";
    case fake::invalid_usage:
      return "invalid usage";
    case fake::remote_error:
      return "remote process exited or there was a network error";
    default:
      return "an error of the fake";
  }
}

const char* ncclGetLastError(ncclComm*) {
  static std::set<std::string> said;  // for good: whoever asked may still read it
  const std::lock_guard lock(Process::get().mutex);
  return said.insert(Process::get().last_error).first->c_str();
}

}  // extern "C"
