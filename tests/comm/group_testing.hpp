#pragma once
// Ranks of a group, each with a device, a stream and a thread of its own.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "core/device/group.hpp"
#include "tests/comm/connect.hpp"

namespace tandem::testing {

/// A device for each rank, with streams that lag at random. The program is linked with a file that opens them. Empty
/// where this machine has none: the test is to be skipped.
std::vector<std::unique_ptr<Device>> open_group_devices(int ranks, std::uint64_t seed);
/// Uses of memory that the devices did not like and told nobody of.
std::vector<std::string> complaints_of_devices();

/// Bytes that differ by rank, round and place.
inline std::byte value_of(int rank, int round, std::size_t at) {
  return static_cast<std::byte>(
      (at * 7 + at / 251 + static_cast<std::size_t>(rank) * 31 + static_cast<std::size_t>(round) * 101 + 1) & 0xFF);
}

inline std::vector<std::byte> values_of(int rank, int round, std::size_t bytes) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = value_of(rank, round, i);
  return values;
}

inline std::string message_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "of no known class";
  }
}

template <class Kind>
bool is_a(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Kind&) {
    return true;
  } catch (...) {
  }
  return false;
}

class Ranks {
 public:
  explicit Ranks(int count, std::uint64_t seed = 1, double watchdog_seconds = 30.0)
      : devices_(open_group_devices(count, seed)) {
    std::vector<Device*> views;
    for (const auto& device : devices_) views.push_back(device.get());
    if (views.empty()) return;
    groups_ = connect(views, watchdog_seconds);
    for (const auto& device : devices_) streams_.push_back(device->make_stream("group"));
  }
  /// False: the test is to be skipped.
  bool there() const { return !devices_.empty(); }
  int count() const { return static_cast<int>(devices_.size()); }
  Device& device(int rank) { return *devices_[static_cast<std::size_t>(rank)]; }
  Group& group(int rank) { return *groups_[static_cast<std::size_t>(rank)]; }
  StreamView stream(int rank) { return streams_[static_cast<std::size_t>(rank)]; }
  /// Once its work is done.
  void end_stream(int rank) { streams_[static_cast<std::size_t>(rank)] = Stream(); }
  void leave(int rank) { groups_[static_cast<std::size_t>(rank)].reset(); }

  /// Calls `body` for every rank on a thread of its own. Returns what they threw, by rank, of which the others are
  /// told.
  std::vector<std::exception_ptr> run(const std::function<void(int)>& body) {
    std::vector<std::exception_ptr> errors(devices_.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          body(rank);
        } catch (...) {
          errors[static_cast<std::size_t>(rank)] = std::current_exception();
          if (Group* group = groups_[static_cast<std::size_t>(rank)].get()) group->fail(std::current_exception());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  void write(int rank, void* to, const std::vector<std::byte>& values) {
    device(rank).copy(to, values.data(), values.size(), CopyKind::host_to_device, stream(rank));
  }
  /// Blocks.
  std::vector<std::byte> read(int rank, const void* from, std::size_t bytes) {
    std::vector<std::byte> values(bytes);
    device(rank).copy(values.data(), from, bytes, CopyKind::device_to_host, stream(rank));
    device(rank).synchronize(stream(rank));
    return values;
  }

 private:
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<Stream> streams_;
};

/// Parts one after another, with a gap before each.
inline std::vector<ByteRange> parts_of(const std::vector<std::size_t>& sizes, std::size_t gap = 0) {
  std::vector<ByteRange> parts;
  std::size_t end = 0;
  for (const std::size_t size : sizes) {
    parts.push_back({end + gap, end + gap + size});
    end += gap + size;
  }
  return parts;
}

}  // namespace tandem::testing

/// Ranks, or the test ends here as skipped.
#define TANDEM_RANKS_OR_SKIP(name, ...)     \
  tandem::testing::Ranks name(__VA_ARGS__); \
  if (!name.there()) GTEST_SKIP() << "this machine has none"
