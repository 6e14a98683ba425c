#include "core/params/weight_encoder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "core/numerics/weight_codes.hpp"

namespace tandem {
namespace {

using numerics::parts_of;

/// Bytes and floats that are handed out together, at least.
constexpr std::size_t at_once = 16 * 1024;

bool is_nf4(WeightCode code) { return code == WeightCode::nf4 || code == WeightCode::nf4_double; }

/// Largest magnitude of finite values, by their bits, which compare like it.
float largest_of(std::span<const float> values) {
  std::uint32_t largest = 0;
  for (const float x : values) largest = std::max(largest, numerics::float_bits(x) & 0x7fffffffu);
  return numerics::bits_float(largest);
}

/// Bounds between the numbers of neighbouring bytes.
std::array<float, 255> scale_bounds() {
  std::array<float, 255> bounds{};
  for (std::uint32_t i = 0; i < bounds.size(); ++i) {
    bounds[i] = numerics::mul(0.5F, numerics::add(numerics::scale_of_byte(i), numerics::scale_of_byte(i + 1)));
  }
  return bounds;
}

/// Elements of a weight that are encoded together.
std::int64_t unit_of(WeightCode code, const CodedShape& shape) {
  if (code == WeightCode::int8) return shape.columns;
  return code == WeightCode::fp8 ? fp8_side * shape.columns : nf4_block;
}

}  // namespace

WeightEncoder::WeightEncoder(WeightCode code, const CodedShape& shape, std::string name, CodeSink& sink)
    : code_(code), shape_(shape), name_(std::move(name)), sink_(sink) {
  if (code == WeightCode::none) throw MisuseError(fmt::format("weights of {} have no code", name_));
}

/// Values that the unit at hand has when it is whole: within a matrix.
std::int64_t WeightEncoder::unit_length() const {
  const std::int64_t each = shape_.rows * shape_.columns;
  return std::min(unit_of(code_, shape_), each - encoded_ % each);
}

void WeightEncoder::add(std::span<const float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    const std::int64_t element = encoded_ + std::ssize(unit_) + static_cast<std::int64_t>(i);
    throw InputError(fmt::format("weights of {}", name_),
                     fmt::format("element {} is {}, which has no code", element, values[i]),
                     "use weights that are finite, or train without --base");
  }
  while (!values.empty()) {
    if (encoded_ == shape_.count()) throw MisuseError(fmt::format("weights of {}", name_), "more values than elements");
    const auto missing = static_cast<std::size_t>(unit_length() - std::ssize(unit_));
    const auto part = values.first(std::min(missing, values.size()));
    unit_.insert(unit_.end(), part.begin(), part.end());
    values = values.subspan(part.size());
    if (part.size() == missing) encode_unit();
  }
}

void WeightEncoder::encode_unit() {
  if (code_ == WeightCode::int8) {
    encode_row(unit_);
  } else if (code_ == WeightCode::fp8) {
    encode_fp8(unit_);
  } else {
    encode_nf4(unit_);
  }
  encoded_ += std::ssize(unit_);
  unit_.clear();
  flush(false);
}

void WeightEncoder::encode_row(std::span<const float> row) {
  const float scale = numerics::int8_scale(largest_of(row));
  const std::size_t before = out_.size();
  out_.resize(before + row.size());
  std::byte* const to = out_.data() + before;
  for (std::size_t i = 0; i < row.size(); ++i) to[i] = static_cast<std::byte>(numerics::int8_code(row[i], scale));
  scales_.push_back(scale);
}

void WeightEncoder::encode_nf4(std::span<const float> block) {
  const float absmax = largest_of(block), factor = numerics::relative_factor(absmax);
  std::array<std::uint32_t, static_cast<std::size_t>(nf4_block)> codes{};
  for (std::size_t i = 0; i < block.size(); ++i) codes[i] = numerics::nf4_code(numerics::mul(block[i], factor));
  for (std::size_t i = 0; i < block.size(); ++i) append_nibble(codes[i]);
  scales_.push_back(absmax);
}

/// `rows`: some whole ones of a matrix, of which each block takes its part.
void WeightEncoder::encode_fp8(std::span<const float> rows) {
  const auto columns = static_cast<std::size_t>(shape_.columns);
  const std::size_t before = out_.size();
  out_.resize(before + rows.size());
  std::byte* const to = out_.data() + before;
  for (std::size_t column = 0; column < columns; column += static_cast<std::size_t>(fp8_side)) {
    const std::size_t width = std::min(static_cast<std::size_t>(fp8_side), columns - column);
    float largest = 0.0F;
    for (std::size_t at = column; at < rows.size(); at += columns) {
      largest = std::max(largest, largest_of(rows.subspan(at, width)));
    }
    const float scale = numerics::fp8_scale(largest);
    for (std::size_t at = column; at < rows.size(); at += columns) {
      for (std::size_t i = at; i < at + width; ++i) to[i] = static_cast<std::byte>(numerics::fp8_code(rows[i], scale));
    }
    scales_.push_back(scale);
  }
}

