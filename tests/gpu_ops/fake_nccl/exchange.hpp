#pragma once
// A group of sends and receives of the fake NCCL, as a stream makes it. Internal to it.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu_ops/fake_nccl/wires.hpp"

namespace tandem::fake_nccl {

/// A send or a receive.
struct Operation {
  bool sends = false;
  int peer = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// State of a communicator that its work on streams and its threads share.
struct Shared {
  Shared(const std::string& id, Place place, int ranks) : own(place), count(ranks), wires(id, place, ranks) {}
  const Place own;
  const int count;
  Wires wires;
  std::atomic<int> state{0};  ///< a Code
  std::atomic<bool> aborted{false};
  std::atomic<int> queued{0};  ///< groups that streams have not passed
};

/// Delays of one communicator, drawn at random. Thread-safe.
class Delays {
 public:
  explicit Delays(std::uint64_t seed) : random_(seed) {}
  /// Blocks for a while, or not at all.
  void take();
  /// Whether the next group is queued when its call returns.
  bool at_once();

 private:
  std::mutex mutex_;
  std::mt19937_64 random_;
};

/// Moves the bytes of all operations, those with one peer in order, with others at once. Ends early where the
/// communicator is aborted.
class Exchange {
 public:
  Exchange(std::shared_ptr<Shared> shared, const std::vector<Operation>& operations);
  void run();

 private:
  /// Bytes on their way, behind a header that says how many.
  struct Flow {
    Operation operation;
    std::uint64_t header = 0;
    std::size_t header_done = 0;
    std::size_t done = 0;
    bool complete() const { return header_done == sizeof header && done == operation.bytes; }
  };
  using Flows = std::map<std::pair<bool, int>, std::deque<Flow>>;

  bool progress();
  bool advance(Flow& flow);
  bool advance_header(Flow& flow);
  std::ptrdiff_t move(const Flow& flow, std::byte* data, std::size_t bytes);
  void copy_own();
  void stand_still(int code);

  const std::shared_ptr<Shared> shared_;
  Flows flows_;
  bool stands_still_ = false;  ///< until it is aborted
};

/// Whether all operations use memory of the card; a complaint otherwise. `when`: "is given memory".
bool on_card(const Shared& shared, const std::vector<Operation>& operations, const std::string& when);
/// Settings, for the whole process.
bool breaks_bytes();
int longest_delay_us();
bool tells_lost_ranks();

}  // namespace tandem::fake_nccl
