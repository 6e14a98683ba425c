#include "offload/storage/copy_order.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "core/base/error.hpp"

namespace tandem {
namespace {

using Address = std::pair<Space, std::size_t>;

Address source_of(const PlacedCopy& c) { return {c.from, c.source}; }
Address target_of(const PlacedCopy& c) { return {c.to, c.target}; }

/// The part of a copy that begins `skip` bytes into it.
PlacedCopy part_of(PlacedCopy c, std::size_t skip, std::size_t bytes) {
  c.source += skip;
  c.target += skip;
  c.bytes = bytes;
  return c;
}

class CopyOrder {
 public:
  CopyOrder(const std::vector<PlacedCopy>& wanted, std::size_t scratch_bytes) : half_(scratch_bytes / 2) {
    if (half_ == 0) throw MisuseError("copies cannot be ordered without scratch memory");
    for (const PlacedCopy& c : wanted) {
      if (c.bytes > 0 && source_of(c) != target_of(c)) insert(c);
    }
  }

  std::vector<PlacedCopy> run() {
    while (true) {
      copy_what_is_free();
      if (by_source_.empty()) return std::move(ordered_);
      if (!copy_a_free_part()) evacuate();
    }
  }

 private:
  void insert(const PlacedCopy& c) {
    const bool fresh = by_source_.emplace(source_of(c), c).second && by_target_.emplace(target_of(c), c).second;
    if (!fresh) throw MisuseError("two copies share their source or their target");
    candidates_.push_back(source_of(c));
  }

  void erase(const PlacedCopy& c) {
    by_source_.erase(source_of(c));
    by_target_.erase(target_of(c));
  }

  /// The first pending copy, in the order of addresses, whose key range meets [begin, begin + bytes); `key` is where
  /// a copy of the map begins.
  using Pending = std::map<Address, PlacedCopy>;
  static Pending::const_iterator first_overlap(const Pending& map, const Address& begin) {
    auto it = map.upper_bound(begin);
    if (it == map.begin()) return it;
    const auto before = std::prev(it);
    const bool reaches =
        before->first.first == begin.first && before->first.second + before->second.bytes > begin.second;
    return reaches ? before : it;
  }
  static bool meets(const Pending& map, Pending::const_iterator it, const Address& begin, std::size_t bytes) {
    return it != map.end() && it->first.first == begin.first && it->first.second < begin.second + bytes;
  }

  /// Whether a pending copy other than `c` still has to read what `c` overwrites.
  bool overwrites_others(const PlacedCopy& c) const {
    for (auto it = first_overlap(by_source_, target_of(c)); meets(by_source_, it, target_of(c), c.bytes); ++it) {
      if (it->first != source_of(c)) return true;
    }
    return false;
  }

  void copy_what_is_free() {
    while (!candidates_.empty()) {
      const auto it = by_source_.find(candidates_.back());
      candidates_.pop_back();
      if (it == by_source_.end() || overwrites_others(it->second)) continue;
      const PlacedCopy c = it->second;
      erase(c);
      emit(c);
      source_is_free(source_of(c), c.bytes);
    }
  }

  /// Lets copies that were waiting for these bytes be tried again.
  void source_is_free(const Address& begin, std::size_t bytes) {
    for (auto it = first_overlap(by_target_, begin); meets(by_target_, it, begin, bytes); ++it) {
      candidates_.push_back(source_of(it->second));
    }
  }

  void emit(const PlacedCopy& c) {
    const std::size_t distance = c.source > c.target ? c.source - c.target : c.target - c.source;
    if (c.from != c.to || distance >= c.bytes) {
      ordered_.push_back(c);
    } else {
      shift(c, distance);
    }
  }

  /// A copy onto itself, in pieces from the end that it moves to: of the distance, or of half the scratch memory and
  /// through it where the distance is shorter.
  void shift(const PlacedCopy& c, std::size_t distance) {
    const std::size_t piece = std::max(distance, half_);
    for (std::size_t done = 0; done < c.bytes; done += piece) {
      const std::size_t bytes = std::min(piece, c.bytes - done);
      const PlacedCopy part = part_of(c, c.target < c.source ? done : c.bytes - done - bytes, bytes);
      if (distance >= half_) {
        ordered_.push_back(part);
      } else {
        ordered_.push_back({part.from, Space::scratch, part.source, half_, bytes});
        ordered_.push_back({Space::scratch, part.to, half_, part.target, bytes});
      }
    }
  }

  /// Copies a part of a pending copy whose target nobody has to read any more. Returns whether there was one.
  bool copy_a_free_part() {
    for (const auto& [key, c] : by_source_) {
      const std::optional<PlacedCopy> part = free_part(c);
      if (!part) continue;
      cut_out(PlacedCopy(c), *part);
      ordered_.push_back(*part);
      source_is_free(source_of(*part), part->bytes);
      return true;
    }
    return false;
  }

  /// The first part of a copy whose target no pending source touches, its own included.
  std::optional<PlacedCopy> free_part(const PlacedCopy& c) const {
    std::size_t begin = c.target;
    const std::size_t end = c.target + c.bytes;
    for (auto it = first_overlap(by_source_, target_of(c)); meets(by_source_, it, target_of(c), c.bytes); ++it) {
      if (it->first.second > begin) return part_of(c, begin - c.target, it->first.second - begin);
      begin = std::max(begin, it->first.second + it->second.bytes);
    }
    if (begin >= end) return std::nullopt;
    return part_of(c, begin - c.target, end - begin);
  }

  /// Leaves what lies before and behind `part` pending.
  void cut_out(const PlacedCopy& whole, const PlacedCopy& part) {
    const std::size_t before = part.target - whole.target;
    const std::size_t behind = whole.bytes - before - part.bytes;
    erase(whole);
    if (before > 0) insert(part_of(whole, 0, before));
    if (behind > 0) insert(part_of(whole, before + part.bytes, behind));
  }

  /// Breaks a cycle: every pending target is somebody's pending source, so a piece of one source goes to the scratch
  /// memory. When what can then be copied has been, the piece's own target is free, and the scratch memory again.
  void evacuate() {
    const PlacedCopy c = by_source_.begin()->second;
    if (by_source_.rbegin()->first.first == Space::scratch) throw MisuseError("targets of copies overlap");
    const PlacedCopy piece = part_of(c, 0, std::min(c.bytes, half_));
    cut_out(c, piece);
    ordered_.push_back({piece.from, Space::scratch, piece.source, 0, piece.bytes});
    insert({Space::scratch, piece.to, 0, piece.target, piece.bytes});
    source_is_free(source_of(piece), piece.bytes);
  }

  std::size_t half_;
  Pending by_source_;  ///< still to be made
  Pending by_target_;  ///< the copies of `by_source_`, by target
  std::vector<Address> candidates_;
  std::vector<PlacedCopy> ordered_;
};

}  // namespace

std::vector<PlacedCopy> order_copies(const std::vector<PlacedCopy>& wanted, std::size_t scratch_bytes) {
  return CopyOrder(wanted, scratch_bytes).run();
}

}  // namespace tandem
