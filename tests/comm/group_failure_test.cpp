// Failures in a group: no rank waits for ever, and all ranks are told the same error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "core/base/stall.hpp"
#include "tests/comm/group_testing.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::is_a;
using ::testing::IsEmpty;
using testing::message_of;
using testing::parts_of;
using ::testing::ResultOf;
using ::testing::ThrowsMessage;
using testing::values_of;

class GroupFailure : public ::testing::Test {
 protected:
  ~GroupFailure() override { EXPECT_THAT(testing::complaints_of_devices(), IsEmpty()); }
};

auto says(const std::string& text) { return ResultOf(message_of, HasSubstr(text)); }

/// Calls of each kind that one rank makes, with memory of its own.
struct Caller {
  Caller(testing::Ranks& of, int of_rank)
      : ranks(of), rank(of_rank), parts(parts_of(std::vector<std::size_t>(static_cast<std::size_t>(of.count()), 10))) {
    const std::size_t bytes = 10 * static_cast<std::size_t>(of.count());
    block = of.device(rank).allocate(bytes, "block");
    to = of.device(rank).allocate(bytes, "to");
  }
  void all_gather() { ranks.group(rank).all_gather(bytes_of(block), parts, ranks.stream(rank)); }
  void all_to_all() { ranks.group(rank).all_to_all(bytes_of(block), parts, bytes_of(to), ranks.stream(rank)); }
  void broadcast(Channel channel = Channel::engine, int root = 0, std::size_t bytes = 10) {
    std::vector<std::byte> values(bytes);
    ranks.group(rank).broadcast(channel, root, values);
  }
  void send(int sender, int receiver, std::size_t bytes = 10) {
    std::vector<std::byte> values(bytes);
    ranks.group(rank).send(Channel::save, sender, receiver, values);
  }
  static std::byte* bytes_of(const MemoryBlock& block) { return static_cast<std::byte*>(block.data()); }

  testing::Ranks& ranks;
  int rank;
  std::vector<ByteRange> parts;
  MemoryBlock block, to;
};

/// Checks that every call of every rank throws an error with this text from now on.
template <class Kind>
void expect_ended(testing::Ranks& ranks, const std::string& text) {
  for (int rank = 0; rank < ranks.count(); ++rank) {
    Caller caller(ranks, rank);
    EXPECT_THAT([&] { caller.all_gather(); }, ThrowsMessage<Kind>(HasSubstr(text))) << rank;
    EXPECT_THAT([&] { caller.all_to_all(); }, ThrowsMessage<Kind>(HasSubstr(text))) << rank;
    EXPECT_THAT([&] { caller.broadcast(Channel::engine); }, ThrowsMessage<Kind>(HasSubstr(text))) << rank;
    EXPECT_THAT([&] { caller.broadcast(Channel::save); }, ThrowsMessage<Kind>(HasSubstr(text))) << rank;
    EXPECT_THAT([&] { caller.send(0, 0); }, ThrowsMessage<Kind>(HasSubstr(text))) << rank;
    ranks.device(rank).synchronize(ranks.stream(rank));
  }
}

TEST_F(GroupFailure, OfOneRankWakesAll) {
  TANDEM_RANKS_OR_SKIP(ranks, 5);
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    if (rank == 0) caller.all_gather();
    if (rank == 1) caller.all_to_all();
    if (rank == 2) caller.broadcast(Channel::engine);
    if (rank == 3) caller.broadcast(Channel::save);
    if (rank != 4) return;
    std::this_thread::sleep_for(30ms);
    ranks.group(rank).fail(std::make_exception_ptr(DeviceError("cuda:0: device lost", "an error", "start again")));
    ranks.group(rank).fail(std::make_exception_ptr(DeviceError("another")));
    caller.all_gather();
  });
  ASSERT_THAT(errors, Each(says("rank 4 failed: cuda:0: device lost: an error; start again")));
  EXPECT_THAT(errors, Each(ResultOf(is_a<DeviceError>, true)));
  ranks.group(0).fail(std::make_exception_ptr(DeviceError("a later one")));
  expect_ended<DeviceError>(ranks, "rank 4 failed: cuda:0: device lost");
}

