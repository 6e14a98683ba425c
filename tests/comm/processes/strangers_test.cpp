// Processes that do not know the secret of a launch do it no harm, whatever they send and however many they are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <chrono>
#include <deque>
#include <fstream>
#include <random>
#include <thread>

#include "comm/door.hpp"
#include "comm/proof.hpp"
#include "core/base/version.hpp"
#include "tests/comm/group_testing.hpp"
#include "tests/comm/processes/launch.hpp"

namespace tandem {
namespace {

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TANDEM_ADDRESS_SANITIZER
#endif
#endif
/// Whether the allocator keeps what is freed for a while, so that resident memory tells nothing of what is held.
#if defined(TANDEM_ADDRESS_SANITIZER) || defined(__SANITIZE_ADDRESS__)
constexpr bool keeps_what_is_freed = true;
#else
constexpr bool keeps_what_is_freed = false;
#endif

using boost::asio::ip::tcp;
using boost::system::error_code;
using testing::Joined;
using testing::launch_all;
using testing::message_of;

/// Bytes of memory of this process that are present.
std::size_t resident_bytes() {
  std::size_t total = 0;
  std::size_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// Connections to a port by which bytes of all kinds are sent.
class Strangers {
 public:
  Strangers(int port, std::uint64_t seed)
      : to_(boost::asio::ip::address_v4::loopback(), static_cast<unsigned short>(port)), random_(seed) {}

  /// Opens connections that say nothing, and holds them.
  void idle(int count) {
    for (int i = 0; i < count; ++i) connect(idle_.emplace_back(context_));
  }
  /// Sends so many messages, each over a connection of its own, which is closed at once.
  void send(int count) {
    for (int i = 0; i < count; ++i) {
      tcp::socket socket(context_);
      if (!connect(socket)) continue;
      error_code ignored;
      socket.non_blocking(true, ignored);
      socket.write_some(boost::asio::buffer(bytes(i)), ignored);
    }
  }
  int refused() const { return refused_; }

 private:
  bool connect(tcp::socket& socket) {
    error_code error;
    socket.connect(to_, error);
    if (error) ++refused_;
    return !error;
  }
  std::string noise(std::size_t size) {
    std::string text(size, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }
  /// Noise, a message that is cut, one that is too long, one that is out of place, a proof without the secret.
  std::string bytes(int i) {
    const Message hello{
        .kind = MessageKind::hello, .number = wire_version, .fields = {std::string(wire_magic), noise(nonce_bytes)}};
    const std::string good = encode(hello);
    switch (i % 6) {
      case 0:
        return noise(1 + random_() % 2000);
      case 1:
        return good.substr(0, random_() % good.size());
      case 2:
        return std::string("\xFF\xFF\xFF\xFF", 4) + noise(1000);
      case 3:
        return encode({.kind = MessageKind::call, .fields = {"values", noise(20)}});
      case 4:
        return good + encode({.kind = MessageKind::proof, .number = 1, .fields = {"3", noise(proof_bytes)}});
      default:
        return good + good;
    }
  }

  const tcp::endpoint to_;
  std::mt19937_64 random_;
  boost::asio::io_context context_;
  std::deque<tcp::socket> idle_;
  int refused_ = 0;
};

TEST(Strangers, DoNoHarmBeforeDuringAndAfterTheStart) {
  std::unique_ptr<Strangers> strangers;
  std::thread during;
  std::size_t before_bytes = 0;
  std::size_t while_bytes = 0;
  auto ranks = launch_all(3, {}, [&](int port) {
    strangers = std::make_unique<Strangers>(port, 1);
    before_bytes = resident_bytes();
    strangers->idle(200);
    strangers->send(4000);
    while_bytes = resident_bytes();
    during = std::thread([&] {
      strangers->idle(200);
      strangers->send(4000);
    });
  });
  during.join();
  for (const Joined& each : ranks) ASSERT_EQ(message_of(each.error), "");
  const int refused = strangers->refused();
  strangers->idle(200);
  strangers->send(2000);
  EXPECT_EQ(strangers->refused(), refused + 2200) << "nothing listens once all are there";
  std::vector<std::thread> threads;
  for (Joined& each : ranks) {
    threads.emplace_back([&each] { EXPECT_EQ(each.rendezvous->meet(0, "values", "x").size(), 3U); });
  }
  for (std::thread& thread : threads) thread.join();
  if (!keeps_what_is_freed) {
    EXPECT_LT(while_bytes, before_bytes + (std::size_t{16} << 20));
  }
}

/// Text of the error that rank 0 gets where the other rank, which knows the secret, sends these bytes once it is
/// welcome.
std::string told_after(const std::string& bytes) {
  std::thread other;
  const std::string nonce = random_nonce();
  const auto join_and_send = [&](int port) {
    boost::asio::io_context context;
    tcp::socket socket(context);
    socket.connect({boost::asio::ip::address_v4::loopback(), static_cast<unsigned short>(port)});
    const auto say = [&](const Message& message) { boost::asio::write(socket, boost::asio::buffer(encode(message))); };
    const auto hear = [&](std::size_t field_bytes) {
      std::string answer(length_bytes + 9 + 4 + field_bytes, '\0');
      boost::asio::read(socket, boost::asio::buffer(answer));
      return decode(answer.substr(length_bytes)).value().fields.at(0);
    };
    say({.kind = MessageKind::hello, .number = wire_version, .fields = {std::string(wire_magic), nonce}});
    const Nonces nonces{hear(nonce_bytes), nonce};
    const std::string proof = proof_of(testing::options_for(1, 2).secret, nonces, 1, 2);
    say({.kind = MessageKind::proof, .number = 1, .fields = {"2", proof}});
    hear(proof_bytes);
    error_code ignored;  // rank 0 may close before all is sent
    boost::asio::write(socket, boost::asio::buffer(bytes), ignored);
    socket.shutdown(tcp::socket::shutdown_send, ignored);
    std::string rest;
    boost::asio::read(socket, boost::asio::dynamic_buffer(rest), ignored);
  };
  const auto ranks = testing::launch(2, {}, {}, [&](int port) { other = std::thread(join_and_send, port); });
  std::exception_ptr error = ranks[0].error;
  try {  // all ranks were there for a moment
    if (!error) ranks[0].rendezvous->meet(0, "values", "");
  } catch (...) {
    error = std::current_exception();
  }
  other.join();
  return message_of(error);
}

TEST(ARankWithTheSecret, IsNamedWhereItSendsNoMessages) {
  const std::string facts = encode({.kind = MessageKind::facts, .fields = {"version", "0.1.0", "model", "tiny"}});
  const std::string noise(200, '\x7F');
  const std::size_t before = resident_bytes();
  for (const std::string& bytes :
       {std::string("\xFF\xFF\xFF\xFF", 4) + noise, facts + noise, facts.substr(0, facts.size() / 2), std::string(),
        encode({.kind = MessageKind::call, .fields = {"values", ""}}), facts + facts}) {
    EXPECT_THAT(told_after(bytes), ::testing::MatchesRegex("rank 1 at 127\\.0\\.0\\.1:[0-9]+ is lost: .*"));
  }
  if (!keeps_what_is_freed) {
    EXPECT_LT(resident_bytes(), before + (std::size_t{16} << 20));
  }
}

/// Bytes that the other side sends until it closes.
std::string answer_of(tcp::socket& socket) {
  std::string text;
  error_code error;
  boost::asio::read(socket, boost::asio::dynamic_buffer(text), error);
  return text;
}

class AtTheDoor : public ::testing::Test {
 protected:
  AtTheDoor() {
    door_.open(
        "secret",
        [this](int rank, int, const std::shared_ptr<Link>& link) {
          ranks_.push_back(rank);
          link->close();
        },
        [this](const std::string& line) { lines_.push_back(line); });
    thread_ = std::thread([this] { context_.run(); });
  }
  ~AtTheDoor() override { end(); }
  /// Closes the door: what it has told is complete from then on.
  void end() {
    if (!thread_.joinable()) return;
    boost::asio::post(context_, [this] { door_.close(); });
    thread_.join();
  }
  tcp::socket connected() {
    tcp::socket socket(own_);
    socket.connect({boost::asio::ip::address_v4::loopback(), static_cast<unsigned short>(door_.port())});
    return socket;
  }

  boost::asio::io_context context_;
  boost::asio::io_context own_;
  Door door_{context_, "127.0.0.1", 0};
  std::vector<int> ranks_;
  std::vector<std::string> lines_;
  std::thread thread_;
};

TEST_F(AtTheDoor, TheOldestGiveWayToNewcomers) {
  std::deque<tcp::socket> sockets;
  for (std::size_t i = 0; i < Door::strangers + 1; ++i) sockets.push_back(connected());
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(answer_of(sockets[0]), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::duration<double>(Door::seconds / 2));
  sockets[1].non_blocking(true);
  char byte = 0;
  error_code error;
  sockets[1].read_some(boost::asio::buffer(&byte, 1), error);
  EXPECT_EQ(error, boost::asio::error::would_block);
}

/// Versions come as other processes say them: they must not break the line.
TEST_F(AtTheDoor, AnotherVersionIsToldToBothOnce) {
  for (const std::vector<std::string>& its : std::vector<std::vector<std::string>>{{"9.8.7\n"}, {}, {"9.8.7"}}) {
    Message hello{.kind = MessageKind::hello, .number = 77, .fields = {std::string(wire_magic), random_nonce()}};
    hello.fields.insert(hello.fields.end(), its.begin(), its.end());
    tcp::socket socket = connected();
    boost::asio::write(socket, boost::asio::buffer(encode(hello)));
    socket.shutdown(tcp::socket::shutdown_send);
    EXPECT_EQ(answer_of(socket), encode({.kind = MessageKind::refused,
                                         .number = 1,
                                         .fields = {std::to_string(wire_version), std::string(version)}}));
  }
  end();
  ASSERT_EQ(lines_.size(), 1U);
  EXPECT_THAT(lines_[0],
              ::testing::HasSubstr("was refused: it is of version '9.8.7 ' with messages 77, and rank 0 of '" +
                                   std::string(version) + "' with messages "));
}

TEST_F(AtTheDoor, AProofIsGoodForOneConnection) {
  const std::string nonce = random_nonce();
  const auto hello = [&](tcp::socket& socket) {
    boost::asio::write(
        socket, boost::asio::buffer(encode(
                    {.kind = MessageKind::hello, .number = wire_version, .fields = {std::string(wire_magic), nonce}})));
    std::string answer(length_bytes + 9 + 4 + nonce_bytes, '\0');
    boost::asio::read(socket, boost::asio::buffer(answer));
    return decode(answer.substr(length_bytes)).value().fields.at(0);
  };
  tcp::socket first = connected();
  const std::string proof = proof_of("secret", {hello(first), nonce}, 1, 2);
  const std::string bytes = encode({.kind = MessageKind::proof, .number = 1, .fields = {"2", proof}});
  boost::asio::write(first, boost::asio::buffer(bytes));
  EXPECT_FALSE(answer_of(first).empty());
  tcp::socket second = connected();
  hello(second);
  boost::asio::write(second, boost::asio::buffer(bytes));
  second.shutdown(tcp::socket::shutdown_send);
  EXPECT_EQ(answer_of(second), encode({.kind = MessageKind::refused, .number = 2}));
  boost::asio::post(context_, [this] { EXPECT_THAT(ranks_, ::testing::ElementsAre(1)); });
}

}  // namespace
}  // namespace tandem
