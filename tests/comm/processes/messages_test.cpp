// Messages survive being sent, whatever else is refused; proofs depend on all that they are about; and the group at
// rank 0 does as it should with messages that are out of place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

#include "comm/assembly.hpp"
#include "comm/proof.hpp"
#include "comm/wire.hpp"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string without_length(const std::string& bytes) { return bytes.substr(length_bytes); }

TEST(Wire, BringsBackEachKindOfMessage) {
  for (std::uint8_t kind = 1; kind <= static_cast<std::uint8_t>(last_message_kind); ++kind) {
    const Message message{.kind = static_cast<MessageKind>(kind),
                          .number = 0xFEDCBA98,
                          .fields = {"", "a", std::string(300, '\xFF'), std::string("\0b", 2)}};
    const std::string bytes = encode(message);
    EXPECT_EQ(decode(without_length(bytes)), message);
    const auto* data = reinterpret_cast<const std::uint8_t*>(bytes.data());
    EXPECT_EQ(decode_length(std::span<const std::uint8_t, length_bytes>(data, length_bytes)),
              bytes.size() - length_bytes);
  }
}

TEST(Wire, HasOneFormOfEachMessage) {
  const Message message{.kind = MessageKind::call, .number = 3, .fields = {"values", "xyz"}};
  EXPECT_EQ(without_length(encode(message)), std::string("\x08\0\0\0\3\0\0\0\2\0\0\0\6values\0\0\0\3xyz", 26));
}

TEST(Wire, RefusesWhatIsCutOrLonger) {
  const std::string bytes = without_length(encode({.kind = MessageKind::facts, .fields = {"name", "value"}}));
  for (std::size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(decode(bytes.substr(0, size))) << size;
  EXPECT_FALSE(decode(bytes + "x"));
}

TEST(Wire, RefusesKindsAndCountsThatAreNone) {
  const std::string bytes = without_length(encode({.kind = MessageKind::ping}));
  for (const char kind : {'\0', static_cast<char>(static_cast<int>(last_message_kind) + 1), '\xFF'}) {
    EXPECT_FALSE(decode(kind + bytes.substr(1)));
  }
  EXPECT_FALSE(decode(bytes.substr(0, 5) + "\xFF\xFF\xFF\xFF")) << "no memory for four thousand million fields";
}

TEST(Wire, TakesTheLongestMessageOfAGroup) {
  for (const int ranks : {2, 8, 64}) {
    Message met{.kind = MessageKind::met};
    met.fields.assign(static_cast<std::size_t>(ranks), std::string(value_limit, 'v'));
    EXPECT_LE(encode(met).size(), member_limit(ranks));
  }
  const Message call{.kind = MessageKind::call, .fields = {"broadcast of 65536 bytes", std::string(value_limit, 'v')}};
  EXPECT_LE(encode(call).size(), member_limit(1));
  const Message hello{.kind = MessageKind::hello, .fields = {std::string(wire_magic), random_nonce()}};
  EXPECT_LE(encode(hello).size(), stranger_limit);
}

TEST(Proof, DependsOnEverythingItIsAbout) {
  const Nonces nonces{std::string(nonce_bytes, 'a'), std::string(nonce_bytes, 'b')};
  const std::string proof = proof_of("secret", nonces, 1, 2);
  EXPECT_EQ(proof.size(), proof_bytes);
  EXPECT_TRUE(same_proof(proof, proof_of("secret", nonces, 1, 2)));
  EXPECT_FALSE(same_proof(proof, proof_of("secreu", nonces, 1, 2)));
  EXPECT_FALSE(same_proof(proof, proof_of("secret", nonces, 0, 2)));
  EXPECT_FALSE(same_proof(proof, proof_of("secret", nonces, 1, 3)));
  EXPECT_FALSE(same_proof(proof, proof_of("secret", {nonces.of_member, nonces.of_host}, 1, 2)));
  EXPECT_FALSE(same_proof(proof, proof.substr(1)));
  EXPECT_FALSE(same_proof(proof, ""));
  EXPECT_NE(random_nonce(), random_nonce());
}

/// A group of which every message is kept.
class AssemblyOf : public ::testing::Test {
 protected:
  void enter_all(const std::vector<std::string>& facts = {}) {
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_TRUE(assembly.enter(rank, 3, "address " + std::to_string(rank)));
      assembly.take(rank, {.kind = MessageKind::facts, .fields = facts}, 0.0);
    }
  }
  std::string ending() const { return assembly.ended() ? assembly.ended()->fields.at(0) : ""; }

  std::vector<std::pair<int, Message>> sent;
  Assembly assembly{3, 2, {.join_seconds = 5.0, .stall_seconds = 10.0}, 0.0, [this](int rank, const Message& message) {
                      sent.emplace_back(rank, message);
                    }};
};

TEST_F(AssemblyOf, StartsOnceAllHaveComeAndAgree) {
  enter_all({"version", "1"});
  const Message start{.kind = MessageKind::start};
  EXPECT_THAT(sent, ElementsAre(std::pair(0, start), std::pair(1, start), std::pair(2, start)));
}

