// Moments in a byte each: what a code stands for, that it is a neighbour, without bias, and that what was stored reads
// back as what is stored the same.
#include <set>

#include "core/base/error.hpp"
#include "core/numerics/adam_state.hpp"
#include "core/params/coded_moments.hpp"
#include "tests/cpu_ops/op_testing.hpp"

namespace tandem::testing {
namespace {

using numerics::float_bits;

constexpr std::size_t block = coded_block;

/// The value of a code by powers of two in double: m is (8 + f) 2^(e - 14 - 3), below that a multiple of 2^-17, of the
/// block's power of two; v is 2^(c / 8 - 31) (1 + c % 8 / 8).
double value_of_m(std::uint32_t code, std::uint32_t exponent) {
  const int magnitude = static_cast<int>(code & 127u);
  const int power = static_cast<int>(exponent) - 127;
  const double x =
      magnitude < 8 ? std::ldexp(magnitude, power - 17) : std::ldexp(8 + magnitude % 8, power - 18 + magnitude / 8);
  return (code & 128u) != 0 ? -x : x;
}
double value_of_v(std::uint32_t code, std::uint32_t exponent) {
  if (code == 0) return 0.0;
  // The lowest of fp32's exponents is the one without a leading one.
  const int power = static_cast<int>(code / 8 + exponent) - 31;
  return power == 0 ? std::ldexp(code % 8, -126 - 3) : std::ldexp(8 + code % 8, power - 127 - 3);
}

TEST(MomentCodes, StandForWhatTheirBitsSay) {
  for (std::uint32_t exponent = numerics::least_m_exponent; exponent <= numerics::most_m_exponent; ++exponent) {
    for (std::uint32_t code = 0; code < 256; ++code) {
      ASSERT_EQ(numerics::decode_m(code, exponent), value_of_m(code, exponent)) << code << ", " << exponent;
    }
  }
  for (std::uint32_t exponent = numerics::least_v_exponent; exponent <= numerics::most_v_exponent; ++exponent) {
    for (std::uint32_t code = 0; code < 256; ++code) {
      ASSERT_EQ(numerics::decode_v(code, exponent), value_of_v(code, exponent)) << code << ", " << exponent;
    }
  }
}

/// Whatever rounding adds, what a code stands for has that code.
TEST(MomentCodes, ComeBackFromTheirValues) {
  constexpr std::uint32_t most = (1u << numerics::below_code) - 1;
  for (const std::uint32_t increment : {0u, numerics::nearest_increment, numerics::random_increment(0xffff), most}) {
    for (std::uint32_t exponent = numerics::least_m_exponent; exponent <= numerics::most_m_exponent; ++exponent) {
      for (std::uint32_t code = 0; code < 256; ++code) {
        const float m = numerics::decode_m(code, exponent);
        ASSERT_EQ(numerics::encode_m(m, exponent, increment), code) << exponent << ", " << increment;
      }
    }
    for (std::uint32_t exponent = numerics::least_v_exponent; exponent <= numerics::most_v_exponent; ++exponent) {
      for (std::uint32_t code = 0; code < 256; ++code) {
        const float v = numerics::decode_v(code, exponent);
        ASSERT_EQ(numerics::encode_v(v, exponent, increment), code) << exponent << ", " << increment;
      }
    }
  }
}

TEST(MomentCodes, OfMemoryThatIsZeroAreZero) {
  EXPECT_EQ(float_bits(numerics::decode_m(0, 0)), 0U);
  EXPECT_EQ(float_bits(numerics::decode_v(0, 0)), 0U);
}

/// Moments of any size, with zeros, numbers without a leading one, and the largest.
std::vector<float> any_values(Random& random, std::size_t count, bool negative) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    // Blocks by turns: of like values, of values far apart, of any bits.
    const std::size_t kind = i / block % 3;
    const float x = kind == 0   ? random.normal(1e-3F)
                    : kind == 1 ? std::ldexp(random.normal(1.0F), -static_cast<int>(random.below(60)))
                                : numerics::bits_float(random.bits());
    values[i] = std::isfinite(x) ? (negative ? x : std::abs(x)) : 0.0F;
  }
  return values;
}

/// A stored moment is never further from its value than the next code. For m that is 2^-17 of the power of two of the
/// block's largest, or an eighth of the value; for v an eighth of the value, or the smallest code.
TEST(MomentCodes, AreNeighbours) {
  Random random(3);
  const std::vector<float> values = any_values(random, 300 * block, true);
  for (std::size_t b = 0; b < values.size() / block; ++b) {
    const auto part = std::span(values).subspan(b * block, block);
    std::uint32_t largest = 0;
    for (const float x : part) largest = std::max(largest, float_bits(std::abs(x)));
    const std::uint32_t of_m = numerics::m_exponent(largest), of_v = numerics::v_exponent(largest);
    for (const float x : part) {
      const std::uint32_t increment = numerics::random_increment(random.bits() & 0xffffu);
      const double m = numerics::decode_m(numerics::encode_m(x, of_m, increment), of_m);
      const double size = std::abs(static_cast<double>(x));
      const double step = std::max(size / 8, std::ldexp(1.0, static_cast<int>(of_m) - 127 - 17));
      // The clamped exponents have more above their power of two than one binade.
      const double most = std::ldexp(1.875, static_cast<int>(of_m) - 127);
      if (size > most) {
        ASSERT_EQ(std::abs(m), most);
      } else {
        ASSERT_LE(std::abs(m - static_cast<double>(x)), step) << x;
      }
      const double v = numerics::decode_v(numerics::encode_v(std::abs(x), of_v, increment), of_v);
      const double least = value_of_v(1, of_v);
      ASSERT_EQ(v == 0.0, size == 0.0) << x;
      ASSERT_LE(std::abs(v - size), std::max({size / 8, least, std::ldexp(1.0, -129)})) << x;
      ASSERT_TRUE(size == 0.0 || v >= std::min(least, size)) << x;
    }
  }
}

