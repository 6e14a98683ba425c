#pragma once
// A machine with CUDA devices that do not exist, for tests. It keeps what CUDA promises and nothing more:
// streams run each on a thread of its own, behind the calls and apart from each other by random delays;
// events order what they are documented to order; copies want their two sides where they say they are.
// Device memory is counted, and starts full of NaN. Any call can be made to fail, and any piece of work.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace tandem::fake_cuda {

struct Card {
  std::string name = "Fake GPU";
  int major = 9;
  int minor = 0;
  std::size_t memory = std::size_t{1} << 30;
  int cache = 50 << 20;
  std::size_t taken = 0;  ///< by others
  std::size_t code = 0;   ///< taken by the first launch of a kernel, which fails where that is not free
};

struct Machine {
  int driver_version = CUDART_VERSION;  ///< 0: no driver
  std::vector<Card> cards{Card{}};
  std::uint64_t seed = 1;
  /// Device memory can be touched only while a stream copies or runs a kernel: whoever else does crashes, as with a
  /// GPU. Takes time. Also where TANDEM_FAKE_GUARD is set.
  bool guarded = false;
  std::size_t pinnable = std::numeric_limits<std::size_t>::max();  ///< bytes registered at one time, as under WSL2
  bool peers = true;                                               ///< cards can have access to each other's memory
  bool breaks_straight_copies = false;       ///< copies between cards that have access to each other arrive changed
  bool breaks_copies_between_cards = false;  ///< the others do too
  bool lost_marks_stay = false;              ///< events recorded on a lost card never pass for another card's stream
  int longest_delay_us = 0;  ///< delay of a piece of work at most, drawn from the seed; one stream in four lags ten
                             ///< times as long
};

/// Every device memory, stream, event, registration and failure is forgotten: call it while none is in use.
void install(Machine machine);

/// Makes the `position`-th call (0: the next) of the runtime from now on fail once with `code`; a code after which CUDA
/// devices are lost loses the current one.
void fail_call(std::int64_t position, cudaError_t code);
/// Fails the `position`-th call of one function of the runtime ("cudaMalloc"; "launch" for kernels) with `code`.
void fail_call(std::string_view function, std::int64_t position, cudaError_t code);
/// Calls since the last install or fail_call.
std::int64_t calls();
/// Called by a stream's thread before each piece of work with the stream's name and what it is: "copy to
/// device", "copy to host", "copy on device", "copy from peer", "fill zero", "kernel", "record", "wait". It may sleep;
/// an exception loses the device. Null: none.
void set_before_work(std::function<void(std::string_view stream, std::string_view work)> hook);

/// Priorities of streams since install, by name, the last of each name: 0 the usual, below it what goes first.
std::map<std::string, int> priorities();

/// Numbers of objects that are alive.
struct Census {
  int streams = 0;
  int events = 0;
  int allocations = 0;
  int registrations = 0;
  bool operator==(const Census&) const = default;
};
Census census();
/// The cards on which there is a context, in order. As with CUDA, cudaInitDevice, cudaSetDevice and the driver's
/// cuDevicePrimaryCtxRetain make one, and so does whatever acts on a device where none is current: on the one that the
/// thread has chosen, which is the first until it does.
std::vector<int> contexts();
/// Cards that may reach others': (card, peer), in order.
std::vector<std::pair<int, int>> peers();
/// The card whose context is current in this thread; -1: none.
int current_context();
/// Uses that CUDA leaves undefined, as they were seen: memory freed under queued work, and the like.
std::vector<std::string> complaints();
/// Says the complaints on standard error, a line each, for programs. Returns whether there are any; their exit code
/// then.
bool tell_complaints();
constexpr int undefined_use = 99;
/// Copies between host and device since install, and the bytes of those whose host side is pageable.
struct CopyCount {
  std::int64_t to_device = 0;
  std::int64_t to_host = 0;
  std::size_t pageable_bytes = 0;
};
CopyCount copies();
/// Largest piece of host memory registered since install.
std::size_t largest_registration();

}  // namespace tandem::fake_cuda
