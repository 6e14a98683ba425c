#pragma once
// Calls of a group as ranks compare them: checked, and in words that are equal where the calls agree.
#include <exception>
#include <span>
#include <string>
#include <string_view>

#include "core/device/group.hpp"

namespace tandem {

/// "all_gather of bytes [0, 10) [10, 20)".
std::string text_of_call(std::string_view name, std::span<const ByteRange> parts);
/// "broadcast of 10 bytes from rank 1".
std::string text_of_broadcast(int root, std::size_t bytes);
/// "send of 10 bytes from rank 1 to rank 0".
std::string text_of_send(int from, int to, std::size_t bytes);

/// Text of an error, by which it is told to other ranks.
std::string message_of(const std::exception_ptr& error);

/// Throws MisuseError unless there is a part for each of `count` ranks, none ends before it begins, and none overlap.
void require_parts(std::span<const ByteRange> parts, int count);
/// Throws MisuseError where there is no such rank to do what `action` says ("broadcast").
void require_rank(int rank, int count, std::string_view action);

}  // namespace tandem