/// Mean of what is stored over all random bits: it is the moment, to half of a 2^-16 of the distance of two codes,
/// which is as fine as they are.
TEST(MomentCodes, AreRoundedWithoutBias) {
  Random random(4);
  const std::uint32_t exponent = 120;
  for (int i = 0; i < 60; ++i) {
    // m: also where codes are equally far apart, and below the smallest.
    const float m = std::ldexp(1.0F + static_cast<float>(random.below(1000)) * 9e-4F, -7 - i % 20);
    const float v = std::ldexp(1.0F + static_cast<float>(random.below(1000)) * 9e-4F, -7 - i % 30);
    double sum_m = 0.0, sum_v = 0.0;
    for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
      const std::uint32_t increment = numerics::random_increment(bits);
      sum_m += static_cast<double>(numerics::decode_m(numerics::encode_m(m, exponent, increment), exponent));
      sum_v += static_cast<double>(numerics::decode_v(numerics::encode_v(v, exponent, increment), exponent));
    }
    const double step = std::max(std::ldexp(1.0, -7 - 17), static_cast<double>(m) / 8);
    EXPECT_NEAR(sum_m / 65536, static_cast<double>(m), 0.501 * step / 65536) << m;
    EXPECT_NEAR(sum_v / 65536, static_cast<double>(v), 0.501 * static_cast<double>(v) / 8 / 65536) << v;
  }
}

/// Stored moments that are stored again have the same values, perhaps under another exponent.
TEST(CodedMoments, ThatWereStoredAreStoredTheSame) {
  Random random(5);
  for (const StateArray array : {StateArray::m, StateArray::v}) {
    const std::vector<float> values = any_values(random, 12 * coded_record, array == StateArray::m);
    std::vector<std::uint8_t> records(coded_bytes(std::ssize(values)));
    encode_moments(array, values, records.data(), 0);
    std::vector<float> read(values.size());
    decode_moments(array, records.data(), 0, read);
    const auto expect_read = [&](const std::vector<std::uint8_t>& stored) {
      std::vector<float> again(values.size());
      decode_moments(array, stored.data(), 0, again);
      for (std::size_t i = 0; i < read.size(); ++i) ASSERT_EQ(float_bits(again[i]), float_bits(read[i])) << i;
    };
    std::vector<std::uint8_t> again(records.size());
    encode_moments(array, read, again.data(), 0);
    expect_read(again);
    // In pieces, of which blocks and records are cut.
    std::vector<std::uint8_t> pieces(records.size());
    for (std::size_t at = 0; at < read.size();) {
      const std::size_t count = std::min(1 + static_cast<std::size_t>(random.below(1500)), read.size() - at);
      encode_moments(array, std::span(read).subspan(at, count), pieces.data(), static_cast<std::int64_t>(at));
      std::vector<float> part(count);
      decode_moments(array, pieces.data(), static_cast<std::int64_t>(at), part);
      ASSERT_TRUE(std::equal(part.begin(), part.end(), read.begin() + static_cast<std::ptrdiff_t>(at)));
      at += count;
    }
    expect_read(pieces);
  }
}

TEST(CodedMoments, OfABlockWithANanAreAllNan) {
  for (const StateArray array : {StateArray::m, StateArray::v}) {
    std::vector<float> values(2 * block, 0.25F);
    values[block + 3] = std::nanf("");
    std::vector<std::uint8_t> records(coded_bytes(std::ssize(values)));
    encode_moments(array, values, records.data(), 0);
    decode_moments(array, records.data(), 0, values);
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(std::isnan(values[i]), i >= block) << i;
    values[3] = std::numeric_limits<float>::infinity();
    encode_moments(array, std::span(values).first(block), records.data(), 0);
    decode_moments(array, records.data(), 0, std::span(values).first(block));
    EXPECT_GT(values[3], 1e38F);
    EXPECT_TRUE(std::isfinite(values[3]));
  }
}

TEST(CodedMoments, HoldNoMaster) {
  std::vector<float> value(1);
  std::vector<std::uint8_t> record(coded_bytes(1));
  EXPECT_THROW(encode_moments(StateArray::master, value, record.data(), 0), MisuseError);
  EXPECT_THROW(decode_moments(StateArray::master, record.data(), 0, value), MisuseError);
}

}  // namespace
}  // namespace tandem::testing
