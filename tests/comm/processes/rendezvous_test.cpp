// Ranks find each other, agree before they start, meet, and learn of each other's end; each mistake of a launch is one
// line that names the ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <thread>

#include "core/base/error.hpp"
#include "core/base/version.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem {
namespace {

using namespace std::chrono_literals;
using boost::asio::ip::tcp;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using testing::is_a;
using testing::Joined;
using testing::launch;
using testing::launch_all;
using testing::message_of;
using ::testing::ThrowsMessage;

std::vector<std::string> messages_of(const std::vector<Joined>& ranks) {
  std::vector<std::string> messages;
  for (const Joined& each : ranks) messages.push_back(message_of(each.error));
  return messages;
}

class RendezvousOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RendezvousOf, ::testing::Values(1, 2, 5),
                         [](const auto& each) { return std::to_string(each.param); });

TEST_P(RendezvousOf, GathersAValueOfEachRankInEachMeeting) {
  const int count = GetParam();
  std::vector<Joined> ranks = launch_all(count);
  ASSERT_THAT(messages_of(ranks), Each(""));
  std::vector<std::thread> threads;
  for (Joined& each : ranks) {
    threads.emplace_back([&each, count] {
      Rendezvous& rendezvous = *each.rendezvous;
      for (int round = 0; round < 50; ++round) {
        const auto value = [&](int rank) { return std::string(static_cast<std::size_t>(rank * round * 7), 'a'); };
        const auto values = rendezvous.meet(static_cast<std::size_t>(round) % Rendezvous::meetings, "addresses",
                                            value(rendezvous.rank().index) + std::to_string(round));
        ASSERT_EQ(values.size(), static_cast<std::size_t>(count));
        for (int rank = 0; rank < count; ++rank) {
          EXPECT_EQ(values[static_cast<std::size_t>(rank)], value(rank) + std::to_string(round));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(RendezvousOf, TakesValuesUpToTheLimit) {
  const int count = GetParam();
  std::vector<Joined> ranks = launch_all(count);
  ASSERT_THAT(messages_of(ranks), Each(""));
  std::vector<std::thread> threads;
  for (Joined& each : ranks) {
    threads.emplace_back([&each] {
      const auto values = each.rendezvous->meet(0, "values", std::string(value_limit, 'x'));
      EXPECT_THAT(values, Each(std::string(value_limit, 'x')));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THROW(ranks[0].rendezvous->meet(0, "values", std::string(value_limit + 1, 'x')), MisuseError);
}

// -- mistakes of a launch -----------------------------------------------------------------------------

TEST(RendezvousStart, NamesAFactInWhichRanksDiffer) {
  const auto ranks = launch_all(4, [](RendezvousOptions& options) {
    if (options.rank.index == 2) options.facts[0].value = "0.2.0\n";
  });
  for (const Joined& each : ranks) {
    EXPECT_TRUE(is_a<UsageError>(each.error));
    EXPECT_THAT(message_of(each.error), HasSubstr("ranks differ in version: '0.1.0' (rank 0, rank 1, rank 3), '0.2.0 "
                                                  "' (rank 2); start all ranks with the same"));
  }
}

TEST(RendezvousStart, NamesAFactThatOneRankLacks) {
  const auto ranks = launch_all(2, [](RendezvousOptions& options) {
    if (options.rank.index == 0) options.facts.pop_back();
  });
  EXPECT_THAT(messages_of(ranks), Each(HasSubstr("ranks differ in model: not given (rank 0), 'tiny' (rank 1)")));
}

TEST(RendezvousStart, NamesTwoProcessesOfOneRank) {
  const auto ranks = launch(3, {1, 1});
  for (const Joined& each : ranks) EXPECT_TRUE(is_a<UsageError>(each.error));
  EXPECT_THAT(messages_of(ranks), Each(AllOf(HasSubstr("two processes are rank 1: 127.0.0.1:"), HasSubstr(" and 127."),
                                             HasSubstr("a RANK of its own"))));
}

TEST(RendezvousStart, NamesASecondRankZero) {
  std::vector<Joined> second(1);
  const auto ranks = launch_all(2, {}, [&](int port) {
    RendezvousOptions options = testing::options_for(0, 2);
    options.port = port;
    second[0] = testing::join(options);
  });
  EXPECT_THAT(messages_of(ranks), Each(""));
  EXPECT_TRUE(is_a<DeviceError>(second[0].error));
  EXPECT_THAT(messages_of(second), Each(AllOf(HasSubstr("rank 0 cannot listen at 127.0.0.1:"),
                                              HasSubstr("Address already in use"), HasSubstr("MASTER_PORT"))));
}

TEST(RendezvousStart, NamesAnotherNumberOfRanks) {
  const auto ranks = launch_all(2, [](RendezvousOptions& options) {
    if (options.rank.index == 1) options.rank.count = 3;
  });
  EXPECT_THAT(messages_of(ranks), Each(HasSubstr("says that there are 3, and rank 0 that there are 2")));
}

TEST(RendezvousStart, NamesRanksThatNeverCame) {
  const auto ranks = launch(4, {2}, [](RendezvousOptions& options) { options.limits.join_seconds = 0.5; });
  EXPECT_THAT(messages_of(ranks), Each(HasSubstr("rank 1, rank 3 did not come within 0 s; start one process")));
  EXPECT_TRUE(is_a<DeviceError>(ranks[0].error));
}

TEST(RendezvousStart, RefusesAnotherSecretWithoutHarm) {
  std::vector<Joined> stranger(1);
  const auto ranks = launch_all(2, {}, [&](int port) {
    RendezvousOptions options = testing::options_for(1, 2);
    options.port = port;
    options.secret = "another";
    stranger[0] = testing::join(options);
  });
  EXPECT_THAT(messages_of(ranks), Each(""));
  EXPECT_TRUE(is_a<UsageError>(stranger[0].error));
  EXPECT_THAT(messages_of(stranger), Each(HasSubstr("its secret differs from rank 0's; start all ranks of a")));
}

TEST(RendezvousStart, CountsRefusalsWhereARankNeverCame) {
  const auto ranks = launch_all(2, [&](RendezvousOptions& options) {
    options.limits.join_seconds = 1.0;
    if (options.rank.index == 1) options.secret = "another";
  });
  EXPECT_THAT(message_of(ranks[0].error), HasSubstr("rank 1 did not come within 1 s (1 connection had another secret"));
}

TEST(RendezvousStart, NeedsASecret) {
  RendezvousOptions options = testing::options_for(0, 2);
  options.secret = "";
  EXPECT_THAT(message_of(testing::join(options).error), HasSubstr("TANDEM_TOKEN"));
}

TEST(RendezvousStart, NamesAnAddressThatIsNotThere) {
  RendezvousOptions host = testing::options_for(0, 2);
  host.host = "192.0.2.1";  // address of the block reserved for documentation: no machine has it
  const Joined nowhere = testing::join(host);
  EXPECT_TRUE(is_a<UsageError>(nowhere.error));
  EXPECT_THAT(message_of(nowhere.error),
              HasSubstr("rank 0 cannot listen at 192.0.2.1:0: no interface of this machine has that address; set "
                        "MASTER_ADDR to"));
  RendezvousOptions member = testing::options_for(1, 2);
  member.limits.join_seconds = 0.5;
  member.port = 1;
  EXPECT_THAT(message_of(testing::join(member).error),
              HasSubstr("rank 1 cannot reach rank 0 at 127.0.0.1:1 within 0 s: Connection refused; start rank 0"));
}

/// Takes connections and answers each with `reply`.
class OtherProgram {
 public:
  explicit OtherProgram(std::string reply) : reply_(std::move(reply)) {
    thread_ = std::thread([this] {
      while (true) {
        tcp::socket socket(context_);
        boost::system::error_code error;
        acceptor_.accept(socket, error);
        if (error || ended_) return;
        boost::asio::write(socket, boost::asio::buffer(reply_), error);
      }
    });
  }
  ~OtherProgram() {
    ended_ = true;
    boost::system::error_code ignored;
    tcp::socket(context_).connect(acceptor_.local_endpoint(), ignored);
    thread_.join();
  }
  int port() const { return acceptor_.local_endpoint().port(); }

 private:
  const std::string reply_;
  std::atomic<bool> ended_{false};
  boost::asio::io_context context_;
  tcp::acceptor acceptor_{context_, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0)};
  std::thread thread_;
};

TEST(RendezvousStart, DoesNotTakeAnotherProgramForRankZero) {
  const Message challenge{.kind = MessageKind::challenge, .fields = {std::string(32, 'n')}};
  const Message welcome{.kind = MessageKind::welcome, .fields = {std::string(32, 'p')}};
  for (const auto& [reply, text] : std::vector<std::pair<std::string, std::string>>{
           {"HTTP/1.1 400 Bad Request\r\n\r\n", "it sent what is no message"},
           {encode({.kind = MessageKind::start}), "another program answers there"},
           {encode(challenge) + encode(welcome), "does not know the secret of rank 1"},
           {encode(welcome), "does not know the secret of rank 1"},
           {encode({.kind = MessageKind::refused, .number = 1}), "differ in version: another (rank 0), '"},
           {encode({.kind = MessageKind::refused, .number = 1, .fields = {"77", "9.8.7\n"}}),
            "differ in version: '9.8.7 ' with messages 77 (rank 0), '" + std::string(version) + "' with messages " +
                std::to_string(wire_version) + " (rank 1); install one version"}}) {
    OtherProgram other(reply);
    RendezvousOptions options = testing::options_for(1, 2);
    options.port = other.port();
    options.limits.join_seconds = 0.3;
    EXPECT_THAT(message_of(testing::join(options).error), HasSubstr(text));
  }
}

// -- the end of a rank --------------------------------------------------------------------------------

/// The error by which a rank that waits in a meeting ends, and how soon.
struct Told {
  std::string message;
  std::chrono::duration<double> after{};
};

Told told_in_meeting(Rendezvous& rendezvous) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    rendezvous.meet(Rendezvous::of_others, "values", "");
  } catch (const std::exception& error) {
    return {error.what(), std::chrono::steady_clock::now() - begin};
  }
  return {"nothing", {}};
}

TEST(RendezvousEnd, OfOneRankIsToldToAllThatWait) {
  auto ranks = launch_all(3);
  ASSERT_THAT(messages_of(ranks), Each(""));
  std::vector<Told> told(2);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] { told[rank] = told_in_meeting(*ranks[rank].rendezvous); });
  }
  std::this_thread::sleep_for(30ms);
  ranks[2].rendezvous->fail(std::make_exception_ptr(DeviceError("cuda:0: device lost")));
  for (std::thread& thread : threads) thread.join();
  for (const Told& each : told) {
    EXPECT_EQ(each.message, "rank 2 failed: cuda:0: device lost");
    EXPECT_LT(each.after, 2s);
  }
  EXPECT_THAT([&] { ranks[2].rendezvous->meet(0, "values", ""); },
              ThrowsMessage<PeerError>(HasSubstr("rank 2 failed: cuda:0")));
}

TEST(RendezvousEnd, CallsWhoeverMovesBytesByOtherMeans) {
  for (const bool leaves : {false, true}) {
    auto ranks = launch_all(2);
    ASSERT_THAT(messages_of(ranks), Each(""));
    std::atomic<int> stopped{0};
    ranks[0].rendezvous->when_broken([&] { ++stopped; });
    if (leaves) {
      ranks[1].rendezvous->leave();
    } else {
      ranks[1].rendezvous->fail(nullptr);
    }
    EXPECT_THAT(told_in_meeting(*ranks[0].rendezvous).message,
                leaves ? "rank 1 has left" : "rank 1 failed: unknown error");
    EXPECT_EQ(stopped, leaves ? 0 : 1) << "bytes of calls that all have made still move";
  }
}

TEST(RendezvousEnd, OfRankZeroIsToldToo) {
  for (const bool fails : {true, false}) {
    auto ranks = launch_all(3);
    ASSERT_THAT(messages_of(ranks), Each(""));
    std::thread ending([&] {
      std::this_thread::sleep_for(20ms);
      if (fails) ranks[0].rendezvous->fail(std::make_exception_ptr(DeviceError("no memory")));
      ranks[0].rendezvous.reset();
    });
    for (const std::size_t rank : {1U, 2U}) {
      EXPECT_EQ(told_in_meeting(*ranks[rank].rendezvous).message,
                fails ? "rank 0 failed: no memory" : "rank 0 has left");
    }
    ending.join();
  }
}

TEST(RendezvousEnd, IsSoonOverWhateverTheOrder) {
  for (const std::vector<std::size_t>& order : std::vector<std::vector<std::size_t>>{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}}) {
    auto ranks = launch_all(3);
    ASSERT_THAT(messages_of(ranks), Each(""));
    const auto begin = std::chrono::steady_clock::now();
    for (const std::size_t rank : order) ranks[rank].rendezvous.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 1500ms);
  }
}

TEST(RendezvousEnd, NamesWhoDoesNotComeToAMeeting) {
  auto ranks = launch_all(3, [](RendezvousOptions& options) { options.limits.stall_seconds = 0.3; });
  ASSERT_THAT(messages_of(ranks), Each(""));
  EXPECT_THAT([&] { ranks[1].rendezvous->meet(0, "values of all", ""); },
              ThrowsMessage<StalledError>(AllOf(HasSubstr("waiting for values of the group made no progress"),
                                                HasSubstr("rank 0, rank 2 does no more"))));
  EXPECT_THAT(message_of(ranks[0].rendezvous->failure()), HasSubstr("rank 0, rank 2 does no more"));
}

TEST(RendezvousEnd, IsMisuseOnAllWhereCallsDiffer) {
  auto ranks = launch_all(2);
  ASSERT_THAT(messages_of(ranks), Each(""));
  std::thread other([&] {
    EXPECT_THAT([&] { ranks[1].rendezvous->meet(0, "values of b", ""); },
                ThrowsMessage<MisuseError>(HasSubstr("rank 0 calls values of a, rank 1 calls values of b")));
  });
  EXPECT_THAT([&] { ranks[0].rendezvous->meet(0, "values of a", ""); },
              ThrowsMessage<MisuseError>(HasSubstr("rank 1 calls values of b")));
  other.join();
}

}  // namespace
}  // namespace tandem