/// A waiting rank also looks from time to time, so that all the rest would be told, but late.
TEST_F(GroupFailure, WakesAtOnce) {
  auto quickest = std::chrono::steady_clock::duration::max();
  for (int i = 0; i < 5; ++i) {
    TANDEM_RANKS_OR_SKIP(ranks, 3);
    std::chrono::steady_clock::time_point failed;
    const auto errors = ranks.run([&](int rank) {
      Caller caller(ranks, rank);
      if (rank == 0) caller.all_gather();
      if (rank == 1) caller.broadcast(Channel::save);
      if (rank != 2) return;
      std::this_thread::sleep_for(20ms);
      failed = std::chrono::steady_clock::now();
      ranks.group(2).fail(nullptr);
    });
    quickest = std::min(quickest, std::chrono::steady_clock::now() - failed);
    EXPECT_THAT(errors[0], says("rank 2 failed"));
    EXPECT_THAT(errors[1], says("rank 2 failed"));
  }
  EXPECT_LT(quickest, watch_tick / 2);
}

TEST_F(GroupFailure, OfAnyClassHasAText) {
  for (const std::exception_ptr& error : {std::make_exception_ptr(42), std::exception_ptr()}) {
    TANDEM_RANKS_OR_SKIP(ranks, 2);
    ranks.group(1).fail(error);
    expect_ended<DeviceError>(ranks, "rank 1 failed: unknown error");
  }
  TANDEM_RANKS_OR_SKIP(ranks, 2);
  ranks.group(1).fail(std::make_exception_ptr(std::runtime_error("a library's")));
  expect_ended<DeviceError>(ranks, "rank 1 failed: a library's");
}

TEST_F(GroupFailure, EndsAGroupOfOneToo) {
  TANDEM_RANKS_OR_SKIP(ranks, 1);
  ranks.group(0).fail(std::make_exception_ptr(DeviceError("its own")));
  expect_ended<DeviceError>(ranks, "rank 0 failed: its own");
}

TEST_F(GroupFailure, IsWhatACallThrowsByItself) {
  TANDEM_RANKS_OR_SKIP(ranks, 3);
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    if (rank == 1) return ranks.group(1).all_gather(Caller::bytes_of(caller.block), caller.parts, ranks.stream(0));
    caller.all_gather();
  });
  EXPECT_TRUE(is_a<MisuseError>(errors[1]));
  EXPECT_THAT(errors[0], says("rank 1 failed: stream 'group' belongs to another"));
  EXPECT_THAT(errors[2], says("rank 1 failed: stream 'group' belongs to another"));
}

TEST_F(GroupFailure, IsABufferThatIsTooSmallForTheOthers) {
  TANDEM_RANKS_OR_SKIP(ranks, 3);
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    if (rank == 1) caller.block = ranks.device(1).allocate(19, "too small");
    caller.all_gather();
  });
  // Whoever comes to it first is named, and gets its own error.
  EXPECT_THAT(errors, Each(says("copy ")));
  for (int rank = 0; rank < 3; ++rank) EXPECT_NO_THROW(ranks.device(rank).synchronize(ranks.stream(rank))) << rank;
}

// -- leaving ------------------------------------------------------------------------------------------

TEST_F(GroupFailure, IsARankThatLeavesWhileOthersWait) {
  TANDEM_RANKS_OR_SKIP(ranks, 3);
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    if (rank == 0) caller.all_gather();
    if (rank == 1) caller.broadcast();
    if (rank != 2) return;
    std::this_thread::sleep_for(30ms);
    ranks.leave(2);
  });
  EXPECT_THAT(errors[0], says("rank 2 has left"));
  EXPECT_THAT(errors[1], says("rank 2 has left"));
  EXPECT_THAT([&] { Caller(ranks, 0).all_to_all(); }, ThrowsMessage<DeviceError>(HasSubstr("rank 2 has left")));
}

TEST_F(GroupFailure, IsNotARankThatLeavesAfterTheLastCall) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    TANDEM_RANKS_OR_SKIP(ranks, 3, seed);
    const auto errors = ranks.run([&](int rank) {
      Caller caller(ranks, rank);
      caller.all_gather();
      caller.broadcast(Channel::save);
      ranks.leave(rank);
      ranks.device(rank).synchronize(ranks.stream(rank));
    });
    ASSERT_THAT(errors, Each(nullptr)) << message_of(errors[0]) << message_of(errors[1]) << message_of(errors[2]);
  }
}

