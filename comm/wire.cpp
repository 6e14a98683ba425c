#include "comm/wire.hpp"

#include <fmt/format.h>

#include "core/base/error.hpp"

namespace tandem {
namespace {

constexpr std::size_t head_bytes = 1 + 4 + 4;  // kind, number, number of fields
constexpr std::size_t longest_shown = 120;     // characters

void append(std::string& to, std::size_t number) {
  for (int shift = 24; shift >= 0; shift -= 8) to += static_cast<char>(number >> shift & 0xFF);
}

/// Reads a message from its beginning to its end.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  bool has(std::size_t bytes) const noexcept { return rest_.size() >= bytes; }
  bool done() const noexcept { return rest_.empty(); }
  std::string_view take(std::size_t bytes) {
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
  }
  std::uint32_t number() {
    std::uint32_t value = 0;
    for (const char byte : take(4)) value = value << 8 | static_cast<std::uint8_t>(byte);
    return value;
  }

 private:
  std::string_view rest_;
};

}  // namespace

std::size_t member_limit(int ranks) noexcept {
  constexpr std::size_t for_names = 1 << 16;
  return head_bytes + for_names + static_cast<std::size_t>(ranks) * (value_limit + 4);
}

std::string encode(const Message& message) {
  std::size_t bytes = head_bytes;
  for (const std::string& field : message.fields) bytes += 4 + field.size();
  if (bytes > UINT32_MAX) throw MisuseError("a message between ranks is longer than 4 GiB");
  std::string text;
  text.reserve(length_bytes + bytes);
  append(text, bytes);
  text += static_cast<char>(message.kind);
  append(text, message.number);
  append(text, message.fields.size());
  for (const std::string& field : message.fields) {
    append(text, field.size());
    text += field;
  }
  return text;
}

std::size_t decode_length(std::span<const std::uint8_t, length_bytes> bytes) noexcept {
  std::size_t length = 0;
  for (const std::uint8_t byte : bytes) length = length << 8 | byte;
  return length;
}

std::optional<Message> decode(std::string_view bytes) {
  Reader reader(bytes);
  if (!reader.has(head_bytes)) return std::nullopt;
  const auto kind = static_cast<std::uint8_t>(reader.take(1)[0]);
  if (kind < static_cast<std::uint8_t>(MessageKind::hello) || kind > static_cast<std::uint8_t>(last_message_kind)) {
    return std::nullopt;
  }
  Message message{.kind = static_cast<MessageKind>(kind), .number = reader.number()};
  const std::size_t count = reader.number();
  if (!reader.has(4 * count)) return std::nullopt;
  message.fields.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (!reader.has(4)) return std::nullopt;
    const std::size_t size = reader.number();
    if (!reader.has(size)) return std::nullopt;
    message.fields.emplace_back(reader.take(size));
  }
  if (!reader.done()) return std::nullopt;
  return message;
}

std::string version_text(const std::string& messages, const std::string& tandem) {
  return fmt::format("'{}' with messages {}", shown(tandem), shown(messages));
}

std::string shown(std::string text) {
  if (text.size() > longest_shown) text = text.substr(0, longest_shown) + "...";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return text;
}

}  // namespace tandem
