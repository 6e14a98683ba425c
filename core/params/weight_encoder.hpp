#pragma once
// Frozen weights to codes and scales (core/numerics/weight_codes.hpp), in order and in pieces, and ranges of them back.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/numerics/weight_code.hpp"

namespace tandem {

/// Receiver of codes and scales as they are stored. Each kind comes in order, without gaps; scales may come before or
/// after the codes that they belong to.
class CodeSink {
 public:
  virtual ~CodeSink() = default;
  /// Codes from element `first` on, which is even where a byte holds two. The last byte of all may hold one.
  virtual void codes(std::int64_t first, std::span<const std::byte> bytes) = 0;
  /// Scales from float `first` of scale_floats() on. Of nf4_double some are bytes: copy them, compute nothing.
  virtual void scales(std::int64_t first, std::span<const float> floats) = 0;
};

/// Encodes the values of one weight. Takes memory for a row of int8, for 128 rows of fp8, and for the scales of
/// nf4_double, which come when all is known; else for a few thousand elements.
class WeightEncoder {
 public:
  /// `name` is the weight's, for errors. The sink must outlive the encoder. Throws MisuseError for WeightCode::none.
  WeightEncoder(WeightCode code, const CodedShape& shape, std::string name, CodeSink& sink);

  /// The next values, any number. Throws InputError that names the weight where one of them is not finite; then none of
  /// them is taken.
  void add(std::span<const float> values);
  /// Hands out what is left. Throws MisuseError where values are missing.
  void finish();

 private:
  std::int64_t unit_length() const;
  void encode_unit();
  void encode_row(std::span<const float> row);
  void encode_nf4(std::span<const float> block);
  void encode_fp8(std::span<const float> rows);
  void append_nibble(std::uint32_t code);
  void append_coded_scales();
  void flush(bool all);

  WeightCode code_;
  CodedShape shape_;
  std::string name_;
  CodeSink& sink_;
  std::vector<float> unit_;     ///< values that are encoded together, as many as have come
  std::int64_t encoded_ = 0;    ///< values before these
  std::vector<std::byte> out_;  ///< codes not yet handed out
  bool half_byte_ = false;      ///< the last of them lacks its lower half
  std::int64_t codes_out_ = 0;  ///< elements whose codes have been
  std::vector<float> scales_;   ///< scales not yet handed out; of nf4_double, all
  std::int64_t scales_out_ = 0;
};

/// Values of elements [first, first + values.size()) of a coded weight in fp32, not rounded; rounded to bf16 they are
/// those of Ops::decode. `codes` and `scales`: all of the weight. Throws MisuseError for WeightCode::none.
void decode_range(WeightCode code, const CodedShape& shape, const std::byte* codes, const float* scales,
                  std::int64_t first, std::span<float> values);

}  // namespace tandem
