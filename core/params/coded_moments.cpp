#include "core/params/coded_moments.hpp"

#include <algorithm>
#include <array>

#include "core/base/error.hpp"
#include "core/numerics/moment_codes.hpp"

namespace tandem {
namespace {

struct OfM {
  static std::uint32_t exponent(std::uint32_t largest) { return numerics::m_exponent(largest); }
  static float decode(std::uint32_t code, std::uint32_t exponent) { return numerics::decode_m(code, exponent); }
  static std::uint8_t encode(float m, std::uint32_t exponent) {
    return numerics::encode_m(m, exponent, numerics::nearest_increment);
  }
};

struct OfV {
  static std::uint32_t exponent(std::uint32_t largest) { return numerics::v_exponent(largest); }
  static float decode(std::uint32_t code, std::uint32_t exponent) { return numerics::decode_v(code, exponent); }
  static std::uint8_t encode(float v, std::uint32_t exponent) {
    return numerics::encode_v(v, exponent, numerics::nearest_increment);
  }
};

/// Calls body(block, at, count, done) for each block's part of [first, first + count): `at` elements into the block,
/// and `done` of all before it.
template <class Body>
void for_blocks(std::uint8_t* records, std::int64_t first, std::int64_t count, const Body& body) {
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t at = (first + done) % coded_block;
    const std::int64_t part = std::min(coded_block - at, count - done);
    body(coded_block_at(records, first + done - at), at, part, done);
    done += part;
  }
}

template <class Moment>
void decode(const std::uint8_t* records, std::int64_t first, std::span<float> values) {
  const auto read = [&](const CodedBlock& block, std::int64_t at, std::int64_t count, std::int64_t done) {
    const std::uint32_t exponent = *block.exponent;
    for (std::int64_t i = 0; i < count; ++i) {
      values[static_cast<std::size_t>(done + i)] = Moment::decode(block.codes[at + i], exponent);
    }
  };
  for_blocks(const_cast<std::uint8_t*>(records), first, std::ssize(values), read);  // `read` writes nothing
}

template <class Moment>
void encode(std::span<const float> values, std::uint8_t* records, std::int64_t first) {
  const auto write = [&](const CodedBlock& block, std::int64_t at, std::int64_t count, std::int64_t done) {
    std::array<float, static_cast<std::size_t>(coded_block)> whole{};
    if (count < coded_block) {
      for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = Moment::decode(block.codes[i], *block.exponent);
    }
    std::copy_n(values.begin() + done, count, whole.begin() + at);
    std::uint32_t largest = 0;
    for (const float x : whole) largest = std::max(largest, numerics::float_bits(x) & 0x7fffffffu);
    const std::uint32_t exponent = Moment::exponent(largest);
    for (std::size_t i = 0; i < whole.size(); ++i) block.codes[i] = Moment::encode(whole[i], exponent);
    *block.exponent = static_cast<std::uint8_t>(exponent);
  };
  for_blocks(records, first, std::ssize(values), write);
}

}  // namespace

void decode_moments(StateArray array, const std::uint8_t* records, std::int64_t first, std::span<float> values) {
  if (array == StateArray::master) throw MisuseError("a master is no moment");
  array == StateArray::m ? decode<OfM>(records, first, values) : decode<OfV>(records, first, values);
}

void encode_moments(StateArray array, std::span<const float> values, std::uint8_t* records, std::int64_t first) {
  if (array == StateArray::master) throw MisuseError("a master is no moment");
  array == StateArray::m ? encode<OfM>(values, records, first) : encode<OfV>(values, records, first);
}

}  // namespace tandem
