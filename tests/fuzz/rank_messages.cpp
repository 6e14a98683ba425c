// Messages between ranks: the bytes that came over a connection, and what rank 0 makes of them.
#include <algorithm>

#include "comm/assembly.hpp"
#include "comm/wire.hpp"
#include "tests/fuzz/fuzz.hpp"

namespace {

constexpr int ranks = 3;

/// Replies to a rank can be sent: each is a message that a rank takes.
void check_sent(const tandem::Message& message) {
  const std::string bytes = tandem::encode(message);
  if (bytes.size() > tandem::member_limit(ranks)) std::abort();
  if (tandem::decode(std::string_view(bytes).substr(tandem::length_bytes)) != message) std::abort();
}

}  // namespace

// Before each message: a byte that says whose it is.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tandem;
  return fuzz::expect(ExitCode::internal, [&] {
    Assembly assembly(ranks, 2, {}, 0.0, [](int, const Message& message) { check_sent(message); });
    for (int rank = 0; rank < ranks; ++rank) assembly.enter(rank, ranks, "an address");
    while (size > length_bytes) {
      const int rank = *data % ranks;
      ++data;
      --size;
      if (size < length_bytes) return;
      const std::size_t told = decode_length(std::span<const std::uint8_t, length_bytes>(data, length_bytes));
      if (told > member_limit(1)) return;
      const std::size_t length = std::min(told, size - length_bytes);
      const std::string_view bytes = fuzz::text_of(data + length_bytes, length);
      data += length_bytes + length;
      size -= length_bytes + length;
      const std::optional<Message> message = decode(bytes);
      if (!message) return;
      // Bytes have one meaning, and a message one form.
      if (encode(*message).substr(length_bytes) != bytes) std::abort();
      assembly.take(rank, *message, 0.0);
    }
  });
}
