#include "train/hf/bitsandbytes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/base/error.hpp"
#include "core/base/json_text.hpp"
#include "core/numerics/weight_codes.hpp"

namespace tandem {
namespace {

using numerics::parts_of;

constexpr const char* description_of_nf4 = ".quant_state.bitsandbytes__nf4";
constexpr const char* description_of_fp4 = ".quant_state.bitsandbytes__fp4";
/// Scales of the rows of a matrix in int8.
constexpr const char* row_scales = "SCB";
constexpr const char* use_originals = "use the model's bf16 or fp32 weights, of which the quantized ones were made";

std::string scales_of_int8(const std::string& name) {
  return name.substr(0, name.rfind('.') + 1) + row_scales;  // beside the weight, not below it
}

/// Float `i` of a tensor, whose alignment nobody promises.
float float_at(const StoredTensor& tensor, std::int64_t i) {
  float value = 0.0F;
  std::memcpy(&value, tensor.bytes.data() + static_cast<std::size_t>(i) * sizeof value, sizeof value);
  return value;
}

/// Whether a tensor holds the numbers of a code book, bit for bit.
bool holds(const StoredTensor& tensor, std::uint32_t size, float (*number)(std::uint32_t)) {
  if (tensor.dtype != "F32" || tensor.count != size) return false;
  for (std::uint32_t i = 0; i < size; ++i) {
    if (numerics::float_bits(float_at(tensor, i)) != numerics::float_bits(number(i))) return false;
  }
  return true;
}

void require(bool holds, const std::string& what, std::string_view why) {
  if (!holds) throw InputError(what, why, use_originals);
}

void require_finite(const std::string& what, const StoredTensor& scales, std::string_view name) {
  for (std::int64_t i = 0; i < scales.count; ++i) {
    require(std::isfinite(float_at(scales, i)), what, fmt::format("number {} of its {} is not finite", i, name));
  }
}

}  // namespace

bool Nf4Tensor::is_quantized(const std::string& name, const Find& find) {
  return find(name + description_of_nf4) != nullptr || find(name + description_of_fp4) != nullptr ||
         find(name + ".absmax") != nullptr || find(scales_of_int8(name)) != nullptr;
}

Nf4Tensor::Nf4Tensor(const std::string& what, const std::string& name, const Find& find) {
  require(find(name + description_of_fp4) == nullptr, what,
          fmt::format("{} is FP4 by bitsandbytes; read is NF4", name));
  require(find(scales_of_int8(name)) == nullptr, what, fmt::format("{} is int8 by bitsandbytes; read is NF4", name));
  const std::string weight = fmt::format("{}, {}", what, name);
  codes_ = &part(weight, name, find);
  absmax_ = &part(weight, name + ".absmax", find);
  require(holds(part(weight, name + ".quant_map", find), numerics::nf4_codes, numerics::nf4_relative), weight,
          "its quant_map is not that of NF4");
  read_description(weight, part(weight, name + description_of_nf4, find));
  if (absmax_->dtype == "U8") {
    nested_ = &part(weight, name + ".nested_absmax", find);
    require(holds(part(weight, name + ".nested_quant_map", find), 256, numerics::scale_of_byte), weight,
            "its nested_quant_map is not the signed dynamic map of 8 bits");
  }
  check_sizes(weight);
}

const StoredTensor& Nf4Tensor::part(const std::string& what, const std::string& name, const Find& find) {
  const StoredTensor* const found = find(name);
  require(found != nullptr, what, fmt::format("{} is missing", name));
  parts_.push_back(found);
  return *found;
}

void Nf4Tensor::read_description(const std::string& what, const StoredTensor& description) {
  const std::string text(reinterpret_cast<const char*>(description.bytes.data()), description.bytes.size());
  const auto json = parse_json<nlohmann::json>(text);
  require(json.is_object(), what, "its quant_state is no JSON");
  const auto number = [&](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_number() ? found->get<double>() : std::nan("");
  };
  const auto type = json.find("quant_type");
  require(type != json.end() && *type == "nf4", what, "its quant_type is not nf4");
  require(number("blocksize") == static_cast<double>(nf4_block), what,
          fmt::format("its scales are for {} elements, read are those for {}", number("blocksize"), nf4_block));
  const auto shape = json.find("shape");
  require(shape != json.end() && shape->is_array() && shape->size() == 2 &&
              std::ranges::all_of(*shape, [](const auto& x) { return x.is_number_unsigned(); }),
          what, "its quant_state has no shape of a matrix");
  shape_ = shape->get<std::vector<std::int64_t>>();
  constexpr std::int64_t most = std::int64_t{1} << 31;
  require(std::ranges::all_of(shape_, [](std::int64_t x) { return x > 0 && x < most; }), what, "its shape is no size");
  if (absmax_->dtype != "U8") return;
  require(number("nested_blocksize") == static_cast<double>(nf4_scale_block), what,
          fmt::format("scales of its scales are for {}, read are those for {}", number("nested_blocksize"),
                      nf4_scale_block));
  offset_ = static_cast<float>(number("nested_offset"));
  require(std::isfinite(offset_), what, "its nested_offset is no number");
}

std::int64_t Nf4Tensor::count() const { return shape_[0] * shape_[1]; }

void Nf4Tensor::check_sizes(const std::string& what) const {
  const std::int64_t blocks = parts_of(count(), nf4_block);
  require(std::ssize(codes_->bytes) == parts_of(count(), 2), what,
          fmt::format("it has {} bytes of codes, its shape ({}) takes {}", codes_->bytes.size(),
                      fmt::join(shape_, ", "), parts_of(count(), 2)));
  require(absmax_->count == blocks && (nested_ != nullptr || absmax_->dtype == "F32"), what,
          fmt::format("its absmax is {} of {}, not {} of F32 or U8", absmax_->count, absmax_->dtype, blocks));
  if (nested_ == nullptr) return require_finite(what, *absmax_, "absmax");
  require(nested_->count == parts_of(blocks, nf4_scale_block) && nested_->dtype == "F32", what,
          fmt::format("its nested_absmax is {} of {}", nested_->count, nested_->dtype));
  require_finite(what, *nested_, "nested_absmax");
}

float Nf4Tensor::absmax(std::int64_t block) const {
  if (nested_ == nullptr) return float_at(*absmax_, block);
  const float relative =
      numerics::scale_of_byte(static_cast<std::uint32_t>(absmax_->bytes[static_cast<std::size_t>(block)]));
  return numerics::add(numerics::mul(relative, float_at(*nested_, block / nf4_scale_block)), offset_);
}

void Nf4Tensor::read(std::int64_t first, std::span<float> values) const {
  const std::int64_t end = first + std::ssize(values);
  for (std::int64_t i = first; i < end;) {
    const std::int64_t block = i / nf4_block;
    const float scale = absmax(block);
    for (const std::int64_t last = std::min(end, (block + 1) * nf4_block); i < last; ++i) {
      const std::uint32_t code = numerics::nf4_code_at(codes_->bytes.data(), i);
      values[static_cast<std::size_t>(i - first)] = numerics::nf4_value(code, scale);
    }
  }
}

void Nf4Tensor::give_codes(std::int64_t first, std::int64_t count, std::int64_t to, CodeSink& sink) const {
  sink.codes(to, codes_->bytes.subspan(static_cast<std::size_t>(first / 2), static_cast<std::size_t>((count + 1) / 2)));
}

void Nf4Tensor::give_scales(std::int64_t first, std::int64_t count, std::int64_t to, CodeSink& sink) const {
  std::vector<float> scales;
  for (std::int64_t block = first / nf4_block; block < parts_of(first + count, nf4_block); ++block) {
    scales.push_back(absmax(block));
  }
  sink.scales(to, scales);
}

void Nf4Tensor::give_coded_scales(CodeSink& sink) const {
  std::vector<float> floats(static_cast<std::size_t>(parts_of(absmax_->count, 4)));
  std::memcpy(floats.data(), absmax_->bytes.data(), absmax_->bytes.size());
  floats.push_back(offset_);
  for (std::int64_t i = 0; i < nested_->count; ++i) floats.push_back(float_at(*nested_, i));
  sink.scales(0, floats);
}

}  // namespace tandem
