#include "comm/group_call.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.hpp"

namespace tandem {

std::string text_of_call(std::string_view name, std::span<const ByteRange> parts) {
  std::string all;
  for (const ByteRange& part : parts) all += fmt::format(" [{}, {})", part.begin, part.end);
  return fmt::format("{} of bytes{}", name, all);
}

std::string text_of_broadcast(int root, std::size_t bytes) {
  return fmt::format("broadcast of {} bytes from rank {}", bytes, root);
}

std::string text_of_send(int from, int to, std::size_t bytes) {
  return fmt::format("send of {} bytes from rank {} to rank {}", bytes, from, to);
}

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {  // another type, which has no text
  }
  return "unknown error";
}

void require_parts(std::span<const ByteRange> parts, int count) {
  if (parts.size() != static_cast<std::size_t>(count)) {
    throw MisuseError(fmt::format("{} parts are given to a group of {}", parts.size(), count));
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].begin > parts[i].end) throw MisuseError(fmt::format("part {} ends before it begins", i));
    for (std::size_t k = 0; k < i; ++k) {
      if (std::max(parts[i].begin, parts[k].begin) < std::min(parts[i].end, parts[k].end)) {
        throw MisuseError(fmt::format("parts {} and {} overlap", k, i));
      }
    }
  }
}

void require_rank(int rank, int count, std::string_view action) {
  if (rank < 0 || rank >= count) throw MisuseError(fmt::format("there is no rank {} to {}", rank, action));
}

}  // namespace tandem
