#pragma once
// Reading parameters whose elements lie with several ranks: each gives its own to all, or to rank 0.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/device/group.hpp"
#include "core/params/parameter_layout.hpp"
#include "scheduler/plan/rank_slice.hpp"

namespace tandem {

/// Elements [first, first + count) of a parameter, and whose they are.
struct OwnedPart {
  int rank = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Parts of elements [first, first + count) of a parameter that the ranks own; ranks that own none of them are left
/// out.
std::vector<OwnedPart> parts_of(const ParameterLayout& layout, const Parameter& parameter, std::int64_t first,
                                std::int64_t count, int ranks);

/// Ranks that get what is read.
enum class Readers : std::uint8_t { all, rank_zero };

/// Fills `values` of the readers with elements [first, first + values.size()) of a parameter: `read_own(first, values)`
/// is called for what this rank owns of them, and that is given to the readers. Every rank calls it alike, on one
/// thread for each channel; with `group` null all is this rank's own. Elsewhere `values` has what the rank owns, and
/// the rest is left as it was. Blocks. Throws what the group and `read_own` throw; what that throws fails the group.
template <class ReadOwn>
void read_of_ranks(Group* group, Channel channel, Readers readers, const ParameterLayout& layout,
                   const Parameter& parameter, std::int64_t first, std::span<float> values, const ReadOwn& read_own) {
  if (group == nullptr) return read_own(first, values);
  for (const OwnedPart& part : parts_of(layout, parameter, first, std::ssize(values), group->rank().count)) {
    const auto of_part =
        values.subspan(static_cast<std::size_t>(part.first - first), static_cast<std::size_t>(part.count));
    if (part.rank == group->rank().index) {
      try {
        read_own(part.first, of_part);
      } catch (...) {
        group->fail(std::current_exception());
        throw;
      }
    }
    if (readers == Readers::all) {
      group->broadcast(channel, part.rank, std::as_writable_bytes(of_part));
    } else if (part.rank != 0) {
      group->send(channel, part.rank, 0, std::as_writable_bytes(of_part));
    }
  }
}

/// The text that rank 0 gives, on every rank. A call of all of them. Blocks.
std::string text_of_rank_zero(Group& group, Channel channel, std::string text);

}  // namespace tandem