// -- stalls -------------------------------------------------------------------------------------------

std::atomic<int>& stalls_told() {
  static std::atomic<int> count{0};
  return count;
}

TEST_F(GroupFailure, IsARankThatDoesNotCome) {
  TANDEM_RANKS_OR_SKIP(ranks, 4, 1, 0.3);
  stalls_told() = 0;
  set_stall_handler([](const StalledError&) { ++stalls_told(); });
  std::atomic<int> untold{0};
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    if (rank == 0 || rank == 2) {
      try {
        caller.all_to_all();
      } catch (...) {
        if (stalls_told() == 0) ++untold;
        throw;
      }
    }
  });
  set_stall_handler(nullptr);
  EXPECT_EQ(stalls_told(), 1);
  EXPECT_EQ(untold, 0) << "told before anybody gets the error";
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(is_a<StalledError>(errors[static_cast<std::size_t>(rank)]));
    EXPECT_THAT(errors[static_cast<std::size_t>(rank)],
                AllOf(says("waiting for all_to_all"), says("rank 1, rank 3 does no more")));
  }
  expect_ended<StalledError>(ranks, "rank 1, rank 3 does no more");
}

TEST_F(GroupFailure, IsNotARankThatComesWhileOthersCome) {
  TANDEM_RANKS_OR_SKIP(ranks, 3, 1, 2.0);
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    std::this_thread::sleep_for(rank * 1300ms);
    caller.broadcast(Channel::save);
  });
  EXPECT_THAT(errors, Each(nullptr));
}

// -- calls that do not agree --------------------------------------------------------------------------

struct Disagreement {
  std::string name;
  std::function<void(Caller&)> call;        ///< call of ranks 0 and 2
  std::function<void(Caller&)> other_call;  ///< call of rank 1
  std::string says;
};

class Disagreeing : public ::testing::TestWithParam<Disagreement> {};

TEST_P(Disagreeing, CallsAreMisuseOnEveryRank) {
  TANDEM_RANKS_OR_SKIP(ranks, 3);
  const auto errors = ranks.run([&](int rank) {
    Caller caller(ranks, rank);
    (rank == 1 ? GetParam().other_call : GetParam().call)(caller);
  });
  ASSERT_THAT(errors, Each(ResultOf(is_a<MisuseError>, true)));
  EXPECT_THAT(errors, Each(AllOf(says("rank 0 calls"), says(GetParam().says))));
  EXPECT_THAT(errors, Each(ResultOf(message_of, ::testing::Not(HasSubstr("rank 2 calls")))));
  expect_ended<MisuseError>(ranks, GetParam().says);
}

INSTANTIATE_TEST_SUITE_P(
    Of, Disagreeing,
    ::testing::Values(Disagreement{"Kinds", [](Caller& c) { c.all_gather(); }, [](Caller& c) { c.all_to_all(); },
                                   "rank 1 calls all_to_all of bytes [0, 10) [10, 20) [20, 30)"},
                      Disagreement{"Parts", [](Caller& c) { c.all_gather(); },
                                   [](Caller& c) {
                                     c.parts[1].end = 19;
                                     c.all_gather();
                                   },
                                   "rank 1 calls all_gather of bytes [0, 10) [10, 19) [20, 30)"},
                      Disagreement{"Roots", [](Caller& c) { c.broadcast(Channel::save, 0); },
                                   [](Caller& c) { c.broadcast(Channel::save, 1); },
                                   "rank 1 calls broadcast of 10 bytes from rank 1"},
                      Disagreement{"Sizes", [](Caller& c) { c.broadcast(Channel::engine, 2, 10); },
                                   [](Caller& c) { c.broadcast(Channel::engine, 2, 9); },
                                   "rank 1 calls broadcast of 9 bytes from rank 2"},
                      Disagreement{"Receivers", [](Caller& c) { c.send(2, 0); }, [](Caller& c) { c.send(2, 1); },
                                   "rank 1 calls send of 10 bytes from rank 2 to rank 1"},
                      Disagreement{"OneReceiverAndAll", [](Caller& c) { c.send(2, 0); },
                                   [](Caller& c) { c.broadcast(Channel::save, 2); },
                                   "rank 1 calls broadcast of 10 bytes from rank 2"}),
    [](const auto& each) { return each.param.name; });

