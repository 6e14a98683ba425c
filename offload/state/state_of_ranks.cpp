#include "offload/state/state_of_ranks.hpp"

#include <algorithm>

namespace tandem {

std::vector<OwnedPart> parts_of(const ParameterLayout& layout, const Parameter& parameter, std::int64_t first,
                                std::int64_t count, int ranks) {
  std::vector<OwnedPart> parts;
  const std::int64_t begin = parameter.offset + first;
  for (int rank = 0; rank < ranks; ++rank) {
    const LayerSlice slice = slice_of(layout.layer(parameter.layer), {rank, ranks});
    const ElementRange& own = parameter.options.trainable ? slice.trained : slice.frozen;
    const std::int64_t from = std::max(begin, own.begin), to = std::min(begin + count, own.end);
    if (from < to) parts.push_back({rank, from - parameter.offset, to - from});
  }
  return parts;
}

std::string text_of_rank_zero(Group& group, Channel channel, std::string text) {
  std::uint64_t length = text.size();
  group.broadcast(channel, 0, std::as_writable_bytes(std::span(&length, 1)));
  text.resize(length);
  group.broadcast(channel, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace tandem
