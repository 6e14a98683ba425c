// Ranks that are processes: one that is killed or stands still in a call ends those of the others, by its number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "comm/gloo_transport.hpp"
#include "comm/process_group.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/ranks_in_processes.hpp"
#include "tests/cpu_ops/host_device_testing.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::message_of;
using testing::RanksInProcesses;
using ::testing::StartsWith;

std::byte* bytes_of(const MemoryBlock& block) { return static_cast<std::byte*>(block.data()); }

/// Gathers again and again, with parts that take several pieces, until a call throws.
void gather_for_ever(std::unique_ptr<Rendezvous> rendezvous, const std::function<void()>& started) {
  constexpr std::size_t part = gloo_staging_bytes + 22;
  HostDevice device({.capacity = std::size_t{64} << 20, .threads = 1, .update_threads = 1});
  auto transport = make_gloo_transport(*rendezvous, device);
  const auto group = make_process_group(std::move(rendezvous), std::move(transport), device);
  const MemoryBlock block = device.allocate(3 * part, "block");
  const Stream stream = device.make_stream("group");
  const std::vector<ByteRange> parts = testing::parts_of({part, part, part});
  group->all_gather(bytes_of(block), parts, stream);
  started();
  while (true) group->all_gather(bytes_of(block), parts, stream);
}

class AKilledGlooRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Number, AKilledGlooRank, ::testing::Values(0, 1, 2),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_P(AKilledGlooRank, IsNamedToTheOthersAtOnce) {
  RanksInProcesses ranks(3, {}, gather_for_ever);
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(GetParam(), SIGKILL);
  for (int rank = 0; rank < 3; ++rank) {
    if (rank == GetParam()) continue;
    EXPECT_THAT(ranks.told(rank), AllOf(StartsWith("rank " + std::to_string(GetParam()) + " at "),
                                        HasSubstr(" is lost: its connection ended")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 8s);
}

TEST(AStoppedGlooRank, IsNamedToTheOthers) {
  const auto change = [](RendezvousOptions& options) { options.silence_seconds = 1.0; };
  RanksInProcesses ranks(3, change, gather_for_ever);
  const auto begin = std::chrono::steady_clock::now();
  ranks.signal(1, SIGSTOP);
  for (const int rank : {0, 2}) {
    EXPECT_THAT(ranks.told(rank), AllOf(StartsWith("rank 1 at "), HasSubstr(" is lost: no sign of life")));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 12s);
}

/// Ports of the loopback address at which this process listens.
std::set<int> listening_ports() {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    own.insert(std::filesystem::read_symlink(entry.path(), ignored).string());
  }
  std::set<int> ports;
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream words(line);
    std::vector<std::string> columns{std::istream_iterator<std::string>(words), {}};
    const bool listens = columns.size() > 9 && columns[3] == "0A" && columns[1].starts_with("0100007F:");
    if (listens && own.contains("socket:[" + columns[9] + "]"))
      ports.insert(std::stoi(columns[1].substr(9), nullptr, 16));
  }
  return ports;
}

/// Gloo takes whoever comes first; the ranks notice, and connect anew.
TEST(GlooGroup, StartsWhereStrangersComeFirst) {
  std::atomic<bool> ended{false};
  std::atomic<int> taken{0};
  std::thread stranger([&] {
    boost::asio::io_context context;
    std::set<int> seen;
    while (taken < 3 && !ended) {
      for (const int port : listening_ports()) {
        if (!seen.insert(port).second) continue;
        boost::asio::ip::tcp::socket socket(context);
        boost::system::error_code error;
        socket.connect({boost::asio::ip::address_v4::loopback(), static_cast<unsigned short>(port)}, error);
        if (!error) boost::asio::write(socket, boost::asio::buffer(std::string(200, '\xA5')), error);
        if (!error && ++taken == 3) break;
      }
    }
  });
  for (int launch = 0; launch < 10 && taken < 3; ++launch) {
    testing::Ranks ranks(3);
    const auto errors = ranks.run([&](int rank) {
      const MemoryBlock block = ranks.device(rank).allocate(30, "block");
      const std::vector<std::byte> values = testing::values_of(rank, 0, 30);
      ranks.write(rank, block.data(), values);
      ranks.group(rank).all_gather(bytes_of(block), testing::parts_of({10, 10, 10}), ranks.stream(rank));
      const std::vector<std::byte> seen = ranks.read(rank, block.data(), 30);
      for (int i = 0; i < 30; ++i) {
        const auto at = static_cast<std::size_t>(i);
        EXPECT_EQ(seen[at], testing::value_of(i / 10, 0, at));
      }
    });
    EXPECT_THAT(errors, Each(nullptr));
  }
  ended = true;
  stranger.join();
  if (taken == 0) GTEST_SKIP() << "on this machine now, ranks were connected before a stranger found a port";
}

/// The third has come to the call, but has nothing to give.
TEST(GlooGroup, ARankWhoseStreamStandsStillEndsTheCallsOfAll) {
  std::atomic<bool> open{false};
  const auto faults = std::make_shared<HostFaults>();
  faults->before_task = [&](std::string_view, std::string_view task) {
    while (task == "stuck" && !open) std::this_thread::sleep_for(100us);
  };
  std::vector<std::unique_ptr<HostDevice>> devices;
  std::vector<Device*> views;
  for (int rank = 0; rank < 3; ++rank) {
    HostDeviceOptions options = small();
    options.faults = faults;
    views.push_back(devices.emplace_back(std::make_unique<HostDevice>(options)).get());
  }
  auto groups = testing::connect(views, 0.5);
  std::vector<std::exception_ptr> errors(3);
  std::vector<std::thread> threads;
  std::atomic<int> ended{0};
  for (std::size_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const MemoryBlock block = devices[rank]->allocate(30, "block");
      const Stream stream = devices[rank]->make_stream("group");
      if (rank == 2) devices[rank]->enqueue(stream, "stuck", [] {});
      try {
        groups[rank]->all_gather(bytes_of(block), testing::parts_of({10, 10, 10}), stream);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
      if (++ended == 3) open = true;
      while (!open) std::this_thread::sleep_for(100us);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(errors, Each(::testing::ResultOf(message_of, HasSubstr("waiting for all_gather"))));
}

}  // namespace
}  // namespace tandem