TEST_F(GroupFailure, IsASecondCallOfARankThatIsInOne) {
  TANDEM_RANKS_OR_SKIP(ranks, 2);
  std::exception_ptr first;
  std::thread waits([&] {
    try {
      std::vector<std::byte> values(10);
      ranks.group(0).broadcast(Channel::save, 0, values);
    } catch (...) {
      first = std::current_exception();
    }
  });
  std::this_thread::sleep_for(30ms);
  EXPECT_THAT([&] { Caller(ranks, 0).broadcast(Channel::save); },
              ThrowsMessage<MisuseError>(HasSubstr("rank 0 calls broadcast while it is in another call")));
  waits.join();
  EXPECT_THAT(first, says("rank 0 failed: rank 0 calls broadcast"));
}

TEST_F(GroupFailure, IsWhatMakesNoSense) {
  using Change = std::function<void(std::vector<ByteRange>&)>;
  const std::vector<std::pair<std::string, Change>> changes = {
      {"1 parts are given to a group of 2", [](auto& parts) { parts.pop_back(); }},
      {"part 1 ends before it begins", [](auto& parts) { parts[1].end = 5; }},
      {"parts 0 and 1 overlap", [](auto& parts) { parts[1].begin = 9; }}};
  for (const auto& [text, change] : changes) {
    TANDEM_RANKS_OR_SKIP(ranks, 2);
    Caller caller(ranks, 0);
    change(caller.parts);
    EXPECT_THAT([&] { caller.all_gather(); }, ThrowsMessage<MisuseError>(HasSubstr(text)));
    EXPECT_THAT([&] { Caller(ranks, 1).all_gather(); },
                ThrowsMessage<DeviceError>(HasSubstr("rank 0 failed: " + text)));
  }
  TANDEM_RANKS_OR_SKIP(ranks, 2);
  EXPECT_THAT([&] { Caller(ranks, 0).broadcast(Channel::save, 2); },
              ThrowsMessage<MisuseError>(HasSubstr("there is no rank 2 to broadcast")));
  EXPECT_THAT([&] { Caller(ranks, 0).send(-1, 0); },
              ThrowsMessage<MisuseError>(HasSubstr("there is no rank -1 to send")));
  EXPECT_THAT([&] { Caller(ranks, 0).send(0, 2); },
              ThrowsMessage<MisuseError>(HasSubstr("there is no rank 2 to send to")));
}

// -- memory -------------------------------------------------------------------------------------------

/// Whoever has thrown gives back what it has shown at once, and no other still reads it.
TEST_F(GroupFailure, AtAnyTimeLeavesNobodyReading) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    TANDEM_RANKS_OR_SKIP(ranks, 3, seed, 20.0);
    const std::vector<ByteRange> parts = parts_of({100003, 100003, 100003});
    std::thread breaker([&] {
      std::mt19937_64 random(seed);
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
      ranks.group(static_cast<int>(seed % 3)).fail(std::make_exception_ptr(DeviceError("planted")));
    });
    const auto errors = ranks.run([&](int rank) {
      std::thread talker([&] {
        try {
          for (int root = 0;; root = (root + 1) % 3) {
            std::vector<std::byte> values(100003);
            ranks.group(rank).broadcast(Channel::engine, root, values);
          }
        } catch (const DeviceError&) {
        }
      });
      const MemoryBlock block = ranks.device(rank).allocate(300009, "block");
      try {
        for (;;) ranks.group(rank).all_gather(static_cast<std::byte*>(block.data()), parts, ranks.stream(rank));
      } catch (const DeviceError&) {
        talker.join();
        // The rank waits for its own work, whose copies would fail on memory that is gone.
        ranks.device(rank).synchronize(ranks.stream(rank));
      }
    });
    breaker.join();
    for (int rank = 0; rank < 3; ++rank) EXPECT_NO_THROW(ranks.device(rank).synchronize(ranks.stream(rank)));
    ASSERT_THAT(errors, Each(nullptr)) << message_of(errors[0]) << message_of(errors[1]) << message_of(errors[2]);
  }
}

}  // namespace
}  // namespace tandem
