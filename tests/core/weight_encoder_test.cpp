// Frozen weights in other formats: every element gets the nearest code of its block, in whatever pieces the values
// come, and what has no code is refused. Values of bitsandbytes are compared in tests/train.
#include "core/params/weight_encoder.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "core/base/error.hpp"
#include "core/numerics/weight_codes.hpp"

namespace tandem {
namespace {

using ::testing::HasSubstr;

constexpr WeightCode all_codes[] = {WeightCode::int8, WeightCode::nf4, WeightCode::nf4_double, WeightCode::fp8};
/// Odd sizes, of which blocks end within rows, and bytes within matrices; one with more than 256 blocks.
constexpr CodedShape shapes[] = {{1, 1, 1}, {1, 2, 11}, {1, 5, 11}, {3, 5, 11}, {1, 130, 257}, {2, 129, 128}};

/// Keeps what it is given, and checks that nothing is missing between.
struct Kept : CodeSink {
  Kept(WeightCode code, const CodedShape& shape)
      : bits(code_bits(code)),
        all_codes(static_cast<std::size_t>((shape.count() * bits + 7) / 8)),
        all_scales(static_cast<std::size_t>(scale_floats(code, shape))) {}
  void codes(std::int64_t first, std::span<const std::byte> part) override {
    ASSERT_EQ(first * bits, codes_end * 8);
    ASSERT_LE(codes_end + std::ssize(part), std::ssize(all_codes));
    std::ranges::copy(part, all_codes.begin() + codes_end);
    codes_end += std::ssize(part);
  }
  void scales(std::int64_t first, std::span<const float> part) override {
    ASSERT_EQ(first, scales_end);
    ASSERT_LE(scales_end + std::ssize(part), std::ssize(all_scales));
    std::memcpy(all_scales.data() + scales_end, part.data(), part.size_bytes());
    scales_end += std::ssize(part);
  }
  bool is_complete() const { return codes_end == std::ssize(all_codes) && scales_end == std::ssize(all_scales); }

