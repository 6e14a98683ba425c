#include "cpu_ops/update/undo_pool.hpp"

#include <bit>
#include <cstring>

namespace tandem::kernels {
namespace {

template <class Word>
std::byte* put(std::byte* pool, Word word) {
  std::memcpy(pool, &word, sizeof word);
  return pool + sizeof word;
}
template <class Word>
Word get(const std::byte*& pool) {
  Word word;
  std::memcpy(&word, pool, sizeof word);
  pool += sizeof word;
  return word;
}

Written put_list(std::byte* pool, const EscapeList& list) {
  const std::size_t bytes = static_cast<std::size_t>(list.count) * sizeof list.bits[0];
  std::memcpy(pool, list.bits, bytes);
  return {pool + bytes, list.count};
}
const std::byte* get_list(const std::byte* pool, std::int64_t count, EscapeList& list) {
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof list.bits[0];
  std::memcpy(list.bits, pool, bytes);
  list.count = count;
  return pool + bytes;
}

/// The distance that an entry of no element has, on the way to an element farther away.
constexpr std::uint32_t far_away = 255;

/// Groups that have lost a moment, one after another.
struct LostGroups {
  explicit LostGroups(const OldMoment& old) {
    for (std::int64_t g = 0; g < undo_groups; ++g) {
      lost[count] = old.lost[g];
      first[count] = static_cast<std::uint32_t>(g * undo_group);
      count += old.lost[g] != 0 ? 1 : 0;
    }
    lost[count] = lost[count + 1] = 0;
  }
  std::int64_t count = 0;
  std::uint64_t lost[undo_groups + 2];
  std::uint32_t first[undo_groups + 1];
};

bool loses_none(const OldMoment& old) {
  std::uint64_t any = 0;
  for (const std::uint64_t lost : old.lost) any |= lost;
  return any == 0;
}

/// Whether instructions that compress vectors of bytes may be used: Ice Lake and Zen 4 have them, the first processors
/// with AVX-512 do not.
bool compresses_bytes(Isa isa) {
  static const bool supported = __builtin_cpu_supports("avx512vbmi2");
  return supported && isa == Isa::avx512;
}

/// Writes entries of a rounded moment: how many elements lie between one and the one before, and old bits. The end of a
/// group is no branch: where it comes cannot be foreseen.
template <class Word>
Written put_entries(Isa isa, std::byte* pool, const OldMoment& old) {
  Written written{pool, 0};
  if (loses_none(old)) return written;
  if (compresses_bytes(isa)) {
    const Written near = put_near_entries_avx512<Word>(pool, old);
    if (near.end != nullptr) return near;
  }
  const LostGroups groups(old);
  const Word* const words = old.words<Word>();
  std::uint32_t next = 0;
  std::uint64_t rest = groups.lost[0], behind = groups.lost[1];
  for (std::int64_t g = 0; g < groups.count;) {
    const std::uint32_t i = groups.first[g] + static_cast<std::uint32_t>(std::countr_zero(rest));
    std::uint32_t distance = i - next;
    for (; distance >= far_away; distance -= far_away, ++written.count) {
      written.end = put(put(written.end, static_cast<std::uint8_t>(far_away)), Word{0});
    }
    written.end = put(put(written.end, static_cast<std::uint8_t>(distance)), words[i]);
    ++written.count;
    next = i + 1;
    rest &= rest - 1;
    g += rest == 0 ? 1 : 0;
    rest = rest == 0 ? behind : rest;
    behind = groups.lost[g + 1];
  }
  return written;
}
template <class Word>
const std::byte* get_entries(const std::byte* pool, std::int64_t entries, EscapeList& list) {
  std::uint32_t next = 0;
  list.count = 0;
  for (; entries > 0; --entries) {
    const std::uint32_t distance = get<std::uint8_t>(pool);
    const Word bits = get<Word>(pool);
    next += distance;
    if (distance != far_away) list.bits[list.count++] = escape_entry(next++, bits);
  }
  return pool;
}

template <StateFormat format>
Written put_moment(Isa isa, std::byte* pool, const EscapeList& list, const OldMoment& old) {
  if constexpr (rounds_moments(format)) return put_entries<MomentWord<format>>(isa, pool, old);
  return put_list(pool, list);
}
template <StateFormat format>
const std::byte* get_moment(const std::byte* pool, std::int64_t count, EscapeList& list) {
  if constexpr (rounds_moments(format)) return get_entries<MomentWord<format>>(pool, count, list);
  return get_list(pool, count, list);
}

}  // namespace

UndoCounts write_pool(Isa isa, const AdamPiece& block, const Unfound& old, PoolBytes& pool) {
  UndoCounts counts{.updated = 1};
  with_adamw_format(block, [&]<StateFormat format>(Format<format>) {
    const Written m = put_moment<format>(isa, pool.bytes, old.lists.m, old.m);
    const Written v = put_moment<format>(isa, m.end, old.lists.v, old.v);
    const Written master = put_list(v.end, old.lists.master);
    counts.m = static_cast<std::uint16_t>(m.count);
    counts.v = static_cast<std::uint16_t>(v.count);
    counts.master = static_cast<std::uint16_t>(master.count);
  });
  return counts;
}

void read_pool(const AdamPiece& block, const std::byte* pool, const UndoCounts& counts, EscapeLists& lists) {
  with_adamw_format(block, [&]<StateFormat format>(Format<format>) {
    pool = get_moment<format>(pool, counts.m, lists.m);
    pool = get_moment<format>(pool, counts.v, lists.v);
    get_list(pool, counts.master, lists.master);
  });
}

}  // namespace tandem::kernels