void WeightEncoder::append_nibble(std::uint32_t code) {
  if (half_byte_) {
    out_.back() |= static_cast<std::byte>(code);
  } else {
    out_.push_back(static_cast<std::byte>(code << 4));
  }
  half_byte_ = !half_byte_;
}

void WeightEncoder::finish() {
  if (encoded_ != shape_.count()) {
    throw MisuseError(fmt::format("weights of {}", name_), fmt::format("{} of {} values", encoded_, shape_.count()));
  }
  if (half_byte_) append_nibble(numerics::nf4_zero);
  if (code_ == WeightCode::nf4_double) append_coded_scales();
  flush(true);
}

/// Puts bytes in place of the scales, less their mean, and behind them that mean and the bytes' own scales.
void WeightEncoder::append_coded_scales() {
  double sum = 0.0;
  for (const float scale : scales_) sum += static_cast<double>(scale);
  const float offset = scales_.empty() ? 0.0F : static_cast<float>(sum / static_cast<double>(scales_.size()));
  for (float& scale : scales_) scale = numerics::add(scale, -offset);

  static const std::array<float, 255> bounds = scale_bounds();
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(parts_of(std::ssize(scales_), 4)) * sizeof(float));
  std::vector<float> own{offset};
  constexpr auto together = static_cast<std::size_t>(nf4_scale_block);
  for (std::size_t begin = 0; begin < scales_.size(); begin += together) {
    const auto block = std::span(scales_).subspan(begin, std::min(together, scales_.size() - begin));
    own.push_back(largest_of(block));
    const float factor = numerics::relative_factor(own.back());
    for (std::size_t i = 0; i < block.size(); ++i) {
      const auto above = std::ranges::lower_bound(bounds, numerics::mul(block[i], factor));
      bytes[begin + i] = static_cast<std::uint8_t>(above - bounds.begin());
    }
  }
  scales_.resize(bytes.size() / sizeof(float));
  std::memcpy(scales_.data(), bytes.data(), bytes.size());
  scales_.insert(scales_.end(), own.begin(), own.end());
}

/// Hands out whole bytes, and scales, where there are enough or `all` are to go.
void WeightEncoder::flush(bool all) {
  const std::size_t whole = out_.size() - (half_byte_ ? 1 : 0);
  if (whole > 0 && (all || whole >= at_once)) {
    sink_.codes(codes_out_, std::span(out_).first(whole));
    codes_out_ += static_cast<std::int64_t>(whole) * (is_nf4(code_) ? 2 : 1);
    out_.erase(out_.begin(), out_.begin() + static_cast<std::ptrdiff_t>(whole));
  }
  const bool complete = code_ != WeightCode::nf4_double || all;
  if (complete && !scales_.empty() && (all || scales_.size() >= at_once)) {
    sink_.scales(scales_out_, scales_);
    scales_out_ += std::ssize(scales_);
    scales_.clear();
  }
}

namespace {

/// Calls body(scale, begin, end) for the elements of [first, first + count) that share each scale.
template <class Body>
void for_runs(WeightCode code, const CodedShape& shape, std::int64_t first, std::int64_t count, const Body& body) {
  for (std::int64_t at = first; at < first + count;) {
    const numerics::ScaleRun run = numerics::scale_run(code, shape, at);
    const std::int64_t end = std::min(run.end, first + count);
    body(run.scale, at, end);
    at = end;
  }
}

}  // namespace

void decode_range(WeightCode code, const CodedShape& shape, const std::byte* codes, const float* scales,
                  std::int64_t first, std::span<float> values) {
  if (code == WeightCode::none) throw MisuseError("weights without a code are not decoded");
  const auto decode = [&](const auto& scale_of, const auto& value) {
    for_runs(code, shape, first, std::ssize(values), [&](std::int64_t scale, std::int64_t begin, std::int64_t end) {
      const float factor = scale_of(scale);
      for (std::int64_t i = begin; i < end; ++i) values[static_cast<std::size_t>(i - first)] = value(i, factor);
    });
  };
  const auto plain = [=](std::int64_t scale) { return scales[scale]; };
  if (code == WeightCode::int8) {
    decode(plain, [=](std::int64_t i, float scale) {
      return numerics::int8_value(static_cast<std::int8_t>(codes[i]), scale);
    });
  } else if (code == WeightCode::fp8) {
    decode(plain, [=](std::int64_t i, float scale) {
      return numerics::fp8_value(static_cast<std::uint32_t>(codes[i]), scale);
    });
  } else {
    const numerics::Nf4Scales of = numerics::nf4_scales(code, shape, scales);
    decode([&](std::int64_t block) { return numerics::absmax_of(of, block); },
           [=](std::int64_t i, float absmax) { return numerics::nf4_value(numerics::nf4_code_at(codes, i), absmax); });
  }
}

}  // namespace tandem
