#pragma once
// The kernels of undo_kernels.hpp in vectors: one text for all instruction sets. Included behind what an instruction
// set gives: the types Floats, Bits (32 bits a lane), Bytes, Group, Coefficients, Step and MomentBits, and functions on
// them, among them the update of coded moments.
#include <bit>
#include <type_traits>

#include "cpu_ops/update/undo_kernels.hpp"

namespace tandem::kernels {
namespace {

constexpr int vectors = static_cast<int>(undo_group) / lanes;

/// Constants that all groups of a block share.
struct Constants {
  explicit Constants(const UndoBlock& b)
      : c(b.c),
        random(b.c, first_random_block(b.piece)),
        beta1(every(b.inverse.beta1)),
        beta1_rest(every(b.inverse.beta1_rest)),
        beta2(every(b.inverse.beta2)),
        beta2_rest(every(b.inverse.beta2_rest)),
        undecay(every(b.inverse.undecay)) {}
  Coefficients c;
  MomentBits random;
  Floats beta1, beta1_rest, beta2, beta2_rest, undecay;  ///< see AdamInverse
};

// -- moments as they are stored, in the upper bits of a lane ----------------------------------------------------

/// Bits of a lane below those of a moment.
template <StateFormat format>
constexpr int bits_below = format == StateFormat::bf16_moments   ? 16
                           : format == StateFormat::byte_moments ? numerics::below_code
                                                                 : 0;
template <StateFormat format>
constexpr std::uint32_t mask_below = (1u << bits_below<format>)-1u;

template <StateFormat format>
Floats read_m(Bits stored, Exponents e) {
  if constexpr (format == StateFormat::byte_moments) return decode_m(stored, power(e.m));
  return floats(stored);
}
template <StateFormat format>
Floats read_v(Bits stored, Exponents e) {
  if constexpr (format == StateFormat::byte_moments) return decode_v(stored, all(numerics::v_base(e.v)));
  return floats(stored);
}

/// An estimate is subtracted from a moment that is raised by this, and so is the least difference that fits a code at
/// 0, with bits below.
template <StateFormat format>
constexpr std::uint32_t raised = mask_below<format> + (numerics::moment_range << bits_below<format>);

/// numerics::estimate_stored_m and _v less what moments are raised by, with bits below.
template <StateFormat format>
Bits estimate_m(Bits next, Floats g, const Constants& k) {
  const Floats rest = subtract(floats(next), mul(k.c.one_minus_beta1, g));
  if constexpr (!rounds_moments(format)) {
    return subtract(bits_of(fma(rest, k.beta1, mul(rest, k.beta1_rest))), all(raised<format>));
  } else {
    const Bits least = subtract(magnitude_of(floats(next)), all(numerics::resolution<format>));
    return subtract_where_greater(magnitude_of(rest), least, bits_of(mul(rest, k.beta1)), all(raised<format> - 0x8000),
                                  all(0u - raised<format>));
  }
}
template <StateFormat format>
Bits estimate_v(Bits next, Floats g, const Constants& k) {
  const Bits none = all(0u - raised<format>);
  const Bits least = subtract(next, all(numerics::resolution<format>));
  const Floats rest = fma_negated(mul(k.c.one_minus_beta2, g), g, floats(next));
  if constexpr (!rounds_moments(format)) {
    const Bits old = bits_of(fma(rest, k.beta2, mul(rest, k.beta2_rest)));
    return subtract_where_greater(bits_of(rest), least, old, all(raised<format>), none);
  } else {
    return subtract_where_greater(bits_of(rest), least, bits_of(mul(rest, k.beta2)), all(raised<format> - 0x8000),
                                  none);
  }
}

/// The old moment from an estimate and a difference.
template <StateFormat format>
Bits old_moment(Bits estimate, Bits difference) {
  constexpr int below = bits_below<format>;
  const Bits floor = both(add(estimate, all(raised<format>)), all(~mask_below<format>));
  return add(floor, subtract(up<below>(difference), all(numerics::moment_range << below)));
}

inline Floats estimate_master(Floats next, Floats direction, const Constants& k) {
  const Floats rest = fma_negated(k.c.minus_step_size, direction, next);
  return fma(rest, k.undecay, rest);
}

// -- elements in memory -----------------------------------------------------------------------------------------

inline const std::uint32_t* words_of(const float* x) { return reinterpret_cast<const std::uint32_t*>(x); }
inline std::uint32_t* words_of(float* x) { return reinterpret_cast<std::uint32_t*>(x); }
inline const std::uint16_t* words_of(const bf16* x) { return reinterpret_cast<const std::uint16_t*>(x); }
inline std::uint16_t* words_of(bf16* x) { return reinterpret_cast<std::uint16_t*>(x); }

inline Bits join_master(Bits weight, Bits residual) {
  return add(up<16>(subtract(weight, down<15>(residual))), residual);
}
template <StateFormat format>
Bits load_master(const AdamPiece& p, std::int64_t i) {
  if constexpr (format == StateFormat::fp32) return load(static_cast<const std::uint32_t*>(p.state.master) + i);
  if constexpr (has_fp32_weights(format)) return load(words_of(p.fp32_weight) + i);
  return join_master(load(words_of(p.weight) + i), load(static_cast<const std::uint16_t*>(p.state.master) + i));
}

template <StateFormat format>
Bits load_gradient(const AdamPiece& p, std::int64_t i) {
  if constexpr (has_fp32_weights(format)) return load(words_of(p.fp32_gradient) + i);
  return up<16>(load(words_of(p.gradient) + i));
}

/// Bits of a vector of elements that is to be updated: moments in the upper bits of a lane, and what is added before
/// they are rounded.
struct Operands {
  Bits m, v, master, gradient;
  Bits random_m{}, random_v{};
};

/// Old bits of a group that are still in memory, for `append`.
template <class Word>
struct OldMoments {
  const Word* words;
  std::uint32_t element(int i) const { return words[i]; }
  Bits vector(int j) const { return load(words + j * lanes); }
};
template <StateFormat format>
struct OldMasters {
  const AdamPiece& piece;
  std::int64_t first;
  std::uint32_t element(int i) const { return numerics::float_bits(numerics::load_master<format>(piece, first + i)); }
  Bits vector(int j) const { return load_master<format>(piece, first + j * lanes); }
};

/// Elements of a group in order: those of a vector follow one another.
struct InOrder {
  /// Random bits of groups one after another: none, as no moment is rounded.
  struct Draws {
    Draws(const MomentBits&, std::uint64_t) {}
  };
  /// Calls body(j, Operands) for each vector.
  template <StateFormat format, class Body>
  [[gnu::always_inline]] static void for_vectors(const AdamPiece& p, std::int64_t first, Draws&, const Body& body) {
    static_assert(!rounds_moments(format));
    for (int j = 0; j < vectors; ++j) {
      const std::int64_t i = first + j * lanes;
      body(j, Operands{load(moments_at<format>(p.state.m, i)), load(moments_at<format>(p.state.v, i)),
                       load_master<format>(p, i), load_gradient<format>(p, i)});
    }
  }
  template <StateFormat format>
  static void load_masters(const AdamPiece& p, std::int64_t i, Group& x) {
    for (int j = 0; j < vectors; ++j) x[j] = load_master<format>(p, i + j * lanes);
  }
  /// No NaN.
  template <StateFormat format>
  static void store_masters(const AdamPiece& p, std::int64_t i, const Group& x) {
    for (int j = 0; j < vectors; ++j) {
      if constexpr (has_fp32_weights(format)) {
        store(words_of(p.fp32_weight) + i + j * lanes, x[j]);
      } else {
        using Word = std::conditional_t<format == StateFormat::fp32, std::uint32_t, std::uint16_t>;
        store(words_of(p.weight) + i + j * lanes, down<16>(add(x[j], all(0x8000))));
        store(static_cast<Word*>(p.state.master) + i + j * lanes, x[j]);
      }
    }
  }
  template <StateFormat format>
  static void load_gradients(const AdamPiece& p, std::int64_t i, Group& x) {
    for (int j = 0; j < vectors; ++j) x[j] = load_gradient<format>(p, i + j * lanes);
  }
  template <StateFormat format, class Word>
  static void load_moments(const Word* moments, Group& x) {
    for (int j = 0; j < vectors; ++j) x[j] = up<bits_below<format>>(load(moments + j * lanes));
  }
  template <StateFormat format, class Word>
  static void store_moments(Word* moments, const Group& x) {
    for (int j = 0; j < vectors; ++j) store(moments + j * lanes, down<bits_below<format>>(x[j]));
  }
  static Bytes narrow(const Group& x, std::uint32_t most) { return narrow_in_order(x, most); }
  template <StateFormat format>
  static Bytes narrow_moments(const Group& x) {
    Group differences;
    for (int j = 0; j < vectors; ++j) differences[j] = down_signed<bits_below<format>>(x[j]);
    return narrow_in_order(differences, numerics::moment_escape);
  }
};

// -- the update -------------------------------------------------------------------------------------------------

inline Bits master_difference(Floats old, Floats next, Floats direction, const Constants& k) {
  const Bits estimate = bits_of(estimate_master(next, direction, k));
  return add(subtract(bits_of(old), estimate), all(numerics::master_range));
}

/// A group that is updated, nothing of it stored.
struct GroupUpdate {
  Group master;                 ///< new
  Group stored_m, stored_v;     ///< new, rounded, with bits below
  Group of_m, of_v, of_master;  ///< differences
};

/// AdamW on vector `j`, its new moments rounded, and the differences of the old state from the estimates that the new
/// one gives. Returns a bit for each element that becomes NaN.
template <StateFormat format>
[[gnu::always_inline]] inline unsigned update_vector(GroupUpdate& u, int j, const Operands& old, const Constants& k) {
  const Step step = step_of(floats(old.m), floats(old.v), floats(old.gradient), k.c);
  const Floats master = moved(floats(old.master), step.direction, k.c);
  u.master[j] = bits_of(master);
  u.of_master[j] = master_difference(floats(old.master), master, step.direction, k);
  Bits m = bits_of(step.m), v = bits_of(step.v);
  if constexpr (rounds_moments(format)) {
    m = add(m, old.random_m);
    v = add(v, old.random_v);
  }
  u.stored_m[j] = m;
  u.stored_v[j] = v;
  const Bits clear = all(~mask_below<format>);
  u.of_m[j] = subtract(old.m, estimate_m<format>(both(m, clear), step.g, k));
  u.of_v[j] = subtract(old.v, estimate_v<format>(both(v, clear), step.g, k));
  return nan_lanes(master);
}

/// Keeps the masters that escape, and stores the new ones. Returns their codes.
template <StateFormat format, class Layout>
[[gnu::always_inline]] inline Bytes end_masters(const AdamPiece& p, std::int64_t first, const GroupUpdate& u,
                                                EscapeLists& lists) {
  const Bytes codes = Layout::narrow(u.of_master, numerics::master_escape);
  const std::uint64_t escapes = equal(codes, numerics::master_escape);
  if (escapes != 0) append(escapes, lists.master, OldMasters<format>{p, first});
  Layout::template store_masters<format>(p, first, u.master);
  return codes;
}

/// Keeps the moments that escape, and stores the new ones. Returns their codes.
template <StateFormat format, class Layout, class Word>
[[gnu::always_inline]] inline Bytes end_moment(Word* moments, const Group& differences, const Group& stored,
                                               EscapeList& list) {
  const Bytes codes = Layout::template narrow_moments<format>(differences);
  append(equal(codes, numerics::moment_escape), list, OldMoments<Word>{moments});
  Layout::template store_moments<format>(moments, stored);
  return codes;
}

/// Groups ahead of the one at work that are asked for.
template <StateFormat format>
constexpr std::int64_t groups_ahead = format == StateFormat::byte_moments ? 6 : 3;

/// Updates a group and writes its record. Returns false, with nothing stored, where an element becomes NaN.
template <StateFormat format, class Layout>
bool record_group(const UndoBlock& b, std::int64_t first, const Constants& k, typename Layout::Draws& draws,
                  EscapeLists& lists) {
  const AdamPiece& p = b.piece;
  GroupUpdate u;
  unsigned nan = 0;
  const auto update = [&](int j, const Operands& old) __attribute__((always_inline)) {
    nan |= update_vector<format>(u, j, old, k);
  };
  Layout::template for_vectors<format>(p, first, draws, update);
  if (nan != 0) [[unlikely]]
    return false;
  const Bytes of_master = end_masters<format, Layout>(p, first, u, lists);
  const Bytes of_m = end_moment<format, Layout>(moments_at<format>(p.state.m, first), u.of_m, u.stored_m, lists.m);
  const Bytes of_v = end_moment<format, Layout>(moments_at<format>(p.state.v, first), u.of_v, u.stored_v, lists.v);
  store_codes(b.codes + first, of_m, of_v, of_master);
  return true;
}

// -- the update of moments in a byte

/// Watcher of adamw_coded() that leaves a group's codes of masters, in their lowest bits, and the masters that escape.
template <class Layout>
class MasterRecord {
 public:
  MasterRecord(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeList& list)
      : b_(b), first_(first), k_(k), list_(list) {}

