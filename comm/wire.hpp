#pragma once
// Messages between rank 0 and the other ranks of a launch, as bytes: a length, then a kind, a number and byte strings,
// all integers big-endian. Docs: docs/design/0042-ranks-in-processes.md.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Kinds of messages. `number` and `fields` of each: in the comment.
enum class MessageKind : std::uint8_t {
  hello = 1,  ///< from who connects. number: wire_version; fields: magic, nonce, version of tandem
  challenge,  ///< the answer. fields: nonce
  proof,      ///< number: the rank; fields: digits of the number of ranks, proof of the secret
  welcome,    ///< fields: rank 0's own proof
  refused,  ///< to who has no proof. number: a Refusal; fields: for a version its wire_version, in digits, and version
            ///< of tandem
  facts,    ///< fields: names and values in turn, which all ranks must share
  start,    ///< all ranks are there and agree
  call,     ///< a rank comes to a meeting. number: the meeting; fields: name of the call, value
  met,      ///< all have come. number: the meeting; fields: the values by rank
  failed,   ///< a rank cannot go on. fields: reason
  leave,    ///< a rank makes no more calls
  ended,    ///< the end of the group, told to all. number: an Ending; fields: reason
  ping,     ///< nothing but a sign of life
  waiting,  ///< to ranks that are there, while others are not. fields: a line that says for whom all wait
};
constexpr auto last_message_kind = MessageKind::waiting;

/// Reasons to refuse a connection, told to who connects.
enum class Refusal : std::uint32_t { another_version = 1, another_secret = 2 };

constexpr std::uint32_t wire_version = 2;
constexpr std::string_view wire_magic = "tandem-ranks";

struct Message {
  MessageKind kind{};
  std::uint32_t number = 0;
  std::vector<std::string> fields{};
  bool operator==(const Message&) const = default;
};

constexpr std::size_t length_bytes = 4;       ///< bytes of the length before each message
constexpr std::size_t stranger_limit = 256;   ///< bytes of a message from who has not proven the secret
constexpr std::size_t value_limit = 1 << 16;  ///< bytes of a rank's value in a meeting

/// Bytes that the longest message of a group of `ranks` takes.
std::size_t member_limit(int ranks) noexcept;

/// Length and message, as they are sent.
std::string encode(const Message& message);
/// Length that `bytes`, the first length_bytes of a message, tell of the rest.
std::size_t decode_length(std::span<const std::uint8_t, length_bytes> bytes) noexcept;
/// A message without its length; nothing where the bytes are none. Takes at most a small multiple of their memory.
std::optional<Message> decode(std::string_view bytes);

/// "'0.1.0' with messages 2": version of tandem and of its messages, as another process may have told them.
std::string version_text(const std::string& messages, const std::string& tandem);
/// Text of another process as part of a line: cut where it is long, without control characters.
std::string shown(std::string text);

}  // namespace tandem