  int bits;
  std::vector<std::byte> all_codes;
  std::vector<float> all_scales;
  std::ptrdiff_t codes_end = 0, scales_end = 0;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Values of many magnitudes, with zeros; the first rows are zero as a whole where there are several.
std::vector<float> values_for(const CodedShape& shape) {
  std::mt19937 engine(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float x = std::ldexp(normal(engine), -static_cast<int>(i / 64 % 20));
    const bool in_zeros = shape.rows > 2 && static_cast<std::int64_t>(i) < 2 * shape.columns;
    values[i] = in_zeros || i % 17 == 0 ? 0.0F : x;
  }
  return values;
}

Kept encoded(WeightCode code, const CodedShape& shape, std::span<const float> values, std::size_t most) {
  Kept kept(code, shape);
  WeightEncoder encoder(code, shape, "w", kept);
  std::mt19937 engine(3);
  while (!values.empty()) {
    const std::size_t count = std::min<std::size_t>(1 + engine() % most, values.size());
    encoder.add(values.first(count));
    values = values.subspan(count);
  }
  encoder.finish();
  return kept;
}

std::vector<float> decoded(WeightCode code, const CodedShape& shape, const Kept& kept) {
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  decode_range(code, shape, kept.all_codes.data(), kept.all_scales.data(), 0, values);
  return values;
}

TEST(WeightEncoder, PiecesOfTheValuesChangeNothing) {
  for (const CodedShape& shape : shapes) {
    const std::vector<float> values = values_for(shape);
    for (const WeightCode code : all_codes) {
      const Kept whole = encoded(code, shape, values, 1u << 20);
      ASSERT_TRUE(whole.is_complete()) << static_cast<int>(code) << " of " << shape.count();
      for (const std::size_t most : {std::size_t{1}, std::size_t{3}, std::size_t{1000}}) {
        const Kept pieces = encoded(code, shape, values, most);
        ASSERT_TRUE(pieces.is_complete());
        ASSERT_EQ(pieces.all_codes, whole.all_codes);
        ASSERT_TRUE(same_bits(pieces.all_scales, whole.all_scales));
      }
    }
  }
}

TEST(WeightEncoder, RangesAreTheWhole) {
  for (const CodedShape& shape : shapes) {
    for (const WeightCode code : all_codes) {
      const Kept kept = encoded(code, shape, values_for(shape), 1000);
      const std::vector<float> whole = decoded(code, shape, kept);
      for (const std::size_t piece : {std::size_t{1}, std::size_t{22}, std::size_t{55}, std::size_t{1021}}) {
        std::vector<float> values(whole.size());
        for (std::size_t first = 0; first < values.size(); first += piece) {
          decode_range(code, shape, kept.all_codes.data(), kept.all_scales.data(), static_cast<std::int64_t>(first),
                       std::span(values).subspan(first, std::min(piece, values.size() - first)));
        }
        ASSERT_TRUE(same_bits(values, whole));
      }
    }
  }
}

/// Largest magnitude of the elements that share a scale with each element, found one by one.
std::vector<float> largest_beside(WeightCode code, const CodedShape& shape, const std::vector<float>& values) {
  const std::int64_t each = shape.rows * shape.columns;
  const auto block_of = [&](std::int64_t i) {
    const std::int64_t matrix = i / each, row = i % each / shape.columns, column = i % shape.columns;
    if (code == WeightCode::int8) return std::tuple{matrix, row, std::int64_t{0}};
    if (code == WeightCode::fp8) return std::tuple{matrix, row / 128, column / 128};
    return std::tuple{matrix, i % each / 64, std::int64_t{0}};
  };
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, float> largest;
  for (std::int64_t i = 0; i < shape.count(); ++i) {
    float& most = largest[block_of(i)];
    most = std::max(most, std::abs(values[static_cast<std::size_t>(i)]));
  }
  std::vector<float> found(values.size());
  for (std::int64_t i = 0; i < shape.count(); ++i) found[static_cast<std::size_t>(i)] = largest[block_of(i)];
  return found;
}

/// No value of any code of the element's block is nearer, but for the rounding of the division.
TEST(WeightEncoder, ElementsGetTheNearestValueOfTheirBlock) {
  for (const CodedShape& shape : shapes) {
    const std::vector<float> values = values_for(shape);
    for (const WeightCode code : {WeightCode::int8, WeightCode::nf4, WeightCode::fp8}) {
      const std::vector<float> read = decoded(code, shape, encoded(code, shape, values, 1000));
      const std::vector<float> largest = largest_beside(code, shape, values);
      for (std::size_t i = 0; i < values.size(); ++i) {
        double nearest = HUGE_VAL;
        for (std::uint32_t c = 0; c < (1u << code_bits(code)); ++c) {
          const float of_int8 = numerics::int8_value(static_cast<std::int8_t>(c), numerics::int8_scale(largest[i]));
          const float value = code == WeightCode::int8  ? of_int8
                              : code == WeightCode::nf4 ? numerics::nf4_value(c, largest[i])
                                                        : numerics::fp8_value(c, numerics::fp8_scale(largest[i]));
          if (std::isnan(value)) continue;
          nearest = std::min(nearest, std::abs(static_cast<double>(value) - static_cast<double>(values[i])));
        }
        const double distance = std::abs(static_cast<double>(read[i]) - static_cast<double>(values[i]));
        ASSERT_LE(distance, nearest + 1e-6 * static_cast<double>(largest[i])) << i << ", " << static_cast<int>(code);
      }
    }
  }
}

TEST(WeightEncoder, ZerosAreZeros) {
  const CodedShape shape{1, 3, 70};
  const std::vector<float> zeros(210, 0.0F);
  for (const WeightCode code : {WeightCode::int8, WeightCode::nf4, WeightCode::fp8}) {
    EXPECT_TRUE(same_bits(decoded(code, shape, encoded(code, shape, zeros, 100)), zeros)) << static_cast<int>(code);
  }
  for (const float x : decoded(WeightCode::nf4_double, shape, encoded(WeightCode::nf4_double, shape, zeros, 100))) {
    EXPECT_EQ(x, 0.0F);
  }
}

/// A byte keeps a scale to a part of the largest deviation of its 256 from the mean: the map's widest step is 0.9 / 64.
TEST(WeightEncoder, ScalesInBytesAreNear) {
  const CodedShape shape{1, 130, 257};
  const std::vector<float> values = values_for(shape);
  const Kept plain = encoded(WeightCode::nf4, shape, values, 1000);
  const Kept bytes = encoded(WeightCode::nf4_double, shape, values, 1000);
  EXPECT_EQ(bytes.all_codes, plain.all_codes);
  const auto of = numerics::nf4_scales(WeightCode::nf4_double, shape, bytes.all_scales.data());
  double sum = 0.0;
  for (const float x : plain.all_scales) sum += static_cast<double>(x);
  EXPECT_EQ(of.of_bytes[0], static_cast<float>(sum / static_cast<double>(plain.all_scales.size())));
  for (std::int64_t b = 0; b < numerics::nf4_blocks(shape); ++b) {
    const float expected = plain.all_scales[static_cast<std::size_t>(b)];
    const float bound = of.of_bytes[1 + b / 256] * (0.45F / 64 + 1e-6F);
    ASSERT_LE(std::abs(numerics::absmax_of(of, b) - expected), bound) << b;
  }
}

TEST(ScaleBytes, AscendFromTheLowestToOne) {
  for (std::uint32_t byte = 1; byte < 256; ++byte) {
    EXPECT_LT(numerics::scale_of_byte(byte - 1), numerics::scale_of_byte(byte)) << byte;
    if (byte < 127) {
      EXPECT_EQ(numerics::scale_of_byte(byte), -numerics::scale_of_byte(254 - byte)) << byte;
    }
  }
  EXPECT_EQ(numerics::scale_of_byte(127), 0.0F);
  EXPECT_EQ(numerics::scale_of_byte(255), 1.0F);
}

TEST(Nf4, BetweenTwoCodesTheMiddleBelongsToTheLower) {
  for (std::uint32_t code = 0; code + 1 < 16; ++code) {
    const float middle = (numerics::nf4_relative(code) + numerics::nf4_relative(code + 1)) / 2;
    EXPECT_EQ(numerics::nf4_code(middle), code);
    EXPECT_EQ(numerics::nf4_code(std::nextafter(middle, 2.0F)), code + 1);
    EXPECT_EQ(numerics::nf4_code(numerics::nf4_relative(code)), code);
  }
}

TEST(Int8, TiesGoToTheEvenCode) {
  for (int i = -126; i < 127; ++i) {
    const float tie = static_cast<float>(i) + 0.5F;
    EXPECT_EQ(numerics::int8_code(tie, 1.0F), static_cast<int>(std::nearbyint(static_cast<double>(tie))));
  }
  EXPECT_EQ(numerics::int8_code(200.0F, 1.0F), 127);
  EXPECT_EQ(numerics::int8_code(-200.0F, 1.0F), -127);
}

TEST(WeightEncoder, RefusesByNameWhatIsNotFinite) {
  const CodedShape shape{1, 3, 70};
  for (const WeightCode code : all_codes) {
    for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
      Kept kept(code, shape);
      WeightEncoder encoder(code, shape, "block.3.up", kept);
      std::vector<float> values(50, 1.0F);
      encoder.add(values);
      values[20] = bad;
      try {
        encoder.add(values);
        FAIL() << "accepted";
      } catch (const InputError& error) {
        EXPECT_THAT(error.what(), HasSubstr("block.3.up"));
        EXPECT_THAT(error.what(), HasSubstr("element 70 "));
      }
    }
  }
}

TEST(WeightEncoder, WantsAllValuesAndNoMore) {
  const CodedShape shape{1, 2, 11};
  for (const WeightCode code : all_codes) {
    Kept kept(code, shape);
    WeightEncoder encoder(code, shape, "w", kept);
    encoder.add(std::vector<float>(21, 1.0F));
    EXPECT_THROW(encoder.finish(), MisuseError);
    EXPECT_THROW(encoder.add(std::vector<float>(2, 1.0F)), MisuseError);
  }
  Kept kept(WeightCode::int8, shape);
  EXPECT_THROW(WeightEncoder(WeightCode::none, shape, "w", kept), MisuseError);
}

}  // namespace
}  // namespace tandem