  void update(int j, Floats old, const Step& step, Floats master) {
    differences_[j] = master_difference(old, master, step.direction, k_);
  }
  void store() {
    const Bytes codes = Layout::narrow(differences_, numerics::master_escape);
    const std::uint64_t escapes = equal(codes, numerics::master_escape);
    if (escapes != 0) {
      append(escapes, list_, OldMasters<StateFormat::byte_moments>{b_.piece, first_});
    }
    store_bytes(b_.codes + first_, codes);
  }

 private:
  const UndoBlock& b_;
  std::int64_t first_;
  const Constants& k_;
  EscapeList& list_;
  Group differences_;
};

/// Completes the codes of a group whose update is stored by those of v; `old_v`: its old codes.
inline void record_v(const UndoBlock& b, std::int64_t first, const std::uint8_t* old_v, EscapeList& list) {
  constexpr StateFormat format = StateFormat::byte_moments;
  const std::uint8_t offset =
      numerics::v_place_offset(old_exponents<format>(b, first).v, exponents_of<format>(b.piece, first).v);
  const Bytes places = v_places(load_bytes(old_v), load_bytes(moments_at<format>(b.piece.state.v, first)), offset);
  const std::uint64_t escapes = equal(places, numerics::v_place_escape);
  if (escapes != 0) append(escapes, list, OldMoments<std::uint8_t>{old_v});
  store_bytes(b.codes + first, with_masters(places, load_bytes(b.codes + first)));
}

template <class Layout>
std::int64_t record_coded(const UndoBlock& b, EscapeLists& lists) {
  constexpr StateFormat format = StateFormat::byte_moments;
  const Constants k(b);
  alignas(64) std::uint8_t old_v[layout_quantum];
  std::int64_t end = 0;
  for (; end < layout_quantum; end += undo_group) {
    prefetch_group<format>(b.piece, end + groups_ahead<format> * undo_group);
    store_bytes(b.old_m + end, load_bytes(moments_at<format>(b.piece.state.m, end)));
    store_bytes(old_v + end, load_bytes(moments_at<format>(b.piece.state.v, end)));
    MasterRecord<Layout> masters(b, end, k, lists.master);
    if (!adamw_coded(b.piece, end, k.c, k.random, masters)) break;
  }
  // Behind the updates: what a group has stored is not read back at once.
  for (std::int64_t i = 0; i < end; i += undo_group) record_v(b, i, old_v + i, lists.v);
  return end;
}

template <StateFormat format, class Layout>
std::int64_t record(const UndoBlock& b, EscapeLists& lists) {
  if constexpr (format == StateFormat::byte_moments) {
    return record_coded<Layout>(b, lists);
  } else {
    const Constants k(b);
    typename Layout::Draws draws(k.random, b.piece.index);
    for (std::int64_t i = 0; i < layout_quantum; i += undo_group) {
      prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
      if (!record_group<format, Layout>(b, i, k, draws, lists)) return i;
    }
    return layout_quantum;
  }
}

// -- taking back ------------------------------------------------------------------------------------------------

/// The entries of a block's lists that are still to be read.
struct EscapeCursors {
  const std::uint32_t *m, *v, *master;
};

/// Stores a group's old moments, and returns them with bits below.
template <StateFormat format>
void restore_moments(const UndoBlock& b, std::int64_t first, const Group& gradient, const Escapes& escapes,
                     const Constants& k, EscapeCursors& lists, Group& old_m, Group& old_v) {
  auto* const m = moments_at<format>(b.piece.state.m, first);
  auto* const v = moments_at<format>(b.piece.state.v, first);
  Group next_m, next_v;
  InOrder::load_moments<format>(m, next_m);
  InOrder::load_moments<format>(v, next_v);
  constexpr int below = bits_below<format>;
  for (int j = 0; j < vectors; ++j) {
    const Bits code = load(b.codes + first + j * lanes);
    const Floats g = mul(floats(gradient[j]), k.c.gradient_scale);
    old_m[j] = old_moment<format>(estimate_m<format>(next_m[j], g, k), both(code, all(7)));
    old_v[j] = old_moment<format>(estimate_v<format>(next_v[j], g, k), both(down<numerics::v_field>(code), all(7)));
    if (escapes.m != 0) old_m[j] = up<below>(insert(escapes.m, j, down<below>(old_m[j]), lists.m));
    if (escapes.v != 0) old_v[j] = up<below>(insert(escapes.v, j, down<below>(old_v[j]), lists.v));
  }
  InOrder::store_moments<format>(m, old_m);
  InOrder::store_moments<format>(v, old_v);
}

/// restore_moments() of moments in a byte; stores the exponents of their blocks too.
inline void restore_coded_moments(const UndoBlock& b, std::int64_t first, EscapeCursors& lists, Group& old_m,
                                  Group& old_v) {
  constexpr StateFormat format = StateFormat::byte_moments;
  std::uint8_t* const v = moments_at<format>(b.piece.state.v, first);
  const Exponents before = old_exponents<format>(b, first);
  const Bytes places = places_of(load_bytes(b.codes + first));
  const std::uint8_t offset = numerics::v_place_offset(before.v, exponents_of<format>(b.piece, first).v);
  store_bytes(v, old_v_codes(places, load_bytes(v), offset));
  for (std::uint64_t rest = equal(places, numerics::v_place_escape); rest != 0; rest &= rest - 1) {
    v[std::countr_zero(rest)] = static_cast<std::uint8_t>(*lists.v++);
  }
  store_bytes(moments_at<format>(b.piece.state.m, first), load_bytes(b.old_m + first));
  store_exponents<format>(b.piece, first, before);
  InOrder::load_moments<format>(b.old_m + first, old_m);
  InOrder::load_moments<format>(v, old_v);
}

template <StateFormat format>
void restore_group(const UndoBlock& b, std::int64_t first, const Constants& k, EscapeCursors& lists) {
  const AdamPiece& p = b.piece;
  const Exponents before = old_exponents<format>(b, first);
  const Escapes escapes = escapes_of(b.codes + first);
  Group master, gradient, old_m, old_v;
  InOrder::load_masters<format>(p, first, master);
  InOrder::load_gradients<format>(p, first, gradient);
  if constexpr (format == StateFormat::byte_moments) {
    restore_coded_moments(b, first, lists, old_m, old_v);
  } else {
    restore_moments<format>(b, first, gradient, escapes, k, lists, old_m, old_v);
  }
  for (int j = 0; j < vectors; ++j) {
    const Step step =
        step_of(read_m<format>(old_m[j], before), read_v<format>(old_v[j], before), floats(gradient[j]), k.c);
    const Bits estimate = bits_of(estimate_master(floats(master[j]), step.direction, k));
    const Bits code = load(b.codes + first + j * lanes);
    master[j] = subtract(add(estimate, down<numerics::master_field>(code)), all(numerics::master_range));
    if (escapes.master != 0) master[j] = insert(escapes.master, j, master[j], lists.master);
  }
  InOrder::store_masters<format>(p, first, master);
}

template <StateFormat format>
void restore(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  const Constants k(b);
  EscapeCursors rest{lists.m.bits, lists.v.bits, lists.master.bits};
  for (std::int64_t i = 0; i < count; i += undo_group) {
    prefetch_group<format>(b.piece, i + groups_ahead<format> * undo_group);
    restore_group<format>(b, i, k, rest);
  }
}

/// `Layout`: of vectors of elements whose moments are rounded.
template <class Layout>
std::int64_t record_block(const UndoBlock& b, EscapeLists& lists) {
  std::int64_t updated = 0;
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) {
    updated = record<format, std::conditional_t<rounds_moments(format), Layout, InOrder>>(b, lists);
  });
  return updated;
}
inline void restore_block(const UndoBlock& b, const EscapeLists& lists, std::int64_t count) {
  with_adamw_format(b.piece, [&]<StateFormat format>(Format<format>) { restore<format>(b, lists, count); });
}

}  // namespace
}  // namespace tandem::kernels