TEST_F(AssemblyOf, LosesARankThatGoesBeforeTheStart) {
  assembly.enter(0, 3, "address 0");
  assembly.enter(2, 3, "address 2");
  assembly.lose(2, "its connection ended");
  EXPECT_EQ(ending(), "rank 2 at address 2 is lost: its connection ended");
  EXPECT_FALSE(assembly.enter(1, 3, "address 1"));
}

TEST_F(AssemblyOf, HasNoPlaceForRanksThatAreNone) {
  EXPECT_FALSE(assembly.enter(3, 3, "address"));
  EXPECT_THAT(ending(), HasSubstr("there is no rank 3 of 3: address says that it is"));
}

TEST_F(AssemblyOf, LosesARankWhoseMessagesAreOutOfPlace) {
  const Message call{.kind = MessageKind::call, .number = 1, .fields = {"values", ""}};
  const std::vector<std::vector<Message>> mistakes = {
      {{.kind = MessageKind::facts}},
      {call, call},
      {{.kind = MessageKind::call, .number = 2, .fields = {"values", ""}}},
      {{.kind = MessageKind::call, .number = 1, .fields = {"values"}}},
      {{.kind = MessageKind::call, .number = 1, .fields = {"values", std::string(value_limit + 1, 'x')}}},
      {{.kind = MessageKind::ended, .fields = {"no word of rank 0"}}},
      {{.kind = MessageKind::welcome}}};
  for (const auto& messages : mistakes) {
    std::vector<std::pair<int, Message>> told;
    Assembly group(2, 2, {}, 0.0, [&](int rank, const Message& message) { told.emplace_back(rank, message); });
    for (int rank = 0; rank < 2; ++rank) {
      group.enter(rank, 2, "an address");
      group.take(rank, {.kind = MessageKind::facts}, 0.0);
    }
    for (const Message& message : messages) group.take(1, message, 0.0);
    ASSERT_TRUE(group.ended());
    EXPECT_THAT(group.ended()->fields.at(0), HasSubstr("rank 1 at an address is lost: it sent"));
  }
}

TEST_F(AssemblyOf, TakesNoCallBeforeTheStart) {
  assembly.enter(0, 3, "address 0");
  assembly.take(0, {.kind = MessageKind::call, .number = 0, .fields = {"values", ""}}, 0.0);
  EXPECT_THAT(ending(), HasSubstr("rank 0 at address 0 is lost"));
}

TEST_F(AssemblyOf, GivesTheValuesOfAMeetingToOneRank) {
  enter_all();
  sent.clear();
  const Message call{.kind = MessageKind::call, .number = 1, .fields = {"send", "bytes"}};
  const Message nothing{.kind = MessageKind::met, .number = 1, .fields = {"", "", ""}};
  const Message values{.kind = MessageKind::met, .number = 1, .fields = {"bytes", "bytes", "bytes"}};
  for (const int receiver : {2, 0}) {
    for (int rank = 2; rank >= 0; --rank) assembly.take(rank, call, 0.0, rank == 0 ? receiver : 1);
  }
  EXPECT_THAT(sent, ElementsAre(std::pair(2, values), std::pair(0, nothing), std::pair(1, nothing),
                                std::pair(0, values), std::pair(1, nothing), std::pair(2, nothing)));
  sent.clear();
  for (int rank = 0; rank < 3; ++rank) assembly.take(rank, call, 0.0);
  EXPECT_THAT(sent, ElementsAre(std::pair(0, values), std::pair(1, values), std::pair(2, values)));
}

TEST_F(AssemblyOf, TellsOfAFailureAfterARankHasLeft) {
  enter_all();
  sent.clear();
  assembly.take(2, {.kind = MessageKind::leave}, 0.0);
  assembly.take(1, {.kind = MessageKind::failed, .fields = {"no memory"}}, 0.0);
  assembly.take(0, {.kind = MessageKind::failed, .fields = {"a later one"}}, 0.0);
  const auto ended = [](Ending ending, const char* text) {
    return Message{.kind = MessageKind::ended, .number = static_cast<std::uint32_t>(ending), .fields = {text}};
  };
  EXPECT_THAT(sent, ElementsAre(std::pair(0, ended(Ending::left, "rank 2 has left")),
                                std::pair(1, ended(Ending::left, "rank 2 has left")),
                                std::pair(0, ended(Ending::peer, "rank 1 failed: no memory")),
                                std::pair(1, ended(Ending::peer, "rank 1 failed: no memory"))));
}

TEST_F(AssemblyOf, WaitsAsLongAsItMay) {
  enter_all();
  sent.clear();
  assembly.take(1, {.kind = MessageKind::call, .number = 0, .fields = {"broadcast of 3 bytes", ""}}, 20.0);
  assembly.take(2, {.kind = MessageKind::call, .number = 0, .fields = {"broadcast of 3 bytes", ""}}, 29.0);
  assembly.look(38.0, 0);
  EXPECT_THAT(sent, IsEmpty());
  assembly.look(40.0, 0);
  EXPECT_EQ(ending(), "waiting for broadcast of the group made no progress for 11 s: rank 0 does no more");
}

}  // namespace
}  // namespace tandem
